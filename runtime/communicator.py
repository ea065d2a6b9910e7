"""How ranks talk: one small interface, and gloo behind it. (NCCL is in ``runtime.nccl``.)

No default group, no global state: a communicator belongs to one generation and is thrown away with it.

gloo tells most survivors nothing when a peer dies and its abort calls free nobody, so operations are
*posted* by the main thread, which never blocks, and *waited for* on communication threads. The main
thread waits on a condition that ``abort`` also sets, and so is free within a fraction of a millisecond
whatever gloo does. A thread that is left stuck ends when gloo's own timeout does (``timeout_s``); it
holds the buffers and the group until then, so neither may be used again: take fresh ones.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Work

from runtime.store import Rendezvous, RendezvousStore

Members = tuple[int, ...]
"""Global ranks of a group, ascending."""
Channel = Literal["activation", "gradient", "state"]
"""What travels between two ranks; each channel of a pair of ranks is first in, first out."""
GROUP_TIMEOUT_S = 60.0
"""Of torch's process groups. No step may keep a peer waiting for longer, and what an abort abandons is
held for as long. Not how failures are noticed: the control plane does that."""
CHANNELS: tuple[Channel, ...] = get_args(Channel)
Group = Any
"""A process group of torch: its stubs know neither the operations nor the options of the backends."""


class CommunicationError(RuntimeError):
    """An operation will never complete; everything of this communicator is lost."""


class Aborted(CommunicationError):
    """``abort`` was called: the control plane wants this generation to end."""


class PeerLost(CommunicationError):
    """A connection broke or timed out. A hint: who died is for the control plane to say."""


def plain_words(error: BaseException) -> str:
    """The first sentence of a backend's message, without the source location that it begins with."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if text.startswith("["):
        text = text.partition("] ")[2] or text
    return text.partition(". ")[0]


class Pending:
    """An operation under way; give it to ``Communicator.wait``."""

    __slots__ = ("done", "error")

    def __init__(self) -> None:
        self.done = False
        self.error: BaseException | None = None


class Communicator(ABC):
    """One rank's end of a generation's world.

    Made by the main thread, which calls everything but ``abort``. Operations on the same group must be
    posted in the same order by all its members; different groups are independent of each other.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._condition = threading.Condition()
        self._aborted = False

    @abstractmethod
    def form(self, groups: Sequence[Members]) -> None:
        """Meet the other ranks; ``groups`` are all groups of the generation, the same list everywhere.

        The whole world is always formed. Groups of one rank need nothing; duplicates are formed once.

        :raises Aborted: as everything below.
        :raises PeerLost: somebody did not come, or the rendezvous is gone.
        """

    @abstractmethod
    def send(self, tensor: Tensor, peer: int, channel: Channel) -> Pending:
        """Does not wait for the receiver. ``tensor`` (contiguous) must not change until it is sent."""

    @abstractmethod
    def receive(self, tensor: Tensor, peer: int, channel: Channel) -> Pending:
        """Fill ``tensor`` (contiguous) with what ``peer`` sends next on ``channel``."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, members: Members) -> Pending:
        """Sum ``tensor`` in place over ``members``, one of the groups given to ``form``."""

    @abstractmethod
    def all_gather(self, target: Tensor, source: Tensor, members: Members) -> Pending:
        """``target`` becomes the members' ``source``, one behind the other; all have the same length.

        :param members: more than one, one of the groups given to ``form``.
        """

    @abstractmethod
    def close(self) -> None:
        """The main thread is through with it, aborted or not. Returns at once."""

    @property
    def world(self) -> Members:
        return tuple(range(self.size))

    def wait(self, pending: Pending) -> None:
        """The operation is done: what follows on this thread (and its CUDA stream) sees its result.

        :raises Aborted: unless the operation had completed before.
        :raises PeerLost: it failed, and nobody had aborted.
        """
        with self._condition:
            while not (pending.done or self._aborted):
                self._condition.wait()
        if not pending.done:
            raise Aborted
        if pending.error is not None:
            self.check()  # An abort makes what is under way fail, perhaps before this thread runs again.
            raise PeerLost(plain_words(pending.error)) from pending.error

    def wait_any(self, pendings: Sequence[Pending]) -> None:
        """At least one of them is done. Those that are need a ``wait`` of their own for their errors."""
        with self._condition:
            while not (self._aborted or any(pending.done for pending in pendings)):
                self._condition.wait()
        self.check()

    def settle(self, pending: Pending) -> None:
        """``wait``, and the values may be read on the host: what decides (VOTE) must really be there."""
        self.wait(pending)

    def check(self) -> None:
        """:raises Aborted: ``abort`` was called."""
        if self._aborted:
            raise Aborted

    def abort(self) -> None:
        """From any thread, at any time, more than once: free the main thread, at once."""
        with self._condition:
            self._aborted = True
            self._condition.notify_all()

    def _finish(self, pending: Pending, error: BaseException | None) -> None:
        with self._condition:
            pending.error = error
            pending.done = True
            self._condition.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SoloCommunicator(Communicator):
    """A world of one rank: nothing to meet, nothing to wait for."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def form(self, groups: Sequence[Members]) -> None:
        self.check()

    def send(self, tensor: Tensor, peer: int, channel: Channel) -> Pending:
        raise ValueError("a world of one rank has no peer")

    def receive(self, tensor: Tensor, peer: int, channel: Channel) -> Pending:
        raise ValueError("a world of one rank has no peer")

    def all_reduce(self, tensor: Tensor, members: Members) -> Pending:
        pending = Pending()
        pending.done = True
        return pending

    def all_gather(self, target: Tensor, source: Tensor, members: Members) -> Pending:
        raise ValueError("a world of one rank has nobody to gather from")

    def close(self) -> None:
        pass


class _Lane:
    """A communication thread that waits for works in the order in which they were posted.

    It keeps the groups alive until its last work has ended: destroying a gloo group with an operation
    in flight would block, with the interpreter lock held, until gloo's timeout.
    """

    def __init__(
        self, groups: dict[Members, Group], finish: Callable[[Pending, BaseException | None], None]
    ) -> None:
        self._items: SimpleQueue[tuple[Work, Tensor, Pending] | None] = SimpleQueue()
        self._finish = finish
        self._groups: dict[Members, Group] | None = groups
        threading.Thread(target=self._run, name="communication", daemon=True).start()

    def put(self, work: Work, tensor: Tensor) -> Pending:
        pending = Pending()
        self._items.put((work, tensor, pending))
        return pending

    def end(self) -> None:
        """No more works will come; the thread ends behind the last."""
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
    """gloo over TCP: a full mesh for the world and one for each further group.

    ``send`` is a rendezvous in gloo (even 16 bytes wait for the receiver), hence posted. Sends to a peer,
    receives from a peer, all-reduces and all-gathers each have a lane of their own, so that nothing is
    noticed late because something else, that may depend on it in a roundabout way, is slow.
    """

    def __init__(
        self, rendezvous: Rendezvous, rank: int, size: int, host: str, *, timeout_s: float = GROUP_TIMEOUT_S
    ) -> None:
        """:param host: own address that the other ranks connect to."""
        super().__init__(rank, size)
        self._rendezvous = rendezvous
        self._host = host
        self._timeout_s = timeout_s
        self._groups: dict[Members, Group] = {}
        self._stores: list[RendezvousStore] = []
        self._lanes: dict[tuple[str, int], _Lane] = {}

    def form(self, groups: Sequence[Members]) -> None:
        wanted = [m for m in dict.fromkeys((self.world, *groups)) if len(m) > 1 and self.rank in m]
        formed: dict[Members, Group] = {}
        forming = [self._start_forming(members, formed) for members in wanted]
        for pending in forming:
            self.wait(pending)
        self._groups = formed
        self._close_stores()

    def _start_forming(self, members: Members, formed: dict[Members, Group]) -> Pending:
        pending = Pending()

        def run() -> None:
            try:
                group = self._form_group(members)
            except (RuntimeError, OSError) as error:
                self._finish(pending, error)
            else:
                formed[members] = group
                self._finish(pending, None)

        threading.Thread(target=run, name="communication-form", daemon=True).start()
        return pending

    def _form_group(self, members: Members) -> Group:
        store = RendezvousStore(self._rendezvous, self.rank, self._timeout_s)
        with self._condition:
            if self._aborted:
                store.close()
                raise Aborted
            self._stores.append(store)
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [_device(self._host)]
        options._timeout = timedelta(seconds=self._timeout_s)
        options._threads = 1
        name = "-".join(map(str, members)) if len(members) < self.size else "world"
        return ProcessGroupGloo(PrefixStore(name, store), members.index(self.rank), len(members), options)

    def send(self, tensor: Tensor, peer: int, channel: Channel) -> Pending:
        tag = CHANNELS.index(channel)
        groups = self._groups
        return self._post(("send", peer), tensor, lambda: groups[self.world].send([tensor], peer, tag))

    def receive(self, tensor: Tensor, peer: int, channel: Channel) -> Pending:
        tag = CHANNELS.index(channel)
        return self._post(
            ("receive", peer), tensor, lambda: self._groups[self.world].recv([tensor], peer, tag)
        )

    def all_reduce(self, tensor: Tensor, members: Members) -> Pending:
        if len(members) == 1:
            pending = Pending()
            pending.done = True
            return pending
        return self._post(("reduce", 0), tensor, lambda: self._groups[members].allreduce([tensor]))

    def all_gather(self, target: Tensor, source: Tensor, members: Members) -> Pending:
        # The work itself keeps ``source``.
        return self._post(
            ("gather", 0), target, lambda: self._groups[members]._allgather_base(target, source)
        )

    def _post(self, lane: tuple[str, int], tensor: Tensor, post: Callable[[], Work]) -> Pending:
        self.check()
        if lane not in self._lanes:
            self._lanes[lane] = _Lane(self._groups, self._finish)
        try:
            work = post()
        except RuntimeError as error:
            self.check()
            raise PeerLost(plain_words(error)) from error
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
    """gloo's listener and event loop for one address: one per process, shared by all generations."""
    with _devices_lock:
        if host not in _devices:
            _devices[host] = ProcessGroupGloo.create_device(hostname=host)
        return _devices[host]


def make_communicator(
    backend: str, rendezvous: Rendezvous, rank: int, hosts: Sequence[str], device: torch.device
) -> Communicator:
    """The communicator for a job's ``backend``; not yet formed, but it can already be aborted.

    :param hosts: for each rank of the world the address that it is reached at.
    """
    if len(hosts) == 1:
        return SoloCommunicator()
    if backend == "nccl":
        from runtime.nccl import NcclCommunicator

        return NcclCommunicator(rendezvous, rank, len(hosts), device)
    return GlooCommunicator(rendezvous, rank, len(hosts), hosts[rank])
