"""The captures of the registered objects: which bytes are saved, where they come from, and in which units they
are copied.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import msgspec
import numpy as np
import xxhash

from runtime.script.copier import ScriptCapture
from runtime.script.plain_state import SnapshotError, TakeTensor, encode, freeze
from runtime.script.protection import ScriptProtection
from runtime.script.random_states import random_states
from runtime.script.ranks import Ranks
from runtime.script.registered import RegisteredObject, expected_state_size
from runtime.script.saved import FORMAT
from runtime.script.state_layout import StateLayout, replicated_ids
from runtime.script.tensor_image import (
    Bytes,
    CopyUnit,
    ImageEntry,
    KnownTensor,
    Source,
    TensorImage,
    align,
    cut_units,
    row_major_bytes,
    whole_image,
)
from runtime.wire.snapshot_agent_protocol import RankSnapshotLayout

_SPARE_BYTES = 256 * 1024
_ENTRY_BYTES = 256
"""Bytes of the header to reserve for each expected tensor."""


@dataclass(frozen=True, kw_only=True)
class _SlotLayout:
    """Layout of a snapshot in this rank's slot."""

    entries: list[ImageEntry]
    owner: int
    owners: int
    units: list[CopyUnit]
    shared_units: int
    """Number of the units that belong to this host's shard of the shared image; they come first."""
    base: int
    """Offset in the slot at which this rank's own image begins."""
    resizable: bool
    """See ``RankSnapshotLayout``, also for ``replicas``."""
    replicas: int

    @cached_property
    def encoded(self) -> msgspec.Raw:
        """The entries as msgpack; only the copier's thread asks for it."""
        return msgspec.Raw(encode(self.entries))


@dataclass(slots=True)
class SnapshotContents:
    """The registered objects, and what each snapshot of them consists of.

    :param random: whether to save the states of the random generators, too.
    """

    protection: ScriptProtection
    random: bool
    objects: dict[str, RegisteredObject] = field(default_factory=dict)
    _known: dict[int, KnownTensor] = field(default_factory=dict)
    _state_layout: StateLayout | None = None
    _layout: _SlotLayout | None = None
    _staging: Bytes = field(default_factory=lambda: np.empty(0, dtype=np.uint8))

    def expected_bytes(self) -> int:
        """Return the size of a snapshot in bytes, including state that optimizers have not made yet."""
        image, content = self._walk(fresh=True)
        own, shared, tensors = image.own_bytes, image.shared_bytes, len(image.entries)
        for registered in self.objects.values():
            if registered.kind == "optimizer":
                more_bytes, more = expected_state_size(registered.value)
                tensors += more
                # If a module is replicated, its optimizer's state most likely is, too. If not, the larger
                # of both counts.
                own, shared = (own, shared + more_bytes) if shared else (own + more_bytes, shared)
        plain_bytes = 2 * len(encode(content()))
        own_shard_bytes = (
            self.protection.shards(shared).shard_bytes(self.protection.owner)
            if self.protection.keeps_shard
            else 0
        )
        return own_shard_bytes + own + (_ENTRY_BYTES + 64) * tensors + plain_bytes + _SPARE_BYTES

    def _walk(self, *, fresh: bool = False) -> tuple[TensorImage, Callable[[], dict[str, Any]]]:
        """Describe the current state of all registered objects without copying anything but plain data.

        :param fresh: ignore what earlier snapshots found out.
        :returns: the tensors, and a function that makes the header's content except for their entries. The
            function is for one thread, and the next snapshot changes what it returned.
        """
        steady = [r for r in self.objects.values() if r.has_stable_tensors]
        states = {r.name: r.state() for r in steady}
        shares = self.protection.shares
        known_layout, plain = self._state_layout, None
        if known_layout is not None and not fresh:
            plain = known_layout.read_plain(steady, states, shares=shares)
        if known_layout is None or plain is None:
            known_layout = self._state_layout = StateLayout.of(
                steady, states, self._known, known_layout, shares=shares
            )
        image = known_layout.image.copy(self._known)
        found = known_layout
        kinds = {r.name: r.kind for r in self.objects.values()}
        others = {
            r.name: _freeze_nested(r, image.add) for r in self.objects.values() if not r.has_stable_tensors
        }
        numbers = freeze(random_states(), "random numbers", image.add) if self.random else None
        self._known = image.seen

        def content() -> dict[str, Any]:
            frozen = found.freeze_with(plain) | others
            saved_objects = {name: {"kind": kinds[name], "state": state} for name, state in frozen.items()}
            return {"format": FORMAT, "objects": saved_objects, "random": numbers}

        return image, content

    def capture(self, step: int) -> ScriptCapture:
        """Return the capture of the current state, which must not change before it is copied."""
        image, content = self._walk()
        sources = self._sources(image)
        ranks = Ranks.current()
        layout = self._layout = self._make_layout(image)
        protection, shared = self.protection, image.shared_bytes > 0
        rank_layout = RankSnapshotLayout(
            rank=ranks.rank,
            ranks=ranks.count,
            own_bytes=image.own_bytes,
            shared_bytes=image.shared_bytes,
            scheme=protection.scheme if shared else "none",
            owners=protection.owners if shared else 1,
            owner=protection.owner if shared else -1,
            resizable=layout.resizable,
            replicas=layout.replicas,
        )
        return ScriptCapture(
            step=step,
            rank=ranks.rank,
            units=layout.units,
            shared_units=layout.shared_units,
            sources=sources,
            body_bytes=layout.base + image.own_bytes,
            header=lambda: encode({**content(), "entries": layout.encoded}),
            layout=msgspec.to_builtins(rank_layout),
            devices=image.devices,
        )

    def _make_layout(self, image: TensorImage) -> _SlotLayout:
        """Return the layout of the image in the slot; that of the previous snapshot if nothing changed."""
        before, owner, owners = self._layout, self.protection.owner, self.protection.owners
        # Most entries are the same objects as before, which makes the comparison quick.
        if (
            before is not None
            and (before.owner, before.owners) == (owner, owners)
            and before.entries == image.entries
        ):
            return before
        ranges = [(n, e.offset, e.size_bytes) for n, e in enumerate(image.entries) if not e.shared]
        shared = [(n, e.offset, e.size_bytes) for n, e in enumerate(image.entries) if e.shared]
        base, units = 0, []
        if shared and self.protection.keeps_shard:
            shards = self.protection.shards(image.shared_bytes)
            base = align(shards.shard_bytes(owner))
            units = cut_units(shared, shards.xor_ranges(owner))
        own = cut_units(ranges, whole_image(image.own_bytes), base)
        sharded = [entry for entry in image.entries if entry.sharded]
        steady = [r for r in self.objects.values() if r.has_stable_tensors]
        return _SlotLayout(
            entries=image.entries,
            owner=owner,
            owners=owners,
            units=[*units, *own],
            shared_units=len(units),
            base=base,
            resizable=any(r.kind == "module" for r in steady)
            and all(r.is_resizable for r in steady)
            and all(entry.offsets is not None for entry in sharded),
            replicas=min((entry.replicas for entry in sharded), default=0),
        )

    def shared_digest(self) -> str:
        """Return a digest of the tensors that DDP should keep the same on all ranks; empty if there are none.

        Ranks compare it before they rely on it.
        """
        if self.protection.agent_facts is None:
            return ""
        steady = [r for r in self.objects.values() if r.has_stable_tensors]
        wanted = replicated_ids(steady, {r.name: r.state() for r in steady})
        image, _ = self._walk()
        hasher, found = xxhash.xxh3_128(), False
        for tensor in image.tensors:
            if id(tensor) in wanted:
                flat = row_major_bytes(tensor).cpu().numpy()
                hasher.update(flat.data)
                found = True
        return hasher.hexdigest() if found else ""

    def _sources(self, image: TensorImage) -> list[Source]:
        """Return each tensor's bytes: guarded tensors' own memory, and copies of all others, made now."""
        sources = image.views.copy()
        staged = [
            (number, view) for number in image.immediate if isinstance(view := sources[number], np.ndarray)
        ]
        wanted = sum(len(view) for _, view in staged)
        if len(self._staging) < wanted:
            self._staging = np.zeros(wanted, dtype=np.uint8)
        end = 0
        for number, view in staged:
            copy = sources[number] = self._staging[end : end + len(view)]
            copy[:] = view
            end += len(view)
        for number in image.immediate:
            if not isinstance(sources[number], np.ndarray):
                flat = row_major_bytes(image.tensors[number])
                sources[number] = flat.numpy() if flat.device.type == "cpu" else flat
        return cast(list[Source], sources)  # Whatever had no view was gathered above.


def _freeze_nested(registered: RegisteredObject, take: TakeTensor) -> Any:
    """Return the frozen state of an object.

    :raises SnapshotError: it cannot be saved.
    """
    try:
        return freeze(registered.state(), registered.name, take)
    except RecursionError:
        raise SnapshotError(
            f"{registered.name} contains itself, or is nested too deeply to be saved"
        ) from None
