"""Models and optimizers as one snapshot found them, for the next ones: most find them unchanged.

A survey holds what snapshots have in common until a tensor or the structure is another: the layout of the
image, views of the tensors' memory, what is guarded, what is shared. ``StateFingerprint`` and
``TensorFingerprint`` prove that it is
so; where they cannot, a new survey is made.

A walk over a state costs two microseconds a tensor, and from one snapshot to the next nothing of it changes
but plain values (steps, learning rates). To see that, a state is read level by level, with all values of a
level in one flat list: maps and comparisons over such lists run without an interpreted line per value. What
cannot be proven like that is no error: the caller gets ``None`` and walks.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from operator import attrgetter, eq, is_, not_
from typing import Any, Never

from torch import Tensor, nn

from runtime.script.plain_state import SnapshotError, freeze
from runtime.script.registered import RegisteredObject
from runtime.script.tensor_image import Image, KnownTensor

States = Mapping[str, Any]
"""What each of the surveyed things says its state is, by name."""
_SIMPLE = {Tensor, nn.Parameter}
"""A tensor of another class may keep its memory elsewhere, and change it unseen."""
_PLAIN, _TENSOR, _DICT, _LIST = range(4)
_shape, _dtype = attrgetter("shape"), attrgetter("dtype")


@dataclass(frozen=True, slots=True)
class TensorFingerprint:
    """Where tensors lie in memory, and how."""

    tensors: list[Tensor]
    addresses: list[int]
    shapes: list[tuple[int, ...]]
    strides: list[tuple[int, ...]]
    dtypes: list[Any]
    devices: list[Any]
    """Of those without an address: the others' tells."""

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> "TensorFingerprint | None":
        """``None``: these do not say enough of one of them."""
        each = list(tensors)
        # Complex values may be conjugated where they lie.
        if not all(type(t) in _SIMPLE and not t.is_complex() for t in each):
            return None
        shapes, strides = list(map(_shape, each)), list(map(Tensor.stride, each))
        addresses, dtypes = list(map(Tensor.data_ptr, each)), list(map(_dtype, each))
        return cls(each, addresses, shapes, strides, dtypes, _devices(each, addresses))

    def matches(self) -> bool:
        """They lie as they lay."""
        each = self.tensors
        try:
            return (
                list(map(Tensor.data_ptr, each)) == self.addresses
                and _devices(each, self.addresses) == self.devices
                and all(map(is_, map(_dtype, each), self.dtypes))
                # One after the other: thousands of tuples at a time would call the garbage collector.
                and all(map(eq, map(_shape, each), self.shapes))
                and all(map(eq, map(Tensor.stride, each), self.strides))
            )
        except RuntimeError:
            return False  # One has no memory any more.


def _devices(tensors: list[Tensor], addresses: list[int]) -> list[Any]:
    return [tensor.device for tensor in compress(tensors, map(not_, addresses))] if 0 in addresses else []


@dataclass(frozen=True, slots=True)
class _Level:
    """All values of one depth, one behind the other: those in dicts, then those in lists."""

    types: list[type]
    masks: tuple[bytes, ...]
    """By kind: which of the values are of it."""
    tensors: list[Tensor]
    keys: list[Any]
    """Of the dicts among the values, in one row."""
    key_types: list[type]
    sizes: list[int]
    """Of the dicts, then of the lists."""

    @classmethod
    def of(cls, values: list[Any]) -> "_Level":
        kinds = list(map(_kind, values))
        masks = tuple(bytes(kind == one for kind in kinds) for one in range(4))
        dicts = list(compress(values, masks[_DICT]))
        keys = list(chain.from_iterable(dicts))
        return cls(
            types=list(map(type, values)),
            masks=masks,
            tensors=list(compress(values, masks[_TENSOR])),
            keys=keys,
            key_types=list(map(type, keys)),
            sizes=list(map(len, (*dicts, *compress(values, masks[_LIST])))),
        )

    def those(self, kind: int, values: Iterable[Any]) -> list[Any]:
        return list(compress(values, self.masks[kind]))

    def holds(self, values: list[Any]) -> bool:
        """The same tensors, the same structure."""
        # Types before all else: what is of another one may not be comparable.
        if list(map(type, values)) != self.types:
            return False
        dicts, lists = self.those(_DICT, values), self.those(_LIST, values)
        keys = list(chain.from_iterable(dicts))
        return (
            all(map(is_, self.those(_TENSOR, values), self.tensors))
            and list(map(len, (*dicts, *lists))) == self.sizes
            and list(map(type, keys)) == self.key_types
            and keys == self.keys
        )

    def plain(self, values: list[Any]) -> list[Any]:
        """:raises SnapshotError: one cannot be kept, or there is a tensor in it."""
        return [freeze(value, "it", _refuse) for value in self.those(_PLAIN, values)]

    def below(self, values: list[Any]) -> list[Any]:
        """Those of the next depth."""
        dicts, lists = self.those(_DICT, values), self.those(_LIST, values)
        return [*chain.from_iterable(map(dict.values, dicts)), *chain.from_iterable(lists)]

    def places(self, values: list[Any]) -> list[tuple[Any, Any]]:
        """Of each of the next depth, what it is in, and under which key."""
        dicts, lists = self.those(_DICT, values), self.those(_LIST, values)
        within = [(one, key) for one in dicts for key in one]
        return within + [(one, index) for one in lists for index in range(len(one))]


@dataclass(frozen=True, slots=True)
class StateFingerprint:
    """A state that was frozen, with its tensors where they stood.

    What holds tensors (dicts with plain keys, lists) must be as it was; what does not is plain, and taken
    afresh each time.
    """

    _levels: list[_Level]
    _root: list[Any]
    """What ``freeze`` returned, in a list: its plain values are put where they belong."""
    _places: list[tuple[Any, Any]]
    """(dict or list of what is frozen, key) of the plain values in their order."""

    @classmethod
    def of(cls, state: Any, frozen: Any) -> "StateFingerprint | None":
        """:param frozen: this very state. ``None``: there are tensors in what nothing is known of."""
        levels: list[_Level] = []
        places: list[tuple[Any, Any]] = []
        values, root = [state], [frozen]
        where: list[tuple[Any, Any]] = [(root, 0)]
        try:
            while values:
                level = _Level.of(values)
                level.plain(values)
                levels.append(level)
                places += level.those(_PLAIN, where)
                there = [holder[key] for holder, key in where]
                if not all(isinstance(one, dict) for one in level.those(_DICT, there)):
                    return None  # Its keys are no plain ones.
                values, where = level.below(values), level.places(there)
        except SnapshotError:
            return None
        return cls(levels, root, places)

    def read_plain(self, state: Any) -> list[Any] | None:
        """The plain values in it as they are now, frozen; ``None``: there may be more that changed."""
        values, plain = [state], []
        try:
            for level in self._levels:
                if not level.holds(values):
                    return None
                plain += level.plain(values)
                values = level.below(values)
        except SnapshotError:
            return None
        return plain

    def freeze_with(self, plain: list[Any]) -> Any:
        """What ``freeze`` would have made of the state for which ``read_plain`` returned ``plain``.

        It is one and the same each time: encode it before the next call.
        """
        for (there, key), value in zip(self._places, plain, strict=True):
            there[key] = value
        return self._root[0]


def _kind(value: Any) -> int:
    if type(value) in _SIMPLE:
        return _TENSOR
    # Of a dict of another class the order that it tells may not be the one that it is read in.
    if type(value) is dict:
        return _DICT if _holds_tensors(value) else _PLAIN
    return _LIST if type(value) is list and _holds_tensors(value) else _PLAIN


def _holds_tensors(value: Any) -> bool:
    if type(value) is dict:
        return any(map(_holds_tensors, value.values()))
    return type(value) in _SIMPLE or (type(value) is list and any(map(_holds_tensors, value)))


def _refuse(tensor: Tensor, where: str) -> Never:
    raise SnapshotError(f"{where} is a tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """:param shares: some of it is shared with other ranks."""

    things: list[RegisteredObject]
    shares: bool
    image: Image
    """Of the surveyed things alone; it does not change any more."""
    guarded: set[int]
    """Ids of the tensors that nobody changes before they are copied."""
    shared: set[int]
    """Ids of those that are the same on all ranks."""
    _frozen: dict[str, Any]
    _fixed: dict[str, dict[str, Any]]
    _sights: dict[str, StateFingerprint | None]
    _parameters: list[list[Tensor]]
    _looks: TensorFingerprint | None

    @classmethod
    def of(
        cls,
        things: Sequence[RegisteredObject],
        states: States,
        known: dict[int, KnownTensor],
        before: "StateLayout | None",
        *,
        shares: bool,
    ) -> "StateLayout":
        """:param before: the last one, which does not hold any more. Where it had other tensors, this one may
            be of no use to the next snapshot either, and is not made ready for it.
        :raises SnapshotError: something in it is no plain data.
        """
        guarded = {number for r in things for number in r.guarded_ids(states[r.name])}
        shared = (replicated_ids(things, states) & guarded) if shares else set()
        image = Image(known=known)

        def take(tensor: Tensor, where: str) -> int:
            of_all = id(tensor) in shared
            return image.add(tensor, where, immediate=id(tensor) not in guarded, shared=of_all)

        frozen = {r.name: freeze(states[r.name], r.name, take) for r in things}
        parameters = _parameters(things, shares=shares)
        looks: TensorFingerprint | None = None
        sights: dict[str, StateFingerprint | None] = {}
        if before is not None and _same(image.tensors, before.image.tensors):
            tensors = {number: found.tensor for number, found in image.seen.items()}
            tensors |= {id(p): p for p in chain.from_iterable(parameters)}
            looks = TensorFingerprint.of(tensors.values())
            sights = {name: StateFingerprint.of(states[name], kept) for name, kept in frozen.items()}
        return cls(
            things=list(things),
            shares=shares,
            image=image,
            guarded=guarded,
            shared=shared,
            _frozen=frozen,
            _fixed={r.name: r.constant_state() for r in things},
            _sights=sights,
            _parameters=parameters,
            _looks=looks,
        )

    def read_plain(
        self, things: Sequence[RegisteredObject], states: States, *, shares: bool
    ) -> dict[str, Any] | None:
        """The plain values as they are now, for ``freeze_with``; ``None``: more may have changed."""
        if self._looks is None or shares != self.shares or not _same(things, self.things):
            return None
        parameters = _parameters(things, shares=shares)
        if len(parameters) != len(self._parameters) or not all(map(_same, parameters, self._parameters)):
            return None
        plain: dict[str, Any] = {}
        for name, sight in self._sights.items():
            found = sight.read_plain(states[name]) if sight is not None else None
            if found is None:
                return None
            plain[name] = found
        return plain if self._looks.matches() else None

    def freeze_with(self, plain: Mapping[str, Any] | None) -> dict[str, Any]:
        """By name, with these plain values (``None``: with those that were surveyed).

        What is in it is the same each time: encode it before the next call.
        """
        frozen = self._frozen if plain is None else {n: self._told(n, now) for n, now in plain.items()}
        # What is no dict of an optimizer's may be no dict at all.
        return {n: {**kept, **self._fixed[n]} if self._fixed[n] else kept for n, kept in frozen.items()}

    def _told(self, name: str, plain: list[Any]) -> Any:
        sight = self._sights[name]
        assert sight is not None
        return sight.freeze_with(plain)


def replicated_ids(things: Sequence[RegisteredObject], states: States) -> set[int]:
    """Of tensors that are the same on all ranks, as DDP has it."""
    parameters: set[int] = set()
    for registered in sorted(things, key=lambda r: r.kind != "module"):
        parameters |= registered.shared_ids(states[registered.name], parameters)
    return parameters


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _parameters(things: Sequence[RegisteredObject], *, shares: bool) -> list[list[Tensor]]:
    """Copies: a group's own list may be changed in place."""
    return [list(group) for registered in things for group in registered.parameters(shared=shares)]
