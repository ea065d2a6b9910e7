"""Failures of nodes and trainers: training goes on with the same losses, and nobody else is restarted."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ftd.config.job import load_job_data
from tests.e2e.playground import SILENCE_S, Playground, Run, tiny_job, write_job

SameLosses = Callable[[Run], None]


def survivors(ground: Playground, *lost: str) -> dict[tuple[str, int], int]:
    return {key: pid for key, pid in ground.pids.items() if key[0] not in lost}


def recovered_from(run: Run) -> set[str]:
    """Nodes whose failure training has got over."""
    causes = ("node_lost", "trainer_lost")
    return {node for r in run.recoveries if r["cause"] in causes for node in r["nodes"]}


def test_a_killed_node_and_its_return(ground: Playground, tmp_path: Path, same_losses: SameLosses) -> None:
    ground.submit(tiny_job(tmp_path, two_node_replicas=True))
    ground.until_step(8)
    others = survivors(ground, "node-1")
    ground.inject(do="kill", node="node-1")
    recovery = ground.until_recovery("node_lost")
    assert recovery["nodes"] == ["node-1"]
    assert recovery["detected_how"] == "last_will"
    assert [len(p["stages"]) for p in recovery["pipelines_before"]] == [2, 2]
    assert [len(p["stages"]) for p in recovery["pipelines_after"]] == [3]
    assert recovery["bytes_moved"] > 0
    ground.further()
    assert survivors(ground, "node-1") == others
    ground.inject(do="start", node="node-1")
    back = ground.until_recovery("node_joined")
    assert [len(p["stages"]) for p in back["pipelines_after"]] == [2, 2]
    assert back["recomputed_steps"] == 0
    ground.further()
    assert survivors(ground, "node-1") == others
    same_losses(ground.stop_job())


def test_what_was_said_was_held_against_the_contract(ground: Playground) -> None:
    """After the test above: the witness of every test here hears something, and of every kind."""
    assert {"events", "clusterState", "nodeState", "request", "reply"} <= set(ground.witness.seen)


def test_a_killed_trainer_comes_back(ground: Playground, tmp_path: Path, same_losses: SameLosses) -> None:
    run = ground.submit(tiny_job(tmp_path, two_node_replicas=True))
    ground.until_step(8)
    before = dict(ground.pids)
    ground.inject(do="kill", node="node-2", target="trainer")
    assert ground.until_recovery("trainer_lost")["nodes"] == ["node-2"]
    lost = ground.until_event("TrainerLost", "node-2")
    assert "SIGKILL" in lost["details"]["detail"]
    ground.until_recovery("node_returned")
    ground.further()
    assert survivors(ground, "node-2") == {key: pid for key, pid in before.items() if key[0] != "node-2"}
    assert ground.pids["node-2", 0] != before["node-2", 0]
    assert not run.named("NodeLost")
    same_losses(ground.stop_job())


def test_a_trainer_that_raises(ground: Playground, tmp_path: Path, same_losses: SameLosses) -> None:
    trap = tmp_path / "trap"
    ground.submit(tiny_job(tmp_path, arguments=f'raise_once = "{trap}"'))
    ground.until_step(5)
    trap.touch()
    ground.until_recovery("trainer_lost")
    lost = ground.until_event("TrainerLost")
    assert lost["details"]["cause"] == "raised"
    assert "planted by the test" in lost["details"]["detail"]
    ground.until_recovery("node_returned")
    ground.further()
    same_losses(ground.stop_job())


def test_code_that_is_wrong_from_a_step_on_fails_the_job(ground: Playground, tmp_path: Path) -> None:
    """And does not keep it going back to its snapshot for ever."""
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
    ground.submit(tiny_job(tmp_path, two_node_replicas=True))
    ground.until_step(12)
    ground.inject(do=how, node="node-3")
    recovery = ground.until_recovery("trainer_lost")
    assert recovery["nodes"] == ["node-3"]
    assert ground.until_event("TrainerLost")["details"]["cause"] == "hung"
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
    ground.until_recovery("node_joined")  # As somebody new.
    ground.further()
    same_losses(ground.stop_job())
