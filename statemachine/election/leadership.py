"""What coordinators of one cluster tell and ask each other about who leads: values, events, effects.

The protocol is in ``election``. *The seat* is the session at the broker under the leader's client id, which
the broker gives to one client at a time: whoever takes it throws the one before out.
"""

from dataclasses import dataclass
from enum import StrEnum

from statemachine.effects import CancelTimer, Effect, EmitEvent, PublishCluster, SetTimer
from statemachine.events import Event, TimerFired

# --- values --------------------------------------------------------------------------------------


class Role(StrEnum):
    """Of a coordinator; ``election.machine`` says what ends each."""

    FOLLOWER = "FOLLOWER"
    CANDIDATE = "CANDIDATE"
    LEADER = "LEADER"
    SUSPENDED = "SUSPENDED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    """Who leads, as it is retained on the leader's topic. Written from the seat alone."""

    term: int
    """It grows with each taking of the seat, and is nobody else's."""
    name: str
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A coordinator that is there, leading or not, as it is retained on its own topic."""

    name: str
    incarnation: int
    priority: int = 0
    """The greatest stands first."""
    position: tuple[int, int] = (0, 0)
    """Of the newest state that it keeps: of which term, and which of that term's states."""
    barred: str = ""
    """Why it must not lead: it cannot go on from the newest journal there is. Empty: it can."""

    @property
    def order(self) -> tuple[int, str, int]:
        return (-self.priority, self.name, self.incarnation)


@dataclass(frozen=True, slots=True)
class Claimed:
    """A term that was claimed from the seat, until the broker shows its record."""

    leader: Leader
    again: bool
    """See ``Reign``."""
    before: Leader | None
    """Who led before, as far as is known."""
    how: str
    """Its loss was noticed: ``last_will``, ``goodbye``, ``silence``."""
    noticed_at: float
    newest: tuple[int, int]
    """Position of the newest journal that is at hand."""


# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchBegan(Event):
    """The observer's session is up, and all that was retained has been read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchBroke(Event):
    """The observer's session is over; it comes back by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderSeen(Event):
    """The record, retained or new."""

    leader: Leader


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatHeard(Event):
    """A leader said that it is there."""

    leader: Leader


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderVanished(Event):
    """The leader of this incarnation is away, says its last will, or its goodbye."""

    incarnation: int
    graceful: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSeen(Event):
    peer: Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerVanished(Event):
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalJudged(Event):
    """A leader's journal was heard: this coordinator could go on from it, or could not."""

    problem: str
    """Why not; empty: it could."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatTaken(Event):
    """The seat is ours, so nobody else's word gets through any more; this is what the last holder left."""

    found: Leader | None
    """The record as it is now; ``None``: the broker has none."""
    newest: tuple[int, int]
    """Position of the newest journal that we read there or ever kept."""
    kept: bool = True
    """The broker has a journal. A record without one is a claim that nothing followed."""
    problem: str = ""
    """Why we cannot go on from the journal that is there; empty: we can, or there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatLost(Event):
    """The session under the leader's client id could not be had, or is over."""

    why: str


ElectionEvent = (
    TimerFired | WatchBegan | WatchBroke | LeaderSeen | BeatHeard | LeaderVanished | PeerSeen | PeerVanished
    | JournalJudged | SeatTaken | SeatLost
)  # fmt: skip


# --- effects -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeSeat(Effect):
    """Connect under the leader's client id and read what is retained: SeatTaken or SeatLost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveSeat(Effect):
    """Give up the seat, or the attempt to have it; no SeatLost comes of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim(Effect):
    """Write the record, from the seat. The broker shows it to whoever watches, so to us, too: LeaderSeen."""

    leader: Leader


@dataclass(frozen=True, slots=True, kw_only=True)
class Reign(Effect):
    """Coordinate under this term: write the journal, then begin; or go on, where ``again``."""

    leader: Leader
    again: bool
    """Nobody led since: what is known goes on to be true. Otherwise it begins from what was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspend(Effect):
    """The seat is lost: nothing can be said. Who comes next will show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abdicate(Effect):
    """Another one leads: forget the cluster, follow."""

    leader: Leader


@dataclass(frozen=True, slots=True, kw_only=True)
class SendBeat(Effect):
    leader: Leader


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce(Effect):
    """Tell the other coordinators what is other of this one."""

    peer: Peer


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse(Effect):
    """Nobody leads, it would be our turn, and we must not: tell it, in the cluster's state, too."""

    event: EmitEvent


ElectionEffect = (
    SetTimer | CancelTimer | EmitEvent | PublishCluster | TakeSeat | LeaveSeat | Claim | Reign | Suspend
    | Abdicate | SendBeat | Announce | Refuse
)  # fmt: skip
