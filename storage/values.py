"""Values of checkpoints that messages carry as well."""

import hashlib

from msgspec import Struct


def short_digest(text: str) -> str:
    """Return eight hexadecimal digits that differ for different texts, except by chance."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def job_mark(job: str) -> str:
    """Return how the name of each attempt of this job at a checkpoint ends, so that other jobs in the same directory
    leave alone what it writes.
    """
    return f"__{short_digest(job)}"


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
