"""Messages between our processes. Nothing here imports torch, because the daemons import it."""
