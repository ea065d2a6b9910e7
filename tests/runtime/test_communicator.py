"""Communicators over real gloo: what they transfer, and that ``abort`` always frees the main thread."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.device import DeviceRuntime
from runtime.groups.backends import make_communicator
from runtime.groups.communicator import (
    MAX_GROUP_TIMEOUT_S,
    MIN_GROUP_TIMEOUT_S,
    CommunicationAborted,
    CommunicationError,
    Communicator,
    GroupError,
    Members,
    PeerLost,
    PendingOperation,
    SoloCommunicator,
    group_timeout_s,
    member_range,
    short_message,
)
from runtime.groups.gloo import GlooCommunicator
from runtime.groups.nccl import NcclCommunicator
from runtime.groups.store import Rendezvous, RendezvousStore
from tests.helpers.harness import ROOT, TOKEN, ServerThread
from tests.helpers.waiting import until

FAR_S = 300.0
"""A group timeout that no test reaches: a thread that is free earlier was freed by the abort."""


@pytest.fixture
def server() -> Iterator[ServerThread]:
    with ServerThread() as server:
        yield server


def make(
    server: ServerThread, rank: int, size: int, generation: int = 1, timeout_s: float = 60.0
) -> GlooCommunicator:
    rendezvous = Rendezvous(host="127.0.0.1", port=server.port, token=TOKEN, generation=generation)
    return GlooCommunicator(rendezvous, rank, size, "127.0.0.1", timeout_s=timeout_s)


def on_all(communicators: list[GlooCommunicator], work: Callable[[GlooCommunicator], Any]) -> list[Any]:
    """Run ``work`` on each rank, with one thread for each."""
    with ThreadPoolExecutor(len(communicators)) as pool:
        return [f.result(60) for f in [pool.submit(work, c) for c in communicators]]


def world(
    server: ServerThread, size: int, groups: tuple[Members, ...] = (), **options: Any
) -> list[GlooCommunicator]:
    communicators = [make(server, rank, size, **options) for rank in range(size)]
    on_all(communicators, lambda c: c.form(groups))
    return communicators


def start(work: Callable[[], object]) -> "Future[object]":
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def communication_threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("communication")}


@pytest.fixture
def others() -> set[threading.Thread]:
    """Return the threads that earlier tests have left waiting."""
    return communication_threads()


@pytest.mark.parametrize("numel", [12, 7, 1], ids=["equal runs", "unequal runs", "empty runs"])
def test_ranges_of_a_vector_are_gathered_and_reduced(server: ServerThread, numel: int) -> None:
    def work(communicator: GlooCommunicator) -> tuple[list[float], list[float]]:
        rank, members = communicator.rank, (0, 1, 2)
        start, end = member_range(numel, rank, 3)
        gathered = torch.full((numel,), -1.0, dtype=torch.float64)
        own = torch.arange(start, end, dtype=torch.float64)
        communicator.wait(communicator.all_gather(gathered, own, members))
        reduced = torch.empty(end - start, dtype=torch.float64)
        whole = torch.arange(numel, dtype=torch.float64) * (rank + 1)
        communicator.wait(communicator.reduce_scatter(reduced, whole, members))
        return gathered.tolist(), reduced.tolist()

    for rank, (gathered, reduced) in enumerate(on_all(world(server, 3, ((0, 1, 2),)), work)):
        assert gathered == list(range(numel))
        start, end = member_range(numel, rank, 3)
        assert reduced == [6.0 * i for i in range(start, end)]


def test_all_reduces_of_different_groups_do_not_wait_for_each_other(server: ServerThread) -> None:
    groups: tuple[Members, ...] = ((0, 1), (0, 1, 2), (0, 2), (1, 2), (2,))
    order = {0: [0, 2, 1], 1: [3, 0, 1], 2: [2, 1, 3]}

    def reduce(communicator: GlooCommunicator) -> dict[Members, float]:
        tensors = {groups[i]: torch.full((1000,), 10.0**communicator.rank) for i in order[communicator.rank]}
        pendings = [communicator.all_reduce(tensor, members) for members, tensor in tensors.items()]
        for pending in pendings:
            communicator.wait(pending)
        alone = torch.ones(1)
        communicator.wait(communicator.all_reduce(alone, (communicator.rank,)))
        assert alone == 1
        return {members: float(tensor.mean()) for members, tensor in tensors.items()}

    communicators = world(server, 3, groups)
    for sums in on_all(communicators, reduce):
        for members, mean in sums.items():
            assert mean == sum(10.0**rank for rank in members)
    for communicator in communicators:
        communicator.close()


def test_channels_are_first_in_first_out_and_sends_do_not_wait(server: ServerThread) -> None:
    def exchange(communicator: GlooCommunicator) -> list[float]:
        peer = 1 - communicator.rank
        sent = [communicator.send(torch.full((50,), float(i)), peer, "gradient") for i in range(100)]
        other = communicator.send(torch.full((3,), -1.0), peer, "activation")
        into = torch.zeros(3)
        communicator.wait(communicator.receive(into, peer, "activation"))
        buffers = [torch.zeros(50) for _ in range(100)]
        received = [communicator.receive(buffer, peer, "gradient") for buffer in buffers]
        communicator.wait_any(received)
        for pending in (*sent, other, *received):
            communicator.wait(pending)
        return [float(into[0]), *(float(buffer.mean()) for buffer in buffers)]

    communicators = world(server, 2)
    for values in on_all(communicators, exchange):
        assert values == [-1.0, *map(float, range(100))]
    for communicator in communicators:
        communicator.close()


def test_abort_frees_every_kind_of_wait(server: ServerThread, others: set[threading.Thread]) -> None:
    for generation, block in enumerate(
        [
            lambda c: c.wait(c.all_reduce(torch.ones(10), (0, 1))),
            lambda c: c.wait(c.receive(torch.ones(10), 1, "activation")),
            lambda c: c.wait(c.send(torch.ones(10), 1, "state")),
            lambda c: c.wait_any([c.receive(torch.ones(10), 1, "state")]),
            lambda c: c.wait(c.all_reduce(torch.ones(10), (0, 1))),
        ],
        start=1,
    ):
        one, two = world(server, 2, generation=generation, timeout_s=2.0)
        blocked = start(lambda block=block, one=one: block(one))  # type: ignore[misc]
        time.sleep(0.05)
        one.abort()
        one.abort()
        with pytest.raises(CommunicationAborted):
            blocked.result(60)
        with pytest.raises(CommunicationAborted):
            one.check()
        with pytest.raises(CommunicationAborted):
            one.send(torch.ones(1), 1, "state")
        one.close()
        two.close()
    until(lambda: communication_threads() <= others)


def test_abort_while_a_group_is_forming(server: ServerThread, others: set[threading.Thread]) -> None:
    one = make(server, 0, 2, timeout_s=FAR_S)
    blocked = start(lambda: one.form([]))
    time.sleep(0.05)
    one.abort()
    with pytest.raises(CommunicationAborted):
        blocked.result(60)
    one.close()
    until(lambda: communication_threads() <= others)
    early = make(server, 0, 2, generation=2, timeout_s=FAR_S)
    early.abort()
    with pytest.raises(CommunicationAborted):
        early.form([])
    early.close()


def test_a_rejected_rendezvous_is_a_lost_peer(server: ServerThread) -> None:
    rendezvous = Rendezvous(host="127.0.0.1", port=server.port, token="guess", generation=1)
    one = GlooCommunicator(rendezvous, 0, 2, "127.0.0.1")
    with pytest.raises(PeerLost, match="wrong secret"):
        one.form([])
    one.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_dies_or_hangs_does_not_block_the_others(server: ServerThread, number: int) -> None:
    """Rank 2 is a process. Ranks 0 and 1 reduce with it; the abort frees a rank that gloo does not notify."""
    peer = subprocess.Popen(
        [sys.executable, "-m", "tests.helpers.peer", str(server.port), "1", "2", "3"],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        survivors = [make(server, rank, 3, timeout_s=FAR_S) for rank in range(2)]
        on_all(survivors, lambda c: c.form([]))
        assert peer.stdout is not None and peer.stdout.readline() == b"formed\n"
        waiting = [
            start(lambda c=c: c.wait(c.all_reduce(torch.ones(1_000_000), c.world)))  # type: ignore[misc]
            for c in survivors
        ]
        time.sleep(0.05)
        peer.send_signal(number)
        time.sleep(0.05)
        for communicator in survivors:
            communicator.abort()
        for blocked in waiting:
            with pytest.raises(CommunicationError):
                blocked.result(60)
        for communicator in survivors:
            communicator.close()
        second_generation = world(server, 2, generation=2)
        tensors = [torch.ones(5), torch.ones(5)]
        on_all(second_generation, lambda c: c.wait(c.all_reduce(tensors[c.rank], c.world)))
        assert tensors[0].tolist() == tensors[1].tolist() == [2.0] * 5
        for communicator in second_generation:
            communicator.close()
    finally:
        peer.kill()
        peer.wait()
        assert peer.stdout is not None
        peer.stdout.close()


def test_fifty_formations_leave_nothing_behind(server: ServerThread, others: set[threading.Thread]) -> None:
    def round_of(generation: int) -> None:
        one, two = world(server, 2, generation=generation, timeout_s=1.0)
        if generation % 2:
            stuck = one.receive(torch.ones(10), 1, "activation")
            one.abort()
            with pytest.raises(CommunicationAborted):
                one.wait(stuck)
        else:
            on_all([one, two], lambda c: c.wait(c.all_reduce(torch.ones(1), c.world)))
        one.close()
        two.close()

    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    for generation in range(1, 5):
        round_of(generation)
    until(lambda: communication_threads() <= others)
    before = descriptors()
    for generation in range(5, 55):
        round_of(generation)
    until(lambda: communication_threads() <= others)
    until(lambda: descriptors() <= before + 2)
    until(lambda: server.server.generations == ())


def test_a_world_of_one_needs_no_rendezvous() -> None:
    nowhere = Rendezvous(host="127.0.0.1", port=1, token="", generation=1)
    alone: Communicator = make_communicator("gloo", nowhere, 0, ["127.0.0.1"], DeviceRuntime())
    assert isinstance(alone, SoloCommunicator)
    alone.form([(0,)])
    tensor = torch.ones(2)
    alone.wait(alone.all_reduce(tensor, alone.world))
    assert tensor.tolist() == [1.0, 1.0]
    alone.abort()
    with pytest.raises(CommunicationAborted):
        alone.check()
    alone.close()


def test_a_backends_message_is_cut_to_what_a_user_needs() -> None:
    error = RuntimeError(
        "[/src/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:17804. This is typically"
    )
    assert short_message(error) == "Connection closed by peer [127.0.0.1]:17804"
    assert short_message(RuntimeError("Timed out")) == "Timed out"
    assert short_message(RuntimeError()) == "RuntimeError"


def test_an_operation_that_an_abort_ended_counts_as_aborted_even_if_its_failure_is_seen_first() -> None:
    """The waiting thread may run only after the operation that the abort ended."""
    failed, done = PendingOperation(), PendingOperation()
    failed.done, failed.error, done.done = True, RuntimeError("the communicator was aborted"), True
    one = SoloCommunicator()
    with pytest.raises(PeerLost):
        one.wait(failed)
    one.abort()
    with pytest.raises(CommunicationAborted):
        one.wait(failed)
    one.wait(done)


class WaitingGroup:
    """A group that waits for a peer that never comes until it is aborted, as NCCL's kernels do."""

    def __init__(self) -> None:
        self.started, self.aborted = threading.Event(), threading.Event()

    def allreduce(self, _: list[torch.Tensor]) -> "WaitingGroup":
        self.started.set()
        return self

    def wait(self) -> None:
        assert self.aborted.wait(FAR_S)
        raise RuntimeError("the communicator was aborted")

    def abort(self) -> None:
        self.aborted.set()


class LazyPeerGroup:
    """A group that forms a communicator of two at their first send and waits there for the peer, as NCCL does."""

    def __init__(self, met: dict[tuple[int, int], threading.Barrier], rank: int, sends: list[Any]) -> None:
        self._met, self._rank, self._sends = met, rank, sends

    def allreduce(self, _: list[torch.Tensor]) -> "LazyPeerGroup":
        return self

    def send(self, _: list[torch.Tensor], peer: int, tag: int) -> "LazyPeerGroup":
        self._met[self._rank, peer].wait(FAR_S)
        self._sends.append((self._rank, peer))
        return self

    def recv(self, _: list[torch.Tensor], peer: int, tag: int) -> "LazyPeerGroup":
        self._met[peer, self._rank].wait(FAR_S)
        return self

    def wait(self) -> None:
        pass

    def abort(self) -> None:
        for barrier in self._met.values():
            barrier.abort()


def lazy_peers(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch, size: int, sends: list[Any], gpus: int = 8
) -> list[NcclCommunicator]:
    pairs = itertools.combinations(range(size), 2)
    met = {pair: threading.Barrier(2) for pair in pairs}
    monkeypatch.setattr(
        NcclCommunicator, "_make_group", lambda self, *_: LazyPeerGroup(met, self.rank, sends)
    )
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(NcclCommunicator, "_device_identity", lambda self: f"GPU {self.rank % gpus}")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"):
        monkeypatch.setenv(name, "1")
    where = Rendezvous(host="127.0.0.1", port=server.port, token=TOKEN, generation=1)
    return [NcclCommunicator(where, rank, size, torch.device("cpu")) for rank in range(size)]


def test_pairs_that_will_communicate_connect_while_the_world_forms_without_a_circular_wait(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    sends: list[tuple[int, int]] = []
    ranks = lazy_peers(server, monkeypatch, 5, sends)
    ring = [("state", 0, 1), ("state", 1, 2), ("state", 2, 3), ("state", 3, 4), ("state", 0, 4)]
    with ThreadPoolExecutor(len(ranks)) as pool:
        for future in [pool.submit(one.form, [], ring[n:] + ring[:n]) for n, one in enumerate(ranks)]:
            future.result(60)
    assert sorted(sends) == sorted((one, other) for _, one, other in ring)
    for one in ranks:
        one.close()


@pytest.mark.parametrize(("aborted", "expected"), [(True, CommunicationAborted), (False, PeerLost)])
def test_an_operation_that_nccl_rejects_is_one_of_a_group_that_was_aborted_or_has_lost_a_peer(
    aborted: bool, expected: type[Exception]
) -> None:
    """An abort may come in the moment in which the main thread issues an operation."""
    one = NcclCommunicator(
        Rendezvous(host="127.0.0.1", port=1, token=TOKEN, generation=1), 0, 2, torch.device("cpu")
    )

    def allreduce(_: object) -> None:
        if aborted:
            one.abort()
        raise torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0")

    one._groups[0, 1] = SimpleNamespace(allreduce=allreduce, abort=lambda: None)
    with pytest.raises(expected):
        one.all_reduce(torch.ones(1), (0, 1))
    one.close()


def test_ranks_that_share_a_gpu_are_rejected_with_what_to_change(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL rejects them, too, but in a way that looks like a lost peer, for which the same group would be
    formed again.
    """
    ranks = lazy_peers(server, monkeypatch, 3, [], gpus=2)
    with ThreadPoolExecutor(len(ranks)) as pool:
        for future in [pool.submit(one.form, []) for one in ranks]:
            with pytest.raises(GroupError, match=r'ranks 0, 2 share one: .*backend = "gloo"'):
                future.result(60)
    for one in ranks:
        one.close()


def test_an_abort_frees_a_rank_that_waits_for_a_peer_that_never_connects(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = lazy_peers(server, monkeypatch, 2, [])
    monkeypatch.setattr(one, "_check_devices", lambda _: None)  # The peer does not come.
    blocked = start(lambda: one.form([], [("activation", 0, 1)]))
    until(lambda: one._groups.keys() >= {("activation", True), ("state", False), (0, 1)})
    assert not blocked.done()
    one.abort()
    with pytest.raises(CommunicationAborted):
        blocked.result(30)
    one.close()


def test_an_abort_while_nccl_connects_to_the_rendezvous_leaves_no_connection(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = lazy_peers(server, monkeypatch, 2, [])
    stores: list[RendezvousStore] = []

    class Store(RendezvousStore):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            stores.append(self)
            one.abort()
            one.close()  # The main thread does so at once.

    monkeypatch.setattr("runtime.groups.nccl.RendezvousStore", Store)
    with pytest.raises(CommunicationAborted):
        one.form([])
    until(lambda: stores[0]._connection._socket.fileno() == -1)


def test_an_abort_ends_every_nccl_group_including_one_that_is_forming(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This runs without NCCL: its groups are doubles here, and the communicator's handling of them is tested."""
    made: list[WaitingGroup] = []

    def make_group(*_: object) -> WaitingGroup:
        made.append(WaitingGroup())
        return made[-1]

    monkeypatch.setattr(NcclCommunicator, "_make_group", make_group)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    watchdog = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")
    for name in watchdog:
        monkeypatch.setenv(name, "1")
    rendezvous = Rendezvous(host="127.0.0.1", port=server.port, token=TOKEN, generation=1)
    one = NcclCommunicator(rendezvous, 0, 2, torch.device("cpu"))
    monkeypatch.setattr(one, "_check_devices", lambda _: None)  # The other rank does not come.
    blocked = start(lambda: one.form([]))
    until(lambda: len(made) == 7 and made[-1].started.is_set())
    assert [os.environ[name] for name in watchdog] == ["0", "0"], "or a peer's death ends this process, too"
    one.abort()
    one.close()  # The main thread does so at once.
    with pytest.raises(CommunicationAborted):
        blocked.result(30)
    until(lambda: all(group.aborted.is_set() for group in made))


def test_an_nccl_group_that_cannot_be_aborted_does_not_keep_others() -> None:
    """The aborts of two communicators may wait for each other."""
    first, second = WaitingGroup(), WaitingGroup()
    in_turn = SimpleNamespace(abort=lambda: second.aborted.wait(FAR_S) and first.abort())
    stuck = SimpleNamespace(abort=lambda: (_ for _ in ()).throw(RuntimeError("it took too long")))
    one = NcclCommunicator(
        Rendezvous(host="127.0.0.1", port=1, token=TOKEN, generation=1), 0, 2, torch.device("cpu")
    )
    one._groups = {"activation": stuck, "gradient": in_turn, "state": second}
    one.abort()
    until(lambda: first.aborted.is_set() and second.aborted.is_set())
    one.close()


def test_the_timeout_of_a_group_grows_with_its_steps_and_with_each_group_that_expired() -> None:
    assert group_timeout_s(0.0, 0) == group_timeout_s(0.17, 0) == MIN_GROUP_TIMEOUT_S
    assert group_timeout_s(60.0, 0) == 1200.0 and group_timeout_s(60.0, 2) == 4800.0
    assert group_timeout_s(0.17, 3) == 8 * MIN_GROUP_TIMEOUT_S
    assert group_timeout_s(0.17, 10_000) == MAX_GROUP_TIMEOUT_S
