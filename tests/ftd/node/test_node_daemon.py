"""``ftd node`` by itself: wrong configuration, a missing broker, systemd, and a clean exit."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ftd import processes
from ftd.processes import (
    descendant_pids,
    is_alive,
    prepare_compile_cache,
    start_time,
    trainer_environment,
)
from ftd.transport.mqtt.session import MqttSession
from ftd.transport.wire.codec import decode_from_node, encode_to_nodes
from ftd.transport.wire.topics import Topics
from statemachine.messages.cluster import FromNode, RequestSteps, Stepped, ToNodes
from tests.helpers.brokers import RunningBroker
from tests.helpers.waiting import PATIENCE_S, until

pytestmark = pytest.mark.processes


@pytest.fixture
def directory(short_path: Path) -> Path:
    return short_path


def write_config(directory: Path, *, head: str = 'secret = "s"', node: str = "", port: int = 9) -> Path:
    path = directory / "ftd.toml"
    path.write_text(
        f'{head}\n[broker]\nurl = "mqtt://127.0.0.1:{port}"\n'
        f'[node]\nname = "node-0"\nhost = "127.0.0.1"\nruntime_dir = "{directory}/run"\n'
        f'snapshot_dir = "{directory}/memory"\npreload = []\n{node}\n'
    )
    path.chmod(0o600)
    return path


def command(config: Path) -> list[str]:
    return [sys.executable, "-P", "-m", "ftd.cli.main", "node", "--config", str(config)]


def start_error(config: Path) -> str:
    """Return what the daemon prints when it does not start."""
    done = subprocess.run(command(config), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_a_node_needs_the_secret(directory: Path) -> None:
    assert "secret" in start_error(write_config(directory, head=""))


def test_a_port_in_use_is_named_with_the_remedy(directory: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        error = start_error(write_config(directory, node=f"rendezvous_port = {port}"))
    assert "node.rendezvous_port" in error
    assert str(port) in error
    assert "0 takes any free one" in error
    assert not list((directory / "run").iterdir())


def test_snapshot_port_memory_and_directory_are_checked_at_start(directory: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        error = start_error(write_config(directory, node=f"snapshot_port = {taken.getsockname()[1]}"))
    assert "node.snapshot_port" in error
    error = start_error(write_config(directory, node="snapshot_limit_mib = 1000000000"))
    assert "node.snapshot_limit_mib" in error
    assert "1000000000 MiB" in error
    assert not (directory / "memory").exists()
    (directory / "memory").write_text("")
    assert "node.snapshot_dir" in start_error(write_config(directory))


def test_an_unusable_runtime_directory_is_reported(directory: Path) -> None:
    long = write_config(directory)
    long.write_text(long.read_text().replace(f"{directory}/run", f"{directory}/{'x' * 90}"))
    assert "too long for a unix socket" in start_error(long)
    (directory / "file").write_text("")
    blocked = write_config(directory)
    blocked.write_text(blocked.read_text().replace(f"{directory}/run", f"{directory}/file/run"))
    assert "node.runtime_dir" in start_error(blocked)


def test_it_waits_for_a_broker_and_leaves_cleanly(directory: Path) -> None:
    """It is ready for systemd without a broker, logs the problem once, and ends on SIGTERM with code 0."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(directory / "notify"))
        manager.settimeout(PATIENCE_S)
        environment = {**os.environ, "NOTIFY_SOCKET": str(directory / "notify")}
        log = directory / "log"
        with (
            log.open("w") as stream,
            subprocess.Popen(command(write_config(directory)), env=environment, stderr=stream) as daemon,
        ):
            try:
                assert b"READY=1" in manager.recv(4096)
                until(lambda: "not_connected" in log.read_text(), "the complaint about the broker")
                until(lambda: len(descendant_pids(daemon.pid)) >= 1, "a zygote")
                below = descendant_pids(daemon.pid)
                daemon.send_signal(signal.SIGTERM)
                assert b"STOPPING=1" in manager.recv(4096)
                assert daemon.wait(PATIENCE_S) == 0
            finally:
                daemon.kill()
    until(lambda: not any(is_alive(pid) for pid in below), "the zygote has ended")
    complaints = [
        line for line in map(json.loads, log.read_text().splitlines()) if line["level"] == "warning"
    ]
    assert len(complaints) == 1
    assert "127.0.0.1:9" in complaints[0]["broker"]
    assert not list((directory / "run").iterdir())


def test_leftovers_of_killed_daemons_are_removed(directory: Path) -> None:
    (directory / "run" / "999999999").mkdir(parents=True)
    (directory / "run" / "other").mkdir()
    with subprocess.Popen(command(write_config(directory)), stderr=subprocess.DEVNULL) as daemon:
        try:
            until((directory / "run" / str(daemon.pid)).exists, "its own directory")
            assert not (directory / "run" / "999999999").exists()
            assert (directory / "run" / "other").exists()
        finally:
            daemon.kill()


def test_a_process_whose_name_was_cut_in_a_character_is_seen() -> None:
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    name.write_bytes(b"\xd0")
    try:
        assert is_alive(os.getpid())
        assert start_time(os.getpid()) is not None
    finally:
        name.write_bytes(before)


def test_each_trainer_sees_its_own_gpu_or_shares_one(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "DEVICES", directory)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert trainer_environment(1) == {"CUDA_VISIBLE_DEVICES": "1"}, "what is there is not known here"
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (directory / name).touch()
    assert [trainer_environment(n)["CUDA_VISIBLE_DEVICES"] for n in range(4)] == ["0", "1", "0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert [trainer_environment(n)["CUDA_VISIBLE_DEVICES"] for n in range(3)] == ["4", "7", "4"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert trainer_environment(1)["CUDA_VISIBLE_DEVICES"] == "", "an empty variable hides all GPUs"


def test_the_compile_cache_is_private_to_the_user(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    place = directory / "cache" / "compiled"
    assert prepare_compile_cache(place) == {"TORCHINDUCTOR_CACHE_DIR": str(place)}
    assert place.stat().st_mode & 0o777 == 0o700
    place.chmod(0o777)
    with pytest.raises(PermissionError, match="nobody else"):
        prepare_compile_cache(place)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert prepare_compile_cache(place) == {}


def test_of_commands_to_all_nodes_it_handles_those_addressed_to_it(
    directory: Path, broker: RunningBroker
) -> None:
    """It ignores commands to another incarnation or node, and logs malformed ones without publishing an event."""
    topics, heard, rejected = Topics(cluster="ftd"), list[FromNode](), list[str]()
    states: list[bytes] = []

    def on_message(topic: str, payload: bytes, _retained: bool) -> None:
        if topic == topics.events:
            event = json.loads(payload)
            rejected.extend([event["details"]["topic"]] if event["event"] == "MessageRejected" else [])
        elif topic == topics.node_state("node-0"):
            states.append(payload)
        else:
            heard.append(decode_from_node(payload, "node-0"))

    def wanted(first: int, receivers: dict[str, int]) -> bytes:
        command = RequestSteps(first=first, last=first)
        return encode_to_nodes(ToNodes(receivers=receivers, command=command, cause="c"))

    def answered() -> list[int]:
        return [
            m.signal.requested_first
            for m in heard
            if isinstance(m.signal, Stepped) and m.signal.requested_first
        ]

    async def scene(log: Path) -> None:
        session = MqttSession(
            broker.address,
            client_id="test",
            subscriptions=[topics.node_signal("node-0"), topics.node_state("node-0"), topics.events],
            on_message=on_message,
        )
        running = asyncio.create_task(session.run())
        await session.wait_connected(PATIENCE_S)
        await asyncio.to_thread(until, lambda: bool(heard), "a Hello")
        here = heard[0].incarnation
        session.publish(topics.command, b"\xc1garbage")
        session.publish(topics.command, wanted(1, {"node-0": here}), retain=True)
        session.publish(topics.command, wanted(2, {"node-0": here - 1, "node-1": here}))
        session.publish(topics.command, wanted(3, {"node-1": 1, "node-0": here}))
        await asyncio.to_thread(until, lambda: answered()[-1:] == [3], "the answer")
        await asyncio.to_thread(until, lambda: "MessageRejected" in log.read_text(), "a line in the log")
        session.publish(topics.node_command("node-0"), b"\xc1garbage")
        await asyncio.to_thread(until, lambda: bool(rejected), "a rejection")
        before = len(states)
        session.publish(
            topics.node_state("node-0"), b"", retain=True
        )  # A coordinator that removed the name deletes it.
        await asyncio.to_thread(until, lambda: b"" in states[before:-1], "its state, published again")
        assert json.loads(states[-1])["incarnation"] == here
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    log = directory / "log"
    config = write_config(directory, port=broker.port)
    with log.open("w") as stream, subprocess.Popen(command(config), stderr=stream) as daemon:
        try:
            asyncio.run(scene(log))
        finally:
            daemon.kill()
    # A message published as retained reaches present subscribers like any other message.
    assert answered() == [1, 3]
    assert rejected == [topics.node_command("node-0")]
