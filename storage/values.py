"""Values of checkpoints that messages carry as well."""

from msgspec import Struct


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
