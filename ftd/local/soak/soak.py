"""``ftd chaos soak``: a cluster on this machine that trains under random faults, while rules are checked all
the time.

First the job runs undisturbed: its losses are the reference for all later rounds, its pace the reference
for goodput. Then it runs again and again while faults are injected. At the end they stop, all nodes
recover, training must go on, and every process must end.
"""

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ftd.config.job import load_job_data
from ftd.errors import FtdError, PeerError, RequestRejected, UnreachableError
from ftd.local.cluster import ClusterOptions
from ftd.local.driver import LocalDriver
from ftd.local.soak.draw import DrawnFault, draw_faults
from ftd.local.soak.injector import SoakInjector
from ftd.local.soak.monitor import SoakMonitor
from ftd.local.soak.options import SoakOptions
from ftd.local.soak.report import SoakReport, count_by_kind, measure_goodput, time_by_cause
from ftd.observe.run_model import Fact
from ftd.transport.client import ANSWER_S
from ftd.transport.wire.public import JobData
from runtime.wire.recipe import RECIPE

NODES_START_S = 120.0
_TICK_S = 0.1
_GRACE_S = 30.0
_MOST_VIOLATIONS = 20
"""A soak stops after this many violations, since more would say nothing new."""
_LEAST_UNDISTURBED_S = 120.0
_LEAST_TIMED_STEPS = 5
_LEAST_TIMED_S = 5.0
"""Steps and seconds from which the duration of the whole job is estimated."""
_TOO_LONG = 1.5
"""Factor by which that estimate may exceed the limit, since first steps are slower."""
_PAUSED_S = 5.0
"""A job that pauses for this long although nothing disturbs it will not go on."""
_FURTHER_STEPS = 3
"""Number of steps that must follow when all faults are over."""


async def run_soak(
    options: SoakOptions, report: Callable[[str], None], on_report: Callable[[SoakReport], None]
) -> None:
    """Run a soak. All processes are ended, whatever happens.

    :param report: takes a line of progress.
    :param on_report: takes the report, also if a signal or an error ends the soak after its faults began.
    :raises ConfigurationError: the job or the options are wrong; nothing was started.
    :raises FtdError: the cluster did not start, or the job does not even run undisturbed.
    """
    job = load_job_data(options.job, steps=options.steps)
    cluster_options = ClusterOptions(
        broker=options.broker,
        cluster="soak",
        coordinators=options.coordinators,
        quarantine=False,  # The faults are on purpose, and the rules want all nodes to return.
        memory_mib=options.memory_mib,
        memory_field="--memory-mib",
    )
    nodes = [f"node-{number}" for number in range(options.nodes)]
    driver = LocalDriver(cluster_options, nodes, logs=options.logs)
    soak = Soak(options, job, driver, report)
    try:
        async with driver:
            await soak.run()
    finally:
        if driver.logs is not None and driver.logs.is_dir():
            (driver.logs / "events.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in soak.events))
        if soak.disturbed:
            on_report(soak.report())


def _private(job: JobData, directory: Path, number: int) -> JobData:
    """Return the job with a checkpoint directory of its own. So the user's checkpoints are untouched, and each
    round starts from the beginning.
    """
    if not job.checkpoint.url:
        return job
    place = directory / "checkpoints" / str(number)
    place.mkdir(parents=True, exist_ok=True)
    checkpoint = msgspec.structs.replace(job.checkpoint, url=str(place), resume=False)
    return msgspec.structs.replace(job, checkpoint=checkpoint)


def require_short(steps: int, commits: Sequence[tuple[float, int]], limit_s: float) -> None:
    """Check by the pace of the first steps that an undisturbed job can end in time.

    :param commits: times of commits in seconds, each with the number of steps.
    :raises PeerError: the job needs much longer.
    """
    done, took_s = _count_steps(commits)
    if done < _LEAST_TIMED_STEPS or took_s < _LEAST_TIMED_S:
        return
    expected_s = steps * took_s / done
    if expected_s > _TOO_LONG * limit_s:
        raise PeerError(
            f"the job is too long for this soak: its {steps} steps of {took_s / done:.2g} s take about "
            f"{expected_s / 60:.1f} minutes undisturbed, and {limit_s / 60:.3g} are allowed "
            f"(give --steps {max(2, int(limit_s * done / took_s / 4))}, or more --minutes)"
        )


def _count_steps(commits: Sequence[tuple[float, int]]) -> tuple[int, float]:
    """Return the number of steps after the first commit, and the seconds that they took."""
    took_s = commits[-1][0] - commits[0][0] if commits else 0.0
    return sum(count for _, count in commits[1:]), took_s


T = TypeVar("T", bound=Any)


def _since(zero_s: float, found: Iterable[T]) -> tuple[T, ...]:
    """Return the records sorted, with times that count from ``zero_s``."""
    dated = [replace(one, at_s=round(one.at_s - zero_s, 3)) for one in found]
    return tuple(sorted(dated, key=lambda one: float(one.at_s)))


def rounding_tolerance(job: JobData) -> float:
    """Return the relative difference of two losses that rounding explains.

    The models of Hugging Face compute some of their layers in float32, also where all others are in float64.
    """
    if job.training.get("precision") != "float64":
        return 1e-2
    return 1e-6 if job.training["function"] == RECIPE else 1e-9


class Soak:
    """One soak on one cluster."""

    def __init__(
        self, options: SoakOptions, job: JobData, driver: LocalDriver, report_line: Callable[[str], None]
    ) -> None:
        self._options, self._job, self._driver, self._report = options, job, driver, report_line
        relative = rounding_tolerance(job) if options.relative is None else options.relative
        standbys = options.coordinators > 1
        self.monitor = SoakMonitor(limit_s=options.limit_s, relative=relative, standbys=standbys)
        self.events: list[dict[str, Any]] = []
        """All events but steps, for whoever looks for the cause of a violation."""
        self._began = time.monotonic()
        self._faults_start_s = 0.0
        """Earliest time of a fault, in seconds since the soak began; ``_faults_end_s`` is the end of the
        faults.
        """
        self._faults_end_s = 0.0
        self._complete = False
        self._step_s = 0.0
        self._submitted = 0
        self._rounds = 0
        self._rejected_since: float | None = None
        self._paused_since: float | None = None
        self._not_injected = 0
        self._gaps: list[tuple[float, float]] = []
        self._idle_since: float | None = None
        self._injector: SoakInjector | None = None

    @property
    def disturbed(self) -> bool:
        """Return whether the time of the faults has ended, so that there is something to report."""
        return self._faults_end_s > 0

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._began

    async def run(self) -> None:
        """Run the soak from the start of the nodes to their end."""
        driver, options = self._driver, self._options
        async with driver.connected(on_event=self._on_event, on_state=self._on_state):
            injector = self._injector = SoakInjector(
                driver.client,
                driver.cluster,
                self.monitor,
                tolerate=self._job.policy.tolerate,
                beyond=options.beyond,
                seed=options.seed,
                memory_mib=options.memory_mib,
            )
            try:
                await driver.ready(NODES_START_S)
                await driver.run_guarded(self._soak(injector))
            finally:
                await injector.cancel()
                if driver.logs is None and self.monitor.violations:
                    driver.logs = Path(tempfile.mkdtemp(prefix=f"ftd-soak-{options.seed}-"))

    async def _soak(self, injector: SoakInjector) -> None:
        await self._undisturbed()
        await self._inject_faults(injector)
        await self._heal(injector)
        await self._shut_down(injector)
        self._complete = True

    # --- phases ------------------------------------------------------------------------------------

    async def _undisturbed(self) -> None:
        """Measure the losses and the pace of a run that nothing disturbs.

        :raises PeerError: the job fails or pauses, or it takes longer than the soak is to last.
        """
        await self._submit()
        limit_s = max(60.0 * self._options.minutes, _LEAST_UNDISTURBED_S)

        def decided() -> bool:
            require_short(self._job.steps, self.monitor.commits, limit_s)
            return self.monitor.ended is not None or self._pauses()

        try:
            await self._wait(decided, limit_s)
        except TimeoutError:
            raise PeerError(
                f"the undisturbed job did not end within {limit_s:g} s (it is at step {self.monitor.step} of "
                f"{self._job.steps}; give fewer --steps, or more --minutes)"
            ) from None
        if self.monitor.ended is None:
            raise PeerError(
                f"the job does not even run undisturbed, it pauses: {self.monitor.state.get('waiting_for')} "
                f"(it was given {self._options.nodes} nodes; give more with --nodes)"
            )
        if self.monitor.violations or self.monitor.ended != "JobFinished":
            details = "; ".join(violation.detail for violation in self.monitor.violations)
            raise PeerError(f"the job does not even run undisturbed: {details or self.monitor.ended}")
        steps, took_s = _count_steps(self.monitor.commits)
        self._step_s = took_s / max(steps, 1)
        await self._check_round()
        self.monitor.recoveries.clear()
        self.monitor.ended = None
        self.monitor.commits.clear()
        self._report(f"undisturbed: {self._job.steps} steps, {self._step_s * 1000:.1f} ms each")

    def _pauses(self) -> bool:
        """Return whether the job has been paused for so long that it will not go on."""
        if self.monitor.state.get("phase") != "PAUSED":
            self._paused_since = None
            return False
        self._paused_since = self.now_s if self._paused_since is None else self._paused_since
        return self.now_s - self._paused_since > _PAUSED_S

    async def _inject_faults(self, injector: SoakInjector) -> None:
        options = self._options
        drawn = draw_faults(
            options.seed,
            rate_per_min=options.rate_per_min,
            until_s=60.0 * options.minutes,
            memory=options.memory_mib is not None,
        )
        faults = list(drawn)
        self._faults_start_s = self._idle_since = self.now_s
        end_s = self._faults_start_s + 60.0 * options.minutes
        try:
            while self.now_s < end_s and not self._has_failed:
                await self._next_round()
                self._inject_due(faults, injector)
                injector.update(self.now_s)
                self.monitor.on_time(self.now_s)
                await asyncio.sleep(_TICK_S)
        finally:
            self._faults_end_s = self.now_s
            took_s = self._faults_end_s - self._faults_start_s
            self._not_injected = sum(fault.at_s < took_s for fault in faults)

    def _inject_due(self, faults: list[DrawnFault], injector: SoakInjector) -> None:
        """Inject the faults that are due. Those that must wait keep their order, and others overtake them."""
        due = [fault for fault in faults if self.now_s - self._faults_start_s >= fault.at_s]
        for fault in due:
            if not injector.may_inject(fault):
                continue
            faults.remove(fault)
            self._report(f"{self.now_s - self._faults_start_s:7.1f} s  {fault.do} for {fault.for_s:.1f} s")
            injector.inject(fault, self.now_s)

    async def _heal(self, injector: SoakInjector) -> None:
        """Wait until all nodes have recovered from the last fault and training goes on."""
        await injector.finish(self._options.limit_s)
        self.monitor.on_injected(None, "heal", self.now_s)
        goal = self.monitor.step + _FURTHER_STEPS

        def well() -> bool:
            injector.update(self.now_s)
            self.monitor.on_time(self.now_s)
            going = self.monitor.step >= goal or self.monitor.ended is not None
            return (going and injector.all_recovered) or self._has_failed

        try:
            await self._wait(well, 2 * self._options.limit_s)
        except TimeoutError:
            nodes = {name: node["state"] for name, node in (self.monitor.state.get("nodes") or {}).items()}
            details = (
                f"{self.monitor.state.get('phase')} at step {self.monitor.step} of {goal}, nodes {nodes}"
            )
            self.monitor.add_violation(
                self.now_s, "stuck", f"the cluster did not recover from the last fault: {details}"
            )
        if self.monitor.ended:
            await self._check_last_round()

    async def _shut_down(self, injector: SoakInjector) -> None:
        """Stop the job, and end the nodes as their hosts would."""
        if self.monitor.job is not None and not self.monitor.ended:
            with contextlib.suppress(FtdError):
                await self._driver.stop(self.monitor.job)
            with contextlib.suppress(TimeoutError):
                await self._wait(lambda: self.monitor.ended is not None, self._options.limit_s)
            await self._check_last_round()
        await injector.end_nodes(self.now_s, _GRACE_S)

    # --- rounds ------------------------------------------------------------------------------------

    @property
    def _has_failed(self) -> bool:
        return len(self.monitor.violations) >= _MOST_VIOLATIONS or any(
            violation.rule == "stuck" for violation in self.monitor.violations
        )

    async def _next_round(self) -> None:
        """Submit the next job when one is over, so that a job is always running."""
        monitor = self.monitor
        if monitor.job is not None and monitor.ended is None:
            if self._idle_since is not None and monitor.step:
                self._gaps.append((self._idle_since, self.now_s))
                self._idle_since = None
            return
        if self._idle_since is None:
            self._idle_since = self.now_s
        try:
            if monitor.job is not None and monitor.ended:
                await self._check_round()
                self._rounds += monitor.ended == "JobFinished"
            await self._submit()
        except UnreachableError:
            return  # The broker or the coordinator is away; try again at the next tick.
        except RequestRejected as error:
            self._on_rejected(str(error))

    async def _submit(self) -> None:
        job = _private(self._job, self._driver.disk, self._submitted)
        job_id = await self._driver.submit(job, timeout_s=ANSWER_S)
        self._submitted += 1
        self._rejected_since = None
        self.monitor.begin_round(job_id, self.now_s)

    def _on_rejected(self, why: str) -> None:
        """Handle a rejected submission. If only the answer to the last one was lost, the job is running; any
        other lasting rejection is a violation.
        """
        job = self.monitor.state.get("job") or {}
        if job.get("name") == self._job.name and self.monitor.state.get("phase") not in (
            "FINISHED",
            "FAILED",
        ):
            self.monitor.begin_round(str(job["id"]), self.now_s)
            self._submitted += 1
            return
        self._rejected_since = self.now_s if self._rejected_since is None else self._rejected_since
        if self.now_s - self._rejected_since > self._options.limit_s:
            self.monitor.add_violation(self.now_s, "stuck", f"jobs are no longer accepted: {why}")

    async def _check_round(self) -> None:
        """Compare the journal with the events of the round.

        :raises Unreachable: the coordinator is away.
        """
        monitor = self.monitor
        job = monitor.job
        if job is None:
            return
        rows = [row for row in await self._driver.client.history(what="steps") if row["job"] == job]
        monitor.check_journal(rows, self.now_s)
        monitor.job = None

    async def _check_last_round(self) -> None:
        """Compare the journal with the events after the faults. A coordinator that has not come back is a violation
        like others, which the report names.
        """
        try:
            await self._check_round()
        except UnreachableError as error:
            self.monitor.job = None
            self.monitor.add_violation(self.now_s, "stuck", f"the journal cannot be read: {error}")

    # --- events and states --------------------------------------------------------------------------

    def _on_event(self, event: dict[str, Any], _: Fact | None) -> None:
        if event["event"] != "StepCommitted":
            self.events.append(event)
        self.monitor.on_event(event, self.now_s)

    def _on_state(self, state: dict[str, Any]) -> None:
        self.monitor.on_state(state, self.now_s)

    async def _wait(self, holds: Callable[[], bool], limit_s: float) -> None:
        """Wait until ``holds`` returns true.

        :raises TimeoutError: ``holds`` was still false after ``limit_s``.
        """
        deadline = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > deadline:
                raise TimeoutError
            await asyncio.sleep(_TICK_S)

    # --- the end -----------------------------------------------------------------------------------

    def report(self) -> SoakReport:
        """Return the report. Its times count from the first moment at which faults could come."""
        options, monitor, zero_s = self._options, self.monitor, self._faults_start_s
        over_s = self._faults_end_s
        gaps = [*self._gaps, *([(self._idle_since, over_s)] if self._idle_since is not None else [])]
        injected = self._injector.injected if self._injector is not None else []
        faults = _since(zero_s, injected)
        recoveries = _since(zero_s, monitor.recoveries)
        return SoakReport(
            job=self._job.name,
            seed=options.seed,
            rate_per_min=options.rate_per_min,
            nodes=options.nodes,
            steps=self._job.steps,
            rounds=self._rounds,
            duration_s=round(over_s - zero_s, 3),
            complete=self._complete,
            passed=self._complete and not monitor.violations,
            violations=_since(zero_s, monitor.violations),
            faults=faults,
            by_kind=count_by_kind(faults),
            not_injected=self._not_injected,
            recoveries=recoveries,
            by_cause=time_by_cause(recoveries),
            rollbacks=monitor.rollbacks,
            unprovoked=tuple(monitor.unprovoked),
            goodput=measure_goodput(
                [(at_s - zero_s, count) for at_s, count in monitor.commits],
                until_s=over_s - zero_s,
                step_s=self._step_s,
                gaps=[(a - zero_s, b - zero_s) for a, b in gaps],
                repeated_steps=monitor.repeated_steps,
            ),
            repeat_command=options.command,
            logs=None if self._driver.logs is None else str(self._driver.logs),
        )
