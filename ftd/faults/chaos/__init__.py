"""Chaos scenarios: which faults happen when and to whom, and what is expected of the cluster."""
