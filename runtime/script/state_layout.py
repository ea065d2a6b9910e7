"""The layout of the registered state, reused from one snapshot to the next while nothing but plain values
changes.

A ``StateLayout`` holds what successive snapshots have in common: the layout of the image, views of the
tensors' memory, which tensors are guarded and which are shared. ``StateFingerprint`` and
``TensorFingerprint`` prove that it still applies; where they cannot, a new layout is made.

Walking over a state takes two microseconds a tensor, and from one snapshot to the next only plain values
(steps, learning rates) change. To detect this quickly, a state is read level by level, with all values of a
level in one flat list: maps and comparisons over such lists do not execute an interpreted line per value. A
state that cannot be proven unchanged in this way is not an error: the caller gets ``None`` and walks over
it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from operator import attrgetter, eq, is_, not_
from typing import Any, Never

from torch import Tensor, nn

from runtime.script.plain_state import SnapshotError, freeze
from runtime.script.registered import RegisteredObject
from runtime.script.tensor_image import KnownTensor, TensorImage

States = Mapping[str, Any]
"""State of each registered object, by its name."""
_SIMPLE = {Tensor, nn.Parameter}
"""Classes whose tensors can be fingerprinted. A subclass may keep its memory elsewhere and change it
unnoticed.
"""
_PLAIN, _TENSOR, _DICT, _LIST = range(4)
_shape, _dtype = attrgetter("shape"), attrgetter("dtype")


@dataclass(frozen=True, slots=True)
class TensorFingerprint:
    """Addresses, shapes, strides and types of tensors, to detect whether any of them changed."""

    tensors: list[Tensor]
    addresses: list[int]
    shapes: list[tuple[int, ...]]
    strides: list[tuple[int, ...]]
    dtypes: list[Any]
    devices: list[Any]
    """Devices of the tensors whose address is 0; all others are identified by their address."""

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> "TensorFingerprint | None":
        """Return the fingerprint; ``None`` if one of the tensors cannot be fingerprinted."""
        each = list(tensors)
        # Complex values may be conjugated in place.
        if not all(type(t) in _SIMPLE and not t.is_complex() for t in each):
            return None
        shapes, strides = list(map(_shape, each)), list(map(Tensor.stride, each))
        addresses, dtypes = list(map(Tensor.data_ptr, each)), list(map(_dtype, each))
        return cls(each, addresses, shapes, strides, dtypes, _devices(each, addresses))

    def matches(self) -> bool:
        """Return whether all tensors still have the same memory and layout."""
        each = self.tensors
        try:
            return (
                list(map(Tensor.data_ptr, each)) == self.addresses
                and _devices(each, self.addresses) == self.devices
                and all(map(is_, map(_dtype, each), self.dtypes))
                # These are compared one by one: allocating thousands of tuples at once would trigger the
                # garbage collector.
                and all(map(eq, map(_shape, each), self.shapes))
                and all(map(eq, map(Tensor.stride, each), self.strides))
            )
        except RuntimeError:
            return False  # The memory of a tensor was released.


def _devices(tensors: list[Tensor], addresses: list[int]) -> list[Any]:
    return [tensor.device for tensor in compress(tensors, map(not_, addresses))] if 0 in addresses else []


@dataclass(frozen=True, slots=True)
class _Level:
    """All values at one depth of a nested state, in a row: first those in dicts, then those in lists."""

    types: list[type]
    masks: tuple[bytes, ...]
    """Mask of the values of each kind."""
    tensors: list[Tensor]
    keys: list[Any]
    """Keys of the dicts among the values, in a row."""
    key_types: list[type]
    sizes: list[int]
    """Lengths of the dicts, then of the lists."""

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
        """Return whether the values have the same structure and contain the same tensors."""
        # Types are compared first, since values of different types may not be comparable.
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
        """Return the plain values, frozen.

        :raises SnapshotError: a value cannot be saved, or contains a tensor.
        """
        return [freeze(value, "it", _reject_tensor) for value in self.those(_PLAIN, values)]

    def below(self, values: list[Any]) -> list[Any]:
        """Return the values of the next depth."""
        dicts, lists = self.those(_DICT, values), self.those(_LIST, values)
        return [*chain.from_iterable(map(dict.values, dicts)), *chain.from_iterable(lists)]

    def places(self, values: list[Any]) -> list[tuple[Any, Any]]:
        """Return the container and the key of each value of the next depth."""
        dicts, lists = self.those(_DICT, values), self.those(_LIST, values)
        within = [(one, key) for one in dicts for key in one]
        return within + [(one, index) for one in lists for index in range(len(one))]


@dataclass(frozen=True, slots=True)
class StateFingerprint:
    """The structure and the tensors of a frozen state, to detect whether only its plain values changed.

    Containers that hold tensors (dicts with plain keys, lists) must be unchanged. All else is plain and
    read again for each snapshot.
    """

    _levels: list[_Level]
    _root: list[Any]
    """Result of ``freeze`` in a list, so that the root can be replaced; its plain values are updated in place."""
    _places: list[tuple[Any, Any]]
    """Container in the frozen state and key of each plain value, in their order."""

    @classmethod
    def of(cls, state: Any, frozen: Any) -> "StateFingerprint | None":
        """Return the fingerprint of ``state``; ``None`` if a container of tensors is of an unknown kind.

        :param frozen: what ``freeze`` returned for this state.
        """
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
                    return None  # Its keys are not plain.
                values, where = level.below(values), level.places(there)
        except SnapshotError:
            return None
        return cls(levels, root, places)

    def read_plain(self, state: Any) -> list[Any] | None:
        """Return the current plain values, frozen; ``None`` if more than plain values may have changed."""
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
        """Return the frozen state with these plain values, as ``freeze`` would return it.

        :param plain: what ``read_plain`` returned. The result is the same object each time: encode it
            before the next call.
        """
        for (there, key), value in zip(self._places, plain, strict=True):
            there[key] = value
        return self._root[0]


def _kind(value: Any) -> int:
    if type(value) in _SIMPLE:
        return _TENSOR
    # The iteration order of a dict subclass may differ from the order in which its values are read.
    if type(value) is dict:
        return _DICT if _holds_tensors(value) else _PLAIN
    return _LIST if type(value) is list and _holds_tensors(value) else _PLAIN


def _holds_tensors(value: Any) -> bool:
    if type(value) is dict:
        return any(map(_holds_tensors, value.values()))
    return type(value) in _SIMPLE or (type(value) is list and any(map(_holds_tensors, value)))


def _reject_tensor(tensor: Tensor, where: str) -> Never:
    raise SnapshotError(f"{where} is a tensor")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """The layout of the state of registered modules and optimizers.

    :param shares: whether some of it is shared with other ranks.
    """

    objects: list[RegisteredObject]
    shares: bool
    image: TensorImage
    """Image of these objects alone; it does not change any more."""
    _frozen: dict[str, Any]
    _constant: dict[str, dict[str, Any]]
    _fingerprints: dict[str, StateFingerprint | None]
    _parameters: list[list[Tensor]]
    _tensor_fingerprint: TensorFingerprint | None

    @classmethod
    def of(
        cls,
        objects: Sequence[RegisteredObject],
        states: States,
        known: dict[int, KnownTensor],
        before: "StateLayout | None",
        *,
        shares: bool,
    ) -> "StateLayout":
        """Return the layout of the objects' current state.

        :param before: the previous layout, which no longer applies. If it had other tensors, the new one is
            not prepared for reuse, since it may not apply to the next snapshot either.
        :raises SnapshotError: the state contains something that is not plain data.
        """
        guarded = {number for r in objects for number in r.guarded_ids(states[r.name])}
        shared = (replicated_ids(objects, states) & guarded) if shares else set()
        image = TensorImage(known=known, guarded=guarded, shared=shared)
        frozen = {r.name: freeze(states[r.name], r.name, image.add) for r in objects}
        parameters = _parameters(objects, shares=shares)
        tensor_fingerprint: TensorFingerprint | None = None
        fingerprints: dict[str, StateFingerprint | None] = {}
        if before is not None and _are_same(image.tensors, before.image.tensors):
            tensors = {number: found.tensor for number, found in image.seen.items()}
            tensors |= {id(p): p for p in chain.from_iterable(parameters)}
            tensor_fingerprint = TensorFingerprint.of(tensors.values())
            fingerprints = {name: StateFingerprint.of(states[name], kept) for name, kept in frozen.items()}
        return cls(
            objects=list(objects),
            shares=shares,
            image=image,
            _frozen=frozen,
            _constant={r.name: r.constant_state() for r in objects},
            _fingerprints=fingerprints,
            _parameters=parameters,
            _tensor_fingerprint=tensor_fingerprint,
        )

    def read_plain(
        self, objects: Sequence[RegisteredObject], states: States, *, shares: bool
    ) -> dict[str, Any] | None:
        """Return the current plain values, for ``freeze_with``; ``None`` if more than plain values may have
        changed.
        """
        if self._tensor_fingerprint is None or shares != self.shares or not _are_same(objects, self.objects):
            return None
        parameters = _parameters(objects, shares=shares)
        if len(parameters) != len(self._parameters) or not all(map(_are_same, parameters, self._parameters)):
            return None
        plain: dict[str, Any] = {}
        for name, fingerprint in self._fingerprints.items():
            found = fingerprint.read_plain(states[name]) if fingerprint is not None else None
            if found is None:
                return None
            plain[name] = found
        return plain if self._tensor_fingerprint.matches() else None

    def freeze_with(self, plain: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return each object's frozen state with these plain values, by name (``None``: with those of the
        layout itself).

        The values are the same objects each time: encode them before the next call.
        """
        frozen = self._frozen if plain is None else {n: self._freeze_one(n, now) for n, now in plain.items()}
        # Only an optimizer has constant state to add; another object's state may not be a dict.
        return {n: {**kept, **self._constant[n]} if self._constant[n] else kept for n, kept in frozen.items()}

    def _freeze_one(self, name: str, plain: list[Any]) -> Any:
        fingerprint = self._fingerprints[name]
        assert fingerprint is not None
        return fingerprint.freeze_with(plain)


def replicated_ids(objects: Sequence[RegisteredObject], states: States) -> set[int]:
    """Return the ids of the tensors that DistributedDataParallel keeps the same on all ranks."""
    parameters: set[int] = set()
    for registered in sorted(objects, key=lambda r: r.kind != "module"):
        parameters |= registered.shared_ids(states[registered.name], parameters)
    return parameters


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _parameters(objects: Sequence[RegisteredObject], *, shares: bool) -> list[list[Tensor]]:
    """Return copies of the parameter lists, since an optimizer's own list may be changed in place."""
    return [list(group) for registered in objects for group in registered.parameters(shared=shares)]
