"""Advice (``ftd replay --advise``): the settings of ``ftd`` that suit a job on a cluster with given failures.

The last section of ``docs/reference/replay-report.md`` explains every field of the document (``--json``);
``docs/reference/advice.schema.json`` is generated from its classes (``python -m ftd.replay.schema advice``).

Each question is answered by replaying the policy ``ftd`` with one setting varied on the same traces, in this
order: how many failures to tolerate, which protection, how often to take snapshots, and how often to write
checkpoints; each replay has the answers to the questions before. Choices whose goodput differs by less than
``TIE`` are decided by what a trace of some hours or days cannot show, computed from the trace's failure rate by
the models of ``planner.reliability`` and ``planner.state_loss``: state is to survive ``HORIZON_DAYS`` with the
probability ``THRESHOLD``, both the defaults of ``ftd reliability``, at the least cost. Intervals come from
``planner.intervals``, as in a running job; longer ones are replayed, too. That of checkpoints is the computed one
whatever the replays give: checkpoints are for losses that are rarer than a trace is long.

Assumptions: every removal of a node counts as a failure, also an announced one; nodes fail independently of each
other and equally often, apart from common causes, whose share begins with a prior and follows the rollbacks in
the replay; a lost copy is made again within the longest recovery of the replay; snapshots are needed when a common
cause stops the trainers of all owners; the training time that a checkpoint takes is the parameter's share of its write,
as a running job measures it.

Spare nodes: ``ftd`` trains on all nodes that are there, so a spare is a node beyond the size of the cluster that
is asked for, and the answer is the fewest with which that size is there for ``AVAILABLE`` of the time. A spare is
there as often as the trace's nodes are on average.
"""

import dataclasses
import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np
from msgspec.structs import replace as changed
from scipy.stats import binom

from ftd.errors import ConfigurationError
from ftd.observe.view.reliability import days as in_words
from ftd.observe.view.text import format_duration
from ftd.replay.comparison import ProgressCallback
from ftd.replay.job import JobError, ReplayJob
from ftd.replay.outcome import Outcome
from ftd.replay.parameters import Parameters
from ftd.replay.policies.ftd import FtdPolicy
from ftd.replay.policies.ideal import IdealPolicy
from ftd.replay.policy import RecoveryPolicy
from ftd.replay.replay import replay
from ftd.replay.traces.trace import Trace
from ftd.replay.virtual_cluster import FtdParameters
from ftd.snapshots.protection import make_bounded_code, stated_guarantee
from planner.errors import PlanningError
from planner.intervals import IntervalCost, choose_checkpoint_interval, choose_interval, lost_share
from planner.state_loss import common_cause_share, loss_rate, state_loss_horizon_s
from planner.values import Plan
from statemachine.cluster.snapshots.checkpoint_intervals import holder_groups
from statemachine.cluster.snapshots.replica_peers import choose_replica_peers
from statemachine.messages.values import SnapshotPolicy

SCHEMA_VERSION = 1
TRACES = 3
"""Number of traces of a failure model that are replayed, unless the user gives one."""
TIE = 1e-3
"""Difference of goodput below which two choices count as equal: a trace decides no more."""
HORIZON_DAYS = 30.0
THRESHOLD = 0.9
LEVELS = 16
"""Parts of the time, by the number of nodes, for each of which copies are counted."""
AVAILABLE = 0.95
"""Share of the time for which the cluster is to have its size."""
MOST_TOLERATED = 3
"""Most simultaneous failures that are tried; more copies than four leave few layouts to choose from."""
PROTECTIONS = ("none", "buddy", "arc:1", "aec", "aec+buddy", "arc:2", "aec2")
LONGER = (1, 4, 16)
"""Factors of the computed interval that are replayed."""
DAY_S = 86_400.0

Subject = Literal["tolerate", "protection", "snapshots", "checkpoints", "spares"]


class AdvisedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to a question."""

    value: str
    """The setting as a job file has it, or the number of nodes."""
    goodput: float | None
    """Samples that count as a share of those of ``ideal``, on average; ``null``: it cannot run."""
    samples_per_s: float | None
    remark: str
    """Findings of the models about it, or the reason for which it cannot run."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A question with its answers, the best one first."""

    subject: Subject
    question: str
    choices: tuple[AdvisedChoice, ...]
    reason: str
    """Rule by which the first choice is the best one."""

    @property
    def chosen(self) -> AdvisedChoice:
        """The best choice."""
        return self.choices[0]

    @property
    def runner_up(self) -> AdvisedChoice | None:
        """The best of the other choices that can run; ``None``: there is none."""
        return next((choice for choice in self.choices[1:] if choice.goodput is not None), None)


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """The result of ``ftd replay --advise``."""

    schema: int = SCHEMA_VERSION
    simulated: bool = True
    """Always true: nothing of this was measured on a cluster."""
    job: str
    job_source: str
    trace: str
    """Source of the trace; of several generated ones, the first."""
    traces: int
    nodes: int
    """Largest number of nodes in a trace: the size of the cluster."""
    failures_per_day: float
    """Instants at which nodes are removed."""
    loss_days: float
    """Expected days until no memory holds the state any more, with the advice."""
    common_cause_share: float
    """Share of the failures, from 0 to 1, that is taken to strike all copies of some layer at once."""
    questions: tuple[Question, ...]
    job_file: str
    """The advice as tables of a job file."""
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """Settings of ``ftd`` that are varied."""

    tolerate: int
    protection: str
    snapshot_every: int
    checkpoint_every: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A choice with what decides about it. Lower values of ``after`` are better among equal goodputs."""

    choice: AdvisedChoice
    after: tuple[float, ...] = ()


def advise(
    job: ReplayJob,
    traces: Sequence[Trace],
    parameters: Parameters,
    on_progress: ProgressCallback | None = None,
) -> Advice:
    """Return advice for a job on a cluster whose failures are those of the traces.

    :param traces: one trace, or several of one failure model.
    :raises ConfigurationError: no trace has a failure, or the job cannot run under ``ftd``.
    """
    if job.policy.zero1:
        raise ConfigurationError(
            "optimizer state in parts (ZeRO-1) is not replayed",
            field="--advise",
            remedy="advise without zero1",
        )
    return _Adviser(job, traces, parameters.section("ftd", FtdParameters), on_progress).advice()


class _Replays:
    """Replays of varied settings on the same traces; each is made once."""

    def __init__(self, job: ReplayJob, traces: Sequence[Trace], on_progress: ProgressCallback | None) -> None:
        self._job, self._traces, self._on_progress = job, traces, on_progress
        self._jobs: dict[int, ReplayJob] = {}
        self._done: dict[_Setting, tuple[Outcome, ...]] = {}
        self._minutes = sum(trace.end_s for trace in traces) / 60
        self._replays = 0
        unhindered = self.job(0)
        self.ideal = self._replay(lambda: IdealPolicy(unhindered))

    def job(self, tolerate: int) -> ReplayJob:
        """Return the job with another number of tolerated failures."""
        if tolerate not in self._jobs:
            policy = changed(self._job.policy, tolerate=tolerate)
            self._jobs[tolerate] = dataclasses.replace(self._job, policy=policy)
        return self._jobs[tolerate]

    def run(self, setting: _Setting, base: FtdParameters) -> tuple[Outcome, ...]:
        """Return the outcomes under a setting, one for each trace."""
        found = self._done.get(setting) or self._equal_outcomes(setting, base)
        if found is None:
            parameters = changed(
                base,
                protection=setting.protection,
                snapshot_every=setting.snapshot_every,
                checkpoint_every=setting.checkpoint_every,
            )
            job = self.job(setting.tolerate)
            found = self._replay(lambda: FtdPolicy(job, parameters))
        self._done[setting] = found
        return found

    def _equal_outcomes(self, setting: _Setting, base: FtdParameters) -> tuple[Outcome, ...] | None:
        """Return outcomes under a setting that differs only in what a rollback would use, if there was none."""
        for other, outcomes in self._done.items():
            equal_snapshots = other.snapshot_every == setting.snapshot_every or not base.snapshot_stall_s
            equal_checkpoints = (
                other.checkpoint_every == setting.checkpoint_every or not base.checkpoint_cost_share
            )
            equal_stalls = equal_snapshots and equal_checkpoints
            if other.tolerate == setting.tolerate and equal_stalls and not rollbacks(outcomes):
                return outcomes
        return None

    def _replay(self, make: Callable[[], RecoveryPolicy]) -> tuple[Outcome, ...]:
        outcomes = []
        for trace in self._traces:
            outcomes.append(replay(make(), trace, self._report))
        self._replays += 1
        return tuple(outcomes)

    def _report(self, _: float) -> None:
        if self._on_progress is not None:
            done = self._replays * self._minutes
            self._on_progress(round(done), round(max(done + self._minutes, 6 * self._minutes)))


class _Adviser:
    def __init__(
        self,
        job: ReplayJob,
        traces: Sequence[Trace],
        parameters: FtdParameters,
        on_progress: ProgressCallback | None,
    ) -> None:
        self._base, self._traces, self._job = parameters, traces, job
        self._nodes = max(trace.most_nodes for trace in traces)
        instants = sum(len([change for change in trace.changes if change.removed]) for trace in traces)
        if not instants:
            raise ConfigurationError(
                "no node is ever removed, so there is nothing to weigh",
                field="--advise",
                remedy="give a longer trace, or a failure model with --failures",
            )
        self._end_s = sum(trace.end_s for trace in traces)
        node_s = sum(trace.mean_nodes * trace.end_s for trace in traces)
        self._node_rate = instants / node_s
        """Failures of one node per second."""
        self._failures = instants
        self._available = node_s / (self._nodes * self._end_s)
        """Share of the time for which a node is there."""
        self._replays = _Replays(job, traces, on_progress)

    def _failure_s(self, nodes: int) -> float:
        """Return the expected time to the next failure of any of so many nodes."""
        return 1 / (self._node_rate * nodes)

    def advice(self) -> Advice:
        """Ask the questions in their order."""
        setting = _Setting(
            tolerate=0,
            protection=self._base.protection,
            snapshot_every=self._base.snapshot_every,
            checkpoint_every=self._base.checkpoint_steps(self._job.state_bytes, self._step_s(0)),
        )
        questions = [self._ask_tolerate(setting)]
        setting = dataclasses.replace(setting, tolerate=int(questions[0].chosen.value))
        questions.append(self._ask_protection(setting))
        setting = dataclasses.replace(setting, protection=questions[-1].chosen.value)
        questions.append(self._ask_snapshots(setting))
        setting = dataclasses.replace(setting, snapshot_every=int(questions[-1].chosen.value))
        questions.append(self._ask_checkpoints(setting))
        setting = dataclasses.replace(setting, checkpoint_every=int(questions[-1].chosen.value))
        questions.append(self._ask_spares(setting))
        first = self._traces[0]
        return Advice(
            job=self._job.name,
            job_source=self._job.source,
            trace=first.source,
            traces=len(self._traces),
            nodes=self._nodes,
            failures_per_day=self._failures / self._end_s * DAY_S,
            loss_days=self._loss_s(setting) / DAY_S,
            common_cause_share=self._common_share(setting),
            questions=tuple(questions),
            job_file=_job_file(setting),
            notes=first.notes,
        )

    # --- questions -----------------------------------------------------------------------------------

    def _ask_tolerate(self, setting: _Setting) -> Question:
        candidates = []
        for tolerate in range(MOST_TOLERATED + 1):
            tried = dataclasses.replace(setting, tolerate=tolerate)
            try:
                self._replays.job(tolerate).planner.check_tolerance(self._nodes)
                self._replays.job(tolerate).prepare(self._nodes)
            except (PlanningError, JobError) as error:
                candidates.append(_impossible(str(tolerate), str(error)))
                continue
            days = self._loss_s(tried, common_share=0.0) / DAY_S
            remark = f"independent failures take all copies of a layer {_once(days)}"
            survives = math.exp(-HORIZON_DAYS / days) >= THRESHOLD
            after = (0.0, tolerate) if survives else (1.0, -days)
            candidates.append(self._candidate(str(tolerate), tried, remark, after))
        return _question(
            "tolerate",
            "How many simultaneous node failures should the job tolerate?",
            candidates,
            f"of equal goodput, the fewest with which a copy of every layer survives {HORIZON_DAYS:g} days of "
            f"independent failures with probability {THRESHOLD:g}",
        )

    def _ask_protection(self, setting: _Setting) -> Question:
        plan = self._plan(setting.tolerate, self._nodes)
        owners = len(plan.pipelines)
        groups = holder_groups(plan, {}, "none", zero1=False)
        repair_s, needed_share = self._repair_s(setting), self._common_share(setting)
        candidates = []
        for scheme in PROTECTIONS:
            copied = bool(choose_replica_peers(plan, scheme, {*plan.nodes, *plan.idle_nodes}))
            try:
                overhead = 1.0 if copied else make_bounded_code(scheme, owners).overhead
            except ValueError as error:
                candidates.append(_impossible(scheme, str(error)))
                continue
            withstood = 1 if copied else stated_guarantee(scheme, owners)
            # Such a failure takes the host of one owner and opens the window in which further hosts are lost.
            holders = [max(group.nodes, 1 + copied) for group in groups]
            per_s = needed_share * sum(
                loss_rate(nodes, withstood, self._node_rate, repair_s) for nodes in holders
            )
            days = 1 / (per_s * DAY_S) if per_s else math.inf
            remark = (
                f"withstands {withstood} of {max(owners, 1 + copied)} holders, {overhead:.0%} more bytes; too little "
                f"when needed {_once(days)}"
            )
            survives = math.exp(-HORIZON_DAYS / days) >= THRESHOLD
            after = (0.0, overhead) if survives else (1.0, -days, overhead)
            candidates.append(
                self._candidate(scheme, dataclasses.replace(setting, protection=scheme), remark, after)
            )
        return _question(
            "protection",
            "Which protection should snapshots have?",
            candidates,
            f"of equal goodput, the cheapest with which snapshots alone survive {HORIZON_DAYS:g} days with "
            f"probability {THRESHOLD:g}",
        )

    def _ask_snapshots(self, setting: _Setting) -> Question:
        step_s = self._step_s(setting.tolerate)
        cost = IntervalCost(
            step_s=step_s, cost_s=self._base.snapshot_stall_s, horizon_s=self._failure_s(self._nodes)
        )
        best = choose_interval(
            cost,
            present=1,
            most=math.ceil(HORIZON_DAYS * DAY_S / step_s),
            cheap_share=SnapshotPolicy().cheap_share,
            settled=False,
        )
        # A snapshot begins when the one before is complete.
        least = max(best.every_steps, math.ceil(self._base.snapshot_write_s / step_s))
        candidates = []
        for position, every in enumerate((*(least * factor for factor in LONGER), 0)):
            tried = dataclasses.replace(setting, snapshot_every=every)
            remark = (
                f"every {format_duration(every * step_s)}"
                if every
                else "none, but checkpoints are made from them"
            )
            candidates.append(self._candidate(str(every), tried, remark, (position,)))
        return _question(
            "snapshots", "After how many steps should a snapshot be taken?", candidates, best.reason
        )

    def _ask_checkpoints(self, setting: _Setting) -> Question:
        step_s = self._step_s(setting.tolerate)
        write_s = self._base.checkpoint_write_s(self._job.state_bytes)
        cost_s = self._base.checkpoint_cost_s(self._job.state_bytes)
        cost = IntervalCost(step_s=step_s, cost_s=cost_s, horizon_s=self._loss_s(setting))
        best = choose_checkpoint_interval(
            cost,
            present=1,
            least=max(1, setting.snapshot_every),
            most=math.ceil(HORIZON_DAYS * DAY_S / step_s),
            write_s=write_s,
            settled=False,
        )
        candidates = []
        for position, factor in enumerate(LONGER):
            every = best.every_steps * factor
            tried = dataclasses.replace(setting, checkpoint_every=every)
            busy, lost = write_s / (every * step_s), lost_share(every, cost)
            remark = (
                f"every {format_duration(every * step_s)}; storage is busy for {busy:.2%} of the time, and "
                f"{lost:.2%} is expected to be lost"
            )
            candidates.append(self._candidate(str(every), tried, remark, (position,)))
        return _question(
            "checkpoints",
            "After how many steps should a checkpoint be written?",
            candidates,
            best.reason,
            decided=True,
        )

    def _ask_spares(self, setting: _Setting) -> Question:
        job = self._replays.job(setting.tolerate)
        shares = self._node_shares()
        most = 1
        while self._available_with(most, shares) < AVAILABLE:
            most *= 2
        enough = bisect_left(
            range(most), True, key=lambda spares: self._available_with(spares, shares) >= AVAILABLE
        )
        tried = sorted({0, enough // 2, max(0, enough - 1), enough})
        whole = job.samples_per_s(self._nodes)
        candidates = []
        for spares in tried:
            rate = self._rate_with(spares, shares, job)
            remark = (
                f"{self._nodes} nodes are there for {self._available_with(spares, shares):.1%} of the time"
            )
            choice = AdvisedChoice(value=str(spares), goodput=rate / whole, samples_per_s=rate, remark=remark)
            candidates.append(_Candidate(choice=choice, after=(float(spares < enough), -spares)))
        ordered = sorted(candidates, key=lambda candidate: candidate.after)
        return Question(
            subject="spares",
            question=f"How many spare nodes keep {self._nodes} nodes training?",
            choices=tuple(candidate.choice for candidate in ordered),
            reason=f"the fewest with which {self._nodes} nodes are there for {AVAILABLE:.0%} of the time; goodput is "
            f"that of {self._nodes} nodes at most, without the costs of recoveries",
        )

    # --- figures -------------------------------------------------------------------------------------

    def _candidate(self, value: str, setting: _Setting, remark: str, after: Iterable[float]) -> _Candidate:
        outcomes = self._replays.run(setting, self._base)
        pairs = zip(outcomes, self._replays.ideal, strict=True)
        choice = AdvisedChoice(
            value=value,
            goodput=statistics.fmean(
                o.samples / ideal.samples if ideal.samples else 0.0 for o, ideal in pairs
            ),
            samples_per_s=statistics.fmean(outcome.samples_per_s for outcome in outcomes),
            remark=remark,
        )
        return _Candidate(choice=choice, after=tuple(after))

    def _plan(self, tolerate: int, nodes: int) -> Plan:
        names = [f"node-{number}" for number in range(nodes)]
        planner = self._replays.job(tolerate).planner
        return planner.plan(planner.initial_situation(names))

    def _step_s(self, tolerate: int) -> float:
        step_s = self._replays.job(tolerate).iteration_s(self._nodes)
        assert step_s is not None, "the job was planned on so many nodes"
        return step_s

    def _repair_s(self, setting: _Setting) -> float:
        """Return the longest recovery of the replay, in which lost copies are made again."""
        outcomes = self._replays.run(setting, self._base)
        return max((one.duration_s for outcome in outcomes for one in outcome.recoveries), default=0.0)

    def _common_share(self, setting: _Setting) -> float:
        """Return the share of failures that strike so many nodes that no live replica of some layer is left."""
        return common_cause_share(self._failures, rollbacks(self._replays.run(setting, self._base)))

    def _loss_s(self, setting: _Setting, common_share: float | None = None) -> float:
        """Return the expected time until no memory holds the state.

        :param common_share: of failures; ``None``: as the rollbacks of the replay suggest.
        """
        repair_s = self._repair_s(setting)
        share = self._common_share(setting) if common_share is None else common_share
        rate = 0.0
        for nodes, part in self._typical_nodes().items():
            plan = self._plan(setting.tolerate, nodes)
            peers = choose_replica_peers(plan, setting.protection, {*plan.nodes, *plan.idle_nodes})
            groups = holder_groups(plan, peers, setting.protection, zero1=False)
            rate += part / state_loss_horizon_s(
                self._failure_s(nodes), nodes, groups, repair_s=repair_s, common_share=share
            )
        return 1 / rate if rate else math.inf

    def _typical_nodes(self) -> dict[int, float]:
        """Return numbers of nodes that stand for equal parts of the time, each with its share. With fewer nodes
        there are fewer copies; with too few the job waits and has as many as it needs at least.
        """
        shares = self._node_shares()
        counts = sorted(shares)
        ends = np.cumsum([shares[count] for count in counts])
        chosen: dict[int, float] = {}
        for part in range(LEVELS):
            index = int(np.searchsorted(ends, (part + 0.5) / LEVELS))
            nodes = max(counts[min(index, len(counts) - 1)], self._job.planner.fewest_nodes)
            chosen[nodes] = chosen.get(nodes, 0.0) + 1 / LEVELS
        return chosen

    def _node_shares(self) -> dict[int, float]:
        """Return the share of the time for each number of nodes."""
        spent: dict[int, float] = {}
        for trace in self._traces:
            counts = trace.node_counts()
            ends = [at_s for at_s, _ in counts[1:]] + [trace.end_s]
            for (at_s, count), end_s in zip(counts, ends, strict=True):
                spent[count] = spent.get(count, 0.0) + end_s - at_s
        return {count: seconds / self._end_s for count, seconds in spent.items()}

    def _available_with(self, spares: int, shares: dict[int, float]) -> float:
        """Return the share of the time for which the cluster has its size, with spares."""
        missing = self._nodes - np.array(list(shares))
        return float(binom.sf(missing - 1, spares, self._available) @ np.array(list(shares.values())))

    def _rate_with(self, spares: int, shares: dict[int, float], job: ReplayJob) -> float:
        """Return the mean throughput of at most as many nodes as the cluster has."""
        rates = np.array([job.samples_per_s(nodes) for nodes in range(self._nodes + 1)])
        spare = np.arange(spares + 1)
        chances = binom.pmf(spare, spares, self._available)
        return sum(
            share * float(chances @ rates[np.minimum(self._nodes, count + spare)])
            for count, share in shares.items()
        )


def rollbacks(outcomes: Iterable[Outcome]) -> int:
    """Return the number of recoveries that lost committed work."""
    return sum(recovery.rolled_back for outcome in outcomes for recovery in outcome.recoveries)


def _once(days: float) -> str:
    """Return a mean time in words; beyond a million years the models say no more than that."""
    return "less than once in a million years" if days > 1e6 * 365.25 else f"once in {in_words(days)}"


def _impossible(value: str, why: str) -> _Candidate:
    return _Candidate(choice=AdvisedChoice(value=value, goodput=None, samples_per_s=None, remark=why))


def _question(
    subject: Subject,
    question: str,
    candidates: Sequence[_Candidate],
    reason: str,
    *,
    decided: bool = False,
) -> Question:
    """Order the choices: by goodput, then by what the models say, and last those that cannot run.

    :param decided: whether the first candidate is the best one whatever the replays give, because a trace is too
        short to show what it is for.
    :raises ConfigurationError: no choice can run.
    """
    possible = [candidate for candidate in candidates if candidate.choice.goodput is not None]
    if not possible:
        raise ConfigurationError(
            f"the job cannot run under ftd: {candidates[0].choice.remark}", field="--advise"
        )
    ordered: list[_Candidate] = []
    if decided:
        ordered.append(possible.pop(0))
    while possible:
        best = max(candidate.choice.goodput or 0.0 for candidate in possible)
        equal = [candidate for candidate in possible if (candidate.choice.goodput or 0.0) >= best - TIE]
        ordered.append(min(equal, key=lambda candidate: candidate.after))
        possible.remove(ordered[-1])
    impossible = [candidate for candidate in candidates if candidate.choice.goodput is None]
    return Question(
        subject=subject,
        question=question,
        choices=tuple(candidate.choice for candidate in (*ordered, *impossible)),
        reason=reason,
    )


def _job_file(setting: _Setting) -> str:
    return (
        f"[tolerance]\nfailures = {setting.tolerate}\n\n"
        f'[snapshot]\nevery_steps = {setting.snapshot_every}\nprotection = "{setting.protection}"\n\n'
        f"[checkpoint]\nevery_steps = {setting.checkpoint_every}\n"
    )
