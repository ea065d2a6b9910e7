"""Tests of ``ftd doctor`` with real daemons on a broker with TLS and an ACL, and with wrong configurations."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftd.cli.checks import host
from ftd.cli.checks.configuration import check_configuration, is_broker_known
from ftd.cli.checks.host import check_directory, check_memory, check_names, check_ports, check_torch
from ftd.config.daemon import examine_daemon_config, parse_daemon_config
from ftd.transport.mqtt.mosquitto import free_port
from tests.helpers.secure_broker import SecureBroker, needs_mosquitto
from tests.helpers.waiting import PATIENCE_S

FTD = str(Path(sys.executable).parent / "ftd")


def write_config(directory: Path, broker: SecureBroker, port: int, *, name: str, user: str) -> Path:
    directory.mkdir()
    for file, content in (("secret", "sesame"), ("password", user[::-1])):
        (directory / file).write_text(content)
        (directory / file).chmod(0o600)
    path = directory / "ftd.toml"
    path.write_text(
        f'cluster = "lab"\nsecret_file = "secret"\n'
        f'[broker]\nurl = "mqtts://localhost:{port}"\nca_file = "{broker.directory}/ca.pem"\n'
        f'username = "{user}"\npassword_file = "password"\n'
        f'[node]\nname = "{name}"\nhost = "127.0.0.1"\nruntime_dir = "r"\n'
        f'snapshot_dir = "/dev/shm/ftd-test-{os.getpid()}"\n'
        '[coordinator]\nstate_dir = "state"\n'
    )
    return path


def examine(config: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    command = [FTD, "doctor", "--config", str(config), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, {finding["check"]: finding for finding in json.loads(done.stdout)}


@pytest.fixture
def daemons() -> Iterator[list[subprocess.Popen[bytes]]]:
    running: list[subprocess.Popen[bytes]] = []
    yield running
    for process in running:
        process.send_signal(signal.SIGTERM)
    for process in running:
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@needs_mosquitto
def test_a_correct_host_passes_all_checks(
    secure: SecureBroker, port: int, short_path: Path, daemons: list[subprocess.Popen[bytes]]
) -> None:
    def configured(name: str, user: str) -> Path:
        return write_config(short_path / f"{name}-{user}", secure, port, name=name, user=user)

    coordinator, node = configured("leader", "coordinator"), configured("host-a", "host-a")
    for role, config in (("coordinator", coordinator), ("node", node)):
        daemons.append(subprocess.Popen([FTD, role, "--config", str(config)], stdout=subprocess.DEVNULL))
    operator = configured("laptop", "alice")
    deadline = time.monotonic() + PATIENCE_S * 2
    while True:
        command = [FTD, "status", "--config", str(operator), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        if done.returncode == 0 and json.loads(done.stdout)["nodes"].get("host-a"):
            break
        assert time.monotonic() < deadline, (done.stdout, done.stderr)
    rc, found = examine(node)
    assert rc == 0, found
    wanted = {"configuration", "broker", "rights", "coordinator", "version", "clock", "torch"}
    assert {check: found[check]["verdict"] for check in wanted} == dict.fromkeys(wanted, "ok"), found
    assert all(process.poll() is None for process in daemons)


@needs_mosquitto
def test_the_password_of_another_node_fails_the_check_of_rights(
    secure: SecureBroker, port: int, tmp_path: Path
) -> None:
    rc, found = examine(write_config(tmp_path / "node", secure, port, name="host-a", user="host-b"))
    assert (rc, found["rights"]["verdict"]) == (1, "failed"), found
    assert found["coordinator"]["verdict"] == "warning"


@pytest.mark.processes
def test_a_missing_broker_fails_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "ftd.toml").write_text('[broker]\nurl = "mqtt://127.0.0.1:1"\n')
    rc, found = examine(tmp_path / "ftd.toml")
    assert rc == 1
    assert found["broker"]["verdict"] == found["configuration"]["verdict"] == "failed"
    assert all(finding["remedy"] for finding in found.values() if finding["verdict"] != "ok")


@pytest.mark.processes
@pytest.mark.parametrize("content", ['secret_file = "gone"\n', 'secret_file = "empty"\n'])
def test_an_unreadable_secret_does_not_stop_the_other_checks(tmp_path: Path, content: str) -> None:
    (tmp_path / "empty").touch(mode=0o600)
    (tmp_path / "ftd.toml").write_text(content + '[broker]\nurl = "mqtt://127.0.0.1:1"\n')
    rc, found = examine(tmp_path / "ftd.toml")
    assert rc == 1
    assert {"broker", "names", "torch", "snapshot memory"} <= set(found)
    assert (found["configuration"]["verdict"], bool(found["configuration"]["remedy"])) == ("failed", True)
    assert "secret_file" in found["configuration"]["detail"]


def test_the_doctor_continues_with_the_valid_part(tmp_path: Path) -> None:
    (tmp_path / "ftd.toml").write_text('[broker]\nuri = "mqtt://127.0.0.1:1"\n[node]\ndevices = 0\n')
    config, collector = examine_daemon_config(tmp_path / "ftd.toml", environment={})
    details = [finding.detail for finding in check_configuration(config, collector)]
    assert [detail.split(": ")[1] for detail in details] == ["broker.uri", "node.devices", "secret"]
    assert not is_broker_known(collector)
    config, collector = examine_daemon_config(tmp_path / "gone.toml", environment={})
    assert [finding.verdict for finding in check_configuration(config, collector)] == ["failed"]
    assert not is_broker_known(collector)


def test_the_line_about_names_says_who_reaches_this_node(tmp_path: Path) -> None:
    def check(broker: str, host: str) -> tuple[str, str]:
        given = {"broker": {"url": f"mqtt://{broker}"}, "node": {"host": host}}
        found = check_names(parse_daemon_config(given, directory=tmp_path))
        return found.verdict, found.detail

    assert check("127.0.0.1", "127.0.0.1") == (
        "ok",
        "the broker's address 127.0.0.1 needs no lookup; other nodes reach this node at 127.0.0.1 only if they run "
        "on this host, too",
    )
    assert check("192.0.2.1", "127.0.0.1")[0] == "warning", "nodes of other hosts do not reach loopback"
    assert check("192.0.2.1", "192.0.2.2") == (
        "ok",
        "the broker's address 192.0.2.1 needs no lookup; other nodes reach this host at 192.0.2.2",
    )


def test_checks_of_the_host_find_problems(tmp_path: Path) -> None:
    config = parse_daemon_config(
        {
            "broker": {"url": "mqtt://no-such-host.invalid"},
            "node": {"snapshot_dir": str(tmp_path)},
        },
        directory=tmp_path,
    )
    assert check_names(config).verdict == "failed"
    with socket.create_server(("0.0.0.0", 0)) as other:
        ports = {"rendezvous_port": other.getsockname()[1], "snapshot_port": free_port()}
        config = parse_daemon_config({"node": ports}, directory=tmp_path)
        assert [finding.verdict for finding in check_ports(config)] == ["warning", "ok"]
    huge = parse_daemon_config({"node": {"snapshot_limit_mib": 1 << 40}}, directory=tmp_path)
    assert "snapshot_limit_mib" in check_memory(huge).remedy
    (tmp_path / "file").touch()
    assert check_directory("state directory", tmp_path / "file" / "state").verdict == "failed"
    assert check_directory("state directory", tmp_path / "new").verdict == "ok"
    assert not (tmp_path / "new").exists()


def test_a_directory_below_one_of_somebody_else_fails_its_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        if path.parent == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return usual(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(os, "access", lambda *_: False)
    result = check_directory("state directory", tmp_path / "state")
    assert (result.verdict, result.detail) == ("failed", f"{tmp_path} cannot be written")
    config = parse_daemon_config({"node": {"snapshot_dir": str(tmp_path)}}, directory=tmp_path)
    memory = check_memory(config)
    assert memory.verdict == "failed" and memory.detail.startswith(f"{tmp_path}: ")
    assert memory.detail.endswith("but this user cannot write there")


def test_a_link_counts_as_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc/sys")  # A file system that is certainly another one.
    assert host._file_system(Path("/proc/sys")) == "proc"
    config = parse_daemon_config({"node": {"snapshot_dir": str(tmp_path / "link")}}, directory=tmp_path)
    assert ", on proc" in check_memory(config).detail


def test_a_file_system_whose_path_has_a_space_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = "/dev/vda / ext4 rw 0 0\ntmpfs /mnt/ram\\040disk tmpfs rw,size=1024k 0 0\n"
    monkeypatch.setattr(Path, "read_text", lambda _path, **_options: mounts)
    assert host._file_system(Path("/mnt/ram disk/ftd")) == "tmpfs"
    assert host._file_system(Path("/mnt/ram")) == "ext4"


@pytest.mark.processes
def test_a_torch_that_hangs_fails_its_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = "import sys, time; print('a warning', file=sys.stderr, flush=True); time.sleep(60)"
    monkeypatch.setattr(host, "_PROBE", hanging)
    monkeypatch.setattr(host, "TORCH_PROBE_TIMEOUT_S", 2.0)
    result = check_torch(parse_daemon_config({}, directory=tmp_path))
    assert (result.verdict, result.detail) == (
        "failed",
        "importing it and checking the devices takes more than 2 s",
    )
