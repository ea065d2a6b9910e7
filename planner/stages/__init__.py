"""What stages and pipelines of them take: time under 1F1B, and memory."""
