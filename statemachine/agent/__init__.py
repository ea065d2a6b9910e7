"""The agent machine: one node daemon's part of the protocol. Start at ``machine``."""
