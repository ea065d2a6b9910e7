"""Checks of ``ftd doctor``: whether this host is ready to join a cluster. Each one returns a fact, or a remedy."""
