"""Tests of ``ftd install``: systemd accepts the files, and nothing of the user's is overwritten."""

import configparser
import errno
import os
import platform
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ftd.cli.main import app
from ftd.cli.units.files import files_for, hidden_from_others, sample_config
from ftd.cli.units.units import InstallPaths, Role, tmpfiles_text, unit_name, unit_text
from ftd.config.daemon import parse_daemon_config
from ftd.errors import ConfigurationError

FTD = Path(sys.executable).parent / "ftd"
MAX_EXPOSURE = 25
"""Largest exposure of 100 by ``systemd-analyze security`` of a well-protected service."""

analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")


def systemd_analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.processes
@analyze
@pytest.mark.parametrize("role", ["node", "coordinator"])
def test_systemd_accepts_the_unit_and_finds_it_well_protected(tmp_path: Path, role: Role) -> None:
    unit = tmp_path / unit_name(role)
    unit.write_text(unit_text(role, InstallPaths(executable=FTD, writable=[Path("/srv/checkpoints")])))
    verified = systemd_analyze("verify", "--recursive-errors=no", str(unit))
    assert (verified.returncode, verified.stderr.count(unit.name)) == (0, 0), verified.stderr
    security = systemd_analyze("security", "--offline=true", f"--threshold={MAX_EXPOSURE}", str(unit))
    assert security.returncode == 0, security.stdout
    # Show that the check can fail: systemd reports an unknown key.
    unit.write_text(unit.read_text().replace("WatchdogSec", "WatchDogSec"))
    assert systemd_analyze("verify", "--recursive-errors=no", str(unit)).returncode != 0


def test_the_unit_has_the_settings_that_the_daemons_rely_on() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(unit_text("node", InstallPaths(executable=Path("/opt/ftd/bin/ftd"))))
    service = unit["Service"]
    assert service["ExecStart"] == "/opt/ftd/bin/ftd node --config /etc/ftd/ftd.toml"
    assert (service["Type"], service["KillMode"], service["RestartPreventExitStatus"]) == (
        "notify",
        "mixed",
        "2",
    )
    node, coordinator = (unit_text(role, InstallPaths(executable=FTD)) for role in ("node", "coordinator"))
    tunable = "Environment=GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold="
    assert (tunable in node) == (platform.machine() == "x86_64")
    assert tunable not in coordinator
    # systemd removes a runtime directory when a unit of it stops, and both daemons may be on one host.
    assert "RuntimeDirectory=ftd\n" in node and "RuntimeDirectory=" not in coordinator
    assert int(service["TimeoutStopSec"]) > parse_daemon_config({}, directory=Path("/")).timing.leave_s


def test_the_sample_configuration_is_valid(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("sesame\n")
    (tmp_path / "secret").chmod(0o640)
    config = parse_daemon_config(tomllib.loads(sample_config()), directory=tmp_path)
    assert config.require_secret() == "sesame"


def test_paths_with_spaces_are_single_words() -> None:
    place = Path("/srv/my %i")
    layout = InstallPaths(executable=place / "ftd", config=place / "ftd.toml", writable=[place])
    unit, *_, temporary, _ = (file.text for file in files_for("node", layout))
    assert 'ExecStart="/srv/my %%i/ftd" node --config "/srv/my %%i/ftd.toml"\n' in unit
    assert 'ReadWritePaths="/srv/my %%i"\n' in unit
    assert 'z "/srv/my %%i/ftd.toml" - - ftd -\n' in temporary


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("systemd-tmpfiles") is None, reason="systemd is not installed")
@pytest.mark.parametrize("name", ["ftd [lab].toml", "ftd[lab]*?.toml", "ftd 50%.toml", "ftd\\.toml"])
def test_tmpfiles_finds_the_configuration_whatever_its_name(tmp_path: Path, name: str) -> None:
    config = tmp_path / name
    config.touch(0o600)
    [line] = [line for line in tmpfiles_text(config).splitlines() if line.startswith("z")]
    (tmp_path / "only.conf").write_text(line.replace(" - - ftd -", " 0640 - - -") + "\n")
    command = ["systemd-tmpfiles", "--create", str(tmp_path / "only.conf")]
    subprocess.run(command, capture_output=True, timeout=60, check=True)
    assert stat.S_IMODE(config.stat().st_mode) == 0o640


def test_a_pattern_in_the_name_of_the_configuration_stands_for_itself() -> None:
    assert "z /srv/a\\\\[b]\\\\*.toml - - ftd -\n" in tmpfiles_text(Path("/srv/a[b]*.toml"))


def test_the_group_of_the_service_may_read_the_configuration(tmp_path: Path) -> None:
    files = files_for("node", InstallPaths(executable=FTD, config=Path("/srv/ftd.toml")))
    [config] = [file for file in files if file.keep]
    [temporary] = [file for file in files if file.path == Path("/etc/tmpfiles.d/ftd.conf")]
    assert config.mode & stat.S_IRGRP and not config.mode & stat.S_IROTH
    assert "z /srv/ftd.toml - - ftd -\n" in temporary.text


def test_the_next_commands_name_the_chosen_configuration(tmp_path: Path) -> None:
    command = ["install", "node", "--root", str(tmp_path), "--executable", str(FTD)]
    usual = CliRunner().invoke(app, command).output
    assert "vi} /etc/ftd/ftd.toml\n" in usual and "/dev/stdin /etc/ftd/secret " in usual
    elsewhere = CliRunner().invoke(app, [*command, "--config", "/srv/my ftd/ftd.toml"]).output
    assert "ftd config check --config '/srv/my ftd/ftd.toml' --node\n" in elsewhere
    assert "vi} '/srv/my ftd/ftd.toml'\n" in elsewhere and "/dev/stdin '/srv/my ftd/secret' " in elsewhere
    assert "/etc/ftd/ftd.toml" not in elsewhere.partition("Next:")[2]


def test_installing_twice_changes_nothing_and_keeps_the_configuration(tmp_path: Path) -> None:
    command = ["install", "node", "--root", str(tmp_path), "--executable", str(FTD)]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0 and first.output.count("written") == 4
    config = tmp_path / "etc/ftd/ftd.toml"
    assert stat.S_IMODE(config.stat().st_mode) == 0o640
    config.write_text("# mine\n")
    second = CliRunner().invoke(app, command)
    assert (second.output.count("unchanged"), second.output.count("kept")) == (3, 1)
    assert config.read_text() == "# mine\n"
    assert [p for p in tmp_path.rglob(".*")] == []


def test_a_dry_run_prints_and_writes_nothing(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["install", "coordinator", "--dry-run", "--root", str(tmp_path), "--executable", str(FTD)]
    )
    assert result.exit_code == 0 and "ExecStart=" in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_configuration_below_two_slashes_is_below_the_root(tmp_path: Path, dry_run: bool) -> None:
    command = [
        "install",
        "node",
        "--root",
        str(tmp_path),
        "--executable",
        str(FTD),
        "--config",
        "//srv/ftd.toml",
    ]
    result = CliRunner().invoke(app, [*command, "--dry-run"] if dry_run else command)
    assert result.exit_code == 0 and str(tmp_path / "srv/ftd.toml") in result.output
    assert (tmp_path / "srv/ftd.toml").exists() != dry_run


def test_a_directory_is_no_configuration(tmp_path: Path) -> None:
    (tmp_path / "etc/ftd").mkdir(parents=True)
    command = ["install", "node", "--root", str(tmp_path), "--executable", str(FTD), "--config", "/etc/ftd"]
    with pytest.raises(ConfigurationError, match="--config: /etc/ftd is a directory"):
        CliRunner().invoke(app, command, catch_exceptions=False)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_program_in_a_directory_of_somebody_else_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        if path.parent == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return usual(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    command = ["install", "node", "--dry-run", "--executable", str(tmp_path / "ftd")]
    with pytest.raises(ConfigurationError, match="--executable: "):
        CliRunner().invoke(app, command, catch_exceptions=False)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--config", "ftd.toml"], "--config"),
        (["--writable", "checkpoints"], "--writable"),
        (["--executable", "/nonexistent/ftd"], "--executable"),
        (["--root", "/proc/nowhere"], "cannot be written"),
    ],
)
def test_wrong_options_are_rejected(arguments: list[str], field: str) -> None:
    base = ["install", "node", *([] if "--executable" in arguments else ["--executable", str(FTD)])]
    result = subprocess.run(
        [str(FTD), *base, *arguments], capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 2 and field in result.stderr and "Traceback" not in result.stderr


def test_a_program_that_the_service_cannot_run_is_detected(tmp_path: Path) -> None:
    program = tmp_path / "closed" / "ftd"
    program.parent.mkdir(mode=0o700)
    program.touch(0o755)
    tmp_path.chmod(0o755)
    hidden = hidden_from_others(program)
    assert hidden is not None and program.is_relative_to(hidden)
    assert len(files_for("node", InstallPaths(executable=program))) == 4
