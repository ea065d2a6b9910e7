"""Flat files of token ids, as many training scripts keep them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from runtime.sources.errors import DataError, find_files
from runtime.sources.packed import ArrayStream, PackedTokens
from runtime.sources.tokenizing import read_info

DTYPES = ("uint8", "uint16", "uint32", "int16", "int32", "int64")


class TokenFile(PackedTokens):
    """Binary files of token ids, cut into samples of ``length`` tokens.

    A file contains nothing but little-endian tokens of one type, or is a one-dimensional ``.npy``. Files
    that ``ftd data tokenize`` made come with a JSON file that names their type.
    """

    def __init__(
        self, path: str | Sequence[str], *, length: int, dtype: str | None = None, stride: int | None = None
    ) -> None:
        """Map the files into memory.

        :param path: a path, a pattern or a list of them; a pattern's files are taken in the order of
            names.
        :param dtype: the tokens' type; None for the JSON file's, else "uint16". A .npy has its own.
        :param stride: tokens from the beginning of a sample to that of the next; None is ``length``.
        :raises DataError: a file is missing, has another type or is shorter than a sample.
        """
        if dtype is not None and dtype not in DTYPES:
            raise DataError(f"the token type {dtype!r} is not one of {', '.join(DTYPES)}")
        streams = [open_tokens(file, dtype) for file in find_files(path, "token file")]
        super().__init__(streams, length=length, stride=stride)


def open_tokens(path: Path, dtype: str | None = None) -> ArrayStream:
    """Map a token file into memory.

    :raises DataError: it is empty or unreadable, or its size or type is wrong.
    """
    if path.suffix == ".npy":
        return _open_npy(path, dtype)
    info = read_info(path)
    if info is not None and dtype is not None and dtype != info.dtype:
        raise DataError(
            f"{path} has tokens of the type {info.dtype}, not {dtype}; write dtype = {info.dtype!r}"
        )
    kind = np.dtype(info.dtype if info is not None else dtype or "uint16").newbyteorder("<")
    try:
        size = path.stat().st_size
        if size and size % kind.itemsize == 0:
            largest = None if info is None else info.max_token_id
            return ArrayStream(name=str(path), tokens=np.memmap(path, dtype=kind, mode="r"), largest=largest)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not size:
        raise DataError(f"{path} is empty")
    raise DataError(
        f"{path} has {size} bytes, which are not whole tokens of the type {kind.name} ({kind.itemsize} "
        "bytes each); give the type that it was written with as dtype"
    )


def _open_npy(path: Path, dtype: str | None) -> ArrayStream:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} is not a numpy array: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise DataError(
            f"{path} must be one row of whole numbers, not an array of shape {tokens.shape} and type "
            f"{tokens.dtype}"
        )
    if dtype is not None and dtype != tokens.dtype.name:
        raise DataError(f"{path} has tokens of the type {tokens.dtype.name}, not {dtype}; leave dtype out")
    return ArrayStream(name=str(path), tokens=tokens)
