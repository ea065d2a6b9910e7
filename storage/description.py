"""The description of a model in a checkpoint: further names of its tensors, and small files.

Layers hold each tensor under one name. A reader of a checkpoint in torch needs a tied tensor under all of
its names, and ``from_pretrained`` needs the files next to the weights: the configuration and the tokenizer.
A trainer, which has the model, makes the description, and a node writes it into a checkpoint. Nothing in
between needs torch.
"""

from typing import Any

import msgspec

from storage.errors import CorruptDataError
from storage.layerstate import decode_versioned
from storage.manifest import checked_body, with_digest

DESCRIPTION_FORMAT = 1
MAX_FILES_BYTES = 60 * 1024 * 1024
"""Largest size of all files together: a description travels in one frame from a trainer to its node."""


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The description. The default describes a model whose tensors have one name each and that needs no files."""

    format: int = DESCRIPTION_FORMAT
    aliases: dict[str, tuple[str, ...]] = {}
    """The further names of each tied tensor, by its canonical name."""
    architecture: str = ""
    """Name of the model's class in ``transformers``; empty for other models."""
    weight_names: dict[str, tuple[str, ...]] = {}
    """Names of tensors in the weight files of ``from_pretrained``, by canonical name, if they differ; a
    tensor's names are empty if the files do not contain it.
    """
    files: dict[str, bytes] = {}
    """``config.json`` and the other files next to the weights, by name."""
    adapter_names: dict[str, str] = {}
    """Names in ``adapter_model.safetensors`` of the tensors of an adapter, by canonical name."""
    adapter_files: dict[str, bytes] = {}
    """Files next to the weights of the adapter."""
    left_out: tuple[str, ...] = ()
    """Names of files that were too large to be included."""

    def names_in_weights(self, name: str) -> tuple[str, ...]:
        """Return the names that the weight files have for the tensor with this canonical name."""
        return self.weight_names.get(name, (name,))


def encode_description(description: ModelDescription) -> bytes:
    """Return the description as msgpack, after a line with its digest."""
    return with_digest(msgspec.msgpack.encode(description))


def decode_description(data: Any, where: str) -> ModelDescription:
    """Return the encoded description.

    :param where: names the data in the error.
    :raises CorruptDataError: the data differs from what was encoded.
    """
    body = checked_body(bytes(data), where)
    description = decode_versioned(body, ModelDescription, where, DESCRIPTION_FORMAT)
    for name in (*description.files, *description.adapter_files):
        if not is_file_name(name):
            raise CorruptDataError(f"{where} has the invalid file name {name!r}")
    return description


def is_file_name(name: str) -> bool:
    """Return whether ``name`` is the name of a file in a directory, and not a path."""
    return 0 < len(name) <= 200 and name.isprintable() and "/" not in name and not name.startswith(".")
