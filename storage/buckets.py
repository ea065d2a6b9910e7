"""Buckets, the unit of gradient all-reduce, of sharding and of state transfer. This module does not import
torch.

Ranks own layers; a parameter that is tied between layers is owned by the owners of all of them. A bucket
is a maximal run of parameters, in model order, with the same owners and the same dtype, laid out back to
back in one flat array. Every rank derives the same buckets from the same plan, including those that it
does not own, so the indices agree and can order collectives.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSize:
    numel: int
    dtype: str
    """Name without the library's prefix, such as ``float32``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Parameter ``parameters[i]`` is elements ``[offsets[i], offsets[i] + numels[i])`` of the flat array."""

    index: int
    owners: tuple[int, ...]
    """Ranks, ascending."""
    dtype: str
    parameters: tuple[str, ...]
    offsets: tuple[int, ...]
    numels: tuple[int, ...]

    @property
    def numel(self) -> int:
        return self.offsets[-1] + self.numels[-1]


def derive_buckets(
    parameter_layers: Mapping[str, Collection[int]],
    owners_of_layer: Mapping[int, Collection[int]],
    sizes: Mapping[str, ParameterSize],
) -> tuple[Bucket, ...]:
    """Cut the model's parameters into buckets.

    :param parameter_layers: every parameter of the model in model order, with the layers that use it.
    :param owners_of_layer: the ranks that hold each layer, over all pipelines.
    :param sizes: number of elements and dtype of every parameter.
    :raises ValueError: a layer has no owner, or a parameter has no layer or size.
    """
    runs: list[tuple[tuple[int, ...], str, list[str]]] = []
    for name, layers in parameter_layers.items():
        if name not in sizes:
            raise ValueError(f"parameter {name} has no size")
        owners = _owners(name, layers, owners_of_layer)
        dtype = sizes[name].dtype
        if runs and runs[-1][:2] == (owners, dtype):
            runs[-1][2].append(name)
        else:
            runs.append((owners, dtype, [name]))
    return tuple(
        _lay_out(index, owners, dtype, names, sizes) for index, (owners, dtype, names) in enumerate(runs)
    )


def _owners(
    name: str, layers: Collection[int], owners_of_layer: Mapping[int, Collection[int]]
) -> tuple[int, ...]:
    if not layers:
        raise ValueError(f"parameter {name} is in no layer")
    owners: set[int] = set()
    for layer in layers:
        if not owners_of_layer.get(layer):
            raise ValueError(f"layer {layer} (parameter {name}) has no owner")
        owners.update(owners_of_layer[layer])
    return tuple(sorted(owners))


def _lay_out(
    index: int, owners: tuple[int, ...], dtype: str, names: list[str], sizes: Mapping[str, ParameterSize]
) -> Bucket:
    offsets: list[int] = []
    end = 0
    for name in names:
        offsets.append(end)
        end += sizes[name].numel
    return Bucket(
        index=index,
        owners=owners,
        dtype=dtype,
        parameters=tuple(names),
        offsets=tuple(offsets),
        numels=tuple(sizes[name].numel for name in names),
    )
