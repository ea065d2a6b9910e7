"""Values of checkpoints that messages carry as well."""

import hashlib

from msgspec import Struct


def job_mark(job: str) -> str:
    """Return how the name of each attempt of this job at a checkpoint ends, so that other jobs in the same directory
    leave alone what it writes.
    """
    return f"__{hashlib.sha256(job.encode()).hexdigest()[:8]}"


class LayerFile(Struct, frozen=True, kw_only=True):
    """A layer's file in the draft of a checkpoint, and in the checkpoint's manifest."""

    layer: int
    name: str
    size_bytes: int
    digest: str
    """XXH3, 128 bits, of the whole file."""
    header_bytes: int
    header_digest: str
    payload_bytes: int
