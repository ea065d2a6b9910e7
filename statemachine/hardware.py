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


class HealthLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[health]``: nodes whose devices compute wrongly or slowly are set aside."""

    enabled: bool = True
    """Whether nodes test their devices before they take part, and while they are idle. A node reads it from its
    own ``ftd.toml``, the coordinator from its own.
    """
    every_s: float = 600.0
    """Seconds between two tests of a node that is in no plan; 0: only before it takes part."""
    min_speed: float = 0.5
    """Share of the median speed of the other nodes' devices of the same kind below which a node is slow. It is
    set aside when it is slow in two tests in a row.
    """
    min_link_speed: float = 0.2
    """The same share for transfers from other hosts. Networks are shared, so the speed of one short transfer
    varies more.
    """
    min_others: int = 3
    """Number of other nodes that must be known before a node counts as slow."""
    limit_s: float = 30.0
    """Seconds after which the test of a device is ended, and counts as failed; read by the nodes."""


class HardwareLimits(Struct, frozen=True, kw_only=True):
    quarantine: QuarantineLimits = QuarantineLimits()
    health: HealthLimits = HealthLimits()


DEFAULT_LIMITS = HardwareLimits()
