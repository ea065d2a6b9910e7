"""The loader of one trainer: microbatches in the order of a plan, read ahead by workers.

``plan`` announces which microbatches will be loaded. Workers read them ahead in that order, up to a bounded
number. A reconfiguration announces another plan: microbatches that were read ahead and are still needed
stay, the others are dropped, and reads in progress are not waited for.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice

import torch

from runtime.data.batches import Batch, map_tensors
from runtime.data.reading import BatchReader, BatchReaders, MicrobatchKey
from runtime.data.workers import ForkServer
from runtime.errors import TrainingError
from runtime.parent import exit_sentence

PREFETCH_PER_WORKER = 2
"""Number of microbatches per worker that are read ahead or being read."""
_CHECK_EVERY_S = 0.01
_LOOK_AHEAD = 4096
"""Number of keys of a new plan that are compared with what was read ahead for the previous plan."""


class BatchLoader:
    """A loader of a job's microbatches, as trees of host tensors.

    It starts the workers. Make it before the first step, in a thread that lives as long as the trainer.

    :param held_out: reads the held-out data set, if there is one.
    :param workers: number of processes; with 0, ``load`` reads in the calling thread.
    :param pinned: return tensors in page-locked memory, from which copies to a GPU are asynchronous.
    """

    def __init__(
        self,
        training: BatchReader,
        held_out: BatchReader | None = None,
        *,
        workers: int = 0,
        pinned: bool = False,
    ) -> None:
        self._readers = BatchReaders(training, held_out)
        self._pinned = pinned
        self._pool = _Pool(self._readers, workers, pinned=pinned) if workers else None

    def plan(self, keys: Iterator[MicrobatchKey]) -> None:
        """Announce what will be loaded next, in order; this replaces the previous plan.

        :param keys: keys of the microbatches, perhaps endless; ``load`` consumes them gradually.
        """
        if self._pool is not None:
            self._pool.plan(keys)

    def load(
        self, step: int, microbatch: int, check: Callable[[], None] = lambda: None, *, batch: int = 0
    ) -> Batch:
        """Return a whole microbatch: rows ``[microbatch * microbatch_rows, …)`` of the global batch.

        A microbatch that no plan announced is loaded as well.

        :param check: called about every 10 ms while waiting for a worker, or before each sample if there
            are none; an exception from it ends the call.
        :param batch: global batch: see ``MicrobatchKey``.
        :raises TrainingError: the data set or the collate function failed, or workers were lost.
        """
        key = MicrobatchKey(step, batch, microbatch)
        if self._pool is not None:
            return self._pool.take(key, check)
        made = self._readers.read(key, check)
        if not self._pinned:
            return made
        return map_tensors(torch.Tensor.pin_memory, made)

    def close(self) -> None:
        """End the workers, without waiting for reads in progress."""
        if self._pool is not None:
            self._pool.close()


class _Pool:
    """Workers with one thread each, which waits for its worker while the main thread trains."""

    def __init__(self, readers: BatchReaders, workers: int, *, pinned: bool) -> None:
        self._pinned = pinned
        self._depth = PREFETCH_PER_WORKER * workers
        self._server = ForkServer(readers)
        self._server_lock = threading.Lock()
        self._workers = [self._server.fork() for _ in range(workers)]
        self._plan: Iterator[MicrobatchKey] = iter(())
        self._changed = threading.Condition()
        # `_changed` guards the following.
        self._needed: MicrobatchKey | None = None
        """Microbatch for which the trainer waits. It is read next, however many others are ready."""
        self._ahead: deque[MicrobatchKey] = deque()
        """Next keys of the plan that no worker reads yet."""
        self._reading: set[MicrobatchKey] = set()
        """Keys that are being read and still needed."""
        self._ready: dict[MicrobatchKey, Batch | TrainingError] = {}
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"data-worker-{number}", daemon=True)
            for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    # --- in the trainer's thread ---------------------------------------------------------------

    def plan(self, keys: Iterator[MicrobatchKey]) -> None:
        with self._changed:
            newest = max((key.step for key in (*self._reading, *self._ready)), default=0)
            ahead = list(islice(keys, self._depth))
            while ahead and ahead[-1].step <= newest and len(ahead) < _LOOK_AHEAD:
                before = len(ahead)
                ahead += islice(keys, self._depth)
                if len(ahead) == before:
                    break
            wanted = set(ahead)
            self._reading &= wanted
            self._ready = {key: batch for key, batch in self._ready.items() if key in wanted}
            self._ahead = deque(key for key in ahead if key not in self._reading and key not in self._ready)
            self._plan = keys
            self._needed = None
            self._changed.notify_all()

    def take(self, key: MicrobatchKey, check: Callable[[], None]) -> Batch:
        with self._changed:
            if self._closed:
                raise RuntimeError("the loader is closed")
            self._drop_before(key)
            self._needed = key
            self._changed.notify_all()
        while True:
            check()
            with self._changed:
                if key not in self._ready:
                    self._changed.wait(_CHECK_EVERY_S)
                if key in self._ready:
                    outcome = self._ready.pop(key)
                    self._needed = None
                    missing = self._depth - len(self._ahead)
                    self._ahead += islice(self._plan, max(0, missing))
                    self._changed.notify_all()
                    break
        if isinstance(outcome, TrainingError):
            raise outcome
        return outcome

    def _drop_before(self, key: MicrobatchKey) -> None:
        """Drop earlier batches: the trainer has used them, or will announce them again."""
        first = key._replace(microbatch=0)
        self._ready = {one: batch for one, batch in self._ready.items() if one >= first}
        self._reading = {one for one in self._reading if one >= first}
        self._ahead = deque(one for one in self._ahead if one >= first)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with self._server_lock:
            for worker in self._workers:
                worker.interrupt()
            self._server.close()
        for thread in self._threads:
            thread.join()
        for worker in self._workers:
            worker.close()

    # --- in the thread of a worker ---------------------------------------------------------------

    def _run(self, number: int) -> None:
        while (key := self._next()) is not None:
            try:
                outcome = self._read(number, key)
            except TrainingError as error:  # No worker can be started any more.
                outcome = error
            with self._changed:
                if key in self._reading:  # Otherwise the new plan does not need it.
                    self._reading.remove(key)
                    self._ready[key] = outcome
                    self._changed.notify_all()

    def _next(self) -> MicrobatchKey | None:
        """Wait for a microbatch to read, and return its key; ``None`` when the pool is closed."""
        with self._changed:
            while not self._closed:
                key = self._choose()
                if key is not None:
                    self._reading.add(key)
                    return key
                self._changed.wait()
        return None

    def _choose(self) -> MicrobatchKey | None:
        needed = self._needed
        if needed is not None and needed not in self._reading and needed not in self._ready:
            with suppress(ValueError):
                self._ahead.remove(needed)
            return needed
        while self._ahead and (self._ahead[0] in self._reading or self._ahead[0] in self._ready):
            self._ahead.popleft()
        if not self._ahead:
            return None
        # Batches read ahead for later steps of the previous plan must not delay a step that is repeated.
        earlier = sum(key < self._ahead[0] for key in (*self._reading, *self._ready))
        return self._ahead.popleft() if earlier < self._depth else None

    def _read(self, number: int, key: MicrobatchKey) -> Batch | TrainingError:
        """Read with worker ``number``; if it is lost, replace it and repeat the read once.

        :raises TrainingError: the server is gone, or the loader was closed.
        """
        microbatch = key.describe()
        for last in (False, True):
            worker = self._workers[number]
            try:
                return worker.read(key, pinned=self._pinned)
            except TrainingError as error:
                return error
            except EOFError:
                pass
            except Exception as error:  # No memory, perhaps; the socket still has the rest.
                self._replace(number)
                return TrainingError(f"{microbatch} cannot be received: {type(error).__name__}: {error}")
            how = self._replace(number)
            lost = f"data worker {number} (process {worker.pid}) {how} while it read {microbatch}"
            if not last:
                print(f"{lost}; it is replaced, and the read is repeated", file=sys.stderr, flush=True)
        return TrainingError(
            f"{lost}, and so did the worker before; look for a crash in native code of the data set, or for "
            "the kernel's out-of-memory killer (dmesg) and use fewer data workers"
        )

    def _replace(self, number: int) -> str:
        """Start another worker, and return how the previous one ended."""
        with self._server_lock:
            if self._closed:
                raise TrainingError("the loader is closed")
            lost = self._workers[number]
            status = self._server.reap(lost.pid)
            self._workers[number] = self._server.fork()
            lost.close()
        return exit_sentence(status) if status >= 0 else f"was {exit_sentence(status)}"
