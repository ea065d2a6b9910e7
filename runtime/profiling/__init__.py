"""The model and the network, measured: what the planner reckons with."""
