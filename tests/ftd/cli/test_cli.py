"""Tests of the command line: help, exit codes, messages and JSON, and that our own processes never load torch."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ftd.config.profile_file import save_profile
from ftd.errors import RequestRejected, UnreachableError
from ftd.transport.address import BrokerAddress, ClusterAddress
from ftd.transport.client import DECISION_ANSWER_S, ClusterClient
from ftd.transport.mqtt.mosquitto import free_port
from ftd.transport.wire.public import Answer, DrainRequest, StatusRequest
from planner.values import LayerProfile, ModelProfile
from tests.helpers.brokers import RunningBroker
from tests.helpers.commands import ftd_here
from tests.helpers.profile_files import profile_document

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = [
    "init",
    "local",
    "coordinator",
    "node",
    "submit",
    "status",
    "events",
    "story",
    "drain",
    "readmit",
    "stop",
    "top",
    "report",
    "snapshot now",
    "snapshot every",
    "snapshot protect",
    "plan",
    "profile",
    "chaos",
    "data tokenize",
    "data train-tokenizer",
]


def ftd(*arguments: str, directory: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("FTD_")}
    return subprocess.run(
        [sys.executable, "-m", "ftd.cli.main", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={**inherited, "XDG_RUNTIME_DIR": str(directory / "run"), "COLUMNS": "200", **environment},
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = ftd_here(*command.split(), "--help", patch=monkeypatch, said=capsys)
    assert code == 0
    assert f"Example: ftd {command}" in out


@pytest.mark.parametrize("group", ["", "snapshot", "chaos", "checkpoint", "config", "data"])
def test_command_summaries_fit_into_80_columns(
    group: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = ftd_here(*group.split(), "--help", patch=monkeypatch, said=capsys, columns=80)
    commands = out.partition("Commands:\n")[2].splitlines()
    assert commands and max(map(len, out.splitlines())) <= 80
    assert [line for line in commands if line.endswith("...") or not line[2:3].strip()] == []


def test_shell_completion_is_offered(tmp_path: Path) -> None:
    done = ftd(directory=tmp_path, _FTD_COMPLETE="complete_bash", COMP_WORDS="ftd s", COMP_CWORD="1")
    assert {"submit", "status", "story", "stop"} <= set(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["frobnicate"], 2, "No such command"),
        (["plan"], 2, "Missing option"),
        (["plan", "gone.toml", "--nodes", "2"], 2, "gone.toml does not exist"),
        (["plan", "examples/mlp.toml", "--nodes", "0"], 2, "--nodes"),
        (["submit", "gone.toml", "--broker", "mqtt://h"], 2, "gone.toml does not exist"),
        (["status"], 2, "--broker mqtt://host:port"),
        (["status", "--broker", "http://h"], 2, "--broker: 'http://h' is no broker address"),
        (["status", "--broker", "mqtt://h", "--cluster", "a/b"], 2, "--cluster"),
        (["coordinator", "--config", "gone.toml"], 2, "gone.toml does not exist"),
        (["events", "--last", "-3"], 2, "--last"),
    ],
)
def test_usage_and_configuration_errors(
    tmp_path: Path,
    arguments: list[str],
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # Hides local clusters.
    found, _, err = ftd_here(*arguments, patch=monkeypatch, said=capsys)
    assert found == code
    assert says in err


def test_an_error_is_one_line_and_the_exit_code_of_the_process(tmp_path: Path) -> None:
    done = ftd("status", directory=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("ftd: ") and "Traceback" not in done.stderr


@pytest.mark.parametrize("as_json", [False, True])
def test_a_refused_drain_has_exit_code_1_and_its_reason_in_every_form(
    tmp_path: Path, as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **asked: Any) -> None:
        assert asked == {"node": "node-1", "when_possible": False, "cancel": False}
        raise RequestRejected("node-1 is not drained")

    monkeypatch.setattr("ftd.cli.client.ask", refuse)
    arguments = ["drain", "node-1", "--broker", "mqtt://h", *(["--json"] if as_json else [])]
    code, out, err = ftd_here(*arguments, patch=monkeypatch, said=capsys)
    assert code == 1 and "node-1 is not drained" in err
    if as_json:
        assert json.loads(out) == {
            "node": "node-1", "cluster": "ftd", "outcome": "refused", "detail": "node-1 is not drained",
        }  # fmt: skip
    else:
        assert out == ""


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("refused", [False, True])
def test_a_snapshot_now_has_one_answer_and_exit_code_1_if_there_is_none(
    as_json: bool, refused: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    detail = "no snapshot is taken: the job is paused" if refused else "the snapshot of step 7 is complete"

    def answer(*_: Any, **asked: Any) -> Answer:
        assert asked == {"now": True}
        if refused:
            raise RequestRejected(detail)
        return Answer(request="r", accepted=True, detail=detail, outcome="complete")

    monkeypatch.setattr("ftd.cli.client.ask", answer)
    arguments = ["snapshot", "now", "--broker", "mqtt://h", *(["--json"] if as_json else [])]
    code, out, err = ftd_here(*arguments, patch=monkeypatch, said=capsys)
    assert code == (1 if refused else 0) and (detail in err) is refused
    outcome = "refused" if refused else "complete"
    if as_json:
        assert json.loads(out) == {"outcome": outcome, "detail": detail, "cluster": "ftd"}
    else:
        assert out == ("" if refused else f"{detail}\n")


def test_no_broker_is_exit_code_3(tmp_path: Path) -> None:
    url = f"mqtt://127.0.0.1:{free_port()}"
    done = ftd("drain", "node-0", "--broker", url, directory=tmp_path)
    assert done.returncode == 3
    assert f"the MQTT broker at {url} does not answer" in done.stderr


def test_a_broker_without_a_coordinator_is_exit_code_3(tmp_path: Path, mosquitto: RunningBroker) -> None:
    done = ftd("status", "--json", directory=tmp_path, FTD_BROKER=mosquitto.address.url, FTD_CLUSTER="lab")
    assert done.returncode == 3
    assert "no coordinator answers" in done.stderr and "'lab'" in done.stderr


def test_a_drain_waits_long_only_for_a_coordinator_that_leads(
    mosquitto: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftd.transport.client.ANSWER_S", 0.3)

    async def drain() -> None:
        async with ClusterClient(ClusterAddress(broker=mosquitto.address)) as client:
            await client.request(DrainRequest(**client.envelope(), node="node-0"))

    with pytest.raises(UnreachableError, match="no coordinator answers"):
        asyncio.run(asyncio.wait_for(drain(), DECISION_ANSWER_S / 2))


def test_a_missing_answer_names_the_possible_causes() -> None:
    """Three causes look the same to a client: no coordinator, no leader, and a broker that does not deliver."""

    async def message_for(state: dict[str, Any], topic: str | None = None) -> str:
        broker = BrokerAddress(host="h", port=1, username="grafana", password="x")
        client = ClusterClient(ClusterAddress(broker=broker, cluster="lab"))
        if state:
            client._on_message(client.topics.cluster_state, json.dumps(state).encode(), True)
        with pytest.raises(UnreachableError) as caught:
            await client.request(StatusRequest(**client.envelope()), topic=topic, timeout_s=0.01)
        return str(caught.value)

    assert "is it running" in asyncio.run(message_for({}))
    assert "host-a leads" in asyncio.run(message_for({"leader": "host-a"}))
    assert "may grafana write there (ftd acl)" in asyncio.run(message_for({"leader": "host-a"}))
    assert "it was stopped" in asyncio.run(message_for({"phase": "UNREACHABLE", "reason": "it was stopped"}))
    assert "is the node up, and may grafana" in asyncio.run(message_for({}, "ftd/v2/lab/chaos/host-a"))


def test_a_request_to_a_node_that_is_not_there_is_rejected_at_once() -> None:
    """Nobody would answer it: the names that the cluster has are more use than a wait."""

    async def ask(state: dict[str, Any], node: str) -> str:
        client = ClusterClient(ClusterAddress(broker=BrokerAddress(host="h", port=1), cluster="lab"))
        client._on_message(client.topics.cluster_state, json.dumps(state).encode(), True)
        try:
            await client.require_present(node)
        except RequestRejected as error:
            return str(error)
        return ""

    nodes = {"b": {"state": "HEALTHY"}, "a": {"state": "UNHEALTHY"}, "c": {"state": "OFFLINE"}}
    state = {"phase": "RUNNING", "nodes": nodes}
    assert asyncio.run(ask(state, "d")) == "there is no node 'd'; nodes: a, b, c"
    assert asyncio.run(ask(state, "c")) == "c is offline; nodes that are not: a, b"
    assert asyncio.run(ask({"phase": "UNREACHABLE"}, "a/+")).startswith("'a/+' is no name of a node")
    assert asyncio.run(ask({"phase": "WAITING", "nodes": {}}, "d")) == "there is no node 'd'; nodes: none"
    assert asyncio.run(ask(state, "a")) == ""
    unknown = {"phase": "UNREACHABLE", "reason": "it was stopped", "nodes": {}}
    assert asyncio.run(ask(unknown, "d")) == "", "nodes answer without a coordinator"


@pytest.fixture
def cluster(tmp_path: Path, mosquitto: RunningBroker) -> Iterator[dict[str, str]]:
    """Start a coordinator and yield the environment by which commands find it."""
    config = tmp_path / "ftd.toml"
    config.write_text(f'[broker]\nurl = "{mosquitto.address.url}"\n[coordinator]\nstate_dir = "state"\n')
    process = subprocess.Popen(
        [sys.executable, "-m", "ftd.cli.main", "coordinator", "--config", str(config)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "CoordinatorStarted" in line:
            break
    reader = threading.Thread(target=process.stderr.read, daemon=True)
    reader.start()
    yield {"FTD_BROKER": mosquitto.address.url}
    process.kill()
    process.wait()


def test_a_session_with_a_cluster(
    tmp_path: Path,
    cluster: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(*arguments: str, code: int = 0) -> str:
        """Return standard output if the command succeeds, otherwise standard error."""
        found, out, err = ftd_here(*arguments, patch=monkeypatch, said=capsys, **cluster)
        assert found == code, err
        return out if code == 0 else err

    monkeypatch.chdir(ROOT)
    assert json.loads(run("status", "--json"))["phase"] == "WAITING"

    job_id = json.loads(run("submit", "examples/mlp.toml", "--steps", "7", "--json"))["job"]
    assert job_id.startswith("mlp-")
    assert job_id in run("status")
    assert "under way" in run("submit", "examples/mlp.toml", code=1)
    assert [json.loads(line)["event"] for line in run("events", "--json").splitlines()] == [
        "CoordinatorStarted",
        "JobSubmitted",
    ]
    assert "JobSubmitted" in run("events", "--last", "1")

    once = run("top", "--once")
    assert "WAITING" in once and once.startswith("╭"), "the view alone"
    page = tmp_path / "mlp.html"
    run("report", "mlp", "--html", str(page))
    assert "running, started" in page.read_text()
    assert "running" in run("report", job_id)

    for command in (
        ["drain", "node-9"],
        ["stop", "gpt"],
        ["story", "node-9"],
        ["story", "7"],
        ["report", "x"],
    ):
        assert command[1] in run(*command, code=1)
    for command in (["drain", "node-9"], ["readmit", "node-9"], ["chaos", "kill", "node-9"]):
        assert "there is no node 'node-9'; nodes: none" in run(*command, code=1)

    assert json.loads(run("stop", "mlp", "--json"))["job"] == "mlp"


def test_waiting_for_a_job_ends_with_it(tmp_path: Path, cluster: dict[str, str]) -> None:
    waiting = subprocess.Popen(
        [sys.executable, "-m", "ftd.cli.main", "submit", "examples/mlp.toml", "--wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **cluster},
    )
    assert waiting.stdout is not None and waiting.stderr is not None
    job_id = waiting.stdout.readline().strip()
    assert job_id.startswith("mlp-") and waiting.poll() is None
    ftd("stop", job_id, directory=tmp_path, **cluster)
    assert "stop" in waiting.stderr.read()
    assert waiting.wait(100) == 1


def test_events_follow_prints_new_events(tmp_path: Path, cluster: dict[str, str]) -> None:
    # A shell that runs the tests in the background ignores Ctrl-C, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    follower = subprocess.Popen(
        [sys.executable, "-m", "ftd.cli.main", "events", "--follow", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **cluster},
    )
    assert follower.stdout is not None
    assert json.loads(follower.stdout.readline())["event"] == "CoordinatorStarted"
    ftd("submit", "examples/mlp.toml", directory=tmp_path, **cluster)
    assert json.loads(follower.stdout.readline())["event"] == "JobSubmitted"
    follower.send_signal(2)
    assert follower.wait(100) == 130


def test_a_digit_that_is_no_number_is_the_name_of_an_unknown_node(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ftd.observe.view.files.read_report", lambda *_: SimpleNamespace(events=()))
    assert ftd_here("story", "run.json", "²", patch=monkeypatch, said=capsys) == (
        1,
        "",
        "ftd: no event names a node '²' (known nodes: none)\n",
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        ("{", "is not a report"),
        ('{"schema": 7}', "schema is 7"),
        ("[]", "is not a report"),
    ],
)
def test_a_file_that_is_not_a_report_is_rejected(tmp_path: Path, content: str | None, says: str) -> None:
    file = tmp_path / "run.json"
    if content is not None:
        file.write_text(content)
    done = ftd("report", str(file), "--html", str(tmp_path / "run.html"), directory=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert says in done.stderr


def test_planning_shows_templates_and_pipelines(tmp_path: Path) -> None:
    options = ("plan", "examples/mlp.toml", "--nodes", "3", "--check")
    page = ftd(*options, directory=tmp_path)
    assert page.returncode == 0, page.stderr
    assert "Templates" in page.stdout and "Chosen" in page.stdout and "expected step" in page.stdout
    assert "the paper's plan" in page.stdout and "integer program (Pyomo): equal" in page.stdout
    data = json.loads(ftd(*options, "--json", directory=tmp_path).stdout)
    chosen = data["instantiation"]["pipelines"]
    assert data["tolerate"] == 1 and len(chosen) >= 2
    assert sum(pipeline["microbatches"] for pipeline in chosen) == data["microbatches"] == 12
    check = data["batch_check"]
    assert check["agrees"] is True
    assert check["microbatches"] == [pipeline["microbatches"] for pipeline in chosen]


def measured_job(directory: Path) -> Path:
    """Write an example's job with a profile, so that planning it measures nothing."""
    numbers = [field.name for field in msgspec.structs.fields(LayerProfile) if field.required]
    measured = ModelProfile(layers=(LayerProfile(**dict.fromkeys(numbers, 1)),) * 4, microbatch_rows=4)
    save_profile(directory / "saved.json", profile_document(measured))
    job = directory / "job.toml"
    text = (ROOT / "examples" / "mlp.toml").read_text().replace("mlp.py", f"{ROOT}/examples/mlp.py")
    job.write_text(f'{text}[planner]\nprofile = "saved.json"\n')
    return job


@pytest.mark.parametrize(
    ("module", "content", "says"),
    [
        (
            "highspy",
            "raise ImportError('not here')",
            "HiGHS cannot be used: the package highspy is missing or broken",
        ),
        ("highspy", "", "HiGHS failed: "),
        ("pyomo", "raise ImportError('not here')", "Pyomo cannot be imported (not here)"),
    ],
)
def test_a_broken_solver_does_not_prevent_planning(
    tmp_path: Path, module: str, content: str, says: str
) -> None:
    (tmp_path / f"{module}.py").write_text(content)
    job = measured_job(tmp_path)
    options = ("plan", str(job), "--nodes", "3", "--check")
    page = ftd(*options, directory=tmp_path, PYTHONPATH=str(tmp_path))
    assert page.returncode == 0, page.stderr
    text = " ".join(page.stdout.split())
    assert f"batch distribution not checked against the integer program: {says}" in text
    data = json.loads(ftd(*options, "--json", directory=tmp_path, PYTHONPATH=str(tmp_path)).stdout)
    assert data["instantiation"]["pipelines"] and data["batch_check"]["agrees"] is None
    assert says in data["batch_check"]["reason"]


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("def build():\n    raise RuntimeError('no data')\n", "no data"),
        ("import nothing_like_this\n", "nothing_like_this"),
    ],
)
def test_a_training_function_that_fails_is_a_configuration_error(
    tmp_path: Path, script: str, says: str
) -> None:
    """``test_training`` covers wrong return values of the function."""
    (tmp_path / "train.py").write_text(script)
    job = tmp_path / "job.toml"
    job.write_text(
        'name = "x"\nsteps = 1\n[training]\nfunction = "train.py:build"\nglobal_batch = 8\nmicrobatch = 4\n'
    )
    done = ftd("plan", str(job), "--nodes", "2", directory=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr and "Traceback" not in done.stderr


def test_a_tolerance_too_large_for_the_nodes_names_the_field_and_what_works(tmp_path: Path) -> None:
    job = measured_job(tmp_path)
    job.write_text(job.read_text().replace("failures = 1", "failures = 4"))
    done = ftd("plan", str(job), "--nodes", "3", directory=tmp_path)
    assert done.returncode == 2
    assert "tolerance.failures = 4" in done.stderr and "at most 2" in done.stderr


@pytest.mark.parametrize(
    "module",
    ["ftd.coordinator.daemon", "ftd.node.daemon", "ftd.cli.plan", "ftd.transport.client", "planner.planner"],
)
def test_our_processes_do_not_load_torch(module: str) -> None:
    script = f"import sys, {module}; print(*sorted(m for m in sys.modules if m.split('.')[0] == 'torch'))"
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=ROOT, timeout=240
    )
    assert done.stdout.strip() == ""


def test_no_command_loads_modules_for_its_help_that_only_daemons_need() -> None:
    heavy = {"pyomo", "numpy", "scipy", "aiomqtt", "rich", "uvloop", "torch", "amqtt"}
    script = (
        "import sys\nfrom typer.main import get_command\nfrom ftd.cli.main import app\n"
        "assert len(dict(get_command(app).commands)) > 25\nprint(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=ROOT, timeout=240
    )
    assert not heavy & {name.split(".")[0] for name in done.stdout.split()}


def test_a_coordinator_does_not_load_what_it_does_not_serve() -> None:
    script = (
        "import sys\nfrom ftd.imports import quick_imports\n"
        "with quick_imports():\n    import ftd.coordinator.daemon\n"
        "print(*{'aiohttp', 'prometheus_client', 'rich'} & set(sys.modules))\nimport rich"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=ROOT, timeout=240
    )
    assert done.stdout.strip() == ""


def test_the_version_is_that_of_the_package(tmp_path: Path) -> None:
    done = ftd("--version", directory=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"ftd {version('ftd')}\n")


def test_output_to_a_full_disk_is_an_error_in_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ftd.cli.main", "config", "show"],
            stdout=full,
            stderr=subprocess.PIPE,
            cwd=tmp_path,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == (
        "ftd: the output cannot be written: No space left on device (free some space, or write elsewhere)\n"
    )


def test_a_terminal_without_unicode_shows_question_marks(tmp_path: Path) -> None:
    done = ftd("config", "show", directory=tmp_path, PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "?" in done.stdout


def test_closed_streams_leave_their_numbers_to_no_connection() -> None:
    program = (
        "import socket, sys; from ftd.cli.main import prepare_streams; prepare_streams(); print('nobody reads this'); "
        "sys.exit(socket.socket().fileno() <= 2 or sys.stdin.read() != '')"
    )
    done = subprocess.run(
        ["/bin/sh", "-c", 'exec "$0" -c "$1" <&- >&-', sys.executable, program], check=False
    )
    assert done.returncode == 0
