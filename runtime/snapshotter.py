"""Snapshots of any PyTorch script's state in its host's memory, at next to no cost to training.

    snapshots = Snapshotter("my-run", model=model, optimizer=optimizer, progress=progress)
    start = snapshots.restore() or 0
    for step in range(start + 1, steps + 1):
        ...
        snapshots.snapshot(step)

``snapshot`` notes what is small (buffers, numbers, random states) and returns; a thread copies parameters
and optimizer states while the next forward and backward pass are computed, and ``optimizer.step()`` waits
for what is left of that. The bytes are files of a memory file system: they outlive the process, however it
ends. docs/snapshotter.md says what is guaranteed.
"""

import atexit
import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from runtime.copier import HEADER, Capture, Copier
from runtime.plain_state import SnapshotError, encode, freeze, rebuild, thaw
from runtime.random_states import random_states, set_random_states
from runtime.ranks import Ranks, place_number
from runtime.registered import Registered, expected_state
from runtime.snapshot_place import Key, Place, key_of
from runtime.tensor_image import Entry, Image, Known, Source, Unit, gathered, placed
from storage.arena import SLOTS, Slot
from storage.manifest import Manifest, Part, digest_of

log = logging.getLogger("ftd.snapshotter")

_FORMAT = 1
_SPARE_BYTES = 256 * 1024
_ENTRY_BYTES = 256
"""Of a header, for each tensor that is expected."""


@dataclass(slots=True)
class Counts:
    """What became of the snapshots of this process."""

    completed_step: int | None = None
    """Of the newest that is complete here."""
    completed: int = 0
    failed: int = 0
    stall_s: float = 0.0
    """The training thread's, in all: in ``snapshot()``, and in steps that waited for a copy."""


class Snapshotter:
    """Keeps the newest state in memory, and brings it back.

    :param name: of the job: with the rank it is where the snapshots are found again.
    :param directory: of a memory file system; ``/dev/shm/ftd-<uid>/snapshots`` otherwise.
    :param random_state: keep the states of torch's, numpy's and Python's random numbers, too.
    :param limit_bytes: of this rank's memory; it takes twice its state, three times for moments.
    :param things: what ``register`` takes, by name.
    :raises SnapshotError: a name or a thing that cannot be used; says what would work.
    :raises ArenaFullError: there is too little memory: carries what is needed and what there is.
    """

    def __init__(
        self,
        name: str,
        /,
        *,
        directory: str | Path | None = None,
        random_state: bool = True,
        limit_bytes: int | None = None,
        **things: Any,
    ) -> None:
        self.counts = Counts()
        self._name = name
        self._random = random_state
        self._things: dict[str, Registered] = {}
        self._hooks: list[Any] = []
        self._known: dict[int, Known] = {}
        self._units: tuple[list[tuple[int, int]], list[Unit]] = ([], [])
        self._staging = np.empty(0, dtype=np.uint8)
        self._generation = 0
        """Of this run; 0 until the ranks have met."""
        self._last: int | None = None
        self._restored: Key | None = None
        self._clean = False
        self._foreign = ""
        """Why a snapshot that lies here is somebody else's."""
        ranks = Ranks.now()
        for key, thing in things.items():
            self._add(key, thing, guarded=False)
        self._place = Place.open(name, ranks.rank, Path(directory) if directory else None, limit_bytes)
        self._copier = Copier(self._place.slot, self._complete, self._failed)
        self._process = os.getpid()
        atexit.register(self.close)
        try:
            self._reserve()
        except BaseException:
            self.close()
            raise

    # --- what is kept ----------------------------------------------------------------------------

    def register(self, name: str, thing: Any, *, guarded: bool = False) -> None:
        """Keep this, too.

        :param thing: a module, an optimizer, anything with ``state_dict`` and ``load_state_dict``
            (schedulers, scalers, samplers), or a dict or list of plain data; ``restore`` changes it in place.
        :param guarded: a module's parameters that no registered optimizer owns are copied within
            ``snapshot()``. With ``guarded`` they are copied beside training, too: you promise that they are
            changed under ``changing()`` only (or never).
        :raises SnapshotError: the name is taken, or there is something in it that cannot be kept.
        :raises ArenaFullError: there is too little memory.
        """
        self._add(name, thing, guarded=guarded)
        try:
            self._reserve()
        except BaseException:
            del self._things[name]
            raise

    def _add(self, name: str, thing: Any, *, guarded: bool) -> None:
        if name in self._things:
            raise SnapshotError(f"{name!r} is registered already: give each thing a name of its own")
        self._things[name] = Registered.of(name, thing, guarded=guarded)

    def _reserve(self) -> None:
        """Room for what is registered and what its optimizers will keep; steps wait for copies from then."""
        image, trees = self._walk()
        size, tensors = image.size_bytes, len(image.entries)
        for registered in self._things.values():
            if registered.kind == "optimizer":
                more_bytes, more = expected_state(registered.thing)
                size, tensors = size + more_bytes, tensors + more
        plain_bytes = 2 * len(encode(trees))
        self._place.reserve(size + (_ENTRY_BYTES + 64) * tensors + plain_bytes + _SPARE_BYTES)
        for handle in self._hooks:
            handle.remove()
        self._hooks = [
            r.thing.register_step_pre_hook(self._before_step)
            for r in self._things.values()
            if r.kind == "optimizer"
        ]

    # --- taking one ------------------------------------------------------------------------------

    def snapshot(self, step: int) -> None:
        """Keep the state as it is now; it is that of ``step``. Every rank calls it for the same steps.

        Returns at once. What cannot be kept now (no memory, a value that became something else) is logged
        and counted, and training goes on.

        :raises SnapshotError: steps do not grow, or there is a former run's state that was not restored.
        """
        self._begin_run()
        last = self._last if self._last is not None else (self._restored or (0, None))[1]
        if last is not None and step <= last:
            raise SnapshotError(
                f"a snapshot of step {step} after step {last}: steps must grow (to begin anew: remove())"
            )
        began = time.perf_counter()
        self._copier.finish()
        self._last = step
        try:
            self._copier.begin(self._capture(step))
        except SnapshotError as error:
            self._failed(step, error)
        self.counts.stall_s += time.perf_counter() - began

    def wait(self) -> None:
        """Until all that was begun is complete, or was dropped."""
        self._copier.settle()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """For changes of guarded state other than by an optimizer's step (``load_state_dict``, pruning)."""
        self._before_step()
        yield

    def _before_step(self, *_: Any) -> None:
        began = time.perf_counter()
        self._copier.finish()
        self.counts.stall_s += time.perf_counter() - began

    def _walk(self) -> tuple[Image, dict[str, Any]]:
        """What is registered, as it is now; nothing is copied but plain data."""
        image = Image(known=self._known)
        guarded: set[int] = set()
        for registered in self._things.values():
            guarded |= registered.guarded_ids()

        def take(tensor: Tensor, where: str) -> int:
            return image.add(tensor, where, at_once=id(tensor) not in guarded)

        things = {
            name: {"kind": registered.kind, "state": freeze(registered.state(), name, take)}
            for name, registered in self._things.items()
        }
        numbers = freeze(random_states(), "random numbers", take) if self._random else None
        self._known = image.seen
        return image, {"format": _FORMAT, "things": things, "random": numbers}

    def _capture(self, step: int) -> Capture:
        image, trees = self._walk()
        sources = self._sources(image)
        ranges = [(entry.offset, entry.size_bytes) for entry in image.entries]
        if ranges != self._units[0]:
            self._units = (ranges, image.units())
        ranks = Ranks.now()
        return Capture(
            step=step,
            units=self._units[1],
            sources=sources,
            image_bytes=image.size_bytes,
            header=lambda: encode({**trees, "entries": image.entries}),
            layout={"kind": "snapshotter", "ranks": ranks.count, "image_bytes": image.size_bytes},
            devices={source.device for source in sources if isinstance(source, Tensor)},
        )

    def _sources(self, image: Image) -> list[Source]:
        """Guarded tensors themselves; of the others copies, made now."""
        staged = [
            number
            for number, at_once in enumerate(image.at_once)
            if at_once and isinstance(image.views[number], np.ndarray)
        ]
        wanted = sum(image.entries[number].size_bytes for number in staged)
        if len(self._staging) < wanted:
            self._staging = np.zeros(wanted, dtype=np.uint8)
        sources, end = list(image.views), 0
        for number in staged:
            size = image.entries[number].size_bytes
            copy, view = self._staging[end : end + size], image.views[number]
            assert isinstance(view, np.ndarray)
            copy[:] = view
            sources[number], end = copy, end + size
        chosen: list[Source] = []
        for number, source in enumerate(sources):
            if source is None or (image.at_once[number] and isinstance(source, Tensor)):
                flat = gathered(image.tensors[number])
                source = flat.numpy() if flat.device.type == "cpu" else flat  # noqa: PLW2901
            chosen.append(source)
        return chosen

    def _complete(self, step: int, slot: Slot, parts: tuple[Part, ...], layout: dict[str, Any]) -> None:
        self._place.complete((self._generation, step), slot, parts, layout)
        self.counts.completed += 1
        self.counts.completed_step = step

    def _failed(self, step: int, error: Exception) -> None:
        self.counts.failed += 1
        log.warning("%s: no snapshot of step %d, training goes on: %s", self._name, step, error)

    # --- bringing one back -----------------------------------------------------------------------

    def restore(self) -> int | None:
        """Load the newest snapshot that every rank can restore; its step, or ``None`` when there is none.

        Every rank calls it, after ``init_process_group`` where there are several. What is damaged, or of
        another job, is named in the log and passed over, and nothing is loaded by halves.

        :raises SnapshotError: torch.distributed is not initialised, and there are several ranks.
        """
        self.wait()
        own: dict[Key, Manifest] = {}
        self._foreign = ""
        for problem in self._place.arena.problems:
            log.warning("%s: passed over: %s", self._name, problem)
        for manifest in self._place.arena.snapshots:
            foreign, why = self._refuses(manifest)
            if foreign:
                self._foreign = why
            if why:
                log.warning("%s: the snapshot of step %d is passed over: %s", self._name, manifest.step, why)
            else:
                own[key_of(manifest)] = manifest
        ranks = Ranks.now()
        restored = None
        for key in self._meet(ranks, own):
            damaged = self._place.damaged(own[key])
            if damaged:
                log.warning(
                    "%s: the snapshot of step %d is passed over: %s changed since it was written",
                    self._name,
                    key[1],
                    ", ".join(damaged[:3]),
                )
            if ranks.all_of(not damaged):
                self._load(own[key])
                restored = key
                break
        self._restored, self._last, self._clean = restored, None, False
        return restored[1] if restored else None

    def _meet(self, ranks: Ranks, own: dict[Key, Manifest]) -> list[Key]:
        """The snapshots that all ranks hold, the newest first; and a generation for this run."""
        here = place_number(self._place.job)
        newest = max((m.generation for m in self._place.arena.snapshots), default=0)
        keys = sorted(own, reverse=True) + [(-1, -1)] * (SLOTS - len(own))
        rows = ranks.gather([here, newest, *(number for key in keys for number in key)])
        self._generation = max(row[1] for row in rows) + 1
        self._place.neighbours = [
            self._place.job / f"rank-{rank}"
            for rank, row in enumerate(rows)
            if row[0] == here and rank != ranks.rank and ranks.count > 1
        ]
        held = [set(zip(row[2::2], row[3::2], strict=True)) - {(-1, -1)} for row in rows]
        return sorted(set.intersection(*held), reverse=True)

    def _begin_run(self) -> None:
        """Before a run's first snapshot: former runs' snapshots go, but for the one that was restored."""
        if self._clean:
            return
        if self._generation == 0:
            if self._place.arena.snapshots:
                raise SnapshotError(
                    f"{self._place.arena.directory} holds a snapshot of step "
                    f"{self._place.arena.snapshots[0].step}: call restore() first, or remove() to begin anew"
                )
            self._meet(Ranks.now(), {})
        if self._foreign:
            raise SnapshotError(
                f"{self._place.arena.directory} holds a snapshot that is not of this job, and would be "
                f"lost ({self._foreign}): take another name, or remove() it"
            )
        self._place.keep_only({self._restored} if self._restored else set())
        self._clean = True

    def _refuses(self, manifest: Manifest) -> tuple[bool, str]:
        """(somebody else could restore it, why it cannot be restored here); (False, "") when it can."""
        if manifest.job_id != self._name:
            return True, f"it is of job {manifest.job_id!r}"
        if manifest.layout.get("kind") != "snapshotter":
            return True, "it was not written by a Snapshotter"
        count = Ranks.now().count
        if manifest.layout.get("ranks") != count:
            return True, f"it is of {manifest.layout.get('ranks')} ranks, and there are {count}"
        header = manifest.part(HEADER)
        if digest_of(self._place.arena.bytes_of(manifest, header)) != header.digest:
            return False, "its header changed since it was written"
        content, entries = self._read(manifest)
        if content["format"] != _FORMAT:
            return True, f"it is of format {content['format']}, and this version reads {_FORMAT}"
        saved = {name: thing["kind"] for name, thing in content["things"].items()}
        here = {name: registered.kind for name, registered in self._things.items()}
        if saved != here:
            return True, f"it holds {', '.join(sorted(saved))}, and {', '.join(sorted(here))} are registered"
        for name, registered in self._things.items():
            why = registered.refuses(content["things"][name]["state"], entries)
            if why:
                return True, f"{name}: {why}"
        return False, ""

    def _read(self, manifest: Manifest) -> tuple[dict[str, Any], list[Entry]]:
        data = self._place.arena.bytes_of(manifest, manifest.part(HEADER)).tobytes()
        content = thaw(data)
        return content, msgspec.convert(content["entries"], list[Entry])

    def _load(self, manifest: Manifest) -> None:
        content, entries = self._read(manifest)
        whole = Part(name="image", offset=0, size_bytes=manifest.layout["image_bytes"], digest="")
        data = self._place.arena.bytes_of(manifest, whole)

        def place(number: int, old: Tensor | None, beside: Tensor | None) -> Tensor:
            return placed(entries[number], data, old, beside)

        for registered in sorted(self._things.values(), key=lambda r: r.kind not in ("module", "optimizer")):
            registered.load(content["things"][registered.name]["state"], place)
        if self._random and content["random"] is not None:
            set_random_states(rebuild(content["random"], None, lambda number, old: place(number, old, None)))

    # --- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Complete what was begun and let go; what is kept stays for the next process."""
        if os.getpid() != self._process:
            return  # a forked child, which has neither the thread nor the lock
        atexit.unregister(self.close)
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        self._copier.close()
        self._place.close()

    def remove(self) -> None:
        """Close, and give the memory back: nothing of this rank can be restored any more."""
        self.close()
        self._place.remove()
