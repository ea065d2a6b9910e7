"""Clusters under random faults for hours, and what must hold meanwhile."""
