"""Tests of options and arguments that commands reject before anything is sent, played or measured."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from ftd.config.clusters import register_cluster
from ftd.errors import ConfigurationError
from ftd.observe.view.files import require_distinct
from tests.helpers.commands import ftd_here

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["kill", "node-2", "--device", "0"], "--device: it has no effect on kill of a whole node"),
        (
            ["stop", "node-2", "--target", "node", "--device", "1"],
            "--device: it has no effect on stop of a whole node (add --target trainer)",
        ),
        (["disconnect", "node-2", "--for", "inf"], "--for: inf is not allowed (write seconds above 0)"),
        (["stop", "node-2", "--for", "nan"], "--for: nan is not allowed"),
        (["hang", "node-2", "--for", "0"], "--for: 0 is not allowed"),
        (["run", "none.toml", "--logs", "logs"], "--logs: only the logs of a cluster that is started"),
        (
            ["run", "none.toml", "--local", "--cluster", "lab"],
            "--cluster: it names a running cluster, and --local starts one (leave out --local or --cluster)",
        ),
        (["slow", "node-2", "--factor", "inf"], "--factor: inf is not allowed (write 1 or more)"),
    ],
)
def test_options_without_effect_are_rejected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    code, _, err = ftd_here(
        "chaos", *arguments, patch=monkeypatch, said=capsys, FTD_BROKER="mqtt://127.0.0.1:9"
    )
    assert code == 2
    assert says in err


def test_a_number_of_thousands_of_digits_is_no_interval_and_no_generation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ftd.observe.view.files.read_report", lambda *_: SimpleNamespace(events=()))
    digits = "9" * 5000
    code, _, err = ftd_here(
        "snapshot", "every", digits, patch=monkeypatch, said=capsys, FTD_BROKER="mqtt://127.0.0.1:9"
    )
    assert code == 2 and "is not an interval (write a number of steps, auto" in err
    code, _, err = ftd_here("story", "run.json", digits, patch=monkeypatch, said=capsys)
    assert code == 1 and "no event names a node" in err


@pytest.mark.parametrize("name", ["no/such", "."], ids=["missing directory", "directory"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["sim", "--scenario", f"{EXAMPLES}/chaos/node-killed.toml", "--junit"],
        ["chaos", "run", "--local", f"{EXAMPLES}/chaos/node-killed.toml", "--json"],
        ["chaos", "soak", f"{EXAMPLES}/mlp.toml", "--report"],
        ["local", f"{EXAMPLES}/mlp.toml", "--nodes", "1", "--report"],
        ["report", "gpt", "--html"],
        ["report", "gpt", "--json"],
        ["profile", f"{EXAMPLES}/mlp.toml", "--output"],
    ],
    ids=lambda arguments: " ".join(part for part in arguments if "/" not in part),
)
def test_a_file_that_cannot_be_written_is_rejected_before_the_work(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    name: str,
) -> None:
    code, out, err = ftd_here(
        *arguments, str(tmp_path / name), patch=monkeypatch, said=capsys, FTD_BROKER="mqtt://127.0.0.1:9"
    )
    assert (code, out) == (2, "")
    assert f"{arguments[-1]}: " in err
    assert ("is a directory" if name == "." else "does not exist") in err


def test_a_binary_file_is_called_no_toml_and_not_unreadable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "job.toml").write_bytes(b"\x90\x00")
    code, _, err = ftd_here("sim", "--scenario", str(tmp_path / "job.toml"), patch=monkeypatch, said=capsys)
    assert code == 2 and "job.toml is not valid TOML" in err and "(correct the file)" in err


SCENARIO = f"{EXAMPLES}/chaos/node-killed.toml"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["chaos", "run", SCENARIO, "--junit", "a", "--json", "./a"],
            "--json: a is also the file of --junit",
        ),
        (
            ["chaos", "run", "--local", SCENARIO, "--json", "a", "--logs", "a"],
            "--logs: a is also the file of",
        ),
        (
            ["chaos", "run", "s.toml", "--junit", "s.toml"],
            "--junit: s.toml is also the file of SCENARIO.toml",
        ),
        (
            ["chaos", "soak", "job.toml", "--report", "a.png", "--plot", "a.png"],
            "--plot: a.png is also the file of --report",
        ),
        (
            ["sim", "--scenario", "s.toml", "--junit", "s.toml"],
            "--junit: s.toml is also the file of --scenario",
        ),
        (["report", "gpt", "--html", "a.svg", "--plot", "a.svg"], "--html: a.svg is also the file of --plot"),
        (["report", "r.json", "--json", "link.json"], "--json: link.json is also the file of JOB"),
        (["trace", "--out", "a.png", "--out", "a.png"], "--out: a.png is also the file of --out"),
        (
            ["local", "job.toml", "--nodes", "1", "--report", "job.toml"],
            "job.toml is also the file of JOB.toml",
        ),
        (["profile", "job.toml", "--output", "job.toml"], "--output: job.toml is also the file of JOB.toml"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_no_command_writes_a_file_twice_or_one_that_it_reads(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ftd.transport.address.user_runtime_dir", lambda: tmp_path)
    (tmp_path / "s.toml").write_text(Path(SCENARIO).read_text())
    job = (EXAMPLES / "mlp.toml").read_text().replace('"mlp.py', f'"{EXAMPLES}/mlp.py')
    (tmp_path / "job.toml").write_text(job)
    (tmp_path / "r.json").write_text("{}")
    (tmp_path / "link.json").symlink_to(tmp_path / "r.json")
    before = {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()}
    code, out, err = ftd_here(*arguments, patch=monkeypatch, said=capsys, FTD_BROKER="mqtt://127.0.0.1:9")
    assert (code, out) == (2, "")
    assert says in err and "(name another file)" in err
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()} == before


def test_a_device_may_be_named_for_several_files() -> None:
    require_distinct(("--junit", Path("/dev/null")), ("--json", Path("/dev/null")))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["acl", "--nodes", " , "], "--nodes: ' , ' names no node (write names such as host-a,host-b)"),
        (
            ["install", "node", "--dry-run", "--config", "/etc/a\nExecStartPre=/bin/b"],
            "--config: '/etc/a\\nExecStartPre=/bin/b' has a character that a systemd unit cannot hold",
        ),
        (["install", "node", "--dry-run", "--writable", "/a\tb"], "--writable: '/a\\tb' has a character"),
    ],
    ids=["no node", "line break", "tab"],
)
def test_names_and_paths_that_a_file_cannot_hold_are_rejected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    code, out, err = ftd_here(*arguments, patch=monkeypatch, said=capsys)
    assert (code, out) == (2, "") and says in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["init", "pipe", "--force", "--function", "train.py:build"],
        ["checkpoint", "export", ".", "pipe", "--format", "safetensors"],
        ["data", "tokenize", "a.txt", "--tokenizer", "bytes", "--out", "pipe", "--overwrite"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_device_or_a_pipe_is_not_replaced_by_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    code, _, err = ftd_here(*arguments, patch=monkeypatch, said=capsys)
    assert code == 2 and "pipe is not a file (name a file)" in err


def test_a_full_runtime_directory_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def write(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("ftd.config.clusters.write_whole", write)
    with (
        pytest.raises(
            ConfigurationError, match=r"ftd/local-ftd.json, by which commands find .* No space left"
        ),
        register_cluster(None, Path("job.toml")),
    ):
        pass
