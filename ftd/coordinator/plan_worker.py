"""The process that precomputes: ``python -P -m ftd.coordinator.plan_worker PARENT``, one for each build.

It imports the planner, reads one ``PrecomputeRequest`` from stdin, which may come later or never, and
answers with frames on
stdout (``plan_process`` is the other end): how far it is, what it has so far, and at last
``PrecomputeFinished`` or ``PrecomputeRejected``.
A frame is four bytes of length, big endian, and msgpack. It runs at low priority, and the kernel ends it with its
parent.
"""

import os
import sys
import time
from typing import BinaryIO

import msgspec

from planner.errors import BatchError, PlanningError, SolverError
from planner.values import ModelProfile, Policy
from runtime.parent import die_with_parent

MAX_FRAME_BYTES = 256 * 1024 * 1024
"""Templates and instantiations for ten thousand nodes take a tenth of it."""
LENGTH_BYTES = 4
_NICENESS = 10
_TELL_EVERY_S = 0.1
_FIRST_PART_S = 0.5
"""What was made since the first part is sent after this time, then after twice as long, and so on: each part
holds all, so that any of them will do."""


class PrecomputeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to precompute."""

    profile: ModelProfile
    policy: Policy
    max_nodes: int
    present: int
    """Nodes that are there: their number comes first."""


class PrecomputeProgress(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Instantiations made, of all."""

    done: int
    total: int


class PartialResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All that was made so far; the first has what is needed for ``Work.present`` nodes."""

    precomputed: msgspec.Raw
    """A ``planner.precomputed.Precomputed``."""


class PrecomputeFinished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The ``PartialResult`` before this one has everything."""


class PrecomputeRejected(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The planner cannot plan for this job; ``reason`` is for the user."""

    reason: str


PrecomputeAnswer = PrecomputeProgress | PartialResult | PrecomputeFinished | PrecomputeRejected


def write_frame(stream: BinaryIO, value: msgspec.Struct) -> None:
    """One frame, flushed."""
    payload = msgspec.msgpack.encode(value)
    stream.write(len(payload).to_bytes(LENGTH_BYTES, "big") + payload)
    stream.flush()


class _Teller:
    """Sends progress and parts, neither too often."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._told_at = time.monotonic()
        self._part_due_at = 0.0
        self._part_every_s = _FIRST_PART_S

    def progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done == 0 or now - self._told_at >= _TELL_EVERY_S:
            self._told_at = now
            write_frame(self._out, PrecomputeProgress(done=done, total=total))

    def part_is_due(self, done: int) -> bool:
        """The first as soon as one count of nodes is done."""
        if done < 1 or time.monotonic() < self._part_due_at:
            return False
        self._part_due_at = time.monotonic() + self._part_every_s
        self._part_every_s *= 2
        return True


def precompute(given: PrecomputeRequest, out: BinaryIO) -> None:
    """Precompute, and tell of it."""
    # Here, so that the daemon, which knows only the frames, does not load numpy and scipy in its event loop.
    from planner.planner import Planner

    teller = _Teller(out)
    try:
        planner = Planner(given.profile, given.policy)
        teller.progress(0, given.max_nodes - planner.n0 + 1)

        def told(done: int, total: int) -> None:
            teller.progress(done, total)
            if done < total and teller.part_is_due(done):
                send_part()

        def send_part() -> None:
            write_frame(
                out, PartialResult(precomputed=msgspec.Raw(msgspec.msgpack.encode(planner.precomputed())))
            )

        planner.precompute(given.max_nodes, told, present=given.present)
        send_part()
        write_frame(out, PrecomputeFinished())
    except PlanningError as error:
        write_frame(out, PrecomputeRejected(reason=explain(error)))


def explain(error: PlanningError) -> str:
    """The planner's error for a user, with the remedy where the error carries one."""
    if isinstance(error, BatchError) and error.nearest and str(error.nearest[0]) not in str(error):
        near = " or ".join(str(batch) for batch in error.nearest)
        return f"{error} (training.global_batch: the nearest that can: {near})"
    if isinstance(error, SolverError):
        return f'{error} (planner.batch_solver = "exact" needs no solver)'
    return str(error)


def main() -> None:
    """The process."""
    die_with_parent(int(sys.argv[1]))
    os.nice(_NICENESS)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What a library prints must not get between the frames.
    import planner.planner  # noqa: F401  # Most of a second, which nobody waits for while the model is measured.

    header = sys.stdin.buffer.read(LENGTH_BYTES)
    if not header:
        return  # It was started in advance, and is not needed.
    length = int.from_bytes(header, "big")
    given = msgspec.msgpack.decode(sys.stdin.buffer.read(length), type=PrecomputeRequest)
    precompute(given, out)


if __name__ == "__main__":
    main()
