"""The trainer process: how it is forked, how it communicates with its node, and its main loop."""
