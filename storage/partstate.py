"""What the bytes of a part of a layer are: elements of its tensors, parameter by parameter. No torch.

Under ZeRO-1 an owner has only a part of a layer's optimizer state (``runtime.zero.parts``). What it sends of
it is a header, msgpack of ``PartHeader``, and a payload, as for whole layers (``storage.layerstate``).
"""

from typing import Any, Literal

import msgspec

PART_FORMAT = 1


class PartEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``size_bytes`` bytes of the payload from ``offset``: elements of one flattened tensor, in order."""

    name: str
    """Canonical name of the parameter or buffer."""
    role: Literal["parameter", "buffer", "optimizer"]
    key: str
    """Of the optimizer's state (``exp_avg``); empty for the other roles."""
    dtype: str
    start: int
    """The first element."""
    count: int | None
    """``None``: one number for the whole parameter (``step`` of Adam)."""
    offset: int
    size_bytes: int


class PartHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int = PART_FORMAT
    layer: int
    entries: tuple[PartEntry, ...]
    scalars: dict[str, dict[str, int | float | bool | str | None]]
    """The optimizer's state of each parameter that is no tensor."""
    schedule: dict[str, Any] | None
    """Options of the parameter groups and the learning-rate schedule, for who has nothing yet."""
    size_bytes: int
    """Of the payload."""
