"""Tests of what a coordinator knows about its peers, and how long it leaves the lead to them if the broker has lost
the record of the leader.
"""

import pytest

from statemachine.election.leadership import Leader, Peer
from statemachine.election.peer_knowledge import FORGOTTEN_TERMS, PeerKnowledge, is_outdated
from statemachine.timing import Timing

TIMING = Timing()
LONG_S, SHORT_S = TIMING.lost_record_timeout_s, TIMING.leader_silence_s
BEGAN_AT = 100.0
Position = tuple[int, int]


def bert(position: Position = (0, 0)) -> Peer:
    """Return the coordinator whose knowledge it is."""
    return Peer(name="bert", incarnation=2, position=position)


def carl(position: Position = (0, 0), ineligible: str = "") -> Peer:
    return Peer(name="carl", incarnation=3, position=position, ineligible=ineligible)


def dora(position: Position = (0, 0), ineligible: str = "") -> Peer:
    return Peer(name="dora", incarnation=4, position=position, ineligible=ineligible)


def knows(*peers: Peer, shared: bool = True, me: Peer | None = None) -> PeerKnowledge:
    """Return the knowledge of a coordinator that met these peers when it began."""
    knowledge = PeerKnowledge(TIMING, shared=shared)
    for peer in peers:
        knowledge.note_peer(me if me is not None else bert(), peer, BEGAN_AT, present_before=False)
    return knowledge


def waits_s(
    knowledge: PeerKnowledge, me: Peer, *others: Peer, leader_term: int = 0, led: bool = False
) -> float:
    """Return how long it leaves the lead to others, from the begin of its session."""
    leader = Leader(term=leader_term, name="anna", incarnation=1) if leader_term else None
    return max(knowledge.wait_until(me, list(others), leader, BEGAN_AT, led=led) - BEGAN_AT, 0.0)


# --- a cluster that is new, or that no other coordinator has ever led --------------------------------


def test_nobody_is_waited_for_in_a_new_cluster() -> None:
    assert waits_s(knows(shared=False), bert()) == 0.0
    assert waits_s(knows(carl(), dora(), shared=False), bert(), carl(), dora()) == 0.0


def test_a_cluster_is_not_new_if_a_leader_was_seen_or_a_peer_knows_one() -> None:
    assert waits_s(knows(carl(), shared=False), bert(), carl(), leader_term=5) == LONG_S
    assert waits_s(knows(carl((1, 0)), shared=False), bert(), carl((1, 0))) == LONG_S + SHORT_S
    assert waits_s(knows(carl((0, 0), "schema 2"), shared=False), bert(), carl((0, 0), "schema 2")) == LONG_S


def test_a_coordinator_that_never_had_peers_waits_only_for_a_leader_that_it_saw() -> None:
    alone = knows(shared=False)
    assert waits_s(alone, bert((5, 9)), led=True, leader_term=5) == 0.0
    assert waits_s(alone, bert((0, 0)), leader_term=5) == LONG_S


def test_an_earlier_process_of_this_coordinator_is_no_peer() -> None:
    alone = knows(Peer(name="bert", incarnation=1, position=(4, 8)), shared=False)
    assert waits_s(alone, bert((4, 8)), led=True, leader_term=4) == 0.0


def test_what_is_left_of_a_coordinator_that_was_not_met_shows_that_the_cluster_is_not_new() -> None:
    for name, wait_s in (("carl", LONG_S), ("bert", 0.0), ("", 0.0)):
        alone = knows(shared=False)
        alone.note_departed(bert(), name)
        assert waits_s(alone, bert()) == wait_s, name


# --- peers that know more ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("present", "wait_s"),
    [
        ((carl((5, 9)),), LONG_S + SHORT_S),
        ((carl((5, 9), "schema 2"),), LONG_S),
        ((), LONG_S),
        ((dora((4, 1)),), LONG_S),
        ((dora((4, 9)),), LONG_S),
    ],
    ids=[
        "it is there",
        "it must not lead",
        "it is gone",
        "one that knows less is there",
        "an equal one is there",
    ],
)
def test_a_peer_that_knows_more_is_waited_for_and_longer_while_it_could_lead(
    present: tuple[Peer, ...], wait_s: float
) -> None:
    assert waits_s(knows(carl((5, 9))), bert((4, 9)), *present, leader_term=4) == wait_s


def test_the_time_of_a_peer_that_knows_more_begins_when_it_is_met() -> None:
    knowledge, me = knows(), bert((4, 9))
    knowledge.note_peer(me, carl((5, 1)), BEGAN_AT + 10, present_before=False)
    assert waits_s(knowledge, me) == 10 + LONG_S
    knowledge.note_peer(me, carl((5, 2)), BEGAN_AT + 20, present_before=True)
    assert waits_s(knowledge, me) == 10 + LONG_S, "it was there all the time"
    knowledge.note_peer(me, dora((4, 0)), BEGAN_AT + 20, present_before=False)
    assert waits_s(knowledge, me) == 10 + LONG_S, "that one knows less"
    knowledge.note_peer(me, carl((5, 1)), BEGAN_AT + 20, present_before=False)
    assert waits_s(knowledge, me) == 20 + LONG_S, "it came again"


def test_a_peer_that_knows_the_same_is_not_waited_for_like_one_that_knows_more() -> None:
    assert waits_s(knows(carl((5, 9))), bert((5, 9)), carl((5, 9)), leader_term=5) == SHORT_S


# --- how recent its own journal is --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "wait_s"), [((5, 0), SHORT_S), ((6, 0), SHORT_S), ((4, 9), LONG_S), ((0, 0), LONG_S)]
)
def test_a_coordinator_with_the_journal_of_the_last_leader_leaves_it_a_short_time(
    mine: Position, wait_s: float
) -> None:
    assert waits_s(knows(), bert(mine), leader_term=5) == wait_s


@pytest.mark.parametrize("theirs", [(4, 8), (4, 9)])
def test_if_all_coordinators_are_present_and_none_knows_more_nobody_is_missed(theirs: Position) -> None:
    assert waits_s(knows(carl(theirs)), bert((4, 9)), carl(theirs)) == SHORT_S
    assert waits_s(knows(carl(theirs), dora()), bert((4, 9)), carl(theirs)) == LONG_S, "dora is absent"
    ineligible = carl(theirs, "schema 2")
    assert waits_s(knows(ineligible), bert((4, 9)), ineligible) == LONG_S, "it knows of another one"
    assert waits_s(knows(), bert((4, 9))) == LONG_S, "the others are not known"


# --- a coordinator that led ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("past", "present", "wait_s"),
    [
        ((), (), SHORT_S / 2),
        ((carl(),), (), LONG_S),
        ((carl(),), (dora(),), LONG_S),
        ((carl(),), (carl(),), 0.0),
        ((carl(), dora()), (carl(),), LONG_S),
    ],
)
def test_a_coordinator_that_led_waits_for_its_peers_of_that_time(
    past: tuple[Peer, ...], present: tuple[Peer, ...], wait_s: float
) -> None:
    """One of them may have led since, until all of them are there and know less."""
    me, knowledge = bert((5, 9)), knows(*past, *present)
    knowledge.note_leading()
    knowledge.note_session_lost(me, [me, *past])
    assert waits_s(knowledge, me, *present, leader_term=5, led=True) == wait_s
    may_have_led = not past or wait_s > 0
    assert knowledge.may_have_led(me, list(present)) is may_have_led


def test_whoever_leads_knows_that_no_earlier_peer_has_led_since() -> None:
    me, knowledge = bert((5, 9)), knows(carl())
    knowledge.note_session_lost(me, [me, carl()])
    knowledge.note_leading()
    assert waits_s(knowledge, me, leader_term=5, led=True) == SHORT_S / 2


def test_a_peer_that_knows_more_may_have_led() -> None:
    me, knowledge = bert((5, 9)), knows(carl((6, 1)))
    knowledge.note_leading()
    knowledge.note_session_lost(me, [carl((6, 1))])
    assert knowledge.may_have_led(me, [carl((6, 1))])
    assert not knows(shared=False).may_have_led(me, []), "it never had peers"


# --- terms --------------------------------------------------------------------------------------------


def test_terms_are_left_out_unless_the_last_leader_was_seen_to_lead_in_this_session() -> None:
    me = bert()
    shared = knows(carl())
    assert shared.next_term(4) == 4 + FORGOTTEN_TERMS == 104
    assert shared.next_term(0) == 1, "there was none"
    shared.note_leading()
    assert shared.next_term(4) == 5
    shared.note_session_lost(me, [])
    assert shared.next_term(4) == 104
    assert knows(shared=False).next_term(4) == 5, "nobody else can have claimed one"


# --- journals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "outdated"), [(carl((4, 9)), True), (carl((4, 8)), False), (carl((4, 9), "schema 2"), False)]
)
def test_a_journal_is_outdated_if_a_peer_that_may_lead_has_a_newer_one(other: Peer, outdated: bool) -> None:
    assert is_outdated((4, 8), [other]) is outdated


def test_a_restarted_coordinator_waits_for_peers_that_it_met_before_its_restart() -> None:
    me, restarted = bert((4, 9)), PeerKnowledge(TIMING, shared=True, names={"carl", "dora"})
    restarted.note_peer(me, carl((4, 8)), BEGAN_AT, present_before=False)
    assert waits_s(restarted, me, carl((4, 8))) == LONG_S, "dora may know more"
    restarted.note_peer(me, dora((4, 9)), BEGAN_AT, present_before=False)
    assert waits_s(restarted, me, carl((4, 8)), dora((4, 9))) == SHORT_S
    assert waits_s(restarted, me, carl((4, 8)), leader_term=4) == SHORT_S, "it followed until now"


@pytest.mark.parametrize("met", [True, False])
def test_a_coordinator_of_which_one_knows_is_waited_for(met: bool) -> None:
    me, knowledge = bert((4, 9)), PeerKnowledge(TIMING, shared=True)
    if met:
        knowledge.note_peer(me, carl((4, 8)), BEGAN_AT, present_before=False)
    else:
        knowledge.note_departed(me, "carl")
    assert waits_s(knowledge, me, dora((4, 8))) == LONG_S
    assert waits_s(knowledge, me, dora((4, 8)), carl((4, 8))) == SHORT_S
