"""Faults injected into a node: rejected unless allowed, announced beforehand, executed once."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftd.driver import SystemClock
from ftd.errors import ConfigurationError, WireError
from ftd.local.mounts import mount_tmpfs
from ftd.node.chaos import NodeFaultInjector
from ftd.node.full_disk import DiskFiller
from ftd.node.message_faults import FaultyLink, LinkFaults
from ftd.node.trainer_processes import LocalProcesses
from ftd.transport.wire.public import Answer, encode_json
from statemachine.error_text import same_error
from statemachine.messages.trainer import FlipBit, RaiseError, Sleep, Slow
from statemachine.messages.values import PlantedFault
from tests.helpers.waiting import until_async


class RecordedActions:
    """A recorder of the faults that are carried out; its trainers are real processes."""

    directory = Path("/nowhere")

    def __init__(self, pids: dict[int, int]) -> None:
        self.by_device = pids
        self.health = SimpleNamespace(plant=self.plant)
        self.log: list[Any] = []
        self.answers: list[Answer] = []

    def pids(self, device: int | None) -> list[int]:
        return [pid for index, pid in self.by_device.items() if device in (None, index)]

    def send(self, device: int, frame: Sleep | Slow | RaiseError | FlipBit) -> bool:
        match frame:
            case Sleep():
                self.log.append(("sleep", device, frame.seconds))
            case Slow():
                self.log.append(("slow", device, frame.factor))
            case RaiseError():
                self.log.append(("raise", device, frame.detail))
            case FlipBit():
                self.log.append(("corrupt", device))
        return device in self.by_device

    def has_snapshot_data(self, device: int | None) -> bool:
        return device in (None, 0)

    @property
    def memory_directory(self) -> Path:
        return self.directory

    @property
    def checkpoint_directory(self) -> Path | None:
        return None

    def flip_bit(self, device: int | None) -> None:
        self.log.append(("flip", device))

    def leave(self, reason: str) -> None:
        self.log.append(("leave", reason))

    def plant(self, how: PlantedFault, devices: Sequence[int], for_s: float) -> None:
        self.log.append((how, tuple(devices), for_s))

    def disconnect(self, for_s: float) -> None:
        self.log.append(("disconnect", for_s))

    def publish_event(self, event: str, reason: str, details: dict[str, Any]) -> None:
        self.log.append((event, details.get("fault"), details.get("target")))

    def send_answer(self, client: str, answer: Answer) -> None:
        assert client == "me"
        self.answers.append(answer)

    async def flush(self, timeout_s: float) -> None:
        self.log.append("flush")


def payload(request: str = "r1", **fields: Any) -> bytes:
    return encode_json({"request": request, "reply": "me", **fields})


def play(
    actions: RecordedActions,
    body: Callable[[NodeFaultInjector], Awaitable[None]],
    *,
    allowed: bool = True,
    devices: int = 2,
) -> None:
    async def main() -> None:
        of_node: dict[str, Any] = {"actions": actions, "supervisor": actions, "memory": actions}
        config: Any = SimpleNamespace(node="node-1", devices=devices, chaos=allowed)
        ports: Any = SimpleNamespace(
            processes=LocalProcesses(), trainers=SimpleNamespace(zygote_pid=None), clock=SystemClock()
        )
        await body(NodeFaultInjector(config, ports, **of_node))

    asyncio.run(main())


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "100"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_requests_are_rejected_unless_the_configuration_allows_them() -> None:
    actions = RecordedActions({0: os.getpid()})

    async def body(chaos: NodeFaultInjector) -> None:
        chaos.on_request(payload(do="kill"))

    play(actions, body, allowed=False)
    [answer] = actions.answers
    assert not answer.accepted
    assert "chaos = true" in answer.detail
    assert actions.log == [("ChaosRejected", "kill", None)]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"do": "hang", "device": 5}, "devices 0 to 1"),
        ({"do": "hang", "for_s": 0}, "positive"),
        ({"do": "slow", "factor": 0.5}, "give 1"),
        ({"do": "slow"}, "such a trainer"),
        ({"do": "raise"}, "such a trainer"),
        ({"do": "corrupt"}, "such a trainer"),
        ({"do": "lossy"}, "give drop, duplicate or late_s"),
        ({"do": "lossy", "drop": 1.5}, "a probability is 0 to 1"),
        ({"do": "lossy", "late_s": -1}, "give 0 to 60 seconds"),
        ({"do": "fill_memory", "size_mib": 0}, "give 1 or more"),
        ({"do": "fill_memory"}, "/nowhere cannot be filled"),
        ({"do": "fill_disk"}, "writes no checkpoints into a directory now"),
        ({"do": "flip", "device": 1}, "holds no part of a snapshot"),
        ({"do": "kill", "target": "trainer"}, "such a trainer"),
        ({"do": "stop", "target": "trainer", "device": 1}, "such a trainer"),
    ],
)
def test_invalid_requests_are_rejected(fields: dict[str, Any], expected: str) -> None:
    actions = RecordedActions({})

    async def body(chaos: NodeFaultInjector) -> None:
        chaos.on_request(payload(**fields))

    play(actions, body)
    assert expected in actions.answers[0].detail
    assert not actions.answers[0].accepted


@pytest.mark.parametrize(
    "garbage", [b"", b"{", b'{"do": "kill"}', payload(do="explode"), payload(do="kill", x=1)]
)
def test_a_malformed_payload_raises_a_wire_error(garbage: bytes) -> None:
    async def body(chaos: NodeFaultInjector) -> None:
        with pytest.raises(WireError):
            chaos.on_request(garbage)

    play(RecordedActions({}), body)


@pytest.mark.processes
def test_a_fault_is_announced_before_it_is_injected_once(sleeper: subprocess.Popen[bytes]) -> None:
    actions = RecordedActions({0: sleeper.pid})

    async def body(chaos: NodeFaultInjector) -> None:
        chaos.on_request(payload(do="kill", target="trainer"))
        await until_async(lambda: sleeper.poll() is not None)
        assert sleeper.returncode == -signal.SIGKILL
        chaos.on_request(payload(do="kill", target="trainer"))  # The client did not receive the answer.

    play(actions, body)
    assert actions.log == [("ChaosInjected", "kill", "trainer"), "flush"]
    assert [answer.accepted for answer in actions.answers] == [True, True]


def test_a_request_that_arrives_twice_at_once_is_served_once() -> None:
    """A daemon that was stopped finds what its client repeated meanwhile in one read of its socket."""
    actions = RecordedActions({})

    async def body(chaos: NodeFaultInjector) -> None:
        chaos.on_request(payload(do="flip"))
        chaos.on_request(payload(do="flip"))
        await until_async(lambda: ("flip", None) in actions.log)
        await asyncio.sleep(0.05)

    play(actions, body)
    assert actions.log == [("ChaosInjected", "flip", "trainer"), "flush", ("flip", None)]
    assert [answer.accepted for answer in actions.answers] == [True, True]


@pytest.mark.processes
def test_a_stopped_trainer_continues_after_the_duration(sleeper: subprocess.Popen[bytes]) -> None:
    def woken() -> bool:
        """Return whether the process was stopped and continues, as the kernel tells its parent."""
        return os.waitid(os.P_PID, sleeper.pid, os.WCONTINUED | os.WNOHANG) is not None

    async def body(chaos: NodeFaultInjector) -> None:
        chaos.on_request(payload(do="stop", target="trainer", for_s=0.8))
        await until_async(woken)

    play(RecordedActions({0: sleeper.pid}), body)


@pytest.mark.processes
def test_a_trainer_that_has_just_ended_does_not_keep_the_others_running(
    sleeper: subprocess.Popen[bytes],
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()

    def stopped() -> bool:
        return os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOHANG) is not None

    async def body(chaos: NodeFaultInjector) -> None:
        chaos.on_request(payload(do="stop", target="trainer"))
        async with asyncio.timeout(5):
            while not stopped():  # noqa: ASYNC110  # the kernel notifies nobody
                await asyncio.sleep(0.005)

    play(RecordedActions({0: ended.pid, 1: sleeper.pid}), body)


def test_a_bad_device_is_planted_in_the_health_checks_of_all_devices_or_of_one() -> None:
    actions = RecordedActions({})

    async def body(chaos: NodeFaultInjector) -> None:
        chaos.on_request(payload("a", do="bad_device"))
        chaos.on_request(payload("b", do="bad_device", how="slow", device=1, for_s=4.0))
        await until_async(lambda: len(actions.log) >= 6)

    play(actions, body)
    assert ("wrong", (0, 1), 60.0) in actions.log and ("slow", (1,), 4.0) in actions.log


def test_faults_that_the_daemon_carries_out() -> None:
    actions = RecordedActions({0: 1, 1: 2})

    async def body(chaos: NodeFaultInjector) -> None:
        chaos.on_request(payload("a", do="hang", for_s=2.0))
        chaos.on_request(payload("b", do="hang", device=1))
        chaos.on_request(payload("c", do="disconnect", for_s=3.0))
        chaos.on_request(payload("d", do="term"))
        await until_async(lambda: len(actions.log) >= 4 + 4 + 5)

    play(actions, body)
    done = [entry for entry in actions.log if entry[0] in ("sleep", "disconnect", "leave")]
    assert sorted(map(str, done)) == sorted(
        map(
            str,
            [
                ("sleep", 0, 2.0),
                ("sleep", 1, 2.0),
                ("sleep", 1, 3600.0),
                ("disconnect", 3.0),
                ("leave", "ftd chaos term"),
            ],
        )
    )


def test_trainers_are_slow_until_the_duration_ends_or_a_request_ends_it() -> None:
    actions = RecordedActions({0: 1, 1: 2})

    def slowed() -> list[tuple[int, float]]:
        return [entry[1:] for entry in actions.log if entry[0] == "slow"]

    async def body(chaos: NodeFaultInjector) -> None:
        chaos.on_request(payload("a", do="slow", device=1, factor=4.0, for_s=0.05))
        await until_async(lambda: slowed() == [(1, 4.0), (1, 1.0)])
        actions.log.clear()
        chaos.on_request(payload("b", do="slow", device=0, factor=4.0, for_s=0.8))
        await until_async(lambda: slowed() == [(0, 4.0)])
        chaos.on_request(payload("c", do="slow"))
        await until_async(lambda: len(slowed()) == 3)
        await asyncio.sleep(0.9)
        assert slowed() == [(0, 4.0), (0, 3.0), (1, 3.0)], (
            "the end of an earlier fault does not end a later one"
        )

    play(actions, body)


def test_trainers_raise_and_link_faults_begin_and_end() -> None:
    actions = RecordedActions({0: 1, 1: 2})

    async def body(chaos: NodeFaultInjector) -> None:
        chaos.on_request(payload("a", do="raise", device=1))
        chaos.on_request(payload("b", do="lossy", drop=1.0, for_s=0.8))
        await until_async(lambda: ("ChaosInjected", "lossy", "node") in actions.log and len(actions.log) >= 5)
        delivered: list[str] = []
        await until_async(lambda: not _delivers(chaos, delivered))
        await until_async(lambda: _delivers(chaos, delivered))  # The duration is over.

    play(actions, body)
    [(_, device, words)] = [entry for entry in actions.log if entry[0] == "raise"]
    assert device == 1 and words.startswith("ftd chaos raise a (me) ")


def test_raised_errors_of_numbered_requests_are_not_the_same_error_of_the_job() -> None:
    actions = RecordedActions({0: 1})

    async def body(chaos: NodeFaultInjector) -> None:
        chaos.on_request(payload("request-1", do="raise", device=0))
        chaos.on_request(payload("request-2", do="raise", device=0))
        await until_async(lambda: [entry[0] for entry in actions.log].count("raise") == 2)

    play(actions, body)
    one, other = (entry[2] for entry in actions.log if entry[0] == "raise")
    assert not same_error(one, other)


def _delivers(chaos: NodeFaultInjector, delivered: list[str]) -> bool:
    before = len(delivered)
    chaos.message_faults.outgoing.deliver(lambda: delivered.append("x"))
    return len(delivered) > before


def test_a_check_only_answers() -> None:
    actions = RecordedActions({})

    async def body(chaos: NodeFaultInjector) -> None:
        chaos.on_request(payload("a", do="kill", dry_run=True))
        chaos.on_request(payload("b", do="hang", device=7, dry_run=True))

    play(actions, body)
    assert [answer.accepted for answer in actions.answers] == [True, False]
    assert actions.log == []


def test_filled_space_is_released(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail
    filler = DiskFiller()
    assert "size_mib = 1:" in str(filler.find_problem(tmp_path, 1)), f"{free} blocks are free"
    assert "cannot be filled" in str(filler.find_problem(tmp_path / "none", 1))


@pytest.mark.processes
def test_a_small_file_system_is_filled_and_released(tmp_path: Path) -> None:
    directory = tmp_path / "small"
    try:
        mounted = mount_tmpfs(directory, 8, "cluster.disk_mib")
        mounted.__enter__()
    except ConfigurationError as error:
        assert "root" in str(error)
        pytest.skip(str(error))
    try:

        async def main() -> None:
            filler = DiskFiller()
            assert filler.find_problem(directory, None) is None
            filler.fill(directory, for_s=0.2)
            with pytest.raises(OSError, match="No space left"):
                (directory / "file").write_bytes(bytes(1 << 20))
            assert [path.name for path in directory.iterdir()] == ["file"]
            await until_async(
                lambda: os.statvfs(directory).f_bavail * os.statvfs(directory).f_bsize > 6 << 20
            )
            (directory / "file").write_bytes(bytes(1 << 20))
            filler.fill(directory, for_s=3600)
            filler.close()
            (directory / "file").write_bytes(bytes(2 << 20))

        asyncio.run(main())
    finally:
        mounted.__exit__(None, None, None)
    assert not list(directory.iterdir())


def test_link_faults_drop_duplicate_and_delay_in_order() -> None:
    async def main() -> None:
        wire = FaultyLink()
        got: list[int] = []

        def send(first: int, end: int) -> None:
            for number in range(first, end):
                wire.deliver(partial(got.append, number))

        send(0, 3)
        assert got == [0, 1, 2]
        got.clear()
        wire.begin(LinkFaults(drop=0.3, duplicate=0.3, late_s=0.05), "seed")
        send(0, 200)
        wire.end()
        send(200, 201)  # It must not overtake messages that are under way.
        await until_async(lambda: got[-1:] == [200])
        assert got == sorted(got)
        kept = set(got)
        assert 100 < len(kept) < 180
        assert 20 < len(got) - len(kept) < 80
        again: list[int] = []
        other = FaultyLink()
        other.begin(LinkFaults(drop=0.3, duplicate=0.3), "seed")
        for number in range(200):
            other.deliver(partial(again.append, number))
        third = FaultyLink()
        third.begin(LinkFaults(drop=0.3, duplicate=0.3), "seed")
        twice: list[int] = []
        for number in range(200):
            third.deliver(partial(twice.append, number))
        assert again == twice

    asyncio.run(main())
