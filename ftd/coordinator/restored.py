"""The machine that a coordinator begins to lead with: of its own journal, or of the last leader's copy."""

import time

import msgspec

from ftd.coordinator.journal import Journal
from ftd.errors import JournalError
from ftd.wire.coordinators import JournalCopy
from statemachine import durable
from statemachine.cluster import ClusterMachine
from statemachine.effects import Effect
from statemachine.timing import Timing

SAME_CLOCK_S = 2.0
"""Monotonic clocks that differ by less are one: of two coordinators on a host, whose wall clock was set."""


def restored(
    timing: Timing, journal: Journal, copy: JournalCopy | None, now: float
) -> tuple[ClusterMachine, list[Effect]]:
    """The newest of both, and what it begins with.

    :param now: on this host's monotonic clock.
    :raises JournalError: it is damaged, or of another version.
    """
    saved, where, moved_s = journal.load(), str(journal.path), 0.0
    if copy is not None and copy.position > journal.position:
        saved, where = copy.unpacked(), f"the journal at the broker, of ftd {copy.version}"
        ahead_s = (now - time.time()) - (copy.monotonic_s - copy.wall_s)
        moved_s = ahead_s if abs(ahead_s) > SAME_CLOCK_S else 0.0
    if saved is None:
        return ClusterMachine(timing), []
    try:
        state = durable.moved(msgspec.msgpack.decode(saved), moved_s)
        return ClusterMachine.restore(timing, state, now, "restored")
    except (ValueError, RecursionError) as error:  # No msgpack, no state of ours.
        raise JournalError(
            f"{where}: {error} (to begin anew without the job: ftd coordinator --anew)"
        ) from None


def keep(journal: Journal, copy: JournalCopy) -> None:
    """As a standby: so that what the leader knows is not lost with the broker's memory.

    :raises JournalError: it cannot be written. :raises WireError: it cannot be unpacked.
    """
    if copy.schema == durable.SCHEMA and copy.position > journal.position:
        journal.save_copy(copy.unpacked(), copy.position)
