"""Check of token ids and labels against the sizes of a Hugging Face model's embedding and output layers.

Without this check, an id beyond the vocabulary ends a trainer with an ``IndexError`` that names neither the
sample nor the cause, or with a device-side assertion that leaves the GPU unusable.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from runtime.data.batches import Batch
from runtime.sources.collators import IGNORED_LABEL

_INPUTS = ("input_ids", "decoder_input_ids")


class Vocabulary:
    """The number of ids in a model's input embedding and in its output layer."""

    def __init__(self, root: nn.Module) -> None:
        self._kind = type(root).__name__
        self._inputs = _rows(root, "get_input_embeddings")
        self._outputs = _rows(root, "get_output_embeddings")

    def find_problem(self, batch: Batch) -> tuple[int, str] | None:
        """Return the first row of a batch that has an id out of range, and a description of the problem."""
        if not isinstance(batch, Mapping):
            return None
        for key in _INPUTS:
            if self._inputs is not None and (found := _outside(batch.get(key), self._inputs, ())):
                row, number = found
                return row, (
                    f"has the token id {number} in {key!r}, but the vocabulary of {self._kind} has {self._inputs} "
                    f"ids, 0 to {self._inputs - 1}; use the tokenizer that belongs to the model, or enlarge the "
                    "model's vocabulary (resize_token_embeddings)"
                )
        if self._outputs is not None and (
            found := _outside(batch.get("labels"), self._outputs, (IGNORED_LABEL,))
        ):
            row, number = found
            return row, (
                f"has the label {number}, but {self._kind} predicts one of {self._outputs} ids, 0 to "
                f"{self._outputs - 1}; give positions that do not count the label {IGNORED_LABEL}"
            )
        return None


def _rows(root: nn.Module, getter: str) -> int | None:
    """Return how many ids an embedding or an output layer has a row for."""
    get = getattr(root, getter, None)
    if not callable(get):
        return None
    try:
        table: Any = get()
    except (RuntimeError, AttributeError):  # Models without such a layer raise.
        return None
    if isinstance(table, nn.Embedding):
        return table.num_embeddings
    return table.out_features if isinstance(table, nn.Linear) else None


def _outside(ids: object, size: int, allowed: tuple[int, ...]) -> tuple[int, int] | None:
    """Return the row and the value of the first id that is outside of [0, size) and not in ``allowed``."""
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() < 2 or not ids.numel():
        return None
    low, high = torch.aminmax(ids)
    if low >= 0 and high < size:
        return None
    wrong = (ids < 0) | (ids >= size)
    for number in allowed:
        wrong &= ids != number
    places = wrong.nonzero()
    return None if not len(places) else (int(places[0][0]), int(ids[tuple(places[0])]))
