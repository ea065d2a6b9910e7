"""Measuring a job's model and the network between devices, each in a process of its own that has torch."""
