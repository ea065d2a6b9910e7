"""Snapshots that trainers write into their node's arena while they train (REFT §4.1)."""
