"""Records of what a trainer's threads do and for how long: progress, waits, compute times and traces."""
