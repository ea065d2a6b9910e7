"""Runs ``ftd local`` as a user does: the report, bad input, and that nothing is left however it ends."""

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftd.local.run import PAUSE_S
from ftd.observe.run_model import phases_ms
from ftd.observe.view.document import Report
from ftd.observe.view.live.view import PROGRESS_EVERY_S
from ftd.processes import descendant_pids, is_alive
from tests.helpers.local_commands import FTD, ftd, leftovers
from tests.helpers.playground import write_job
from tests.helpers.waiting import PATIENCE_S, until


@pytest.fixture
def home() -> Iterator[dict[str, str]]:
    """Yield an environment of its own under a short path: other tests' clusters are invisible, and leftovers
    are found.
    """
    with tempfile.TemporaryDirectory(prefix="t-") as name:
        yield {**os.environ, "XDG_RUNTIME_DIR": name, "TMPDIR": name, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def start(home: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*FTD, *map(str, arguments)],
            env=home,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


def shared_memory(home: dict[str, str]) -> list[Path]:
    """Return where the nodes of a running cluster hold snapshots: below the name of its directory."""
    return [path for own in Path(home["TMPDIR"]).iterdir() if (path := Path("/dev/shm", own.name)).exists()]


def process_of(pid: int, config: str) -> int:
    """Return the process below ``pid`` that was started with this configuration."""
    [found] = processes_of(pid, config)
    return found


def processes_of(pid: int, config: str) -> list[int]:
    found = []
    for below in descendant_pids(pid):
        with contextlib.suppress(OSError):  # It may have ended.
            if config in Path(f"/proc/{below}/cmdline").read_text():
                found.append(below)
    return found


def until_training(home: dict[str, str]) -> None:
    """Wait for the first step. Ask rarely: a command takes half a second of a processor, which the starting
    cluster needs.
    """
    until(lambda: shared_memory(home), "nodes have memory for snapshots")

    def trains() -> bool:
        status = ftd("status", "--json", home=home)
        return status.returncode == 0 and json.loads(status.stdout)["step"] > 0

    until(trains, "training", every_s=1.0)


def test_a_run_with_a_kill_and_a_new_node(
    tmp_path: Path,
    home: dict[str, str],
    start: Callable[..., subprocess.Popen[str]],
    reference: Callable[[int], list[float]],
) -> None:
    job = write_job(tmp_path, steps=60, delay_s=0.015, two_node_replicas=True)
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(
        '[[fault]]\nat_step = 10\ndo = "kill"\nnode = "node-2"\n'
        '[[fault]]\nat_step = 12\ndo = "start"\nnode = "node-4"\n'
        '[[fault]]\nat_step = 100000\ndo = "term"\nnode = "node-0"\n'
    )
    path, logs = tmp_path / "report.json", tmp_path / "logs"
    options = ["--chaos", scenario, "--report", path, "--logs", logs]
    run = start("local", job, "--nodes", 4, "--devices-per-node", 2, *options)
    until(lambda: shared_memory(home), "nodes have memory for snapshots")
    memory = shared_memory(home)
    printed, _ = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 0, printed
    report = Report.from_json(json.loads(path.read_text()))
    assert report.outcome == "finished"
    assert [step.step for step in report.steps] == list(range(1, 61))
    assert [step.loss for step in report.steps] == pytest.approx(reference(60), rel=1e-9)
    lost = report.recoveries[0]
    assert (lost.cause, lost.node, lost.measured_from) == ("node_lost", "node-2", "fault")
    assert lost.detected_ms is not None and lost.detected_ms > 0
    assert sum(phases_ms(lost).values()) == pytest.approx(lost.total_ms, abs=1e-6)
    assert lost.total_ms == report.faults[0].total_ms, "the recovery lasts from the fault, in every view"
    assert sum(r.rolled_back_steps for r in report.recoveries) == 0
    assert [len(pids) for pids in report.processes["node-0"].trainers.values()] == [1, 1]
    assert report.final.checksum
    assert "node-2" in printed
    assert "was never due: at step 100000: term node-0" in printed
    assert (logs / "coordinator.log").exists()
    assert leftovers(home) == []
    assert not any(path.exists() for path in memory)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_however_it_ends(
    tmp_path: Path,
    home: dict[str, str],
    start: Callable[..., subprocess.Popen[str]],
    how: signal.Signals,
) -> None:
    path = tmp_path / "report.json"
    run = start("local", write_job(tmp_path, failures=0), "--nodes", 1, "--no-view", "--report", path)
    until_training(home)
    below = descendant_pids(run.pid)
    assert len(below) >= 1 + 1 + 3  # Broker and coordinator, and the node's daemon, zygote and trainer.
    memory = shared_memory(home)
    assert memory
    run.send_signal(how)
    printed, _ = run.communicate(timeout=PATIENCE_S)
    until(lambda: not any(is_alive(pid) for pid in below), "every process has ended")
    until(lambda: set(leftovers(home)) <= {"local-ftd.json"}, "the directory is gone")
    assert not any(path.exists() for path in memory)
    if how is not signal.SIGKILL:
        assert run.returncode == 128 + how
        assert "temporary files are removed" in printed
        assert "the run ended before the job did" in printed
        assert Report.from_json(json.loads(path.read_text())).outcome == "unfinished"
        assert leftovers(home) == []
    assert ftd("status", home=home).returncode == 2  # No file names a cluster.


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_cluster_for_scenarios_is_ended_by_signals(
    tmp_path: Path,
    home: dict[str, str],
    start: Callable[..., subprocess.Popen[str]],
    how: signal.Signals,
) -> None:
    job = write_job(tmp_path, failures=0)
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(
        f'[cluster]\njob = "{job}"\nnodes = 1\n[[fault]]\nat_step = 1000000\ndo = "kill"\nnode = "node-0"\n'
    )
    run = start("chaos", "run", "--local", scenario)
    until(lambda: shared_memory(home), "the node has memory for snapshots")
    below, memory = descendant_pids(run.pid), shared_memory(home)
    run.send_signal(how)
    printed, _ = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 128 + how
    assert "temporary files are removed" in printed
    until(lambda: not any(is_alive(pid) for pid in below), "every process has ended")
    assert leftovers(home) == []
    assert not any(path.exists() for path in memory)


def test_other_commands_reach_it_while_it_runs(
    tmp_path: Path, home: dict[str, str], start: Callable[..., subprocess.Popen[str]]
) -> None:
    options = ("--nodes", 4, "--broker", "embedded", "--coordinators", 2)
    run = start("local", write_job(tmp_path), *options)
    until(lambda: processes_of(run.pid, "/node-3.toml"), "node-3 starts")
    os.kill(process_of(run.pid, "/node-3.toml"), signal.SIGKILL)  # The others suffice for the job.
    late = process_of(run.pid, "/node-2.toml")
    os.kill(late, signal.SIGSTOP)
    time.sleep(2 * PROGRESS_EVERY_S)  # The first line of progress may say that a leader is elected.
    os.kill(late, signal.SIGCONT)
    until_training(home)
    second = ftd("submit", write_job(tmp_path), home=home)
    assert second.returncode == 1
    assert "tiny" in second.stderr
    unknown = ftd("chaos", "kill", "node-9", home=home)
    assert unknown.returncode == 1
    assert "there is no node 'node-9'; nodes: node-0, node-1, node-2" in unknown.stderr
    assert ftd("chaos", "kill", "node-2", "--target", "trainer", home=home).returncode == 0
    scenario = tmp_path / "remote.toml"
    scenario.write_text(
        '[[fault]]\nafter_s = 0\ndo = "term"\nnode = "node-1"\n[expect]\nevents = ["NodeReleased"]\n'
    )
    played = ftd("chaos", "run", scenario, "--junit", tmp_path / "junit.xml", home=home)
    assert played.returncode == 0, played.stdout + played.stderr
    assert "✓ NodeReleased seen" in played.stdout
    assert 'failures="0"' in (tmp_path / "junit.xml").read_text()
    scenario.write_text(
        scenario.read_text().replace('"term"', '"fill_memory"\nsize_mib = 1').replace("-1", "-0")
    )
    refused = ftd("chaos", "run", scenario, home=home)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "nothing was injected" in refused.stderr
    until(lambda: "NodeReleased" in ftd("events", "--json", home=home).stdout, "node-1 has left", every_s=0.5)
    assert "node-2" in ftd("story", "node-2", home=home).stdout
    os.kill(process_of(run.pid, "/coordinator.toml"), signal.SIGKILL)  # This is the leader.
    until(
        lambda: '"coordinator-2"' in ftd("status", "--json", home=home).stdout,
        "the other one leads",
        every_s=0.5,
    )
    until(lambda: ftd("stop", "tiny", home=home).returncode == 0, "the job is stopped", every_s=0.5)
    printed, _ = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 1  # A stopped job has not finished.
    assert "stopped" in printed
    assert "coordinator has ended; coordinator-2 still running" in printed
    assert "node-3 has ended before it was ready: the job started with the other 3 nodes" in printed
    assert re.search(r"^broker: mqtt://127\.0\.0\.1:\d+$", printed, re.M)
    assert re.search(r"start-up .* \(stage \d of 7\)", printed), printed


def test_a_command_changes_only_the_cluster_that_it_names(
    tmp_path: Path, home: dict[str, str], start: Callable[..., subprocess.Popen[str]]
) -> None:
    """Each of the two clusters has a node-1: a fault hits the node of the named cluster only."""
    (tmp_path / "other").mkdir()
    jobs = (write_job(tmp_path, failures=0), write_job(tmp_path / "other", failures=0))
    first = start("local", jobs[0], "--nodes", 2, "--no-view")
    until_training(home)
    second = start("local", jobs[1], "--nodes", 2, "--no-view", "--cluster", "other")
    until((Path(home["XDG_RUNTIME_DIR"]) / "ftd" / "local-other.json").exists, "both are announced")
    until(lambda: ftd("status", home=home).returncode == 2, "both are there", every_s=0.5)
    for command in (["status"], ["chaos", "kill", "node-1"], ["stop", "tiny"]):
        refused = ftd(*command, home=home)
        assert refused.returncode == 2
        assert f"ftd ({jobs[0]}" in refused.stderr
        assert f"other ({jobs[1]}" in refused.stderr
        assert "--cluster" in refused.stderr
    there = ("--cluster", "other")
    until(lambda: '"RUNNING"' in ftd("status", "--json", *there, home=home).stdout, "both train", every_s=0.5)
    killed = ftd("chaos", "kill", "node-1", *there, home=home)
    assert killed.returncode == 0
    assert "ftd: cluster other at mqtt://127.0.0.1:" in killed.stderr

    def seen(*where: str) -> str:
        return ftd("events", "--last", 1000, "--json", *where, home=home).stdout

    until(lambda: "NodeLost" in seen(*there), "the other cluster lost its node", every_s=0.5)
    assert "NodeLost" not in seen("--cluster", "ftd")
    stopped = ftd("stop", "tiny", "--cluster", "ftd", "--json", home=home)
    assert json.loads(stopped.stdout)["cluster"] == "ftd"
    first.communicate(timeout=PATIENCE_S)
    assert ftd("status", home=home).returncode == 0  # The only one left needs no name.
    second.kill()
    until(lambda: ftd("status", home=home).returncode == 2, "a killed one does not count", every_s=0.5)


def test_a_job_that_cannot_run_says_why(tmp_path: Path, home: dict[str, str]) -> None:
    (tmp_path / "broken.py").write_text("def build():\n    raise RuntimeError('no such data')\n")
    job = write_job(tmp_path, steps=5)
    text = job.read_text()
    function = text.split('function = "')[1].split('"')[0]
    job.write_text(text.replace(function, f"{tmp_path}/broken.py:build").split("[training.arguments]")[0])
    path, logs = tmp_path / "report.json", tmp_path / "logs"
    done = ftd("local", job, "--nodes", 2, "--report", path, "--logs", logs, home=home)
    assert done.returncode == 1
    assert "no such data" in done.stdout + done.stderr
    failure = Report.from_json(json.loads(path.read_text())).failures[0]
    assert failure.cause == "unprepared" and "RuntimeError: no such data" in failure.error
    assert failure.log == str(logs / f"{failure.node}.log")
    assert "RuntimeError: no such data" in Path(failure.log).read_text(), "it is where the report says"
    told = ftd("story", path, failure.node, home=home)
    assert "no such data" in " ".join(told.stdout.split()), "the cluster is gone, and its report is left"


def test_a_node_whose_data_set_raises_is_set_aside_and_every_view_says_why(
    tmp_path: Path, home: dict[str, str]
) -> None:
    bad, path = tmp_path / "bad", tmp_path / "report.json"
    bad.write_text("node-1")
    job = write_job(tmp_path, steps=40, failures=3, arguments=f'bad_disk = "{bad}"')
    done = ftd("local", job, "--nodes", 4, "--report", path, "--logs", tmp_path / "logs", home=home)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = " ".join(done.stdout.split())
    assert "node-1 failed 3 times: OSError: [Errno 5] Input/output error: '/data/" in printed
    assert "node-1 is set aside: its trainers raised an error 3 times" in printed
    report = Report.from_json(json.loads(path.read_text()))
    assert [aside.node for aside in report.quarantined] == ["node-1"]
    [failure] = [failure for failure in report.failures if failure.event == "TrainerLost"]
    assert (failure.node, failure.cause, failure.times) == ("node-1", "raised", 3)
    assert failure.error.startswith("OSError: [Errno 5] Input/output error: '/data/")
    assert "in __getitem__" in failure.detail and failure.error in Path(failure.log).read_text()
    assert sum(recovery.cause == "node_returned" for recovery in report.recoveries) <= 2
    story = " ".join(ftd("story", path, "node-1", home=home).stdout.split())
    assert "OSError: [Errno 5] Input/output error" in story and "node quarantined" in story


def test_a_job_whose_values_are_not_finite_fails_and_says_where(tmp_path: Path, home: dict[str, str]) -> None:
    (tmp_path / "diverging.py").write_text(
        f"import dataclasses, sys, torch\nsys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tests.helpers import tiny\n\n"
        "def build(**arguments):\n"
        "    def optimizer(named):\n"
        "        return torch.optim.SGD([p for _, p in named], lr=1e300)\n"
        "    layers = [torch.nn.Linear(48, 48) for _ in range(4)]\n"
        "    return dataclasses.replace(tiny.build(**arguments), layers=layers, optimizer=optimizer)\n"
    )
    job = write_job(tmp_path, steps=40)
    text = job.read_text()
    function = text.split('function = "')[1].split('"')[0]
    text = text.replace(function, f"{tmp_path}/diverging.py:build").replace(
        "seed =", "max_skipped = 6\nseed ="
    )
    job.write_text(text)
    report = tmp_path / "report.json"
    done = ftd("local", job, "--nodes", 2, "--report", report, home=home)
    assert done.returncode == 1
    told = json.loads(report.read_text())
    assert told["outcome"] == "failed"
    reason = told["outcome_reason"]
    # A heartbeat can report several steps, so the coordinator may learn of more than 6 at once.
    found = re.match(
        r"the updates of (\d+) steps in a row were skipped, from step 2 on; in step 2 the first value", reason
    )
    assert found is not None and int(found[1]) >= 6, reason
    assert " of layer " in reason and " on node-" in reason
    assert found[0].split(",")[0] in " ".join((done.stdout + done.stderr).split())


def test_a_job_that_waits_for_missing_nodes_is_abandoned(tmp_path: Path, home: dict[str, str]) -> None:
    done = ftd("local", write_job(tmp_path, steps=5, failures=3), "--nodes", 2, home=home)
    assert done.returncode == 1
    assert "set tolerance.failures to at most 1, or start 4 nodes" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.toml", "--nodes", 2], "missing.toml does not exist"),
        (["{job}", "--nodes", 0], "--nodes"),
        (["{job}", "--nodes", 2, "--broker", "http://x"], "--broker"),
        (["{job}", "--nodes", 2, "--broker", "mqtt://127.0.0.1:9"], "127.0.0.1:9"),
        (["{job}", "--nodes", 2, "--chaos", "{bad_scenario}"], "there is no node-7"),
        (["{job}", "--nodes", 2, "--chaos", "{cut}"], "ftd chaos run --local"),
        (
            ["{job}", "--nodes", 2, "--broker", "mqtt://127.0.0.1:9", "--chaos", "{kill_broker}"],
            "was not started",
        ),
        (["{job}", "--nodes", 2, "--report", "/proc/nothing/report.json"], "--report"),
    ],
)
def test_bad_input_is_rejected_before_anything_starts(
    tmp_path: Path, home: dict[str, str], arguments: list[object], said: str
) -> None:
    (tmp_path / "bad.toml").write_text('[[fault]]\nat_step = 1\ndo = "kill"\nnode = "node-7"\n')
    (tmp_path / "broker.toml").write_text('[[fault]]\nat_step = 1\ndo = "kill"\nrole = "broker"\n')
    (tmp_path / "cut.toml").write_text('[[fault]]\nat_step = 1\ndo = "cut"\nnode = "node-1"\n')
    places = {
        "job": write_job(tmp_path),
        "bad_scenario": tmp_path / "bad.toml",
        "kill_broker": tmp_path / "broker.toml",
        "cut": tmp_path / "cut.toml",
    }
    done = ftd("local", *(str(argument).format(**places) for argument in arguments), home=home)
    assert done.returncode in (2, 3)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert leftovers(home) == []


def test_a_pause_that_ends_with_a_restored_checkpoint_is_not_abandoned(
    tmp_path: Path, home: dict[str, str]
) -> None:
    """The pause lasts longer than the time after which ``ftd local`` gives up on missing nodes."""
    job = write_job(tmp_path, steps=60, devices=1, two_node_replicas=True)
    tables = '[snapshot]\nevery_steps = 5\n[checkpoint]\nurl = "kept"\nevery_steps = 10\n'
    job.write_text(job.read_text() + tables)
    scenario = tmp_path / "scenario.toml"
    kill = '[[fault]]\nat_step = 40\ndo = "kill"\nnode = "{}"\n'
    scenario.write_text(kill.format("node-0") + kill.format("node-2"))
    patient = home | {"FTD_TIMING_LOST_STATE_S": str(PAUSE_S + 3.0)}
    done = ftd("local", job, "--nodes", 4, "--chaos", scenario, home=patient)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "waiting for their return for 8 s, then the newest checkpoint is searched for" in done.stdout
    assert "with a persistent checkpoint" in done.stdout and "abandoned:" not in done.stdout
