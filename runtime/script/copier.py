"""The thread that copies a snapshot into the arena while the script goes on computing.

A snapshot consists of units, which the copier copies one after the other; numpy copies and XXH3 release the
interpreter lock. A thread that is about to change the state (an optimizer's step) calls ``finish`` and
copies units as well, so that it waits for at most one shared memcpy. Each block is hashed just before it is
copied, which brings it into the cache. While a thread waits, copying comes first and blocks are hashed
afterwards.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from runtime.script.plain_state import SnapshotError
from runtime.script.tensor_image import Bytes, CopyUnit, Source
from runtime.side_stream import SideStreams, copy_async
from storage.arena import Slot
from storage.manifest import BLOCK_BYTES, SnapshotPart, digest_of
from storage.shards import xor_into

HEADER = "header"
_EXIT_S = 60.0


def part_name(rank: int, what: str, number: int | None = None) -> str:
    """Return the name of a part of a rank's snapshot, which is unique among all ranks."""
    return f"rank-{rank}/{what}" if number is None else f"rank-{rank}/{what}-{number:05d}"


class _Interrupted(SnapshotError):
    def __init__(self, by: str) -> None:
        super().__init__(f"it was not copied to its end: {by}")


@dataclass(slots=True, eq=False)
class ScriptCapture:
    """A snapshot of a script while it is being copied. The copier's lock guards the fields that change."""

    step: int
    rank: int
    units: list[CopyUnit]
    """Units of the shared image, then those of this rank's own."""
    shared_units: int
    sources: list[Source]
    body_bytes: int
    """Bytes of all units together; the header follows them."""
    header: Callable[[], bytes]
    """Function that makes the header; the copier's thread calls it."""
    layout: dict[str, Any]
    devices: set[torch.device] = field(default_factory=set)
    slot: Slot | None = None
    taken: int = 0
    copied: int = 0
    helpers: int = 0
    """Number of threads in ``finish`` that may be copying a unit."""
    failed: bool = False
    """Whether the snapshot was abandoned, so that nobody needs to wait for it."""
    error: Exception | None = None
    """Exception of a thread that copied a unit; the copier's thread raises it."""
    digests: dict[int, str] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether the state may be changed; on a device, after its copies (``SideStreams.make_compute_wait``)."""
        return self.failed or self.copied == len(self.units)

    @property
    def writes_ended(self) -> bool:
        """Whether nobody writes into the slot any more. A unit that an interrupted helper took is never
        copied.
        """
        return self.helpers == 0 or self.copied == self.taken


@dataclass(slots=True, eq=False)
class SnapshotCopier:
    """The thread that copies captures into slots.

    :param open_slot: returns a slot of the given size in bytes; it may wait, and may raise.
    :param complete: writes the manifest, given the step, slot, parts and layout.
    :param failed: receives the exception for which a snapshot was dropped; training goes on.
    """

    open_slot: Callable[[int], Slot]
    complete: Callable[[int, Slot, tuple[SnapshotPart, ...], dict[str, Any]], None]
    failed: Callable[[int, Exception], None]
    streams: SideStreams = field(default_factory=SideStreams)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _queue: deque[ScriptCapture] = field(default_factory=deque)
    _waiting: int = 0
    _stopped: bool = False
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; called before the first snapshot, which need not wait for it then."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="ftd-copier", daemon=True)
            self._thread.start()

    def begin(self, capture: ScriptCapture) -> None:
        """Copy ``capture`` from now on. The caller must not change its tensors before ``finish`` returns."""
        self.start()
        self.streams.begin(capture.devices)
        with self._changed:
            self._queue.append(capture)
            self._changed.notify_all()

    def finish(self) -> None:
        """Help to copy what was begun, and return when the state may be changed."""
        with self._changed:
            begun = list(self._queue)
            pending = [capture for capture in begun if not capture.done]
            self._waiting += 1
        try:
            for capture in pending:
                self._help(capture)
        finally:
            with self._changed:
                self._waiting -= 1
        # This includes captures that are done: a device may still be executing their copies.
        for capture in begun:
            self.streams.make_compute_wait(capture.devices)

    def wait(self) -> None:
        """Wait until every capture is complete or was dropped."""
        self.finish()
        with self._changed:
            self._changed.wait_for(lambda: not self._queue)

    def close(self) -> None:
        if self._thread is not None:
            self.wait()
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            self._thread.join(_EXIT_S)
        self.streams.close()

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stopped)
                if not self._queue:
                    return
                capture = self._queue[0]
            try:
                self._write_capture(capture)
            except Exception as error:
                with self._changed:
                    capture.failed = True
                    self._changed.notify_all()
                self._drop(capture, error)
            with self._changed:
                self._queue.popleft()
                self._changed.notify_all()

    def _drop(self, capture: ScriptCapture, error: Exception) -> None:
        # A helper may still write into the slot, so the next snapshot must not get it before.
        with self._changed:
            self._changed.wait_for(lambda: capture.writes_ended)
        with contextlib.suppress(Exception):  # There is nothing to wait for on a failed device.
            self.streams.finish(capture.devices)
        self.failed(capture.step, error)

    def _write_capture(self, capture: ScriptCapture) -> None:
        self.streams.prepare_thread(capture.devices)
        header = capture.header()
        slot = self.open_slot(capture.body_bytes + len(header))
        if capture.devices:
            self.streams.pin(slot.number, slot.view)
        with self._changed:
            capture.slot = slot
            self._changed.notify_all()
        while (number := self._take_unit(capture)) is not None:
            self._copy(capture, number, self._copy_hashed)
        with self._changed:
            self._changed.wait_for(lambda: capture.writes_ended)
        if capture.error is not None:
            raise capture.error
        self.streams.finish(capture.devices)
        slot.view[capture.body_bytes : capture.body_bytes + len(header)] = np.frombuffer(header, np.uint8)
        parts = [
            SnapshotPart(
                name=part_name(capture.rank, "shared" if number < capture.shared_units else "own", number),
                offset=unit.offset,
                size_bytes=unit.size_bytes,
                digest=capture.digests.get(number) or self._digest(capture, number),
            )
            for number, unit in enumerate(capture.units)
        ]
        parts.append(
            SnapshotPart(
                name=part_name(capture.rank, HEADER),
                offset=capture.body_bytes,
                size_bytes=len(header),
                digest=digest_of(header),
            )
        )
        self.complete(capture.step, slot, tuple(parts), capture.layout)

    def _digest(self, capture: ScriptCapture, number: int) -> str:
        assert capture.slot is not None
        unit = capture.units[number]
        return digest_of(capture.slot.view[unit.offset : unit.offset + unit.size_bytes])

    # --- both threads ----------------------------------------------------------------------------

    def _help(self, capture: ScriptCapture) -> None:
        with self._changed:
            self._changed.wait_for(lambda: capture.slot is not None or capture.failed)
            capture.helpers += 1
        try:
            while (number := self._take_unit(capture)) is not None:
                self._copy(capture, number, self._copy_plainly)
        except BaseException as error:
            # Ctrl-C or a signal handler ended the script: the unit that was taken may be half copied.
            with self._changed:
                capture.error, capture.failed = _Interrupted(type(error).__name__), True
            raise
        finally:
            with self._changed:
                capture.helpers -= 1
                self._changed.notify_all()
        with self._changed:
            self._changed.wait_for(lambda: capture.done)

    def _take_unit(self, capture: ScriptCapture) -> int | None:
        with self._changed:
            if capture.failed or capture.taken == len(capture.units):
                return None
            capture.taken += 1
            return capture.taken - 1

    def _copy(
        self, capture: ScriptCapture, number: int, how: Callable[[ScriptCapture, int, Bytes], None]
    ) -> None:
        try:
            assert capture.slot is not None
            view = capture.slot.view
            for offset, size in capture.units[number].gaps:
                view[offset : offset + size] = 0
            how(capture, number, view)
        except Exception as error:
            # This may be the training thread, whose step is not affected.
            with self._changed:
                capture.error, capture.failed = error, True
        with self._changed:
            capture.copied += 1
            self._changed.notify_all()

    def _copy_hashed(self, capture: ScriptCapture, number: int, view: Bytes) -> None:
        """Copy a unit and hash it on the way; not while a thread waits, nor from a device. Parity is hashed
        after it is made.
        """
        unit = capture.units[number]
        if capture.devices or any(item.is_xor for item in unit.ranges):
            self._copy_plainly(capture, number, view)
            if not capture.devices and not self._waiting:
                capture.digests[number] = self._digest(capture, number)
            return
        hasher, end, hurried = xxhash.xxh3_128(), unit.offset, False
        for item in unit.ranges:
            source = capture.sources[item.entry][item.start : item.start + item.size_bytes]
            target = view[item.offset : item.offset + item.size_bytes]
            assert not isinstance(source, Tensor)
            hasher.update(view[end : item.offset].data)
            for first in range(0, item.size_bytes, BLOCK_BYTES):
                block = source[first : first + BLOCK_BYTES]
                hurried = hurried or self._waiting > 0
                if not hurried:
                    hasher.update(block.data)
                target[first : first + BLOCK_BYTES] = block
            end = item.offset + item.size_bytes
        hasher.update(view[end : unit.offset + unit.size_bytes].data)
        if not hurried:
            capture.digests[number] = hasher.hexdigest()

    def _copy_plainly(self, capture: ScriptCapture, number: int, view: Bytes) -> None:
        for item in capture.units[number].ranges:
            source = capture.sources[item.entry][item.start : item.start + item.size_bytes]
            target = view[item.offset : item.offset + item.size_bytes]
            if item.is_xor and isinstance(source, Tensor):
                with self.streams.on(source.device):  # This runs after the copy that it is XORed with.
                    xor_into(target, source.cpu().numpy())
            elif isinstance(source, Tensor):
                with self.streams.on(source.device):
                    copy_async(target, source)
            elif item.is_xor:
                # The copy that it is XORed with may still be on its way from a device.
                self.streams.finish(capture.devices)
                xor_into(target, source)
            else:
                target[:] = source
