"""Tests of the declared tables, which name every pair exactly once."""

import dataclasses
from itertools import product
from typing import get_args

import pytest

from statemachine.cluster import membership, node, phases
from statemachine.cluster.membership import SenderStatus
from statemachine.cluster.node import NodeEvent, NodeMachine
from statemachine.cluster.phases import MachineError, PhaseEvent
from statemachine.cluster.state import Cluster
from statemachine.messages.cluster import Hello, Signal
from statemachine.messages.values import ClusterPhase, NodeFacts, NodeState
from statemachine.timing import Timing

FACTS = NodeFacts(devices=1, host="h", rendezvous_port=1)


def test_the_node_table_has_a_row_for_every_state() -> None:
    assert set(node._ROWS) == set(NodeState)


@pytest.mark.parametrize(("state", "event"), sorted(product(NodeState, NodeEvent)))
def test_a_node_takes_the_table_s_step_or_stays(state: NodeState, event: NodeEvent) -> None:
    machine = NodeMachine(name="n", incarnation=1, facts=FACTS, state=state)
    machine.feed(event)
    assert machine.state == node.TABLE.get((state, event), state)


def test_every_state_can_be_left_and_only_a_new_hello_leaves_offline() -> None:
    assert {after for (before, _), after in node.TABLE.items() if before is NodeState.OFFLINE} == {
        NodeState.HEALTHY
    }
    for state in NodeState:
        assert any(before is state and after is not state for (before, _), after in node.TABLE.items())


def test_the_phase_table_has_a_row_for_every_phase() -> None:
    assert set(phases._ROWS) == set(ClusterPhase)


def test_an_impossible_phase_event_is_a_bug() -> None:
    with pytest.raises(MachineError, match="GROUP_RESUMED cannot happen in phase WAITING"):
        Cluster(timing=Timing()).transition(PhaseEvent.GROUP_RESUMED, phases.Waiting())


def test_every_phase_has_a_state_and_recovering_one_on_each_side_of_the_resume() -> None:
    kinds = {kind: kind.phase for kind in get_args(phases.State) if kind is not phases.Ended}
    assert set(kinds.values()) == set(ClusterPhase) - phases.OVER
    assert {kind for kind, phase in kinds.items() if phase is ClusterPhase.RECOVERING} == {
        phases.Planning,
        phases.Resuming,
    }


def test_a_phase_holds_only_what_exists_in_it() -> None:
    """There is no decision before the reports, no group before the Resume, and no field of a generation
    without one.
    """
    held = {kind: {field.name for field in dataclasses.fields(kind)} for kind in get_args(phases.State)}
    assert {kind for kind in held if "generation" not in held[kind]} == {phases.Waiting, phases.Ended}
    assert {kind for kind in held if "reports" in held[kind]} == {phases.Quiescing}
    assert {kind for kind in held if "decision" in held[kind]} == {phases.Planning}
    assert {kind for kind in held if "resumed" in held[kind]} == {phases.Resuming, phases.Running}


def test_the_state_that_is_entered_is_one_of_the_phase_that_follows() -> None:
    c = Cluster(timing=Timing())
    with pytest.raises(AssertionError, match="JOB_ENDED leads to FINISHED, not to FAILED"):
        c.transition(PhaseEvent.JOB_ENDED, phases.Ended(phase=ClusterPhase.FAILED, outcome=""))
    assert c.phase is ClusterPhase.WAITING


def test_a_job_can_break_or_end_from_every_phase_that_has_one() -> None:
    for phase in set(ClusterPhase) - phases.OVER:
        assert phases.TABLE[phase, PhaseEvent.JOB_FAILED] is ClusterPhase.FAILED
        assert phases.TABLE[phase, PhaseEvent.JOB_ENDED] is ClusterPhase.FINISHED


def test_every_signal_of_every_sender_has_an_action() -> None:
    assert set(membership.TABLE) == set(product(get_args(Signal), SenderStatus))


def test_only_hello_admits_a_node() -> None:
    admitting = {signal for (signal, _), v in membership.TABLE.items() if v is membership.SignalAction.ADMIT}
    assert admitting == {Hello}
