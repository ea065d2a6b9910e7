"""What it takes to move bytes between the devices of this machine, measured, and as a straight line."""

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
"""Of all, with the start of torch in it: much later than ever, if nothing is broken."""
_MOST_BYTES_PER_S = 1e15
_LEAST_SHARE = 0.01
"""Of the largest message's time, taken by its bytes where no slope is seen: no bandwidth is infinite."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFit:
    """A link that explains measurements, and how well it does."""

    link: Link
    error: float
    """By which a measurement typically differs: 0.1 is a tenth more or less. Exactly, e to the root of the
    mean squared logarithm of the ratio, less 1."""


async def measure_links(backend: str, told: ProgressCallback) -> LinkMeasurements:
    """Point to point and all-reduce between processes of this machine.

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
            told=told,
            timeout_s=_TIMEOUT_S,
        )


def fit_link(links: LinkMeasurements) -> LinkFit:
    """One way from stage to stage: latency + bytes / bandwidth."""
    return _fit([(1.0, float(sent.size_bytes), sent.time.median_ms) for sent in links.sent])


def fit_ring(links: LinkMeasurements) -> LinkFit:
    """One hop of a ring: an all-reduce of s bytes among g is 2·(g − 1) hops of s / g bytes each, which is how
    the planner counts it (``planner.values.ModelProfile.ring``)."""
    points = []
    for reduced in links.reduced:
        hops = 2.0 * (reduced.members - 1)
        points.append((hops, hops * reduced.size_bytes / reduced.members, reduced.time.median_ms))
    return _fit(points)


def _fit(points: Sequence[tuple[float, float, float]]) -> LinkFit:
    """Least squares of the logarithms: twice too long is as far off as twice too short, at any size.

    :param points: at least two of (latencies, bytes, milliseconds) with different shares of the two.
    """
    table = np.array(points)
    factors, times_ms = table[:, :2], np.maximum(table[:, 2], 1e-9)
    # Unknowns as shares of the least latency and of the largest message's time: both are about 1.
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
