"""The communicator for CPUs: gloo with the interface of ``runtime.groups.communicator``.

If a peer dies, gloo does not notify most survivors, and its abort calls free nobody. The main thread
therefore only *posts* operations, which never blocks, and communication threads *wait for* them. The main
thread waits on a condition that ``abort`` also sets, so it is free within a fraction of a millisecond
whatever gloo does. A stuck thread ends at gloo's own timeout (``timeout_s``). Until then it holds the
buffers and the group, so neither may be reused.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Work

from runtime.groups.communicator import (
    CHANNELS,
    MIN_GROUP_TIMEOUT_S,
    Channel,
    CommunicationAborted,
    CommunicationEdge,
    Communicator,
    Group,
    Members,
    PeerLost,
    PendingOperation,
    member_range,
    short_message,
)
from runtime.groups.store import Rendezvous, RendezvousStore

_GATHER_TAG = len(CHANNELS)
_REDUCE_TAG = _GATHER_TAG + 1


class _CombinedWork:
    """Several works as one; ``then`` runs when all of them are done."""

    def __init__(self, works: list[Work], then: Callable[[], None]) -> None:
        self._works = works
        self._then = then

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._then()


class _Lane:
    """A communication thread that waits for works in the order in which they were posted.

    It keeps the groups alive until its last work has ended: destroying a gloo group with an operation in
    flight would block until gloo's timeout, with the interpreter lock held.
    """

    def __init__(
        self, groups: dict[Members, Group], finish: Callable[[PendingOperation, BaseException | None], None]
    ) -> None:
        self._items: SimpleQueue[tuple[Work | _CombinedWork, Tensor, PendingOperation] | None] = SimpleQueue()
        self._finish = finish
        self._groups: dict[Members, Group] | None = groups
        threading.Thread(target=self._run, name="communication", daemon=True).start()

    def put(self, work: Work | _CombinedWork, tensor: Tensor) -> PendingOperation:
        pending = PendingOperation()
        self._items.put((work, tensor, pending))
        return pending

    def end(self) -> None:
        """End the thread after the works that were posted."""
        self._items.put(None)

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            work, _tensor, pending = item
            try:
                work.wait()
            except RuntimeError as error:
                self._finish(pending, error)
            else:
                self._finish(pending, None)
            del item, work, _tensor, pending
        self._groups = None


class GlooCommunicator(Communicator):
    """A communicator over gloo and TCP: a full mesh for the world, and one for each further group.

    In gloo, ``send`` waits for the receiver even for 16 bytes, so it is posted, too. Sends to a peer,
    receives from a peer, all-reduces and all-gathers each have their own lane, so that no completion is
    noticed late because another operation, which may indirectly depend on it, is slow.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        size: int,
        host: str,
        *,
        timeout_s: float = MIN_GROUP_TIMEOUT_S,
    ) -> None:
        """Create a communicator without groups.
        :param host: this rank's address, to which the other ranks connect.
        """
        super().__init__(rank, size)
        self._rendezvous = rendezvous
        self._host = host
        self._timeout_s = timeout_s
        self._groups: dict[Members, Group] = {}
        self._stores: list[RendezvousStore] = []
        self._lanes: dict[tuple[str, int], _Lane] = {}

    def form(self, groups: Sequence[Members], edges: Collection[CommunicationEdge] = ()) -> None:
        wanted = [m for m in dict.fromkeys((self.world, *groups)) if len(m) > 1 and self.rank in m]
        formed: dict[Members, Group] = {}

        def form(members: Members) -> None:
            formed[members] = self._form_group(members)

        forming = [self._start_forming(partial(form, members)) for members in wanted]
        for pending in forming:
            self.wait(pending)
        self._groups = formed
        self._close_stores()

    def _form_group(self, members: Members) -> Group:
        store = RendezvousStore(self._rendezvous, self.rank, self._timeout_s)
        with self._condition:
            if self._aborted:
                store.close()
                raise CommunicationAborted
            self._stores.append(store)
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [_device(self._host)]
        options._timeout = timedelta(seconds=self._timeout_s)
        options._threads = 1
        name = "-".join(map(str, members)) if len(members) < self.size else "world"
        return ProcessGroupGloo(PrefixStore(name, store), members.index(self.rank), len(members), options)

    def send(self, tensor: Tensor, peer: int, channel: Channel) -> PendingOperation:
        tag = CHANNELS.index(channel)
        groups = self._groups
        return self._post(("send", peer), tensor, lambda: groups[self.world].send([tensor], peer, tag))

    def receive(self, tensor: Tensor, peer: int, channel: Channel) -> PendingOperation:
        tag = CHANNELS.index(channel)
        return self._post(
            ("receive", peer), tensor, lambda: self._groups[self.world].recv([tensor], peer, tag)
        )

    def all_reduce(self, tensor: Tensor, members: Members) -> PendingOperation:
        if len(members) == 1:
            return PendingOperation(done=True)
        return self._post(("reduce", 0), tensor, lambda: self._groups[members].allreduce([tensor]))

    def all_gather(self, target: Tensor, source: Tensor, members: Members) -> PendingOperation:
        # On loopback, direct transfers between all pairs take a quarter of the time of gloo's own
        # all-gather.
        def post() -> _CombinedWork:
            world, count = self._groups[self.world], len(members)
            works: list[Work] = []
            for index, peer in enumerate(members):
                start, end = member_range(target.numel(), index, count)
                if peer == self.rank:
                    target[start:end].copy_(source)
                elif start < end:
                    works.append(world.recv([target[start:end]], peer, _GATHER_TAG))
            if source.numel():
                works += [world.send([source], peer, _GATHER_TAG) for peer in members if peer != self.rank]
            return _CombinedWork(works, lambda: None)

        return self._post(("runs", 0), target, post)

    def reduce_scatter(self, target: Tensor, source: Tensor, members: Members) -> PendingOperation:
        """Implement ``Communicator.reduce_scatter``; gloo's own takes five times as long, and longer than its
        all-reduce.
        """

        def post() -> _CombinedWork:
            world, count = self._groups[self.world], len(members)
            works: list[Work] = []
            terms: list[Tensor] = []
            for index, peer in enumerate(members):
                start, end = member_range(source.numel(), index, count)
                if peer == self.rank:
                    terms.append(source[start:end])
                    continue
                terms.append(torch.empty_like(target))
                if target.numel():
                    works.append(world.recv([terms[-1]], peer, _REDUCE_TAG))
                if start < end:
                    works.append(world.send([source[start:end]], peer, _REDUCE_TAG))

            def add() -> None:
                # The order of the members is fixed, so the result does not depend on which one is fast.
                torch.add(terms[0], terms[1], out=target)
                for term in terms[2:]:
                    target.add_(term)

            return _CombinedWork(works, add)

        return self._post(("runs", 1), target, post)

    def _post(
        self, lane: tuple[str, int], tensor: Tensor, post: Callable[[], Work | _CombinedWork]
    ) -> PendingOperation:
        self.check()
        if lane not in self._lanes:
            self._lanes[lane] = _Lane(self._groups, self._finish)
        try:
            work = post()
        except RuntimeError as error:
            self.check()
            raise PeerLost(short_message(error)) from error
        return self._lanes[lane].put(work, tensor)

    def abort(self) -> None:
        super().abort()
        self._close_stores()

    def _close_stores(self) -> None:
        with self._condition:
            stores, self._stores = self._stores, []
        for store in stores:
            store.close()

    def close(self) -> None:
        self._close_stores()
        for lane in self._lanes.values():
            lane.end()
        self._groups = {}


_devices: dict[str, object] = {}
_devices_lock = threading.Lock()


def _device(host: str) -> object:
    """Return gloo's listener and event loop for one address: one per process, shared by all generations."""
    with _devices_lock:
        if host not in _devices:
            _devices[host] = ProcessGroupGloo.create_device(hostname=host)
        return _devices[host]
