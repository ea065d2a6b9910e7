"""Layers out of what several nodes keep: read, decoded, verified, put where they are wanted."""
