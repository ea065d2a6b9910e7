"""Snapshots and persistent checkpoints of the whole cluster: when, complete or given up, kept where."""
