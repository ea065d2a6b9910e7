"""Which pipelines to make of so many nodes, and each one's share of the batch (Oobleck §4.2)."""
