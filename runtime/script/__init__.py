"""``from ftd import Snapshotter``: snapshots of any PyTorch script's state in its host's memory."""
