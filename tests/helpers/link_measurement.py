"""The process that measures the links between devices."""

import os
import subprocess
import sys

import msgspec

from runtime.wire.measurement import LinkMeasurementRequest
from tests.helpers.harness import ROOT


def measure(order: LinkMeasurementRequest | bytes) -> "subprocess.Popen[bytes]":
    """Start the process that measures links for ``ftd profile``."""
    process = subprocess.Popen(
        [sys.executable, "-m", "runtime.profiling.link_profile", "--parent", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdin is not None
    process.stdin.write(order if isinstance(order, bytes) else msgspec.json.encode(order))
    process.stdin.close()
    process.stdin = None
    return process


def order_for(port: int, token: str, backend: str = "gloo") -> LinkMeasurementRequest:
    return LinkMeasurementRequest(port=port, token=token, backend=backend, max_members=2, budget_s=0.1)
