"""The trainer process: how it is forked, how it talks to its node, and its main loop."""
