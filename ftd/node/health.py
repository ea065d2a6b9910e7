"""The health check of a node: one process per device tests it, and the daemon tests the links to some peers.

The zygote forks the processes (``runtime.monitoring.device_check``), so this daemon stays free of torch. A test
that does not end is killed, and counts as failed. One check runs at a time; the machine decides when.
"""

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from ftd.config.daemon import DaemonConfig
from ftd.node.ports import Ports
from runtime.wire import zygote_protocol
from statemachine.messages.values import (
    DeviceHealth,
    HealthReport,
    LinkHealth,
    PlantedFault,
    ReplicaPeer,
)

log = structlog.get_logger("ftd.node")


@dataclass(slots=True, eq=False)
class _Check:
    """A health check under way."""

    number: int
    pids: dict[int, int] = field(default_factory=dict)
    """Process id → device of each test that was forked and has not ended."""
    results: dict[int, DeviceHealth] = field(default_factory=dict)
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    links: asyncio.Task[tuple[LinkHealth, ...]] | None = None


class HealthChecker:
    """The health checks of this node, one at a time.

    :param on_checked: receives the result.
    """

    def __init__(
        self, config: DaemonConfig, ports: Ports, *, on_checked: Callable[[HealthReport], None]
    ) -> None:
        self._devices, self._limit_s = config.devices, config.hardware.health.limit_s
        self._host, self._trainers, self._snapshots = ports.processes, ports.trainers, ports.snapshots
        self._on_checked = on_checked
        self._check: _Check | None = None
        self._ended: set[int] = set()
        """Processes of checks that were stopped."""
        self._planted: dict[int, tuple[PlantedFault, float]] = {}
        """Device → fault to plant in its tests, and the time of the event loop at which it ends."""

    def plant(self, fault: PlantedFault, devices: Sequence[int], for_s: float) -> None:
        """Plant a fault in the tests of these devices for a time."""
        until = asyncio.get_running_loop().time() + for_s
        for device in devices:
            self._planted[device] = fault, until

    def start(self, number: int, peers: Sequence[ReplicaPeer]) -> None:
        """Test all devices, and the links to these peers; a check under way is abandoned."""
        self.stop()
        check = self._check = _Check(number)
        if peers:
            check.links = asyncio.ensure_future(self._snapshots.check_links(peers))
            check.links.add_done_callback(lambda _: self._finish(check))
        for device in range(self._devices):
            self._test(number, device)

    def stop(self) -> None:
        """Abandon the check under way, if there is one; no result follows."""
        check, self._check = self._check, None
        if check is None:
            return
        for timer in check.timers:
            timer.cancel()
        if check.links is not None:
            check.links.cancel()
        for pid in check.pids:
            self._ended.add(pid)
            self._host.signal_group(pid, signal.SIGKILL)

    def _test(self, number: int, device: int) -> None:
        fault, until = self._planted.get(device, ("", 0.0))
        planted = fault if asyncio.get_running_loop().time() < until else ""
        self._trainers.test_device(number, device, planted)

    @property
    def pids(self) -> set[int]:
        """Process ids of the tests that have not ended."""
        return self._ended | set(() if self._check is None else self._check.pids)

    # --- notices of the zygote -----------------------------------------------------------------------

    def on_began(self, notice: zygote_protocol.DeviceCheckBegan) -> None:
        """Note the process of a test, and limit its time."""
        check = self._check
        if check is None or check.number != notice.number:
            self._ended.add(notice.pid)
            self._host.signal_group(notice.pid, signal.SIGKILL)
            return
        check.pids[notice.pid] = notice.device
        loop = asyncio.get_running_loop()
        check.timers.append(loop.call_later(self._limit_s, self._overdue, check, notice.pid))

    def on_not_forked(self, notice: zygote_protocol.NotForked) -> None:
        """Count a test whose process could not be forked as failed."""
        check = self._check
        if check is not None and check.number == notice.check:
            failed = f"the process of its test could not be forked: {notice.reason}"
            self._take(check, DeviceHealth(device=notice.device, failed=failed))

    def on_completed(self, notice: zygote_protocol.DeviceChecked) -> None:
        """Take the result of a test."""
        check = self._check
        if check is not None and check.number == notice.number:
            self._take(check, notice.result)

    def on_exited(self, pid: int, how: str) -> bool:
        """Take the end of a process, and return whether it was one of a test.

        :param how: sentence about its exit status.
        """
        if pid in self._ended:
            self._ended.discard(pid)
            return True
        check = self._check
        if check is None or (device := check.pids.pop(pid, None)) is None:
            return False
        if device not in check.results:
            self._take(check, DeviceHealth(device=device, failed=f"the process of its test ended: {how}"))
        return True

    def on_zygote_end(self) -> None:
        """Repeat the tests that ended with the zygote, as soon as there is another one."""
        self._ended.clear()
        check = self._check
        if check is None:
            return
        for timer in check.timers:
            timer.cancel()
        check.timers.clear()
        check.pids.clear()
        for device in range(self._devices):
            if device not in check.results:
                self._test(check.number, device)

    def _overdue(self, check: _Check, pid: int) -> None:
        device = check.pids.get(pid)
        if self._check is not check or device is None or device in check.results:
            return
        self._host.signal_group(pid, signal.SIGKILL)
        self._take(
            check, DeviceHealth(device=device, failed=f"its test did not end within {self._limit_s:g} s")
        )

    def _take(self, check: _Check, result: DeviceHealth) -> None:
        check.results.setdefault(result.device, result)
        self._finish(check)

    def _finish(self, check: _Check) -> None:
        """Report the result once all parts are there."""
        links = check.links
        if self._check is not check or len(check.results) < self._devices:
            return
        if links is not None and not links.done():
            return
        self._check = None
        for timer in check.timers:
            timer.cancel()
        self._ended.update(check.pids)
        report = HealthReport(
            number=check.number,
            devices=tuple(check.results[device] for device in range(self._devices)),
            links=links.result() if links is not None else (),
        )
        log.info("health_checked", number=report.number, devices=report.devices, links=report.links)
        self._on_checked(report)
