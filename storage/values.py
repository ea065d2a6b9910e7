"""Plain values of what is stored that messages carry, too."""

from msgspec import Struct


class LayerFile(Struct, frozen=True, kw_only=True):
    """A layer's file in a draft of a checkpoint, and in the manifest of the checkpoint that it becomes."""

    layer: int
    name: str
    size_bytes: int
    digest: str
    """XXH3, 128 bits, of the whole file."""
    header_bytes: int
    header_digest: str
    payload_bytes: int
