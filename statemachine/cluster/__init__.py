"""The cluster machine: the coordinator's whole protocol. Start at ``machine``."""
