"""``ftd local``: a whole cluster on this machine that trains one job, and nothing left of it afterwards."""

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from ftd.config.clusters import LocalClusterRecord, register_cluster
from ftd.config.daemon_file import NodeTable
from ftd.config.job import load_job_data
from ftd.errors import ConfigurationError, FtdError, PeerError, UnreachableError
from ftd.faults.chaos.inject import require_known_nodes
from ftd.faults.chaos.scenario import load_scenario
from ftd.faults.chaos.scheduler import FaultScheduler
from ftd.faults.chaos.values import AfterTime, CentralService, Fault, Scenario
from ftd.local.cluster import COORDINATOR, ClusterOptions
from ftd.local.driver import LocalDriver
from ftd.local.inject import LocalInjector
from ftd.local.trainer_output import TrainerOutput
from ftd.observe.run_model import Fact, JobEndedFact, RecoveryCompletedFact
from ftd.observe.view.document import Report
from ftd.observe.view.files import require_distinct, require_writable, write_file
from ftd.observe.view.live.view import LiveView
from ftd.observe.view.report import build_report
from ftd.observe.view.summary import render_summary
from ftd.observe.view.text import plural
from ftd.transport.address import DEFAULT_CLUSTER
from ftd.transport.wire.public import JobData, encode_document
from runtime.wire.recipe import RECIPE

PAUSE_S = 5.0
"""Longest time for which a job may wait for nodes that nobody will start."""
_MONITOR_PERIOD_S = 0.2
_EVENT_GRACE_S = 1.0
"""Longest time from the state that shows the job's end until its event arrives."""
_END_EVENT_OF_PHASE = {"FINISHED": "JobFinished", "FAILED": "JobFailed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """The user's options."""

    job: Path
    nodes: int
    steps: int | None = None
    devices_per_node: int = 1
    chaos: Path | None = None
    report: Path | None = None
    broker: str = "embedded"
    coordinators: int = 1
    view: bool = True
    logs: Path | None = None
    """The directory in which the logs of all processes are kept."""
    cluster: str | None = None
    """The name of the cluster; ``None`` chooses one that no other local cluster has."""


async def run_local(options: LocalOptions, console: Console) -> int:
    """Run the job to its end, and return the exit code: 0 if it finished, 1 if it failed or was stopped.

    Cancelling the call (Ctrl-C) ends everything and leaves nothing; the summary of what happened so
    far is printed.

    :raises ConfigurationError: job, scenario or options are wrong; nothing was started.
    :raises FtdError: the cluster did not start, or the broker or the last coordinator died.
    """
    job = load_job_data(options.job, steps=options.steps)
    names = [f"node-{index}" for index in range(options.nodes)]
    scenario = load_scenario(options.chaos) if options.chaos else Scenario()
    if options.chaos:
        require_known_nodes(scenario, names, options.chaos.name)
    _require_possible(scenario, options)
    require_writable(options.report, "--report")
    require_distinct(
        ("--report", options.report),
        ("--logs", options.logs),
        read=[("JOB.toml", options.job), ("--chaos", options.chaos)],
    )
    with register_cluster(_choose_cluster_name(options), options.job) as announcement:
        cluster_options = ClusterOptions(
            devices_per_node=options.devices_per_node,
            broker=options.broker,
            dashboard=True,
            coordinators=options.coordinators,
            cluster=announcement.cluster,
            preload=imported_modules(job),
            expected_nodes=options.nodes,
        )
        async with LocalDriver(cluster_options, names, logs=options.logs) as driver:
            try:
                return await LocalRun(options, job, scenario, driver, announcement, console).run()
            finally:
                if job.logging.directory:
                    await asyncio.shield(driver.cluster.stop_coordinators())


class LocalRun:
    """One job on one local cluster."""

    def __init__(
        self,
        options: LocalOptions,
        job: JobData,
        scenario: Scenario,
        driver: LocalDriver,
        announcement: LocalClusterRecord,
        console: Console,
    ) -> None:
        self._options = options
        self._job = job
        self._scenario = scenario
        self._driver, self._cluster = driver, driver.cluster
        self._announcement = announcement
        self._console = console
        self._view = LiveView(console, total_steps=job.steps) if options.view else None
        self._output = TrainerOutput(driver.cluster.processes.logs, self._show_output)
        self._notes: list[str] = []
        self._missing: list[str] = []
        """Sentences about nodes without which the job started."""
        self._started = False
        self._announced = False
        self._published = contextlib.ExitStack()
        """The file by which commands find the cluster, as long as its broker and coordinators run."""
        self._scheduler: FaultScheduler | None = None
        self._paused_at: float | None = None
        self._stuck = ""
        """Condition for which the paused job waits although nothing will fulfil it; empty unless the run was abandoned
        for that reason.
        """
        self._outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The name of the event that ended the job."""

    async def run(self) -> int:
        """Run from the start of the nodes to the summary, and return the exit code. The summary is printed
        however the run ends.
        """
        if self._announcement.cluster != DEFAULT_CLUSTER:
            self._console.print(f"cluster: {self._announcement.cluster}", markup=False, highlight=False)
        for name, page in self._cluster.dashboards.items():
            whose = "dashboard" if name == COORDINATOR else f"dashboard of {name}"
            self._console.print(f"{whose}: {page}", markup=False, highlight=False)
        broker = self._driver.address.broker
        self._console.print(f"broker: {broker.url}", markup=False, highlight=False)
        view = self._view
        try:
            with self._published, view or contextlib.nullcontext():
                async with self._driver.connected(
                    on_event=self._on_event,
                    on_state=self._on_state,
                    on_node=self._on_node,
                    on_broker=view.on_broker if view is not None else None,
                ):
                    await self._run_job()
        except (asyncio.CancelledError, PeerError):
            if self._started:
                self._conclude()
            raise
        return self._conclude()

    async def _run_job(self) -> None:
        """Submit the job when the nodes are ready, inject the scenario's faults, and follow the events until
        the job is over.
        """
        driver = self._driver
        injector = driver.injector(self._scenario.seed)
        scheduler = FaultScheduler(self._scenario, inject=injector.inject, on_failure=self._on_failure)
        self._scheduler = scheduler
        monitoring = asyncio.ensure_future(self._monitor(injector, scheduler))
        try:
            await driver.run_guarded(self._submit(), monitoring)
            await driver.run_guarded(asyncio.shield(self._outcome), monitoring)
            driver.following.cancel()  # Later events only show the idle cluster.
            self._notes += [f"was never due: {fault}" for fault in scheduler.waiting]
            await self._fill_gaps()
        finally:
            await scheduler.cancel()
            monitoring.cancel()
            await asyncio.gather(monitoring, return_exceptions=True)
            self._read_output()

    async def _submit(self) -> None:
        """Submit the job once all nodes have joined and have their trainers, so that the first plan uses all
        of them. A node that has ended, or does not get ready in time, is not waited for.

        :raises PeerError: no node gets ready.
        :raises RequestRejected: the job cannot run.
        """
        missing = await self._driver.await_nodes()
        left = len(self._driver.nodes) - len(missing)
        if not left:
            raise self._driver.exit_error(*next(iter(missing.items())))
        self._missing = [
            f"{why}: the job started with the other {plural(left, 'node')}" for why in missing.values()
        ]
        for why in self._missing:
            self._warn(why)
        await self._driver.submit(self._job)

    def _on_event(self, event: dict[str, Any], fact: Fact | None) -> None:
        if self._view is not None:
            self._view.on_event(event)
        if self._started and self._scheduler is not None:
            self._scheduler.on_event(event)
        elif isinstance(fact, RecoveryCompletedFact) and self._scheduler is not None:
            self._started = True  # The start has completed: the first step is committed.
            self._scheduler.start()
        if isinstance(fact, JobEndedFact):
            self._end(fact.event)

    async def _monitor(self, injector: LocalInjector, scheduler: FaultScheduler) -> None:
        """Monitor the processes that nobody replaces, and abandon a pause that cannot end.

        :raises PeerError: a process has ended; the error carries the end of its log.
        """
        ended: set[str] = set()
        while True:
            await asyncio.sleep(_MONITOR_PERIOD_S)
            self._read_output()
            for name in self._driver.ended_services(injector.absent | ended):
                ended.add(name)
                others = set(self._cluster.coordinators) - ended
                if name not in self._cluster.coordinators or not others:
                    raise self._driver.exit_error(name, f"{name} has ended")
                self._warn(f"{name} has ended; {', '.join(sorted(others))} still running")
            self._abandon_when_stuck(scheduler)

    def _read_output(self) -> None:
        if self._view is not None:
            self._output.read()

    def _show_output(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _warn(self, message: str) -> None:
        self._console.print(message, style="yellow", markup=False, highlight=False)

    def _abandon_when_stuck(self, scheduler: FaultScheduler) -> None:
        """End a job that waits for nodes if all running ones are healthy and the scenario starts no more.

        A fault that starts a node at a step or on an event does not count, since neither occurs while the
        job is paused. A wait that the coordinator itself abandons after a while is not ended here, since
        the job may resume from a checkpoint.
        """
        state = self._driver.state
        if state.get("phase") != "PAUSED" or state.get("pause_limited"):
            self._paused_at = None
            return
        self._paused_at = self._paused_at or time.monotonic()
        coming = any(f.do == "start" and isinstance(f.trigger, AfterTime) for f in scheduler.waiting)
        if coming or not self._driver.healthy or time.monotonic() - self._paused_at < PAUSE_S:
            return
        self._stuck = str(state.get("waiting_for") or "more nodes")
        self._end("paused")

    async def _fill_gaps(self) -> None:
        """Ask the coordinator's journal for the events and steps that were lost while the broker was away."""
        client, run = self._driver.client, self._driver.run
        with contextlib.suppress(UnreachableError):
            for event in await client.history():
                run.on_event(event)
            for row in await client.history(what="steps"):
                run.on_event({**row, "event": "StepCommitted", "monotonic": _monotonic(row["at"])})

    def _on_node(self, node: str, state: str) -> None:
        if self._started and self._scheduler is not None:
            self._scheduler.on_node(node, state)

    def _on_state(self, state: dict[str, Any]) -> None:
        if not self._announced:  # Before, commands would find a cluster without a coordinator.
            self._announced = True
            self._published.enter_context(self._announcement.publish_broker(self._driver.address.broker.url))
        if self._view is not None:
            self._view.on_state(state)
        outcome = _END_EVENT_OF_PHASE.get(str(state.get("phase")))
        if outcome is not None:  # Its event is on its way, or was lost with a broker.
            asyncio.get_running_loop().call_later(_EVENT_GRACE_S, self._end, outcome)

    def _end(self, outcome: str) -> None:
        if not self._outcome.done():
            self._outcome.set_result(outcome)

    def _on_failure(self, fault: Fault, error: FtdError) -> None:
        self._notes.append(f"{fault}: {error}")

    def _conclude(self) -> int:
        """Print the summary, write the report, and return the exit code."""
        report = build_report(self._driver.run)
        self._console.print(render_summary(report))
        if self._stuck:
            self._console.print(f"abandoned: {self._stuck}", style="red", markup=False, highlight=False)
        for why in self._missing:
            self._warn(why)
        for note in self._notes:
            self._console.print(f"chaos: {note}", style="yellow", markup=False)
        written = self._write_report(report)
        return 0 if report.outcome == "finished" and written else 1

    def _write_report(self, report: Report) -> bool:
        """Write the report if one was asked for, and return whether that succeeded. A full disk must not hide how the
        run ended.
        """
        if self._options.report is None:
            return True
        try:
            write_file(self._options.report, encode_document(report), "--report")
        except ConfigurationError as error:
            self._console.print(str(error), style="red", markup=False, highlight=False)
            return False
        self._console.print(f"report: {self._options.report}", markup=False, highlight=False)
        return True


def _monotonic(at: str) -> float:
    """Return the monotonic time of an ISO-8601 time of this host, to the millisecond."""
    return time.monotonic() - (datetime.now(UTC) - datetime.fromisoformat(at)).total_seconds()


def imported_modules(job: JobData) -> tuple[str, ...]:
    """Return which of the modules that nodes preload by default the job's code mentions."""
    function = str(job.training["function"])
    if function == RECIPE:
        return NodeTable().preload
    code = Path(function.rpartition(":")[0])
    if code.suffix != ".py" or not code.is_file():
        return ()
    text = code.read_text(errors="replace")
    return tuple(module for module in NodeTable().preload if module in text)


def _choose_cluster_name(options: LocalOptions) -> str | None:
    """Return the name to claim. A broker of our own serves one cluster; another broker may serve several."""
    if options.cluster is not None or options.broker in ("embedded", "mosquitto"):
        return options.cluster
    return f"local-{os.getpid()}"


def _require_possible(scenario: Scenario, options: LocalOptions) -> None:
    """Check that all faults can be injected here.

    :raises ConfigurationError: a fault cannot be injected here.
    """
    for fault in scenario.faults:
        if fault.do == "cut":
            raise ConfigurationError(
                f"{fault.id}: cut needs nodes with networks of their own",
                field="--chaos",
                remedy="play it with ftd chaos run --local, with network = true under [cluster]",
            )
    if options.broker in ("embedded", "mosquitto"):
        return
    if any(fault.target == CentralService(service="broker") for fault in scenario.faults):
        raise ConfigurationError(
            f"the scenario injects a fault into the broker, but {options.broker} was not started by this command",
            field="--broker",
            remedy="use --broker embedded or mosquitto",
        )
