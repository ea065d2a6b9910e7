"""Rows of the logs: one for each committed step and each evaluation."""

import math
from datetime import datetime
from hashlib import blake2b
from typing import Any, Literal

import msgspec

from storage.decoding import decodable

Kind = Literal["step", "evaluation"]

_COMPARED: dict[Kind, tuple[str, ...]] = {
    "step": ("loss", "gradient_norm", "skipped", "weight", "loss_scale", "learning_rate", "metrics"),
    "evaluation": ("loss", "weight", "metrics"),
}
"""Values that are equal in two reports of the same step; durations and generations may differ."""
_STEP_VALUES = ("loss", "learning_rate", "gradient_norm", "samples_per_s", "tokens_per_s", "mfu", "step_s")
_ALWAYS_LOGGED = frozenset({"loss", "gradient_norm"})
"""Values that are logged as NaN if the event has null, which means "not finite" for them and "unknown" for
others.
"""


@decodable  # Each sink reads in a thread of its own.
class LoggedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A ``StepCommitted`` or ``Evaluated`` event, reduced to what is logged."""

    kind: Kind
    step: int
    at: str
    """ISO-8601 in UTC."""
    generation: int | None
    details: dict[str, Any]
    """The event's details."""

    @property
    def fingerprint(self) -> int:
        """64-bit hash of the computed values; never 0."""
        values = {name: self.details.get(name) for name in _COMPARED[self.kind]}
        digest = blake2b(msgspec.json.encode(values, order="deterministic"), digest_size=8).digest()
        return int.from_bytes(digest, "big") | 1

    @property
    def wall_time(self) -> float:
        """Seconds since the epoch."""
        return datetime.fromisoformat(self.at).timestamp()

    def scalars(self) -> dict[str, float]:
        """Return the numbers to plot by tag, such as ``train/loss`` or ``evaluation/metrics/accuracy``."""
        prefix = "train" if self.kind == "step" else "evaluation"
        names = _STEP_VALUES if self.kind == "step" else ("loss",)
        found: dict[str, float] = {}
        for name in names:
            value = self.details.get(name)
            if name == "step_s" and not value:
                continue  # The duration is unknown for a step that was recalled from a node.
            if value is not None or name in _ALWAYS_LOGGED:
                found[f"{prefix}/{name}"] = math.nan if value is None else float(value)
        if self.details.get("loss_scale", 1.0) != 1.0:
            found[f"{prefix}/loss_scale"] = float(self.details["loss_scale"])
        for name, value in self.details.get("metrics", {}).items():
            found[f"{prefix}/metrics/{name}"] = math.nan if value is None else float(value)
        return found


def encode_row(row: LoggedRow) -> bytes:
    """Return the row as a line of the record. Only ``metrics`` is nested, so that pandas reads the file as a
    table.
    """
    flat = {"kind": row.kind, "step": row.step, "at": row.at, "generation": row.generation}
    return msgspec.json.encode({**row.details, **flat}) + b"\n"


def decode_row(line: bytes) -> LoggedRow | int:
    """Return the row of a line, or the step from which on earlier lines are superseded.

    :raises ValueError: the line is neither.
    """
    data = msgspec.json.decode(line)
    if not isinstance(data, dict):
        raise ValueError(f"a line of the record is not an object: {line[:80]!r}")
    kind, step = data.pop("kind", None), data.pop("step", None)
    if kind == "superseded" and isinstance(step, int):
        return step
    return msgspec.convert(
        {
            "kind": kind,
            "step": step,
            "at": data.pop("at", None),
            "generation": data.pop("generation", None),
            "details": data,
        },
        LoggedRow,
    )


def encode_superseded(step: int) -> bytes:
    """Return the line that takes back all earlier rows of ``step`` and later steps."""
    return msgspec.json.encode({"kind": "superseded", "step": step}) + b"\n"
