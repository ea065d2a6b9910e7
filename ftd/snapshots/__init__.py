"""A node's snapshots in its daemon's service: kept, staged for trainers, persisted, read again, repaired."""
