"""Chaos as a script: faults with their moments and targets, and what is expected of the cluster."""
