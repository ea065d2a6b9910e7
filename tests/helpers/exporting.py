"""Checkpoints of whole models, as a job would write them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from runtime.description import describe
from storage.checkpoint import Checkpoint, CheckpointStore
from storage.description import encode_description
from storage.layerstate import LayerHeader, TensorEntry
from tests.helpers.kept_checkpoints import about


def checkpoint_of(
    model: nn.Module, url: Path | str, *, step: int = 7, layers: int = 3, directories: Sequence[Path] = ()
) -> Checkpoint:
    """Write a checkpoint of ``model``, whose tensors are divided among layers in order.

    A tied tensor is in the layer of its first name and in the last one, under its first name in both.
    """
    first: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    tied = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if first.setdefault(id(value), name) == name:
            tensors[name] = value.detach()
        else:
            tied.add(first[id(value)])
    parameters = dict(model.named_parameters())
    names = list(tensors)
    store = CheckpointStore.at(str(url), create=True)
    draft = store.begin(step)
    store.write_description(draft, encode_description(describe(model, directories)))
    files = []
    for layer in range(layers):
        mine = names[len(names) * layer // layers : len(names) * (layer + 1) // layers]
        if layer == layers - 1:
            mine += sorted(tied - set(mine))
        header, payload = _packed(layer, {name: tensors[name] for name in mine}, parameters)
        files.append(store.write_layer(draft, layer, header, [payload]))
    store.commit(draft, files, **about())
    return store.open(step)


def _packed(
    layer: int, tensors: dict[str, Tensor], parameters: dict[str, Any]
) -> tuple[bytes, np.ndarray[Any, Any]]:
    entries, pieces, end = [], [], 0
    for name, tensor in tensors.items():
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        entries.append(
            TensorEntry(
                name=name,
                role="parameter" if name in parameters else "buffer",
                key="",
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                on_host=True,
                offset=end,
                size_bytes=data.size,
            )
        )
        pieces += [data, np.zeros(-data.size % 16, dtype=np.uint8)]
        end += data.size + -data.size % 16
    header = LayerHeader(
        format=1, layer=layer, entries=tuple(entries), scalars={}, schedule={}, size_bytes=end
    )
    return msgspec.msgpack.encode(header), np.concatenate(pieces)
