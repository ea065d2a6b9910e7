"""Tests that compare the main scenarios of the cluster machine with their transcripts, word for word (see
``transcripts``).
"""

from statemachine.effects import AnswerRequest
from statemachine.events import BrokerConnected, DrainRequested, NodeVanished, SubmitRequested, TemplatesReady
from statemachine.messages.cluster import TrainerLost
from statemachine.messages.common import Finished, Prepared
from tests.helpers.transcripts import PROFILE, Coordination, job, report


def test_start_and_finish() -> None:
    s = Coordination()
    s.feed(BrokerConnected)
    s.note("two nodes come, a job is submitted: one of them measures the model")
    s.hello("node-0", 100)
    s.hello("node-1", 101)
    s.feed(SubmitRequested, request="r", job=job(steps=2))
    s.say("node-1", Prepared(job_id="job-1", profile=None))
    s.say("node-0", Prepared(job_id="job-1", profile=PROFILE))
    s.wait(0.5)
    s.feed(TemplatesReady, job_id="job-1")
    s.note("the first generation")
    s.wait(0.01)
    s.quiesced("node-0", 1, report())
    s.quiesced("node-1", 1, report())
    s.plan()
    s.wait(0.05)
    s.resumed("node-0", 1)
    s.resumed("node-1", 1)
    s.wait(0.1)
    s.stepped("node-0", 1, 1)
    s.wait(0.1)
    s.stepped("node-0", 1, 2)
    s.note("the end")
    s.say("node-0", Finished(generation=1, step=2, digests={0: "aa", 1: "bb"}, kind="cpu"))
    s.say("node-1", Finished(generation=1, step=2, digests={2: "cc", 3: "dd"}, kind="cpu"))
    s.compare("start_and_finish")


def test_node_lost() -> None:
    s = Coordination()
    s.running(4)
    s.note("node-3 is killed while step 2 is computed")
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.wait(0.004)
    s.quiesced("node-0", 2, report(1, held=(0, 1)))
    s.quiesced("node-1", 2, report(1, held=(2, 3), ready=True))
    s.quiesced("node-2", 2, report(1, held=(0, 1)))
    s.plan()
    s.wait(0.05)
    for name in ("node-0", "node-1", "node-2"):
        s.resumed(name, 2)
    s.wait(0.1)
    s.stepped("node-0", 2, 2)
    s.compare("node_lost")


def test_roll_forward() -> None:
    s = Coordination()
    s.running(4)
    s.note("node-3 dies while step 2 commits: node-1 has applied it, the others have its gradients")
    s.feed(NodeVanished, node="node-3", incarnation=103)
    s.quiesced("node-0", 2, report(1, held=(0, 1), ready=True))
    s.quiesced("node-1", 2, report(2, held=(2, 3)))
    s.quiesced("node-2", 2, report(1, held=(0, 1), ready=True))
    s.plan()
    s.compare("roll_forward")


def test_second_failure_during_a_recovery() -> None:
    s = Coordination()
    s.running(4)
    s.note("node-3 dies, and node-2 while the plan is made")
    s.feed(NodeVanished, node="node-3", incarnation=103)
    for name in ("node-0", "node-2"):
        s.quiesced(name, 2, report(1, held=(0, 1)))
    s.quiesced("node-1", 2, report(1, held=(2, 3)))
    late = s.last
    s.feed(NodeVanished, node="node-2", incarnation=102)
    s.note("the plan for three comes too late")
    s.last = late
    s.plan()
    s.quiesced("node-0", 3, report(1, held=(0, 1)))
    s.quiesced("node-1", 3, report(1, held=(2, 3)))
    s.plan()
    s.compare("second_failure")


def test_join() -> None:
    s = Coordination()
    s.running(3)
    s.note("a new node builds the model while the others train")
    s.hello("node-3", 103)
    s.wait(1.0)
    s.say("node-3", Prepared(job_id="job-1", profile=None))
    s.note("it joins at a step boundary")
    s.fire("join", 0.1)
    s.quiesced("node-3", 2, report())
    s.wait(0.05)
    s.stepped("node-0", 1, 2)
    for name, held in (("node-0", (0, 1)), ("node-1", (2, 3)), ("node-2", (3,))):
        s.quiesced(name, 2, report(2, held=held))
    s.plan()
    for name in ("node-0", "node-1", "node-2", "node-3"):
        s.resumed(name, 2)
    s.wait(0.1)
    s.stepped("node-0", 2, 3)
    s.compare("join")


def test_drain() -> None:
    s = Coordination()
    s.running(4)
    s.feed(DrainRequested, request="d", node="node-3")
    s.check_drain()
    s.fire("join", 0.1)
    for name, held in (("node-0", (0, 1)), ("node-1", (2, 3)), ("node-2", (0, 1)), ("node-3", (2, 3))):
        s.quiesced(name, 2, report(2, held=held))
    s.plan()
    for name in ("node-0", "node-1", "node-2"):
        s.resumed(name, 2)
    s.note("it is released when the others have committed a step without it")
    s.wait(0.1)
    s.stepped("node-0", 2, 3)
    s.compare("drain")
    s.feed(DrainRequested, request="again", node="node-3")
    assert s.one(AnswerRequest).detail == "node-3 is released already"


def test_trainer_lost_and_back() -> None:
    s = Coordination()
    s.running(4)
    s.say("node-3", TrainerLost(generation=1, device=0, cause="exited", detail="signal 9"))
    for name, held in (("node-0", (0, 1)), ("node-1", (2, 3)), ("node-2", (0, 1))):
        s.quiesced(name, 2, report(1, held=held))
    s.plan()
    for name in ("node-0", "node-1", "node-2"):
        s.resumed(name, 2)
    s.stepped("node-0", 2, 2)
    s.note("its trainers are back")
    s.wait(0.8)
    s.say("node-3", Prepared(job_id="job-1", profile=None))
    s.fire("join", 0.1)
    s.compare("trainer_lost_and_back")
