"""Checkpoints of a small model without torch: layers of known bytes, written through the store."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from storage.checkpoint import CheckpointManifest, CheckpointStore
from storage.description import ModelDescription, encode_description
from storage.layerstate import LayerHeader, TensorEntry
from storage.values import LayerFile

LAYERS = 3
DESCRIPTION = ModelDescription(aliases={"0.weight": ("2.weight",)}, files={"config.json": b"{}"})


def layer_state(layer: int, seed: int = 0, numel: int = 1000) -> tuple[bytes, np.ndarray[Any, Any]]:
    """Return a weight in bfloat16, its moment in float32 and a buffer of int64, all of random bytes."""
    entries, end = [], 0
    for name, role, key, dtype, shape in (
        ("weight", "parameter", "", "bfloat16", (numel // 10, 10)),
        ("weight", "optimizer", "exp_avg", "float32", (numel // 10, 10)),
        ("seen", "buffer", "", "int64", ()),
    ):
        size = int(np.prod(shape)) * {"bfloat16": 2, "float32": 4, "int64": 8}[dtype]
        entries.append(
            TensorEntry(
                name=f"{layer}.{name}",
                role=role,  # type: ignore[arg-type]
                key=key,
                dtype=dtype,
                shape=shape,
                on_host=False,
                offset=end,
                size_bytes=size,
            )
        )
        end += size + -size % 16
    header = LayerHeader(
        format=1,
        layer=layer,
        entries=tuple(entries),
        scalars={},
        schedule={"groups": [{"lr": 0.1}], "scheduler": None},
        size_bytes=end,
    )
    payload = np.random.default_rng((layer, seed)).integers(0, 256, end, dtype=np.uint8)
    return msgspec.msgpack.encode(header), payload


def in_chunks(payload: np.ndarray[Any, Any], size: int = 777) -> Iterator[memoryview]:
    for start in range(0, len(payload), size):
        yield memoryview(payload)[start : start + size]


def write(
    store: CheckpointStore,
    step: int,
    *,
    attempt: str = "1",
    seed: int | None = None,
    job: str = "gpt",
    numel: int = 1000,
) -> CheckpointManifest:
    """Write a whole checkpoint, whose bytes depend on the seed; by default the step is the seed."""
    draft = store.begin(step, attempt)
    store.write_description(draft, encode_description(DESCRIPTION))
    files: list[LayerFile] = []
    for layer in reversed(range(LAYERS)):
        header, payload = layer_state(layer, step if seed is None else seed, numel)
        files.append(store.write_layer(draft, layer, header, in_chunks(payload)))
    return store.commit(draft, files, **about(job))


def about(job: str = "gpt") -> dict[str, Any]:
    return {
        "job": job,
        "job_id": f"{job}-1",
        "vote": {"loss": 2.5, "gradient_norm": 1.0},
        "written_at": 1e9,
        "ftd_version": "0.1.0",
    }


def holds(store: CheckpointStore, step: int, seed: int | None = None) -> bool:
    """Return whether every layer of the step has exactly the bytes that ``write`` wrote."""
    checkpoint = store.open(step)
    for layer in range(LAYERS):
        header, payload = layer_state(layer, step if seed is None else seed)
        found, _, stored = checkpoint.read_layer(layer)
        if found != header or not np.array_equal(stored, payload):
            return False
    return True
