"""TensorBoard, MLflow and W&B: each sink continues where it was cut off and shows the last value of each step."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from ftd.observe.tracking.mlflow_sink import MlflowSink
from ftd.observe.tracking.record import Cursor
from ftd.observe.tracking.rows import LoggedRow
from ftd.observe.tracking.tensorboard_sink import TensorBoardSink
from ftd.observe.tracking.wandb_sink import WandbSink
from statemachine.messages.values import MlflowPolicy, WandbPolicy
from tests.helpers.tracking_logs import JOB, evaluation, plotted, row, steps_of
from tests.helpers.wandb_files import offline_history

WANDB = WandbPolicy(project="p", mode="offline", tags=("a",))


def rows(first: int, last: int, shift: float = 0.0) -> list[LoggedRow]:
    return [row(step, 1 / step + shift) for step in range(first, last + 1)]


# --- TensorBoard -----------------------------------------------------------------------------------


def board(directory: Path) -> TensorBoardSink:
    return TensorBoardSink(directory / JOB)


@pytest.mark.processes
def test_tensorboard_is_written_without_torch_and_without_tensorflow(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from ftd.observe.tracking.tensorboard_sink import TensorBoardSink\n"
        "import ftd.observe.tracking.writer\n"
        "sink = TensorBoardSink(Path(sys.argv[1]))\n"
        "sink.reopen(())\n"
        "assert not {'torch', 'tensorflow'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=120)


def test_tensorboard_continues_the_same_file(tmp_path: Path) -> None:
    sink = board(tmp_path)
    assert sink.reopen(()) == Cursor()
    sink.write([*rows(1, 3), evaluation(3)])
    sink.close(None)
    sink = board(tmp_path)
    assert sink.reopen(()) == Cursor(step=3, evaluation=3)
    sink.write(rows(4, 5))
    sink.close("FINISHED")
    assert len(list((tmp_path / JOB).iterdir())) == 1
    shown = plotted(tmp_path)
    assert steps_of(shown["train/loss"]) == steps_of(shown["train/metrics/accuracy"]) == [1, 2, 3, 4, 5]
    assert shown["evaluation/loss"] == [(3, 3.0)]


def test_a_truncated_record_is_written_again(tmp_path: Path) -> None:
    sink = board(tmp_path)
    sink.reopen(())
    sink.write(rows(1, 2))
    sink.close(None)
    [path] = (tmp_path / JOB).iterdir()
    whole = path.read_bytes()
    for cut in (1, 3, 5, 40, 100):
        path.write_bytes(whole[:-cut])
        sink = board(tmp_path)
        assert sink.reopen(()).step == 1
        sink.write(rows(2, 2))
        sink.close(None)
        assert path.read_bytes() == whole
        assert steps_of(plotted(tmp_path)["train/loss"]) == [1, 2]


@pytest.mark.parametrize("again", [False, True], ids=["at work", "begun again"])
def test_tensorboard_drops_superseded_steps(tmp_path: Path, again: bool) -> None:
    sink = board(tmp_path)
    sink.reopen(())
    sink.write([*rows(1, 4), evaluation(4), *rows(5, 6)])
    if again:
        sink.close(None)
        sink = board(tmp_path)
    assert sink.reopen((4,)) == Cursor(step=3, evaluation=3)
    sink.write([*rows(4, 5, shift=9.0), evaluation(4, 4.0)])
    sink.close(None)
    sink = board(tmp_path)
    assert sink.reopen((4,)) == Cursor(step=5, evaluation=4), "it knows of this rollback"
    sink.close(None)
    shown = plotted(tmp_path)
    expected = [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 9.25), (5, 9.2)]
    assert steps_of(shown["train/loss"]) == steps_of(expected)
    assert [v for _, v in shown["train/loss"]] == pytest.approx([v for _, v in expected])
    assert shown["evaluation/loss"] == [(4, 4.0)]


# --- MLflow ----------------------------------------------------------------------------------------


def tracker(directory: Path) -> MlflowSink:
    policy = MlflowPolicy(tracking_uri=str(directory / "mlruns"), experiment="x")
    return MlflowSink(policy, JOB, {"seed": 3, "text": "y" * 10_000})


def runs(directory: Path) -> dict[str, Any]:
    client = MlflowClient(tracking_uri=str(directory / "mlruns"))
    experiment = client.get_experiment_by_name("x")
    assert experiment is not None
    return {run.data.tags["ftd.run"]: run for run in client.search_runs([experiment.experiment_id])}


def history(directory: Path, run: Any, key: str = "train/loss") -> list[tuple[int, float]]:
    client = MlflowClient(tracking_uri=str(directory / "mlruns"))
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, key)]


def test_mlflow_continues_the_same_run_even_after_a_partly_logged_step(
    tmp_path: Path,
) -> None:
    sink = tracker(tmp_path)
    assert sink.reopen(()) == Cursor()
    sink.write([*rows(1, 3), evaluation(3)])
    sink.close(None)
    [run] = runs(tmp_path).values()
    assert (run.info.status, run.data.params["seed"]) == ("RUNNING", "3")
    last = next((tmp_path / "mlruns").glob(f"*/{run.info.run_id}/metrics/train/learning_rate"))
    last.write_text("".join(last.read_text().splitlines(keepends=True)[:-1]))
    sink = tracker(tmp_path)
    assert sink.reopen(()) == Cursor(step=2, evaluation=3)
    sink.write(rows(3, 5))
    sink.close("FINISHED")
    [run] = runs(tmp_path).values()
    assert run.info.status == "FINISHED"
    for key in ("train/loss", "train/learning_rate", "train/metrics/accuracy"):
        assert steps_of(history(tmp_path, run, key)) == [1, 2, 3, 4, 5]
    assert history(tmp_path, run, "evaluation/loss") == [(3, 3.0)]


def test_mlflow_logs_the_parameters_that_a_killed_writer_had_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(MlflowClient, "log_batch", killed)
        tracker(tmp_path).reopen(())
    [run] = runs(tmp_path).values()
    assert run.data.params == {}
    for _ in range(2):
        assert tracker(tmp_path).reopen(()) == Cursor()
        [run] = runs(tmp_path).values()
        assert run.data.params == {"seed": "3", "text": "y" * 500}


def test_mlflow_starts_a_new_run_with_the_whole_history_after_a_rollback(tmp_path: Path) -> None:
    sink = tracker(tmp_path)
    sink.reopen(())
    sink.write(rows(1, 6))
    sink.close(None)
    sink = tracker(tmp_path)
    assert sink.reopen((4,)) == Cursor()
    sink.write([*rows(1, 3), *rows(4, 5, shift=9.0)])
    sink.close(None)
    found = runs(tmp_path)
    assert found[f"{JOB}#0"].info.status == "KILLED"
    assert found[f"{JOB}#0"].data.tags["ftd.superseded_from_step"] == "4"
    valid = history(tmp_path, found[f"{JOB}#1"])
    assert valid == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 9.25), (5, 9.2)]


def test_mlflow_logs_under_similar_names_what_it_does_not_accept_as_a_name(tmp_path: Path) -> None:
    sink = MlflowSink(
        MlflowPolicy(tracking_uri=str(tmp_path / "mlruns"), experiment="x"),
        JOB,
        {"training.arguments.a@b": 1},
    )
    for step in (1, 2):
        sink.reopen(())
        sink.write([row(step, metrics={"recall@5": 0.5, "top-5 (%)": 50.0, "a//b/": 1.0, "../c": 2.0})])
        sink.close(None)
    [run] = runs(tmp_path).values()
    assert run.data.params == {"training.arguments.a_b": "1"}
    for name, value in {
        "metrics/recall_5": 0.5,
        "metrics/top-5 ___": 50.0,
        "metrics/a/b": 1.0,
        "c": 2.0,
    }.items():
        assert history(tmp_path, run, f"train/{name}") == [(1, value), (2, value)]


# --- Weights & Biases --------------------------------------------------------------------------------


@pytest.mark.processes
def test_wandb_continues_under_the_same_id(tmp_path: Path) -> None:
    for first, last in ((1, 3), (4, 5)):
        sink = WandbSink(WANDB, tmp_path, JOB, {"seed": 3})
        assert sink.reopen(()) == Cursor(step=first - 1)
        sink.write(rows(first, last))
        sink.close(None)
    held = offline_history(tmp_path, JOB)
    assert [step for step, _ in held] == [1, 2, 3, 4, 5]
    assert [values["train/loss"] for _, values in held] == pytest.approx([1 / s for s in range(1, 6)])


def killed_writer(directory: Path, first: int, last: int) -> None:
    """Write rows and get killed with W&B's service, which buffers the newest steps and loses them."""
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from ftd.observe.tracking.wandb_sink import WandbSink\n"
        "from statemachine.messages.values import WandbPolicy\n"
        "from tests.helpers.tracking_logs import row\n"
        "policy = WandbPolicy(project='p', mode='offline')\n"
        "sink = WandbSink(policy, Path(sys.argv[1]), 'gpt-1', {})\n"
        "assert sink.reopen(()).step + 1 == int(sys.argv[2])\n"
        "sink.write([row(step) for step in range(int(sys.argv[2]), int(sys.argv[3]) + 1)])\n"
        "for child in Path(f'/proc/self/task/{os.getpid()}/children').read_text().split():\n"
        "    os.kill(int(child), 9)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    arguments: Sequence[str] = [sys.executable, "-c", script, str(directory), str(first), str(last)]
    done = subprocess.run(arguments, check=False, timeout=120)
    assert done.returncode == -9


@pytest.mark.processes
def test_wandb_logs_again_what_a_killed_writer_had_buffered(tmp_path: Path) -> None:
    killed_writer(tmp_path, 1, 400)
    sink = WandbSink(WANDB, tmp_path, JOB, {})
    cursor = sink.reopen(())
    assert cursor.step < 400, "what it had in memory is lost"
    sink.write([*rows(cursor.step + 1, 450), evaluation(450)])
    sink.close("FINISHED")
    held = offline_history(tmp_path, JOB)
    assert [step for step, _ in held] == list(range(1, 451))
    assert held[-1][1]["evaluation/loss"] == 3.0


@pytest.mark.processes
def test_wandb_waits_for_the_process_that_still_writes_an_earlier_file(tmp_path: Path) -> None:
    sink = WandbSink(WANDB, tmp_path, JOB, {})
    sink.reopen(())
    sink.write(rows(1, 200))
    sink.close(None)
    (path,) = tmp_path.glob(f"wandb/offline-run-*-{JOB}/*.wandb")
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    (tmp_path / "end").write_bytes(data[len(data) // 2 :])
    script = (
        "import sys, time\n"
        "with open(sys.argv[1], 'ab') as file:\n"
        "    print('opened', flush=True)\n"
        "    time.sleep(1.0)\n"
        "    file.write(open(sys.argv[2], 'rb').read())\n"
    )
    arguments: Sequence[str] = [sys.executable, "-c", script, str(path), str(tmp_path / "end")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None and service.stdout.readline() == "opened\n"
        assert sink.reopen(()) == Cursor(step=200)
    sink.close(None)


@pytest.mark.processes
def test_wandb_starts_a_new_run_with_the_whole_history_after_a_rollback(tmp_path: Path) -> None:
    sink = WandbSink(WANDB, tmp_path, JOB, {})
    sink.reopen(())
    sink.write(rows(1, 6))
    assert sink.reopen((4,)) == Cursor()
    sink.write([*rows(1, 3), *rows(4, 5, shift=9.0)])
    sink.close(None)
    assert [step for step, _ in offline_history(tmp_path, JOB)] == [1, 2, 3, 4, 5, 6]
    valid = offline_history(tmp_path, f"{JOB}-1")
    assert [(step, values["train/loss"]) for step, values in valid] == [
        (1, 1.0), (2, 0.5), (3, 1 / 3), (4, 9.25), (5, 9.2)
    ]  # fmt: skip
