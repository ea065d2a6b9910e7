"""Measures transfers between devices of this host: from one device to another, and sums over a group.

``python -m runtime.profiling.link_profile --parent PID`` reads a ``LinkMeasurementRequest`` as JSON on
stdin, forks a rank for each device, and writes lines of ``runtime.wire.measurement`` to stdout. The ranks
communicate as trainers do, through the communicator of the job's backend: gloo over loopback, or NCCL
between the GPUs of this host. With fewer than two GPUs there is nothing to measure with NCCL, and the
result is empty.

The NCCL side is *not run in this project's tests, which have no GPU*.
"""

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

import msgspec
import torch
from torch import Tensor

from runtime.device import CPU, device_runtime, device_time_s
from runtime.groups.backends import make_communicator
from runtime.groups.communicator import Communicator, Members
from runtime.groups.store import Rendezvous
from runtime.parent import die_with_parent, run_child
from runtime.wire.measurement import (
    INVALID_EXIT,
    AllReduceTiming,
    LinkMeasurementRequest,
    LinkMeasurements,
    MeasurementProgress,
    PointToPointTiming,
    claim_stdout,
    spread_of,
)

HOST = "127.0.0.1"
MESSAGE_SIZES_BYTES = (1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22)
"""Sizes to measure, ascending: if time runs out, the largest are skipped."""
_ALWAYS_MEASURED = 2
"""Number of sizes of each kind that are measured however long it takes: a line has two unknowns."""
_FEWEST_REPEATS, _MOST_REPEATS = 3, 31


class LinkBenchmark:
    """One rank's part in the measurements; all ranks call the same methods in the same order.

    Rank 0 measures the times and sends the other ranks the number of repeats.
    """

    def __init__(self, communicator: Communicator, device: torch.device, budget_s: float) -> None:
        self._communicator = communicator
        self._device = device
        self._ends_at = time.monotonic() + budget_s
        self._share_s = budget_s / (len(MESSAGE_SIZES_BYTES) * communicator.size)

    @property
    def is_first(self) -> bool:
        return self._communicator.rank == 0

    def measure_send(self, size_bytes: int, *, always: bool) -> PointToPointTiming | None:
        """Measure a round trip between ranks 0 and 1, and return half of it.

        :returns: ``None`` if no time is left, and on ranks other than 0.
        """
        payload = self._payload(size_bytes)

        def there_and_back() -> None:
            steps = [self._send, self._receive]
            for step in steps if self.is_first else reversed(steps):
                step(payload, 1 - self._communicator.rank)

        half = [time_s / 2 for time_s in self._repeat(there_and_back, (0, 1), always)]
        return PointToPointTiming(size_bytes=size_bytes, time=spread_of(half)) if half else None

    def measure_all_reduce(
        self, size_bytes: int, members: Members, *, always: bool
    ) -> AllReduceTiming | None:
        """Measure a sum over ``members``.

        :returns: ``None`` if no time is left, and on ranks other than 0.
        """
        payload = self._payload(size_bytes)

        def sum_up() -> None:
            self._communicator.wait(self._communicator.all_reduce(payload, members))

        times_s = self._repeat(sum_up, members, always)
        if not times_s:
            return None
        return AllReduceTiming(members=len(members), size_bytes=size_bytes, time=spread_of(times_s))

    def _payload(self, size_bytes: int) -> Tensor:
        return torch.zeros(size_bytes // 4, dtype=torch.float32, device=self._device)

    def _send(self, payload: Tensor, peer: int) -> None:
        self._communicator.wait(self._communicator.send(payload, peer, "activation"))

    def _receive(self, payload: Tensor, peer: int) -> None:
        self._communicator.wait(self._communicator.receive(payload, peer, "activation"))

    def _repeat(self, run: Callable[[], None], members: Members, always: bool) -> list[float]:
        """Return the seconds of each run after a first one, which warms up and shows how many repeats there is
        time for. Ranks other than 0 return none; only ``members`` run it.
        """
        if self._communicator.rank not in members:
            return []
        affordable = always or time.monotonic() < self._ends_at
        if not self._broadcast(int(affordable), members):
            return []
        warm_s = self._time(run)
        wanted = max(_FEWEST_REPEATS, min(_MOST_REPEATS, int(self._share_s / max(warm_s, 1e-6))))
        times_s = [self._time(run) for _ in range(self._broadcast(wanted, members))]
        return times_s if self.is_first else []

    def _broadcast(self, number: int, members: Members) -> int:
        """Return rank 0's number on all members."""
        value = torch.tensor([float(number) if self.is_first else 0.0], device=self._device)
        self._communicator.wait(self._communicator.all_reduce(value, members))
        return int(value.item())

    def _time(self, run: Callable[[], None]) -> float:
        start = device_time_s(self._device)
        run()
        return device_time_s(self._device) - start


def measure_links(
    communicator: Communicator,
    device: torch.device,
    budget_s: float,
    report: Callable[[MeasurementProgress], None],
) -> tuple[tuple[PointToPointTiming, ...], tuple[AllReduceTiming, ...]]:
    """Measure all sizes and groups; only rank 0 returns results.

    :param communicator: formed with the groups that ``measured_groups`` returns for its size.
    """
    meter = LinkBenchmark(communicator, device, budget_s)
    groups = [tuple(range(members)) for members in range(2, communicator.size + 1)]
    total = 1 + len(groups)
    sent = [
        meter.measure_send(size, always=index < _ALWAYS_MEASURED)
        for index, size in enumerate(MESSAGE_SIZES_BYTES)
    ]
    report(MeasurementProgress(done=1, total=total))
    reduced: list[AllReduceTiming | None] = []
    for done, group in enumerate(groups, start=2):
        reduced += [
            meter.measure_all_reduce(size, group, always=index < _ALWAYS_MEASURED)
            for index, size in enumerate(MESSAGE_SIZES_BYTES)
        ]
        report(MeasurementProgress(done=done, total=total))
    return tuple(s for s in sent if s is not None), tuple(r for r in reduced if r is not None)


def measured_groups(size: int) -> list[Members]:
    """Return the groups to measure in a world of ``size`` ranks: the first 2, 3, … ranks."""
    return [tuple(range(members)) for members in range(2, size)]


def run_rank(
    order: LinkMeasurementRequest, rank: int, size: int, report: Callable[[msgspec.Struct], None]
) -> None:
    """Form the groups and measure; rank 0 reports the result."""
    device = torch.device("cuda", rank) if order.backend == "nccl" else CPU
    if order.backend == "nccl":
        torch.cuda.set_device(device)
    rendezvous = Rendezvous(host=HOST, port=order.port, token=order.token, generation=1)
    with make_communicator(
        order.backend, rendezvous, rank, (HOST,) * size, device_runtime(device)
    ) as communicator:
        communicator.form(measured_groups(size))
        sent, reduced = measure_links(
            communicator, device, order.budget_s, report if rank == 0 else lambda progress: None
        )
        # No rank leaves while another is still receiving.
        communicator.wait(communicator.all_reduce(torch.zeros(1, device=device), communicator.world))
    if rank == 0:
        over = "NCCL between the GPUs of one host" if order.backend == "nccl" else "gloo over loopback"
        report(LinkMeasurements(where=f"{size} processes of one host, {over}", sent=sent, reduced=reduced))


def fork_ranks(order: LinkMeasurementRequest, size: int, report: Callable[[msgspec.Struct], None]) -> int:
    """Run all ranks in separate processes and return an exit code; if one fails, the others are killed."""
    parent = os.getpid()
    running: set[int] = set()
    try:
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                run_child(parent, partial(run_rank, order, rank, size, report))
            running.add(pid)
        while running:
            pid, status = os.wait()
            running.discard(pid)
            if status != 0:
                return 1
    finally:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return 0


def main() -> int:
    """Measure links for ``ftd profile``, which does not import torch."""
    parser = argparse.ArgumentParser(
        prog="python -m runtime.profiling.link_profile", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--parent", type=int, required=True, help="process id of the caller")
    die_with_parent(parser.parse_args().parent)
    report = claim_stdout()
    try:
        order = msgspec.json.decode(sys.stdin.buffer.read(), type=LinkMeasurementRequest)
    except msgspec.DecodeError as error:
        sys.stderr.write(f"no LinkMeasurementRequest on stdin: {error}\n")
        return INVALID_EXIT
    devices = torch.cuda.device_count() if order.backend == "nccl" else order.max_members
    size = min(order.max_members, devices)
    if size < 2:
        report(LinkMeasurements(where="nowhere: there are not two GPUs", sent=(), reduced=()))
        return 0
    return fork_ranks(order, size, report)


if __name__ == "__main__":
    sys.exit(main())
