"""Availability traces: when nodes come and go, read from files or generated from a failure model."""
