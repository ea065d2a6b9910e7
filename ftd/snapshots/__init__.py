"""The snapshots of a node: holding, sending, restoring, persisting, scrubbing and repairing them in its
daemon.
"""
