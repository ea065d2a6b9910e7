"""Tests that compare one readable transcript for each row of the failure table in ARCHITECTURE.md (see
``transcripts``).

The transcripts of some rows are in ``test_cluster_transcripts`` and ``test_snapshots``. Every machine is
driven through its public interface only: events go in, effects come out.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from planner.errors import InfeasibleError, StateLostError, TooFewNodesError
from statemachine.cluster.machine import ClusterMachine
from statemachine.effects import ComparePlan, ComputePlan, Effect
from statemachine.election.leadership import (
    ClaimTerm,
    FollowerSessionOpened,
    JournalChecked,
    Leader,
    LeaderHeartbeatSeen,
    LeaderSeen,
    LeaderSessionLost,
    LeaderSessionOpened,
    LeaderVanished,
    Peer,
    PeerSeen,
    PeerVanished,
)
from statemachine.election.machine import ElectionMachine
from statemachine.events import (
    BrokerConnected,
    BrokerDisconnected,
    NodeVanished,
    PlanCompared,
    PlanImpossible,
    ReadmitRequested,
    SubmitRequested,
)
from statemachine.messages.cluster import Acknowledgement, HealthChecked, Heartbeat, Stepped, TrainerLost
from statemachine.messages.common import PeerSuspected, Prepared
from statemachine.messages.values import CommittedStep, NodeActivity, NotFinite, UpdatePolicy, Vote
from statemachine.timing import Timing
from tests.helpers.transcripts import (
    GOLDEN,
    POLICY,
    Coordination,
    Script,
    committed,
    facts,
    health_report,
    job,
    report,
)

HELD = {"node-0": (0, 1), "node-1": (2, 3), "node-2": (0, 1), "node-3": (2, 3)}
"""Layers of each node under the first plan for four nodes."""


ARCHITECTURE = Path(__file__).parents[2] / "ARCHITECTURE.md"
WITHOUT_HEADING = {
    "a_rollback",
    "drain",
    "node_lost",
    "roll_forward",
    "second_failure",
    "trainer_lost_and_back",
}
"""Transcripts that were written before headings named the row."""


def failure_rows() -> dict[str, str]:
    """Return the last cell of each row of the failure table, by its first cell."""
    section = ARCHITECTURE.read_text(encoding="utf-8").split("\n## Failures\n")[1].split("\n## ")[0]
    rows = [line.strip().strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    assert [cell.strip() for cell in rows[0]][-1] == "transcript"
    return {row[0].strip(): row[-1].strip() for row in rows[2:]}


def linked(cell: str) -> list[str]:
    """Return the names of the transcripts that a cell links."""
    return re.findall(r"\(tests/statemachine/golden/(\w+)\.txt\)", cell)


@pytest.mark.parametrize(("row", "cell"), failure_rows().items(), ids=failure_rows().keys())
def test_each_row_of_the_failure_table_has_a_transcript(row: str, cell: str) -> None:
    names = linked(cell)
    assert names or re.match(r"none: \w+ \w+", cell), (
        "link a transcript, or give the reason why there is none"
    )
    for name in names:
        text = (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")
        assert name in WITHOUT_HEADING or text.startswith(f"# Failure: {row}\n")


def test_each_transcript_of_a_failure_is_linked_from_the_table() -> None:
    every = {name for cell in failure_rows().values() for name in linked(cell)}
    headed = {
        path.stem
        for path in GOLDEN.glob("*.txt")
        if path.read_text(encoding="utf-8").startswith("# Failure: ")
    }
    assert headed | WITHOUT_HEADING == every


class Failing(Coordination):
    """Four nodes train in generation 1 and have committed step 1."""

    def __init__(
        self, nodes: int = 4, steps: int = 10, timing: Timing | None = None, **job_values: Any
    ) -> None:
        super().__init__(ClusterMachine(timing) if timing is not None else None)
        self.weighing: ComparePlan | None = None
        """The last request for a comparison of plans."""
        self.running(nodes, steps, **job_values)

    def took(self, effects: list[Effect]) -> list[Effect]:
        for effect in effects:
            if isinstance(effect, ComparePlan):
                self.weighing = effect
        return super().took(effects)

    def heartbeats(
        self,
        *names: str,
        generation: int = 1,
        step: int = 1,
        slowness: Mapping[str, float] = MappingProxyType({}),
    ) -> dict[str, Heartbeat]:
        """Return a heartbeat for each of these nodes.

        :param slowness: factor by which the trainers of a node are slower; all others take what the
            profile says.
        """
        return {
            name: Heartbeat(
                generation=generation,
                committed=committed(step),
                microbatch_ms=(30.0 * len(HELD[name]) * slowness.get(name, 1.0),),
            )
            for name in names
        }

    def reports(self, generation: int, *names: str, step: int = 1) -> None:
        for name in names:
            self.quiesced(name, generation, report(step, held=HELD[name]))

    def reject_plan(self) -> None:
        """Answer the ComputePlan among the last effects with the planner's rejection."""
        asked: ComputePlan = self.one(ComputePlan)
        answer: dict[str, Any] = {
            "generation": asked.generation,
            "too_few": True,
            "reason": "1 of 2 nodes is here",
        }
        with pytest.raises((InfeasibleError, TooFewNodesError, StateLostError)) as rejected:
            self.planner.plan(asked.situation)
        if isinstance(rejected.value, StateLostError):
            answer |= {"too_few": False, "reason": str(rejected.value), "lost_layers": rejected.value.layers}
        self.feed(PlanImpossible, **answer)

    def resume_all(self, generation: int, *names: str) -> None:
        for name in names:
            self.resumed(name, generation)


def test_host_gone() -> None:
    s = Failing()
    s.failure(
        "host gone, network cut",
        "Nothing is heard from node-3 any more. The coordinator notices its silence and continues without it.",
        "When it is heard again under the same incarnation, it is fenced, since the others resumed without it.",
    )
    s.heartbeats_for(4.5, s.heartbeats("node-0", "node-1", "node-2"))
    s.states()
    s.reports(2, "node-0", "node-1", "node-2")
    s.plan()
    s.resume_all(2, "node-0", "node-1", "node-2")
    s.wait(0.1)
    s.stepped("node-0", 2, 2)
    s.states()
    s.note("the network is back: the node is heard again and returns as a new incarnation")
    s.say("node-3", Heartbeat(generation=1, committed=committed(1)))
    s.hello("node-3", 203)
    s.states()
    s.compare("host_gone")


def test_code_raises() -> None:
    s = Failing()
    s.failure(
        "training code raises",
        "A trainer of node-3 raises in step 2. The others redo the step without it.",
        "The same error in the same step on another node means that the code is at fault: the job fails.",
    )
    detail = "Traceback (most recent call last):\n  ...\nValueError: token 50257 is outside of the vocabulary"
    s.say("node-3", TrainerLost(generation=1, device=0, cause="raised", detail=detail))
    s.states()
    s.reports(2, "node-0", "node-1", "node-2")
    s.plan()
    s.resume_all(2, "node-0", "node-1", "node-2")
    s.note("step 2 is redone, and the same error occurs on node-1")
    s.say("node-1", TrainerLost(generation=2, device=0, cause="raised", detail=detail))
    s.states()
    s.compare("code_raises")


def test_values_not_finite() -> None:
    s = Failing(steps=100, updates=UpdatePolicy(max_skipped=3))
    s.failure(
        "values are not finite",
        "The loss is NaN from step 2 on: every rank skips the update, and the vote says where the first NaN was.",
        "This is no failure of a node, so nothing is recovered, and the count goes on when a node is lost.",
    )
    place = NotFinite(layer=1, name="blocks.0 (Block)", value="output", nodes=("node-0", "node-2"))
    nothing = Vote(loss=2.0, gradient_norm=1.0, skipped=True, not_finite=place)
    s.say("node-0", Stepped(generation=1, steps=(CommittedStep(step=2, vote=nothing),), step_s=0.1))
    s.say("node-1", Stepped(generation=1, steps=(CommittedStep(step=3, vote=nothing),), step_s=0.1))
    s.feed(NodeVanished, node="node-3", incarnation=103)
    for name in ("node-0", "node-1", "node-2"):
        s.quiesced(name, 2, report(3))
    s.plan()
    s.resume_all(2, "node-0", "node-1", "node-2")
    s.states()
    s.note("the third step in a row")
    s.say("node-2", Stepped(generation=2, steps=(CommittedStep(step=4, vote=nothing),), step_s=0.1))
    s.states()
    s.compare("values_not_finite")


def test_several_nodes_at_once() -> None:
    s = Failing()
    s.failure(
        "several nodes at once",
        "node-1 and node-2 die while reports come in: both losses share generation 2.",
        "node-3 dies when all have reported and the planner already counts on it: that takes generation 3.",
    )
    s.feed(NodeVanished, node="node-1", incarnation=101)
    s.reports(2, "node-2")
    s.feed(NodeVanished, node="node-2", incarnation=102)
    s.states()
    s.reports(2, "node-0", "node-3")
    s.states()
    s.note("the next node is lost after the last report")
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.states()
    s.compare("several_nodes_at_once")


def test_no_answer_to_quiesce() -> None:
    s = Failing()
    s.failure(
        "node does not answer Quiesce",
        "node-3 dies. node-1 never reports: its heartbeats say that Quiesce has not reached it, so it may return once",
        "with its state. node-2 has obeyed and never reports: it is fenced.",
    )
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.reports(2, "node-0")
    s.heartbeats_for(5.0, {**s.heartbeats("node-0", "node-2", generation=2), **s.heartbeats("node-1")})
    s.states()
    s.note("the others continue without both")
    s.reports(3, "node-0")
    s.states()
    s.note("node-1 is heard again: nothing was resumed without it, so it counts again")
    s.say("node-1", Heartbeat(generation=1, committed=committed(1)))
    s.hello("node-1", 101, job_id="job-1", prepared=True, generation=1, training=True)
    s.reports(4, "node-0", "node-1")
    s.plan()
    s.states()
    s.compare("no_answer_to_quiesce")


def test_message_lost() -> None:
    s = Failing()
    s.failure(
        "a message is lost",
        "The Resume to node-2 and the Resumed of node-1 are lost. Heartbeats show both: node-2 still waits for its",
        "Resume, and node-1 trains. The order is sent again, and a RequestHello asks for the report.",
    )
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.reports(2, "node-0", "node-1", "node-2")
    s.plan()
    s.resumed("node-0", 2)
    s.states()
    doing = {
        "node-0": NodeActivity.TRAINING,
        "node-1": NodeActivity.TRAINING,
        "node-2": NodeActivity.QUIESCED,
    }
    heartbeats = {
        name: Heartbeat(
            generation=2,
            committed=committed(1),
            acknowledgement=Acknowledgement(activity=activity, job_id="job-1"),
        )
        for name, activity in doing.items()
    }
    s.heartbeats_for(1.0, heartbeats)
    s.note("both messages arrive")
    s.hello("node-1", 101, job_id="job-1", prepared=True, generation=2, training=True)
    s.resumed("node-1", 2)
    s.resumed("node-2", 2)
    s.states()
    s.compare("message_lost")


def test_group_does_not_form() -> None:
    s = Failing()
    s.failure(
        "the group does not form",
        "node-2 obeys each Resume and never sends Resumed. The first time all try again; the second time it is fenced.",
    )
    s.feed(NodeVanished, node="node-3", incarnation=103)
    for generation in (2, 3):
        s.note(f"node-2 does not resume generation {generation}")
        s.reports(generation, "node-0", "node-1", "node-2")
        s.plan()
        s.resume_all(generation, "node-0", "node-1")
        s.heartbeats_for(60.0, s.heartbeats("node-0", "node-1", "node-2", generation=generation))
        s.states()
    s.compare("group_does_not_form")


def test_too_few_nodes() -> None:
    s = Failing(nodes=2)
    s.failure(
        "too few nodes left",
        "node-1 is cut off, and the model does not fit on node-0 alone: the job pauses. It continues when node-1 is",
        "heard again and still has its layers.",
    )
    s.heartbeats_for(4.5, s.heartbeats("node-0"))
    s.reports(2, "node-0")
    s.reject_plan()
    s.states()
    s.note("node-1 is heard again")
    s.hello("node-1", 101, job_id="job-1", prepared=True, generation=1, training=True)
    s.heartbeats_for(0.25, s.heartbeats(*s.incarnations))
    s.reports(3, "node-0", "node-1")
    s.plan()
    s.resume_all(3, "node-0", "node-1")
    s.stepped("node-0", 3, 2)
    s.states()
    s.compare("too_few_nodes")


def test_layers_lost() -> None:
    s = Failing()
    s.failure(
        "no live copy of a layer",
        "node-1 and node-3 alone have layers 2 and 3. Their last wills do not prove that their memory is gone, so",
        "the job waits 30 s for them. Without a snapshot and a checkpoint it fails then, and names the layers.",
    )
    s.feed(NodeVanished, node="node-1", incarnation=101)
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.reports(2, "node-0", "node-2")
    s.reject_plan()
    s.states()
    s.note("neither returns")
    s.heartbeats_for(30.0, s.heartbeats("node-0", "node-2", generation=2))
    s.states()
    s.compare("layers_lost")


def test_coordinator_restarted() -> None:
    s = Failing()
    s.failure(
        "coordinator dies",
        "It is killed and started again. It reads its journal, asks every node for a Hello, and compares their",
        "answers with what it knows; it requests the steps that were committed meanwhile.",
    )
    journal = json.loads(json.dumps(s.machine.durable_state()))
    s.wait(2.0)
    s.note("the new process reads the journal and reaches the broker")
    s.machine, effects = ClusterMachine.restore(Timing(), journal, s.now, "restart")
    s.due.clear()
    s.took(effects)
    s.feed(BrokerConnected)
    s.note("every node reports that it trains under generation 1: nothing has to be repeated")
    for name in HELD:
        s.hello(name, s.incarnations[name], job_id="job-1", prepared=True, generation=1, training=True)
    s.states()
    s.note("a heartbeat names a newer step than the journal: the steps in between are requested")
    s.say("node-0", Heartbeat(generation=1, committed=committed(4)))
    s.stepped("node-0", 1, 2, 3, 4)
    s.states()
    s.compare("coordinator_restarted")


def test_broker_restarted() -> None:
    s = Failing()
    s.failure(
        "broker dies",
        "Every session breaks and no deadline runs. When the broker is back, no node is declared lost for 3 s;",
        "a node that has not been heard by then is lost.",
    )
    s.heartbeats_for(3.0, s.heartbeats(*HELD))
    s.feed(BrokerDisconnected)
    s.wait(20.0)
    s.feed(BrokerConnected)
    for name in ("node-0", "node-1", "node-2"):
        s.hello(name, s.incarnations[name], job_id="job-1", prepared=True, generation=1, training=True)
    s.states()
    s.heartbeats_for(3.5, s.heartbeats("node-0", "node-1", "node-2"))
    s.states()
    s.compare("broker_restarted")


def test_broker_stood_still() -> None:
    s = Failing()
    s.failure(
        "broker is suspended for more than 7.5 s, and continues",
        "It ends all sessions and publishes all last wills. For 3 s a last will proves nothing: its node is asked,",
        "and lost only if it stays silent.",
    )
    s.heartbeats_for(3.0, s.heartbeats(*HELD))
    s.feed(BrokerDisconnected)
    s.wait(8.0)
    s.feed(BrokerConnected)
    for name in HELD:
        s.feed(NodeVanished, node=name, incarnation=s.incarnations[name])
    s.states()
    s.note("all but node-3 answer")
    for name in ("node-0", "node-1", "node-2"):
        s.hello(name, s.incarnations[name], job_id="job-1", prepared=True, generation=1, training=True)
    s.heartbeats_for(3.5, s.heartbeats("node-0", "node-1", "node-2"))
    s.states()
    s.compare("broker_stood_still")


def test_node_cut_off_and_healed() -> None:
    s = Failing()
    s.failure(
        "a node is cut off and heals",
        "node-2 and node-3 are declared OFFLINE. node-2 is heard before anything was resumed: it returns with its",
        "state. node-3 is heard after that: it is fenced and returns as a new incarnation.",
    )
    s.heartbeats_for(4.5, s.heartbeats("node-0", "node-1"))
    s.states()
    s.reports(2, "node-0")
    s.note("node-2 is heard again")
    s.say("node-2", Heartbeat(generation=1, committed=committed(1)))
    s.hello("node-2", 102, job_id="job-1", prepared=True, generation=1, training=True)
    s.reports(2, "node-2", "node-1")
    s.states()
    s.plan()
    s.resume_all(2, "node-0", "node-1", "node-2")
    s.states()
    s.note("node-3 is heard again")
    s.say("node-3", Heartbeat(generation=1, committed=committed(1)))
    s.hello("node-3", 203)
    s.states()
    s.compare("node_cut_off_and_healed")


def test_connection_broken() -> None:
    s = Failing()
    s.failure(
        "a connection between live trainers breaks",
        "A trainer of node-0 reports it. No node is found dead, hung or silent, and no step is committed,",
        "so the same nodes form a new group.",
    )
    s.heartbeats_for(3.0, s.heartbeats(*HELD))
    s.say("node-0", PeerSuspected(generation=1, detail="the connection to node-1 was reset"))
    s.states()
    s.heartbeats_for(3.0, s.heartbeats(*HELD))
    s.states()
    s.reports(2, *HELD)
    s.plan()
    s.resume_all(2, *HELD)
    s.stepped("node-0", 2, 2)
    s.states()
    s.compare("connection_broken")


def test_coordinator_cut_off() -> None:
    s = Failing()
    s.failure(
        "broker or coordinator host cut off",
        "No node at all is heard: none is declared silent. After the first message the others have 3 s to be heard.",
    )
    s.heartbeats_for(4.0, s.heartbeats(*HELD))
    s.heartbeats_for(20.0, {})
    s.states()
    s.note("the network heals, but node-3 stays silent")
    s.heartbeats_for(3.5, s.heartbeats("node-0", "node-1", "node-2"))
    s.states()
    s.compare("coordinator_cut_off")


def test_node_removed() -> None:
    s = Failing(timing=Timing(remove_offline_s=60.0))
    s.failure(
        "a node never comes back (names that are new each time)",
        "node-3 is lost and the others continue without it. After remove_offline_s (a minute here) it is "
        "removed.",
    )
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.reports(2, "node-0", "node-1", "node-2")
    s.plan()
    s.resume_all(2, "node-0", "node-1", "node-2")
    s.stepped("node-0", 2, 2)
    s.states()
    s.note("a minute later")
    s.heartbeats_for(60.5, s.heartbeats("node-0", "node-1", "node-2", generation=2, step=2))
    s.states()
    s.compare("node_removed")


def test_same_name_twice() -> None:
    s = Failing()
    s.failure(
        "same name twice",
        "A second node named node-3 sends Hello while the first one is alive: it is rejected, and asks again every",
        "second. When the first one is silent, the second takes its place.",
    )
    s.heartbeats_for(3.0, s.heartbeats(*HELD))
    s.hello("node-3", 999, facts=facts(host="10.0.0.9"))
    s.incarnations["node-3"] = 103
    s.heartbeats_for(1.0, s.heartbeats(*HELD))
    s.hello("node-3", 999, facts=facts(host="10.0.0.9"))
    s.states()
    s.note("the first one falls silent")
    s.incarnations["node-3"] = 103
    s.heartbeats_for(1.6, s.heartbeats("node-0", "node-1", "node-2"))
    s.hello("node-3", 999, facts=facts(host="10.0.0.9"))
    s.states()
    s.compare("same_name_twice")


def test_slow_node() -> None:
    s = Failing(steps=1000)
    s.failure(
        "a node computes slowly",
        "node-3 computes at a quarter of the others' speed for 5 s: it is a straggler. The best plan with this speed",
        "is compared and saves enough, so all stop at a step boundary, and its pipeline gets fewer microbatches.",
    )
    s.heartbeats_for(4.0, s.heartbeats(*HELD))
    s.heartbeats_for(6.0, s.heartbeats(*HELD, slowness={"node-3": 4.0}))
    asked = s.weighing
    assert asked is not None
    present_s, possible_s = s.planner.compare_iteration_s(asked.situation)
    s.feed(PlanCompared, generation=asked.generation, current_s=present_s, best_s=possible_s)
    s.states()
    s.reports(2, *HELD, step=2)
    s.plan()
    s.resume_all(2, *HELD)
    s.stepped("node-0", 2, 3)
    s.states()
    s.compare("slow_node")


def test_fewer_devices() -> None:
    s = Coordination()
    s.failure(
        "a device is gone for good",
        "The nodes of the job have two devices. node-0 is restarted with one of them: it is rejected, and the reason",
        "says what to do.",
    )
    s.feed(BrokerConnected)
    s.hello("node-0", 100, facts=facts(devices=2))
    s.feed(SubmitRequested, request="r", job=job(policy=msgspec.structs.replace(POLICY, devices_per_node=2)))
    s.feed(NodeVanished, node="node-0", incarnation=100)
    s.hello("node-0", 200, facts=facts(devices=1))
    s.states()
    s.compare("fewer_devices")


# --- election ------------------------------------------------------------------------------------

ANNA, BERT = Peer(name="anna", incarnation=1, priority=1), Peer(name="bert", incarnation=2)


def test_bad_device() -> None:
    row = "a device computes wrongly, or slowly, from the start"
    s = Failing(3)
    s.failure(row, "Three nodes train. A node that joins tests its device before it may take part.")
    checks = msgspec.structs.replace(facts(), checks_health=True)
    s.note("the product of its device is wrong: it is set aside, and the others train on")
    s.hello("node-3", 103, facts=checks)
    wrong = "a product of float32 matrices is wrong in 3 of 256 rows, first in row 7"
    s.say("node-3", HealthChecked(report=health_report(1, 100.0, wrong=wrong)))
    s.wait(1.0)
    s.say("node-3", Prepared(job_id="job-1", profile=None))
    s.note("after a user readmits it, it is tested again before it takes part")
    s.feed(ReadmitRequested, request="r", node="node-3")
    s.fire("tick", 0.25)
    s.say("node-3", HealthChecked(report=health_report(2, 100.0)))
    s.note("node-4 is as exact as the others, and slow: its check is repeated, and it is set aside")
    for number, name in enumerate(("node-0", "node-1", "node-2")):
        s.hello(
            name,
            100 + number,
            job_id="job-1",
            prepared=True,
            generation=1,
            training=True,
            health=health_report(1, 90.0),
        )
    s.hello("node-4", 104, facts=checks, health=health_report(1, 20.0))
    s.fire("tick", 0.25)
    s.say("node-4", HealthChecked(report=health_report(2, 21.0)))
    s.compare("bad_device")


class Election(Script):
    """Election machine of one coordinator that follows or leads."""

    machine: ElectionMachine

    def use(self, machine: ElectionMachine) -> None:
        """Continue with the machine of another coordinator."""
        self.machine, self.due = machine, {}

    def follow(self) -> None:
        """Let bert be a standby while anna leads in term 4."""
        self.use(ElectionMachine(BERT, Timing()))
        self.feed(LeaderSeen, leader=Leader(term=4, name="anna", incarnation=1))
        self.feed(PeerSeen, peer=ANNA)
        self.feed(FollowerSessionOpened)
        self.role()

    def claim(self) -> None:
        """Send the record back that the last effects published, as the broker does."""
        self.feed(LeaderSeen, leader=self.one(ClaimTerm).leader)

    def role(self) -> None:
        self.write(f"= {self.machine.me.name} is {self.machine.role}, term {self.machine.term}")


def test_leader_lost() -> None:
    s = Election(ElectionMachine(BERT, Timing()))
    s.failure(
        "the leading coordinator dies, hangs or is cut off",
        "anna leads in term 4, and bert is a standby. The broker grants the leader session to one client at a time:",
        "when bert opens it, nothing that anna still sends gets through.",
    )
    s.note("anna is killed: its last will is enough")
    s.follow()
    s.feed(LeaderVanished, incarnation=1, graceful=False)
    s.role()
    s.wait(0.02)
    s.feed(LeaderSessionOpened, found=Leader(term=4, name="anna", incarnation=1), newest=(4, 17))
    s.claim()
    s.role()
    s.note("anna hangs: bert acts after leader_silence_s without a heartbeat")
    s.follow()
    s.wait(1.0)
    s.feed(LeaderHeartbeatSeen, leader=Leader(term=4, name="anna", incarnation=1))
    s.pass_time(Timing().leader_silence_s)
    s.role()
    s.feed(LeaderSessionOpened, found=Leader(term=4, name="anna", incarnation=1), newest=(4, 17))
    s.claim()
    s.role()
    s.note("anna's view, which was cut off: it must not reuse its state")
    s.use(ElectionMachine(ANNA, Timing()))
    s.feed(FollowerSessionOpened)
    s.feed(LeaderSessionOpened, found=Leader(term=3, name="carl", incarnation=9), newest=(3, 5))
    s.claim()
    s.feed(PeerSeen, peer=BERT)
    s.role()
    s.feed(LeaderSessionLost, why="another client took the session")
    s.role()
    s.feed(LeaderSeen, leader=Leader(term=5, name="bert", incarnation=2))
    s.role()
    s.compare("leader_lost")


def test_standby_of_another_version() -> None:
    s = Election(ElectionMachine(BERT, Timing()))
    s.failure(
        "a standby is of another version",
        "bert cannot read the journal of anna, which leads: it announces that it is ineligible.",
        "anna dies and no other coordinator is present: bert reports that none leads, and waits.",
    )
    s.follow()
    s.feed(JournalChecked, problem="the journal is of schema 9, and this program reads 8")
    s.role()
    s.note("anna dies")
    s.feed(LeaderVanished, incarnation=1, graceful=False)
    s.feed(PeerVanished, incarnation=1, name="anna")
    s.pass_time(10.0)
    s.role()
    s.note("anna's view: bert looks like a standby but is ineligible")
    s.use(ElectionMachine(ANNA, Timing()))
    s.feed(FollowerSessionOpened)
    s.feed(LeaderSessionOpened, found=None, newest=(3, 5))
    s.claim()
    s.feed(PeerSeen, peer=replace(BERT, ineligible="the journal is of schema 9, and this program reads 8"))
    s.role()
    s.compare("standby_of_another_version")
