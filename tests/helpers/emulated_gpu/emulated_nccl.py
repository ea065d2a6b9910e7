"""NCCL between processes with emulated GPUs: the part of torch's ProcessGroupNCCL that the project uses, over gloo.

As with NCCL,

* tensors must be dense and on the device;
* the first operation with a peer, or of the whole group, makes a communicator: the caller waits until the others
  begin it, too;
* operations with one peer run one after the other, sends and receives alike, so that two ranks that both receive
  first wait forever;
* the host can only ask whether an operation is complete, and none ever completes whose peer is gone, until the
  group is aborted: then its buffers hold garbage.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist


class Work:
    """An operation that was issued."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        """Order the current stream after the operation: here, the host waits."""
        self._ended.wait()

    def end(self) -> None:
        self._ended.set()


class Stream:
    """The operations with one peer, or of the whole group."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], None], Work] | None] = SimpleQueue()
        self.put, self.under_way = self._queue.put, set[Work]()
        threading.Thread(target=self._run, name="emulated-nccl", daemon=True).start()

    def _run(self) -> None:
        while (issued := self._queue.get()) is not None:
            run, work = issued
            try:
                run()
            except RuntimeError:
                return  # The peer is gone.
            work.end()
            self.under_way.discard(work)
            del issued, run, work


class Options:
    """Options of a group."""

    _timeout = timedelta(seconds=600)


class ProcessGroupNCCL:
    """A group of ranks, each with a GPU of its own."""

    Options = Options

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, options._timeout) if size > 1 else None
        self._streams: dict[tuple[int, ...], Stream] = {}
        self._lock = threading.Lock()
        self._aborted = False

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        group, shared, own = self._group, _shared(tensors[0]), self._rank
        return self._issue(self._pair(peer), lambda: group.send([shared], peer, own).wait())

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        group, shared = self._group, _shared(tensors[0])
        return self._issue(self._pair(peer), lambda: group.recv([shared], peer, peer).wait())

    def allreduce(self, tensors: list[Tensor]) -> Work:
        group, shared = self._group, _shared(tensors[0])
        return self._issue(self._all, lambda: _reduce(group, shared))

    def _allgather_base(self, target: Tensor, source: Tensor) -> Work:
        return self.allgather([list(target.chunk(self._size))], [source])

    def allgather(self, targets: list[list[Tensor]], sources: list[Tensor]) -> Work:
        group, own = self._group, self._rank
        parts, source = [_shared(part) for part in targets[0]], _shared(sources[0])

        def gather() -> None:
            parts[own].copy_(source)
            for rank, part in enumerate(parts):
                if group is not None and part.numel():
                    group.broadcast(part, rank).wait()

        return self._issue(self._all, gather)

    def _reduce_scatter_base(self, target: Tensor, source: Tensor) -> Work:
        return self.reduce_scatter([target], [list(source.chunk(self._size))])

    def reduce_scatter(self, targets: list[Tensor], sources: list[list[Tensor]]) -> Work:
        group, own = self._group, self._rank
        target, parts = _shared(targets[0]), [_shared(part) for part in sources[0]]

        def reduce() -> None:
            total = torch.cat(parts)
            _reduce(group, total)
            target.copy_(total.split([part.numel() for part in parts])[own])

        return self._issue(self._all, reduce)

    @property
    def _all(self) -> tuple[int, ...]:
        return tuple(range(self._size))

    def _pair(self, peer: int) -> tuple[int, ...]:
        return tuple(sorted((self._rank, peer)))

    def _issue(self, ranks: tuple[int, ...], run: Callable[[], None]) -> Work:
        if ranks not in self._streams:
            name = f"communicator {'-'.join(map(str, ranks))} of rank"
            self._store.set(f"{name} {self._rank}", b"made")
            for rank in ranks:
                self._store.get(f"{name} {rank}")
            self._streams[ranks] = Stream()
        work, stream = Work(), self._streams[ranks]
        with self._lock:
            if self._aborted:
                raise dist.DistBackendError("NCCL communicator was aborted")
            stream.under_way.add(work)
        stream.put((run, work))
        return work

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            for stream in self._streams.values():
                for work in list(stream.under_way):
                    work.end()

    def __del__(self) -> None:
        for stream in self._streams.values():
            stream.put(None)


def _reduce(group: Any, tensor: Tensor) -> None:
    if group is not None:
        group.allreduce([tensor]).wait()


def _shared(tensor: Tensor) -> Tensor:
    """Return the memory of a device's tensor as a tensor of the host."""
    if not tensor.is_cuda or not tensor.is_contiguous():
        raise ValueError("Tensors must be CUDA and dense")
    shared: Tensor = torch.ops.emulated_gpu.host_memory(tensor)
    return shared
