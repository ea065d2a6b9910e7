"""The process that precomputes: ``python -P -m ftd.coordinator.plan_worker PARENT``, one process for each
build.

It imports the planner, reads one ``PrecomputeRequest`` from stdin, which may come later or never, and
answers with frames on stdout (``plan_process`` is the other end): its progress, partial results, and
finally ``PrecomputeFinished`` or ``PrecomputeRejected``. The process runs at low priority, and the kernel
ends it with its parent.
"""

import os
import sys
import time
from typing import BinaryIO

import msgspec

from planner.errors import BatchError, PlanningError, SolverError
from planner.values import ModelProfile, Policy
from runtime.parent import die_with_parent
from runtime.wire.frames import Decoder, Frame, encode

MAX_FRAME_BYTES = 256 * 1024 * 1024
"""Largest frame. Templates and instantiations for ten thousand nodes take a tenth of this."""
_NICENESS = 10
_PROGRESS_EVERY_S = 0.1
_FIRST_RESULT_INTERVAL_S = 0.5
"""Time from the first partial result to the second; each later interval is twice as long. Each result contains
all earlier ones, so that any of them can be used.
"""


class PrecomputeRequest(Frame, frozen=True, kw_only=True):
    """A job to precompute templates and instantiations for."""

    profile: ModelProfile
    policy: Policy
    max_nodes: int
    present: int
    """Nodes that are present: their number is precomputed first."""


class PrecomputeProgress(Frame, frozen=True, kw_only=True):
    """Number of instantiations made, and of all."""

    done: int
    total: int


class PartialResult(Frame, frozen=True, kw_only=True):
    """Everything that was precomputed so far; the first one has what ``PrecomputeRequest.present`` nodes need."""

    precomputed: msgspec.Raw
    """An encoded ``planner.precomputed.Precomputed``."""


class PrecomputeFinished(Frame, frozen=True, kw_only=True):
    """The ``PartialResult`` before this one is complete."""


class PrecomputeRejected(Frame, frozen=True, kw_only=True):
    """The planner cannot plan for this job; ``reason`` is for the user."""

    reason: str


PrecomputeAnswer = PrecomputeProgress | PartialResult | PrecomputeFinished | PrecomputeRejected


def write_frame(stream: BinaryIO, frame: Frame) -> None:
    """Write one frame and flush."""
    stream.write(encode(frame))
    stream.flush()


class _Reporter:
    """A sender of progress and partial results at a limited rate."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._reported_at = time.monotonic()
        self._part_due_at = 0.0
        self._part_every_s = _FIRST_RESULT_INTERVAL_S

    def progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done == 0 or now - self._reported_at >= _PROGRESS_EVERY_S:
            self._reported_at = now
            write_frame(self._out, PrecomputeProgress(done=done, total=total))

    def part_is_due(self, done: int) -> bool:
        """Return whether to send a partial result. The first is due as soon as one number of nodes is done."""
        if done < 1 or time.monotonic() < self._part_due_at:
            return False
        self._part_due_at = time.monotonic() + self._part_every_s
        self._part_every_s *= 2
        return True


def precompute(request: PrecomputeRequest, out: BinaryIO) -> None:
    """Precompute, and write answers."""
    # Import it here, so that the daemon, which needs only the frames, does not load numpy and scipy in its
    # event loop.
    from planner.planner import Planner

    reporter = _Reporter(out)
    try:
        planner = Planner(request.profile, request.policy)
        reporter.progress(0, request.max_nodes - planner.n0 + 1)

        def on_progress(done: int, total: int) -> None:
            reporter.progress(done, total)
            if done < total and reporter.part_is_due(done):
                send_part()

        def send_part() -> None:
            write_frame(
                out, PartialResult(precomputed=msgspec.Raw(msgspec.msgpack.encode(planner.precomputed())))
            )

        planner.precompute(request.max_nodes, on_progress, present=request.present)
        send_part()
        write_frame(out, PrecomputeFinished())
    except PlanningError as error:
        write_frame(out, PrecomputeRejected(reason=explain(error)))


def explain(error: PlanningError) -> str:
    """Return the planner's error for a user, with the remedy if the error carries one."""
    if isinstance(error, BatchError) and error.nearest and str(error.nearest[0]) not in str(error):
        near = " or ".join(str(batch) for batch in error.nearest)
        return f"{error} (training.global_batch: the nearest that can: {near})"
    if isinstance(error, SolverError):
        return f'{error} (planner.batch_solver = "exact" needs no solver)'
    return str(error)


def main() -> None:
    """Run the process."""
    die_with_parent(int(sys.argv[1]))
    os.nice(_NICENESS)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # What a library prints must not get between the frames.
    import planner.planner  # noqa: F401  # Most of a second, which nobody waits for while the model is measured.

    decoder: Decoder[PrecomputeRequest] = Decoder(PrecomputeRequest)
    while data := os.read(0, 65536):  # At the end: the process was started in advance and is not needed.
        for request in decoder.feed(data):
            precompute(request, out)
            return


if __name__ == "__main__":
    main()
