"""Buckets: every parameter once, in model order, by owners and dtype."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.buckets import Bucket, ParameterSize, derive_buckets


def sizes(**numels: int) -> dict[str, ParameterSize]:
    return {name: ParameterSize(numel=numel, dtype="float32") for name, numel in numels.items()}


def test_a_run_of_parameters_with_the_same_owners_is_one_bucket() -> None:
    buckets = derive_buckets(
        {"a": (0,), "b": (0,), "c": (1,), "d": (2,)},
        {0: (0, 2), 1: (0, 2), 2: (1, 2)},
        sizes(a=3, b=4, c=5, d=6),
    )
    assert buckets == (
        Bucket(
            index=0,
            owners=(0, 2),
            dtype="float32",
            parameters=("a", "b", "c"),
            offsets=(0, 3, 7),
            numels=(3, 4, 5),
        ),
        Bucket(index=1, owners=(1, 2), dtype="float32", parameters=("d",), offsets=(0,), numels=(6,)),
    )
    assert buckets[0].numel == 12


def test_a_tied_parameter_is_owned_by_the_owners_of_all_its_layers() -> None:
    buckets = derive_buckets(
        {"tied": (0, 2), "position": (0,), "middle": (1,)},
        {0: (0, 3), 1: (1, 3), 2: (2, 3)},
        sizes(tied=8, position=2, middle=5),
    )
    assert [(bucket.owners, bucket.parameters) for bucket in buckets] == [
        ((0, 2, 3), ("tied",)),
        ((0, 3), ("position",)),
        ((1, 3), ("middle",)),
    ]


def test_two_dtypes_are_two_buckets() -> None:
    buckets = derive_buckets(
        {"a": (0,), "b": (0,), "c": (0,)},
        {0: (0, 1)},
        {
            "a": ParameterSize(numel=1, dtype="float32"),
            "b": ParameterSize(numel=1, dtype="bfloat16"),
            "c": ParameterSize(numel=1, dtype="bfloat16"),
        },
    )
    assert [(bucket.dtype, bucket.parameters) for bucket in buckets] == [
        ("float32", ("a",)),
        ("bfloat16", ("b", "c")),
    ]


@pytest.mark.parametrize(
    ("layers", "owners", "numels", "message"),
    [
        ({"a": (0,)}, {}, {"a": 1}, "layer 0 .* no owner"),
        ({"a": (0,)}, {0: ()}, {"a": 1}, "layer 0 .* no owner"),
        ({"a": ()}, {0: (0,)}, {"a": 1}, "a is in no layer"),
        ({"a": (0,)}, {0: (0,)}, {}, "a has no size"),
    ],
)
def test_inconsistent_arguments_are_rejected(
    layers: dict[str, tuple[int, ...]],
    owners: dict[int, tuple[int, ...]],
    numels: dict[str, int],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        derive_buckets(layers, owners, sizes(**numels))


@st.composite
def models(
    draw: st.DrawFn,
) -> tuple[dict[str, tuple[int, ...]], dict[int, tuple[int, ...]], dict[str, ParameterSize]]:
    layer_count = draw(st.integers(1, 6))
    layer = st.integers(0, layer_count - 1)
    count = draw(st.integers(0, 12))
    uses = [tuple(sorted(draw(st.sets(layer, min_size=1, max_size=2)))) for _ in range(count)]
    owners = {
        index: tuple(draw(st.sets(st.integers(0, 3), min_size=1, max_size=3))) for index in range(layer_count)
    }
    parameter_layers = {f"p{index}": layers for index, layers in enumerate(uses)}
    numels = {
        name: ParameterSize(
            numel=draw(st.integers(0, 9)), dtype=draw(st.sampled_from(["float32", "float64"]))
        )
        for name in parameter_layers
    }
    return parameter_layers, owners, numels


@given(models())
def test_every_parameter_is_in_one_bucket_in_model_order_and_runs_are_maximal(
    model: tuple[dict[str, tuple[int, ...]], dict[int, tuple[int, ...]], dict[str, ParameterSize]],
) -> None:
    parameter_layers, owners, numels = model
    buckets = derive_buckets(parameter_layers, owners, numels)
    assert [name for bucket in buckets for name in bucket.parameters] == list(parameter_layers)
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    for bucket in buckets:
        end = 0
        for name, offset, numel in zip(bucket.parameters, bucket.offsets, bucket.numels, strict=True):
            assert (offset, numel, bucket.dtype) == (end, numels[name].numel, numels[name].dtype)
            assert set(bucket.owners) == {r for layer in parameter_layers[name] for r in owners[layer]}
            end += numel
        assert bucket.numel == end
    for left, right in itertools.pairwise(buckets):
        assert (left.owners, left.dtype) != (right.owners, right.dtype)


@given(models())
def test_every_rank_derives_the_same_buckets(
    model: tuple[dict[str, tuple[int, ...]], dict[int, tuple[int, ...]], dict[str, ParameterSize]],
) -> None:
    parameter_layers, owners, numels = model
    otherwise = {layer: tuple(reversed(ranks)) for layer, ranks in reversed(owners.items())}
    assert derive_buckets(parameter_layers, owners, numels) == derive_buckets(
        parameter_layers, otherwise, numels
    )
