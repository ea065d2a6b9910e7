"""One committed step, or one evaluation, as it is logged."""

import math
from datetime import datetime
from hashlib import blake2b
from typing import Any, Literal

import msgspec

Kind = Literal["step", "evaluation"]

_COMPARED: dict[Kind, tuple[str, ...]] = {
    "step": ("loss", "gradient_norm", "skipped", "weight", "loss_scale", "learning_rate", "metrics"),
    "evaluation": ("loss", "weight", "metrics"),
}
"""Values that are equal in two reports of the same step; durations and generations may differ."""
_OF_A_STEP = ("loss", "learning_rate", "gradient_norm", "samples_per_s", "tokens_per_s", "mfu", "step_s")
_ALWAYS = frozenset({"loss", "gradient_norm"})
"""Logged as NaN where the event has null, for no finite number; of the others null means: not known."""


class LoggedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A ``StepCommitted`` or an ``Evaluated``, without what concerns ftd alone."""

    kind: Kind
    step: int
    at: str
    """ISO-8601 in UTC."""
    generation: int | None
    details: dict[str, Any]
    """As of the event."""

    @property
    def fingerprint(self) -> int:
        """64 bits of what was computed; never 0."""
        said = {name: self.details.get(name) for name in _COMPARED[self.kind]}
        digest = blake2b(msgspec.json.encode(said, order="deterministic"), digest_size=8).digest()
        return int.from_bytes(digest, "big") | 1

    @property
    def wall_time(self) -> float:
        """Seconds since the epoch."""
        return datetime.fromisoformat(self.at).timestamp()

    def scalars(self) -> dict[str, float]:
        """Return the numbers to plot, by tag: ``train/loss``, ``evaluation/metrics/accuracy``."""
        prefix = "train" if self.kind == "step" else "evaluation"
        names = _OF_A_STEP if self.kind == "step" else ("loss",)
        found: dict[str, float] = {}
        for name in names:
            value = self.details.get(name)
            if name == "step_s" and not value:
                continue  # Of a step that was recalled nobody knows how long it took.
            if value is not None or name in _ALWAYS:
                found[f"{prefix}/{name}"] = math.nan if value is None else float(value)
        if self.details.get("loss_scale", 1.0) != 1.0:
            found[f"{prefix}/loss_scale"] = float(self.details["loss_scale"])
        for name, value in self.details.get("metrics", {}).items():
            found[f"{prefix}/metrics/{name}"] = math.nan if value is None else float(value)
        return found


def encode_row(row: LoggedRow) -> bytes:
    """Return the row as a line of the record: flat but for ``metrics``, so that pandas reads a table."""
    flat = {"kind": row.kind, "step": row.step, "at": row.at, "generation": row.generation}
    return msgspec.json.encode({**row.details, **flat}) + b"\n"


def decode_row(line: bytes) -> LoggedRow | int:
    """Return the row of a line, or the step from which on earlier lines are superseded.

    :raises ValueError: it is neither.
    """
    data = msgspec.json.decode(line)
    if not isinstance(data, dict):
        raise ValueError(f"a line of the record is no object: {line[:80]!r}")
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
    """Return the line that takes back all earlier ones of ``step`` and later."""
    return msgspec.json.encode({"kind": "superseded", "step": step}) + b"\n"
