"""What people write by hand: ``ftd.toml`` for the daemons, job files for the training."""
