"""The thread that writes this rank's part of snapshots into its arena while training goes on (REFT §4.1).

Only this thread changes the arena, one task after the other: it makes room, copies and commits snapshots,
writes repairs, and releases snapshots. ``runtime.snapshots.schedule`` decides when it copies. The main
thread begins a snapshot after a commit, and calls ``finish`` before it changes the state again; there it
helps, so that it waits for at most one memcpy. No error here ends training: a snapshot that fails is
reported as ``SnapshotFailed``, and older ones stay.
"""

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from runtime.layers.model import Model
from runtime.layers.state import LayerStates
from runtime.monitoring.progress import ProgressMonitor
from runtime.side_stream import SideStreams
from runtime.snapshots.capture import TrainerCapture
from runtime.snapshots.groups import LayerGroup
from runtime.snapshots.movers import DeviceMover, Mover
from runtime.snapshots.parts import add_parts
from runtime.snapshots.schedule import CopySchedule, StepTimes
from runtime.zero.sharding import ShardedState
from statemachine.messages.common import SnapshotFailed
from statemachine.messages.trainer import RepairWrite, ShardWritten, SnapshotReport
from statemachine.messages.values import Vote
from storage.arena import SLOTS, Arena
from storage.errors import StorageError
from storage.manifest import SnapshotManifest, SnapshotPart
from storage.pages import collapse_pages

_SLOTS = 2
"""Slots that are reserved: for the last snapshot and the next. The third is rarely needed."""
_MOST_HASH_THREADS = 8
_POLL_S = 0.002
"""Interval at which the copier checks whether it may still wait for bubbles."""
_SLACK_BYTES = 1024 * 1024
"""Spare bytes for headers, which grow with the numbers in them; otherwise every slot would be reallocated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SlotContent:
    """A snapshot that was completed in a slot."""

    address: int
    size_bytes: int
    parts: tuple[SnapshotPart, ...]


_Task = TrainerCapture | Callable[[], object]
"""A snapshot to write, or another change of the arena."""


class SnapshotWriter:
    """The writer of one rank's part of all snapshots.

    :param sharding: parts of the state that this rank has, if state is sharded.
    :param hash_threads: number of threads that compute digests of what was copied from a device. Bytes of host
        memory are hashed while they are copied.
    :param report: sends a report to the node daemon; called from any thread.
    """

    def __init__(
        self,
        *,
        job_id: str,
        directory: Path,
        limit_bytes: int | None,
        states: LayerStates,
        model: Model,
        sharding: ShardedState | None,
        monitor: ProgressMonitor,
        report: Callable[[SnapshotReport], None],
        hash_threads: int = 1,
    ) -> None:
        """:raises OSError: the arena cannot be made."""
        self._job_id = job_id
        self._states = states
        self._model = model
        self._sharding = sharding
        self._device = model.device
        self._monitor = monitor
        self._report = report
        self._arena = Arena.open(directory, limit_bytes=limit_bytes)
        self._release_foreign()
        self._groups: tuple[LayerGroup, ...] = ()
        self._is_async = model.runtime.is_async
        self._side = SideStreams(lambda _: model.runtime)
        self._mover: Mover = DeviceMover(model.device, self._side) if self._is_async else Mover()
        self._schedule = CopySchedule(has_own_link=self._is_async)
        self._hashing = (
            ThreadPoolExecutor(hash_threads, "digest") if self._is_async and hash_threads > 1 else None
        )
        self._capture: TrainerCapture | None = None
        """The newest capture, while it may still be copied."""
        self._reserved = False
        self._contents: dict[int, _SlotContent] = {}
        """Content of each slot in the present generation, by slot number. Only the thread uses it."""
        self._retained: int | None = None
        self._pinned = 0
        self._spared: int | None = None
        """Newest step when room was last made."""
        self._changed = threading.Condition()
        self._tasks: deque[_Task] = deque()
        self._stopped = False
        self._window = monitor.peer_wait = threading.Event()
        self._thread = threading.Thread(target=self._run, name="snapshot", daemon=True)
        self._thread.start()

    # --- main thread -----------------------------------------------------------------------------

    def begin_generation(self, groups: tuple[LayerGroup, ...], step: int) -> None:
        """Begin a generation at ``step``: save ``groups`` from now on, and release snapshots of later steps."""
        self._groups, self._reserved = groups, False
        self._enqueue(partial(self._release_after, step))

    def begin(self, generation: int, step: int, vote: Vote) -> None:
        """Begin to copy the current state, that of the committed ``step``. Small parts are copied before it
        returns.
        """
        started = time.monotonic()
        self.finish()
        # The slot of the previous snapshot must be known to be in use before another is taken.
        self._wait_until(lambda: not any(isinstance(task, TrainerCapture) for task in self._tasks))
        self._window.clear()
        if not self._groups:
            # Other ranks of the stage save it; they have the same bytes.
            self._report(
                ShardWritten(
                    generation=generation, step=step, size_bytes=0, copy_s=0.0, stall_s=0.0, idle_bytes=0
                )
            )
            return
        try:
            with (
                self._monitor.waiting_for_device()
            ):  # This waits for the device, since buffers are copied as soon as they are computed.
                capture = self._make_capture(generation, step, vote)
        except Exception as error:
            self._report(SnapshotFailed(generation=generation, step=step, detail=_reason_of(error)))
            return
        capture.stall_s = time.monotonic() - started
        with self._changed:
            self._capture = capture
            self._schedule.discount()
        self._enqueue(capture)

    def record_step(self, elapsed: StepTimes) -> None:
        """Record the times of a step that was committed.

        After the first step of a generation, memory is reserved for its snapshots in the background. Only
        then does the optimizer's state exist, so that its size is known, and nobody waits for this
        generation any more.
        """
        with self._changed:
            self._schedule.record_step(elapsed)
        if self._groups and not self._reserved:
            self._reserved = True
            # The first snapshot will fail for the same reason, and report it.
            with contextlib.suppress(Exception):
                sized = self._make_capture(0, 0, Vote(loss=0.0, gradient_norm=0.0))
                size_bytes = sized.size_bytes + _SLACK_BYTES
                self._enqueue(partial(self._reserve, size_bytes, sized.host_ranges()))

    def finish(self) -> None:
        """Help to copy what was begun, and return when the state may change."""
        with self._changed:
            capture, self._capture = self._capture, None
            if capture is None or capture.done:
                return
            capture.hurried = capture.waiting = True
            self._changed.notify_all()
        self._window.set()
        began_s, started = time.time(), time.monotonic()
        try:
            self._wait_until(lambda: capture.slot is not None or capture.failed)
            while not capture.failed and self._make_next(capture, idle=False):
                self._monitor.progress += 1
            self._wait_until(lambda: capture.done)
        finally:
            stood_s = time.monotonic() - started
            self._monitor.trace.add("stall", began_s, began_s + stood_s, capture.step)
            with self._changed:
                capture.stall_s += stood_s
                capture.waiting = False
                self._changed.notify_all()

    def hurry(self) -> None:
        """Copy what was begun at full speed, since the generation is over; does not wait."""
        with self._changed:
            if self._capture is not None:
                self._capture.hurried = True
        self._window.set()

    def close(self) -> None:
        """Finish what was begun and end the thread; complete snapshots stay in the arena."""
        self.finish()
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()
        self._monitor.peer_wait = None
        self._side.close()
        if self._hashing is not None:
            self._hashing.shutdown()
        self._arena.close()

    # --- any thread ------------------------------------------------------------------------------

    def retain(self, step: int, pinned: int = 0) -> None:
        """Release snapshots older than ``step``, except ``pinned``. That of ``step`` is complete on all nodes."""
        self._enqueue(partial(self._release_older, step, pinned))

    def write_repair(self, repair: RepairWrite) -> None:
        """Write repaired bytes into a snapshot, if it is still there."""
        where = repair.step, repair.generation, repair.part, repair.offset
        self._enqueue(partial(self._arena.rewrite, *where, repair.data))

    def _enqueue(self, task: _Task) -> None:
        """Append a task for the thread."""
        with self._changed:
            self._tasks.append(task)
            self._changed.notify_all()

    # --- both threads ----------------------------------------------------------------------------

    def _make_capture(self, generation: int, step: int, vote: Vote) -> TrainerCapture:
        unit_bytes = self._schedule.unit_bytes
        capture = TrainerCapture(generation=generation, step=step, vote=vote, unit_bytes=unit_bytes)
        for group in self._groups:
            if not group.parted:
                capture.add(group, self._states, self._mover)
            else:
                assert self._sharding is not None, "parts are of a sharding"
                add_parts(capture, group, self._model, self._sharding, self._mover)
        if self._is_async:
            # The stream must also begin after what was just gathered on the device.
            self._side.begin({self._device})
        return capture

    def _make_next(self, capture: TrainerCapture, *, idle: bool) -> bool:
        """Copy one more unit; return False if there is none left to take."""
        with self._changed:
            if capture.taken == len(capture.units) or capture.failed:
                return False
            unit = capture.units[capture.taken]
            capture.taken += 1
            own = threading.current_thread() is self._thread
            more = own and not capture.hurried and self._schedule.has_time(capture.left_bytes, capture.age_s)
            digests = capture.digests_at(unit) if more else None
        assert capture.slot is not None
        began_s, started = time.time(), time.monotonic()
        try:
            unit.write(capture.slot, digests)
            if self._hashing is not None:
                capture.hash_unit(unit, self._hashing)
        except Exception as error:
            capture.error = error
        finally:
            took_s = time.monotonic() - started
            kind = "copy" if own else "help"
            self._monitor.trace.add(kind, began_s, began_s + took_s, capture.step, unit.read_bytes)
            with self._changed:
                capture.copied += 1
                capture.copy_s += took_s
                capture.left_bytes -= unit.read_bytes
                capture.idle_bytes += unit.read_bytes if idle else 0
                self._schedule.record_copy(unit.read_bytes, took_s)
                self._changed.notify_all()
        return True

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait, and report progress, because making room for a large slot can take seconds and is not a hang."""
        with self._changed:
            while not ready():
                self._changed.wait(0.05)
                self._monitor.progress += 1

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._is_async:
            self._side.prepare_thread({self._device})
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._stopped)
                if not self._tasks:
                    return
                task = self._tasks[0]
            try:
                if isinstance(task, TrainerCapture):
                    self._write_capture(task)
                else:
                    task()
            except Exception as error:
                # Unexpected errors are included: if the thread ended, the main thread would wait forever.
                self._abandon(task, error)
            with self._changed:
                self._tasks.popleft()
                self._changed.notify_all()

    def _reserve(self, size_bytes: int, read: set[tuple[int, int]]) -> None:
        """Reserve slots.

        :param read: address and size of the memory from which snapshots will be copied.
        """
        self._contents.clear()
        for slot in self._arena.reserve(size_bytes, _SLOTS):
            if self._is_async:
                self._side.pin(slot.number, slot.view)
        collapse_pages(read)

    def _release_older(self, step: int, pinned: int) -> None:
        self._retained, self._pinned = step, pinned
        steps = [manifest.step for manifest in self._arena.snapshots]
        self._arena.release(one for one in steps if one < step and one != pinned)

    def _release_after(self, step: int) -> None:
        """Release snapshots of later steps, which a rollback undid."""
        self._contents.clear()  # In a new generation, layers may have other contents and positions.
        self._arena.release(m.step for m in self._arena.snapshots if m.step > step)

    def _write_capture(self, capture: TrainerCapture) -> None:
        self._make_room()
        slot = self._arena.begin(capture.size_bytes)
        if self._is_async:
            self._side.pin(slot.number, slot.view)
        address = slot.view.ctypes.data
        before = self._contents.pop(slot.number, None)
        with self._changed:
            # A slot that was enlarged meanwhile has another address, or holds less than the capture needs.
            if before is not None and before.address == address and before.size_bytes >= capture.size_bytes:
                capture.skip_frozen(before.parts)
            capture.slot = slot.view
            self._changed.notify_all()
        while self._make_next(capture, idle=self._await_turn(capture)):
            pass
        with self._changed:
            self._changed.wait_for(lambda: capture.done)
        if capture.error is not None:
            raise capture.error
        parts = capture.parts()
        self._arena.commit(
            SnapshotManifest(
                job_id=self._job_id,
                step=capture.step,
                generation=capture.generation,
                slot=slot.number,
                parts=parts,
                layout=capture.layout(),
            )
        )
        if capture.frozen:
            self._contents[slot.number] = _SlotContent(
                address=address, size_bytes=capture.size_bytes, parts=parts
            )
        with self._changed:
            self._changed.wait_for(lambda: not capture.waiting)
        self._report(
            ShardWritten(
                generation=capture.generation,
                step=capture.step,
                size_bytes=capture.size_bytes,
                copy_s=capture.copy_s,
                stall_s=capture.stall_s,
                idle_bytes=capture.idle_bytes,
            )
        )

    def _await_turn(self, capture: TrainerCapture) -> bool:
        """Wait until a unit may be copied; return whether the main thread is waiting for others."""
        monitor = self._monitor
        while True:
            waiting = monitor.waiting and monitor.waiting_for != "device"
            bubble = self._schedule.is_bubble(waiting=waiting, for_sums=monitor.waiting_for == "sync")
            with self._changed:
                so_far = StepTimes(step_s=capture.age_s, waits_s=monitor.bubble_s, sync_s=monitor.sync_s)
                if (
                    capture.hurried
                    or capture.taken == len(capture.units)
                    or self._schedule.may_copy(capture.left_bytes, so_far, bubble=bubble)
                ):
                    return waiting
            if waiting:
                time.sleep(_POLL_S)  # The main thread does wait, but in a period that is not for copies.
            else:
                self._window.wait(_POLL_S)

    def _make_room(self) -> None:
        """Release all snapshots except the newest one that is complete on all nodes, a pinned one, and the
        newest.

        A snapshot is requested only when none is in progress. So of those newer than the retained one, all
        but the newest were abandoned; RetainSnapshot for the newest may be on its way. A new process, which
        does not know which one is retained, assumes the oldest.

        If these are three different snapshots there is no room, and the first attempt fails. If another one
        is requested nevertheless, the newest was abandoned as well.
        """
        steps = sorted(manifest.step for manifest in self._arena.snapshots)
        retained = self._retained if self._retained in steps else steps[0] if steps else None
        stay = {step for step in steps if step in (retained, self._pinned)}
        newest = steps[-1] if steps else None
        if newest is not None and (len(stay | {newest}) < SLOTS or newest != self._spared):
            stay.add(newest)
        self._spared = newest
        self._arena.release(step for step in steps if step not in stay)

    def _abandon(self, task: _Task, error: Exception) -> None:
        if not isinstance(task, TrainerCapture):
            # The next snapshot fails for the same reason and reports it to the node; this line is for
            # people.
            print(f"snapshots: {_reason_of(error)}", file=sys.stderr, flush=True)
            return
        with self._changed:
            task.error = error
            self._changed.notify_all()
            # A helper may still write into the slot, so the next snapshot must not get it before.
            self._changed.wait_for(lambda: task.copied == task.taken and not task.waiting)
        self._report(SnapshotFailed(generation=task.generation, step=task.step, detail=_reason_of(error)))

    def _release_foreign(self) -> None:
        """Release what another job left in the arena.

        Whether the bytes are intact is not checked here: readers verify them, and the node repairs corrupt
        ones.
        """
        self._arena.release(m.step for m in self._arena.snapshots if m.job_id != self._job_id)
        for problem in (*self._arena.problems, *self._arena.newer.values()):
            print(f"snapshots: {problem}", file=sys.stderr, flush=True)


def usable_hash_threads(devices: int) -> int:
    """Return how many threads a trainer may hash with, so that those of a node together use at most half of its
    cores.

    :param devices: number of devices of the node.
    """
    return min(_MOST_HASH_THREADS, (os.cpu_count() or 1) // (2 * devices))


def _reason_of(error: Exception) -> str:
    return str(error) if isinstance(error, StorageError) else f"{type(error).__name__}: {error}"
