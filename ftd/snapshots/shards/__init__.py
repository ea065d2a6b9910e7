"""The snapshot shards that a node holds, its own and others', and their transfer between nodes."""
