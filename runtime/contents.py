"""What a script registered, as one snapshot after the other: which bytes, where from, in which pieces."""

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import xxhash
from torch import Tensor

from runtime.copier import Capture
from runtime.plain_state import encode, freeze
from runtime.protection import Protection
from runtime.random_states import random_states
from runtime.ranks import Ranks
from runtime.registered import Registered, expected_state
from runtime.saved import FORMAT
from runtime.tensor_image import Bytes, Image, Known, Source, Unit, aligned, cut, gathered, whole

_SPARE_BYTES = 256 * 1024
_ENTRY_BYTES = 256
"""Of a header, for each tensor that is expected."""


@dataclass(slots=True)
class Contents:
    """:param random: the states of random numbers, too."""

    protection: Protection
    random: bool
    things: dict[str, Registered] = field(default_factory=dict)
    _known: dict[int, Known] = field(default_factory=dict)
    _units: tuple[tuple[Any, ...], list[Unit], int, int] = ((), [], 0, 0)
    _staging: Bytes = field(default_factory=lambda: np.empty(0, dtype=np.uint8))

    def expected_bytes(self) -> int:
        image, trees = self._walk()
        own, shared, tensors = image.own_bytes, image.shared_bytes, len(image.entries)
        for registered in self.things.values():
            if registered.kind == "optimizer":
                more_bytes, more = expected_state(registered.thing)
                tensors += more
                # Of a replicated module's, in all likelihood: where not, it is the larger part that counts.
                own, shared = (own, shared + more_bytes) if shared else (own + more_bytes, shared)
        plain_bytes = 2 * len(encode(trees))
        kept = (
            self.protection.shards(shared).shard_bytes(self.protection.owner)
            if self.protection.keeps_shard
            else 0
        )
        return kept + own + (_ENTRY_BYTES + 64) * tensors + plain_bytes + _SPARE_BYTES

    def _walk(self) -> tuple[Image, dict[str, Any]]:
        """What is registered, as it is now; nothing is copied but plain data."""
        image = Image(known=self._known)
        guarded: set[int] = set()
        for registered in self.things.values():
            guarded |= registered.guarded_ids()
        shared = (self._replicated_ids() & guarded) if self.protection.shares else set()

        def take(tensor: Tensor, where: str) -> int:
            of_all = id(tensor) in shared
            return image.add(tensor, where, at_once=id(tensor) not in guarded, shared=of_all)

        things = {
            name: {"kind": registered.kind, "state": freeze(registered.state(), name, take)}
            for name, registered in self.things.items()
        }
        numbers = freeze(random_states(), "random numbers", take) if self.random else None
        self._known = image.seen
        return image, {"format": FORMAT, "things": things, "random": numbers}

    def capture(self, step: int) -> Capture:
        image, trees = self._walk()
        sources = self._sources(image)
        ranks = Ranks.now()
        units, shared_units, base = self._cut(image)
        layout = self.protection.layout(ranks.rank, ranks.count, image.own_bytes, image.shared_bytes)
        return Capture(
            step=step,
            rank=ranks.rank,
            units=units,
            shared_units=shared_units,
            sources=sources,
            body_bytes=base + image.own_bytes,
            header=lambda: encode({**trees, "entries": image.entries}),
            layout=msgspec.to_builtins(layout),
            devices={source.device for source in sources if isinstance(source, Tensor)},
        )

    def _cut(self, image: Image) -> tuple[list[Unit], int, int]:
        """Units, how many of them are of a shard of what is shared, and where this rank's own begin."""
        ranges = [(n, e.offset, e.size_bytes) for n, e in enumerate(image.entries) if not e.shared]
        shared = [(n, e.offset, e.size_bytes) for n, e in enumerate(image.entries) if e.shared]
        key = (ranges, shared, self.protection.owner, self.protection.owners)
        if key != self._units[0]:
            base, units = 0, []
            if shared and self.protection.keeps_shard:
                shards, owner = self.protection.shards(image.shared_bytes), self.protection.owner
                base = aligned(shards.shard_bytes(owner))
                units = cut(shared, shards.pieces(owner))
            own = cut(ranges, whole(image.own_bytes), base)
            self._units = (key, [*units, *own], len(units), base)
        return self._units[1:]

    def _replicated_ids(self) -> set[int]:
        """Of tensors that are the same on all ranks, as DDP has it."""
        parameters: set[int] = set()
        for registered in sorted(self.things.values(), key=lambda r: r.kind != "module"):
            parameters |= registered.shared_ids(parameters)
        return parameters

    def shared_digest(self) -> str:
        """Of what DDP is to keep the same, so that all ranks see whether it is; empty: nothing is."""
        if self.protection.facts is None:
            return ""
        wanted, hasher, found = self._replicated_ids(), xxhash.xxh3_128(), False
        image, _ = self._walk()
        for tensor in image.tensors:
            if id(tensor) in wanted:
                flat = gathered(tensor).cpu().numpy()
                hasher.update(flat.data)
                found = True
        return hasher.hexdigest() if found else ""

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
