"""Snapshots of any PyTorch script's state in its host's memory, at next to no cost to training.

    snapshots = Snapshotter("my-run", model=model, optimizer=optimizer, progress=progress)
    start = snapshots.restore() or 0
    for step in range(start + 1, steps + 1):
        ...
        snapshots.snapshot(step)

``snapshot`` notes what is small (buffers, numbers, random states) and returns; a thread copies parameters
and optimizer states while the next forward and backward pass are computed, and ``optimizer.step()`` waits
for what is left of that. The bytes are files of a memory file system: they outlive the process, however it
ends. docs/tutorials/snapshotter.md says what is guaranteed.
"""

import atexit
import contextlib
import logging
import operator
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.script.contents import SnapshotContents
from runtime.script.copier import HEADER, SnapshotCopier, part_name
from runtime.script.plain_state import SnapshotError
from runtime.script.protection import (
    Protection,
    RestorableSnapshot,
    SnapshotAgentError,
    rank_count_mismatch,
    rank_layout_of,
)
from runtime.script.rank_arena import RankArena, default_root, snapshot_key
from runtime.script.ranks import Ranks
from runtime.script.registered import RegisteredObject
from runtime.script.saved import EMPTY, PreparedRestore, SavedSnapshot
from runtime.script.tensor_filler import ImageSpan, verified_spans
from runtime.script.tensor_image import Bytes
from runtime.wire.snapshot_agent_protocol import SnapshotKey, read_retained
from storage.arena import Slot
from storage.manifest import SnapshotManifest, SnapshotPart

log = logging.getLogger("ftd.snapshotter")


@dataclass(slots=True)
class SnapshotCounts:
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
    :param protection: against the loss of hosts, by their keepers (``ftd node --snapshots-only``): ``buddy``
        or ``arc:k`` (copies on the next k hosts), ``aec``, ``aec2`` (parity, against one and two losses), or
        several joined by ``+``.
    :param keeper: its socket, where it is not the default one; ``$FTD_SNAPSHOT_AGENT`` says so, too.
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
        protection: str = "none",
        snapshot_agent: str | Path | None = None,
        **objects: Any,
    ) -> None:
        self.counts = SnapshotCounts()
        self._name = name
        self._protection = Protection.open(name, protection, snapshot_agent, default_root())
        self._contents = SnapshotContents(self._protection, random_state)
        self._hooks: list[Any] = []
        self._last: int | None = None
        self._restored: SnapshotKey | None = None
        self._clean = False
        self._foreign = ""
        """Why a snapshot that lies here is somebody else's."""
        ranks = Ranks.current()
        for key, thing in objects.items():
            self._add(key, thing, guarded=False)
        facts = self._protection.agent_facts
        where = Path(facts.directory) if facts else Path(directory) if directory else None
        self._place = RankArena.open(name, ranks.rank, where, limit_bytes)
        self._copier = SnapshotCopier(self._place.acquire_slot, self._complete, self._failed)
        self._process = os.getpid()
        atexit.register(self.close)
        try:
            self._reserve()
        except BaseException:
            self.close()
            self._place.remove_if_empty()
            raise

    # --- what is kept ----------------------------------------------------------------------------

    def register(self, name: str, value: Any, *, guarded: bool = False) -> None:
        """Keep this, too.

        :param thing: a module, an optimizer, anything with ``state_dict`` and ``load_state_dict``
            (schedulers, scalers, samplers), or a dict or list of plain data; ``restore`` changes it in place.
        :param guarded: a module's parameters that no registered optimizer owns are copied within
            ``snapshot()``. With ``guarded`` they are copied beside training, too: you promise that they are
            changed under ``changing()`` only (or never).
        :raises SnapshotError: the name is taken, or there is something in it that cannot be kept.
        :raises ArenaFullError: there is too little memory.
        """
        self._check()
        self._add(name, value, guarded=guarded)
        try:
            self._reserve()
        except BaseException:
            del self._contents.objects[name]
            raise

    def _add(self, name: str, thing: Any, *, guarded: bool) -> None:
        if name in self._contents.objects:
            raise SnapshotError(f"{name!r} is registered already: give each thing a name of its own")
        self._contents.objects[name] = RegisteredObject.of(name, thing, guarded=guarded)

    def _reserve(self) -> None:
        """Room for what is registered and what its optimizers will keep; steps wait for copies from then.

        With protection, what a rank keeps is known once all have met.
        """
        if self._protection.agent_facts is None or self._protection.generation:
            self._place.reserve(self._contents.expected_bytes())
            self._contents.capture(0)  # What it finds out is known at the first snapshot.
        for handle in self._hooks:
            handle.remove()
        self._hooks = [
            r.value.register_step_pre_hook(self._before_step)
            for r in self._contents.objects.values()
            if r.kind == "optimizer"
        ]

    # --- taking one ------------------------------------------------------------------------------

    def snapshot(self, step: int) -> None:
        """Keep the state as it is now; it is that of ``step``. Every rank calls it for the same steps.

        Returns at once. What cannot be kept now (no memory, a value that became something else) is logged
        and counted, and training goes on.

        :raises SnapshotError: ``step`` is no whole number, steps do not grow, there is a former run's state
            that was not restored, or this was closed.
        """
        self._check()
        try:
            step = operator.index(step)
        except TypeError:
            raise SnapshotError(
                f"snapshot: step is {step!r}, and must be a whole number: that of the step that is done"
            ) from None
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
            self._copier.begin(self._contents.capture(step))
        except SnapshotError as error:
            self._failed(step, error)
        self.counts.stall_s += time.perf_counter() - began

    @property
    def protected_step(self) -> int | None:
        """Of the newest snapshot that every host has, protected; ``None`` without protection."""
        common = read_retained(self._place.job).common if self._place.protected else None
        return None if common is None else common[1]

    def wait(self) -> None:
        """Until all that was begun is complete, or was dropped."""
        if self._own_process:
            self._copier.wait()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """For changes of guarded state other than by an optimizer's step (``load_state_dict``, pruning)."""
        self._before_step()
        yield

    def _before_step(self, *_: Any) -> None:
        if not self._own_process:
            return  # A child that trains on has its own memory, and nobody who copies it.
        began = time.perf_counter()
        self._copier.finish()
        self.counts.stall_s += time.perf_counter() - began

    def _complete(
        self, step: int, slot: Slot, parts: tuple[SnapshotPart, ...], layout: dict[str, Any]
    ) -> None:
        self._place.complete((self._protection.generation, step), slot, parts, layout)
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

        :raises SnapshotError: torch.distributed is not initialised, and there are several ranks; or this was
            closed.
        """
        self._check()
        self.wait()
        self._foreign = ""
        own = self._own()
        ranks = Ranks.current()
        restored = None
        for found in self._meet(ranks, own):
            prepared = self._obtained(found, own.get(found.key), ranks.rank)
            if ranks.all_true(prepared is not None):
                assert prepared is not None
                prepared.load()
                restored = found.key
                break
        if restored is None and own and self._protection.is_requested and not self._protection.active:
            self._foreign = "parts of it may be on other hosts, and no keeper answers"
        self._restored, self._last, self._clean = restored, None, False
        self._begin()
        return restored[1] if restored else None

    def _own(self) -> dict[SnapshotKey, SnapshotManifest]:
        """What lies here of this rank's, and fits."""
        own: dict[SnapshotKey, SnapshotManifest] = {}
        for problem in self._place.arena.problems:
            log.warning("%s: passed over: %s", self._name, problem)
        for manifest in self._place.arena.snapshots:
            foreign, why = self._refuses(manifest)
            if foreign:
                self._foreign = why
            if why:
                self._pass_over(manifest.step, why)
            else:
                own[snapshot_key(manifest)] = manifest
        return own

    def _meet(self, ranks: Ranks, own: dict[SnapshotKey, SnapshotManifest]) -> list[RestorableSnapshot]:
        """The snapshots that all ranks can have, the newest first; and what each keeps from now on."""
        newest = max((m.generation for m in self._place.arena.snapshots), default=0)
        layouts = {key: layout for key, m in own.items() if (layout := rank_layout_of(m)) is not None}
        job = self._place.job
        found = self._protection.agree(ranks, job, layouts, newest, self._contents.shared_digest())
        self._place.neighbours = [job / f"rank-{rank}" for rank in self._protection.same_host]
        return found

    def _begin(self) -> None:
        """What is kept is known: allocate it, and have it protected."""
        self._place.protected, self._place.restored = self._protection.active, self._restored
        self._reserve()
        self._copier.start()
        self._protection.start(self._restored)

    def _begin_run(self) -> None:
        """Before a run's first snapshot: former runs' snapshots go, but for the one that was restored."""
        if self._clean:
            return
        if self._protection.generation == 0:
            if self._place.arena.snapshots:
                raise SnapshotError(
                    f"{self._place.arena.directory} holds a snapshot of step "
                    f"{self._place.arena.snapshots[0].step}: call restore() first, or remove() to begin anew"
                )
            self._meet(Ranks.current(), {})
            self._begin()
        if self._foreign:
            raise SnapshotError(
                f"{self._place.arena.directory} holds a snapshot that was not restored, and would be lost "
                f"({self._foreign}): see to that, take another name, or remove() it"
            )
        self._place.retain_only({self._restored} if self._restored else set())
        self._clean = True

    def _refuses(self, manifest: SnapshotManifest) -> tuple[bool, str]:
        """(somebody else could restore it, why it cannot be restored here); (False, "") when it can."""
        if manifest.job_id != self._name:
            return True, f"it is of job {manifest.job_id!r}"
        layout = rank_layout_of(manifest)
        if layout is None:
            return True, "it was not written by a Snapshotter of this version"
        count = Ranks.current().count
        if layout.ranks != count and not layout.shared_bytes:
            return True, rank_count_mismatch(layout.ranks, count)
        header = manifest.part(part_name(layout.rank, HEADER))
        data = self._place.arena.view(manifest, header)
        if not header.is_intact(data):
            return False, "its header changed since it was written"
        why = SavedSnapshot.of(data, EMPTY, EMPTY).mismatch(self._contents.objects)
        return bool(why), why

    def _obtained(
        self, found: RestorableSnapshot, manifest: SnapshotManifest | None, rank: int
    ) -> PreparedRestore | None:
        """From this host's memory, and what is not there from others'; ``None``: it cannot be had."""
        step = found.key[1]
        here = manifest is not None and found.source_of(rank) == rank
        try:
            brought, shared = EMPTY, EMPTY
            if found.layout.shared_bytes or not here:
                brought, shared = self._protection.fetch(found, rank, own=not here)
        except SnapshotAgentError as error:
            # It may be there tomorrow: nothing of it may be let go for a run that begins anew.
            self._foreign = str(error)
            self._pass_over(step, str(error))
            return None
        if not here:
            size = found.layout.own_bytes
            saved = SavedSnapshot.of(brought[size:], brought[:size], shared)
            spans = verified_spans(saved.own, shared=False)
        else:
            assert manifest is not None
            saved, spans = self._read(manifest, shared)
        why = saved.mismatch(self._contents.objects)
        if why:
            self._foreign = why
            self._pass_over(step, why)
            return None
        prepared = saved.prepare(self._contents.objects, random=self._contents.random)
        damaged = prepared.filling.verify([*spans, *verified_spans(shared, shared=True)])
        if damaged:
            self._pass_over(step, f"{', '.join(damaged[:3])} changed since it was written")
            return None
        return prepared

    def _read(self, manifest: SnapshotManifest, shared: Bytes) -> tuple[SavedSnapshot, list[ImageSpan]]:
        """What lies here, and all of it that is to be verified."""
        arena, layout = self._place.arena, rank_layout_of(manifest)
        assert layout is not None
        header = manifest.part(part_name(layout.rank, HEADER))
        begin, size = header.offset - layout.own_bytes, layout.own_bytes
        own = SnapshotPart(name="own", offset=begin, size_bytes=size, digest="")
        spans = [
            ImageSpan(
                data=arena.view(manifest, part),
                start=part.offset - begin,
                shared=False if begin <= part.offset < begin + size else None,
                part=part,
            )
            for part in manifest.parts
        ]
        return SavedSnapshot.of(arena.view(manifest, header), arena.view(manifest, own), shared), spans

    def _pass_over(self, step: int, why: str) -> None:
        log.warning("%s: the snapshot of step %d is passed over: %s", self._name, step, why)

    # --- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Complete what was begun and let go; what is kept stays for the next process."""
        if not self._own_process:
            return  # a forked child, which has neither the thread nor the lock
        atexit.unregister(self.close)
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        self._copier.close()
        self._place.close()

    def remove(self) -> None:
        """Close, and give the memory back: nothing of this rank can be restored any more."""
        if self._own_process:
            self.close()
            self._place.remove()
            self._protection.remove()

    @property
    def _own_process(self) -> bool:
        return os.getpid() == self._process

    def _check(self) -> None:
        """:raises SnapshotError: nothing can be kept or restored here any more."""
        if not self._own_process:
            raise SnapshotError(f"{self._name} is of the process that forked this one: make another here")
        if self._place.closed:
            raise SnapshotError(f"{self._name}: this Snapshotter is closed: make a new one")
