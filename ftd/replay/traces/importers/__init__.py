"""Importers of trace files, one module for each format."""
