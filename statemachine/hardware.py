"""Limits from which on the coordinator counts hardware as bad, with their defaults. They are tables of
``ftd.toml``.
"""

from msgspec import Struct


class QuarantineLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[quarantine]``: nodes that fail repeatedly for the same reason are set aside."""

    failures: int = 3
    """Failures for the same reason within ``window_s`` after which a node is set aside; 0: never. Of a thousand
    sound nodes that each fail once a month by chance, one is set aside in five years.
    """
    window_s: float = 14_400.0
    """Seconds for which a failure counts."""
    max_share: float = 0.25
    """Largest share of the present nodes that may be set aside at a time; one node always may."""


class HardwareLimits(Struct, frozen=True, kw_only=True):
    quarantine: QuarantineLimits = QuarantineLimits()


DEFAULT_LIMITS = HardwareLimits()
