"""The training step and its commit, on one rank of one generation's layout."""
