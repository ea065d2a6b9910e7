"""Images of plans, runs, soaks, traces and survival curves."""
