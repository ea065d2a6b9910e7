"""Values, events and effects of the election of a leader among the coordinators of one cluster.

The protocol is described in ``machine``. The *leader session* is the session at the broker under the leader's client
id. The broker gives it to one client at a time: a client that opens it ends the session of the one before. The
*follower session* has a client id of its own; every coordinator has one.
"""

from enum import StrEnum

from msgspec import Struct

from statemachine.effects import Effect, EmitEvent
from statemachine.events import Event, TimerFired

# --- values --------------------------------------------------------------------------------------


class Role(StrEnum):
    """Role of a coordinator; ``machine`` lists what ends each."""

    FOLLOWER = "FOLLOWER"
    CANDIDATE = "CANDIDATE"
    LEADER = "LEADER"
    SUSPENDED = "SUSPENDED"


class Leader(Struct, frozen=True, kw_only=True):
    """The leader's record, as it is retained on the leader's topic. Only a leader session writes it."""

    term: int
    """Number that grows with each claim and that no two leaders share."""
    name: str
    incarnation: int


class Peer(Struct, frozen=True, kw_only=True):
    """A coordinator that is connected, leading or not, as it is retained on its own topic."""

    name: str
    incarnation: int
    priority: int = 0
    """Coordinators with a greater priority lead first."""
    position: tuple[int, int] = (0, 0)
    """Position of the newest journal that it holds: the term, and the number of the state in that term."""
    ineligible: str = ""
    """Reason why it must not lead: it cannot read the newest journal. Empty: it may lead."""

    @property
    def order(self) -> tuple[int, str, int]:
        return (-self.priority, self.name, self.incarnation)


class TermClaim(Struct, frozen=True):
    """A claim of a term from the leader session, kept until the broker sends its record back."""

    leader: Leader
    resumed: bool
    """Same as ``Lead.resumed``."""
    before: Leader | None
    """The previous leader, as far as it is known."""
    how: str
    """Way in which the loss of that leader was detected: ``last_will``, ``goodbye``, ``silence``."""
    noticed_at: float
    newest: tuple[int, int]
    """Position of the newest journal from which this coordinator can begin."""


# --- events --------------------------------------------------------------------------------------


class FollowerSessionOpened(Event, frozen=True, kw_only=True):
    """The follower session is open, and all retained messages have been read."""


class FollowerSessionLost(Event, frozen=True, kw_only=True):
    """The follower session ended; it reconnects by itself."""


class LeaderSeen(Event, frozen=True, kw_only=True):
    """The leader's record was received, retained or new."""

    leader: Leader


class LeaderHeartbeatSeen(Event, frozen=True, kw_only=True):
    """A heartbeat of a leader was received."""

    leader: Leader


class LeaderVanished(Event, frozen=True, kw_only=True):
    """The last will, or the goodbye, of the leader with this incarnation was received."""

    incarnation: int
    graceful: bool


class PeerSeen(Event, frozen=True, kw_only=True):
    peer: Peer


class PeerVanished(Event, frozen=True, kw_only=True):
    incarnation: int
    name: str = ""
    """Name of the coordinator; empty: unknown."""


class JournalChecked(Event, frozen=True, kw_only=True):
    """A leader's journal was received and checked: this coordinator can begin from it, or cannot."""

    problem: str
    """Reason why it cannot; empty: it can."""


class LeaderSessionOpened(Event, frozen=True, kw_only=True):
    """The leader session is open, so no other coordinator can publish as leader. The fields say what the last
    leader left.
    """

    found: Leader | None
    """The leader's record at the broker; ``None``: the broker has none."""
    newest: tuple[int, int]
    """Position of the newest journal that was read there or that this coordinator holds."""
    has_journal: bool = True
    """Whether the broker has a journal. A record without one is a claim after which nothing was done."""
    problem: str = ""
    """Reason why this coordinator cannot begin from the journal there; empty: it can, or there is none."""


class LeaderSessionLost(Event, frozen=True, kw_only=True):
    """The leader session could not be opened, or ended."""

    why: str


ElectionEvent = (
    TimerFired | FollowerSessionOpened | FollowerSessionLost | LeaderSeen | LeaderHeartbeatSeen | LeaderVanished
    | PeerSeen | PeerVanished | JournalChecked | LeaderSessionOpened | LeaderSessionLost
)  # fmt: skip


# --- effects -------------------------------------------------------------------------------------


class AcquireLeadership(Effect, frozen=True, kw_only=True):
    """Open the leader session and read the retained messages. LeaderSessionOpened or LeaderSessionLost
    follows.
    """


class ReleaseLeadership(Effect, frozen=True, kw_only=True):
    """Close the leader session, or stop opening it; no LeaderSessionLost follows."""


class ClaimTerm(Effect, frozen=True, kw_only=True):
    """Publish the record from the leader session. All follower sessions receive it as LeaderSeen, including
    the claimant's.
    """

    leader: Leader


class Lead(Effect, frozen=True, kw_only=True):
    """Lead under this term: publish the journal, then everything else."""

    leader: Leader
    resumed: bool
    """Whether no other coordinator led since this one did, so that its state still holds. Otherwise it begins
    from what was read.
    """


class Suspend(Effect, frozen=True, kw_only=True):
    """Stop publishing: the leader session is lost, and it is not known yet who leads next."""


class StepDown(Effect, frozen=True, kw_only=True):
    """Discard the cluster's state and follow, since another coordinator leads."""

    leader: Leader


class SendLeaderHeartbeat(Effect, frozen=True, kw_only=True):
    leader: Leader


class AnnouncePeer(Effect, frozen=True, kw_only=True):
    """Publish a change of this coordinator's own announcement to the others."""

    peer: Peer


class RejectTakeover(Effect, frozen=True, kw_only=True):
    """Report, also in the cluster's state, that no coordinator leads although it is this one's turn, because
    it is ineligible.
    """

    event: EmitEvent
