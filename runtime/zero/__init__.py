"""ZeRO-1: optimizer state shared out among owners, and replicas of it on the host (AOR)."""
