"""Faults that are injected on purpose: chaos scenarios on running clusters, and the simulator."""
