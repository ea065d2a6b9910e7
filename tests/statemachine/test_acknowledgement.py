"""Tests of lost messages: each order and each report is lost once, heartbeats show it, and it is repeated
within a second.
"""

from typing import Any

import pytest

from statemachine.events import BrokerConnected, DrainRequested, NodeVanished, StopRequested
from statemachine.messages.cluster import (
    Acknowledgement,
    Command,
    HealthChecked,
    Heartbeat,
    Leaving,
    Prepare,
    Release,
    RequestHello,
    Resume,
    Stop,
    TrainerLost,
)
from statemachine.messages.common import Finished, PeerSuspected, Prepared, Quiesce
from statemachine.messages.values import ClusterPhase, NodeActivity
from statemachine.timing import Timing
from tests.helpers.transcripts import Coordination, committed, health_report, report

NODES = ("node-0", "node-1", "node-2", "node-3")
BEAT_S = Timing().heartbeat_s
LIMIT_S = 1.25
"""An order is repeated a second after it was lost, or with the next tick after that."""


class Cluster(Coordination):
    """Nodes whose heartbeats a test chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.activity = dict.fromkeys(NODES, NodeActivity.TRAINING)
        self.acknowledged: dict[str, dict[str, Any]] = {name: {} for name in NODES}
        self.job_ids: dict[str, str | None] = dict.fromkeys(NODES, "job-1")
        self.generations = dict.fromkeys(NODES, 1)
        self.step = 1

    def heartbeat(self, seconds: float = LIMIT_S) -> list[tuple[str, Command]]:
        """Let all nodes send heartbeats for a while, and return the commands that follow."""
        sent: list[tuple[str, Command]] = []

        def collect() -> None:
            sent.extend((one.node, one.command) for one in self.commands())

        for _ in range(round(seconds / BEAT_S)):
            for name in NODES:
                said = Acknowledgement(
                    activity=self.activity[name], job_id=self.job_ids[name], **self.acknowledged[name]
                )
                generation = self.generations[name]
                heartbeat = Heartbeat(
                    generation=generation, committed=committed(self.step), acknowledgement=said
                )
                self.say(name, heartbeat)
                collect()
            self.fire("tick", BEAT_S)
            collect()
        return sent

    def all_are(self, activity: NodeActivity, generation: int) -> None:
        self.activity = dict.fromkeys(NODES, activity)
        self.generations = dict.fromkeys(NODES, generation)


@pytest.fixture
def s() -> Cluster:
    cluster = Cluster()
    cluster.running()
    return cluster


def kinds(sent: list[tuple[str, Command]]) -> set[tuple[str, type[Command]]]:
    return {(name, type(command)) for name, command in sent}


def quiescing(s: Cluster) -> None:
    """Let a trainer of node-3 fail and generation 2 begin; all nodes but node-3 and node-2 report."""
    s.hello("node-3", 103, job_id="job-1", prepared=False, generation=1)
    s.all_are(NodeActivity.QUIESCED, 2)
    s.activity["node-3"] = NodeActivity.BUILDING
    for name in ("node-0", "node-1"):
        s.quiesced(name, 2, report(1))


def recovering(s: Cluster) -> None:
    quiescing(s)
    s.quiesced("node-2", 2, report(1))
    s.plan()
    assert s.machine.phase is ClusterPhase.RECOVERING


def test_where_nothing_is_lost_nothing_is_repeated(s: Cluster) -> None:
    assert s.heartbeat(20.0) == []
    quiescing(s)
    s.activity["node-2"] = NodeActivity.QUIESCING
    assert Quiesce not in {kind for _, kind in kinds(s.heartbeat(2.0))}
    s.quiesced("node-2", 2, report(1))
    s.plan()
    s.all_are(NodeActivity.RESUMING, 2)
    s.activity["node-3"] = NodeActivity.BUILDING
    assert s.heartbeat(20.0) == []


def test_a_quiesce_is_sent_again(s: Cluster) -> None:
    quiescing(s)
    s.activity["node-2"], s.generations["node-2"] = NodeActivity.TRAINING, 1
    assert ("node-2", Quiesce) in kinds(s.heartbeat())
    assert {name for name, command in s.heartbeat() if isinstance(command, Quiesce)} == {"node-2"}


def test_lost_reports_are_requested(s: Cluster) -> None:
    quiescing(s)
    assert ("node-2", RequestHello) in kinds(s.heartbeat())
    s.hello("node-2", 102, job_id="job-1", prepared=True, generation=2, quiesced=True)
    assert ("node-2", Quiesce) in {(one.node, type(one.command)) for one in s.commands()}


def test_a_resume_is_sent_again_to_all_that_lack_it_at_once(s: Cluster) -> None:
    recovering(s)
    s.all_are(NodeActivity.RESUMING, 2)
    s.activity["node-3"] = NodeActivity.BUILDING
    s.activity["node-1"] = s.activity["node-2"] = NodeActivity.QUIESCED
    sent = s.heartbeat()
    assert {name for name, command in sent if isinstance(command, Resume)} == {"node-1", "node-2"}


def test_a_resume_to_a_node_without_a_rank_is_sent_again_while_the_others_train(s: Cluster) -> None:
    recovering(s)
    for name in ("node-0", "node-1"):
        s.resumed(name, 2)
    s.all_are(NodeActivity.TRAINING, 2)
    s.activity["node-3"] = NodeActivity.BUILDING
    idle = [name for name in NODES[:3] if name not in s.machine._c.planned]
    late = idle[0] if idle else "node-2"
    s.activity[late] = NodeActivity.QUIESCED
    assert (late, Resume) in kinds(s.heartbeat())


def test_a_lost_resumed_is_requested(s: Cluster) -> None:
    recovering(s)
    s.resumed("node-0", 2)
    s.all_are(NodeActivity.RESUMING, 2)
    s.activity["node-3"], s.activity["node-1"] = NodeActivity.BUILDING, NodeActivity.TRAINING
    assert kinds(s.heartbeat()) == {("node-1", RequestHello)}


@pytest.mark.parametrize("activity", [NodeActivity.BUILDING, NodeActivity.PREPARED])
def test_a_lost_trainer_is_asked_about(s: Cluster, activity: NodeActivity) -> None:
    s.activity["node-2"] = activity
    assert ("node-2", RequestHello) in kinds(s.heartbeat())
    s.hello("node-2", 102, job_id="job-1", prepared=activity is NodeActivity.PREPARED, generation=1)
    assert s.machine.phase is ClusterPhase.QUIESCING


def test_a_restore_that_failed_and_a_suspected_peer_are_asked_about(s: Cluster) -> None:
    s.acknowledged["node-1"] = {"suspects_peer": True}
    assert kinds(s.heartbeat()) == {("node-1", RequestHello)}
    s.say("node-1", PeerSuspected(generation=1, detail="reset"))
    assert s.heartbeat(1.0) == []
    recovering(s)
    s.all_are(NodeActivity.RESUMING, 2)
    s.activity["node-3"] = NodeActivity.BUILDING
    s.acknowledged = {name: {} for name in NODES}
    s.acknowledged["node-0"] = {"restore_failed": True}
    assert kinds(s.heartbeat()) == {("node-0", RequestHello)}


def test_a_lost_finished_is_requested() -> None:
    s = Cluster()
    s.running(steps=1)
    s.all_are(NodeActivity.FINISHED, 1)
    for name in NODES[:3]:
        s.say(name, Finished(generation=1, step=1, digests={}))
    assert kinds(s.heartbeat()) == {("node-3", RequestHello)}
    s.say("node-3", Finished(generation=1, step=1, digests={}))
    assert s.machine.phase is ClusterPhase.FINISHED
    assert {name for name, command in s.heartbeat() if isinstance(command, RequestHello)} == set(NODES)
    s.hello("node-1", 101, job_id="job-1", prepared=True, generation=1, training=True)
    assert [type(one.command) for one in s.commands()] == [Stop]


def test_a_prepare_is_sent_again_and_prepared_is_requested(s: Cluster) -> None:
    s.hello("node-3", 103, job_id="job-1", prepared=False, generation=1)
    s.job_ids["node-3"], s.activity["node-3"] = None, NodeActivity.NONE
    s.all_are(NodeActivity.QUIESCED, 2)
    for name in NODES[:3]:
        s.quiesced(name, 2, report(1))
    s.plan()
    s.all_are(NodeActivity.RESUMING, 2)
    s.activity["node-3"] = NodeActivity.NONE
    assert ("node-3", Prepare) in kinds(s.heartbeat())
    s.job_ids["node-3"], s.activity["node-3"] = "job-1", NodeActivity.PREPARED
    assert ("node-3", RequestHello) in kinds(s.heartbeat())


def test_a_lost_leaving_is_requested_and_a_lost_release_sent_again(s: Cluster) -> None:
    s.acknowledged["node-3"] = {"leaving": True}
    assert kinds(s.heartbeat()) == {("node-3", RequestHello)}
    s.say("node-3", Leaving(reason="spot notice"))
    s.check_drain()
    s.fire("join", 0.1)
    s.all_are(NodeActivity.QUIESCED, 2)
    for name in NODES:
        s.quiesced(name, 2, report(1))
    s.plan()
    for name in NODES:
        s.resumed(name, 2)
    s.all_are(NodeActivity.TRAINING, 2)
    s.activity["node-3"] = NodeActivity.IDLE
    s.step = 2
    s.stepped("node-0", 2, 2)
    assert ("node-3", Release) in kinds(s.heartbeat())


# --- heartbeats without contradiction ------------------------------------------------------------


def beaten(s: Cluster, node: str, **said: Any) -> list[type[Command]]:
    """Return the kinds of command to this node after heartbeats that say this."""
    generation = said.pop("generation", s.generations[node])
    s.generations[node] = generation
    s.activity[node] = said.pop("activity", NodeActivity.TRAINING)
    s.job_ids[node] = said.pop("job_id", "job-1")
    s.acknowledged[node] = said
    return sorted({type(command) for name, command in s.heartbeat() if name == node}, key=str)


def test_a_contradiction_that_ends_in_between_costs_nothing(s: Cluster) -> None:
    for activity in (NodeActivity.PREPARED, NodeActivity.TRAINING) * 4:
        s.activity["node-1"] = activity
        assert s.heartbeat(0.5) == []


def test_a_different_contradiction_has_its_own_time(s: Cluster) -> None:
    quiescing(s)
    for late in (True, False) * 4:
        s.generations["node-2"] = 1 if late else 2
        s.activity["node-2"] = NodeActivity.TRAINING
        assert s.heartbeat(0.25) == []


def test_an_order_is_not_repeated_that_arrived_before_the_tick() -> None:
    for last in (NodeActivity.QUIESCED, NodeActivity.TRAINING):
        s = Cluster()
        s.running()
        recovering(s)
        s.fire("tick")
        for activity, after_s in ((NodeActivity.QUIESCED, 0.0), (NodeActivity.QUIESCED, 0.5), (last, 0.1)):
            s.wait(after_s)
            said = Acknowledgement(activity=activity, job_id="job-1")
            s.say("node-2", Heartbeat(generation=2, committed=committed(1), acknowledgement=said))
        s.fire("tick")
        assert bool(s.commands(Resume)) is (last is NodeActivity.QUIESCED)


@pytest.mark.parametrize("end", ["it still lacks it", "it is lost", "it has obeyed"])
def test_an_order_is_repeated_only_to_a_node_that_is_there_and_lacks_it(end: str) -> None:
    s = Cluster()
    s.feed(BrokerConnected)
    s.hello("node-3", 103)
    s.feed(DrainRequested, request="d", node="node-3")
    s.fire("tick")
    for _ in range(3):
        said = Acknowledgement(activity=NodeActivity.NONE, job_id=None, leaving=True)
        s.say("node-3", Heartbeat(generation=0, committed=None, acknowledgement=said))
        s.wait(0.25)
    if end == "it is lost":
        s.feed(NodeVanished, node="node-3", incarnation=103, graceful=True)
    elif end == "it has obeyed":
        said = Acknowledgement(activity=NodeActivity.NONE, job_id=None)
        s.say("node-3", Heartbeat(generation=0, committed=None, acknowledgement=said))
    s.fire("tick")
    assert bool(s.commands(Release)) is (end == "it still lacks it")


def test_after_the_end_of_a_job_nothing_is_repeated_for_it() -> None:
    s = Cluster()
    s.running()
    s.hello("node-3", 103, job_id="job-1", prepared=False, generation=1)
    assert Prepare in {type(one.command) for one in s.commands()}
    s.feed(StopRequested, request="stop", job="tiny")
    assert beaten(s, "node-3", activity=NodeActivity.BUILDING) == [RequestHello], "a Stop will be the answer"
    assert beaten(s, "node-0", activity=NodeActivity.NONE, job_id=None) == []


def test_a_released_node_is_released_again_while_it_works_or_wants_to_leave() -> None:
    s = Cluster()
    s.feed(BrokerConnected)
    for number, name in enumerate(NODES):
        s.hello(name, 100 + number)
    s.feed(DrainRequested, request="d", node="node-3")
    assert [one.node for one in s.commands(Release)] == ["node-3"]
    s.all_are(NodeActivity.NONE, 0)
    s.job_ids = dict.fromkeys(NODES, None)
    assert beaten(s, "node-3", activity=NodeActivity.NONE, job_id=None) == []
    assert beaten(s, "node-3", activity=NodeActivity.NONE, job_id=None, leaving=True) == [Release]
    assert beaten(s, "node-3", activity=NodeActivity.BUILDING, job_id=None) == [Release]


def test_a_leaving_that_has_arrived_is_not_requested(s: Cluster) -> None:
    s.say("node-3", Leaving(reason="spot notice"))
    assert beaten(s, "node-3", leaving=True) == []


def test_without_a_job_a_node_is_asked_about_a_job_that_it_names_and_about_nothing_else() -> None:
    s = Cluster()
    s.feed(BrokerConnected)
    for number, name in enumerate(NODES):
        s.hello(name, 100 + number)
    s.all_are(NodeActivity.NONE, 0)
    s.job_ids = dict.fromkeys(NODES, None)
    assert s.heartbeat(2.0) == []
    assert beaten(s, "node-1", activity=NodeActivity.PREPARED, job_id="job-0") == [RequestHello]


def test_a_node_that_cannot_build_the_job_is_asked_about_another_job_that_it_names() -> None:
    s = Cluster()
    s.running(3)
    s.hello("node-3", 103)
    s.say("node-3", TrainerLost(generation=0, device=0, cause="unprepared", detail="no memory"))
    asked = beaten(s, "node-3", activity=NodeActivity.PREPARED, job_id="job-0", generation=0)
    assert RequestHello in asked


def test_the_first_health_check_is_requested_if_its_result_was_lost(s: Cluster) -> None:
    assert beaten(s, "node-1", health_number=1) == [RequestHello]
    s.say("node-1", HealthChecked(report=health_report(1)))
    assert beaten(s, "node-1", health_number=1) == []


def test_trainers_that_are_gone_are_asked_about_and_those_of_an_unprepared_node_are_not(s: Cluster) -> None:
    assert beaten(s, "node-2", activity=NodeActivity.NONE, job_id=None) == [RequestHello]
    other = Cluster()
    other.running(3)
    other.hello("node-3", 103)
    other.say("node-3", TrainerLost(generation=0, device=0, cause="unprepared", detail="no memory"))
    other.job_ids["node-3"] = None
    asked = beaten(other, "node-3", activity=NodeActivity.NONE, job_id=None, generation=0)
    assert asked in ([], [Prepare])


def test_a_node_that_reported_or_has_no_part_in_a_generation_is_asked_for_nothing(s: Cluster) -> None:
    quiescing(s)
    s.activity["node-2"] = NodeActivity.QUIESCING
    assert beaten(s, "node-0", activity=NodeActivity.TRAINING, generation=1) == [], "its report is here"
    s.hello("node-4", 104)
    s.say("node-4", Prepared(job_id="job-1", profile=None))
    for _ in range(6):
        said = Acknowledgement(activity=NodeActivity.PREPARED, job_id="job-1")
        s.say("node-4", Heartbeat(generation=0, committed=None, acknowledgement=said))
        assert not s.commands()
        s.wait(0.25)


def test_a_heartbeat_of_another_generation_is_no_contradiction(s: Cluster) -> None:
    recovering(s)
    s.all_are(NodeActivity.RESUMING, 2)
    s.activity["node-3"] = NodeActivity.BUILDING
    assert beaten(s, "node-2", activity=NodeActivity.QUIESCED, generation=1) == []
    assert beaten(s, "node-2", activity=NodeActivity.QUIESCED, generation=2) == [Resume]
    s.hello("node-4", 104)
    s.say("node-4", Prepared(job_id="job-1", profile=None))
    for _ in range(6):
        said = Acknowledgement(activity=NodeActivity.PREPARED, job_id="job-1")
        s.say("node-4", Heartbeat(generation=2, committed=None, acknowledgement=said))
        assert not s.commands()
        s.wait(0.25)
