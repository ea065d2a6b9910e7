"""Tests of errors that the job's code raises: when they end the job, and when they concern one node."""

import pytest

from planner.planner import Planner
from planner.values import Policy
from statemachine.cluster.machine import ClusterMachine
from statemachine.events import BrokerConnected, NodeVanished, SubmitRequested, TemplatesReady
from statemachine.hardware import HardwareLimits, QuarantineLimits
from statemachine.messages.cluster import TrainerLost
from statemachine.messages.common import Prepared
from statemachine.messages.values import ClusterPhase
from statemachine.timing import Timing
from tests.helpers.cluster_machine import events, restarted, running
from tests.helpers.transcripts import PROFILE, Coordination, job, report

TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in loss\nValueError: 7 classes\n'


def raises(s: Coordination, node: str, detail: str = TRACEBACK, generation: int | None = None) -> None:
    number = s.machine._c.nodes[node].obeyed if generation is None else generation
    s.say(node, TrainerLost(generation=number, device=0, cause="raised", detail=detail))


def outcome(s: Coordination) -> str:
    return str(s.machine.public_state()["outcome"])


def go_on(s: Coordination, step: int, *names: str, fresh: str = "", committing: bool = False) -> None:
    """Let these nodes report all layers, except a new one, and train on, while the others wait."""
    generation = s.machine.generation
    for name in names:
        s.quiesced(name, generation, report(0, held=()) if name == fresh else report(step))
    s.plan()
    for name in names:
        s.resumed(name, generation)
    if committing:
        s.stepped(names[0], generation, step + 1)


def test_an_error_of_every_node_fails_the_job_at_once_with_the_traceback() -> None:
    s = running(2)
    raises(s, "node-0")
    assert s.machine.phase is not ClusterPhase.FAILED
    raises(s, "node-1", generation=2)
    assert s.machine.phase is ClusterPhase.FAILED
    assert outcome(s).startswith(
        "the job's code raised in step 2 on all 2 nodes: ValueError: 7 classes; last: "
    )
    assert TRACEBACK in outcome(s)
    assert "JobFailed" in events(s)


def test_an_error_of_another_node_when_the_step_is_redone_fails_the_job() -> None:
    s = running()
    raises(s, "node-3")
    go_on(s, 1, "node-0", "node-1", "node-2")
    raises(s, "node-0")
    assert s.machine.phase is ClusterPhase.FAILED
    assert "in step 2 on node-3, and when it was redone on node-0: ValueError: 7 classes" in outcome(s)


@pytest.mark.parametrize("takeover", [False, True])
def test_an_error_that_is_reported_again_after_an_absence_counts_once(takeover: bool) -> None:
    s = running()
    raises(s, "node-3", generation=1)
    assert events(s).count("TrainerLost") == 1
    s.feed(NodeVanished, node="node-3", incarnation=103)
    if takeover:
        s = restarted(s)
    s.hello("node-3", 103, job_id="job-1", generation=1)
    assert s.machine._c.nodes["node-3"].alive
    raises(s, "node-3", generation=1)
    assert "TrainerLost" not in events(s)
    error = s.machine._c.repeated_error
    assert error is not None and error.tries == 1
    assert len(s.machine._c.nodes["node-3"].failures) == 1 and not s.machine._c.nodes["node-3"].ready
    s.say("node-3", Prepared(job_id="job-1", profile=None))
    raises(s, "node-3", generation=1)
    assert events(s).count("TrainerLost") == 1


def test_a_node_that_raises_alone_does_not_fail_a_job_that_continues_without_it() -> None:
    """This holds however often it raises; and the same words from another node in another step are a different
    error. (Here no node is set aside; ``test_quarantine`` has those tests.)
    """
    limits = HardwareLimits(quarantine=QuarantineLimits(failures=0))
    s = Coordination(ClusterMachine(Timing(), limits))
    s.running()
    names = ("node-0", "node-1", "node-2")
    for step in range(1, 12, 2):
        raises(s, "node-3")
        go_on(s, step, *names, committing=True)
        s.say("node-3", Prepared(job_id="job-1", profile=None))
        s.fire("join", 10.0)
        go_on(s, step + 1, *names, "node-3", fresh="node-3", committing=True)
    assert s.machine.phase is ClusterPhase.RUNNING
    raises(s, "node-0")
    assert s.machine.phase is ClusterPhase.QUIESCING


@pytest.mark.parametrize("detail", ["", "RuntimeError: CUDA error: an illegal memory access", "OSError: 5"])
def test_different_words_of_another_node_are_a_different_error(detail: str) -> None:
    s = running()
    raises(s, "node-3")
    go_on(s, 1, "node-0", "node-1", "node-2")
    raises(s, "node-0", detail)
    assert s.machine.phase is not ClusterPhase.FAILED


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("IndexError: index 17 is out of range for 16", "IndexError: index 1023 is out of range for 16"),
        ("TypeError: <Sample at 0x7f3a10> in step 2", "TypeError: <Sample at 0xdeadBEEF> in step 2"),
        ("ValueError: loss 1.5e-3 at row 4", "ValueError: loss 12 at row 0"),
    ],
)
def test_errors_that_differ_in_a_number_are_the_same_and_are_shown_as_they_are(
    first: str, second: str
) -> None:
    s = running()
    raises(s, "node-3", first)
    go_on(s, 1, "node-0", "node-1", "node-2")
    raises(s, "node-0", second)
    assert s.machine.phase is ClusterPhase.FAILED
    assert f"on node-3, and when it was redone on node-0: {second}; last: " in outcome(s)


def alone() -> Coordination:
    """Start a job on one node, which still has its state when it returns."""
    s, policy = Coordination(), Policy(global_batch=24, microbatch_rows=2, tolerate=0)
    s.planner = Planner(PROFILE, policy)
    s.feed(BrokerConnected)
    s.hello("node-0", 100)
    s.feed(SubmitRequested, request="r", job=job(policy=policy, steps=40))
    s.say("node-0", Prepared(job_id="job-1", profile=PROFILE))
    s.feed(TemplatesReady, job_id="job-1")
    go_on(s, 0, "node-0")
    return s


def retry(s: Coordination) -> None:
    s.say("node-0", Prepared(job_id="job-1", profile=None))
    s.fire("join", 10.0)
    go_on(s, 0, "node-0")


def test_a_job_on_one_node_is_tried_once_more() -> None:
    s = alone()
    raises(s, "node-0")
    assert s.machine.phase is ClusterPhase.PAUSED
    retry(s)
    raises(s, "node-0")
    assert s.machine.phase is ClusterPhase.FAILED
    assert "raised in step 1 again on node-0: ValueError: 7 classes" in outcome(s)


def test_a_step_that_always_raises_is_tried_a_limited_number_of_times() -> None:
    """The node keeps all state: without it the job would be lost at once."""
    s = alone()
    for words in ("one", "two"):
        raises(s, "node-0", f"ValueError: {words}")
        assert s.machine.phase is ClusterPhase.PAUSED
        retry(s)
    raises(s, "node-0", "ValueError: three")
    assert s.machine.phase is ClusterPhase.FAILED
    why = "raised 3 times in step 1 with no step committed in between, on node-0: ValueError: three"
    assert why in outcome(s)


def test_an_error_before_the_step_was_tried_again_is_no_second_try() -> None:
    s = alone()
    raises(s, "node-0")
    s.say("node-0", Prepared(job_id="job-1", profile=None))
    s.fire("join", 10.0)
    assert s.machine.phase is ClusterPhase.QUIESCING
    raises(s, "node-0")
    assert s.machine.phase is ClusterPhase.PAUSED


def test_a_node_that_raises_again_when_others_redo_the_step_with_it_is_alone_with_its_error() -> None:
    s = running()
    raises(s, "node-3")
    s.say("node-3", Prepared(job_id="job-1", profile=None))
    go_on(s, 1, "node-0", "node-1", "node-2")
    s.feed(NodeVanished, node="node-2", incarnation=102)
    go_on(s, 1, "node-0", "node-1", "node-3", fresh="node-3")
    assert "node-3" in s.machine._c.planned
    raises(s, "node-3")
    assert s.machine.phase is ClusterPhase.QUIESCING


def test_a_step_that_survivors_rolled_forward_to_was_computed_without_the_error() -> None:
    s = running()
    raises(s, "node-3")
    s.quiesced("node-0", 2, report(2, held=(0, 1)))
    s.quiesced("node-1", 2, report(1, held=(2, 3), ready=True))
    s.quiesced("node-2", 2, report(2, held=(0, 1)))
    s.plan()
    assert s.machine.cluster.progress.known_step == 2
    raises(s, "node-0")
    assert s.machine.phase is ClusterPhase.QUIESCING, "this is the first error in step 3"


def test_an_error_that_fails_the_job_counts_against_no_node() -> None:
    s = running()
    for node, generation in (("node-3", 1), ("node-0", 2)):
        raises(s, node)
        if node == "node-3":
            go_on(s, 1, "node-0", "node-1", "node-2")
        assert s.machine.generation == generation + (node == "node-3")
    assert s.machine.phase is ClusterPhase.FAILED
    assert not any(node.failures for node in s.machine._c.nodes.values())


def test_the_step_that_raised_is_known_after_a_crash_and_dropped_with_the_job() -> None:
    s = running()
    raises(s, "node-3")
    go_on(s, 1, "node-0", "node-1", "node-2")
    s = restarted(s)
    s.feed(BrokerConnected)
    raises(s, "node-1")
    assert s.machine.phase is ClusterPhase.FAILED
    assert "on node-3, and when it was redone on node-1" in outcome(s)
