"""The trainer process, and the zygote that forks it."""
