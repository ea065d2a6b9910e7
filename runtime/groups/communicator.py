"""How ranks talk: one small interface. ``runtime.groups.gloo`` and ``runtime.groups.nccl`` are behind it.

No default group, no global state: a communicator belongs to one generation and is thrown away with it.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Any, Literal, Self, get_args

from torch import Tensor

Members = tuple[int, ...]
"""Global ranks of a group, ascending."""
Channel = Literal["activation", "gradient", "state"]
"""What travels between two ranks; each channel of a pair of ranks is first in, first out."""
MIN_GROUP_TIMEOUT_S = 60.0
"""Least timeout of torch's process groups. No step may keep a peer waiting for longer, and what an abort abandons is
held for as long. It does not detect failures: the control plane does that."""
STEPS_PER_TIMEOUT = 20
MAX_GROUP_TIMEOUT_S = 6 * 3600.0
CommunicationEdge = tuple[Channel, int, int]
"""Two ranks, ascending, that will send to each other on a channel."""
CHANNELS: tuple[Channel, ...] = get_args(Channel)
Group = Any
"""A process group of torch: its stubs know neither the operations nor the options of the backends."""


def group_timeout_s(step_s: float, expired_groups: int) -> float:
    """Return the timeout of a group.

    :param step_s: expected duration of a step; 0: unknown.
    :param expired: groups of this process in which no step was committed for that long. Each doubles the timeout, so
        that steps that take longer than expected are committed in the end.
    """
    return min(
        max(MIN_GROUP_TIMEOUT_S, STEPS_PER_TIMEOUT * step_s) * 2.0 ** min(expired_groups, 30),
        MAX_GROUP_TIMEOUT_S,
    )


def member_range(numel: int, index: int, members: int) -> tuple[int, int]:
    """Return the elements ``[start, end)`` of a vector, or rows of a microbatch, that are member ``index``'s.

    Sizes differ by at most 1.
    """
    return numel * index // members, numel * (index + 1) // members


class GroupError(ValueError):
    """No group of these ranks can work; the message says what to change."""


class CommunicationError(RuntimeError):
    """An operation will never complete; everything of this communicator is lost."""


class CommunicationAborted(CommunicationError):
    """``abort`` was called: the control plane wants this generation to end."""


class PeerLost(CommunicationError):
    """A connection broke or timed out. A hint: who died is for the control plane to say."""


def short_message(error: BaseException) -> str:
    """The first sentence of a backend's message, without the source location that it begins with."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if text.startswith("["):
        text = text.partition("] ")[2] or text
    return text.partition(". ")[0]


class PendingOperation:
    """An operation under way; give it to ``Communicator.wait``."""

    __slots__ = ("done", "error")

    def __init__(self, *, done: bool = False) -> None:
        self.done = done
        self.error: BaseException | None = None

    def is_complete(self) -> bool:
        """Return whether ``Communicator.wait`` would return at once."""
        return self.done


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
    def form(self, groups: Sequence[Members], edges: Collection[CommunicationEdge] = ()) -> None:
        """Meet the other ranks; ``groups`` are all groups of the generation, the same list everywhere.

        The whole world is always formed. Groups of one rank need nothing; duplicates are formed once.

        :param talks: the same everywhere, too: whatever two ranks need for themselves is made now.

        :raises Aborted: as everything below.
        :raises PeerLost: somebody did not come, or the rendezvous is gone.
        """

    @abstractmethod
    def send(self, tensor: Tensor, peer: int, channel: Channel) -> PendingOperation:
        """Does not wait for the receiver. ``tensor`` (contiguous) must not change until it is sent."""

    @abstractmethod
    def receive(self, tensor: Tensor, peer: int, channel: Channel) -> PendingOperation:
        """Fill ``tensor`` (contiguous) with what ``peer`` sends next on ``channel``."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, members: Members) -> PendingOperation:
        """Sum ``tensor`` in place over ``members``, one of the groups given to ``form``."""

    @abstractmethod
    def all_gather(self, target: Tensor, source: Tensor, members: Members) -> PendingOperation:
        """``target`` becomes the members' ``source``, one behind the other; all have the same length.

        :param members: more than one, one of the groups given to ``form``.
        """

    @abstractmethod
    def all_gather_uneven(self, target: Tensor, source: Tensor, members: Members) -> PendingOperation:
        """Put the members' runs (``member_range``) of a vector together.

        :param target: the whole vector. :param source: this rank's run of it.
        :param members: more than one, one of the groups given to ``form``.
        """

    @abstractmethod
    def reduce_scatter(self, target: Tensor, source: Tensor, members: Members) -> PendingOperation:
        """Give each member the sum of its run (``member_range``) over the members' ``source``.

        :param target: this rank's run. :param source: a whole vector, which must not change until this is done.
        :param members: more than one, one of the groups given to ``form``.
        """

    @abstractmethod
    def close(self) -> None:
        """The main thread is through with it, aborted or not. Returns at once."""

    @property
    def world(self) -> Members:
        return tuple(range(self.size))

    def wait(self, pending: PendingOperation) -> None:
        """Have the host wait until the operation is done: what follows on this thread, and on its current
        stream, sees the result.

        :raises Aborted: unless the operation had completed before.
        :raises PeerLost: it failed, and nobody had aborted.
        """
        with self._condition:
            while not (pending.done or self._aborted):
                self._condition.wait()
        if not pending.done:
            raise CommunicationAborted
        if pending.error is not None:
            self.check()  # An abort makes what is under way fail, perhaps before this thread runs again.
            raise PeerLost(short_message(pending.error)) from pending.error

    def wait_any(self, pendings: Sequence[PendingOperation]) -> None:
        """At least one of them is done. Those that are need a ``wait`` of their own for their errors."""
        with self._condition:
            while not (self._aborted or any(pending.done for pending in pendings)):
                self._condition.wait()
        self.check()

    def confirm(self, pending: PendingOperation) -> None:
        """``wait``, and nobody has aborted: what decides (VOTE) must really be there, and be no garbage."""
        self.wait(pending)

    def check(self) -> None:
        """:raises Aborted: ``abort`` was called."""
        if self._aborted:
            raise CommunicationAborted

    def abort(self) -> None:
        """From any thread, at any time, more than once: free the main thread, at once."""
        with self._condition:
            self._aborted = True
            self._condition.notify_all()

    def _finish(self, pending: PendingOperation, error: BaseException | None) -> None:
        with self._condition:
            pending.error = error
            pending.done = True
            self._condition.notify_all()

    def _start_forming(self, form: Callable[[], None]) -> PendingOperation:
        """Run ``form`` on a thread that an abort leaves behind."""
        pending = PendingOperation()

        def run() -> None:
            try:
                form()
            except Exception as error:  # Of any kind: the main thread waits for this one.
                self._finish(pending, error)
            else:
                self._finish(pending, None)

        threading.Thread(target=run, name="communication-form", daemon=True).start()
        return pending

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

    def form(self, groups: Sequence[Members], edges: Collection[CommunicationEdge] = ()) -> None:
        self.check()

    def send(self, tensor: Tensor, peer: int, channel: Channel) -> PendingOperation:
        raise ValueError("a world of one rank has no peer")

    def receive(self, tensor: Tensor, peer: int, channel: Channel) -> PendingOperation:
        raise ValueError("a world of one rank has no peer")

    def all_reduce(self, tensor: Tensor, members: Members) -> PendingOperation:
        return PendingOperation(done=True)

    def all_gather(self, target: Tensor, source: Tensor, members: Members) -> PendingOperation:
        raise ValueError("a world of one rank has nobody to gather from")

    def all_gather_uneven(self, target: Tensor, source: Tensor, members: Members) -> PendingOperation:
        raise ValueError("a world of one rank has nobody to gather from")

    def reduce_scatter(self, target: Tensor, source: Tensor, members: Members) -> PendingOperation:
        raise ValueError("a world of one rank has nobody to add to")

    def close(self) -> None:
        pass
