"""Reader of persistent checkpoints for ``torch.distributed.checkpoint``: by name, into any sharding.

    dcp.load({"model": model.state_dict()}, storage_reader=FtdCheckpointReader("/checkpoints/gpt"))

Names are those that ``torch.distributed.checkpoint.state_dict`` makes: ``model.<name>`` for parameters and
persistent buffers, ``optim.state.<name>.<key>`` for the optimizer's tensors. A name is the model's own; for
a job that was given as layers, it is that of ``nn.Sequential(*layers)``. A tied parameter is available
under all of its names. Values that are not tensors (learning rates, the schedule) are not available,
because torch would pickle them.
"""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from runtime.layers.state import DTYPES
from storage.checkpoint import Checkpoint, CheckpointStore
from storage.errors import LocationError
from storage.layerstate import TensorEntry
from storage.locations import open_location


class FtdCheckpointReader(StorageReader):
    """A ``StorageReader`` of ftd's checkpoints. It reads each needed layer once and verifies it by its digest.

    :param url: a path, ``file://…``, or any URL of fsspec.
    :param step: ``None`` for the newest complete checkpoint. Name the step if several ranks load while a
        job writes, since each rank looks for itself.
    :raises StorageError: there is no checkpoint, or it is corrupt, of another format, or unreadable.
    """

    def __init__(self, url: str | os.PathLike[str], step: int | None = None) -> None:
        super().__init__()
        self._open(url, step)

    @property
    def checkpoint_id(self) -> str:
        """URL of the checkpoint's own directory."""
        return f"{self._checkpoint.location.url}/{self._checkpoint.directory}"

    @property
    def step(self) -> int:
        """Step of the checkpoint that is read."""
        return self._checkpoint.manifest.step

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read the newest checkpoint of another URL from now on.

        :param checkpoint_id: the URL; nothing changes if it is ``None`` or the present ``checkpoint_id``.
        """
        if checkpoint_id is not None and os.fspath(checkpoint_id) != self.checkpoint_id:
            self._open(checkpoint_id, None)

    def read_metadata(self) -> Metadata:
        """Return names, types and shapes; each tensor is one chunk."""
        tensors: dict[str, Any] = {}
        for name, (_, entry) in self._where.items():
            size = torch.Size(entry.shape)
            tensors[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[entry.dtype]),
                size=size,
                chunks=[ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)],
            )
        return Metadata(state_dict_metadata=tensors)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Do nothing: the manifest and the headers were read in the constructor."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors of the plan, with one layer in memory at a time.

        :raises StorageError: a layer is corrupt or cannot be read.
        """
        wanted: dict[int, list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault(self._where[item.storage_index.fqn][0], []).append(item)
        for layer in sorted(wanted):
            _, _, payload = self._checkpoint.read_layer(layer)
            for item in wanted[layer]:
                stored = tensor_of(payload, self._where[item.storage_index.fqn][1])
                for dimension, (start, length) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    stored = stored.narrow(dimension, start, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(stored)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            open_location(os.fspath(checkpoint_id))
        except LocationError:
            return False
        return True

    def _open(self, url: str | os.PathLike[str], step: int | None) -> None:
        self._checkpoint = CheckpointStore.at(os.fspath(url)).open(step)
        self._where = dict(_named(self._checkpoint))


def _named(checkpoint: Checkpoint) -> Iterator[tuple[str, tuple[int, TensorEntry]]]:
    """Yield each name of each tensor, with its layer and entry. All layers of a shared parameter hold the same
    bytes, so the last one replaces the others.
    """
    aliases = checkpoint.description().aliases
    for layer, header in enumerate(checkpoint.headers()):
        for entry in header.entries:
            for name in (entry.name, *aliases.get(entry.name, ())):
                optimizer = entry.role == "optimizer"
                full = f"optim.state.{name}.{entry.key}" if optimizer else f"model.{name}"
                yield full, (layer, entry)


def tensor_of(payload: np.ndarray[Any, np.dtype[np.uint8]], entry: TensorEntry) -> Tensor:
    """Return a view of the payload with the entry's type and shape."""
    part = torch.from_numpy(payload[entry.offset : entry.offset + entry.size_bytes])
    return part.view(DTYPES[entry.dtype]).view(entry.shape)
