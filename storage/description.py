"""What a checkpoint keeps of a model besides its layers: other names of its tensors, and small files.

Layers hold each tensor under one name. Whoever reads a checkpoint with torch wants a tied tensor under all of
its names, and ``from_pretrained`` wants the files beside the weights: the configuration, the tokenizer. A
trainer, which has the model, makes the description; a node writes it into a checkpoint; nobody on the way
needs torch.
"""

from typing import Any

import msgspec

from storage.errors import CorruptDataError
from storage.layerstate import decode_versioned
from storage.manifest import checked_body, with_digest

DESCRIPTION_FORMAT = 1
MAX_FILES_BYTES = 60 * 1024 * 1024
"""All files together: a description travels in one frame between a trainer and its node."""


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The default describes a model whose tensors have one name each and that needs no files."""

    format: int = DESCRIPTION_FORMAT
    aliases: dict[str, tuple[str, ...]] = {}
    """The further names of each tied tensor, by its canonical name."""
    architecture: str = ""
    """Name of the model's class in ``transformers``; empty for other models."""
    weight_names: dict[str, tuple[str, ...]] = {}
    """Names in the weight files of ``from_pretrained`` of each tensor that has other ones there than its
    canonical name; none where the files do not have it."""
    files: dict[str, bytes] = {}
    """``config.json`` and the other files beside the weights, by name."""
    adapter_names: dict[str, str] = {}
    """Names in ``adapter_model.safetensors`` of the tensors of an adapter, by canonical name."""
    adapter_files: dict[str, bytes] = {}
    """Files beside the weights of the adapter."""
    left_out: tuple[str, ...] = ()
    """Names of files that were too large to be kept."""

    def names_in_weights(self, name: str) -> tuple[str, ...]:
        """Return the names that the weight files have for the tensor with this canonical name."""
        return self.weight_names.get(name, (name,))


def encode_description(description: ModelDescription) -> bytes:
    """Return a line with the digest of what follows, and msgpack."""
    return with_digest(msgspec.msgpack.encode(description))


def decode_description(data: Any, where: str) -> ModelDescription:
    """:param where: names it in the error. :raises CorruptDataError: it is not what was encoded."""
    body = checked_body(bytes(data), where)
    description = decode_versioned(body, ModelDescription, where, DESCRIPTION_FORMAT)
    for name in (*description.files, *description.adapter_files):
        if not is_file_name(name):
            raise CorruptDataError(f"{where} names a file {name!r}")
    return description


def is_file_name(name: str) -> bool:
    """Return whether ``name`` is that of a file in a directory, and no path."""
    return 0 < len(name) <= 200 and name.isprintable() and "/" not in name and not name.startswith(".")
