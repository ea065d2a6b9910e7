"""Tests of loading: bytes arrive complete and verified, and registered tensors do not change before that."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from runtime.script.saved import EMPTY
from runtime.script.tensor_filler import ImageSpan, TensorFiller, verified_spans
from runtime.script.tensor_image import UNIT_BYTES, Bytes, TensorImage, memory_bytes
from storage.manifest import SnapshotPart, digest_of

SHAPES = [(3, 5), (), (1500, 1000), (0, 4), (7,), (3_000_001,), (2, 3, 4), (90, 1), (600_000,)]


def image_of(tensors: list[Tensor]) -> tuple[TensorImage, Bytes]:
    image = TensorImage(known={})
    for tensor in tensors:
        image.add(tensor, "it")
    data = np.zeros(image.own_bytes, dtype=np.uint8)
    for entry, tensor in zip(image.entries, tensors, strict=True):
        flat = memory_bytes(tensor, entry.order)
        assert flat is not None
        data[entry.offset : entry.offset + entry.size_bytes] = flat.numpy()
    return image, data


def checked(data: Bytes) -> list[ImageSpan]:
    return [
        replace(
            span,
            part=SnapshotPart(
                name=f"p{number}",
                offset=span.start,
                size_bytes=len(span.data),
                digest=digest_of(span.data),
            ),
        )
        for number, span in enumerate(verified_spans(data, shared=False))
    ]


def test_tensors_that_are_there_and_new_ones_are_filled_in_two_stages() -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(shape, generator=generator) for shape in SHAPES]
    tensors += [t.clone().permute(tuple(reversed(range(t.dim())))) for t in tensors[:3]]
    image, data = image_of(tensors)
    assert image.own_bytes > 2 * UNIT_BYTES
    # In turn: registered, new, registered with another order of dimensions, new next to another tensor.
    olds = [None if n % 2 else torch.zeros(t.shape) for n, t in enumerate(tensors)]
    filler = TensorFiller(entries=image.entries, images={False: data, True: EMPTY})
    filled = [
        filler.target_for(n, old, torch.zeros(t.shape, dtype=torch.int64) if n % 4 == 3 else None)
        for n, (old, t) in enumerate(zip(olds, tensors, strict=True))
    ]
    versions = [t._version for t in filled]
    assert filler.verify(checked(data)) == ()
    assert not any(old.any() for old in olds if old is not None)
    filler.finish()
    for found, tensor, old, version in zip(filled, tensors, olds, versions, strict=True):
        assert torch.equal(found, tensor)
        assert old is None or (found is old and (found._version > version or not found.numel()))


@pytest.mark.parametrize("at", [0, UNIT_BYTES - 1, UNIT_BYTES, -1])
def test_a_corrupt_byte_is_found_before_any_registered_tensor_changes(at: int) -> None:
    tensors = [torch.ones(3_000_000), torch.ones(2_000_000)]
    image, data = image_of(tensors)
    spans = checked(data)
    data[at] ^= 1
    there = torch.zeros(3_000_000)
    filler = TensorFiller(entries=image.entries, images={False: data, True: EMPTY})
    filler.target_for(0, there, None)
    filler.target_for(1, None, None)
    assert filler.verify(spans) == (f"p{(at % len(data)) // UNIT_BYTES}",)
    assert not there.any()


def test_two_tensors_that_were_one_memory_before_are_two_again() -> None:
    image, data = image_of([torch.full((500_000,), 1.0), torch.full((500_000,), 2.0)])
    one = torch.zeros(500_000)
    filler = TensorFiller(entries=image.entries, images={False: data, True: EMPTY})
    assert filler.target_for(0, one, None) is one
    other = filler.target_for(1, one.view(500_000), None)
    assert filler.target_for(0, one, None) is one  # Tied weights have one number.
    assert filler.verify(verified_spans(data, shared=False)) == ()
    filler.finish()
    assert (one == 1).all() and (other == 2).all()


def test_of_tensors_that_overlap_in_part_the_later_counts() -> None:
    image, data = image_of([torch.full((500_000,), 1.0), torch.full((400_000,), 2.0)])
    one = torch.zeros(500_000)
    filler = TensorFiller(entries=image.entries, images={False: data, True: EMPTY})
    filler.target_for(0, one, None)
    filler.target_for(1, one[:400_000], None)
    assert filler.verify(verified_spans(data, shared=False)) == ()
    filler.finish()
    assert (one[:400_000] == 2).all() and (one[400_000:] == 1).all()


def test_shared_tensors_are_loaded_from_the_shared_image() -> None:
    values = [torch.full((1000,), 3.0), torch.full((1000,), 4.0)]
    image = TensorImage(known={}, shared={id(values[1])})
    for tensor in values:
        image.add(tensor, "it")
    images = {s: t.view(torch.uint8).numpy() for s, t in zip((False, True), values, strict=True)}
    filler = TensorFiller(entries=image.entries, images=images)
    new, there = filler.target_for(0, None, None), filler.target_for(1, torch.zeros(1000), None)
    assert filler.verify([span for s in images for span in verified_spans(images[s], shared=s)]) == ()
    filler.finish()
    assert (new == 3).all() and (there == 4).all()
