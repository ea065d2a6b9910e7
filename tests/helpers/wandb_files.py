"""Reads the files of an offline W&B run."""

import json
from pathlib import Path

from wandb.proto import wandb_internal_pb2 as protocol

from ftd.observe.tracking.wandb_sink import payloads


def offline_history(directory: Path, run: str) -> list[tuple[int, dict[str, float]]]:
    """Return the steps and values of all directories of a run, in the order of writing."""
    found = []
    for path in sorted(directory.glob(f"wandb/offline-run-*-{run}/*.wandb")):
        for payload in payloads(path.read_bytes()):
            record = protocol.Record.FromString(payload)
            if record.WhichOneof("record_type") == "history":
                values = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
                found.append((record.history.step.num, values))
    return found
