"""Measures a job's model and the network between devices, each in a separate process that loads torch."""
