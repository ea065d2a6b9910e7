"""Conversion between floating-point types without torch, rounded as torch does: to nearest, ties to even."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

FLOATING = ("float64", "float32", "float16", "bfloat16")

Array = NDArray[Any]


def converted(data: NDArray[np.uint8], source: str, target: str) -> NDArray[np.uint8]:
    """Return the numbers of type ``source`` in ``data`` as numbers of type ``target``, both as bytes.

    :param source: one of ``FLOATING``, as ``target`` is. Where both are the same, ``data`` itself returns.
    """
    if source == target:
        return data
    # The bytes of an entry need not lie at a multiple of its element's size once it was cut out of a payload.
    whole = np.ascontiguousarray(data)
    values: Array = _widened(whole.view(np.uint16)) if source == "bfloat16" else whole.view(source)
    if target == "bfloat16":
        return _bfloat16(values).view(np.uint8)
    with np.errstate(over="ignore", invalid="ignore"):  # As torch: what is too large becomes infinite.
        return values.astype(target).view(np.uint8)


def _widened(halves: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (halves.astype(np.uint32) << 16).view(np.float32)


def _bfloat16(values: Array) -> NDArray[np.uint16]:
    with np.errstate(over="ignore", invalid="ignore"):
        bits = values.astype(np.float32).view(np.uint32)
    rounded = bits + (((bits >> 16) & 1) + 0x7FFF)  # An overflow of NaNs is put right below.
    halves = (rounded >> 16).astype(np.uint16)
    halves[(bits & 0x7FFFFFFF) > 0x7F800000] = 0x7FC0
    return halves
