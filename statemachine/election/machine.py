"""The election of a leader: one pure machine in each coordinator. ``step(event) -> list[Effect]``.

Every coordinator has a *follower session* under a client id of its own. On it, the coordinator receives the
leader's retained record, heartbeats and last will, and the announcements of its peers. One coordinator also
has the *leader session*, under the leader's client id. The broker allows one session per client id, so
opening it ends the session of the previous leader, and nothing that this one still sends gets through. All
commands to nodes, the journal and the record are published on the leader session, in one stream: a command
reaches the broker after the journal that it follows from, and the next leader reads everything. This is the
whole fence; commands carry no term. If a command of a deposed leader reached the broker at all, it follows
from a journal that its successor begins with. So its generation is known there and is never used again, and
a node that receives it late ignores it as older. Without the fence two leaders could use one generation for
two plans (the simulator's mutants show it), so the broker must end the previous session when a client id is
used again: mosquitto and the embedded broker do, a bridged or sharded cluster of brokers does not.

Terms number the leader sessions: each is one more than any that was read *on the leader session*, and many
more if the broker may have lost some. A coordinator claims a term by publishing its record and leads once
the broker sends the record back. Whoever opens the leader session later reads it. So terms rise, and they
order the journals.

A coordinator that loses the leader session first finds out who has it. It leads again with its own state
(``Lead.resumed``) only if no other coordinator led in between, which holds if its record is still the
newest; otherwise it discards the cluster's state.

====================  ======================================================================================
role                  what ends it
====================  ======================================================================================
FOLLOWER              the leader's last will, its silence, no leader at all → (its turn comes) CANDIDATE
CANDIDATE             its claim is at the broker → LEADER; no leader session, or another one leads → FOLLOWER
LEADER                the leader session is lost → SUSPENDED; a higher term is seen → FOLLOWER
SUSPENDED             a higher term is seen → FOLLOWER; no leader for a while → CANDIDATE
====================  ======================================================================================

A broker that was restarted may have lost the record, or return with an older one. A coordinator that led
and has never had peers then continues at once. If it has peers, it may have been cut off and deposed
meanwhile: it continues when all of them are present again and know less, and after
``lost_record_timeout_s`` if one of them is absent; with its own state only if the broker has no other
one's journal and one of them stores the journal, which an ineligible one does not. It announces what it
stores until then. A coordinator that followed leaves the others ``leader_silence_s`` for that, and so
does one that was restarted if all peers that it ever met are present; any other leaves them
``lost_record_timeout_s``. Each leaves the same time to a peer that knows more, from meeting it on, and
longer while that peer stays. If no coordinator has ever known a cluster, none of them waits
(``peer_knowledge``). A leader whose journal is too large for the broker leaves its record there without the
journal, and so does one that is killed in between. The others leave it ``lost_record_timeout_s`` from the moment
in which one of them finds that out.

A coordinator that cannot read the newest journal (another version of the program wrote it) is *ineligible*:
it does not become a candidate, no other waits for its turn, and it stores nothing that it does not
understand. If no other coordinator is left it reports so, once, and the cluster stays without a leader:
training continues, and the right program finds everything unchanged. A journal that is read on the leader
session counts too, as it may have been written a moment before. The coordinator is eligible again with a
newer journal that it can read.

Turns: the present coordinators take turns by priority, then name; each waits ``election_s`` for each one
before it and for each attempt that failed. A coordinator that finds others present, and no leader, when it
comes waits once more, because the first of them is about to lead. Two that are candidates at the same time
end each other's leader sessions until one has published its record, which the other receives.
"""

from collections.abc import Collection
from typing import Any, assert_never

from msgspec.structs import replace

from statemachine.effects import CancelTimer, Effect, EmitEvent, PublishCluster, SetTimer
from statemachine.election.leadership import (
    AcquireLeadership,
    AnnouncePeer,
    ClaimTerm,
    ElectionEvent,
    FollowerSessionLost,
    FollowerSessionOpened,
    JournalChecked,
    Lead,
    Leader,
    LeaderHeartbeatSeen,
    LeaderSeen,
    LeaderSessionLost,
    LeaderSessionOpened,
    LeaderVanished,
    Peer,
    PeerSeen,
    PeerVanished,
    RejectTakeover,
    ReleaseLeadership,
    Role,
    SendLeaderHeartbeat,
    StepDown,
    Suspend,
    TermClaim,
)
from statemachine.election.peer_knowledge import PeerKnowledge, is_outdated
from statemachine.events import TimerFired
from statemachine.timing import Timing

SILENCE = "silence"
TURN = "turn"
LEADER_SESSION = "leader_session"
HEARTBEAT = "heartbeat"

MAX_TURNS = 8
"""Most turns that the wait after failed attempts grows to. After that, a peer that knows more evidently cannot
lead.
"""


class ElectionMachine:
    """State machine of the election; the module describes the protocol. The first event is
    ``FollowerSessionOpened``.
    """

    def __init__(
        self, me: Peer, timing: Timing, *, shared: bool = False, known_peers: Collection[str] = ()
    ) -> None:
        """Create the machine of coordinator ``me``.

        :param shared: this coordinator has ever had peers.
        :param known_peers: names of peers that it ever met.
        """
        self.me = me
        self._knowledge = PeerKnowledge(timing, shared=shared, names=known_peers)
        self._record_present = False
        """Whether the broker has the leader's record."""
        self.role = Role.FOLLOWER
        self.leader: Leader | None = None
        """The newest leader that was ever seen."""
        self.peers: dict[int, Peer] = {me.incarnation: me}
        """Coordinators that are present, by incarnation."""
        self._timing = timing
        self._following = False
        self._began_at = 0.0
        self._lost_how: str | None = None
        """Way in which the loss of the leader was detected; ``None``: it is not lost."""
        self._lost_at = 0.0
        self._led = False
        """Whether this coordinator's state of the cluster still holds, provided that no other has led since."""
        self._claimed: TermClaim | None = None
        self._record_without_journal: Leader | None = None
        """A record whose claimant left no journal at the broker, so it does not prove that this one led."""
        self._journal_missed_at = 0.0
        """Time at which that was found out, if the claimant was another coordinator."""
        self._tries = 0
        self._reported_ineligible = False
        """Whether it was reported that this coordinator must not lead, and none has led since."""
        self._at, self._cause = 0.0, ""
        self._due: dict[str, float] = {}
        self._out: list[Effect] = []

    @property
    def term(self) -> int:
        """Return the highest term seen."""
        return self.leader.term if self.leader is not None else 0

    @property
    def record_lost(self) -> bool:
        """Return whether the broker, which this coordinator follows, has no leader's record."""
        return self._following and not self._record_present

    def step(self, event: ElectionEvent) -> list[Effect]:
        """Handle one event and return the effects in order."""
        self._at, self._cause = event.at, event.cause
        match event:
            case FollowerSessionOpened():
                self._following, self._began_at = True, self._at
                if len(self.peers) == 1:
                    self._tries = 0
                elif (self.leader is None or self._lost_how is not None) and len(self._eligible()) > 1:
                    self._tries = max(self._tries, 1)  # A coordinator that came first is about to lead.
                self._act()
            case FollowerSessionLost():
                self._following = self._record_present = self._reported_ineligible = False
                self._knowledge.note_session_lost(self.me, self.peers.values())
                self.peers = {self.me.incarnation: self.me}  # The broker announces the present peers again.
                self._cancel(SILENCE, TURN)
            case LeaderSeen():
                self._record_present = event.leader.term >= self.term
                self._take_record(event.leader)
            case LeaderHeartbeatSeen():
                self._take_heartbeat(event.leader)
            case LeaderVanished():
                if self.leader is not None and event.incarnation == self.leader.incarnation:
                    self._knowledge.seen_leading |= self._following
                    self._take_loss("goodbye" if event.graceful else "last_will")
            case PeerSeen():
                self._take_peer(event.peer)
                if not self._record_present:
                    self._act()
            case PeerVanished():
                if event.incarnation != self.me.incarnation:
                    was_present = self.peers.pop(event.incarnation, None) is not None
                    if not was_present:
                        self._knowledge.note_departed(self.me, event.name)
                    self._publish_standbys(was_present)
            case JournalChecked():
                self._take_problem(event.problem)
            case LeaderSessionOpened() if problem := event.problem or self.me.ineligible:
                self._reject_journal(problem)
            case LeaderSessionOpened():
                self._claim_term(event)
            case LeaderSessionLost():
                self._take_session_lost()
            case TimerFired():
                self._timer(event)
            case _:
                assert_never(event)
        out, self._out = self._out, []
        return out

    # --- the follower session ----------------------------------------------------------------------

    def _act(self) -> None:
        """Set the timer, or take the turn, that follows from the current knowledge, unless this one leads or
        is a candidate.
        """
        if not self._following or self.role in (Role.CANDIDATE, Role.LEADER):
            return
        leader = self.leader
        if (wait_s := self._wait_for_record_s()) > 0:
            self._set(SILENCE, wait_s)
        elif leader is None or self._lost_how is not None:
            self._wait_turn(self._rank())
        elif leader.incarnation != self.me.incarnation:
            self._set(SILENCE, self._timing.leader_silence_s)
        else:
            self._wait_turn(0)  # This coordinator led last.

    def _take_peer(self, peer: Peer) -> None:
        known = self.peers.get(peer.incarnation)
        if known is not None and peer.position < known.position:
            return  # An older announcement of it, which the broker had retained.
        self.peers[peer.incarnation] = peer
        self._knowledge.note_peer(self.me, peer, self._at, present_before=known is not None)
        if peer.incarnation == self.me.incarnation:
            self.me = peer  # Its own announcement in this connection.
        self._publish_standbys(known is None or known.ineligible != peer.ineligible)
        if peer.ineligible and (known is None or not known.ineligible) and self.role is Role.LEADER:
            self._publish_ineligible(peer)

    def _take_problem(self, problem: str) -> None:
        """Note whether this coordinator can begin from a newer journal than its own."""
        if problem == self.me.ineligible:
            return
        self.me = replace(self.me, ineligible=problem)
        self.peers[self.me.incarnation] = self.me
        self._out.append(AnnouncePeer(cause=self._cause, peer=self.me))
        self._reported_ineligible = False
        self._act()

    def _wait_for_record_s(self) -> float:
        """Return how long it is left to the others to supply the record that the broker lacks."""
        if self._record_present:
            return 0.0
        since, led = max(self._began_at, self._journal_missed_at), self._led
        leader, others = self.leader, self._others()
        if leader is not None and leader == self._record_without_journal:
            # What its claimant announced is older than what it may have written since.
            others = [peer for peer in others if peer.incarnation != leader.incarnation]
            leader = None
        return self._knowledge.wait_until(self.me, others, leader, since, led=led) - self._at

    def _others(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.incarnation != self.me.incarnation]

    def _take_record(self, leader: Leader) -> None:
        """Handle a leader's record. A record that is older than the known one is a leftover at the broker."""
        if leader.term > self.term:
            self.leader, self._lost_how, self._reported_ineligible = leader, None, False
            if self._claimed is not None and self._claimed.leader == leader:
                self._lead(self._claimed)
            else:
                self._tries = 0
                if leader.incarnation != self.me.incarnation:
                    self._follow(leader)
        elif leader == self.leader:
            self._act()

    def _take_heartbeat(self, leader: Leader) -> None:
        self._knowledge.seen_leading |= leader.term >= self.term
        if leader.term > self.term:
            self._take_record(leader)
        elif leader == self.leader:
            self._lost_how, self._reported_ineligible = None, False
            if self.role is Role.FOLLOWER:
                self._cancel(TURN)
                self._act()

    def _follow(self, leader: Leader) -> None:
        """Follow another coordinator, which leads under a higher term than any known."""
        self._cancel(TURN, LEADER_SESSION, HEARTBEAT)
        self._claimed = None
        if self.role in (Role.CANDIDATE, Role.LEADER):
            self._out.append(ReleaseLeadership(cause=self._cause))
        if self._led:
            self._led = False
            self._out.append(StepDown(cause=self._cause, leader=leader))
        self.role = Role.FOLLOWER
        self._act()

    def _take_loss(self, how: str) -> None:
        """Note that the leader appears to be gone."""
        if self.role is not Role.FOLLOWER:
            return
        if self._lost_how is None:
            self._lost_how, self._lost_at = how, self._at
        self._cancel(SILENCE)
        self._act()

    def _rank(self) -> int:
        """Return how many present coordinators come before this one."""
        return sum(1 for peer in self._eligible() if peer.order < self.me.order)

    def _eligible(self) -> list[Peer]:
        """Return the coordinators that may take over: neither the lost leader nor ineligible ones."""
        gone = self.leader.incarnation if self.leader is not None else 0
        return [peer for peer in self.peers.values() if peer.incarnation != gone and not peer.ineligible]

    def _wait_turn(self, turns: int) -> None:
        turns += min(self._tries, MAX_TURNS)
        if turns == 0:
            self._acquire()
        elif TURN not in self._due:
            self._set(TURN, turns * self._timing.election_s)

    def _publish_standbys(self, changed: bool) -> None:
        """Publish the cluster's state if the list of standbys changed; the leader publishes it."""
        if changed and self.role is Role.LEADER:
            self._out.append(PublishCluster(cause=self._cause))

    # --- the leader session ---------------------------------------------------------------------------

    def _acquire(self) -> None:
        self._cancel(SILENCE, TURN)
        if self.me.ineligible:
            self._report_ineligible()
            return
        self.role = Role.CANDIDATE
        self._set(LEADER_SESSION, self._timing.leader_session_s)
        self._out.append(AcquireLeadership(cause=self._cause))

    def _report_ineligible(self) -> None:
        """Report once that this coordinator must not lead, unless another one can take over: it waits for all of
        them.
        """
        if self._eligible():
            self._set(TURN, self._timing.election_s)
        elif not self._reported_ineligible:
            self._reported_ineligible = True
            why = self.me.ineligible
            event = EmitEvent(
                cause=self._cause,
                name="TakeoverRejected",
                reason=f"no coordinator leads, and {self.me.name} must not: {why}",
                details={"coordinator": self.me.name, "why": why},
            )
            self._out.append(RejectTakeover(cause=self._cause, event=event))

    def _reject_journal(self, problem: str) -> None:
        """Release the leader session, on which a journal was read that this coordinator cannot begin from."""
        if self.role is not Role.CANDIDATE:
            return
        self._cancel(LEADER_SESSION)
        self._out.append(ReleaseLeadership(cause=self._cause))
        self.role = Role.SUSPENDED if self._led else Role.FOLLOWER
        self._take_problem(problem)

    def _claim_term(self, event: LeaderSessionOpened) -> None:
        if self.role is not Role.CANDIDATE:
            return
        found, lost = event.found, event.found is None or event.found.term < self.term
        self._knowledge.note_position(event.newest)
        if not event.has_journal and found != self._record_without_journal:
            self._record_without_journal = found
            if found is not None and found.name != self.me.name:
                self._journal_missed_at = self._at
        self._record_present = not lost and event.has_journal
        if self._wait_for_record_s() > 0:
            self._release()  # The broker lost the record of the leader.
            return
        if self._tries < MAX_TURNS and is_outdated(event.newest, self._others()):
            self._release()  # A peer knows more.
            return
        before = self.leader if lost else found
        resumed = self._led and before is not None and before.incarnation == self.me.incarnation
        # The journal of another one may be from before this one led; or that one led since, and knew no better.
        by_another = found is not None and found.incarnation != self.me.incarnation and event.has_journal
        resumed &= not lost or not (by_another or self._knowledge.may_have_led(self.me, self._others()))
        term = self._knowledge.next_term(max(self.term, event.newest[0], found.term if found else 0))
        leader = Leader(term=term, name=self.me.name, incarnation=self.me.incarnation)
        how, at = (self._lost_how, self._lost_at) if self._lost_how else ("last_will", self._at)
        self._claimed = TermClaim(leader, resumed, before, how, at, event.newest)
        self._out.append(ClaimTerm(cause=self._cause, leader=leader))

    def _lead(self, claimed: TermClaim) -> None:
        """Begin to lead: no other coordinator leads in this term."""
        if self._tries < MAX_TURNS and is_outdated(claimed.newest, self._others()):
            self._release()  # A peer that came just now knows more.
            return
        self._cancel(LEADER_SESSION)
        self._out.append(Lead(cause=self._cause, leader=claimed.leader, resumed=claimed.resumed))
        self._publish_takeover(claimed)
        self.role, self.leader, self._led = Role.LEADER, claimed.leader, True
        for peer in self.peers.values():
            if peer.ineligible:
                self._publish_ineligible(peer)
        self._knowledge.note_leading()
        self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        if self.leader is not None:
            self._out.append(SendLeaderHeartbeat(cause=self._cause, leader=self.leader))
        self._set(HEARTBEAT, self._timing.leader_heartbeat_s)

    def _release(self) -> None:
        self._out.append(ReleaseLeadership(cause=self._cause))
        self._take_session_lost()

    def _take_session_lost(self) -> None:
        """Handle a leader session that could not be opened, or that was lost to another coordinator, by a
        reset, or with the broker.
        """
        if self.role not in (Role.CANDIDATE, Role.LEADER):
            return
        led, self._claimed = self.role is Role.LEADER, None
        self._cancel(LEADER_SESSION, HEARTBEAT)
        self.role = Role.SUSPENDED if self._led else Role.FOLLOWER
        if led:
            self._out.append(Suspend(cause=self._cause))
            # Another coordinator may have taken it; its record is then on its way. Without peers, none has.
            self._tries = 1 if len(self.peers) > 1 else 0
        else:
            self._tries += 1
        self._act()

    def _timer(self, event: TimerFired) -> None:
        late_s = self._at - self._due.pop(event.name, self._at)
        match event.name:
            case "silence" if late_s > self._timing.leader_silence_s / 2:
                self._act()  # This process itself was suspended: messages of that time are yet to be read.
            case "silence" if self.role is Role.SUSPENDED or self._wait_for_record_s() > 0:
                self._act()
            case "silence" if self.leader is None:
                self._wait_turn(self._rank())
            case "silence":
                self._take_loss("silence")
            case "turn":
                if self.role in (Role.FOLLOWER, Role.SUSPENDED) and self._following:
                    self._acquire()
            case "leader_session":
                if self.role is Role.CANDIDATE:
                    self._release()  # Opening it takes too long.
            case _:
                if self.role is Role.LEADER:
                    self._send_heartbeat()

    # --- events and timers ------------------------------------------------------------------------------

    def _publish_event(self, name: str, reason: str, **details: Any) -> None:
        self._out.append(EmitEvent(cause=self._cause, name=name, reason=reason, details=details))

    def _publish_takeover(self, claimed: TermClaim) -> None:
        """Publish the loss of the previous leader and the election of the next, unless both have the same name."""
        leader, before, how = claimed.leader, claimed.before, claimed.how
        if before is None or before.name == leader.name:
            return
        words = {
            "last_will": "the broker lost its session",
            "goodbye": "it was stopped",
            "silence": f"it was silent for {self._timing.leader_silence_s:g} s",
        }
        self._publish_event(
            "LeaderLost",
            f"{before.name} led the cluster: {words[how]}",
            leader=before.name,
            term=before.term,
            how=how,
            detected_at=claimed.noticed_at,
        )
        self._publish_event(
            "LeaderElected",
            f"{leader.name} leads the cluster in place of {before.name}",
            leader=leader.name,
            term=leader.term,
            took_s=self._at - claimed.noticed_at,
        )

    def _publish_ineligible(self, peer: Peer) -> None:
        """Publish that a peer looks like a standby but will not take over."""
        why = peer.ineligible
        reason = f"{peer.name} will not take over: {why}"
        self._publish_event("StandbyIneligible", reason, coordinator=peer.name, why=why)

    def _set(self, name: str, delay_s: float) -> None:
        self._due[name] = self._at + delay_s
        self._out.append(SetTimer(cause=self._cause, name=name, delay_s=delay_s))

    def _cancel(self, *names: str) -> None:
        for name in names:
            if self._due.pop(name, None) is not None:
                self._out.append(CancelTimer(cause=self._cause, name=name))
