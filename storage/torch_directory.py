"""Export of a checkpoint as a directory for a plain torch loop, written without torch and without pickle.

=========================  ================================================================================
``model.safetensors``      parameters and buffers, a tied one under each of its names
``optimizer.safetensors``  ``state.<name>.<key>``: tensors of the optimizer's state
``training.json``          ``step``, ``groups`` (options of each parameter group), ``scheduler`` (its state
                           or null), ``scalars`` (by parameter, the optimizer state that is not a tensor)
=========================  ================================================================================

Dictionaries inside ``groups`` and ``scheduler`` are written as ``{"pairs": [[key, value], …]}``, since their keys
may be numbers. docs/how-to/checkpoints.md has the function that loads it.
"""

import json
from dataclasses import replace
from pathlib import Path

from storage.checkpoint import Checkpoint
from storage.directfile import write_synced
from storage.huggingface import atomic_directory
from storage.layerstate import Scalars
from storage.safetensors_file import ExportSummary, FileTensor, TensorReader, model_tensors, write_safetensors

FORMAT = 1


def export_torch(checkpoint: Checkpoint, directory: Path) -> ExportSummary:
    """Write ``directory``, which must be missing or empty.

    :raises StorageError: the checkpoint is corrupt or cannot be read.
    :raises OSError: the directory cannot be written; nothing is left.
    """
    aliases = checkpoint.description().aliases
    model = [
        replace(tensor, name=name)
        for tensor in model_tensors(checkpoint)
        for name in (tensor.name, *aliases.get(tensor.name, ()))
    ]
    optimizer: dict[str, FileTensor] = {}
    scalars: Scalars = {}
    headers = checkpoint.headers()
    for layer, header in enumerate(headers):
        scalars |= header.scalars
        for entry in header.entries:
            name = f"state.{entry.name}.{entry.key}"
            if entry.role == "optimizer" and name not in optimizer:
                optimizer[name] = FileTensor(name=name, layer=layer, entry=entry, dtype=entry.dtype)
    training = {
        "format": FORMAT,
        "step": checkpoint.manifest.step,
        "groups": headers[0].schedule.get("groups", []),
        "scheduler": headers[0].schedule.get("scheduler"),
        "scalars": scalars,
    }
    with atomic_directory(directory) as draft:
        reader = TensorReader(checkpoint)
        size_bytes = write_safetensors(draft / "model.safetensors", model, reader, {"format": "pt"})
        states = list(optimizer.values())
        size_bytes += write_safetensors(draft / "optimizer.safetensors", states, reader, {"format": "pt"})
        content = json.dumps(training, indent=2).encode() + b"\n"
        write_synced(draft / "training.json", [memoryview(content)])
    return ExportSummary(tensors=len(model) + len(optimizer), size_bytes=size_bytes)
