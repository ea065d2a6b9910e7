"""Snapshots of any PyTorch script's state in host memory, at almost no cost to training.

  snapshots = Snapshotter("my-run", model=model, optimizer=optimizer, progress=progress)
  start = snapshots.restore() or 0
  for step in range(start + 1, steps + 1):
      ...
      snapshots.snapshot(step)

``snapshot`` copies small state (buffers, numbers, random states) and returns. A thread copies parameters
and optimizer states while the next forward and backward pass are computed; ``optimizer.step()`` waits until
that copy is complete. The bytes are files of a memory file system, so they outlive the process, however it
ends. docs/tutorials/snapshotter.md lists what is guaranteed.
"""

import atexit
import contextlib
import logging
import operator
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from runtime.script.contents import SnapshotContents
from runtime.script.copier import HEADER, SnapshotCopier, part_name
from runtime.script.plain_state import SnapshotError
from runtime.script.protection import (
    RestorableSnapshot,
    ScriptProtection,
    SnapshotAgentError,
    rank_count_mismatch,
    rank_layout_of,
)
from runtime.script.rank_arena import RankArena, default_root, snapshot_key
from runtime.script.ranks import Ranks
from runtime.script.registered import RegisteredObject
from runtime.script.resharding import ShardAssembler, changed_boxes
from runtime.script.saved import EMPTY, PreparedRestore, SavedSnapshot, map_bytes
from runtime.script.tensor_filler import ImageSpan, corrupt_parts, verified_spans
from runtime.script.tensor_image import Bytes
from runtime.wire.snapshot_agent_protocol import SnapshotKey, read_retained
from storage.arena import Slot, manifests_in, slot_path
from storage.manifest import SnapshotManifest, SnapshotPart

log = logging.getLogger("ftd.snapshotter")

LARGEST_STEP = 2**63 - 1
"""Largest step that the record of a snapshot can hold."""

Missing = Literal["raise", "fresh"]


@dataclass(slots=True)
class SnapshotCounts:
    """Counters of the snapshots of one ``Snapshotter``."""

    completed_step: int | None = None
    """Step of the newest snapshot that is complete in this host's memory."""
    completed: int = 0
    failed: int = 0
    stall_s: float = 0.0
    """Seconds for which the training thread was delayed in total: in ``snapshot()``, and in steps that waited
    for a copy.
    """


class CorruptPartsError(SnapshotError):
    """Parts of a snapshot differ from what was written, so that nobody can restore it any more."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(f"corrupt parts: {', '.join(names[:3])}")


class Snapshotter:
    """Snapshots of a script's state in host memory, from which the script resumes after a crash.

    A snapshot survives the process, whether it raised an exception or was killed. With ``protection`` it
    also survives the loss of hosts. Call ``restore()`` once before the training loop and ``snapshot(step)``
    after each optimizer step.

    Under ``torch.distributed`` every rank makes a ``Snapshotter`` with the same name. Use it in the thread
    that trains.

    Examples:
        >>> progress = {"epoch": 0}
        >>> snapshots = Snapshotter("my-run", model=model, optimizer=optimizer, progress=progress)
        >>> start = snapshots.restore() or 0
        >>> for step in range(start + 1, steps + 1):
        ...     train_step(model, optimizer)
        ...     snapshots.snapshot(step)
        >>> snapshots.remove()

    Args:
        name: Name of the job. Together with the rank it identifies the snapshots: letters, digits, ``.``,
            ``_`` and ``-``, at most 100 characters.
        directory: Directory in a memory file system. The default is ``/dev/shm/ftd-<uid>/snapshots``. With
            ``protection``, the snapshot agent's own directory is used instead.
        random_state: Whether to save the random states of torch, numpy and Python as well.
        limit_bytes: Upper limit of this rank's memory in bytes. A rank needs twice its state, and briefly
            three times.
        protection: How the snapshots are protected against the loss of hosts: ``none``; ``buddy`` or
            ``arc:k`` (copies on the next one or k hosts); ``aec`` or ``aec2`` (parity against one or two
            losses); or several of these joined by ``+``. Each host must run a snapshot agent (``ftd node
            --snapshots-only``).
        snapshot_agent: Path of the snapshot agent's socket. The default is ``$FTD_SNAPSHOT_AGENT``, or else
            where an agent of this user puts it.
        objects: What to save, by name: everything that ``register`` accepts.

    Raises:
        SnapshotError: A name or an object cannot be used; the message says what would work.
        ArenaFullError: There is too little memory; the error carries the bytes that are needed and those
            that are free.
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
        """Numbers of completed and failed snapshots, and the total delay of training."""
        self._name = name
        self._protection = ScriptProtection.open(name, protection, snapshot_agent, default_root())
        self._contents = SnapshotContents(self._protection, random_state)
        self._hooks: list[Any] = []
        self._last_step: int | None = None
        self._restored: SnapshotKey | None = None
        self._run_started = False
        self._blocked_by = ""
        """Reason why a snapshot in this directory belongs to somebody else and must not be overwritten; empty
        if none does.
        """
        ranks = Ranks.current()
        for key, value in objects.items():
            self._add(key, value, guarded=False)
        facts = self._protection.agent_facts
        where = Path(facts.directory) if facts else Path(directory) if directory else None
        self._arena = RankArena.open(name, ranks.rank, where, limit_bytes)
        self._arena.remove_former(ranks.count, empty=True)
        self._copier = SnapshotCopier(self._arena.acquire_slot, self._complete, self._failed)
        self._process = os.getpid()
        atexit.register(self.close)
        try:
            self._reserve()
        except BaseException:
            self._stop()
            self._arena.remove_if_empty()
            self._arena.close()
            raise

    # --- registering ----------------------------------------------------------------------------

    def register(self, name: str, value: Any, *, guarded: bool = False) -> None:
        """Save the state of one more object from the next snapshot on.

        Call it before ``restore()``, on all ranks, for what you did not pass to the constructor.

        Examples:
            >>> snapshots.register("average", averaged_model, guarded=True)

        Args:
            name: Name of the object in the snapshot, different from all others.
            value: A module, an optimizer, anything with ``state_dict()`` and ``load_state_dict()``
                (schedulers, scalers, samplers), a random generator, or a dict or list of plain data, which
                ``restore()`` changes in place.
            guarded: Whether you promise that a module's parameters change only inside ``changing()``, or
                never. Parameters that no registered optimizer owns are otherwise copied within
                ``snapshot()``; guarded ones are copied while training goes on.

        Raises:
            SnapshotError: The name is taken, the object contains something that cannot be saved, or this
                ``Snapshotter`` is closed.
            ArenaFullError: There is too little memory.
        """
        self._check_usable()
        before = self._contents.objects.copy()
        try:
            self._add(name, value, guarded=guarded)
            self._reserve()
        except BaseException:
            self._contents.objects = before
            raise

    def _add(self, name: str, value: Any, *, guarded: bool) -> None:
        for part in RegisteredObject.parts_of(name, value, guarded=guarded):
            if part.name in self._contents.objects:
                raise SnapshotError(f"{part.name!r} is registered already: give each object a different name")
            self._contents.objects[part.name] = part

    def _reserve(self) -> None:
        """Reserve memory for the registered objects and the state that their optimizers will have, and hook
        optimizer steps.

        With protection, how much a rank saves is known only after all ranks have met (``_agree``).
        """
        if self._protection.agent_facts is None or self._protection.generation:
            self._arena.reserve(self._contents.expected_bytes())
            # This fills the caches that make the first snapshot as cheap as the others.
            self._contents.capture(0)
        for handle in self._hooks:
            handle.remove()
        self._hooks = [
            r.value.register_step_pre_hook(self._before_step)
            for r in self._contents.objects.values()
            if r.kind == "optimizer" and r.guarded
        ]

    # --- saving ------------------------------------------------------------------------------

    def snapshot(self, step: int) -> None:
        """Save the current state as that of ``step``.

        Call it after each step, or every few steps, between two optimizer steps; every rank must call it
        for the same steps. It returns at once: the copy proceeds while the next step is computed. A failure
        to save (no memory, a value that can no longer be saved) does not raise: it is logged and counted in
        ``counts.failed``, the previous snapshot stays, and training goes on.

        Examples:
            >>> optimizer.step()
            >>> snapshots.snapshot(step)

        Args:
            step: Number of the step that is done; larger than that of any earlier snapshot.

        Raises:
            SnapshotError: ``step`` is not a whole number or does not grow, an earlier run's state was
                neither restored nor removed, or this ``Snapshotter`` is closed.
        """
        self._check_usable()
        whole = operator.index(step) if hasattr(step, "__index__") else -1
        if not 0 <= whole <= LARGEST_STEP:
            raise SnapshotError(
                f"snapshot: step must be the whole number of the step that is done, not {step!r}"
            )
        step = whole
        self._start_run()
        last = self._last_step if self._last_step is not None else (self._restored or (0, None))[1]
        if last is not None and step <= last:
            raise SnapshotError(
                f"a snapshot of step {step} after step {last}: steps must increase (to start over, call remove())"
            )
        began = time.perf_counter()
        self._copier.finish()
        self._last_step = step
        try:
            self._copier.begin(self._contents.capture(step))
        except SnapshotError as error:
            self._failed(step, error)
        except Exception as error:  # A registered object's state_dict() may raise anything.
            self._failed(step, SnapshotError(f"{type(error).__name__}: {error}"))
        self.counts.stall_s += time.perf_counter() - began

    @property
    def protected_step(self) -> int | None:
        """Step of the newest snapshot that all hosts hold protected; ``None`` without protection."""
        common = read_retained(self._arena.job).common if self._arena.protected else None
        return None if common is None else common[1]

    def wait(self) -> None:
        """Wait until every snapshot that was begun is complete or was dropped."""
        if self._in_own_process:
            self._copier.wait()

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Return a context in which guarded state may be changed by hand.

        Use it for changes other than an optimizer's step, such as ``load_state_dict`` or pruning. It waits
        until the current snapshot no longer reads the state.

        Examples:
            >>> with snapshots.changing():
            ...     average.load_state_dict(state)
        """
        self._before_step()
        yield

    def _before_step(self, *_: Any) -> None:
        if not self._in_own_process:
            return  # A forked child that trains has its own memory, which nobody copies.
        began = time.perf_counter()
        self._copier.finish()
        self.counts.stall_s += time.perf_counter() - began

    def _complete(
        self, step: int, slot: Slot, parts: tuple[SnapshotPart, ...], layout: dict[str, Any]
    ) -> None:
        self._arena.complete((self._protection.generation, step), slot, parts, layout)
        self.counts.completed += 1
        self.counts.completed_step = step

    def _failed(self, step: int, error: Exception) -> None:
        self.counts.failed += 1
        log.warning("%s: no snapshot of step %d, training goes on: %s", self._name, step, error)

    # --- restoring -----------------------------------------------------------------------

    def restore(self, *, missing: Missing = "raise") -> int | None:
        """Load the newest snapshot that every rank can restore.

        Call it once before training, on every rank, and under ``torch.distributed`` after
        ``init_process_group``. All bytes are verified before any registered object changes. A snapshot that
        is corrupt or belongs to another job, model or number of ranks is named in the log
        (``ftd.snapshotter``) and skipped, and the next older one is tried.

        Examples:
            >>> start = snapshots.restore() or 0

        Args:
            missing: What to do if snapshots exist and none of them can be restored. ``raise`` raises an
                error, on all ranks. ``fresh`` logs the reason and returns ``None``; the first ``snapshot()``
                then replaces what is there.

        Returns:
            The step of the snapshot that was loaded, or ``None`` if no rank has any: the job's first start.

        Raises:
            SnapshotError: Snapshots exist and none of them can be restored; the message says why. Or: there
                are several ranks and ``torch.distributed`` is not initialised, ``missing`` is something else,
                or this ``Snapshotter`` is closed.
        """
        self._check_usable()
        if missing not in get_args(Missing):
            raise SnapshotError(f"restore: missing must be 'raise' or 'fresh', not {missing!r}")
        self.wait()
        self._blocked_by = ""
        own, unfit = self._own_snapshots()
        ranks = Ranks.current()
        candidates, why_not = self._agree(ranks, own, unfit)
        restored = None
        for found in candidates:
            found_bytes = self._find_bytes(found, own.get(found.key), ranks.rank)
            problem = ranks.first_problem(found_bytes if isinstance(found_bytes, str) else "")
            if not problem:
                assert not isinstance(found_bytes, str)
                found_bytes.load()
                restored = found.key
                break
            why_not.append(f"step {found.key[1]}: {problem}")
        if restored is None and why_not:
            self._reject(why_not, missing)
        self._restored, self._last_step, self._run_started = restored, None, False
        self._start()
        if restored is not None and ranks.rank == 0:
            # It may be what is left of another day's run: nobody must take its steps for those of a new one.
            log.warning("%s: training continues after step %d, whose snapshot was in memory",
                        self._name, restored[1])  # fmt: skip
        return restored[1] if restored else None

    def _reject(self, why_not: list[str], missing: Missing) -> None:
        """Report that snapshots are there and none of them can be restored.

        :raises SnapshotError: training must not start over.
        """
        if self._protection.is_requested and not self._protection.active:
            why_not = [*why_not, "parts may be on other hosts, and not every rank has a snapshot agent"]
        why = "; ".join(why_not[:4]) + (f"; and {len(why_not) - 4} more" if len(why_not) > 4 else "")
        if missing == "fresh":
            log.warning("%s: training starts over, and its first snapshot replaces what is there: %s",
                        self._name, why)  # fmt: skip
            self._blocked_by = ""
            return
        self._blocked_by = why
        raise SnapshotError(
            f"{self._name}: there are snapshots, and none of them can be restored: {why}. Solve that, or start "
            "over: call restore(missing='fresh'), choose another name, or remove() them"
        )

    def _own_snapshots(self) -> tuple[dict[SnapshotKey, SnapshotManifest], list[str]]:
        """Return this rank's snapshots on this host that fit the registered objects, by key, and why others
        do not.
        """
        own: dict[SnapshotKey, SnapshotManifest] = {}
        unfit = self._arena.problems
        for problem in unfit:
            log.warning("%s: skipped: %s", self._name, problem)
        if self._protection.unreachable:
            unfit.append(self._protection.unreachable)
        for step, why in self._arena.arena.newer.items():
            self._blocked_by = why
            unfit.append(f"step {step}: {self._skip(step, why)}")
        for manifest in self._arena.arena.snapshots:
            foreign, why = self._mismatch(manifest)
            if foreign:
                self._blocked_by = why
            if why:
                unfit.append(f"step {manifest.step}: {self._skip(manifest.step, why)}")
            else:
                own[snapshot_key(manifest)] = manifest
        return own, unfit

    def _agree(
        self, ranks: Ranks, own: dict[SnapshotKey, SnapshotManifest], unfit: list[str]
    ) -> tuple[list[RestorableSnapshot], list[str]]:
        """Agree with all ranks on the snapshots that every rank can restore, newest first, on why there are no
        others, and on what each rank saves from now on.
        """
        former = [m for m in self._arena.former_snapshots(ranks.count) if m.job_id == self._name]
        newest = max((m.generation for m in (*self._arena.arena.snapshots, *former)), default=0)
        layouts = [
            (snapshot_key(m), layout)
            for m in (*own.values(), *former)
            if (layout := rank_layout_of(m)) is not None
        ]
        job = self._arena.job
        agreed = self._protection.agree(
            ranks,
            job,
            layouts,
            newest,
            self._contents.shared_digest(),
            started=self._arena.started,
            unfit=unfit,
        )
        same_host = self._protection.same_host
        self._arena.neighbours = [job / f"rank-{rank}" for rank in same_host]
        self._arena.ranks = ranks.count if ranks.rank < min(same_host, default=ranks.count) else None
        return agreed

    def _start(self) -> None:
        """Reserve the memory for what this rank saves, and have the snapshot agents protect it."""
        self._arena.protected, self._arena.restored = self._protection.active, self._restored
        self._arena.mark_started()
        self._reserve()
        self._copier.start()
        self._protection.start(self._restored)

    def _start_run(self) -> None:
        """Release earlier runs' snapshots, except the restored one, before the first snapshot of this run."""
        if self._run_started:
            return
        if self._protection.generation == 0:
            arena = self._arena.arena
            if steps := [*(manifest.step for manifest in arena.snapshots), *arena.newer]:
                raise SnapshotError(
                    f"{arena.directory} holds a snapshot of step {max(steps)}: call restore() first, or remove() to "
                    "start over"
                )
            self._agree(Ranks.current(), {}, [])
            self._start()
        if self._blocked_by:
            raise SnapshotError(
                f"{self._arena.arena.directory} holds a snapshot that was not restored and would be lost "
                f"({self._blocked_by}): solve that, choose another name, or remove() it"
            )
        self._arena.retain_only({self._restored} if self._restored else set())
        self._run_started = True

    def _mismatch(self, manifest: SnapshotManifest) -> tuple[bool, str]:
        """Return whether the snapshot is somebody else's to restore, and why it cannot be restored here.

        The reason is empty if it can be restored here.
        """
        if manifest.job_id != self._name:
            return True, f"it belongs to job {manifest.job_id!r}"
        layout = rank_layout_of(manifest)
        if layout is None:
            return True, "it was not written by a Snapshotter of this version"
        if why := rank_count_mismatch(layout, Ranks.current().count):
            return True, why
        header = manifest.part(part_name(layout.rank, HEADER))
        data = self._arena.arena.view(manifest, header)
        if not header.is_intact(data):
            return False, "its header is corrupt"
        try:
            why = SavedSnapshot.of(data, EMPTY, EMPTY).mismatch(self._contents.objects)
        except SnapshotError as error:
            why = str(error)
        return bool(why), why

    def _find_bytes(
        self, found: RestorableSnapshot, manifest: SnapshotManifest | None, rank: int
    ) -> PreparedRestore | str:
        """Read a snapshot from this host's memory, and fetch from other hosts what is missing; or return why
        that is impossible.
        """
        step, source = found.key[1], found.source_of(rank)
        if source != rank:
            log.warning(
                "%s: rank %d continues with the random states and plain data of rank %d of step %d",
                self._name, rank, source, step,
            )  # fmt: skip
        try:
            shared = (
                self._protection.fetch(found, source, shared=True) if found.layout.shared_bytes else EMPTY
            )
            if manifest is not None and source == rank:
                saved, spans = self._read(manifest, shared)
            else:
                saved, spans = self._read_rank(found, source, shared)
            why = saved.mismatch(self._contents.objects)
            if why:
                self._blocked_by = why
                return self._skip(step, why)
            # Another rank's shards are not this one's, even if there are as many ranks as before.
            same_ranks = source == rank and found.layout.ranks == Ranks.current().count
            boxes = changed_boxes(self._contents.objects, saved, same_ranks=same_ranks)
            if boxes:
                assembler = ShardAssembler(saved, boxes)
                self._assemble(assembler, found, rank, (source, saved, spans))
                saved = assembler.assembled()
                spans = verified_spans(saved.own, shared=False)
        except CorruptPartsError as error:
            return self._skip(step, str(error))
        except SnapshotError as error:
            # The missing parts may be available later, so a run that starts over must not release this
            # snapshot.
            self._blocked_by = str(error)
            return self._skip(step, str(error))
        prepared = saved.prepare(self._contents.objects, random=self._contents.random)
        corrupt = prepared.filler.verify([*spans, *verified_spans(shared, shared=True)])
        if corrupt:
            return self._skip(step, f"corrupt parts: {', '.join(corrupt[:3])}")
        return prepared

    def _assemble(
        self,
        assembler: ShardAssembler,
        found: RestorableSnapshot,
        rank: int,
        base: tuple[int, SavedSnapshot, list[ImageSpan]],
    ) -> None:
        """Read the images of former ranks until this rank's shards are complete.

        :param base: the former rank that all else is taken from, with its image.
        :raises SnapshotError: a part of them is lost or corrupt.
        """
        problems = []
        if corrupt := corrupt_parts(base[2]):
            raise CorruptPartsError(corrupt)
        assembler.add(base[1])
        for source in found.sources_near(rank, Ranks.current().count):
            if not assembler.missing:
                return
            if source == base[0]:
                continue
            try:
                saved, spans = self._read_rank(found, source, EMPTY)
                if corrupt := corrupt_parts(spans):
                    raise CorruptPartsError(corrupt)
            except (SnapshotAgentError, CorruptPartsError) as error:
                problems.append(f"rank {source}: {error}")  # Another rank may have a replica.
                continue
            assembler.add(saved)
        if missing := assembler.missing:
            lost = [f"the state of rank {one} is lost" for one in found.missing]
            raise SnapshotError(
                f"{missing[0]} is incomplete: {'; '.join((*problems, *lost)) or 'parts are lost'}"
            )

    def _read_rank(
        self, found: RestorableSnapshot, source: int, shared: Bytes
    ) -> tuple[SavedSnapshot, list[ImageSpan]]:
        """Return a former rank's snapshot from this host's memory, or else from another host's, and all of its
        byte ranges that must be verified.

        :raises SnapshotAgentError: it cannot be fetched.
        :raises CorruptPartsError: its header is corrupt.
        """
        directory = self._arena.job / f"rank-{source}"
        for manifest in manifests_in(directory):
            layout = rank_layout_of(manifest)
            if snapshot_key(manifest) == found.key and layout is not None and layout.rank == source:
                with contextlib.suppress(OSError):
                    return self._read(manifest, shared, map_bytes(str(slot_path(directory, manifest.slot))))
        image = self._protection.fetch(found, source, own=True)
        size = found.own_bytes[source]
        saved = SavedSnapshot.of(image[size:], image[:size], shared)
        return saved, verified_spans(saved.own, shared=False)

    def _read(
        self, manifest: SnapshotManifest, shared: Bytes, slot: Bytes | None = None
    ) -> tuple[SavedSnapshot, list[ImageSpan]]:
        """Return the snapshot in this host's memory, and all of its byte ranges that must be verified.

        :param slot: memory of its slot; ``None`` for this rank's arena, whose header was verified.
        :raises CorruptPartsError: the header is corrupt.
        """
        arena, layout = self._arena.arena, rank_layout_of(manifest)
        assert layout is not None

        def view(part: SnapshotPart) -> Bytes:
            return (
                arena.view(manifest, part)
                if slot is None
                else slot[part.offset : part.offset + part.size_bytes]
            )

        header = manifest.part(part_name(layout.rank, HEADER))
        if slot is not None and not header.is_intact(view(header)):
            raise CorruptPartsError([header.name])
        begin, size = header.offset - layout.own_bytes, layout.own_bytes
        own = SnapshotPart(name="own", offset=begin, size_bytes=size, digest="")
        spans = [
            ImageSpan(
                data=view(part),
                start=part.offset - begin,
                shared=False if begin <= part.offset < begin + size else None,
                part=part,
            )
            for part in manifest.parts
        ]
        return SavedSnapshot.of(view(header), view(own), shared), spans

    def _skip(self, step: int, why: str) -> str:
        """Log why a snapshot is not restored, and return it."""
        log.warning("%s: the snapshot of step %d is skipped: %s", self._name, step, why)
        return why

    # --- closing ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Complete the snapshots that were begun, and release the lock and the thread.

        The snapshots stay in memory for the next process. It is called at the end of the process, too.
        """
        if not self._in_own_process:
            return  # A forked child has neither the thread nor the lock.
        self._stop()
        self._arena.close()

    def _stop(self) -> None:
        """Complete the snapshots that were begun, and save no more."""
        atexit.unregister(self.close)
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        self._copier.close()

    def remove(self) -> None:
        """Close, and free the memory: this rank's snapshots are gone.

        Call it on every rank when the job is finished.
        """
        if self._in_own_process:
            self._stop()
            self._arena.remove()
            self._protection.remove()

    @property
    def _in_own_process(self) -> bool:
        return os.getpid() == self._process

    def _check_usable(self) -> None:
        """:raises SnapshotError: this process cannot save or restore anything here any more."""
        if not self._in_own_process:
            raise SnapshotError(
                f"{self._name} belongs to the process that forked this one: make a new Snapshotter here"
            )
        if self._arena.closed:
            raise SnapshotError(f"{self._name}: this Snapshotter is closed: make a new one")
