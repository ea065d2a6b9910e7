"""Configuration that people write by hand: ``ftd.toml`` for the daemons, and job files for the training."""
