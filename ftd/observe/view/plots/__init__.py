"""Pictures: of plans, runs, soaks, traces, survival."""
