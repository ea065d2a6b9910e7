"""Faults on purpose: chaos scenarios on running clusters, and the simulator."""
