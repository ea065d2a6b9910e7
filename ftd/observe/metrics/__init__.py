"""``/metrics`` for Prometheus: what coordinator and nodes count, out of what is there anyway."""
