"""Health checks with a real zygote and real tests of devices: their results, planted faults, and their limits."""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from ftd.node.health import HealthChecker
from ftd.node.supervisor import TrainerSupervisor
from ftd.node.trainer_processes import LocalProcesses, ZygoteTrainers
from ftd.processes import is_alive
from runtime.wire.zygote_protocol import DeviceCheckBegan, DeviceChecked, NotForked
from statemachine.agent.events import HealthCheckEnded
from statemachine.events import Event
from statemachine.hardware import HardwareLimits, HealthLimits
from statemachine.messages.values import DeviceHealth, HealthReport, LinkHealth, PlantedFault, ReplicaPeer
from tests.helpers.waiting import PATIENCE_S, until_async

pytestmark = pytest.mark.processes


class Checks:
    """A supervisor with two devices, and the results of its health checks."""

    def __init__(
        self, processes: ZygoteTrainers, health: HealthChecker, results: "asyncio.Queue[HealthReport]"
    ) -> None:
        self.processes, self.health, self.results = processes, health, results

    async def result(self) -> HealthReport:
        return await asyncio.wait_for(self.results.get(), PATIENCE_S)

    async def pids(self, *devices: int) -> list[int]:
        """Return the processes that test these devices, once they run; each of these tests must hang."""

        def running() -> dict[int, int]:
            check = self.health._check
            return {} if check is None else {device: pid for pid, device in check.pids.items()}

        await until_async(lambda: set(devices) <= running().keys())
        return [running()[device] for device in devices]


def run(test: Callable[[Checks], Awaitable[None]], limit_s: float = 30.0) -> None:
    async def body() -> None:
        results: asyncio.Queue[HealthReport] = asyncio.Queue()

        def feed(event: Event) -> None:
            assert isinstance(event, HealthCheckEnded)
            results.put_nowait(event.report)

        # The path of a unix socket must be short.
        with tempfile.TemporaryDirectory(prefix="ftd-test-") as directory:
            processes = ZygoteTrainers(directory=Path(directory), environment=lambda device: {})
            limits = HardwareLimits(health=HealthLimits(limit_s=limit_s))
            config: Any = SimpleNamespace(devices=2, hardware=limits)
            memory = SimpleNamespace(check_links=AsyncMock(return_value=()))
            ports: Any = SimpleNamespace(processes=LocalProcesses(), trainers=processes, snapshots=memory)
            supervisor = TrainerSupervisor(
                config,
                ports,
                feed=feed,
                stamp=lambda: {"at": time.monotonic(), "cause": "test"},
                on_side_report=lambda device, frame: None,
            )
            await supervisor.start()
            try:
                await test(Checks(processes, supervisor.health, results))
            finally:
                await supervisor.close()

    asyncio.run(body())


def test_a_check_reports_every_device_with_its_kind_and_speed_and_planted_faults_are_found() -> None:
    async def test(checks: Checks) -> None:
        checks.health.start(1, ())  # The zygote is not warm yet.
        sound = await checks.result()
        assert sound.number == 1 and [one.device for one in sound.devices] == [0, 1]
        for one in sound.devices:
            assert (one.wrong, one.failed) == ("", "") and one.kind and one.compute_gflops > 0.1
        checks.health.plant("wrong", [1], 60.0)
        checks.health.start(2, ())
        found = await checks.result()
        assert not found.devices[0].wrong
        assert "a product of float32 matrices is wrong in 1 of 256 rows" in found.devices[1].wrong
        checks.health.plant("slow", [1], 60.0)
        checks.health.start(3, ())
        slow = await checks.result()
        assert not slow.devices[1].wrong
        assert slow.devices[1].compute_gflops < 0.5 * sound.devices[1].compute_gflops
        checks.health.plant("wrong", [0, 1], 0.0)
        checks.health.start(4, ())
        assert not any(one.wrong for one in (await checks.result()).devices), "the fault is over"

    run(test)


def test_a_test_that_hangs_is_killed_and_counts_as_failed() -> None:
    async def test(checks: Checks) -> None:
        checks.health.plant("hung", [0], 60.0)
        checks.health.start(1, ())
        pids = await checks.pids(0)
        found = await checks.result()
        assert found.devices[0].failed == "its test did not end within 1 s" and not found.devices[1].failed
        await until_async(lambda: not any(map(is_alive, pids)))

    run(test, limit_s=1.0)


def test_a_test_whose_process_ends_early_counts_as_failed_with_the_way_it_ended() -> None:
    async def test(checks: Checks) -> None:
        checks.health.plant("hung", [0, 1], 60.0)
        checks.health.start(1, ())
        for pid in await checks.pids(0, 1):
            os.kill(pid, signal.SIGSEGV)
        assert [one.failed for one in (await checks.result()).devices] == [
            "the process of its test ended: killed by SIGSEGV"
        ] * 2

    run(test)


def test_a_check_that_is_stopped_ends_with_its_processes_and_gives_no_result() -> None:
    async def test(checks: Checks) -> None:
        checks.health.plant("hung", [0, 1], 60.0)
        checks.health.start(1, ())
        pids = await checks.pids(0, 1)
        checks.health.stop()
        await until_async(lambda: not any(map(is_alive, pids)))
        checks.health.plant("hung", [0, 1], 0.0)
        checks.health.start(2, ())
        assert (await checks.result()).number == 2 and checks.results.empty()

    run(test)


def test_a_check_that_ends_with_the_zygote_is_repeated() -> None:
    async def test(checks: Checks) -> None:
        checks.health.plant("hung", [0, 1], 0.5)
        checks.health.start(1, ())
        await checks.pids(0, 1)
        await asyncio.sleep(0.5)
        pid = checks.processes.zygote_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert not any(one.failed for one in (await checks.result()).devices)

    run(test)


def test_links_are_tested_in_parallel_and_the_result_waits_for_them() -> None:
    async def body() -> None:
        tests: list[tuple[int, int, PlantedFault]] = []
        results: list[HealthReport] = []
        arrived = asyncio.Event()

        async def links(peers: Sequence[ReplicaPeer]) -> tuple[LinkHealth, ...]:
            await arrived.wait()
            return tuple(LinkHealth(node=peer.node, latency_ms=1.0, mb_s=2.0) for peer in peers)

        config: Any = SimpleNamespace(devices=1, hardware=HardwareLimits(health=HealthLimits(limit_s=1.0)))
        ports: Any = SimpleNamespace(
            processes=LocalProcesses(),
            trainers=SimpleNamespace(test_device=lambda *test: tests.append(test)),
            snapshots=SimpleNamespace(check_links=links),
        )
        checker = HealthChecker(config, ports, on_checked=results.append)
        checker.start(5, [ReplicaPeer(node="b", address="b:1")])
        checker.on_began(DeviceCheckBegan(number=5, device=0, pid=1 << 30))
        checker.on_completed(DeviceChecked(number=4, result=DeviceHealth(device=0)))
        checker.on_completed(DeviceChecked(number=5, result=DeviceHealth(device=0, kind="k")))
        assert tests == [(5, 0, "")] and not results
        arrived.set()
        await asyncio.sleep(0.01)
        (report,) = results
        assert report.links[0].node == "b" and report.devices[0].kind == "k"
        assert checker.on_exited(1 << 30, "exited with code 0") and not checker.on_exited(7, "")

    asyncio.run(body())


def test_a_test_that_cannot_be_forked_counts_as_failed() -> None:
    async def body() -> None:
        results: list[HealthReport] = []
        config: Any = SimpleNamespace(devices=1, hardware=HardwareLimits(health=HealthLimits(limit_s=1.0)))
        ports: Any = SimpleNamespace(
            processes=LocalProcesses(), trainers=SimpleNamespace(test_device=Mock()), snapshots=None
        )
        checker = HealthChecker(config, ports, on_checked=results.append)
        checker.start(5, ())
        checker.on_not_forked(NotForked(device=0, check=4, reason="Cannot allocate memory"))
        assert not results
        checker.on_not_forked(NotForked(device=0, check=5, reason="Cannot allocate memory"))
        assert [one.failed for one in results[0].devices] == [
            "the process of its test could not be forked: Cannot allocate memory"
        ]

    asyncio.run(body())
