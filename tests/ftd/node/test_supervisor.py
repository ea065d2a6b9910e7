"""The supervisor with a real zygote and real trainers: what it starts, receives, reports and ends."""

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar
from unittest.mock import AsyncMock, Mock

import pytest

from ftd.node import zygote
from ftd.node.instructions import make_prepare_instruction
from ftd.node.ports import TrainerProcess
from ftd.node.rendezvous import RendezvousServer
from ftd.node.supervisor import TrainerSupervisor
from ftd.node.trainer_processes import LocalProcesses, ZygoteTrainers
from ftd.processes import become_subreaper, is_alive, read_tail
from planner.values import LayerProfile, ModelProfile, Policy
from runtime.process.zygote_request import SERVER_VARIABLE
from runtime.wire import frames, zygote_protocol
from statemachine.agent.events import (
    TrainerConnected,
    TrainerFailed,
    TrainerReported,
)
from statemachine.events import Event
from statemachine.hardware import DEFAULT_LIMITS
from statemachine.messages import trainer as protocol
from statemachine.messages.common import (
    Finished,
    OptimizerReplicaDiverged,
    Prepared,
    Quiesce,
    Resumed,
    SnapshotFailed,
)
from statemachine.messages.values import Job
from tests.helpers.waiting import PATIENCE_S, until_async

EXAMPLES = Path(__file__).parents[3] / "examples"
Kind = TypeVar("Kind", bound=Event)


@contextmanager
def short_directory() -> Iterator[Path]:
    """Yield a directory whose path is short enough for a unix socket."""
    with tempfile.TemporaryDirectory(prefix="ftd-test-") as name:
        yield Path(name)


def supervisor_of(
    processes: ZygoteTrainers, devices: int, feed: Callable[[Event], None]
) -> TrainerSupervisor:
    config: Any = SimpleNamespace(devices=devices, hardware=DEFAULT_LIMITS)
    memory = SimpleNamespace(check_links=AsyncMock(return_value=()))
    ports: Any = SimpleNamespace(processes=LocalProcesses(), trainers=processes, snapshots=memory)
    return TrainerSupervisor(
        config,
        ports,
        feed=feed,
        stamp=lambda: {"at": time.monotonic(), "cause": "test"},
        on_side_report=lambda device, frame: None,
    )


class Trainers:
    """A supervisor and all events that it fed."""

    def __init__(self, directory: Path, devices: int) -> None:
        self.events: list[Event] = []
        self._news = asyncio.Event()
        self.processes = ZygoteTrainers(
            directory=directory, environment=lambda device: {"FTD_TEST_DEVICE": str(device)}
        )
        self.supervisor = supervisor_of(self.processes, devices, self._feed)

    def _feed(self, event: Event) -> None:
        self.events.append(event)
        self._news.set()

    async def take(self, kind: type[Kind], where: Callable[[Kind], bool] = lambda _: True) -> Kind:
        """Remove and return the next event of this kind."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for event in self.events:
                    if isinstance(event, kind) and where(event):
                        self.events.remove(event)
                        return event
                self._news.clear()
                await self._news.wait()

    async def report(self, kind: type[Any]) -> Any:
        """Remove and return the next report of this kind from a trainer."""
        return (await self.take(TrainerReported, lambda event: isinstance(event.report, kind))).report


def events_of(frame: protocol.Report) -> list[Event]:
    """Return the events that a supervisor makes of a frame of device 1's trainer, process 99."""
    events: list[Event] = []
    processes = ZygoteTrainers(directory=Path(), environment=lambda device: {})
    supervisor = supervisor_of(processes, 2, events.append)
    trainer = TrainerProcess(device=1, pid=99)
    trainer.exited.set()
    supervisor.on_report(trainer, frame)
    return events


@pytest.mark.parametrize(
    ("where", "cause"), [("prepare", "unprepared"), ("restore", "foreign"), ("training", "raised")]
)
def test_the_cause_of_a_failure_depends_on_where_the_code_raised(
    where: Literal["prepare", "restore", "training"], cause: str
) -> None:
    (failed,) = events_of(protocol.Raised(where=where, detail="Traceback"))
    assert isinstance(failed, TrainerFailed)
    assert (failed.device, failed.pid, failed.cause_of_failure, failed.detail) == (1, 99, cause, "Traceback")


def test_an_impossible_profile_fails_the_preparation() -> None:
    layer = LayerProfile(
        forward_ms=float("nan"), backward_ms=1.0, parameter_bytes=1, gradient_bytes=1, optimizer_bytes=1,
        activation_bytes=1, output_bytes=1,
    )  # fmt: skip
    (failed,) = events_of(Prepared(job_id="j", profile=ModelProfile(layers=(layer,), microbatch_rows=1)))
    assert isinstance(failed, TrainerFailed) and failed.cause_of_failure == "unprepared"
    assert "layers[0].forward_ms is nan" in failed.detail


def test_a_report_becomes_an_event_unchanged() -> None:
    for report in (
        Prepared(job_id="j", profile=None),
        SnapshotFailed(generation=3, step=9, detail="no room"),
        OptimizerReplicaDiverged(generation=2, step=50, layer=3, detail="momentum"),
    ):
        (event,) = events_of(report)
        assert isinstance(event, TrainerReported)
        assert (event.cause, event.device, event.report) == ("test", 1, report)


def test_a_trainer_that_cannot_be_forked_has_failed_and_the_next_one_of_its_device_is_not_mistaken_for_it() -> (
    None
):
    async def body() -> None:
        events: list[Event] = []
        processes = ZygoteTrainers(directory=Path(), environment=lambda device: {})
        supervisor = supervisor_of(processes, 2, events.append)
        supervisor.start_trainer(1)
        supervisor.on_notice(zygote_protocol.NotForked(device=1, check=None, reason="Cannot allocate memory"))
        (failed,) = events
        assert isinstance(failed, TrainerFailed)
        assert (failed.device, failed.pid, failed.cause_of_failure) == (1, 0, "exited")
        assert failed.detail.startswith("it could not be forked: Cannot allocate memory; free memory")
        supervisor.start_trainer(1)
        supervisor.kill_trainer(1, grace_s=0.0)  # It is ended before it is forked.
        supervisor.start_trainer(1)
        supervisor.on_notice(zygote_protocol.NotForked(device=1, check=None, reason="Cannot allocate memory"))
        supervisor.on_notice(zygote_protocol.Spawned(device=1, pid=1 << 30))
        assert supervisor.pids() == [1 << 30] and len(events) == 1
        await supervisor.close()

    asyncio.run(body())


def test_a_trainer_that_was_ended_before_it_connected_is_not_taken_for_its_successor() -> None:
    """The agent would ignore the failure of the successor, whose process it does not know yet."""

    async def body() -> None:
        events: list[Event] = []
        processes = ZygoteTrainers(directory=Path(), environment=lambda device: {})
        supervisor = supervisor_of(processes, 1, events.append)
        supervisor.start_trainer(0)
        supervisor.on_notice(zygote_protocol.Spawned(device=0, pid=1 << 30))
        supervisor.kill_trainer(0, grace_s=0.0)
        supervisor.start_trainer(0)
        ended = await supervisor.identify(protocol.Attached(device=0, pid=1 << 30))
        supervisor.on_attached(ended, Mock())
        assert events == []
        supervisor.on_notice(zygote_protocol.Spawned(device=0, pid=1 << 29))
        started = await supervisor.identify(protocol.Attached(device=0, pid=1 << 29))
        supervisor.on_attached(started, Mock())
        (connected,) = events
        assert isinstance(connected, TrainerConnected) and connected.pid == 1 << 29
        await supervisor.close()

    asyncio.run(body())


def run_with_trainers(body: Callable[[Trainers], Awaitable[None]], devices: int = 1) -> None:
    async def main() -> None:
        with short_directory() as directory:
            trainers = Trainers(directory, devices)
            await trainers.supervisor.start()
            try:
                await body(trainers)
            finally:
                pids = trainers.supervisor.pids()
                await trainers.supervisor.close()
                await gone(pids)
                assert list(directory.iterdir()) == []

    asyncio.run(main())


async def gone(pids: list[int]) -> None:
    await until_async(lambda: not any(is_alive(pid) for pid in pids))


def mlp_job(function: str = "mlp.py:build", path: Path = EXAMPLES, **arguments: int | str) -> Job:
    return Job(
        job_id="job",
        name="mlp",
        steps=3,
        policy=Policy(global_batch=8, microbatch_rows=4),
        training={
            "function": function,
            "path": str(path),
            "seed": 1,
            "steps": 3,
            "global_batch": 8,
            "microbatch_rows": 4,
            "precision": "float64",
            "arguments": arguments,
        },
    )


@pytest.mark.processes
def test_a_single_trainer_trains_and_reports_each_phase() -> None:
    async def body(trainers: Trainers) -> None:
        trainers.supervisor.start_trainer(0)
        up = await trainers.take(TrainerConnected)
        assert trainers.supervisor.pids() == [up.pid] == trainers.supervisor.pids(0)
        trainers.supervisor.send(0, make_prepare_instruction(mlp_job(hidden_layers=2), profile=True))
        prepared = await trainers.report(Prepared)
        assert prepared.profile is not None
        layers = len(prepared.profile.layers)
        trainers.supervisor.send(0, Quiesce(generation=1, mode="abort"))
        quiesced = await trainers.report(protocol.TrainerQuiesced)
        assert quiesced.committed_step == 0
        assert quiesced.held == tuple(range(layers))
        stage = protocol.WorldStage(first_layer=0, end_layer=layers, ranks=(0,))
        pipeline = protocol.WorldPipeline(stages=(stage,), first_microbatch=0, microbatches=2)
        world = protocol.WorldData(pipelines=(pipeline,), transfers=(), hosts=("127.0.0.1",))
        async with RendezvousServer("token") as server:
            resume = protocol.ResumeRank(
                generation=1,
                step=0,
                vote=None,
                rank=0,
                world=world,
                rendezvous_host="127.0.0.1",
                rendezvous_port=server.port,
                token="token",
            )
            trainers.supervisor.send(0, resume)
            assert (await trainers.report(Resumed)).generation == 1
            assert [(await trainers.report(protocol.TrainerStepped)).step for _ in range(3)] == [1, 2, 3]
            done = await trainers.report(Finished)
            assert sorted(done.digests) == list(range(layers))
        await trainers.report(protocol.TrainerHeartbeat)

    run_with_trainers(body)


@pytest.mark.processes
def test_a_killed_trainer_is_reported_and_replaced_while_another_lives_on() -> None:
    async def body(trainers: Trainers) -> None:
        for device in (0, 1):
            trainers.supervisor.start_trainer(device)
        first = {up.device: up.pid for up in [await trainers.take(TrainerConnected) for _ in range(2)]}
        os.kill(first[0], signal.SIGKILL)
        failed = await trainers.take(TrainerFailed)
        assert (failed.device, failed.pid, failed.cause_of_failure) == (0, first[0], "exited")
        assert "SIGKILL" in failed.detail
        trainers.supervisor.start_trainer(0)
        up = await trainers.take(TrainerConnected)
        assert up.device == 0
        assert up.pid != first[0]
        assert sorted(trainers.supervisor.pids()) == sorted([up.pid, first[1]])

    run_with_trainers(body, devices=2)


@pytest.mark.processes
def test_a_stopped_trainer_can_be_ended_without_an_event() -> None:
    async def body(trainers: Trainers) -> None:
        trainers.supervisor.start_trainer(0)
        up = await trainers.take(TrainerConnected)
        os.kill(up.pid, signal.SIGSTOP)
        trainers.supervisor.kill_trainer(0, grace_s=0.0)
        trainers.supervisor.start_trainer(0)
        again = await trainers.take(TrainerConnected)
        assert again.pid != up.pid
        await gone([up.pid])
        assert not any(isinstance(event, TrainerFailed) for event in trainers.events)
        os.kill(again.pid, signal.SIGSTOP)
        trainers.supervisor.kill_trainer(0, grace_s=5.0)  # SIGTERM reaches a stopped process as well.
        await gone([again.pid])
        assert not any(isinstance(event, TrainerFailed) for event in trainers.events)

    run_with_trainers(body)


@pytest.mark.processes
def test_the_whole_process_group_ends_with_the_trainer(tmp_path: Path) -> None:
    script = tmp_path / "spawner.py"
    script.write_text(
        "import os, subprocess, sys\n"
        "def build():\n"
        "    child = subprocess.Popen(['sleep', '1000'])\n"
        "    print('a child of', os.environ['FTD_TEST_DEVICE'], file=sys.stderr)\n"
        "    open(os.path.join(os.path.dirname(__file__), 'pid'), 'w').write(str(child.pid))\n"
        "    os._exit(7)\n"
    )

    async def body(trainers: Trainers) -> None:
        trainers.supervisor.start_trainer(0)
        await trainers.take(TrainerConnected)
        trainers.supervisor.send(
            0, make_prepare_instruction(mlp_job("spawner.py:build", tmp_path), profile=False)
        )
        failed = await trainers.take(TrainerFailed)
        assert "exited with code 7" in failed.detail
        assert "a child of 0" in failed.detail
        await gone([int((tmp_path / "pid").read_text())])

    run_with_trainers(body)


@pytest.mark.processes
def test_the_daemon_collects_the_dead_processes_that_trainers_and_the_zygote_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would count towards the limits of the host for as long as the daemon runs."""
    (tmp_path / "forks.py").write_text(
        "import os, time\n"
        "def build():\n"
        "    with open(os.path.join(os.path.dirname(__file__), 'pids'), 'w') as file:\n"
        "        for _ in range(3):\n"
        "            if (pid := os.fork()) == 0:\n"
        "                time.sleep(1000)\n"
        "            print(pid, file=file)\n"
        "    os._exit(7)\n"
    )

    async def collected(pids: list[int]) -> None:
        await until_async(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))

    async def body(trainers: Trainers) -> None:
        trainers.supervisor.start_trainer(0)
        await trainers.take(TrainerConnected)
        trainers.supervisor.send(
            0, make_prepare_instruction(mlp_job("forks.py:build", tmp_path), profile=False)
        )
        await trainers.take(TrainerFailed)
        await collected([int(pid) for pid in (tmp_path / "pids").read_text().split()])
        trainers.supervisor.start_trainer(0)
        up = await trainers.take(TrainerConnected)
        zygote = trainers.processes.zygote_pid
        assert zygote is not None
        os.kill(zygote, signal.SIGKILL)
        await trainers.take(TrainerFailed)
        await collected([up.pid])

    monkeypatch.delenv(SERVER_VARIABLE, raising=False)  # The zygote has to be a child of this process.
    become_subreaper()
    run_with_trainers(body)


@pytest.mark.processes
def test_a_training_function_that_raises_is_named_with_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def build():\n    raise RuntimeError('no such data')\n")

    async def body(trainers: Trainers) -> None:
        trainers.supervisor.start_trainer(0)
        up = await trainers.take(TrainerConnected)
        trainers.supervisor.send(
            0, make_prepare_instruction(mlp_job("broken.py:build", tmp_path), profile=False)
        )
        failed = await trainers.take(TrainerFailed)
        assert failed.cause_of_failure == "unprepared"
        assert "no such data" in failed.detail
        await gone([up.pid])

    run_with_trainers(body)


@pytest.mark.processes
def test_the_zygote_is_started_again_and_its_trainers_are_reported() -> None:
    async def body(trainers: Trainers) -> None:
        trainers.supervisor.start_trainer(0)
        up = await trainers.take(TrainerConnected)
        zygote = trainers.processes.zygote_pid
        assert zygote is not None
        os.kill(zygote, signal.SIGKILL)
        failed = await trainers.take(TrainerFailed)
        assert failed.pid == up.pid
        assert "zygote" in failed.detail
        trainers.supervisor.start_trainer(0)
        again = await trainers.take(TrainerConnected)
        assert again.pid != up.pid
        assert trainers.processes.zygote_pid != zygote

    run_with_trainers(body)


@pytest.mark.processes
def test_an_unknown_process_on_the_socket_is_rejected() -> None:
    async def body(trainers: Trainers) -> None:
        trainers.supervisor.start_trainer(0)
        up = await trainers.take(TrainerConnected)
        path = trainers.processes.socket_path
        for greeting in (
            b"\xff\xff\xff\xff",
            b"\x00\x00\x00\x01\xc1",
            frames.encode(protocol.Attached(device=0, pid=up.pid)),
        ):
            reader, writer = await asyncio.open_unix_connection(str(path))
            writer.write(greeting)
            assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""
            writer.close()
        assert trainers.supervisor.pids() == [up.pid]
        assert is_alive(up.pid)

    run_with_trainers(body)


@pytest.mark.processes
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_trainers_do_not_outlive_the_daemon(how: signal.Signals, tmp_path: Path) -> None:
    """The kernel ends zygote and trainer when a process that only runs a supervisor ends."""
    program = tmp_path / "daemon.py"
    program.write_text(
        "import asyncio, pathlib, sys\n"
        "from types import SimpleNamespace\n"
        "from ftd.node.supervisor import TrainerSupervisor\n"
        "from ftd.node.trainer_processes import LocalProcesses, ZygoteTrainers\n"
        "from statemachine.agent.events import TrainerConnected\n"
        "from statemachine.hardware import DEFAULT_LIMITS\n"
        "async def main(directory):\n"
        "    def feed(event):\n"
        "        if isinstance(event, TrainerConnected):\n"
        "            print('pids', event.pid, processes.zygote_pid, flush=True)\n"
        "    processes = ZygoteTrainers(directory=directory, environment=lambda device: {})\n"
        "    ports = SimpleNamespace(processes=LocalProcesses(), trainers=processes,\n"
        "        snapshots=SimpleNamespace(check_links=print))\n"
        "    supervisor = TrainerSupervisor(SimpleNamespace(devices=1, hardware=DEFAULT_LIMITS), ports,\n"
        "        feed=feed, stamp=lambda: {'at': 0.0, 'cause': 'test'}, on_side_report=print)\n"
        "    await supervisor.start()\n"
        "    supervisor.start_trainer(0)\n"
        "    await asyncio.sleep(1000)\n"
        "asyncio.run(main(pathlib.Path(sys.argv[1])))\n"
    )

    async def main() -> None:
        with short_directory() as directory:
            daemon = await asyncio.create_subprocess_exec(
                sys.executable, str(program), str(directory), stdout=asyncio.subprocess.PIPE
            )
            try:
                assert daemon.stdout is not None
                async with asyncio.timeout(PATIENCE_S):  # Log lines may come before.
                    while not (line := await daemon.stdout.readline()).startswith(b"pids"):
                        assert line, "the daemon ended"
                pids = [int(pid) for pid in line.split()[1:]]
                assert all(is_alive(pid) for pid in pids)
                daemon.send_signal(how)
                await daemon.wait()
                await gone(pids)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    daemon.kill()

    asyncio.run(main())


def test_a_zygote_that_cannot_be_started_is_reported_and_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        ends: asyncio.Queue[tuple[int, str]] = asyncio.Queue()

        async def refused(*_: object, **__: object) -> object:
            raise BlockingIOError(11, "Resource temporarily unavailable")

        monkeypatch.setattr(asyncio, "create_subprocess_exec", refused)
        monkeypatch.setattr(zygote, "_RESTART_DELAYS_S", (0.0,))
        one = zygote.Zygote()
        one.start(on_notice=lambda _: None, on_end=lambda *end: ends.put_nowait(end))
        for _ in range(2):
            status, detail = await asyncio.wait_for(ends.get(), PATIENCE_S)
            assert status == 1 and "Resource temporarily unavailable" in detail
        await one.close()

    asyncio.run(body())


@pytest.mark.processes
def test_the_status_of_a_zygote_that_ends_is_the_true_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        ends: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        monkeypatch.setattr(
            zygote, "module_command", lambda *_: ["/bin/sh", "-c", "echo why >&2; kill -SEGV $$"]
        )
        monkeypatch.setattr(zygote, "_RESTART_DELAYS_S", (0.0,))
        one = zygote.Zygote()
        one.start(on_notice=lambda _: None, on_end=lambda *end: ends.put_nowait(end))
        try:
            for _ in range(20):
                assert await asyncio.wait_for(ends.get(), PATIENCE_S) == (-signal.SIGSEGV, "why")
        finally:
            await one.close()

    asyncio.run(body())


@pytest.mark.processes
def test_a_zygote_is_started_again_although_a_process_that_a_module_started_has_its_stderr(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        ends: asyncio.Queue[tuple[int, str]] = asyncio.Queue()
        # Not "exec sleep": that closes its output a moment before it ends, and a zygote without one is killed.
        script = "sleep 1000 > /dev/null & echo $! >&2; sleep 0.5; exit 0"
        monkeypatch.setattr(zygote, "module_command", lambda *_: ["/bin/sh", "-c", script])
        monkeypatch.setattr(zygote, "_RESTART_DELAYS_S", (0.0, 1000.0))
        one = zygote.Zygote()
        one.start(on_notice=lambda _: None, on_end=lambda *end: ends.put_nowait(end))
        status, detail = await asyncio.wait_for(ends.get(), PATIENCE_S)
        assert status == 0
        await asyncio.wait_for(one.close(), PATIENCE_S)
        os.kill(int(detail), signal.SIGKILL)
        await asyncio.sleep(0.1)  # asyncio closes its end of the pipe.

    asyncio.run(body())


def test_the_tail_of_a_log_begins_with_a_whole_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert read_tail(log) == ""
    log.write_text("the first line\nthe second\nthe third\n")
    assert read_tail(log, 100) == "the first line\nthe second\nthe third"
    assert read_tail(log, 20) == "the third" and read_tail(log, 4) == "ird"
