"""Prometheus metrics of coordinator and nodes, served at ``/metrics``."""
