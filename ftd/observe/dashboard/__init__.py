"""A page to watch: what the coordinator publishes, shown in a browser while it happens."""
