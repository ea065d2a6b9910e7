"""The processes that test the devices of a simulated host: how long they take, and what they find on a bad device."""

import signal
from collections.abc import Callable

from ftd.faults.sim.host import SimHost
from ftd.faults.sim.process import ProcessLoop
from runtime.wire.zygote_protocol import DeviceCheckBegan, DeviceChecked, Exited, ZygoteNotice
from statemachine.messages.values import DeviceHealth, PlantedFault

_FORK_S = (0.002, 0.02)
_TAKES_S = (0.02, 0.5)
_NOTICE_S = (0.001, 0.02)
"""Time until the daemon notices the end of a test."""
_GFLOPS = 100.0
_SLOW_GFLOPS = 25.0


class SimDeviceTests:
    """The tests that the zygote of one daemon process forks, as ``runtime.monitoring.device_check``.

    :param notify: passes a notice on to the daemon.
    """

    def __init__(self, host: SimHost, loop: ProcessLoop, notify: Callable[[ZygoteNotice], None]) -> None:
        self._host, self._loop, self._rng, self._notify = host, loop, host.health_rng, notify
        self._running: set[int] = set()
        """Process ids of the tests under way."""

    def begin(self, number: int, device: int, planted: PlantedFault) -> None:
        """Fork the test of a device, as a part of the health check with this number."""
        takes_s = self._rng.uniform(*_FORK_S)
        self._host.world.call_later(takes_s, self._forked, number, device, planted)

    def kill_all(self) -> None:
        """Kill all tests, as the kernel does when their parent is dead."""
        self._running.clear()

    def kill(self, pid: int) -> None:
        """Kill a test, if there is such a process."""
        if pid in self._running:
            self._end(pid, -signal.SIGKILL)

    def _forked(self, number: int, device: int, planted: PlantedFault) -> None:
        if not self._loop.alive:
            return
        world = self._host.world
        pid = world.next_serial()
        self._running.add(pid)
        fault = planted or self._host.device_fault
        if fault != "hung":
            takes_s = self._rng.uniform(*_TAKES_S)
            world.call_later(takes_s, self._tested, pid, number, self._result(device, fault))
        self._notify(DeviceCheckBegan(number=number, device=device, pid=pid))

    def _result(self, device: int, fault: PlantedFault) -> DeviceHealth:
        return DeviceHealth(
            device=device,
            kind="simulated",
            wrong="a product is wrong" if fault == "wrong" else "",
            compute_gflops=_SLOW_GFLOPS if fault == "slow" else _GFLOPS * self._rng.uniform(0.9, 1.1),
        )

    def _tested(self, pid: int, number: int, result: DeviceHealth) -> None:
        if pid in self._running:
            self._notify(DeviceChecked(number=number, result=result))
            self._end(pid, 0)

    def _end(self, pid: int, status: int) -> None:
        self._running.discard(pid)
        notice_s = self._rng.uniform(*_NOTICE_S)
        self._host.world.call_later(notice_s, self._notify, Exited(pid=pid, status=status))
