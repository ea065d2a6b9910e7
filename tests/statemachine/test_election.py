"""Tests of the election machine, event by event."""

from typing import Any

import pytest
from msgspec.structs import replace

from statemachine.effects import Effect, PublishCluster
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
)
from statemachine.election.machine import ElectionMachine
from statemachine.events import TimerFired
from statemachine.timing import Timing

TIMING = Timing()
ANNA = Leader(term=4, name="anna", incarnation=1)


class One:
    """A machine and a clock."""

    def __init__(self, name: str = "bert", incarnation: int = 2, priority: int = 0) -> None:
        self.machine = ElectionMachine(Peer(name=name, incarnation=incarnation, priority=priority), TIMING)
        self.at = 0.0
        self.out: list[Effect] = []

    def feed(self, kind: type[Any], after_s: float = 0.0, **fields: Any) -> list[Effect]:
        self.at += after_s
        event: ElectionEvent = kind(at=self.at, cause="c", **fields)
        self.out = self.machine.step(event)
        return self.out

    def fire(self, name: str, late_s: float = 0.0) -> list[Effect]:
        self.at = self.machine._due[name] + late_s
        return self.feed(TimerFired, name=name)

    def waits_for_its_turn(self) -> None:
        """Let all timers before its turn expire."""
        while not self.has(AcquireLeadership):
            self.fire("turn" if "turn" in self.machine._due else "silence")

    def has(self, kind: type[Effect]) -> bool:
        return any(isinstance(effect, kind) for effect in self.out)

    def names(self) -> list[str]:
        return [getattr(effect, "name", "") for effect in self.out]

    def follows(self, leader: Leader = ANNA, *others: Peer) -> "One":
        """Let the machine start while a leader is present."""
        self.feed(LeaderSeen, leader=leader)
        for peer in others:
            self.feed(PeerSeen, peer=peer)
        self.feed(FollowerSessionOpened)
        assert self.machine.role is Role.FOLLOWER
        return self

    def takes(self, found: Leader | None, newest: tuple[int, int]) -> None:
        """Give the machine the leader session and, if it claims a term, the term too."""
        self.feed(LeaderSessionOpened, found=found, newest=newest)
        for claim in [effect for effect in self.out if isinstance(effect, ClaimTerm)]:
            assert self.machine.role is Role.CANDIDATE and not self.has(Lead)
            self.feed(LeaderSeen, leader=claim.leader)

    def leads(self, found: Leader | None = None, term: int = 0) -> Lead:
        assert self.has(AcquireLeadership) and self.machine.role is Role.CANDIDATE
        self.takes(found, (term, 0))
        [lead] = [effect for effect in self.out if isinstance(effect, Lead)]
        assert self.machine.role is Role.LEADER
        return lead


def test_the_first_coordinator_leads_at_once() -> None:
    one = One()
    one.feed(FollowerSessionOpened)
    lead = one.leads()
    assert (lead.leader.term, lead.leader.name, lead.resumed) == (1, "bert", False)
    assert "LeaderElected" not in one.names()


def test_the_term_is_above_all_that_were_read_or_held() -> None:
    one = One().follows()
    one.feed(LeaderVanished, incarnation=1, graceful=False)
    assert one.leads(found=Leader(term=9, name="cora", incarnation=3), term=11).leader.term == 12


def test_a_last_will_of_the_leader_is_enough_and_is_reported() -> None:
    one = One().follows()
    one.feed(LeaderVanished, incarnation=7, graceful=False)
    assert not one.out  # This is the will of an earlier leader.
    one.feed(LeaderVanished, incarnation=1, graceful=False)
    assert one.leads(found=ANNA).leader.term == 5
    assert [name for name in one.names() if name.startswith("Leader")] == ["LeaderLost", "LeaderElected"]


def test_the_leader_publishes_who_stands_by() -> None:
    cora = Peer(name="cora", incarnation=3)
    one = One().follows()
    one.feed(PeerSeen, peer=cora)
    assert not one.has(PublishCluster)  # The leader does.
    one = One()
    one.feed(FollowerSessionOpened)
    one.leads()
    one.feed(PeerSeen, peer=cora)
    assert one.has(PublishCluster)
    one.feed(PeerSeen, peer=cora)
    assert not one.has(PublishCluster)
    one.feed(PeerVanished, incarnation=3)
    assert one.has(PublishCluster)


def test_silence_deposes_a_leader_and_heartbeats_do_not() -> None:
    one = One().follows()
    for _ in range(10):
        one.feed(LeaderHeartbeatSeen, after_s=TIMING.leader_silence_s * 0.9, leader=ANNA)
        assert one.machine._due["silence"] == one.at + TIMING.leader_silence_s
    one.fire("silence")
    one.leads(found=ANNA)


@pytest.mark.parametrize("late_s", [0.0, 1.0, TIMING.leader_silence_s / 2])
def test_a_timer_that_is_a_little_late_still_shows_silence(late_s: float) -> None:
    one = One().follows()
    one.fire("silence", late_s=late_s)
    assert one.has(AcquireLeadership)


def test_a_suspended_follower_reads_messages_first() -> None:
    one = One().follows()
    one.fire("silence", late_s=60.0)
    assert not one.has(AcquireLeadership)
    one.fire("silence")
    assert one.has(AcquireLeadership)


def test_standbys_take_turns() -> None:
    anna, cora, dora = (Peer(name=n, incarnation=i) for n, i in (("anna", 1), ("cora", 3), ("dora", 4)))
    last, first = (
        One("cora", 3).follows(ANNA, anna, Peer(name="dora", incarnation=4, priority=5)),
        One("dora", 4, priority=5).follows(ANNA, anna, cora),
    )
    for one in (last, first):
        one.feed(LeaderVanished, incarnation=1, graceful=False)
    assert first.has(AcquireLeadership) and not last.has(AcquireLeadership)
    record = first.leads(found=ANNA).leader
    last.feed(LeaderSeen, leader=record)
    assert last.machine.role is Role.FOLLOWER and "turn" not in last.machine._due
    # If the first one fails before it wrote its record:
    other = One("cora", 3).follows(ANNA, anna, dora, Peer(name="bert", incarnation=2))
    other.feed(LeaderVanished, incarnation=1, graceful=False)
    other.fire("turn")
    assert other.has(AcquireLeadership)


def test_a_higher_term_deposes_the_leader() -> None:
    one = One()
    one.feed(FollowerSessionOpened)
    one.leads()
    other = Leader(term=2, name="anna", incarnation=1)
    one.feed(LeaderSeen, leader=other)
    assert one.has(ReleaseLeadership) and one.has(StepDown) and one.machine.role is Role.FOLLOWER
    one.feed(LeaderSessionLost, why="thrown out")
    assert not one.out


def test_a_leader_that_lost_its_session_looks_before_it_becomes_a_candidate_again() -> None:
    one = One()
    one.feed(FollowerSessionOpened)
    mine = one.leads().leader
    one.feed(PeerSeen, peer=Peer(name="anna", incarnation=1))
    one.feed(LeaderSessionLost, why="thrown out")
    assert one.has(Suspend) and not one.has(AcquireLeadership)
    one.feed(LeaderVanished, incarnation=mine.incarnation, graceful=False)
    assert not one.has(AcquireLeadership)
    one.feed(LeaderSeen, leader=Leader(term=mine.term + 1, name="anna", incarnation=1))
    assert one.has(StepDown)


def test_a_leader_whose_broker_was_restarted_leads_again() -> None:
    one = One()
    one.feed(FollowerSessionOpened)
    mine = one.leads().leader
    one.feed(FollowerSessionLost)
    one.feed(LeaderSessionLost, why="the broker")
    assert one.has(Suspend) and not one.has(AcquireLeadership)
    one.feed(FollowerSessionOpened, after_s=5.0)
    lead = one.leads()  # The broker remembers nothing.
    assert lead.resumed and lead.leader.term == mine.term + 1


def test_a_leader_that_was_replaced_meanwhile_does_not_reuse_its_state() -> None:
    one = One()
    one.feed(FollowerSessionOpened)
    mine = one.leads().leader
    one.feed(LeaderSessionLost, why="reset")
    assert one.has(AcquireLeadership)  # Alone, as far as it knows.
    lead = one.leads(found=Leader(term=mine.term + 1, name="anna", incarnation=1))
    assert not lead.resumed and lead.leader.term == mine.term + 2


def test_failed_attempts_are_repeated_at_growing_intervals() -> None:
    one = One().follows()
    one.feed(LeaderVanished, incarnation=1, graceful=True)
    waits = []
    for _ in range(12):
        assert one.has(AcquireLeadership)
        one.feed(LeaderSessionLost, why="refused")
        waits.append(one.machine._due["turn"] - one.at)
        one.fire("turn")
    assert waits == sorted(waits) and waits[0] == TIMING.election_s
    assert waits[-2:] == [8 * TIMING.election_s] * 2


@pytest.mark.parametrize("peers", [(), (Peer(name="cora", incarnation=3),)])
def test_only_a_coordinator_that_is_alone_tries_at_once_when_its_broker_is_back(
    peers: tuple[Peer, ...],
) -> None:
    one = One().follows(ANNA, *peers)
    one.feed(LeaderVanished, incarnation=1, graceful=False)
    for _ in range(3):
        one.feed(LeaderSessionLost, why="refused")
        one.fire("turn")
    one.feed(LeaderSessionLost, why="the broker ended")
    one.feed(FollowerSessionLost)
    for kind, value in (("leader", ANNA), *(("peer", peer) for peer in peers)):
        one.feed(LeaderSeen if kind == "leader" else PeerSeen, **{kind: value})
    one.feed(FollowerSessionOpened)
    assert one.has(AcquireLeadership) is not bool(peers)


def test_the_follower_session_of_a_leader_or_a_candidate_may_end_and_return() -> None:
    candidate = One().follows()
    candidate.feed(LeaderVanished, incarnation=1, graceful=False)
    for one in (candidate, leading()):
        role, due = one.machine.role, dict(one.machine._due)
        one.feed(FollowerSessionLost)
        one.feed(FollowerSessionOpened)
        assert one.out == [] and (one.machine.role, one.machine._due) == (role, due)


def test_a_leader_that_was_restarted_under_its_name_was_not_replaced() -> None:
    one = One().follows(Leader(term=4, name="bert", incarnation=1))
    one.feed(LeaderVanished, incarnation=1, graceful=False)
    one.leads(found=Leader(term=4, name="bert", incarnation=1))
    assert not {"LeaderLost", "LeaderElected"} & set(one.names())


def test_a_leader_session_that_does_not_open_in_time_is_released() -> None:
    one = One().follows()
    one.feed(LeaderVanished, incarnation=1, graceful=True)
    one.fire("leader_session")
    assert one.has(ReleaseLeadership) and one.machine.role is Role.FOLLOWER


def test_a_former_leader_waits_if_the_broker_may_have_lost_a_newer_record() -> None:
    """It leads again when all of its earlier peers are present again and know less."""
    for position, patience_s in (
        ((4, 9), 0.0),
        ((6, 1), TIMING.lost_record_timeout_s),
        (None, TIMING.lost_record_timeout_s),
    ):
        one = One()
        one.feed(PeerSeen, peer=Peer(name="anna", incarnation=1, position=(4, 8)))
        one.feed(PeerVanished, incarnation=1)
        one.feed(FollowerSessionOpened)
        one.fire("silence")
        one.takes(None, (4, 0))
        one.feed(PeerSeen, peer=Peer(name="carl", incarnation=3))
        one.feed(FollowerSessionLost)
        one.feed(LeaderSessionLost, why="cut off")
        assert one.machine.role is Role.SUSPENDED
        one.feed(PeerSeen, peer=Peer(name="bert", incarnation=2, position=(5, 7)))
        one.feed(FollowerSessionOpened)
        assert not one.has(AcquireLeadership)
        began = one.at
        if position is not None:
            one.feed(PeerSeen, peer=Peer(name="carl", incarnation=4, position=position))
        if patience_s:
            assert not one.has(AcquireLeadership)
            while one.at < began + patience_s:
                one.fire("silence")
        elif not one.has(AcquireLeadership):
            one.fire("turn")
        assert one.has(AcquireLeadership)


def test_an_earlier_process_of_the_same_coordinator_is_no_peer() -> None:
    """Broker and coordinator are killed together: alone, it need not wait for a peer that knows more."""
    for name, alone in (("bert", True), ("anna", False)):
        one = One()
        one.feed(PeerSeen, peer=Peer(name=name, incarnation=1, position=(4, 8)))
        one.feed(PeerVanished, incarnation=1)
        one.feed(FollowerSessionOpened)
        assert one.has(AcquireLeadership) is alone
        assert ("silence" in one.machine._due) is not alone


@pytest.mark.parametrize(("peer", "turns"), [("anna", 2), ("cora", 1)])
def test_a_coordinator_that_finds_another_one_there_leaves_it_the_time_to_lead(peer: str, turns: int) -> None:
    first = Peer(name=peer, incarnation=1)
    one = One()
    one.feed(PeerSeen, peer=first)
    one.feed(FollowerSessionOpened)
    assert not one.has(AcquireLeadership) and one.machine._due["turn"] == turns * TIMING.election_s
    one.feed(PeerSeen, peer=Peer(name="dora", incarnation=3))
    assert not one.has(AcquireLeadership)
    one.feed(LeaderSeen, leader=Leader(term=1, name=peer, incarnation=1))
    assert "turn" not in one.machine._due
    one.feed(LeaderVanished, incarnation=1, graceful=False)
    assert one.has(AcquireLeadership)


@pytest.mark.parametrize("alone", [False, True])
def test_a_coordinator_that_comes_when_the_leader_is_gone_leaves_another_one_the_time_to_lead(
    alone: bool,
) -> None:
    """All of them were restarted at once, and the broker has the record of the last leader and its last will."""
    one = One()
    one.feed(LeaderSeen, leader=ANNA)
    one.feed(PeerSeen, peer=Peer(name="anna" if alone else "cora", incarnation=1 if alone else 3))
    one.feed(LeaderVanished, incarnation=1, graceful=False)
    one.feed(FollowerSessionOpened)
    assert one.has(AcquireLeadership) == alone
    assert one.machine._due.get("turn", 0.0) == (0.0 if alone else TIMING.election_s)


def test_a_coordinator_leads_if_the_one_that_it_found_there_does_not() -> None:
    one = One()
    one.feed(PeerSeen, peer=Peer(name="cora", incarnation=1))
    one.feed(FollowerSessionOpened)
    one.fire("turn")
    one.leads()
    one = One()
    one.feed(PeerSeen, peer=Peer(name="cora", incarnation=1, ineligible="too old"))
    one.feed(FollowerSessionOpened)
    one.waits_for_its_turn()
    assert one.at == TIMING.lost_record_timeout_s  # That one knows a journal; it is not about to lead.


def test_a_new_cluster_begins_at_once_with_any_number_of_coordinators() -> None:
    one = One()
    one.feed(PeerSeen, peer=Peer(name="anna", incarnation=1))
    one.feed(FollowerSessionOpened)
    while not one.has(AcquireLeadership):
        one.fire("turn")
    one.feed(PeerSeen, peer=Peer(name="carl", incarnation=3))
    one.takes(None, (0, 0))
    assert one.machine.role is Role.LEADER and one.at < TIMING.leader_silence_s


def test_a_coordinator_waits_when_the_broker_lost_the_record_of_the_leader() -> None:
    """A coordinator that kept up with the leader leaves it time to return; another one leaves it much more."""
    kept_up = One().follows()
    kept_up.feed(FollowerSessionLost)
    kept_up.feed(PeerSeen, peer=Peer(name="bert", incarnation=2, position=(4, 9)))
    kept_up.feed(FollowerSessionOpened)
    assert not kept_up.has(AcquireLeadership)
    kept_up.fire("silence")
    kept_up.leads()
    orphan = One()
    orphan.machine = ElectionMachine(orphan.machine.me, TIMING, shared=True)
    orphan.feed(FollowerSessionOpened)
    assert orphan.machine._due["silence"] == orphan.at + TIMING.lost_record_timeout_s


def test_the_peer_that_knows_more_goes_first_if_the_broker_lost_the_record() -> None:
    """The order of arrival does not matter, and a peer that went away again is waited for."""
    anna = Peer(name="anna", incarnation=1, position=(4, 9))
    for position, stays in (((4, 8), True), ((4, 8), False), ((4, 10), True)):
        one = One()
        one.machine = ElectionMachine(replace(one.machine.me, position=position), TIMING, shared=True)
        one.feed(FollowerSessionOpened)
        one.feed(PeerSeen, after_s=TIMING.leader_silence_s * 2, peer=anna)
        met_at = one.at
        if position > anna.position:
            assert one.names() == ["turn"]
            continue
        if not stays:
            one.feed(PeerVanished, incarnation=1)
        while not one.has(AcquireLeadership):
            assert one.at <= met_at + TIMING.lost_record_timeout_s + TIMING.leader_silence_s
            one.fire("turn" if "turn" in one.machine._due else "silence")
        assert one.at >= met_at + TIMING.lost_record_timeout_s + (TIMING.leader_silence_s if stays else 0.0)


def test_a_coordinator_that_cannot_read_the_newest_journal_reports_so_once() -> None:
    one = One().follows()
    [announced] = [e for e in one.feed(JournalChecked, problem="schema 2") if isinstance(e, AnnouncePeer)]
    assert announced.peer.ineligible == "schema 2" and announced.peer.name == "bert"
    one.feed(LeaderVanished, incarnation=1, graceful=False)
    [rejected] = [e for e in one.out if isinstance(e, RejectTakeover)]
    assert "bert must not: schema 2" in rejected.event.reason and not one.has(AcquireLeadership)
    assert not one.feed(LeaderVanished, incarnation=1, graceful=False)
    one.feed(FollowerSessionLost)
    one.feed(LeaderSeen, leader=ANNA)
    one.feed(FollowerSessionOpened)
    assert one.has(RejectTakeover)  # The broker may have forgotten it.
    one.feed(LeaderSeen, leader=Leader(term=5, name="cora", incarnation=3))
    one.feed(LeaderVanished, incarnation=3, graceful=False)
    assert one.has(RejectTakeover)  # This one led, and is gone as well.
    one.feed(LeaderHeartbeatSeen, leader=Leader(term=5, name="cora", incarnation=3))
    one.feed(LeaderVanished, incarnation=3, graceful=False)
    assert one.has(RejectTakeover)  # It had been there.
    one.feed(LeaderHeartbeatSeen, leader=Leader(term=5, name="cora", incarnation=3))
    one.feed(JournalChecked, problem="")
    assert one.has(AnnouncePeer) and not one.machine.me.ineligible
    one.feed(LeaderVanished, incarnation=3, graceful=False)
    one.leads(found=Leader(term=5, name="cora", incarnation=3))


def test_a_coordinator_that_starts_with_a_journal_that_it_cannot_read_reports_so() -> None:
    one = One()
    one.machine = ElectionMachine(replace(one.machine.me, ineligible="schema 2"), TIMING)
    one.feed(FollowerSessionOpened)
    assert one.has(RejectTakeover) and not one.has(AcquireLeadership)


def test_a_candidate_that_becomes_ineligible_claims_no_term() -> None:
    one = One().follows()
    one.feed(LeaderVanished, incarnation=1, graceful=False)
    one.feed(JournalChecked, problem="schema 2")
    one.feed(LeaderSessionOpened, found=ANNA, newest=(4, 0))
    assert one.has(ReleaseLeadership) and not one.has(ClaimTerm)
    assert one.machine.role is Role.FOLLOWER


def test_no_coordinator_waits_for_an_ineligible_one_and_that_one_waits_for_all() -> None:
    anna, aside = (
        Peer(name="anna", incarnation=1),
        Peer(name="aside", incarnation=9, priority=9, ineligible="old"),
    )
    one = One().follows(ANNA, anna, aside)
    one.feed(LeaderVanished, incarnation=1, graceful=False)
    assert one.has(AcquireLeadership)
    other = One("aside", 9, priority=9).follows(ANNA, anna, Peer(name="bert", incarnation=2))
    other.feed(JournalChecked, problem="old")
    other.feed(LeaderVanished, incarnation=1, graceful=False)
    other.fire("turn")
    assert not other.has(AcquireLeadership) and not other.has(RejectTakeover)
    other.feed(PeerVanished, incarnation=2)
    other.fire("turn")
    assert other.has(RejectTakeover)


def test_an_unreadable_journal_on_the_leader_session_ends_the_attempt() -> None:
    one = One().follows()
    one.feed(LeaderVanished, incarnation=1, graceful=False)
    one.feed(LeaderSessionOpened, found=ANNA, newest=(4, 0), problem="damaged")
    assert one.has(ReleaseLeadership) and one.has(RejectTakeover) and not one.has(Lead)
    assert one.machine.role is Role.FOLLOWER and one.machine.me.ineligible == "damaged"
    assert "leader_session" not in one.machine._due


def test_the_leader_reports_ineligible_standbys() -> None:
    one = One()
    one.feed(PeerSeen, peer=Peer(name="dora", incarnation=4, ineligible="older"))
    one.feed(FollowerSessionOpened)
    one.fire("silence")
    one.leads()
    assert one.names().count("StandbyIneligible") == 1
    cora = Peer(name="cora", incarnation=3)
    one.feed(PeerSeen, peer=cora)
    one.feed(PeerSeen, peer=replace(cora, ineligible="older"))
    assert one.names().count("StandbyIneligible") == 1 and one.has(PublishCluster)
    one.feed(PeerSeen, peer=replace(cora, ineligible="older"))
    assert not one.out


def test_a_candidate_that_finds_an_older_journal_leaves_the_lead_to_a_peer() -> None:
    """The broker returned with an older save. A peer that does not take its turn is not waited for."""
    one = One().follows(ANNA, Peer(name="carl", incarnation=3, position=(4, 9)))
    one.feed(LeaderVanished, incarnation=1, graceful=False)
    tries = 0
    while one.machine.role is not Role.LEADER:
        if not one.has(AcquireLeadership):
            one.fire("turn")
        one.takes(ANNA, (4, 8))
        assert one.has(ReleaseLeadership) is not one.has(Lead)
        tries += 1
    assert tries == 9
    for newest, ineligible in (((4, 9), ""), ((4, 8), "another schema")):
        one = One().follows(ANNA, Peer(name="carl", incarnation=3, position=(4, 9), ineligible=ineligible))
        one.feed(LeaderVanished, incarnation=1, graceful=False)
        one.takes(ANNA, newest)
        assert one.has(Lead)


def test_an_older_announcement_that_the_broker_had_retained_is_ignored() -> None:
    """Otherwise a leader that returns forgets that it knows more than the others, and leaves it to them."""
    one = One()
    for name, incarnation in (("bert", 2), ("carl", 3)):
        for position in ((4, 9), (0, 0)):
            one.feed(PeerSeen, peer=Peer(name=name, incarnation=incarnation, position=position))
        assert one.machine.peers[incarnation].position == (4, 9)
    assert one.machine.me.position == (4, 9)


def test_a_peer_that_knows_more_and_comes_after_the_claim_leads_instead() -> None:
    """The broker returned with an older save: it has this coordinator's record, although another one led
    since.
    """
    one = One()
    one.feed(FollowerSessionOpened)
    one.leads()
    one.feed(FollowerSessionLost)
    one.feed(LeaderSessionLost, why="the broker ended")
    mine = one.machine.leader
    one.feed(LeaderSeen, leader=mine)
    one.feed(FollowerSessionOpened)
    one.waits_for_its_turn()
    one.feed(LeaderSessionOpened, found=mine, newest=(1, 9))
    [claim] = [effect for effect in one.out if isinstance(effect, ClaimTerm)]
    one.feed(PeerSeen, peer=Peer(name="carl", incarnation=3, position=(2, 4)))
    one.feed(LeaderSeen, leader=claim.leader)
    assert one.has(ReleaseLeadership) and not one.has(Lead) and one.machine.role is Role.SUSPENDED
    one.fire("turn")
    one.feed(LeaderSessionLost, why="refused")
    assert one.machine._due["turn"] - one.at == 2 * TIMING.election_s, "this was the second failed attempt"


@pytest.mark.parametrize("live", ["heartbeat", "last will", "nothing"])
def test_terms_that_the_broker_may_have_lost_are_left_out(live: str) -> None:
    """A coordinator that saw the leader lead in this very session knows that there was no later term."""
    one = One().follows(ANNA, Peer(name="anna", incarnation=1))
    if live == "heartbeat":
        one.feed(LeaderHeartbeatSeen, leader=ANNA)
    if live == "last will":
        one.feed(LeaderVanished, incarnation=1, graceful=False)
    one.waits_for_its_turn()
    term = one.leads(found=ANNA, term=4).leader.term
    assert term == 4 + (100 if live == "nothing" else 1)


def test_an_older_record_is_as_good_as_none() -> None:
    """A coordinator that led and was cut off finds the broker in an older state: another one may have led
    since.
    """
    one = One()
    one.machine = ElectionMachine(replace(one.machine.me, position=(5, 3)), TIMING, shared=True)
    one.feed(FollowerSessionOpened)
    one.waits_for_its_turn()
    one.leads(term=5)
    one.feed(FollowerSessionLost)
    one.feed(LeaderSessionLost, why="the broker ended")
    back_at, before = one.at, Leader(term=4, name="anna", incarnation=1)
    one.feed(LeaderSeen, leader=before)
    one.feed(LeaderVanished, incarnation=1, graceful=False)
    one.feed(FollowerSessionOpened)
    assert not one.has(AcquireLeadership)
    one.waits_for_its_turn()
    assert one.at >= back_at + TIMING.leader_silence_s / 2
    assert not one.leads(found=before, term=5).resumed


def test_a_leader_session_lost_before_its_claim_leads_to_no_leader() -> None:
    """A coordinator that took the session meanwhile cannot have read the claim, and claims the same term."""
    one = One()
    one.feed(FollowerSessionOpened)
    one.feed(LeaderSessionOpened, found=None, newest=(0, 0))
    assert one.has(ClaimTerm)
    theirs = Leader(term=1, name="carl", incarnation=3)
    one.feed(LeaderSeen, leader=theirs)
    assert one.has(ReleaseLeadership) and one.machine.role is Role.FOLLOWER and one.machine.leader == theirs
    one.feed(LeaderSeen, leader=Leader(term=1, name="bert", incarnation=2))
    assert not one.has(Lead) and one.machine.leader == theirs


def test_a_claim_that_the_broker_does_not_send_back_is_abandoned() -> None:
    one = One()
    one.feed(FollowerSessionOpened)
    one.feed(LeaderSessionOpened, found=None, newest=(0, 0))
    one.fire("leader_session")
    assert one.has(ReleaseLeadership) and one.machine.role is Role.FOLLOWER
    one.feed(LeaderSeen, leader=Leader(term=1, name="bert", incarnation=2))
    assert not one.has(Lead)
    while not one.has(AcquireLeadership):
        one.fire("turn")
    lead = one.leads(found=Leader(term=1, name="bert", incarnation=2))
    assert lead.leader.term == 2 and not lead.resumed, "it never led, so it has no state of its own"


def test_a_record_without_a_journal_is_a_claim_that_nothing_followed() -> None:
    """Its claimant died at once, and may be the one that knows most."""
    carl = Peer(name="carl", incarnation=3, position=(4, 9))
    one = One()
    one.machine = ElectionMachine(replace(one.machine.me, position=(4, 8)), TIMING, shared=True)
    one.feed(PeerSeen, peer=carl)
    one.feed(FollowerSessionOpened)
    claim = Leader(term=5, name="carl", incarnation=3)
    one.feed(LeaderSeen, leader=claim)
    one.feed(PeerVanished, incarnation=3)
    gone_at = one.at
    one.feed(LeaderVanished, incarnation=3, graceful=False)
    while not one.has(AcquireLeadership):
        one.fire("turn")
    one.feed(LeaderSessionOpened, found=claim, newest=(4, 8), has_journal=False)
    assert one.has(ReleaseLeadership) and not one.has(ClaimTerm)
    one.waits_for_its_turn()
    assert one.at >= gone_at + TIMING.lost_record_timeout_s
    assert one.leads(found=claim).leader.term == 6


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_standby_with_an_older_journal_waits_for_a_leader_that_left_none_at_the_broker(
    shared: bool, hangs: bool
) -> None:
    """It was too large for the broker. The leader may return with it, however long it led."""
    one = One()
    one.machine = ElectionMachine(one.machine.me, TIMING, shared=shared)
    one.follows(ANNA, Peer(name="anna", incarnation=1))
    one.feed(LeaderHeartbeatSeen, after_s=3600.0, leader=ANNA)
    if not hangs:
        one.feed(PeerVanished, incarnation=1, name="anna")
        one.feed(LeaderVanished, incarnation=1, graceful=False)
    one.waits_for_its_turn()
    one.feed(LeaderSessionOpened, found=ANNA, newest=(4, 8), has_journal=False)
    assert one.has(ReleaseLeadership) and not one.has(ClaimTerm)
    gone_at = one.at
    one.waits_for_its_turn()
    assert one.at >= gone_at + TIMING.lost_record_timeout_s
    one.feed(LeaderSessionOpened, found=ANNA, newest=(4, 8), has_journal=False)
    assert one.has(ClaimTerm)


def test_a_leader_whose_own_journal_is_not_at_the_broker_leads_again_at_once() -> None:
    one = One()
    one.feed(FollowerSessionOpened)
    own = one.leads().leader
    one.feed(LeaderSessionLost, after_s=3600.0, why="reset")
    one.waits_for_its_turn()
    one.feed(LeaderSessionOpened, found=own, newest=(1, 8), has_journal=False)
    assert one.at == 3600.0 and one.has(ClaimTerm)


def test_a_new_cluster_does_not_wait_for_a_claimant_that_died_before_it_left_a_journal() -> None:
    one = One()
    one.feed(PeerSeen, peer=Peer(name="carl", incarnation=3))
    one.feed(FollowerSessionOpened)
    claim = Leader(term=1, name="carl", incarnation=3)
    one.feed(LeaderSeen, leader=claim)
    one.feed(PeerVanished, incarnation=3)
    one.feed(LeaderVanished, incarnation=3, graceful=False)
    one.feed(LeaderSessionOpened, found=claim, newest=(0, 0), has_journal=False)
    assert one.has(ClaimTerm)


@pytest.mark.parametrize("found", [None, ANNA])
@pytest.mark.parametrize("after_s", [0.0, 29.5, 30.0])
def test_a_candidate_that_finds_the_newest_record_lost_leaves_it_to_the_others(
    found: Leader | None, after_s: float
) -> None:
    one = One().follows(CARL, Peer(name="carl", incarnation=3))
    one.feed(LeaderVanished, after_s=after_s, incarnation=3, graceful=False)
    one.feed(LeaderSessionOpened, found=found, newest=(4, 0))
    assert one.has(ReleaseLeadership) is (after_s < TIMING.lost_record_timeout_s)
    assert one.has(ClaimTerm) is not one.has(ReleaseLeadership)


def test_a_follower_that_never_had_the_journal_leaves_the_others_more_time_if_the_record_is_lost() -> None:
    one = One().follows(ANNA, Peer(name="anna", incarnation=1))
    one.feed(FollowerSessionLost)
    one.feed(FollowerSessionOpened)
    end = one.at + TIMING.lost_record_timeout_s
    assert one.machine._due == {"silence": end}
    one.feed(PeerSeen, after_s=29.5, peer=Peer(name="carl", incarnation=3))
    assert one.machine._due == {"silence": end}, "half a second is left"


@pytest.mark.parametrize("timeout_s", [3.0, 30.0])
def test_a_peer_that_vanishes_while_the_record_is_waited_for_makes_the_wait_longer(timeout_s: float) -> None:
    """Its older journal showed that this coordinator's is recent."""
    timing = Timing(lost_record_timeout_s=timeout_s)
    one = One()
    one.machine = ElectionMachine(replace(one.machine.me, position=(4, 9)), timing, shared=True)
    one.feed(FollowerSessionOpened)
    one.feed(PeerSeen, after_s=1.0, peer=Peer(name="carl", incarnation=3, position=(4, 8)))
    assert one.machine._due == {"silence": timing.leader_silence_s}
    one.feed(PeerVanished, incarnation=3)
    one.fire("silence")
    assert one.machine._due == {"silence": timeout_s} and not one.has(AcquireLeadership)


def test_a_candidate_has_no_timer_but_that_of_its_attempt() -> None:
    one = One()
    one.machine = ElectionMachine(replace(one.machine.me, position=(4, 9)), TIMING, shared=True)
    one.feed(FollowerSessionOpened)
    one.feed(PeerSeen, after_s=3.0, peer=Peer(name="carl", incarnation=3, position=(4, 8)))
    assert one.has(AcquireLeadership) and set(one.machine._due) == {"leader_session"}


def test_a_claim_under_a_higher_term_than_that_of_the_coordinator_that_leads_is_given_up() -> None:
    """The other one saw the last leader lead, and left out no terms. The claim was on its way then."""
    one = One().follows(ANNA, Peer(name="anna", incarnation=1))
    one.waits_for_its_turn()
    one.feed(LeaderSessionOpened, found=ANNA, newest=(4, 0))
    [claim] = [effect for effect in one.out if isinstance(effect, ClaimTerm)]
    one.feed(LeaderSeen, leader=CARL)
    assert claim.leader.term > CARL.term and one.has(ReleaseLeadership)
    one.feed(LeaderSeen, leader=claim.leader)
    assert not one.has(Lead)


def test_failed_attempts_under_an_earlier_leader_do_not_delay_the_next_takeover() -> None:
    one = One().follows()
    one.feed(LeaderVanished, incarnation=1, graceful=False)
    for _ in range(3):
        one.feed(LeaderSessionLost, why="refused")
        one.fire("turn")
    one.feed(LeaderSeen, leader=CARL)
    one.feed(LeaderVanished, incarnation=3, graceful=False)
    assert one.has(AcquireLeadership)


def test_a_leader_whose_record_is_still_the_newest_keeps_its_state_whoever_it_met() -> None:
    one = leading()
    one.feed(PeerSeen, peer=Peer(name="carl", incarnation=3))
    one.feed(FollowerSessionLost)
    one.feed(LeaderSessionLost, why="cut off")
    mine = one.machine.leader
    one.feed(LeaderSeen, leader=mine)
    one.feed(FollowerSessionOpened)
    one.waits_for_its_turn()
    assert one.leads(found=mine, term=1).resumed


def test_a_leader_that_finds_the_journal_of_another_one_does_not_continue_with_its_state() -> None:
    """Both are there again, but the broker lost everything, and the other one began again under a lower term."""
    carl = Peer(name="carl", incarnation=3)
    one = One()
    one.feed(FollowerSessionOpened)
    mine = one.leads(term=1).leader
    one.feed(PeerSeen, peer=carl)
    one.feed(FollowerSessionLost)
    one.feed(LeaderSessionLost, why="the broker")
    lower = Leader(term=mine.term - 1, name="carl", incarnation=3)
    one.feed(PeerSeen, peer=carl)
    one.feed(LeaderSeen, leader=lower)
    one.feed(FollowerSessionOpened)
    one.waits_for_its_turn()
    lead = one.leads(found=lower, term=mine.term)
    assert not lead.resumed and lead.leader.term > mine.term


def cut_off(*peers: Peer, leads_again: bool = False) -> One:
    """Return a leader whose broker was restarted and lost everything; these peers had been there."""
    one = leading()
    if leads_again:
        one.feed(FollowerSessionLost)
        one.feed(LeaderSessionLost, why="the broker")
        one.feed(FollowerSessionOpened)
        one.leads()
    for peer in peers:
        one.feed(PeerSeen, peer=peer)
    one.feed(FollowerSessionLost)
    one.feed(LeaderSessionLost, why="the broker")
    return one


def test_a_leader_that_finds_an_older_record_of_its_own_continues_with_its_state() -> None:
    one = cut_off(leads_again=True)
    older = Leader(term=1, name="bert", incarnation=2)
    one.feed(LeaderSeen, leader=older)
    one.feed(FollowerSessionOpened)
    one.waits_for_its_turn()
    lead = one.leads(found=older, term=1)
    assert lead.resumed and lead.leader.term > 2


def test_a_leader_that_finds_a_claim_of_another_one_after_which_nothing_was_done_continues_with_its_state() -> (
    None
):
    carl = Peer(name="carl", incarnation=3)
    one = cut_off(carl, leads_again=True)
    one.feed(PeerSeen, peer=carl)
    one.feed(FollowerSessionOpened)
    one.waits_for_its_turn()
    lower = Leader(term=1, name="carl", incarnation=3)
    one.feed(LeaderSessionOpened, found=lower, newest=(2, 0), has_journal=False)
    [claim] = [effect for effect in one.out if isinstance(effect, ClaimTerm)]
    one.feed(LeaderSeen, leader=claim.leader)
    assert [effect.resumed for effect in one.out if isinstance(effect, Lead)] == [True]


def test_a_leader_does_not_continue_with_its_state_if_a_peer_that_is_gone_may_have_led_meanwhile() -> None:
    one = cut_off(Peer(name="carl", incarnation=3))
    one.feed(FollowerSessionOpened)
    one.waits_for_its_turn()
    assert not one.leads(term=1).resumed


@pytest.mark.parametrize(("ineligible", "wait_s"), [("", 0.0), ("too old", TIMING.leader_silence_s / 2)])
def test_an_ineligible_peer_cannot_rule_out_that_another_one_led_meanwhile(
    ineligible: str, wait_s: float
) -> None:
    """It stores no journal, so its announcement does not show that a coordinator came and led."""
    carl = Peer(name="carl", incarnation=3, ineligible=ineligible)
    one = cut_off(carl)
    one.feed(PeerSeen, peer=carl)
    one.feed(FollowerSessionOpened)
    began_at = one.at
    one.waits_for_its_turn()
    assert one.at == began_at + wait_s
    assert one.leads(term=1).resumed == (not ineligible)


def test_a_peer_that_came_just_now_cannot_rule_out_that_another_one_led_meanwhile() -> None:
    one = cut_off()
    one.feed(PeerSeen, peer=Peer(name="carl", incarnation=3))
    one.feed(FollowerSessionOpened)
    one.waits_for_its_turn()
    assert one.at == TIMING.leader_silence_s / 2
    assert not one.leads(term=1).resumed


def test_what_is_left_of_an_unknown_coordinator_makes_a_new_one_wait() -> None:
    one = One()
    one.feed(PeerVanished, incarnation=3, name="carl")
    one.feed(FollowerSessionOpened)
    assert one.machine._due == {"silence": TIMING.lost_record_timeout_s}
    other = One()
    other.feed(PeerSeen, peer=Peer(name="carl", incarnation=3))
    other.feed(PeerVanished, incarnation=3, name="carl")
    other.feed(FollowerSessionOpened)
    assert other.has(AcquireLeadership), "it was new, too"


def test_the_record_is_lost_if_the_broker_is_there_and_has_none() -> None:
    one = leading()
    assert not one.machine.record_lost
    one.feed(FollowerSessionLost)
    one.feed(LeaderSessionLost, why="the broker")
    assert not one.machine.record_lost
    one.feed(FollowerSessionOpened)
    assert one.machine.record_lost
    one.feed(LeaderSeen, leader=Leader(term=1, name="bert", incarnation=2))
    assert not one.machine.record_lost


def test_peers_that_are_gone_when_a_coordinator_begins_to_lead_have_not_led_since() -> None:
    one = One()
    one.feed(PeerSeen, peer=Peer(name="carl", incarnation=3))
    one.feed(FollowerSessionLost)
    one.feed(FollowerSessionOpened)
    one.leads()
    one.feed(FollowerSessionLost)
    one.feed(LeaderSessionLost, why="the broker ended")
    one.feed(FollowerSessionOpened)
    assert one.machine._due == {"silence": one.at + TIMING.leader_silence_s / 2}


# --- events without effect -----------------------------------------------------------------------

CARL = Leader(term=6, name="carl", incarnation=3)


def waiting() -> One:
    """Let anna, which led, be gone; dora comes before bert, which waits for its turn."""
    one = One().follows(ANNA, Peer(name="anna", incarnation=1), Peer(name="dora", incarnation=4, priority=5))
    one.feed(LeaderVanished, incarnation=1, graceful=False)
    assert one.machine._due == {"turn": one.at + TIMING.election_s}, (
        "the leader is not one of those before it"
    )
    return one


def leading() -> One:
    one = One()
    one.feed(FollowerSessionOpened)
    one.leads()
    return one


def test_a_record_or_a_heartbeat_of_the_leader_renews_the_time_of_silence() -> None:
    one = One().follows()
    for kind in (LeaderSeen, LeaderHeartbeatSeen):
        one.feed(kind, after_s=1.0, leader=ANNA)
        assert one.machine._due == {"silence": one.at + TIMING.leader_silence_s}


def test_an_older_record_or_heartbeat_changes_nothing() -> None:
    one = One().follows()
    due = dict(one.machine._due)
    for kind in (LeaderSeen, LeaderHeartbeatSeen):
        assert one.feed(kind, after_s=1.0, leader=Leader(term=3, name="dora", incarnation=4)) == []
    assert one.machine.leader == ANNA and one.machine._due == due


def test_a_heartbeat_of_a_newer_leader_is_as_good_as_its_record() -> None:
    one = One().follows()
    one.feed(LeaderHeartbeatSeen, leader=CARL)
    assert one.machine.leader == CARL
    led = leading()
    led.feed(LeaderHeartbeatSeen, leader=CARL)
    assert led.has(StepDown) and led.has(ReleaseLeadership) and led.machine.role is Role.FOLLOWER


def test_the_record_of_a_leader_that_is_gone_does_not_bring_it_back_and_its_heartbeat_does() -> None:
    one = waiting()
    assert one.feed(LeaderSeen, leader=ANNA) == []
    assert one.feed(LeaderHeartbeatSeen, leader=Leader(term=3, name="dora", incarnation=4)) == []
    one.feed(LeaderHeartbeatSeen, leader=ANNA)
    assert one.machine._due == {"silence": one.at + TIMING.leader_silence_s}
    one.fire("silence")
    assert "turn" in one.machine._due and not one.has(AcquireLeadership)


def test_a_leader_is_not_moved_by_its_own_record_heartbeat_or_last_will() -> None:
    one = leading()
    mine, due = one.machine.leader, dict(one.machine._due)
    for kind in (LeaderSeen, LeaderHeartbeatSeen):
        assert one.feed(kind, leader=mine) == []
    assert one.feed(LeaderVanished, incarnation=2, graceful=False) == []
    assert one.machine.role is Role.LEADER and one.machine._due == due
    one.feed(PeerSeen, peer=Peer(name="anna", incarnation=1))
    one.feed(LeaderSessionLost, why="reset")
    assert one.machine._due == {"turn": one.at + TIMING.election_s}, "it led last, so its turn comes first"


def test_a_deposed_leader_steps_down_once() -> None:
    one = leading()
    one.feed(LeaderSeen, leader=ANNA)
    assert one.has(StepDown)
    one.feed(LeaderSeen, leader=CARL)
    assert not one.has(StepDown) and not one.has(ReleaseLeadership)


def test_a_last_will_before_any_leader_was_seen_changes_nothing() -> None:
    assert One().feed(LeaderVanished, incarnation=7, graceful=False) == []


def test_a_leader_sends_heartbeats() -> None:
    one = leading()
    for _ in range(3):
        before = one.at
        one.fire("heartbeat")
        [beat] = [effect for effect in one.out if isinstance(effect, SendLeaderHeartbeat)]
        assert beat.leader == one.machine.leader and one.at == before + TIMING.leader_heartbeat_s
        assert one.machine._due == {"heartbeat": one.at + TIMING.leader_heartbeat_s}


def test_timers_that_were_cancelled_and_are_over_all_the_same_change_nothing() -> None:
    away = waiting()
    away.feed(FollowerSessionLost)
    candidate = One().follows()
    candidate.feed(LeaderVanished, incarnation=1, graceful=False)
    for one, name in ((away, "turn"), (candidate, "turn"), (leading(), "turn"), (waiting(), "heartbeat")):
        role = one.machine.role
        assert one.feed(TimerFired, name=name) == [] and one.machine.role is role


def test_a_lost_follower_session_ends_its_timers() -> None:
    for one in (One().follows(), waiting()):
        one.feed(FollowerSessionLost)
        assert one.machine._due == {}


def test_only_the_leader_reports_ineligible_standbys() -> None:
    one = One().follows()
    assert one.feed(PeerSeen, peer=Peer(name="dora", incarnation=4, ineligible="older")) == []


def test_a_journal_that_cannot_be_read_is_announced_once_for_each_reason() -> None:
    one = One().follows()
    assert one.feed(JournalChecked, problem="") == []
    one.feed(JournalChecked, problem="schema 2")
    assert one.has(AnnouncePeer)
    assert one.feed(JournalChecked, problem="schema 2") == []
    one.feed(LeaderVanished, incarnation=1, graceful=False)
    assert one.has(RejectTakeover)
    one.feed(JournalChecked, problem="damaged")
    assert one.has(AnnouncePeer) and one.has(RejectTakeover)


def test_a_session_that_is_not_wanted_any_more_changes_nothing() -> None:
    one = One().follows()
    assert one.feed(LeaderSessionOpened, found=ANNA, newest=(4, 0)) == []
    assert one.feed(LeaderSessionOpened, found=ANNA, newest=(4, 0), problem="damaged") == []
    assert one.feed(LeaderSessionLost, why="late") == []
    assert one.feed(PeerVanished, incarnation=2) == [], "what is left of this very coordinator"
    assert one.machine.role is Role.FOLLOWER
