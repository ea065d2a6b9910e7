"""Restoring layers from what several nodes hold: reading, decoding, verifying and placing them."""
