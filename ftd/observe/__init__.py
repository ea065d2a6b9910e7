"""What is observed of a cluster: its public events and states, folded into a model of the run."""
