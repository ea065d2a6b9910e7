"""``ftd chaos soak``: a cluster on this machine under random faults for some minutes, watched all the time.

First the job runs undisturbed: its losses are what every later one is held against, its pace is what goodput
is measured by. Then it runs again and again while faults strike. At the end they stop, everything comes
back, training must go on, and every process must end.
"""

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ftd.config.job import load_job_data
from ftd.errors import FtdError, PeerError, RequestRejected, UnreachableError
from ftd.local.cluster import ClusterOptions
from ftd.local.driver import ClusterResources, LocalDriver
from ftd.local.soak.draw import DrawnFault, draw
from ftd.local.soak.injector import SoakInjector
from ftd.local.soak.monitor import SoakMonitor
from ftd.local.soak.options import SoakOptions
from ftd.local.soak.report import SoakReport, by_cause, by_kind, goodput
from ftd.observe.run_model import Fact
from ftd.transport.client import ANSWER_S
from ftd.transport.wire.public import JobData

NODES_START_S = 120.0
_TICK_S = 0.1
_GRACE_S = 30.0
_MOST_VIOLATIONS = 20
"""More say nothing more."""
_LEAST_UNDISTURBED_S = 120.0
_PAUSED_S = 5.0
"""A job that nothing disturbs and that pauses for so long will not go on."""
_FURTHER_STEPS = 3
"""So many must follow when all faults are over."""


async def run_soak(options: SoakOptions, report: Callable[[str], None]) -> SoakReport:
    """Soak; returns what was found. All processes are ended, whatever happens.

    :raises ConfigurationError: the job or the options are wrong; nothing was started.
    :raises FtdError: the cluster could not be brought up, or the job does not even run undisturbed.
    """
    job = load_job_data(options.job, steps=options.steps)
    wanted = ClusterOptions(broker=options.broker, cluster="soak", coordinators=options.coordinators)
    nodes = [f"node-{number}" for number in range(options.nodes)]
    surroundings = ClusterResources(memory_mib=options.memory_mib, memory_field="--memory-mib")
    driver = LocalDriver(wanted, nodes, surroundings=surroundings, logs=options.logs)
    soak = Soak(options, job, driver, report)
    try:
        async with driver:
            await soak.run()
    finally:
        if driver.logs is not None and driver.logs.is_dir():
            (driver.logs / "events.jsonl").write_text("".join(f"{json.dumps(e)}\n" for e in soak.events))
    return soak.report()


def _private(job: JobData, directory: Path, number: int) -> JobData:
    """A soak leaves the user's checkpoints alone, and each round begins anew."""
    if not job.checkpoint.url:
        return job
    place = directory / "checkpoints" / str(number)
    place.mkdir(parents=True, exist_ok=True)
    checkpoint = msgspec.structs.replace(job.checkpoint, url=str(place), resume=False)
    return msgspec.structs.replace(job, checkpoint=checkpoint)


T = TypeVar("T", bound=Any)


def _since(zero_s: float, found: Iterable[T]) -> tuple[T, ...]:
    """The same with times that count from ``zero_s``, in order."""
    dated = [replace(one, at_s=round(one.at_s - zero_s, 3)) for one in found]
    return tuple(sorted(dated, key=lambda one: float(one.at_s)))


class Soak:
    """One soak on one cluster."""

    def __init__(
        self, options: SoakOptions, job: JobData, driver: LocalDriver, say: Callable[[str], None]
    ) -> None:
        self._options, self._job, self._driver, self._say = options, job, driver, say
        relative = options.relative or (1e-9 if job.training.get("precision") == "float64" else 1e-2)
        standbys = options.coordinators > 1
        self.watch = SoakMonitor(limit_s=options.limit_s, relative=relative, standbys=standbys)
        self.events: list[dict[str, Any]] = []
        """All but steps, for whoever looks for what went wrong."""
        self._began = time.monotonic()
        self._faults_s = 0.0
        """When faults began, on the clock that began with the soak; likewise their end."""
        self._over_s: float | None = None
        self._step_s = 0.0
        self._submitted = 0
        self._rounds = 0
        self._refused_since: float | None = None
        self._paused_since: float | None = None
        self._waited = 0
        self._gaps: list[tuple[float, float]] = []
        self._idle_since: float | None = None
        self._hands: SoakInjector | None = None

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._began

    async def run(self) -> None:
        """From the first process to the last."""
        driver, options = self._driver, self._options
        async with driver.connected(on_event=self._on_event, on_state=self._on_state):
            hands = self._hands = SoakInjector(
                driver.client,
                driver.cluster,
                self.watch,
                tolerate=self._job.policy.tolerate,
                beyond=options.beyond,
                seed=options.seed,
            )
            try:
                await driver.ready(NODES_START_S)
                await driver.run_guarded(self._soak(hands))
            finally:
                await hands.cancel()
                if driver.logs is None and self.watch.violations:
                    driver.logs = Path(tempfile.mkdtemp(prefix=f"ftd-soak-{options.seed}-"))

    async def _soak(self, hands: SoakInjector) -> None:
        await self._undisturbed()
        await self._strike(hands)
        await self._heal(hands)
        await self._leave(hands)

    # --- phases ------------------------------------------------------------------------------------

    async def _undisturbed(self) -> None:
        """The losses and the pace of a run that nothing disturbs.

        :raises PeerError: the job fails or pauses, or it takes longer than the soak is to last.
        """
        await self._submit()
        limit_s = max(60.0 * self._options.minutes, _LEAST_UNDISTURBED_S)
        try:
            await self._wait(lambda: self.watch.ended is not None or self._pauses(), limit_s, "its end")
        except PeerError as error:
            raise PeerError(
                f"the undisturbed job: {error} (it is at step {self.watch.step} of {self._job.steps}; "
                "give fewer --steps, or more --minutes)"
            ) from None
        if self.watch.ended is None:
            raise PeerError(
                f"the job does not even run undisturbed, it pauses: {self.watch.state.get('waiting_for')} "
                f"(it was given {self._options.nodes} nodes; give more with --nodes)"
            )
        if self.watch.violations or self.watch.ended != "JobFinished":
            said = "; ".join(violation.detail for violation in self.watch.violations)
            raise PeerError(f"the job does not even run undisturbed: {said or self.watch.ended}")
        commits = self.watch.commits
        steps = sum(count for _, count in commits[1:])
        self._step_s = (commits[-1][0] - commits[0][0]) / max(steps, 1)
        await self._check_round()
        self.watch.recoveries.clear()
        self.watch.ended = None
        commits.clear()
        self._say(f"undisturbed: {self._job.steps} steps, {self._step_s * 1000:.1f} ms each")

    def _pauses(self) -> bool:
        """It has done so for long enough not to go on."""
        if self.watch.state.get("phase") != "PAUSED":
            self._paused_since = None
            return False
        self._paused_since = self.now_s if self._paused_since is None else self._paused_since
        return self.now_s - self._paused_since > _PAUSED_S

    async def _strike(self, hands: SoakInjector) -> None:
        options = self._options
        drawn = draw(
            options.seed,
            rate_per_min=options.rate_per_min,
            until_s=60.0 * options.minutes,
            memory=options.memory_mib is not None,
        )
        strikes = list(drawn)
        self._faults_s = self._idle_since = self.now_s
        end_s = self._faults_s + 60.0 * options.minutes
        while self.now_s < end_s and not self._hopeless:
            await self._next_round()
            self._strike_due(strikes, hands)
            hands.look(self.now_s)
            self.watch.on_time(self.now_s)
            await asyncio.sleep(_TICK_S)
        self._over_s = self.now_s
        self._waited = sum(strike.at_s < end_s - self._faults_s for strike in strikes)

    def _strike_due(self, strikes: list[DrawnFault], hands: SoakInjector) -> None:
        """Those that must wait for room keep their order; the others pass them by."""
        due = [strike for strike in strikes if self.now_s - self._faults_s >= strike.at_s]
        for strike in due:
            if not hands.may_strike(strike):
                continue
            strikes.remove(strike)
            self._say(f"{self.now_s - self._faults_s:7.1f} s  {strike.do} for {strike.for_s:.1f} s")
            hands.strike(strike, self.now_s)

    async def _heal(self, hands: SoakInjector) -> None:
        """No more faults: everything comes back, and training goes on."""
        await hands.finish(self._options.limit_s)
        self.watch.struck(None, "heal", self.now_s)
        goal = self.watch.step + _FURTHER_STEPS

        def well() -> bool:
            hands.look(self.now_s)
            self.watch.on_time(self.now_s)
            going = self.watch.step >= goal or self.watch.ended is not None
            return (going and hands.calm) or self._hopeless

        try:
            await self._wait(well, 2 * self._options.limit_s, "")
        except PeerError:
            nodes = {name: node["state"] for name, node in (self.watch.state.get("nodes") or {}).items()}
            said = f"{self.watch.state.get('phase')} at step {self.watch.step} of {goal}, nodes {nodes}"
            self.watch.broken(self.now_s, "stuck", f"it did not heal after the last fault: {said}")
        if self.watch.ended:
            await self._check_round()

    async def _leave(self, hands: SoakInjector) -> None:
        """Stop the job, and end the nodes as their hosts would."""
        if self.watch.job is not None and not self.watch.ended:
            with contextlib.suppress(FtdError):
                await self._driver.stop(self.watch.job)
            with contextlib.suppress(PeerError):
                await self._wait(lambda: self.watch.ended is not None, self._options.limit_s, "")
            await self._check_round()
        await hands.end_nodes(self.now_s, _GRACE_S)

    # --- rounds ------------------------------------------------------------------------------------

    @property
    def _hopeless(self) -> bool:
        return len(self.watch.violations) >= _MOST_VIOLATIONS or any(
            violation.rule == "stuck" for violation in self.watch.violations
        )

    async def _next_round(self) -> None:
        """A job is always under way: the next one follows when one is over."""
        watch = self.watch
        if watch.job is not None and watch.ended is None:
            if self._idle_since is not None and watch.step:
                self._gaps.append((self._idle_since, self.now_s))
                self._idle_since = None
            return
        if self._idle_since is None:
            self._idle_since = self.now_s
        try:
            if watch.job is not None and watch.ended:
                await self._check_round()
                self._rounds += watch.ended == "JobFinished"
            await self._submit()
        except UnreachableError:
            return  # The broker or the coordinator is away: next time.
        except RequestRejected as error:
            self._refused(str(error))

    async def _submit(self) -> None:
        job = _private(self._job, self._driver.disk, self._submitted)
        begun = await self._driver.submit(job, timeout_s=ANSWER_S)
        self._submitted += 1
        self._refused_since = None
        self.watch.begin_round(begun, self.now_s)

    def _refused(self, why: str) -> None:
        """An answer that was lost: the job is under way. Anything else that lasts is wrong."""
        job = self.watch.state.get("job") or {}
        if job.get("name") == self._job.name and self.watch.state.get("phase") not in ("FINISHED", "FAILED"):
            self.watch.begin_round(str(job["id"]), self.now_s)
            self._submitted += 1
            return
        self._refused_since = self.now_s if self._refused_since is None else self._refused_since
        if self.now_s - self._refused_since > self._options.limit_s:
            self.watch.broken(self.now_s, "stuck", f"no job is accepted any more: {why}")

    async def _check_round(self) -> None:
        """Hold the journal against what was told. :raises Unreachable: the coordinator is away."""
        watch = self.watch
        job = watch.job
        if job is None:
            return
        rows = [row for row in await self._driver.client.history(what="steps") if row["job"] == job]
        watch.on_journal(rows, self.now_s)
        watch.job = None

    # --- what the cluster says ---------------------------------------------------------------------

    def _on_event(self, event: dict[str, Any], _: Fact | None) -> None:
        if event["event"] != "StepCommitted":
            self.events.append(event)
        self.watch.on_event(event, self.now_s)

    def _on_state(self, state: dict[str, Any]) -> None:
        self.watch.on_state(state, self.now_s)

    async def _wait(self, holds: Callable[[], bool], limit_s: float, what: str) -> None:
        """:raises PeerError: not in time."""
        deadline = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > deadline:
                raise PeerError(f"not within {limit_s:g} s: {what}")
            await asyncio.sleep(_TICK_S)

    # --- the end -----------------------------------------------------------------------------------

    def report(self) -> SoakReport:
        """All that was found. Its times count from when faults began."""
        options, watch, zero_s = self._options, self.watch, self._faults_s
        over_s = self._over_s if self._over_s is not None else self.now_s
        gaps = [*self._gaps, *([(self._idle_since, over_s)] if self._idle_since is not None else [])]
        struck = self._hands.struck if self._hands is not None else []
        faults = _since(zero_s, struck)
        recoveries = _since(zero_s, watch.recoveries)
        return SoakReport(
            job=self._job.name,
            seed=options.seed,
            rate_per_min=options.rate_per_min,
            nodes=options.nodes,
            steps=self._job.steps,
            rounds=self._rounds,
            duration_s=round(over_s - zero_s, 3),
            passed=not watch.violations,
            violations=_since(zero_s, watch.violations),
            faults=faults,
            by_kind=by_kind(faults),
            not_injected=self._waited,
            recoveries=recoveries,
            by_cause=by_cause(recoveries),
            rollbacks=watch.rollbacks,
            unprovoked=tuple(watch.unprovoked),
            goodput=goodput(
                [(at_s - zero_s, count) for at_s, count in watch.commits],
                until_s=over_s - zero_s,
                step_s=self._step_s,
                gaps=[(a - zero_s, b - zero_s) for a, b in gaps],
                done_again=watch.done_again,
            ),
            repeat_command=options.command,
            logs=None if self._driver.logs is None else str(self._driver.logs),
        )
