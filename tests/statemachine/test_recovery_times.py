"""The begin of a recovery, and phases that add up to its duration, whatever is known of the fault."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statemachine.cluster.phases import ActiveRecovery
from statemachine.cluster.recovery_times import durations_ms
from statemachine.effects import EmitEvent
from statemachine.events import (
    BrokerConnected,
    BrokerDisconnected,
    FaultAnnounced,
    NodeVanished,
    PlanImpossible,
    SubmitRequested,
    TemplatesReady,
)
from statemachine.messages.cluster import TrainerLost
from statemachine.messages.common import Prepared
from statemachine.messages.values import RECOVERY_PHASES
from tests.helpers.cluster_machine import restarted, running
from tests.helpers.transcripts import Coordination, job, report

HELD = {"node-0": (0, 1), "node-1": (2, 3), "node-2": (0, 1), "node-3": (2, 3)}


def announce(s: Coordination, node: str, in_s: float, clock_s: float = 0.0) -> None:
    """Announce a fault by the clock of a host that is ``clock_s`` ahead."""
    s.feed(FaultAnnounced, node=node, fault_at=s.now + in_s + clock_s, announced_at=s.now + clock_s)


def finish(
    s: Coordination, generation: int, *names: str, held: dict[str, tuple[int, ...]] = HELD
) -> dict[str, Any]:
    """Let these nodes report, resume and commit, 0.1 s after each other, and return what is published."""
    s.wait(0.1)
    for name in names:
        s.quiesced(name, generation, report(1, held=held[name]) if name in held else report())
    s.wait(0.1)
    s.plan()
    s.wait(0.1)
    for name in names:
        s.resumed(name, generation)
    s.wait(0.1)
    s.stepped(names[0], generation, 2)
    [found] = [e.details["recovery"] for e in s.all(EmitEvent) if e.name == "RecoveryCompleted"]
    recovery: dict[str, Any] = found
    assert recovery["total_ms"] == pytest.approx(
        sum(recovery[field] or 0.0 for field in RECOVERY_PHASES.values()), abs=1e-6
    )
    return recovery


@pytest.mark.parametrize("clock_s", [0.0, 5000.0])
def test_a_recovery_is_measured_from_the_fault_that_was_announced(clock_s: float) -> None:
    s = running(4)
    announce(s, "node-3", 0.02, clock_s)
    s.wait(0.05)
    s.feed(NodeVanished, node="node-3", incarnation=103)
    [lost] = [e for e in s.all(EmitEvent) if e.name == "NodeLost"]
    assert lost.details["fault_at"] == pytest.approx(s.now - 0.03)
    found = finish(s, 2, "node-0", "node-1", "node-2")
    assert (found["measured_from"], found["detected_ms"]) == ("fault", pytest.approx(30.0, abs=1e-3))
    assert found["total_ms"] == pytest.approx(430.0, abs=1e-3)


def test_an_announced_fault_belongs_to_one_loss_of_its_node() -> None:
    s = running(4)
    announce(s, "node-2", 0.0)
    s.wait(0.05)
    s.feed(NodeVanished, node="node-3", incarnation=103)
    found = finish(s, 2, "node-0", "node-1", "node-2")
    assert (found["measured_from"], found["detected_ms"]) == ("detection", None), "another node's fault"


@pytest.mark.parametrize(("after_s", "measured"), [(59.0, True), (61.0, False)])
def test_a_fault_of_long_ago_is_not_where_a_recovery_begins(after_s: float, measured: bool) -> None:
    s = running(4)
    announce(s, "node-2", 0.0)
    s.wait(after_s)
    s.feed(NodeVanished, node="node-2", incarnation=102)
    [lost] = [e for e in s.all(EmitEvent) if e.name == "NodeLost"]
    assert (lost.details["fault_at"] is not None) == measured


@pytest.mark.parametrize("outage", [False, True])
def test_no_recovery_begins_at_a_fault_that_a_node_survived_in_the_recovery_before(outage: bool) -> None:
    """The node is in a group that was formed after the fault and has committed a step."""
    s = running(4)
    announce(s, "node-2", 0.0)
    announce(s, "node-1", 0.2)
    s.wait(0.1)
    if outage:
        s.feed(BrokerDisconnected)
        s.feed(BrokerConnected)
    s.hello("node-3", 103, job_id="job-1", prepared=False, generation=1)
    finish(s, 2, "node-0", "node-1", "node-2")
    s.wait(5.0)  # Then last wills are reliable again.
    # The fault of node-1 came after the recovery had begun.
    for name, incarnation, measured in (("node-2", 102, False), ("node-1", 101, True)):
        s.feed(NodeVanished, node=name, incarnation=incarnation)
        [lost] = [e for e in s.all(EmitEvent) if e.name == "NodeLost"]
        assert (lost.details["fault_at"] is not None) == measured, name


@pytest.mark.parametrize(
    ("committed_after_s", "outage", "measured_from"),
    [(3.0, False, "detection"), (1.9, False, "fault"), (3.0, True, "fault")],
)
def test_no_recovery_begins_at_a_fault_after_which_its_node_committed_a_step(
    committed_after_s: float, outage: bool, measured_from: str
) -> None:
    """A report of a step may be older than the fault, for as long as it takes to arrive."""
    s = running(4)
    announce(s, "node-3", 0.0)
    s.wait(committed_after_s)
    if outage:
        s.feed(BrokerDisconnected)
        s.feed(BrokerConnected)
    s.stepped("node-0", 1, 2)
    s.wait(4.0)
    s.feed(NodeVanished, node="node-3", incarnation=103)
    [lost] = [e for e in s.all(EmitEvent) if e.name == "NodeLost"]
    assert (lost.details["fault_at"] is None) == (measured_from == "detection")
    assert s.machine._c.nodes["node-3"].failed_by_fault, "it does not count against the node"


def test_no_recovery_begins_before_its_job() -> None:
    s = Coordination()
    s.feed(BrokerConnected)
    s.hello("node-0", 100)
    announce(s, "node-0", 0.0)
    s.wait(0.5)
    s.feed(SubmitRequested, request="r", job=job())
    s.feed(NodeVanished, node="node-0", incarnation=100)
    [lost] = [e for e in s.all(EmitEvent) if e.name == "NodeLost"]
    assert lost.details["fault_at"] is None


def test_a_fault_that_the_node_s_next_hello_shows_is_where_the_recovery_begins() -> None:
    s = running(4)
    announce(s, "node-3", 0.0)
    s.wait(0.05)
    s.hello("node-3", 103, job_id="job-1", prepared=False, generation=1)
    found = finish(s, 2, "node-0", "node-1", "node-2")
    assert (found["cause"], found["measured_from"]) == ("trainer_lost", "fault")
    assert found["detected_ms"] == pytest.approx(50.0, abs=1e-3)


def test_two_faults_are_one_recovery_from_the_earlier_one() -> None:
    s = running(4)
    announce(s, "node-2", 0.0)
    announce(s, "node-3", 0.01)
    s.wait(0.05)
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.wait(0.05)
    s.feed(NodeVanished, node="node-2", incarnation=102)
    found = finish(s, 2, "node-0", "node-1")
    assert found["detected_ms"] == pytest.approx(50.0, abs=1e-3), "from node-2's fault to node-3's detection"


def test_a_fault_during_a_recovery_does_not_change_its_begin() -> None:
    s = running(4)
    s.feed(NodeVanished, node="node-3", incarnation=103)
    announce(s, "node-2", 0.0)
    s.wait(0.05)
    s.feed(NodeVanished, node="node-2", incarnation=102)
    found = finish(s, 2, "node-0", "node-1")
    assert (found["measured_from"], found["nodes"]) == ("detection", ["node-3", "node-2"])


@pytest.mark.parametrize("unnoticed_s", [0.6, 1.2])
def test_a_hang_is_measured_from_the_last_sign_of_life(unnoticed_s: float) -> None:
    s = running(4)
    s.wait(5.0)
    hung = TrainerLost(generation=1, device=0, cause="hung", detail="no progress", unnoticed_s=unnoticed_s)
    s.say("node-3", hung)
    found = finish(s, 2, "node-0", "node-1", "node-2")
    assert (found["measured_from"], found["detected_ms"]) == (
        "estimate",
        pytest.approx(1000.0 * unnoticed_s, abs=1e-3),
    )


def test_a_recovery_that_has_to_wait_for_nodes_lasts_from_the_fault_though_the_coordinator_is_restarted() -> (
    None
):
    s = running(2)
    announce(s, "node-1", 0.0)
    s.wait(0.02)
    s.feed(NodeVanished, node="node-1", incarnation=101)
    s.quiesced("node-0", 2, report(1, held=(0, 1, 2, 3)))
    s.feed(PlanImpossible, generation=2, too_few=True, reason="too few", needed=2)
    back = restarted(s)
    back.feed(BrokerConnected)
    back.feed(TemplatesReady, job_id="job-1")
    back.wait(3.0)
    back.hello("node-4", 104)
    back.say("node-4", Prepared(job_id="job-1", profile=None))
    back.fire("join", 0.1)
    found = finish(back, back.machine.generation, "node-0", "node-4", held={"node-0": (0, 1, 2, 3)})
    assert (found["cause"], found["measured_from"]) == ("resumed", "fault")
    assert (found["detected_ms"], found["waited_ms"]) == (
        pytest.approx(20.0),
        pytest.approx(3100.0, abs=1e-3),
    )


@given(st.lists(st.one_of(st.none(), st.floats(0.0, 1e4)), min_size=6, max_size=6), st.floats(0.0, 1e6))
def test_phases_add_up_to_the_duration(took_s: list[float | None], began_at: float) -> None:
    at, ends = began_at, []
    for one in took_s:
        at += one or 0.0
        ends.append(None if one is None else at)
    record = ActiveRecovery(
        cause="node_lost", nodes=[], detected_how=None, began_at=began_at, detected_at=ends[0] or began_at,
        measured_from="estimate", waited_until=ends[1], quiesced_at=ends[2], planned_at=ends[3],
        resumed_at=ends[4], committed_at=ends[5],
    )  # fmt: skip
    found = durations_ms(record)
    total_us = round(1e3 * (found.pop("total_ms") or 0.0))
    assert sum(round(1e3 * (one or 0.0)) for one in found.values()) == total_us
    assert total_us == round(
        1e6 * (max(end for end in (record.detected_at, *ends) if end is not None) - began_at)
    )
