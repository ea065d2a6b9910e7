"""Measures transfers between the devices of this machine, and fits a linear model to them."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from ftd.cli.profiling.process import ProgressCallback, run_measurement
from ftd.node.rendezvous import RendezvousServer
from planner.values import Link
from runtime.wire.measurement import LinkMeasurementRequest, LinkMeasurements

MOST_MEMBERS = 4
_BUDGET_S = 3.0
_TIMEOUT_S = 60.0
"""Timeout of the whole measurement, including the start of torch; far above the time of a working one."""
_MOST_BYTES_PER_S = 1e15
_LEAST_SHARE = 0.01
"""Smallest share of the largest message's time that its bytes take, so that a flat measurement gives no infinite
bandwidth.
"""
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """Link fitted to measurements, and the quality of the fit."""

    link: Link
    error: float
    """Typical relative deviation of a measurement: 0.1 is a tenth more or less. Exactly: e to the power of the
    root mean square of the logarithm of the ratio, minus 1.
    """


async def measure_links(backend: str, on_progress: ProgressCallback) -> LinkMeasurements:
    """Measure point-to-point transfers and all-reduces between processes of this machine.

    :raises InternalError: the processes failed, or took too long.
    """
    token = secrets.token_hex(16)
    async with RendezvousServer(token) as server:
        order = LinkMeasurementRequest(
            port=server.port, token=token, backend=backend, max_members=MOST_MEMBERS, budget_s=_BUDGET_S
        )
        return await run_measurement(
            "runtime.profiling.link_profile",
            order=msgspec.json.encode(order),
            answer=LinkMeasurements,
            on_progress=on_progress,
            timeout_s=_TIMEOUT_S,
        )


def fit_link(links: LinkMeasurements) -> LinkFit:
    """Fit a transfer from stage to stage, one way: latency + bytes / bandwidth."""
    return _fit([(1.0, float(sent.size_bytes), sent.time.median_ms) for sent in links.sent])


def fit_ring(links: LinkMeasurements) -> LinkFit:
    """Fit one hop of a ring.

    An all-reduce of s bytes among g devices is 2·(g − 1) hops of s / g bytes each, as the planner counts it
    (``planner.values.ModelProfile.ring``).
    """
    points = []
    for reduced in links.reduced:
        hops = 2.0 * (reduced.members - 1)
        points.append((hops, hops * reduced.size_bytes / reduced.members, reduced.time.median_ms))
    return _fit(points)


def _fit(points: Sequence[tuple[float, float, float]]) -> LinkFit:
    """Fit by least squares of logarithms: twice too long is as wrong as twice too short, at any size.

    :param points: two or more points (latencies, bytes, milliseconds) with different ratios of the first two.
    """
    table = np.array(points)
    factors, times_ms = table[:, :2], np.maximum(table[:, 2], 1e-9)
    # Scale the unknowns by the smallest latency and the time per byte of the largest message: both are about 1.
    largest = int(np.argmax(factors[:, 1]))
    scale = np.array([np.min(times_ms / factors[:, 0]), times_ms[largest] / factors[largest, 1]])

    def residuals(shares: Floats) -> Floats:
        logarithms: Floats = np.log(factors @ (shares * scale) / times_ms)
        return logarithms

    found = least_squares(
        residuals, np.array([0.5, 0.5]), bounds=([0.0, _LEAST_SHARE], np.inf), xtol=1e-12, ftol=1e-12
    )
    latency_ms, byte_ms = (float(value) for value in found.x * scale)
    return LinkFit(
        link=Link(latency_ms=latency_ms, bytes_per_s=min(1e3 / byte_ms, _MOST_BYTES_PER_S)),
        error=float(np.expm1(np.sqrt(np.mean(found.fun**2)))),
    )
