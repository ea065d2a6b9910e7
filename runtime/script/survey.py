"""Models and optimizers as one snapshot found them, for the next ones: most find them unchanged.

A survey holds what snapshots have in common until a tensor or the structure is another: the layout of the
image, views of the tensors' memory, what is guarded, what is shared. ``Sight`` and ``Looks`` prove that it is
so; where they cannot, a new survey is made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor

from runtime.script.plain_state import freeze
from runtime.script.registered import Registered
from runtime.script.sight import Looks, Sight
from runtime.script.tensor_image import Image, Known

States = Mapping[str, Any]
"""What each of the surveyed things says its state is, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """:param shares: some of it is shared with other ranks."""

    things: list[Registered]
    shares: bool
    image: Image
    """Of the surveyed things alone; it does not change any more."""
    guarded: set[int]
    """Ids of the tensors that nobody changes before they are copied."""
    shared: set[int]
    """Ids of those that are the same on all ranks."""
    _frozen: dict[str, Any]
    _fixed: dict[str, dict[str, Any]]
    _sights: dict[str, Sight | None]
    _parameters: list[list[Tensor]]
    _looks: Looks | None

    @classmethod
    def of(
        cls,
        things: Sequence[Registered],
        states: States,
        known: dict[int, Known],
        before: "Survey | None",
        *,
        shares: bool,
    ) -> "Survey":
        """:param before: the last one, which does not hold any more. Where it had other tensors, this one may
            be of no use to the next snapshot either, and is not made ready for it.
        :raises SnapshotError: something in it is no plain data.
        """
        guarded = {number for r in things for number in r.guarded_ids(states[r.name])}
        shared = (replicated_ids(things, states) & guarded) if shares else set()
        image = Image(known=known)

        def take(tensor: Tensor, where: str) -> int:
            of_all = id(tensor) in shared
            return image.add(tensor, where, at_once=id(tensor) not in guarded, shared=of_all)

        frozen = {r.name: freeze(states[r.name], r.name, take) for r in things}
        parameters = _parameters(things, shares=shares)
        looks: Looks | None = None
        sights: dict[str, Sight | None] = {}
        if before is not None and _same(image.tensors, before.image.tensors):
            tensors = {number: found.tensor for number, found in image.seen.items()}
            tensors |= {id(p): p for p in chain.from_iterable(parameters)}
            looks = Looks.of(tensors.values())
            sights = {name: Sight.of(states[name], kept) for name, kept in frozen.items()}
        return cls(
            things=list(things),
            shares=shares,
            image=image,
            guarded=guarded,
            shared=shared,
            _frozen=frozen,
            _fixed={r.name: r.fixed() for r in things},
            _sights=sights,
            _parameters=parameters,
            _looks=looks,
        )

    def again(self, things: Sequence[Registered], states: States, *, shares: bool) -> dict[str, Any] | None:
        """The plain values as they are now, for ``frozen``; ``None``: more may have changed."""
        if self._looks is None or shares != self.shares or not _same(things, self.things):
            return None
        parameters = _parameters(things, shares=shares)
        if len(parameters) != len(self._parameters) or not all(map(_same, parameters, self._parameters)):
            return None
        plain: dict[str, Any] = {}
        for name, sight in self._sights.items():
            found = sight.again(states[name]) if sight is not None else None
            if found is None:
                return None
            plain[name] = found
        return plain if self._looks.hold() else None

    def frozen(self, plain: Mapping[str, Any] | None) -> dict[str, Any]:
        """By name, with these plain values (``None``: with those that were surveyed).

        What is in it is the same each time: encode it before the next call.
        """
        frozen = self._frozen if plain is None else {n: self._told(n, now) for n, now in plain.items()}
        # What is no dict of an optimizer's may be no dict at all.
        return {n: {**kept, **self._fixed[n]} if self._fixed[n] else kept for n, kept in frozen.items()}

    def _told(self, name: str, plain: list[Any]) -> Any:
        sight = self._sights[name]
        assert sight is not None
        return sight.frozen(plain)


def replicated_ids(things: Sequence[Registered], states: States) -> set[int]:
    """Of tensors that are the same on all ranks, as DDP has it."""
    parameters: set[int] = set()
    for registered in sorted(things, key=lambda r: r.kind != "module"):
        parameters |= registered.shared_ids(states[registered.name], parameters)
    return parameters


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _parameters(things: Sequence[Registered], *, shares: bool) -> list[list[Tensor]]:
    """Copies: a group's own list may be changed in place."""
    return [list(group) for registered in things for group in registered.parameters(shared=shares)]
