"""Worker processes that read microbatches, and the server from which they are forked.

A data set is in the trainer's memory and cannot be sent to another process without pickle, so workers are
forked. A running trainer has threads, sockets and device memory, which makes forking slow and unsafe;
therefore one *server* is forked before the first step. It only forks workers, including those that replace
a lost one, and passes their sockets (``SCM_RIGHTS``) and exit statuses to the trainer.

No process outlives the trainer: the kernel kills the server when the thread that forked it ends, and the
workers when the server ends (PR_SET_PDEATHSIG).

A trainer and a worker communicate through one stream socket. The trainer writes :class:`ReadRequest`; the
worker answers each with :class:`MicrobatchLoaded`, followed by the bytes of all tensors in the order of
the leaves, or with :class:`ReadFailed`.
"""

import contextlib
import gc
import os
import signal
import socket
import stat
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as tree

from runtime.data.batches import Batch
from runtime.data.reading import BatchReaders, MicrobatchKey
from runtime.errors import TrainingError
from runtime.parent import run_child
from runtime.precision import dtype_name
from runtime.wire.frames import MAX_FRAME_BYTES, Decoded, Decoder, Frame, ProtocolError, encode

_MOST_DETAIL = 1024 * 1024
"""Number of characters of an error that a worker sends; a data set may put a whole sample into it."""


class ReadRequest(Frame, frozen=True, kw_only=True):
    """Read a microbatch."""

    key: MicrobatchKey


class TensorLeaf(Frame, frozen=True, kw_only=True):
    """A tensor, whose bytes follow the frame."""

    dtype: str
    shape: tuple[int, ...]


class MicrobatchLoaded(Frame, frozen=True, kw_only=True):
    """The description of a microbatch that was read."""

    structure: str
    """The dicts, tuples and lists of the batch, as torch writes them as JSON."""
    leaves: list[TensorLeaf | bool | int | float | str | None]


class ReadFailed(Frame, frozen=True, kw_only=True):
    """The microbatch cannot be read; ``detail`` gives the reason."""

    detail: str


def send_batch(stream: socket.socket, batch: Batch, where: str) -> None:
    """Write :class:`MicrobatchLoaded` and the bytes of the batch's tensors.

    :param where: names the batch in errors.
    :raises TrainingError: what it holds besides tensors cannot be sent; nothing was written.
    """
    leaves, structure = tree.tree_flatten(batch)
    described = [
        TensorLeaf(dtype=dtype_name(leaf.dtype), shape=tuple(leaf.shape))
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in leaves
    ]
    try:
        frame = encode(MicrobatchLoaded(structure=tree.treespec_dumps(structure), leaves=described))
    except UnicodeEncodeError as error:
        raise TrainingError(
            f"{where} has a text that is no Unicode, which no data worker can send: {error}"
        ) from None
    if len(frame) > MAX_FRAME_BYTES:
        raise TrainingError(
            f"{where} has {len(frame)} bytes besides its tensors (texts, numbers and names), and a data worker can "
            f"send {MAX_FRAME_BYTES}: return tensors, leave out what the model does not need, or read without "
            "workers ([data] workers = 0)"
        )
    stream.sendall(frame)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.numel():
            stream.sendall(_bytes_of(leaf))


def receive_batch(stream: socket.socket, loaded: MicrobatchLoaded, *, pinned: bool) -> Batch:
    """Read the bytes of the tensors of a batch, into pinned memory if requested, and return the batch.

    :raises EOFError: the other end is closed.
    """
    leaves: list[Any] = []
    for leaf in loaded.leaves:
        if isinstance(leaf, TensorLeaf):
            tensor = torch.empty(leaf.shape, dtype=getattr(torch, leaf.dtype), pin_memory=pinned)
            if tensor.numel():
                _receive_into(stream, _bytes_of(tensor))
            leaves.append(tensor)
        else:
            leaves.append(leaf)
    return tree.tree_unflatten(leaves, tree.treespec_loads(loaded.structure))


def receive_frame(stream: socket.socket, decoder: Decoder[Decoded]) -> Decoded:
    """Read one frame, and not a byte of what follows it.

    :raises EOFError: the other end is closed.
    :raises ProtocolError: the frame is too long or malformed.
    """
    head = bytearray(4)
    _receive_into(stream, memoryview(head))
    decoder.feed(head)
    body = bytearray(int.from_bytes(head, "big"))
    _receive_into(stream, memoryview(body))
    return decoder.feed(body)[0]


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _receive_into(stream: socket.socket, view: memoryview) -> None:
    while view:
        received = stream.recv_into(view, flags=socket.MSG_WAITALL)
        if not received:
            raise EOFError("the other end is closed")
        view = view[received:]


class ForkRequest(Frame, frozen=True, kw_only=True):
    """Fork a worker; answered with :class:`Forked` and the worker's socket."""


class Forked(Frame, frozen=True, kw_only=True):
    """A worker runs in process ``pid``."""

    pid: int


class ReapRequest(Frame, frozen=True, kw_only=True):
    """End worker ``pid``, if it has not ended, and wait for it; answered with :class:`Reaped`."""

    pid: int


class Reaped(Frame, frozen=True, kw_only=True):
    """The worker has ended: with an exit code, or with minus the number of a signal."""

    status: int


class ForkServer:
    """The trainer's end of the server. Use it from one thread at a time.

    Make it before the first step, in a thread that lives as long as the trainer.
    """

    def __init__(self, readers: BatchReaders) -> None:
        self._control, theirs = socket.socketpair()
        self._forked: Decoder[Forked] = Decoder(Forked)
        self._reaped: Decoder[Reaped] = Decoder(Reaped)
        trainer = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            run_child(trainer, partial(_serve, readers, theirs))
        theirs.close()

    def fork(self) -> "DataWorker":
        """Start a worker.

        :raises TrainingError: the server is gone.
        """
        try:
            self._control.sendall(encode(ForkRequest()))
            forked = receive_frame(self._control, self._forked)
            # The socket travels with a byte of its own, so that it is not lost while the frame is read.
            _, descriptors, _, _ = socket.recv_fds(self._control, 1, 1, flags=socket.MSG_CMSG_CLOEXEC)
        except (OSError, EOFError) as error:
            raise self._gone() from error
        return DataWorker(forked.pid, socket.socket(fileno=descriptors[0]))

    def reap(self, pid: int) -> int:
        """End a worker and return its exit code, or minus the number of the signal that ended it.

        :raises TrainingError: the server is gone.
        """
        try:
            self._control.sendall(encode(ReapRequest(pid=pid)))
            return receive_frame(self._control, self._reaped).status
        except (OSError, EOFError) as error:
            raise self._gone() from error

    def close(self) -> None:
        """End the server, and every worker with it."""
        self._control.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _gone(self) -> TrainingError:
        return TrainingError(
            f"process {self.pid}, from which data workers are forked, has ended; if the kernel ran out of "
            "memory (see its log), use fewer workers or a data set that needs less memory"
        )


class DataWorker:
    """The trainer's end of one worker. Use it from one thread, except for :meth:`interrupt`."""

    def __init__(self, pid: int, stream: socket.socket) -> None:
        self.pid = pid
        self._stream = stream
        self._answers: Decoder[MicrobatchLoaded | ReadFailed] = Decoder(MicrobatchLoaded | ReadFailed)

    def read(self, key: MicrobatchKey, *, pinned: bool) -> Batch:
        """Return a microbatch.

        :raises TrainingError: the data set or the collate function failed.
        :raises EOFError: the worker has ended, or :meth:`interrupt` was called.
        """
        try:
            self._stream.sendall(encode(ReadRequest(key=key)))
            answer = receive_frame(self._stream, self._answers)
            if isinstance(answer, ReadFailed):
                raise TrainingError(answer.detail)
            return receive_batch(self._stream, answer, pinned=pinned)
        except (OSError, ProtocolError) as error:
            raise EOFError(str(error)) from error

    def interrupt(self) -> None:
        """Make a running :meth:`read` of another thread raise ``EOFError``."""
        with contextlib.suppress(OSError):
            self._stream.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._stream.close()


# --- in the server ---------------------------------------------------------------------------------


def _serve(readers: BatchReaders, control: socket.socket) -> None:
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Only the trainer handles Ctrl-C in a terminal.
    _drop_sockets(control)
    gc.freeze()  # Workers never traverse these objects, which would copy their pages.
    _serve_forks(readers, control)


def _drop_sockets(excluded: socket.socket) -> None:
    """Release the trainer's sockets, since peers must see them closed when the trainer ends.

    Their descriptors stay in use (for /dev/null), because objects of the trainer still refer to them.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for path in list(Path("/proc/self/fd").iterdir()):
        descriptor = int(path.name)
        if descriptor <= 2 or descriptor == excluded.fileno():
            continue
        with contextlib.suppress(OSError):  # The directory's own descriptor is closed by now.
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.dup2(null, descriptor)
    os.close(null)


def _serve_forks(readers: BatchReaders, control: socket.socket) -> None:
    orders: Decoder[ForkRequest | ReapRequest] = Decoder(ForkRequest | ReapRequest)
    while True:
        try:
            order = receive_frame(control, orders)
        except EOFError:
            return
        if isinstance(order, ReapRequest):
            with contextlib.suppress(ProcessLookupError):
                # This does not change the status of a worker that has ended.
                os.kill(order.pid, signal.SIGKILL)
            _, status = os.waitpid(order.pid, 0)
            control.sendall(encode(Reaped(status=os.waitstatus_to_exitcode(status))))
            continue
        server = os.getpid()
        ours, trainers = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            trainers.close()
            control.close()
            run_child(server, partial(_serve_reads, readers, ours))
        ours.close()
        control.sendall(encode(Forked(pid=pid)))
        socket.send_fds(control, [b"\0"], [trainers.fileno()])
        trainers.close()


# --- in a worker -----------------------------------------------------------------------------------


def _serve_reads(readers: BatchReaders, stream: socket.socket) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # Its threads do not exist after the fork.
    orders: Decoder[ReadRequest] = Decoder(ReadRequest)
    while True:
        try:
            order = receive_frame(stream, orders)
        except EOFError:
            return
        try:
            send_batch(stream, readers.read(order.key), order.key.describe())
        except TrainingError as error:
            detail = str(error)[:_MOST_DETAIL].encode(errors="backslashreplace").decode()
            stream.sendall(encode(ReadFailed(detail=detail)))
