"""Chaos that a node does to itself."""
