"""Measurements that the planner needs: layers, links between devices, and floating-point operations."""
