"""Digests by which replicas of a layer are compared while training goes on.

Tensors in host memory are hashed (XXH3), which reads them once at the speed of memory. Those in a device's
memory are summed where they are, since only the sum has to reach the host. Both depend on nothing but the
bytes: floating-point sums would depend on their order.
"""

import math
import platform
from collections.abc import Callable, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from runtime.device import flat_bytes

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer type of an element's bits, by the element's size in bytes."""
_CHUNK = 1 << 22
"""Words that are summed at once, which bounds the temporary memory (64 MiB)."""
_FACTOR = 0x5851_F42D_4C95_7F2D
"""Odd factor between one tensor's sum and the next one's."""
_BITS = (1 << 64) - 1


def device_kind(device: torch.device) -> str:
    """Return the kind of device: devices of one kind round equally, so their replicas are equal bit for bit."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def flip_bit(tensor: Tensor) -> None:
    """Flip the highest bit of the mantissa of the tensor's middle element, as a fault is injected.

    The value stays finite and changes by up to a half, so the losses show it if nobody finds it.
    """
    bit = round(math.log2(1 / torch.finfo(tensor.dtype).eps)) - 1
    words = tensor.view(_WORDS[tensor.element_size()])
    words[tuple(size // 2 for size in tensor.shape)] ^= 1 << bit


class StateDigest:
    """A digest of 64 bits over tensors in a given order, some of which may be on a device.

    A single flipped bit always changes the part of the digest that is summed on a device, and changes the
    hash with a probability of 1 - 2⁻⁶⁴.
    """

    def __init__(self) -> None:
        self._host = xxhash.xxh3_64()
        self._read = 0
        self.sum: Tensor | None = None
        """Sum of what was on a device, a number there; ``None`` if nothing was."""

    def update(self, tensor: Tensor) -> None:
        """Add a tensor's bytes. The host does not wait for the device."""
        if tensor.device.type == "cpu":
            self._host.update(flat_bytes(tensor).numpy().data)
            return
        self.add_sum(tensor)

    def add_sum(self, tensor: Tensor) -> None:
        """Add a weighted sum of the tensor's elements as integers, modulo 2⁶⁴, computed where the tensor is.

        Word i of at most 32 bits has the weight 2i + 1. A flipped bit changes a word by ±2ᵏ with k < 32, and
        the odd weight keeps the change from vanishing.
        """
        flat = tensor.contiguous().reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        words = flat.view(torch.int32 if flat.element_size() == 8 else _WORDS[flat.element_size()])
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for start in range(0, words.numel(), _CHUNK):
            chunk = words[start : start + _CHUNK]
            end = start + chunk.numel()
            weights = torch.arange(2 * start + 1, 2 * end + 1, 2, dtype=torch.int64, device=tensor.device)
            total += (weights * chunk).sum()
        self.sum = total if self.sum is None else self.sum * _FACTOR + total

    def take_sum(self, number: int) -> None:
        """Take the value of ``sum``, once it is in host memory."""
        self._read = number

    def __int__(self) -> int:
        """Return the digest, below 2⁶⁴. Call ``read_sums`` first if tensors were on a device."""
        return (self._host.intdigest() + self._read) & _BITS


def read_sums(digests: Sequence[StateDigest], read: Callable[[Tensor], Any]) -> None:
    """Read the sums of these digests from the device, all at once.

    :param read: returns a tensor's numbers as a list once the device has computed them.
    """
    summed = [digest for digest in digests if digest.sum is not None]
    if summed:
        numbers = read(torch.stack([digest.sum for digest in summed if digest.sum is not None]))
        for digest, number in zip(summed, numbers, strict=True):
            digest.take_sum(number)
