"""Small jobs and traces for tests of recovery policies."""

from ftd.replay.job import PublishedThroughput, ReplayJob
from ftd.replay.policy import Change
from ftd.replay.traces.trace import Trace, TraceEvent
from planner.values import LayerProfile, Link, ModelProfile, Policy

MB = 10**6


def make_job(
    *,
    layers: int = 8,
    fewest: int = 2,
    tolerate: int = 1,
    published: dict[str, PublishedThroughput] | None = None,
    state_bytes: int = 100 * MB,
) -> ReplayJob:
    """Return a job of equal layers, of which one replica needs ``fewest`` nodes of one device.

    A layer takes 30 ms for each of 64 microbatches of one sample, and its state moves at 1 GB/s.
    """
    layer = LayerProfile(
        forward_ms=10.0,
        backward_ms=20.0,
        parameter_bytes=state_bytes // 4,
        gradient_bytes=0,
        optimizer_bytes=state_bytes - state_bytes // 4,
        activation_bytes=0,
        output_bytes=0,
    )
    return ReplayJob(
        name="small",
        source="test",
        profile=ModelProfile(
            layers=(layer,) * layers,
            microbatch_rows=1,
            device_memory_bytes=-(-layers // fewest) * state_bytes,
            link=Link(latency_ms=0.0, bytes_per_s=1e9),
            ring=Link(latency_ms=0.0, bytes_per_s=1e15),
        ),
        policy=Policy(global_batch=64, microbatch_rows=1, tolerate=tolerate),
        published=published or {},
    )


def linear(**fields: object) -> PublishedThroughput:
    """Return published constants: one sample a second for each node, in iterations of 10 samples."""
    constants = {"samples_per_s": 10.0, "nodes": 10, "exponent": 1.0, "global_batch": 10.0, "restart_s": 5.0}
    return PublishedThroughput(**(constants | fields))  # type: ignore[arg-type]


def names(count: int) -> tuple[str, ...]:
    """Return the names of the first nodes."""
    return tuple(f"n{index}" for index in range(count))


def change(at_s: float, nodes: tuple[str, ...], *, running: bool = True, **fields: object) -> Change:
    """Return a change as the replay reports it."""
    return Change(at_s=at_s, nodes=nodes, until_s=at_s + 1e6, running=running, **fields)  # type: ignore[arg-type]


def make_trace(count: int, *events: tuple[float, str, str], end_s: float, notice_s: float = 0.0) -> Trace:
    """Return a trace that begins with ``count`` nodes; its events are times, ``add`` or ``remove``, and nodes."""
    begin = [TraceEvent(at_s=0.0, kind="add", node=node) for node in names(count)]
    later = [
        TraceEvent(
            at_s=at_s,
            kind="add" if kind == "add" else "remove",
            node=node,
            notice_s=notice_s if kind == "remove" else 0.0,
        )
        for at_s, kind, node in events
    ]
    return Trace(name="trace", source="test", events=(*begin, *later), end_s=end_s)
