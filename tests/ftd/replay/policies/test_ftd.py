"""ftd in virtual time: each kind of change takes the phases that it takes in reality, and loses what it must."""

import tracemalloc
from dataclasses import replace
from functools import cache

import pytest
from msgspec.structs import replace as changed

from ftd.replay.job import ReplayJob
from ftd.replay.outcome import Outcome
from ftd.replay.policies.ftd import FtdPolicy, completed_share
from ftd.replay.replay import replay
from ftd.replay.traces.trace import Trace, TraceEvent
from ftd.replay.virtual_cluster import FtdParameters, VirtualCluster
from planner.values import LayerProfile, Link, ModelProfile, Policy
from tests.helpers.replay_jobs import make_trace

PARAMETERS = FtdParameters(
    detect_s=1.0,
    quiesce_s=2.0,
    plan_s=3.0,
    rendezvous_s=4.0,
    prepare_s=20.0,
    restore_bytes_per_s=1e6,
    storage_bytes_per_s=1e3,
    snapshot_every=5,
    snapshot_stall_s=0.0,
    snapshot_write_s=0.1,
    protection="auto",
    checkpoint_every=50,
    checkpoint_cost_share=0.0,
)
STATE_BYTES = 6000
LAYERS = 4


@cache
def job() -> ReplayJob:
    """Return a job of four layers, of which two fit on a node."""
    layer = LayerProfile(
        forward_ms=100.0,
        backward_ms=200.0,
        parameter_bytes=2000,
        gradient_bytes=2000,
        optimizer_bytes=4000,
        activation_bytes=1000,
        output_bytes=500,
    )
    return ReplayJob(
        name="small",
        source="this test",
        profile=ModelProfile(layers=(layer,) * LAYERS, microbatch_rows=2, link=Link(bytes_per_s=1e6)),
        policy=Policy(global_batch=24, microbatch_rows=2, device_memory_bytes=30_000),
    )


def run(
    nodes: int, *events: TraceEvent, end_s: float = 1000.0, parameters: FtdParameters = PARAMETERS
) -> Outcome:
    start = tuple(TraceEvent(at_s=0.0, kind="add", node=f"n{i}") for i in range(nodes))
    trace = Trace(name="test", source="this test", events=(*start, *events), end_s=end_s)
    outcome = replay(FtdPolicy(job(), parameters), trace)
    assert sum(outcome.seconds.values()) == pytest.approx(end_s)
    return outcome


def remove(at_s: float, *nodes: str, notice_s: float = 0.0) -> tuple[TraceEvent, ...]:
    return tuple(TraceEvent(at_s=at_s, kind="remove", node=node, notice_s=notice_s) for node in nodes)


def add(at_s: float, *nodes: str) -> tuple[TraceEvent, ...]:
    return tuple(TraceEvent(at_s=at_s, kind="add", node=node) for node in nodes)


def step_s(nodes: int) -> float:
    found = job().iteration_s(nodes)
    assert found is not None
    return found


def test_a_loss_takes_the_phases_of_a_recovery_and_one_step() -> None:
    outcome = run(4, *remove(500.0, "n1"))
    in_flight_s = 500.0 % step_s(4)
    [recovery] = outcome.recoveries
    assert recovery.seconds["detecting"] == pytest.approx(1.0)
    assert recovery.seconds["planning"] == pytest.approx(2.0 + 3.0)
    assert recovery.seconds["restarting"] == pytest.approx(4.0)
    # Three nodes keep one pipeline of three: state of one layer moves to each of its nodes at most.
    assert 0 < recovery.seconds["moving"] <= 2 * STATE_BYTES / 1e6
    assert outcome.seconds["redone"] == pytest.approx(in_flight_s)
    after_s = 500.0 - sum(recovery.seconds.values())
    assert outcome.iterations == int(500.0 / step_s(4)) + int(after_s / step_s(3))


def test_pipelines_that_lost_no_node_could_keep_the_gradients_of_completed_microbatches() -> None:
    """Two pipelines of two stages have 6 microbatches each, so an iteration lasts 7 times as long as one takes on a
    stage. When 5 of these times have passed, the first microbatch has needed one of them to reach the second stage.
    """
    cluster = VirtualCluster(job(), PARAMETERS)
    cluster.start([f"n{i}" for i in range(4)])
    assert cluster.plan is not None
    assert [(len(each.stages), each.microbatches) for each in cluster.plan.pipelines] == [(2, 6)] * 2
    lost = cluster.plan.pipelines[0].nodes[:1]
    assert completed_share(cluster.plan, lost, 5.5 / 7) == pytest.approx(4 / 12)
    assert completed_share(cluster.plan, (), 5.5 / 7) == pytest.approx(8 / 12)
    assert completed_share(cluster.plan, (), 0.5 / 7) == 0.0

    at_s = (100 + 5.5 / 7) * step_s(4)
    without = run(4, *remove(at_s, *lost))
    kept = run(4, *remove(at_s, *lost), parameters=changed(PARAMETERS, keep_gradients=True))
    # The three nodes that are left have one pipeline: its 12 microbatches last as long as 14 of them on a stage.
    saved = 12 / 14 * 4 / 12
    assert without.seconds["redone"] == pytest.approx(5.5 / 7 * step_s(4))
    assert kept.seconds["redone"] == pytest.approx((5.5 / 7 - saved) * step_s(4))
    trains_s = 1000.0 - kept.spans[-1].begin_s
    assert kept.iterations - 100 == int(trains_s / step_s(3))
    assert kept.spans[-1].begin_s == pytest.approx(without.spans[-1].begin_s - saved * step_s(3))


def test_a_node_that_joins_is_taken_in_at_a_boundary_without_loss() -> None:
    outcome = run(4, *remove(500.0, "n1"), *add(600.0, "n1"))
    join = outcome.recoveries[-1]
    assert join.at_s >= 600.0 + PARAMETERS.prepare_s
    assert join.redone_s == pytest.approx(0.0, abs=1e-6)
    assert join.seconds.keys() == {"planning", "restarting", "moving"}
    assert join.seconds["planning"] == pytest.approx(3.0)
    assert outcome.seconds["redone"] == pytest.approx(500.0 % step_s(4))


def test_a_node_that_announces_its_removal_leaves_at_a_boundary_without_loss() -> None:
    outcome = run(4, *remove(500.0, "n1", notice_s=100.0))
    [recovery] = outcome.recoveries
    assert 400.0 <= recovery.at_s <= 400.0 + step_s(4) + 1
    assert "detecting" not in recovery.seconds
    assert outcome.seconds["redone"] == pytest.approx(0.0, abs=1e-6)
    # Until its end the node is paid for and does not compute.
    assert 0 < outcome.seconds["reduced"] < 100.0


def test_a_node_that_ends_before_the_coordinator_knows_it_never_trains() -> None:
    without = run(4, *remove(500.0, "n1"))
    outcome = run(4, *remove(500.0, "n1"), *add(600.0, "m"), *remove(600.5, "m"))
    assert outcome.samples == without.samples
    assert [recovery.kind for recovery in outcome.recoveries] == ["loss"]


def test_a_node_that_announces_its_removal_when_it_starts_is_not_taken_in() -> None:
    outcome = run(4, *remove(500.0, "n1"), *add(600.0, "m"), *remove(640.0, "m", notice_s=60.0))
    assert [recovery.kind for recovery in outcome.recoveries] == ["loss"]


def test_a_loss_during_a_recovery_starts_it_again() -> None:
    once, twice = run(4, *remove(500.0, "n1")), run(4, *remove(500.0, "n1"), *remove(505.0, "n2"))
    [recovery] = twice.recoveries
    assert (recovery.at_s, recovery.lost) == (500.0, 2)
    assert twice.seconds["redone"] == pytest.approx(once.seconds["redone"])
    assert twice.seconds["detecting"] == pytest.approx(2.0)
    assert twice.seconds["planning"] == pytest.approx(4.0 + 5.0)


def test_state_that_no_node_holds_comes_from_the_newest_checkpoint() -> None:
    outcome = run(4, *remove(500.0, "n0", "n1", "n2"), *add(600.0, "n0"))
    committed = int(500.0 / step_s(4))
    back_to = committed // 50 * 50
    assert outcome.seconds["redone"] == pytest.approx(500.0 - back_to * step_s(4))
    assert outcome.seconds["moving"] == pytest.approx(LAYERS * STATE_BYTES / 1e3)
    assert outcome.recoveries[-1].rolled_back
    trains_s = 1000.0 - outcome.spans[-1].begin_s
    assert outcome.iterations == back_to + int(trains_s / step_s(2))


@pytest.mark.parametrize(("steps", "back_to"), [(104, 50), (107, 100)])
def test_a_checkpoint_that_is_not_written_yet_is_none(steps: int, back_to: int) -> None:
    """Writing the checkpoint of step 100 takes 24 s, which are six steps."""
    lost_at_s = (steps + 0.5) * step_s(4)
    outcome = run(4, *remove(lost_at_s, "n0", "n1", "n2"), *add(lost_at_s + 50.0, "n0"))
    assert outcome.seconds["redone"] == pytest.approx(lost_at_s - back_to * step_s(4))


def test_a_single_pipeline_continues_from_a_copy_of_its_snapshot() -> None:
    outcome = run(4, *remove(300.0, "n3"), *remove(400.0, "n2"), *add(450.0, "n4"), *remove(700.0, "n0"))
    last = outcome.recoveries[-1]
    assert last.at_s == pytest.approx(700.0)
    assert outcome.seconds["waiting"] == 0.0
    # The step in flight, and at most the steps since the newest snapshot.
    assert step_s(3) < last.redone_s < (PARAMETERS.snapshot_every + 1) * step_s(3)


def test_a_job_with_too_few_nodes_waits_and_goes_on_when_one_comes() -> None:
    outcome = run(4, *remove(500.0, "n1", "n2", "n3"), *add(700.0, "n1"))
    assert outcome.seconds["waiting"] > 190.0
    assert outcome.spans[-1].begin_s > 720.0
    too_few = run(3, *remove(500.0, "n2"))
    assert too_few.iterations == 0 and too_few.seconds["waiting"] == pytest.approx(1000.0)


def test_the_loss_of_a_node_that_no_plan_uses_interrupts_nothing() -> None:
    # Twelve microbatches of four layers keep 48 nodes busy at most.
    nodes = [f"n{i}" for i in range(50)]
    cluster = VirtualCluster(job(), PARAMETERS)
    cluster.start(nodes)
    assert cluster.plan is not None and cluster.plan.idle_nodes
    outcome = run(len(nodes), *remove(500.0, cluster.plan.idle_nodes[0]))
    assert outcome.iterations == run(len(nodes)).iterations
    assert outcome.recoveries == ()


def test_a_removal_at_the_moment_of_another_ones_announcement_is_handled_at_once() -> None:
    at_once = changed(PARAMETERS, detect_s=0.0)
    events = [*remove(400.0, "n2"), *remove(500.0, "n1", notice_s=100.0)]
    outcome = run(4, *events, parameters=at_once)
    assert outcome.seconds["detecting"] == 0.0
    assert outcome.recoveries[0].at_s == pytest.approx(400.0)


def test_a_device_that_holds_shards_receives_its_part_alone() -> None:
    moving_s = {}
    for within in ("replicate", "shard"):
        profile = changed(job().profile, stage_devices=(2,), device_memory_bytes=None)
        policy = changed(job().policy, devices_per_node=2, within_node=within, device_memory_bytes=None)
        trace = make_trace(2, (500.0, "remove", "n1"), (600.0, "add", "m"), end_s=1000.0)
        outcome = replay(FtdPolicy(replace(job(), profile=profile, policy=policy), PARAMETERS), trace)
        assert outcome.recoveries[-1].kind == "join"
        moving_s[within] = outcome.recoveries[-1].seconds["moving"]
    assert moving_s["replicate"] == pytest.approx(LAYERS * STATE_BYTES / 1e6)
    assert moving_s["shard"] == pytest.approx(moving_s["replicate"] / 2)


def test_a_quiet_time_takes_no_memory() -> None:
    cluster = VirtualCluster(job(), PARAMETERS)
    cluster.start([f"n{i}" for i in range(4)])
    cluster.committed(1, 1.0)
    tracemalloc.start()
    cluster.committed(100_000, 1e5)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 100_000


def test_snapshots_and_checkpoints_delay_training_by_what_they_cost() -> None:
    """A write takes 24 s, of which a quarter delays training: 6 s after every 50 steps, or 0.6 s of every 5."""
    checkpoints = changed(PARAMETERS, checkpoint_cost_share=0.25)
    outcome = run(4, parameters=checkpoints)
    assert outcome.seconds["stalled"] == pytest.approx(6.0 * (outcome.iterations // 50))
    both = run(4, parameters=changed(checkpoints, snapshot_stall_s=0.2))
    assert both.seconds["stalled"] == pytest.approx(0.8 * (both.iterations // 5))
    assert both.iterations < outcome.iterations < run(4).iterations
