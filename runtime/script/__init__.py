"""``from ftd import Snapshotter``: the state of any PyTorch script, kept in its host's memory."""
