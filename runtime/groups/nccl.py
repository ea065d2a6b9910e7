"""The communicator for CUDA devices: NCCL with the interface of ``runtime.groups.communicator``.

It has run with one rank on real GPUs. With several it has run only on emulated ones, in clusters that lose
nodes and trainers, over a stand-in for NCCL with the same order of operations
(``tests/helpers/emulated_gpu``).

NCCL differs from gloo in three ways:

* Operations are ordered on CUDA streams, and NCCL has no host-side wait that another thread can end.
  ``wait`` therefore polls until the operation is done and then orders the current stream after it. The host
  thus knows what it waits for (``ProgressMonitor.idle``) and never waits for a peer elsewhere, for example
  in ``.item()``. It runs ahead of the device in everything that needs no peer.
* Operations of one pair of ranks run in order on one stream, sends and receives alike: two ranks that both
  receive first would wait forever. Each channel and direction therefore has a group of its own. Activations
  and gradients cross each other in 1F1B, and two ranks may send each other state.
* Communicators *can* be aborted. Kernels that wait for a dead peer then end with garbage in their buffers,
  which nobody reads because ``wait`` raises.

torch's own watchdog would end the process of every survivor when it notices that a peer is gone or that an
abort takes long. The control plane decides that instead, so the watchdog is configured to ignore errors,
whatever the environment says.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from itertools import product

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, Work

from runtime.groups.communicator import (
    CHANNELS,
    MIN_GROUP_TIMEOUT_S,
    Channel,
    CommunicationAborted,
    CommunicationEdge,
    Communicator,
    Group,
    GroupError,
    Members,
    PeerLost,
    PendingOperation,
    member_range,
    short_message,
)
from runtime.groups.store import Rendezvous, RendezvousStore

_POLL_S = 50e-6
"""Interval between two queries of a CUDA event."""


_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""Environment variables that each process group reads when it is created."""


class _IssuedOperation(PendingOperation):
    __slots__ = ("work",)

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def is_complete(self) -> bool:
        if not self.done:
            self.done = self.work.is_completed()
        return self.done


class NcclCommunicator(Communicator):
    """A communicator over NCCL.
    :param device: the CUDA device of this rank.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        rank: int,
        size: int,
        device: torch.device,
        *,
        timeout_s: float = MIN_GROUP_TIMEOUT_S,
    ) -> None:
        super().__init__(rank, size)
        self._rendezvous = rendezvous
        self._device = device
        self._timeout_s = timeout_s
        self._groups: dict[tuple[Channel, bool] | Members, Group] = {}
        """Groups of a channel and of a direction (whether to a higher rank), and those for collectives."""
        self._store: RendezvousStore | None = None

    def form(self, groups: Sequence[Members], edges: Collection[CommunicationEdge] = ()) -> None:
        """Form the groups with a first all-reduce and a first send, on a thread that an abort abandons.

        NCCL forms its communicators during the first operation, on the calling thread, where no abort would
        reach it.
        """
        forming = self._start_forming(lambda: self._form(groups, edges))
        try:
            super().wait(forming)
        except PeerLost:
            if isinstance(forming.error, GroupError):
                raise forming.error from None  # No other group would succeed.
            raise

    def _form(self, groups: Sequence[Members], edges: Collection[CommunicationEdge]) -> None:
        torch.cuda.set_device(self._device)
        os.environ.update(_WATCHDOG)
        store = RendezvousStore(self._rendezvous, self.rank, self._timeout_s)
        with self._condition:
            self._store = store
            aborted = self._aborted
        if aborted:  # Nobody else would close the store, which waits for the other ranks.
            store.close()
            raise CommunicationAborted
        self._check_devices(store)
        for channel, upwards in product(CHANNELS, (True, False)):
            name = f"{channel}-{'up' if upwards else 'down'}"
            self._groups[channel, upwards] = self._make_group(store, name, self.world)
        for members in dict.fromkeys((self.world, *groups)):
            if self.rank in members and len(members) > 1:
                group = self._groups[members] = self._make_group(store, "-".join(map(str, members)), members)
                self.check()  # An abort ends only the groups that exist by then.
                group.allreduce([torch.zeros(1, device=self._device)]).wait()
        self._connect_peers(edges)
        torch.cuda.current_stream().synchronize()

    def _check_devices(self, store: RendezvousStore) -> None:
        """Check that each rank has its own device, because NCCL rejects shared ones.

        :raises GroupError: ranks share a device.
        """
        store.set(f"device-{self.rank}", self._device_identity())
        ranks: dict[bytes, list[int]] = {}
        for rank, identity in enumerate(store.multi_get([f"device-{rank}" for rank in self.world])):
            ranks.setdefault(identity, []).append(rank)
        shared = [found for found in ranks.values() if len(found) > 1]
        if shared:
            raise GroupError(
                f"NCCL needs a GPU for each trainer, but ranks {', '.join(map(str, shared[0]))} share one: run fewer "
                'trainers on that host (node.devices, or --nodes of ftd local), or set training.backend = "gloo" and '
                'training.device = "cuda", with which trainers may share a GPU'
            )

    def _device_identity(self) -> str:
        return str(torch.cuda.get_device_properties(self._device).uuid)

    def _connect_peers(self, edges: Collection[CommunicationEdge]) -> None:
        """Form the communicator of each edge by a first send.

        All ranks use the same order, so there is no circular wait. Every other pair of neighbours comes
        first, so a long pipeline takes two turns instead of one for each stage.
        """

        def turn(edge: CommunicationEdge) -> tuple[str, bool, int, int, int]:
            channel, source, target = edge
            low, high = sorted((source, target))
            return channel, source < target, low % 2, low, high

        for channel, source, target in sorted(set(edges), key=turn):
            if self.rank in (source, target):
                self.check()
                token, group = torch.zeros(1, device=self._device), self._groups[channel, source < target]
                is_source = self.rank == source
                (group.send([token], target, 0) if is_source else group.recv([token], source, 0)).wait()

    def _make_group(self, store: RendezvousStore, name: str, members: Members) -> Group:
        self.check()
        backend = dist.ProcessGroupNCCL
        options = backend.Options()
        options._timeout = timedelta(seconds=self._timeout_s)
        return backend(PrefixStore(name, store), members.index(self.rank), len(members), options)

    def send(self, tensor: Tensor, peer: int, channel: Channel) -> PendingOperation:
        return self._issue(lambda: self._groups[channel, self.rank < peer].send([tensor], peer, 0))

    def receive(self, tensor: Tensor, peer: int, channel: Channel) -> PendingOperation:
        return self._issue(lambda: self._groups[channel, peer < self.rank].recv([tensor], peer, 0))

    def all_reduce(self, tensor: Tensor, members: Members) -> PendingOperation:
        if len(members) == 1:
            self.check()
            return PendingOperation(done=True)
        return self._issue(lambda: self._groups[members].allreduce([tensor]))

    def all_gather(self, target: Tensor, source: Tensor, members: Members) -> PendingOperation:
        if target.numel() % len(members) == 0:
            return self._issue(lambda: self._groups[members]._allgather_base(target, source))
        ranges = _ranges(target, len(members))
        return self._issue(lambda: self._groups[members].allgather([ranges], [source]))

    def reduce_scatter(self, target: Tensor, source: Tensor, members: Members) -> PendingOperation:
        if source.numel() % len(members) == 0:
            return self._issue(lambda: self._groups[members]._reduce_scatter_base(target, source))
        ranges = _ranges(source, len(members))
        return self._issue(lambda: self._groups[members].reduce_scatter([target], [ranges]))

    def _issue(self, issue: Callable[[], Work]) -> PendingOperation:
        """Issue an operation, which NCCL rejects if its group is aborted or broken.

        :raises PeerLost: the group is broken without an abort.
        """
        self.check()
        try:
            return _IssuedOperation(issue())
        except Exception as error:
            self.check()  # An abort may have come since.
            if isinstance(error, dist.DistBackendError):
                raise PeerLost(short_message(error)) from error
            raise

    def wait(self, pending: PendingOperation) -> None:
        if not isinstance(pending, _IssuedOperation):
            super().wait(pending)
            return
        self.wait_any([pending])
        try:
            pending.work.wait()
        except RuntimeError as error:
            self.check()
            raise PeerLost(short_message(error)) from error
        self.check()  # The abort may have ended it.

    def wait_any(self, pendings: Sequence[PendingOperation]) -> None:
        while True:
            self.check()
            if any(pending.is_complete() for pending in pendings):
                return
            time.sleep(_POLL_S)

    def abort(self) -> None:
        super().abort()
        with self._condition:
            store, self._store = self._store, None
        if store is not None:
            store.close()
        # ncclCommAbort can take long, and wait for another communicator's. The caller must not wait for it,
        # so each group has a thread, which keeps the group alive after the main thread has released it.
        for group in list(self._groups.values()):
            threading.Thread(
                target=_abort_group, args=(group,), name="communication-abort", daemon=True
            ).start()

    def close(self) -> None:
        groups, self._groups = self._groups, {}
        with self._condition:
            store, self._store = self._store, None
        if store is not None:
            store.close()
        threading.Thread(target=groups.clear, name="communication-close", daemon=True).start()


def _abort_group(group: Group) -> None:
    with contextlib.suppress(
        RuntimeError
    ):  # It took longer than the group's timeout, and no code waits for it.
        group.abort()


def _ranges(vector: Tensor, members: int) -> list[Tensor]:
    cuts = [member_range(vector.numel(), index, members) for index in range(members)]
    return [vector[start:end] for start, end in cuts]
