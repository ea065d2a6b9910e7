"""Ranks whose tensors are on devices and travel through host memory: their operations, and the expected
results.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from runtime.device import DeviceRuntime
from runtime.groups.communicator import Communicator
from runtime.groups.staged import StagedGlooCommunicator
from runtime.groups.store import Rendezvous
from tests.helpers.harness import TOKEN, ServerThread
from tests.helpers.waiting import PATIENCE_S


@contextlib.contextmanager
def staged_world(size: int, make: Callable[[int], Any]) -> Iterator[list[StagedGlooCommunicator]]:
    """Return formed communicators of all ranks, each with a device of its own."""
    with ServerThread() as server, ThreadPoolExecutor(size) as pool:
        where = Rendezvous(host="127.0.0.1", port=server.port, token=TOKEN, generation=1)
        runtimes = [make(rank) for rank in range(size)]
        ranks = [
            StagedGlooCommunicator(where, rank, size, "127.0.0.1", runtime)
            for rank, runtime in enumerate(runtimes)
        ]
        list(pool.map(lambda one: one.form([(0, 1)]), ranks))
        try:
            yield ranks
        finally:
            for one in ranks:
                one.abort()
                one.close()
            for runtime in runtimes:
                runtime.end()


def on_all(ranks: Sequence[StagedGlooCommunicator]) -> list[Any]:
    """Call ``run_operations`` on each rank, with one thread for each."""

    def run(one: Any) -> Any:
        with one._runtime.computing():
            return run_operations(one, one._runtime)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return [future.result(PATIENCE_S) for future in [pool.submit(run, one) for one in ranks]]


def run_operations(one: Communicator, runtime: DeviceRuntime) -> list[list[float]]:
    """Run every operation on tensors that are still being computed, and use the results at once."""
    rank, size = one.rank, one.size
    members = one.world
    own = torch.arange(6.0) + 10.0 * (rank + 1)
    results: list[Tensor] = []
    into = torch.full((6,), 7.0)
    pendings = [one.send(own * 2, (rank + 1) % size, "activation")]
    pendings.append(one.receive(into, (rank - 1) % size, "activation"))
    summed = own + 1
    pendings.append(one.all_reduce(summed, members))
    gathered, ranges, part = torch.empty(6 * size), torch.empty(2 * size), torch.empty(2)
    pendings.append(one.all_gather(gathered, own * 3, members))
    pendings.append(one.all_gather(ranges, own[:2] * 5, members))
    pendings.append(one.reduce_scatter(part, torch.arange(2.0 * size) * (rank + 1), members))
    for pending in reversed(pendings):
        one.wait(pending)
    for tensor in (into, summed, gathered, ranges, part):
        results.append(tensor * 1)
    return [runtime.values(tensor) for tensor in results]


def expected(rank: int, size: int) -> list[list[float]]:
    def own(peer: int) -> Tensor:
        return torch.arange(6.0) + 10.0 * (peer + 1)

    ranks = range(size)
    reduced = sum(torch.arange(2.0 * size) * (peer + 1) for peer in ranks)
    assert isinstance(reduced, Tensor)
    return [
        (own((rank - 1) % size) * 2).tolist(),
        torch.stack([own(peer) + 1 for peer in ranks]).sum(0).tolist(),
        torch.cat([own(peer) * 3 for peer in ranks]).tolist(),
        torch.cat([own(peer)[:2] * 5 for peer in ranks]).tolist(),
        reduced[2 * rank : 2 * rank + 2].tolist(),
    ]


def results_are_right(make: Callable[[int], Any], times: int) -> bool:
    with staged_world(3, make) as ranks:
        for _ in range(times):
            if on_all(ranks) != [expected(rank, 3) for rank in range(3)]:
                return False
    return True
