"""Tests of the digests by which copies of a layer are compared."""

from collections.abc import Callable

import pytest
import torch

from runtime.layers.digests import StateDigest, flip_bit, read_sums

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


def host_digest(*tensors: torch.Tensor) -> int:
    digest = StateDigest()
    for tensor in tensors:
        digest.update(tensor)
    return int(digest)


def device_digest(*tensors: torch.Tensor) -> int:
    """Return the digest as a device computes it: the sums are the same on the CPU."""
    digest = StateDigest()
    for tensor in tensors:
        digest.add_sum(tensor)
    read_sums([digest], lambda sums: sums.tolist())
    return int(digest)


@pytest.mark.parametrize("digest", [host_digest, device_digest])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_bit_counts(digest: Callable[..., int], dtype: torch.dtype) -> None:
    tensor = torch.arange(35).reshape(5, 7).to(dtype)
    before = digest(tensor)
    assert digest(tensor.clone()) == before
    octets = tensor.view(torch.uint8)
    seen = {before}
    for number in range(octets.numel()):
        row, column = divmod(number, octets.shape[1])
        for bit in range(8):
            octets[row, column] ^= 1 << bit
            seen.add(digest(tensor))
            octets[row, column] ^= 1 << bit
    assert len(seen) == 1 + 8 * octets.numel()


@pytest.mark.parametrize("digest", [host_digest, device_digest])
def test_order_and_places_count_and_layout_in_memory_does_not(digest: Callable[..., int]) -> None:
    one, other = torch.randn(6, 4), torch.randn(6, 4)
    assert digest(one, other) != digest(other, one)
    assert digest(one) != digest(one.flip(0))
    padded = torch.zeros(25)[1:].view(6, 4).copy_(one)
    assert digest(one.t().contiguous().t()) == digest(padded) == digest(one)


def test_an_injected_fault_changes_one_finite_value_in_place() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        tensor = torch.ones(3, 5, dtype=dtype).t()
        flip_bit(tensor)
        assert sorted(set(tensor.flatten().tolist())) == [1.0, 1.5]
