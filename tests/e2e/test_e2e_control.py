"""Training while its control plane is disturbed: coordinator and broker die; nodes join, leave, are cut off,
and share a name.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from ftd.cli.trace import request_traces
from ftd.errors import FtdError, RequestRejected
from ftd.observe.view.trace import align_traces
from ftd.transport.address import ClusterAddress
from ftd.transport.wire.public import TraceRequest
from tests.helpers.playground import HOME, Playground, Run, nodes_of, tiny_job

SameLosses = Callable[[Run], None]


def test_joins_drains_and_leaves_recompute_nothing(
    ground: Playground, tmp_path: Path, same_losses: SameLosses
) -> None:
    run = ground.submit(tiny_job(tmp_path, two_node_replicas=True, delay_s=0.02))
    ground.inject(do="start", node="node-4")
    joined = ground.until_recovery("node_joined")
    assert nodes_of(joined["pipelines_after"]) == [2, 3]
    assert ground.drain("node-0") == "leaving"
    drained = ground.until_recovery("node_drained")
    assert drained["nodes"] == ["node-0"]
    ground.until_event("NodeReleased", "node-0")
    ground.further()
    ground.inject(do="term", node="node-4")
    ground.until(lambda: not ground.cluster.processes.running("node-4"), "node-4 has left")
    assert ground.cluster.processes.children["node-4"].process.returncode == 0
    ground.further()
    # Each of the three nodes that are left alone holds its layers.
    with pytest.raises(
        RequestRejected, match="node-1 is not drained, and nothing has changed: the plan cannot"
    ):
        ground.drain("node-1")
    assert ground.drain("node-1", when_possible=True) == "waiting"
    ground.until(lambda: ground.state["nodes"]["node-1"]["drain_waits"], "the state says why it waits")
    assert ground.drain("node-1", cancel=True) == "cancelled"
    ground.further()
    assert not run.named("NodeDraining", "node-1")
    assert [r["recomputed_steps"] for r in run.recoveries] == [0] * len(run.recoveries)
    assert len(run.recoveries) == 4
    same_losses(ground.stop_job())
    # A drained node stays out until its daemon is restarted.
    ground.on_loop(ground.cluster.kill("node-0"))


@pytest.mark.parametrize("again", [False, True])
def test_a_job_runs_to_its_end_while_the_coordinator_is_killed(
    ground: Playground, tmp_path: Path, same_losses: SameLosses, again: bool
) -> None:
    run = ground.submit(tiny_job(tmp_path, steps=80, two_node_replicas=True))
    trainers = dict(ground.pids)
    ground.until_step(8)
    if again:  # This hits the middle of a recovery.
        ground.play(
            {"on_event": "GenerationStarted", "do": "kill", "role": "coordinator"},
            {"after_s": 0, "do": "kill", "node": "node-1", "target": "trainer"},
        )
        ground.until_recovery("trainer_lost")
    else:
        ground.inject(do="kill", role="coordinator", restart_after_s=0.3)
        ground.until_event("CoordinatorStarted")
        ground.further(10)
        assert ground.pids == trainers
        assert len(run.recoveries) == 1
    ground.finish()
    ground.fill_gaps()
    assert [r["cause"] for r in run.recoveries][:1] == ["start"]
    same_losses(run)


def test_training_goes_on_without_the_broker(
    ground: Playground, tmp_path: Path, same_losses: SameLosses
) -> None:
    run = ground.submit(tiny_job(tmp_path, two_node_replicas=True))
    ground.until_step(8)
    before = max(run.losses)
    ground.inject(do="kill", role="broker", restart_after_s=1.5)
    ground.until_journaled(lambda: run.named("BrokerRestored"), "the broker is back")
    ground.further(20)
    assert [r["cause"] for r in run.recoveries] == ["start"]
    assert not run.named("NodeLost")
    assert max(run.losses) > before
    ground.fill_gaps()
    same_losses(ground.stop_job())


def test_a_trainer_dies_while_the_broker_is_away(
    ground: Playground, tmp_path: Path, same_losses: SameLosses
) -> None:
    run = ground.submit(tiny_job(tmp_path, two_node_replicas=True))
    ground.until_step(8)
    ground.kill_later(ground.pids["node-2", 0], after_s=0.3)
    ground.inject(do="kill", role="broker", restart_after_s=1.0)
    ground.until_journaled(lambda: len(run.recoveries) > 1, "the recovery")
    assert run.recoveries[1]["cause"] == "trainer_lost"
    ground.further()
    ground.fill_gaps()
    same_losses(ground.stop_job())


def test_a_node_that_was_cut_off_returns_with_a_new_incarnation(
    ground: Playground, tmp_path: Path, same_losses: SameLosses
) -> None:
    run = ground.submit(tiny_job(tmp_path, two_node_replicas=True))
    ground.until_step(8)
    stale = ground.pids["node-2", 0]
    incarnation = ground.state["nodes"]["node-2"]["incarnation"]
    # Wait until the others have resumed without it, on a busy machine too.
    ground.inject(do="disconnect", node="node-2", for_s=6.0)
    assert ground.until_recovery("node_lost")["nodes"] == ["node-2"]
    ground.until_recovery("node_joined")
    ground.further()
    assert ground.pids["node-2", 0] != stale
    ground.until(
        lambda: ground.state["nodes"]["node-2"]["incarnation"] > incarnation, "it has a new incarnation"
    )
    assert run.named("NodeFenced", "node-2")
    same_losses(ground.stop_job())


def test_too_few_nodes_pause_the_job_until_they_come(
    ground: Playground, tmp_path: Path, same_losses: SameLosses
) -> None:
    run = ground.submit(tiny_job(tmp_path, two_node_replicas=True, minimum="oobleck"))
    ground.until_step(8)
    ground.inject(do="kill", node="node-3")
    paused = ground.until_event("ClusterPaused")
    assert (paused["details"]["needed"], paused["details"]["present"]) == (4, 3)
    ground.until_phase("PAUSED")
    assert "4" in ground.state["waiting_for"]
    ground.inject(do="start", node="node-3")
    ground.until(lambda: len(run.recoveries) > 1, "training goes on")
    ground.further()
    same_losses(ground.stop_job())


def test_a_node_that_returns_with_fewer_devices_is_rejected(
    ground: Playground, tmp_path: Path, same_losses: SameLosses
) -> None:
    ground.submit(tiny_job(tmp_path, failures=3, delay_s=0.01))
    ground.until_planned(HOME)
    ground.on_loop(ground.cluster.kill("node-1"))
    ground.until_recovery("node_lost")
    child = ground.on_loop(ground.cluster.start_node("node-1", devices=1))
    refused = ground.until_event("NodeRejected", "node-1")["reason"]
    assert "has 1 device and had 2 before, but every node of the running job has 2" in refused
    assert "see whether a device has failed" in refused
    ground.further()
    assert ground.state["nodes"]["node-1"]["state"] == "OFFLINE"
    ground.until(lambda: refused in child.log.read_text(), "its daemon logs why")
    ground.on_loop(ground.cluster.kill("node-1"))
    ground.inject(do="start", node="node-1")
    ground.until_recovery("node_joined")
    ground.until_planned(HOME)
    same_losses(ground.stop_job())


def test_a_node_that_returns_with_less_device_memory_is_not_used_until_it_has_it_back(
    ground: Playground, tmp_path: Path, same_losses: SameLosses
) -> None:
    """The others go on, and the message has the bytes of the device and of the plan."""
    run = ground.submit(tiny_job(tmp_path, two_node_replicas=True, delay_s=0.01))
    planned_bytes = run.job.policy.device_memory_bytes
    assert planned_bytes is not None
    ground.until_planned(HOME)
    ground.on_loop(ground.cluster.kill("node-1"))
    ground.until_recovery("node_lost")
    environment = ground.cluster.processes.environment
    environment["FTD_NODE_DEVICE_MEMORY_MIB"] = "0.125"
    try:
        ground.on_loop(ground.cluster.start_node("node-1"))
        lost = ground.until_event("TrainerLost", "node-1")
    finally:
        del environment["FTD_NODE_DEVICE_MEMORY_MIB"]
    ground.further()
    assert not ground.state["nodes"]["node-1"]["in_plan"]
    ground.on_loop(ground.cluster.kill("node-1"))
    ground.inject(do="start", node="node-1")
    ground.until_planned(HOME)
    same_losses(ground.stop_job())
    assert lost["details"]["cause"] == "unprepared"
    assert (
        f"of this node has 131072 bytes of memory, and the job's plans assume {planned_bytes} bytes"
        in lost["details"]["detail"]
    )
    assert "submit the job again with planner.device_memory_mib = 0.125" in lost["details"]["detail"]


def test_two_nodes_of_one_name(ground: Playground, tmp_path: Path, same_losses: SameLosses) -> None:
    run = ground.submit(tiny_job(tmp_path, two_node_replicas=True, delay_s=0.02))
    ground.until_step(4)
    first = ground.state["nodes"]["node-1"]["incarnation"]
    second = ground.on_loop(ground.cluster.processes.start("impostor", ground.cluster.node_command("node-1")))
    ground.until_event("NodeRejected", "node-1")
    ground.further()
    assert ground.state["nodes"]["node-1"]["incarnation"] == first
    assert not run.named("NodeLost")
    assert "node-1" in second.log.read_text()
    assert "rejected" in second.log.read_text()
    ground.on_loop(ground.cluster.kill("node-1"))
    ground.until_recovery("node_lost")
    ground.until_recovery("node_joined")  # The second one takes over.
    ground.until(lambda: ground.state["nodes"]["node-1"]["incarnation"] > first, "it is another daemon")
    ground.further()
    same_losses(ground.stop_job())
    ground.on_loop(ground.cluster.processes.kill("impostor"))
    ground.until(lambda: ground.state["nodes"]["node-1"]["state"] == "OFFLINE", "the second one is gone")


def test_garbage_on_every_topic_harms_nobody(
    ground: Playground, tmp_path: Path, same_losses: SameLosses
) -> None:
    run = ground.submit(tiny_job(tmp_path, two_node_replicas=True))
    topics = ground.client.topics
    for topic in (
        topics.request,
        topics.events,
        topics.node_signal("node-0"),
        topics.node_state("node-1"),
        topics.node_command("node-2"),
        topics.command,
        topics.chaos("node-3"),
    ):
        for payload in (b"", b"\xc1", b"{", b'{"do": "kill"}', b"\x00" * 1_100_000):
            ground.publish(topic, payload)
    ground.until(lambda: len(run.named("MessageRejected")) >= 4, "the refusals")
    ground.further(20)
    assert [r["cause"] for r in run.recoveries] == ["start"]
    assert all(ground.cluster.processes.running(name) for name in HOME)
    same_losses(ground.stop_job())


def test_a_running_job_is_traced(ground: Playground, tmp_path: Path, same_losses: SameLosses) -> None:
    """The trace has every rank's steps, impossible requests are rejected, and losses do not change."""
    address = ClusterAddress(broker=ground.cluster.broker, cluster=ground.cluster.options.cluster)
    with pytest.raises(FtdError, match="no job is training"):
        ground.on_loop(request_traces(address, 2, 60.0))
    ground.submit(tiny_job(tmp_path, two_node_replicas=True))
    ground.until_step(3)
    state, found = ground.on_loop(request_traces(address, 2, 60.0))
    assert state["phase"] == "RUNNING"
    rows = align_traces(found, {})
    assert [row.rank for row in rows] == list(range(len(HOME) * ground.devices))
    for row in rows:
        kinds = [span.kind for span in row.spans]
        assert kinds.count("step") == 2 and {"forward", "backward", "vote", "apply"} <= set(kinds)
    for wrong, words in (("steps", "1001"), ("device", "devices 0 to 1")):
        envelope = ground.client.envelope()
        request = TraceRequest(**envelope, **{wrong: 1001})  # type: ignore[arg-type]
        with pytest.raises(RequestRejected, match=words):
            ground.on_loop(ground.client.request(request, topic=ground.client.topics.trace("node-0")))
    ground.further(3)
    same_losses(ground.stop_job())
