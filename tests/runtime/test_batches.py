"""Tests of batches: collating, checking, slicing, casting, and what the default collator rejects."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.data.batches import (
    cast_floating,
    check_batch,
    count_rows,
    default_collate,
    first_difference,
    signature,
    slice_rows,
    to_device,
)
from runtime.errors import TrainingError


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">u2", ">c8"])
def test_arrays_in_another_order_of_bytes_are_converted(dtype: str) -> None:
    array = np.array([1, 2, 300], dtype=dtype)
    assert check_batch(array).tolist() == [1, 2, 300]
    assert default_collate([array, array]).tolist() == [[1, 2, 300]] * 2


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
def test_numbers_that_torch_does_not_have_are_rejected(dtype: Any) -> None:
    with pytest.raises(TrainingError, match=r"sample is an array of \w+, which torch does not have"):
        default_collate([np.zeros(2, dtype)])
    for value in (np.zeros(2, dtype), dtype(1)):
        with pytest.raises(TrainingError, match=r"batch\['x'\], as the collate function returned it, is a"):
            check_batch({"x": value})


def test_structures_are_preserved_and_leaves_are_stacked() -> None:
    batch = default_collate(
        [
            {
                "pair": (torch.full((2,), i), np.float32(i)),
                "several": [torch.zeros(1), {"deep": True}],
                "ids": [[i, 1], [2, 3]],
                "text": "ab",
                "none": None,
            }
            for i in range(3)
        ]
    )
    assert isinstance(batch["pair"], tuple) and isinstance(batch["several"], list)
    assert batch["pair"][0].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert torch.equal(batch["pair"][1], torch.arange(3, dtype=torch.float32))
    assert batch["several"][0].shape == (3, 1)
    assert torch.equal(batch["several"][1]["deep"], torch.ones(3, dtype=torch.bool))
    assert batch["ids"].dtype == torch.int64 and batch["ids"].shape == (3, 2, 2)
    assert batch["text"] == ["ab"] * 3 and batch["none"] is None


def test_plain_tensors_numbers_and_dataclasses_are_samples_too() -> None:
    @dataclass
    class Pair:
        x: Tensor
        y: float

    assert default_collate([torch.ones(2), torch.zeros(2)]).tolist() == [[1, 1], [0, 0]]
    assert default_collate([1, 2]).tolist() == [1, 2]
    assert default_collate([0.5, 1]).dtype == torch.float64
    assert default_collate([Pair(torch.ones(1), 2.0)])["y"].tolist() == [2.0]


def test_unsigned_numbers_of_token_files_become_usable_ones() -> None:
    for kind in (np.uint16, np.uint32):
        assert default_collate([np.arange(3, dtype=kind)]).dtype == torch.int64
        assert check_batch(np.zeros((1, 3), dtype=kind)).dtype == torch.int64
    assert default_collate([np.arange(3, dtype=np.uint8)]).dtype == torch.uint8


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (
            [{"ids": torch.zeros(5)}, {"ids": torch.zeros(7)}],
            r"sample\['ids'\] has shape \(5,\) in row 0 of the microbatch and \(7,\) in row 1; "
            "give Training.collate, or pad/pack the samples",
        ),
        ([(1, [1, 2]), (1, [1, 2, 3])], r"sample\[1\] has shape \(2,\) in row 0 .* \(3,\) in row 1; give"),
        ([np.zeros((2, 3)), np.zeros((2, 4))], r"the sample has shape \(2, 3\) .* \(2, 4\) in row 1; give"),
        ([{"a": 1}, {"b": 1}], r"the sample is a dict of 'a' in row 0 .* a dict of 'b' in row 1"),
        ([(1, 2), (1, 2, 3)], "is a tuple of 2 in row 0 .* a tuple of 3 in row 1"),
        ([{"a": None}, {"a": 1}], r"sample\['a'\] is None in row 0 .* an int in row 1"),
        ([torch.zeros(1), np.zeros(1)], "is a tensor in row 0 .* a numpy array of float64 in row 1"),
        ([{"picture": object()}], r"sample\['picture'\] is an object, which cannot be stacked .*collate"),
        ([[[1, 2], [3]], [[1, 2], [3, 4]]], r"sample\[1\] has shape \(1,\) in row 0 .* \(2,\) in row 1"),
        ([np.array(["a"])], "is an array of <U1, which torch does not have"),
    ],
)
def test_samples_that_cannot_be_stacked_are_named(samples: list[Any], said: str) -> None:
    with pytest.raises(TrainingError, match=said):
        default_collate(samples)


def test_the_result_of_a_collate_function_becomes_a_batch() -> None:
    given = UserDict({"x": np.zeros((2, 3), dtype=np.float32), "n": np.int64(4), "y": (torch.ones(2), "a")})
    batch = check_batch(given)
    assert type(batch) is dict and batch["n"] == 4 and type(batch["n"]) is int
    assert batch["x"].dtype == torch.float32 and batch["y"][1] == "a"
    transposed = check_batch(torch.arange(6).reshape(2, 3).T)
    assert transposed.is_contiguous() and transposed.shape == (3, 2)
    assert not check_batch(torch.ones(2, requires_grad=True)).requires_grad


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "returned None, which contains no tensor"),
        ({"a": 1, "b": "x"}, "returned a dict with 'a', 'b', which contains no tensor"),
        ([], "returned a list of 0, which contains no tensor"),
        ({"x": torch.ones(1), "y": {1, 2}}, r"batch\['y'\], as the collate function returned it, is a set"),
        ((torch.ones(1), (i for i in "ab")), r"batch\[1\], .* is a generator"),
        ({3: torch.ones(1)}, "has the key 3; keys of a batch must be strings"),
        ({"x": torch.ones(2, 2).to_sparse()}, "make it dense"),
        ({"x": torch.ones(1, device="meta")}, "is on meta; return CPU tensors"),
        ((torch.ones(1), 2**70), r"batch\[1\] is 1180591620717411303424, which has more than 64 bits"),
        ({"x": np.array(["a"])}, r"batch\['x'\], .* is a numpy array of <U1"),
    ],
)
def test_a_result_that_is_not_a_batch_is_rejected(returned: Any, said: str) -> None:
    with pytest.raises(TrainingError, match=said):
        check_batch(returned)


BATCH = {
    "x": torch.arange(8).reshape(4, 2),
    "bias": torch.ones(3, 3),
    "scale": torch.tensor(2.0),
    "more": (torch.arange(4.0), [1, None]),
    "names": ["a", "b", "c", "d"],
}


def test_rows_are_sliced_and_the_rest_stays() -> None:
    part = slice_rows(BATCH, 1, 3, 4)
    assert part["x"].tolist() == [[2, 3], [4, 5]] and part["more"][0].tolist() == [1, 2]
    assert part["names"] == ["b", "c"] and part["more"][1] == [1, None]
    assert part["bias"] is BATCH["bias"] and part["scale"] is BATCH["scale"]
    assert part["x"].data_ptr() == BATCH["x"][1:].data_ptr()
    assert count_rows(BATCH) == 4 and count_rows(part) == 2


def test_a_batch_without_rows_cannot_be_split() -> None:
    packed = {"ids": torch.zeros(1, 100), "lengths": [20, 80]}
    assert slice_rows(packed, 0, 4, 4) is packed
    with pytest.raises(TrainingError, match="no tensor of the batch has the microbatch's 4 rows in dim 0"):
        slice_rows(packed, 0, 2, 4)
    assert count_rows(packed, 4) == 1
    with pytest.raises(TrainingError, match="has a dimension for the rows"):
        count_rows({"x": torch.tensor(1.0)})


def test_signatures_tell_shapes_and_types_apart_but_not_rows() -> None:
    known = {signature(BATCH): "all"}
    assert known[signature(slice_rows(BATCH, 1, 3, 4))] == "all"
    assert signature(BATCH | {"more": (torch.ones(4), [2, None])}) in known
    others = [
        BATCH | {"x": torch.zeros(4, 3, dtype=torch.int64)},
        BATCH | {"x": torch.zeros(4, 2)},
        BATCH | {"bias": torch.ones(2, 2)},
        BATCH | {"more": [torch.arange(4.0), [1, None]]},
        BATCH | {"another": None},
    ]
    assert len({signature(batch) for batch in others} | set(known)) == 6


def test_a_batch_may_begin_with_a_tensor_without_rows() -> None:
    batch = {"mask": torch.ones(3, 3), **BATCH}
    assert count_rows(batch, 4) == 4
    assert signature(batch, 4) == signature(slice_rows(batch, 1, 3, 4), 2)


def test_floating_point_tensors_are_cast_and_others_are_not() -> None:
    cast = cast_floating(BATCH, torch.float64)
    assert cast["bias"].dtype == cast["more"][0].dtype == torch.float64
    assert cast["x"].dtype == torch.int64 and cast["names"] == BATCH["names"]
    assert cast_floating(cast, torch.float64)["bias"] is cast["bias"]


def test_moving_preserves_the_structure() -> None:
    assert to_device(BATCH, torch.device("cpu")) is BATCH
    moved = to_device(BATCH, torch.device("meta"))
    assert moved["x"].device.type == "meta" and moved["names"] == BATCH["names"]


def test_differences_are_found_where_they_are() -> None:
    assert first_difference(BATCH, slice_rows(BATCH, 0, 4, 4)) is None
    nan = {"x": torch.tensor([float("nan")])}
    assert first_difference(nan, {"x": nan["x"].clone()}) is None
    assert first_difference({"mean": float("nan")}, {"mean": float("nan")}) is None
    assert first_difference({"mean": float("nan")}, {"mean": 1.0}) == "['mean']"
    assert first_difference(BATCH, BATCH | {"more": (torch.zeros(4), [1, None])}) == "['more'][0]"
    assert first_difference(BATCH, BATCH | {"names": ["a", "b", "c", "e"]}) == "['names'][3]"
    assert first_difference(BATCH, {}) == ""
