"""The injector of a soak on a cluster that does not obey: nothing is lost, and every failure is reported."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import ftd.local.soak.soak as module
from ftd.config.job import load_job_data
from ftd.errors import FtdError, PeerError, UnreachableError
from ftd.faults.chaos.values import Fault
from ftd.local.cluster import LocalCluster
from ftd.local.driver import LocalDriver
from ftd.local.soak.draw import DrawnFault
from ftd.local.soak.injector import SoakInjector
from ftd.local.soak.monitor import SoakMonitor
from ftd.local.soak.options import SoakOptions
from ftd.local.soak.report import SoakReport
from ftd.local.soak.soak import Soak
from ftd.transport.client import ClusterClient
from tests.helpers.playground import write_job


class Unwilling:
    """A stand-in for a cluster of one node. ``kill`` and the start of the node raise the given exceptions."""

    central_services = ("broker", "coordinator")
    coordinators = ("coordinator",)
    nodes = ("node-0",)

    def __init__(self, *, kill: Exception | None = None, start: Exception | None = None) -> None:
        self._kill, self._start = kill, start
        self.running = {*self.central_services, *self.nodes}
        children = {
            name: SimpleNamespace(pid=-1, log=Path("/dev/null"), process=SimpleNamespace(returncode=3))
            for name in self.running
        }
        self.processes = SimpleNamespace(
            children=children, running=self.running.__contains__, reap_adopted=lambda: None
        )
        self.directory = Path("/nowhere")

    async def kill(self, name: str) -> None:
        self.running.discard(name)
        if self._kill is not None:
            raise self._kill

    async def restart(self, name: str) -> None:
        if self._start is not None:
            raise self._start
        self.running.add(name)


def injected(cluster: Unwilling, do: str) -> tuple[SoakInjector, SoakMonitor]:
    """Inject a fault, update the injector, and return it with its monitor."""
    monitor = SoakMonitor(limit_s=10.0, relative=1e-6)

    async def main() -> SoakInjector:
        client = cast(ClusterClient, None)
        injector = SoakInjector(
            client, cast(LocalCluster, cluster), monitor, tolerate=1, beyond=False, seed=1
        )
        injector.inject(DrawnFault(number=1, at_s=0.0, do=do, for_s=0.0, factor=1.0, position=0.5), 7.0)
        await injector.finish(60.0)
        injector.update(8.0)
        return injector

    return asyncio.run(main()), monitor


def violations(monitor: SoakMonitor) -> list[tuple[str, str]]:
    return [(violation.rule, violation.detail) for violation in monitor.violations]


@pytest.mark.parametrize("do", ["kill", "kill_coordinator"])
def test_a_killed_process_is_restarted(do: str) -> None:
    cluster = Unwilling()
    injector, monitor = injected(cluster, do)
    assert [one.problem for one in injector.injected] == [""]
    assert cluster.running == {"broker", "coordinator", "node-0"}
    assert violations(monitor) == []


@pytest.mark.parametrize(("do", "name"), [("kill", "node-0"), ("kill_coordinator", "coordinator")])
def test_a_process_that_ended_just_before_the_kill_is_reported(do: str, name: str) -> None:
    injector, monitor = injected(Unwilling(kill=PeerError("it is not running")), do)
    assert [one.problem for one in injector.injected] == ["it is not running"]
    assert violations(monitor) == [("process", f"{name} ended by itself with 3: ")]


def test_a_process_that_does_not_restart_is_reported_once() -> None:
    injector, monitor = injected(Unwilling(start=PeerError("no such program")), "kill")
    assert [one.problem for one in injector.injected] == [""]
    assert violations(monitor) == [("process", "node-0 did not come back: no such program")]


def test_unexpected_errors_are_reported() -> None:
    injector, monitor = injected(Unwilling(start=LookupError("no such thing")), "kill")
    assert [one.problem for one in injector.injected] == ["LookupError: no such thing"]
    assert violations(monitor) == [("injection", "kill of node-0 failed: LookupError: no such thing")]


# --- the undisturbed run ---------------------------------------------------------------------------


def soak_options(job: Path) -> SoakOptions:
    return SoakOptions(
        job=job, minutes=0.0, seed=1, rate_per_min=1.0, nodes=2, coordinators=1, steps=None, limit_s=1.0,
        relative=None, beyond=False, memory_mib=None, broker="embedded", logs=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("phase", "expected_words"),
    [
        ("PAUSED", "it pauses: 12 nodes are needed (it was given 2 nodes; give more with --nodes)"),
        ("RUNNING", "did not end within 0.3 s (it is at step 0 of 9; give fewer --steps, or more --minutes)"),
    ],
)
def test_an_undisturbed_run_that_does_not_end_raises_the_reason(
    phase: str, expected_words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PAUSED_S", 0.0)
    monkeypatch.setattr(module, "_LEAST_UNDISTURBED_S", 0.3)
    path = write_job(tmp_path, steps=9)
    options = soak_options(path)

    class Driver:
        disk = tmp_path

        async def submit(self, _: Any, timeout_s: float) -> str:
            soak.monitor.state = {"phase": phase, "waiting_for": "12 nodes are needed"}
            return "tiny-1"

    soak = Soak(options, load_job_data(path), cast(LocalDriver, Driver()), lambda _: None)

    with pytest.raises(FtdError) as caught:
        asyncio.run(soak._undisturbed())
    assert expected_words in str(caught.value)


@pytest.mark.parametrize("how", ["signal", "error"])
def test_a_soak_that_ends_early_reports_what_it_found(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Driver:
        logs = disk = tmp_path
        client = cluster = None

        def __init__(self, *_: Any, **__: Any) -> None: ...

        async def __aenter__(self) -> "Driver":
            return self

        async def __aexit__(self, *_: object) -> None: ...

        def connected(self, **_: Any) -> "Driver":
            return self

        async def ready(self, _: float) -> None: ...

        async def run_guarded(self, work: Any) -> None:
            await work

    async def nothing(*_: Any) -> None: ...

    async def next_round(soak: Soak) -> None:
        if how == "error" and soak.now_s > 0.2:
            raise PeerError("the broker has ended")

    injector = SimpleNamespace(injected=[], update=lambda _: None, may_inject=lambda _: False, cancel=nothing)
    monkeypatch.setattr(module, "LocalDriver", Driver)
    monkeypatch.setattr(module, "SoakInjector", lambda *_, **__: injector)
    monkeypatch.setattr(Soak, "_undisturbed", nothing)
    monkeypatch.setattr(Soak, "_next_round", next_round)
    reports: list[SoakReport] = []

    async def run() -> None:
        options = replace(soak_options(write_job(tmp_path, steps=9)), minutes=1.0)
        soaking = asyncio.ensure_future(module.run_soak(options, lambda _: None, reports.append))
        await asyncio.wait([soaking], timeout=0.3 if how == "signal" else None)
        soaking.cancel()
        with pytest.raises(asyncio.CancelledError if how == "signal" else PeerError):
            await soaking

    asyncio.run(run())
    [found] = reports
    assert (found.complete, found.passed, found.violations) == (False, False, ())
    assert 0 < found.duration_s < 60


# --- the end ---------------------------------------------------------------------------------------


def test_a_coordinator_that_does_not_come_back_is_in_the_report(tmp_path: Path) -> None:
    path = write_job(tmp_path, steps=9)

    async def stop(_: str) -> None:
        raise UnreachableError("no coordinator answers")

    async def history(what: str) -> None:
        raise UnreachableError(f"no coordinator answers about {what}")

    async def end_nodes(at_s: float, grace_s: float) -> None:
        ended.append(grace_s)

    ended: list[float] = []
    driver = SimpleNamespace(stop=stop, client=SimpleNamespace(history=history), logs=tmp_path)
    options = replace(soak_options(path), limit_s=0.2)
    soak = Soak(options, load_job_data(path), cast(LocalDriver, driver), lambda _: None)
    soak.monitor.begin_round("tiny-1", 0.0)
    asyncio.run(soak._shut_down(cast(SoakInjector, SimpleNamespace(end_nodes=end_nodes))))
    assert ended, "the nodes are ended all the same"
    assert violations(soak.monitor) == [
        ("stuck", "the journal cannot be read: no coordinator answers about steps")
    ]


def test_a_memory_of_any_size_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Fault] = []

    async def inject(fault: Fault) -> tuple[str, ...]:
        sent.append(fault)
        return ()

    async def main() -> None:
        client, cluster = cast(ClusterClient, None), cast(LocalCluster, Unwilling())
        monitor = SoakMonitor(limit_s=10.0, relative=1e-6)
        injector = SoakInjector(client, cluster, monitor, tolerate=1, beyond=False, seed=1, memory_mib=4096)
        monkeypatch.setattr(injector, "_remote", SimpleNamespace(inject=inject))
        for do in ("fill_memory", "flip"):
            injector.inject(DrawnFault(number=1, at_s=0.0, do=do, for_s=1.0, factor=1.0, position=0.5), 7.0)
        await injector.finish(60.0)

    asyncio.run(main())
    assert {fault.do: fault.size_mib for fault in sent} == {"fill_memory": 4096, "flip": None}
