"""Benchmarks: every figure that ftd claims about speed or memory is asserted here, never in a test.

Each module is a command (``python -m benchmarks.recovery --help``) that prints a table, writes JSON under
``benchmarks/results/`` and exits with 1 when a stated limit is missed.
"""
