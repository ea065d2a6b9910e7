"""Failures of nodes and trainers: training continues with the same losses, and no other trainer is restarted.

Nodes have two devices each. A copy of the model is on two nodes, in stages of one device; in jobs that
tolerate three failures it is on the two devices of one stage.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftd.config.job import load_job_data
from tests.helpers.playground import HOME, SILENCE_S, Playground, Run, nodes_of, tiny_job, write_job

SameLosses = Callable[[Run], None]


def survivors(ground: Playground, *lost: str) -> dict[tuple[str, int], int]:
    return {key: pid for key, pid in ground.pids.items() if key[0] not in lost}


def recovered_from(run: Run) -> set[str]:
    """Return the nodes from whose failure training has recovered."""
    causes = ("node_lost", "trainer_lost")
    return {node for r in run.recoveries if r["cause"] in causes for node in r["nodes"]}


@pytest.mark.parametrize("within", ["auto", "shard", "tensor"])
def test_a_killed_node_and_its_return(
    ground: Playground, tmp_path: Path, same_losses: SameLosses, within: str
) -> None:
    ground.submit(tiny_job(tmp_path, two_node_replicas=True, within_node=within, delay_s=0.01))
    ground.until_step(8)
    others = survivors(ground, "node-1")
    ground.inject(do="kill", node="node-1")
    recovery = ground.until_recovery("node_lost")
    assert recovery["nodes"] == ["node-1"]
    assert recovery["detected_how"] == "last_will"
    assert nodes_of(recovery["pipelines_before"]) == [2, 2]
    assert nodes_of(recovery["pipelines_after"]) == [3]
    assert recovery["bytes_moved"] > 0
    ground.further()
    assert survivors(ground, "node-1") == others
    ground.inject(do="start", node="node-1")
    back = ground.until_recovery("node_joined")
    assert nodes_of(back["pipelines_after"]) == [2, 2]
    assert back["recomputed_steps"] == 0
    ground.further()
    assert survivors(ground, "node-1") == others
    if within != "auto":
        for pipelines in (recovery["pipelines_before"], recovery["pipelines_after"], back["pipelines_after"]):
            assert [(len(stage["devices"]), stage["within"]) for p in pipelines for stage in p["stages"]] == (
                [(2, within)] * sum(nodes_of(pipelines))
            )
    same_losses(ground.stop_job())


@pytest.mark.parametrize("objective", ["minmax", "variance"])
def test_a_killed_node_where_integer_programs_share_out_the_batch(
    ground: Playground, tmp_path: Path, same_losses: SameLosses, objective: str
) -> None:
    tables = f'batch_solver = "pyomo"\nbatch_objective = "{objective}"\n'
    ground.submit(tiny_job(tmp_path, two_node_replicas=True, tables=tables, delay_s=0.01))
    ground.until_planned(HOME)
    ground.until_step(8)
    ground.inject(do="kill", node="node-1")
    recovery = ground.until_recovery("node_lost")
    assert nodes_of(recovery["pipelines_after"]) == [3]
    ground.further()
    ground.inject(do="start", node="node-1")
    back = ground.until_recovery("node_joined")
    assert nodes_of(back["pipelines_after"]) == [2, 2]
    assert [pipeline["microbatches"] for pipeline in back["pipelines_after"]] == [4, 4]
    ground.further()
    run = ground.stop_job()
    assert not [plan for plan in run.named("PlanChosen") if "exact method" in plan["reason"]]
    same_losses(run)


def test_published_messages_were_checked_against_the_contract(ground: Playground) -> None:
    """The tests above published messages of every kind, and the witness checked them."""
    assert {"events", "clusterState", "nodeState", "request", "reply"} <= set(ground.witness.seen)


@pytest.mark.parametrize(
    ("options", "of_a_stage"),
    [
        ({"two_node_replicas": True, "stage_devices": 1}, False),
        ({"failures": 3, "within_node": "replicate"}, True),
        ({"failures": 3, "within_node": "shard"}, True),
        ({"failures": 3, "within_node": "tensor"}, True),
    ],
    ids=["alone in its stage", "with half of the rows", "with half of the state", "with parts of the layers"],
)
def test_a_killed_trainer_comes_back(
    ground: Playground, tmp_path: Path, same_losses: SameLosses, options: dict[str, Any], of_a_stage: bool
) -> None:
    """The other trainer of its node restarts as well, because a node fails as a whole."""
    run = ground.submit(tiny_job(tmp_path, **options))
    ground.until_planned(HOME)
    ground.further(3)
    before = dict(ground.pids)
    ground.inject(do="kill", node="node-2", target="trainer", device=1)
    recovery = ground.until_recovery("trainer_lost")
    assert recovery["nodes"] == ["node-2"]
    devices = {tuple(stage["devices"]) for p in recovery["pipelines_before"] for stage in p["stages"]}
    assert (("node-2/0", "node-2/1") in devices) == of_a_stage
    lost = ground.until_event("TrainerLost", "node-2")
    assert lost["details"]["device"] == 1 and "SIGKILL" in lost["details"]["detail"]
    ground.until_recovery("node_returned")
    ground.further()
    assert survivors(ground, "node-2") == {key: pid for key, pid in before.items() if key[0] != "node-2"}
    assert all(ground.pids["node-2", device] != before["node-2", device] for device in (0, 1))
    assert not run.named("NodeLost")
    same_losses(ground.stop_job())


@pytest.mark.parametrize(
    ("once", "message"),
    [("raise_once", "planted by the test"), ("starve_once", "To make it fit: a smaller training.microbatch")],
)
def test_a_trainer_that_raises(
    ground: Playground, tmp_path: Path, same_losses: SameLosses, once: str, message: str
) -> None:
    trap = tmp_path / "trap"
    run = ground.submit(tiny_job(tmp_path, failures=3, arguments=f'{once} = "{trap}"'))
    ground.until_planned(HOME)
    ground.further(3)
    before = dict(ground.pids)
    trap.touch()
    [raised] = ground.until_recovery("trainer_lost")["nodes"]
    lost = ground.until_event("TrainerLost")
    assert lost["details"]["cause"] == "raised"
    assert message in lost["details"]["detail"]
    ground.until_recovery("node_returned")
    ground.further()
    assert survivors(ground, raised) == {key: pid for key, pid in before.items() if key[0] != raised}
    assert all(ground.pids[raised, device] != before[raised, device] for device in (0, 1))
    assert len(run.named("TrainerLost")) == 1
    same_losses(ground.stop_job())


def test_a_device_that_is_gone_keeps_its_node_out_until_it_is_back(
    ground: Playground, tmp_path: Path, same_losses: SameLosses
) -> None:
    lost = tmp_path / "lost"
    run = ground.submit(tiny_job(tmp_path, failures=3, arguments=f'lost_device = "{lost}"'))
    ground.until_planned(HOME)
    lost.write_text("node-1 1")
    ground.inject(do="kill", node="node-1", target="trainer", device=1)
    ground.until_recovery("trainer_lost")
    event = ground.until_event("TrainerLost", "node-1", times=2)
    assert (event["details"]["cause"], event["details"]["device"]) == ("unprepared", 1)
    assert "no CUDA-capable device is detected" in event["reason"]
    ground.further()
    assert ground.state["nodes"]["node-1"]["state"] == "UNHEALTHY"
    lost.unlink()
    ground.until_recovery("node_returned")
    ground.further()
    assert {event["node"] for event in run.named("TrainerLost")} == {"node-1"}
    same_losses(ground.stop_job())


def test_code_that_is_wrong_from_a_step_on_fails_the_job(ground: Playground, tmp_path: Path) -> None:
    """The job does not roll back to its snapshot again and again."""
    wrong = tmp_path / "wrong"
    path = write_job(tmp_path, arguments=f'wrong_from = "{wrong}"')
    path.write_text(f"{path.read_text()}\n[snapshot]\nevery_steps = 2\n")
    run = ground.submit(load_job_data(path))
    ground.until_event("SnapshotCompleted")
    wrong.touch()
    failed = ground.until_event("JobFailed")
    assert failed["reason"].startswith("the job's code raised ") and " in step " in failed["reason"]
    assert "ValueError: wrong from here on" in failed["reason"] and "Traceback" in failed["reason"]
    assert len({e["node"] for e in run.named("TrainerLost")}) > 1
    ground.until_phase("FAILED")
    assert ground.state["outcome"] == failed["reason"]


@pytest.mark.parametrize("how", ["stop", "hang"])
def test_a_trainer_that_hangs(ground: Playground, tmp_path: Path, same_losses: SameLosses, how: str) -> None:
    """One of the node's two trainers hangs. The other one waits for it and is not mistaken for hung."""
    job = tiny_job(tmp_path, failures=3) if how == "stop" else tiny_job(tmp_path, two_node_replicas=True)
    ground.submit(job)
    ground.until_planned(HOME)
    ground.further(12)
    ground.inject(do=how, node="node-3", device=1)
    recovery = ground.until_recovery("trainer_lost")
    assert recovery["nodes"] == ["node-3"]
    lost = ground.until_event("TrainerLost")["details"]
    assert (lost["cause"], lost["device"]) == ("hung", 1)
    ground.until_recovery("node_returned")
    ground.further()
    same_losses(ground.stop_job())


def test_two_nodes_at_once(ground: Playground, tmp_path: Path, same_losses: SameLosses) -> None:
    run = ground.submit(tiny_job(tmp_path, failures=2))
    ground.until_step(8)
    ground.inject(do="kill", nodes=["node-0", "node-2"])
    ground.until(lambda: recovered_from(run) >= {"node-0", "node-2"}, "both recovered from")
    ground.further()
    same_losses(ground.stop_job())


@pytest.mark.parametrize("moment", ["GenerationStarted", "Quiesced", "PlanChosen", "TrainingResumed"])
def test_a_second_failure_while_recovering_from_the_first(
    ground: Playground, tmp_path: Path, same_losses: SameLosses, moment: str
) -> None:
    run = ground.submit(tiny_job(tmp_path, failures=2))
    ground.until_step(5)
    ground.play(
        {"at_step": 8, "do": "kill", "node": "node-3", "target": "trainer"},
        {"on_event": moment, "do": "kill", "node": "node-1", "target": "trainer"},
    )
    ground.until(lambda: len(run.named("TrainerLost")) >= 2, "both trainers lost")
    ground.until(lambda: recovered_from(run) >= {"node-1", "node-3"}, "both recovered from")
    ground.further()
    same_losses(ground.stop_job())


def test_a_frozen_node_is_out_until_it_wakes(
    ground: Playground, tmp_path: Path, same_losses: SameLosses
) -> None:
    ground.submit(tiny_job(tmp_path, two_node_replicas=True))
    ground.until_step(8)
    ground.inject(do="stop", node="node-2", target="node", for_s=2.5 * SILENCE_S)
    recovery = ground.until_recovery("node_lost")
    assert recovery["detected_how"] in ("silence", "no_answer")
    ground.further()
    ground.until_event("NodeFenced", "node-2")
    ground.until_recovery("node_joined")  # It has a new incarnation.
    ground.further()
    same_losses(ground.stop_job())
