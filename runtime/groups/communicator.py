"""The interface through which ranks communicate; ``runtime.groups.gloo`` and ``runtime.groups.nccl`` implement
it.

There is no default group and no global state: a communicator belongs to one generation and is discarded
with it.
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
"""Kind of data that travels between two ranks. Each channel of a pair of ranks is first in, first out."""
MIN_GROUP_TIMEOUT_S = 60.0
"""Least timeout of torch's process groups. No step may keep a peer waiting for longer, and operations that an
abort abandons hold their memory for as long. It does not detect failures: the control plane does that.
"""
STEPS_PER_TIMEOUT = 20
MAX_GROUP_TIMEOUT_S = 6 * 3600.0
CommunicationEdge = tuple[Channel, int, int]
"""A channel, the rank that sends on it, and the rank that receives."""
CHANNELS: tuple[Channel, ...] = get_args(Channel)
Group = Any
"""A process group of torch, whose stubs contain neither the operations nor the options of the backends."""


def group_timeout_s(step_s: float, expired_groups: int) -> float:
    """Return the timeout of a group.

    :param step_s: expected duration of a step; 0 if unknown.
    :param expired_groups: number of groups of this process in which no step was committed within the
        timeout. Each doubles the timeout, so that steps that take longer than expected are committed in the
        end.
    """
    return min(
        max(MIN_GROUP_TIMEOUT_S, STEPS_PER_TIMEOUT * step_s) * 2.0 ** min(expired_groups, 30),
        MAX_GROUP_TIMEOUT_S,
    )


def member_range(numel: int, index: int, members: int) -> tuple[int, int]:
    """Return the elements ``[start, end)`` of a vector, or the rows of a microbatch, that belong to member
    ``index``.

    Sizes differ by at most 1.
    """
    return numel * index // members, numel * (index + 1) // members


class GroupError(ValueError):
    """A group that cannot work with these ranks; the message says what to change."""


class CommunicationError(RuntimeError):
    """An operation that will never complete; everything of this communicator is lost."""


class CommunicationAborted(CommunicationError):
    """A call of ``abort``: the control plane ends this generation."""


class PeerLost(CommunicationError):
    """A connection that broke or timed out. This is a hint; the control plane decides which peer has failed."""


def short_message(error: BaseException) -> str:
    """Return the first sentence of a backend's message, without the source location at its beginning."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if text.startswith("["):
        text = text.partition("] ")[2] or text
    return text.partition(". ")[0]


class PendingOperation:
    """An operation in progress, which ``Communicator.wait`` waits for."""

    __slots__ = ("done", "error")

    def __init__(self, *, done: bool = False) -> None:
        self.done = done
        self.error: BaseException | None = None

    def is_complete(self) -> bool:
        """Return whether ``Communicator.wait`` would return at once."""
        return self.done


class Communicator(ABC):
    """One rank's end of a generation's world.

    The main thread creates it and makes all calls but ``abort``. All members of a group must post its
    operations in the same order; different groups are independent of each other.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._condition = threading.Condition()
        self._aborted = False

    @abstractmethod
    def form(self, groups: Sequence[Members], edges: Collection[CommunicationEdge] = ()) -> None:
        """Form the world and ``groups``, all groups of the generation; the list must be the same on all
        ranks.

        Groups of one rank need nothing; duplicates are formed once.

        :param edges: pairs of ranks that will communicate, the same on all ranks. Their connections are
            made now.
        :raises CommunicationAborted: ``abort`` was called, as for all methods below.
        :raises PeerLost: a peer did not come, or the rendezvous is gone.
        """

    @abstractmethod
    def send(self, tensor: Tensor, peer: int, channel: Channel) -> PendingOperation:
        """Send ``tensor`` (contiguous), which must not change until it is sent, without waiting for the
        receiver.
        """

    @abstractmethod
    def receive(self, tensor: Tensor, peer: int, channel: Channel) -> PendingOperation:
        """Fill ``tensor`` (contiguous) with what ``peer`` sends next on ``channel``."""

    @abstractmethod
    def all_reduce(self, tensor: Tensor, members: Members) -> PendingOperation:
        """Sum ``tensor`` in place over ``members``, one of the groups given to ``form``."""

    @abstractmethod
    def all_gather(self, target: Tensor, source: Tensor, members: Members) -> PendingOperation:
        """Fill ``target``, a whole vector, with the members' ranges of it (``member_range``).

        :param source: this rank's range of the vector.
        :param members: more than one rank, one of the groups given to ``form``.
        """

    @abstractmethod
    def reduce_scatter(self, target: Tensor, source: Tensor, members: Members) -> PendingOperation:
        """Give each member the sum of its range (``member_range``) over the members' ``source``.

        :param target: this rank's range.
        :param source: a whole vector, which must not change until this is done.
        :param members: more than one rank, one of the groups given to ``form``.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything when the main thread is done, aborted or not. It returns at once."""

    @property
    def world(self) -> Members:
        return tuple(range(self.size))

    def wait(self, pending: PendingOperation) -> None:
        """Wait until the operation is done: code that follows on this thread and its current stream sees the
        result.

        :raises CommunicationAborted: ``abort`` was called before the operation completed.
        :raises PeerLost: the operation failed without an abort.
        """
        with self._condition:
            while not (pending.done or self._aborted):
                self._condition.wait()
        if not pending.done:
            raise CommunicationAborted
        if pending.error is not None:
            self.check()  # An abort makes running operations fail, perhaps before this thread runs again.
            raise PeerLost(short_message(pending.error)) from pending.error

    def wait_any(self, pendings: Sequence[PendingOperation]) -> None:
        """Wait until at least one operation is done. Call ``wait`` for each of those to see its errors."""
        with self._condition:
            while not (self._aborted or any(pending.done for pending in pendings)):
                self._condition.wait()
        self.check()

    def check(self) -> None:
        """Raise if ``abort`` was called.

        :raises CommunicationAborted: ``abort`` was called.
        """
        if self._aborted:
            raise CommunicationAborted

    def abort(self) -> None:
        """Free the main thread at once. Any thread may call this at any time, more than once."""
        with self._condition:
            self._aborted = True
            self._condition.notify_all()

    def _finish(self, pending: PendingOperation, error: BaseException | None) -> None:
        with self._condition:
            pending.error = error
            pending.done = True
            self._condition.notify_all()

    def _start_forming(self, form: Callable[[], None]) -> PendingOperation:
        """Run ``form`` on a thread that an abort abandons."""
        pending = PendingOperation()

        def run() -> None:
            try:
                form()
            except Exception as error:  # Whatever it is, the main thread waits for this operation.
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
    """A world of one rank, which has no peers and never waits."""

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
        raise ValueError("a world of one rank has no peer to gather from")

    def reduce_scatter(self, target: Tensor, source: Tensor, members: Members) -> PendingOperation:
        raise ValueError("a world of one rank has no peer to reduce with")

    def close(self) -> None:
        pass
