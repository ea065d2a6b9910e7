"""The choice of pipelines for a number of nodes, and each pipeline's share of the batch (Oobleck §4.2)."""
