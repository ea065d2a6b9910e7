"""Clusters on one machine (``ftd local``), and the faults that need control of their processes."""
