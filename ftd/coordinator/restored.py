"""What a coordinator begins to lead with, its own journal or the last leader's; and when it must not."""

import time
from dataclasses import dataclass
from importlib.metadata import version

import msgspec

from ftd.coordinator.journal import SAME_CLOCK_S, Journal
from ftd.errors import JournalError, WireError
from ftd.wire.coordinators import JournalCopy, unpack
from statemachine.cluster.durable import durable
from statemachine.cluster.durable.promises import beyond
from statemachine.cluster.durable.untold import UNTOLD
from statemachine.cluster.machine import ClusterMachine
from statemachine.effects import Effect
from statemachine.timing import Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a coordinator begins to lead with."""

    machine: ClusterMachine
    effects: list[Effect]
    untold: tuple[tuple[str, str], ...] = ()
    """Events that the last leader decided, and may not have told: ids, and as they are kept."""


def restored(timing: Timing, journal: Journal, copy: JournalCopy | None, now: float) -> Restored:
    """The newest of both, and what it begins with.

    :param now: on this host's monotonic clock.
    :raises JournalError: it is damaged, or of another version.
    """
    saved, where, moved_s = journal.load(), str(journal.path), journal.ahead_s
    if copy is not None and copy.position > journal.position:
        saved, where = copy.state, f"the journal at the broker, of ftd {copy.version}"
        ahead_s = (now - time.time()) + (copy.wall_s - copy.monotonic_s)
        moved_s = ahead_s if abs(ahead_s) > SAME_CLOCK_S else 0.0
    if saved is None:
        return Restored(machine=ClusterMachine(timing), effects=[])
    try:
        state = durable.moved(msgspec.msgpack.decode(unpack(saved)), moved_s)
        if journal.shared and (copy is None or copy.position < journal.position):
            state = durable.unseen(state)  # The broker lost the newest, or came back with what it once saved.
        state = beyond(state, journal.floor)
        machine, effects = ClusterMachine.restore(timing, state, now, "restored")
        untold = msgspec.convert(state.get(UNTOLD, ()), tuple[tuple[str, str], ...])
        return Restored(machine=machine, effects=effects, untold=untold)
    except (ValueError, RecursionError, WireError) as error:  # No msgpack, no state of ours.
        raise JournalError(
            f"{where}: {error} (go on with the ftd that wrote it; or, to begin anew without the job: "
            "ftd coordinator --anew)"
        ) from None


def foreign(schema: int, protocol: int, theirs: str) -> str:
    """Why this program cannot go on from a leader's journal, with the remedy; empty: it can.

    :param theirs: version of ftd that wrote it.
    """
    why = durable.unreadable(schema, protocol)
    if not why:
        return ""
    mine = version("ftd")
    there = f"ftd {theirs}" if theirs != mine else f"another build of ftd {theirs}"
    return f"{there} wrote the newest journal, this is ftd {mine}: {why}; install the same on this host"


class Succession:
    """What this coordinator would begin to lead with, and whether it could."""

    def __init__(self, timing: Timing, journal: Journal, *, anew: bool) -> None:
        """:param anew: with nothing, the first time, whatever there is.

        :raises JournalError: the own journal cannot be read.
        """
        self._timing, self._journal, self._anew = timing, journal, anew
        if not anew:
            restored(timing, journal, None, time.monotonic())

    @property
    def barred(self) -> str:
        """Why it must not lead, as far as its journal remembers; empty: it may."""
        known = self._journal.foreign
        return "" if self._anew or known is None else foreign(*known)

    def keep(self, copy: JournalCopy) -> str:
        """As a standby: so that what the leader knows is not lost with the broker's memory.

        What cannot be read is remembered as such alone: who begins from less than there is begins too early.

        :returns: why it could not be gone on from; empty: it could.
        :raises JournalError: it cannot be written. :raises WireError: it cannot be unpacked.
        """
        if copy.position <= self._journal.position:
            return ""
        if problem := foreign(copy.schema, copy.protocol, copy.version):
            self._journal.bar(copy.position, copy.schema, copy.protocol, copy.version)
            return "" if self._anew else problem
        unpack(copy.state)
        self._journal.save_copy(copy.state, copy.position, copy.wall_s - copy.monotonic_s)
        return ""

    def judge(self, copy: JournalCopy | None) -> str:
        """Why it could not begin with what was found at the broker; empty: it could."""
        if self._anew or copy is None or copy.position <= self._journal.position:
            return ""
        if problem := foreign(copy.schema, copy.protocol, copy.version):
            return problem
        try:
            restored(self._timing, self._journal, copy, time.monotonic())
        except JournalError as error:
            return str(error)
        return ""

    def begin(self, copy: JournalCopy | None, now: float) -> Restored:
        """The machine to lead with, and what it begins with.

        :raises JournalError: as ``restored``.
        """
        anew, self._anew = self._anew, False
        if anew:
            return Restored(machine=ClusterMachine(self._timing), effects=[])
        return restored(self._timing, self._journal, copy, now)
