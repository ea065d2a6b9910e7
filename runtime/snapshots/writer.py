"""The thread that writes this rank's part of snapshots into its arena while training goes on (REFT §4.1).

It alone changes the arena, one task after the other: make room, copy and commit a snapshot, mend, release.
When it copies is ``runtime.snapshots.schedule``'s to say. The main thread begins a snapshot behind a commit
and comes to ``finish`` before it changes the state again; there it helps, so it waits for one memcpy at most.
Nothing here may end training: what cannot be kept is reported as ``SnapshotFailed``, and older ones stay.
"""

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runtime.layers.model import Model
from runtime.layers.state import LayerStates
from runtime.monitoring.progress import ProgressMonitor
from runtime.side_stream import SideStreams
from runtime.snapshots.capture import TrainerCapture
from runtime.snapshots.groups import LayerGroup
from runtime.snapshots.movers import DeviceMover, HostMover, Mover
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
"""Made beforehand: of the last snapshot and the next. The third is rarely needed."""
_POLL_S = 0.002
"""How often the copier looks whether it may still wait for bubbles."""
_SLACK_BYTES = 1024 * 1024
"""Headers grow with their numbers: room for that, or every slot would be made anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reserve:
    size_bytes: int
    read: frozenset[tuple[int, int]]
    """Address and size of what snapshots will be copied from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keep:
    step: int
    pinned: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forget:
    """Snapshots of later steps: of a past that was undone."""

    after_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filled:
    """A snapshot that was completed in a slot."""

    address: int
    size_bytes: int
    parts: tuple[SnapshotPart, ...]


_Task = TrainerCapture | _Reserve | _Keep | _Forget | RepairWrite


class SnapshotWriter:
    """
    :param sharding: where state is shared out: what this rank has of it.
    :param report: sends to the node; from any thread.
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
        self._check_found()
        self._groups: tuple[LayerGroup, ...] = ()
        self._is_async = model.runtime.is_async
        self._side = SideStreams(lambda _: model.runtime)
        self._mover: Mover = DeviceMover(model.device, self._side) if self._is_async else HostMover()
        self._schedule = CopySchedule(has_own_link=self._is_async)
        self._capture: TrainerCapture | None = None
        """The newest, while it may be being copied."""
        self._reserved = False
        self._filled: dict[int, _Filled] = {}
        """By a slot's number, what it holds of the present generation. The thread's own."""
        self._kept: int | None = None
        self._pinned = 0
        self._spared: int | None = None
        """The newest when room was made the last time."""
        self._changed = threading.Condition()
        self._tasks: deque[_Task] = deque()
        self._stopped = False
        self._window = monitor.peer_wait = threading.Event()
        self._thread = threading.Thread(target=self._run, name="snapshot", daemon=True)
        self._thread.start()

    # --- main thread -----------------------------------------------------------------------------

    def begin_generation(self, groups: tuple[LayerGroup, ...], step: int) -> None:
        """A generation begins, at ``step``."""
        self._groups, self._reserved = groups, False
        self.enqueue(_Forget(after_step=step))

    def begin(self, generation: int, step: int, vote: Vote) -> None:
        """``step`` is committed: copy the state as it is now. Small things are copied at once."""
        started = time.monotonic()
        self._settle()
        self._window.clear()
        if not self._groups:
            # Other ranks of the stage write, and hold the same bytes.
            self._report(
                ShardWritten(
                    generation=generation, step=step, size_bytes=0, copy_s=0.0, stall_s=0.0, idle_bytes=0
                )
            )
            return
        try:
            with (
                self._monitor.waiting_for_device()
            ):  # Buffers are copied at once, as soon as they are computed.
                capture = self._made(generation, step, vote)
        except Exception as error:
            self._report(SnapshotFailed(generation=generation, step=step, detail=_words(error)))
            return
        capture.stall_s = time.monotonic() - started
        with self._changed:
            self._capture = capture
            self._schedule.discount()
        self.enqueue(capture)

    def record_step(self, elapsed: StepTimes) -> None:
        """Behind every step: it took so long, and so much of it was waiting.

        Behind the first of a generation room is made for its snapshots, in the background: only now there
        is an optimizer's state to measure, and nobody waits for this generation any more.
        """
        with self._changed:
            self._schedule.record_step(elapsed)
        if self._groups and not self._reserved:
            self._reserved = True
            with contextlib.suppress(Exception):  # The first snapshot will fail of it, and say so.
                sized = self._made(0, 0, Vote(loss=0.0, gradient_norm=0.0))
                size_bytes = sized.size_bytes + _SLACK_BYTES
                self.enqueue(_Reserve(size_bytes=size_bytes, read=frozenset(sized.host_ranges())))

    def finish(self) -> None:
        """Return when what was begun is copied, and the state may change. Helps with what is left."""
        with self._changed:
            capture, self._capture = self._capture, None
            if capture is None or capture.done:
                return
            capture.hurried = capture.waiting = True
            self._changed.notify_all()
        self._window.set()
        began_s, started = time.time(), time.monotonic()
        try:
            self._stand(lambda: capture.slot is not None or capture.failed)
            while not capture.failed and self._make_next(capture, idle=False):
                self._monitor.progress += 1
            self._stand(lambda: capture.done)
        finally:
            stood_s = time.monotonic() - started
            self._monitor.trace.add("stall", began_s, began_s + stood_s, capture.step)
            with self._changed:
                capture.stall_s += stood_s
                capture.waiting = False
                self._changed.notify_all()

    def hurry(self) -> None:
        """The generation is over: copy what was begun at the speed of memory; does not wait."""
        with self._changed:
            if self._capture is not None:
                self._capture.hurried = True
        self._window.set()

    def close(self) -> None:
        """Finish what was begun and end the thread; what is complete stays in the arena."""
        self.finish()
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()
        self._monitor.peer_wait = None
        self._side.close()
        self._arena.close()

    # --- any thread ------------------------------------------------------------------------------

    def retain(self, step: int, pinned: int = 0) -> None:
        """The snapshot of ``step`` is complete everywhere: older ones may go, but that of ``pinned``."""
        self.enqueue(_Keep(step=step, pinned=pinned))

    def enqueue(self, task: _Task) -> None:
        """Something for the thread to do, behind what it was given before."""
        with self._changed:
            self._tasks.append(task)
            self._changed.notify_all()

    # --- both threads ----------------------------------------------------------------------------

    def _made(self, generation: int, step: int, vote: Vote) -> TrainerCapture:
        unit_bytes = self._schedule.unit_bytes
        capture = TrainerCapture(generation=generation, step=step, vote=vote, unit_bytes=unit_bytes)
        for group in self._groups:
            if not group.parted:
                capture.add(group, self._states, self._mover)
            else:
                assert self._sharding is not None, "parts are of a sharding"
                add_parts(capture, group, self._model, self._sharding, self._mover)
        if self._is_async:
            self._side.begin({self._device})  # Behind what was gathered on the device just now, too.
        return capture

    def _make_next(self, capture: TrainerCapture, *, idle: bool) -> bool:
        """Make one more unit. False: there is none left to take."""
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

    def _stand(self, ready: Callable[[], bool]) -> None:
        """Wait, and show that this is no hang: making room for a large slot can take seconds."""
        with self._changed:
            while not ready():
                self._changed.wait(0.05)
                self._monitor.progress += 1

    def _settle(self) -> None:
        """The one before is complete: its slot must be known to be in use before another is taken."""
        self.finish()
        self._stand(lambda: not any(isinstance(task, TrainerCapture) for task in self._tasks))

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
                self._do(task)
            except Exception as error:
                # Also what nobody foresaw: a thread that is gone would keep the main thread waiting.
                self._give_up(task, error)
            with self._changed:
                self._tasks.popleft()
                self._changed.notify_all()

    def _do(self, task: _Task) -> None:
        match task:
            case TrainerCapture():
                self._carry(task)
            case _Reserve():
                self._filled.clear()
                self._arena.reserve(task.size_bytes, _SLOTS)
                collapse_pages(task.read)
            case _Keep():
                self._kept, self._pinned = task.step, task.pinned
                steps = [manifest.step for manifest in self._arena.snapshots]
                self._arena.release(step for step in steps if step < task.step and step != task.pinned)
            case RepairWrite():
                self._arena.rewrite(task.step, task.generation, task.part, task.offset, task.data)
            case _Forget():
                self._filled.clear()  # A generation begins: layers, and their places, may be others.
                self._arena.release(m.step for m in self._arena.snapshots if m.step > task.after_step)

    def _carry(self, capture: TrainerCapture) -> None:
        self._make_room()
        slot = self._arena.begin(capture.size_bytes)
        if self._is_async:
            self._side.pin(slot.number, slot.view)
        address = slot.view.ctypes.data
        before = self._filled.pop(slot.number, None)
        with self._changed:
            # A slot that was made larger meanwhile lies elsewhere, or holds less than it is to hold.
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
            self._filled[slot.number] = _Filled(address=address, size_bytes=capture.size_bytes, parts=parts)
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
        """Return when a unit may be made; True: while the main thread waits for others."""
        monitor = self._monitor
        while True:
            waiting = monitor.waiting and monitor.waiting_for != "device"
            period = self._schedule.period(waiting=waiting, for_sums=monitor.waiting_for == "sync")
            with self._changed:
                so_far = StepTimes(step_s=capture.age_s, waits_s=monitor.bubble_s, sums_s=monitor.sync_s)
                if (
                    capture.hurried
                    or capture.taken == len(capture.units)
                    or self._schedule.may_copy(period, capture.left_bytes, so_far)
                ):
                    return waiting
            if waiting:
                time.sleep(_POLL_S)  # The window is open, and what it shows is not for copies.
            else:
                self._window.wait(_POLL_S)

    def _make_room(self) -> None:
        """Keep the one that is complete everywhere, a pinned one, and the newest.

        A snapshot is ordered only when none is under way, so of those behind the kept one all but the
        newest were given up; that one's KeepSnapshot may be on its way. Who does not know yet which is
        kept, as its process is new, takes the oldest for it.

        Where these three are different ones there is no room: the first snapshot fails of it, and when
        another was ordered nevertheless, the newest was given up as well.
        """
        steps = sorted(manifest.step for manifest in self._arena.snapshots)
        kept = self._kept if self._kept in steps else steps[0] if steps else None
        stay = {step for step in steps if step in (kept, self._pinned)}
        newest = steps[-1] if steps else None
        if newest is not None and (len(stay | {newest}) < SLOTS or newest != self._spared):
            stay.add(newest)
        self._spared = newest
        self._arena.release(step for step in steps if step not in stay)

    def _give_up(self, task: _Task, error: Exception) -> None:
        if not isinstance(task, TrainerCapture):
            # The next snapshot will say the same to those who decide; this is for people.
            print(f"snapshots: {_words(error)}", file=sys.stderr, flush=True)
            return
        with self._changed:
            task.error = error
            self._changed.notify_all()
            # A helper may still write into the slot: it must not be given to the next one before.
            self._changed.wait_for(lambda: task.copied == task.taken and not task.waiting)
        self._report(SnapshotFailed(generation=task.generation, step=task.step, detail=_words(error)))

    def _check_found(self) -> None:
        """What another process left here is this job's, or released.

        Not whether it is sound: who reads it verifies it, and the node has bytes that changed made again.
        """
        self._arena.release(m.step for m in self._arena.snapshots if m.job_id != self._job_id)
        for problem in self._arena.problems:
            print(f"snapshots: {problem}", file=sys.stderr, flush=True)


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, StorageError) else f"{type(error).__name__}: {error}"
