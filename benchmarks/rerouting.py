"""Whether a choice between a new plan and rerouted microbatches, at each failure, would commit more samples.

    python -m benchmarks.rerouting                                  # about ten minutes on one core
    python -m benchmarks.rerouting --models gpt2 --traces oobleck_fail_1h --out /tmp

Everything here is simulated: no model is trained. ``rerouting.json`` and ``rerouting-alone.json`` are written into
``benchmarks/results/evaluation``, from which ``make docs`` writes the tables of ``docs/explanation/rerouting.md``.

The first table bounds what the choice could add to ftd. At each failure of a replay, ftd's plan stands for what the
planner does today: it pauses, moves state, and then takes T seconds for an iteration. Rerouting keeps the plan
before the failure and moves nothing: the layers of the dead nodes are computed by peers that hold them, in R seconds
for an iteration. R is a lower bound, which favours rerouting: unaffected pipelines keep their time; each microbatch of
a dead stage goes to a pipeline that has its layers, so that the last worker is done as early as possible; several
dead stages add up only in the mean of all workers; and a worker has no idle time but the first microbatch's way to it
and the last one's way back. The best choice reroutes while state moves in the background, at no cost, and then goes on
with the shorter of T and R until the next change. Every other phase of the recovery is the same in both. ``wins``
counts the failures at which rerouting until the next change commits more than ftd's plan; the last columns have how
many more samples the best choices commit than ftd, at the network of the model card and at slower ones.

The second table replays rerouting alone, with the phases of ftd's recovery in place of ReCycle's and with ftd's pace
without failures: within the memory of 1F1B, without a limit of memory, and with decoupled backwards and staggered
optimizer steps, whose pace without failures is that of a schedule which has them too; and ReCycle as published, which
is compared with 1F1B.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from pathlib import Path

import msgspec
from msgspec.structs import replace

from benchmarks.common import EVALUATION, Limit, Result, command_line, main
from ftd.replay.cards import read_card
from ftd.replay.job import ReplayJob
from ftd.replay.outcome import Outcome
from ftd.replay.parameters import read_parameters
from ftd.replay.policies.ftd import FtdPolicy
from ftd.replay.policies.recycle import RecyclePolicy
from ftd.replay.policies.registry import make_policy
from ftd.replay.policy import Change, Reaction
from ftd.replay.replay import replay
from ftd.replay.traces.reading import read_trace
from ftd.replay.traces.trace import Trace
from ftd.replay.virtual_cluster import FtdParameters
from planner.values import PipelinePlacement, Plan, StageTemplate

TRACES = Path(__file__).with_name("traces")
MODELS = ("bert-large", "gpt2", "gpt3-medium", "gpt3-2.7b", "gpt3-6.7b")
LINKS = {"card": None, "10 Gb/s": 1.25e9, "1 Gb/s": 0.125e9}
"""Bytes per second at which a device receives or sends state; ``None``: those of the model card, 25e9."""
WORTHWHILE = 0.03
"""Share of samples above which a choice for each failure is worth an implementation."""

VARIANTS: dict[str, dict[str, object]] = {
    "1F1B memory": {"decoupled": False, "staggered": False, "memory_cap": "1f1b"},
    "any memory": {"decoupled": False, "staggered": False},
    "decoupled, staggered": {"baseline": "same"},
}
"""Parameters of rerouting alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A failure of nodes that trained, and ftd's reaction."""

    change: Change
    before: Plan
    reaction: Reaction


class RecordedFtd(FtdPolicy):
    """ftd, with a record of the failures from which it recovers without a rollback."""

    def __init__(self, job: ReplayJob, parameters: FtdParameters) -> None:
        super().__init__(job, parameters)
        self.losses: list[Loss] = []

    def change(self, change: Change) -> Reaction | None:
        """React as ftd does."""
        before = self._cluster.plan
        reaction = super().change(change)
        if (
            before is not None
            and reaction is not None
            and reaction.running is not None
            and reaction.keep_iterations is None
            and set(before.nodes).intersection(change.removed)
        ):
            self.losses.append(Loss(change=change, before=before, reaction=reaction))
        return reaction


def stage_templates(pipeline: PipelinePlacement) -> tuple[StageTemplate, ...]:
    """Return the stages of a pipeline without their nodes."""
    return tuple(
        StageTemplate(
            first_layer=stage.first_layer,
            end_layer=stage.end_layer,
            node_offset=0,
            devices=len(stage.devices),
            recompute=stage.recompute,
            within=stage.within,
        )
        for stage in pipeline.stages
    )


def layer_times_s(job: ReplayJob, stage: StageTemplate) -> dict[int, float]:
    """Return the time that each layer of a stage takes for a microbatch."""
    layers = range(stage.first_layer, stage.end_layer)
    alone = tuple(replace(stage, first_layer=layer, end_layer=layer + 1) for layer in layers)
    times_ms = job.planner.costs.stage_times_ms(alone)
    return {layer: ms / 1e3 for layer, ms in zip(layers, times_ms, strict=True)}


def least_rerouted_s(job: ReplayJob, plan: Plan, dead: Collection[str]) -> float:
    """Return a lower bound on the time of an iteration of ``plan`` whose dead nodes' work goes to peers.

    It is infinite if no pipeline has live nodes for all layers of a dead stage.
    """
    costs = job.planner.costs
    unaffected_s, sync_s, work_s = 0.0, math.inf, 0.0
    workers: list[_Worker] = []
    lost: list[tuple[StageTemplate, int]] = []
    """Dead stages, each with its microbatches."""
    for index, pipeline in enumerate(plan.pipelines):
        stages = stage_templates(pipeline)
        forward_ms, backward_ms, _ = costs.pipeline_ms(stages)
        makespan_s = costs.clock(stages).makespan_ms(pipeline.microbatches) / 1e3
        sync_s = min(sync_s, pipeline.estimated_s - makespan_s)
        if not set(pipeline.nodes).intersection(dead):
            unaffected_s = max(unaffected_s, makespan_s)
        way_s = 0.0
        for number, (stage, placed) in enumerate(zip(stages, pipeline.stages, strict=True)):
            stage_s = (forward_ms[number] + backward_ms[number]) / 1e3
            work_s += pipeline.microbatches * stage_s
            if placed.devices[0].node in dead:
                lost.append((stage, pipeline.microbatches))
            else:
                busy_s = way_s + pipeline.microbatches * stage_s
                workers.append(_Worker(pipeline=index, stage=stage, busy_s=busy_s))
            way_s += stage_s
    shared_s = [_shared_s(job, workers, stage, count) for stage, count in lost]
    return (
        max(unaffected_s, work_s / len(workers), *(worker.busy_s for worker in workers), *shared_s) + sync_s
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Worker:
    """A live stage."""

    pipeline: int
    stage: StageTemplate
    busy_s: float
    """Its own work, and the ways of the first and the last microbatch to it and back."""


def _shared_s(job: ReplayJob, workers: Sequence[_Worker], stage: StageTemplate, microbatches: int) -> float:
    """Return the least time in which workers are done that share out the microbatches of one lost stage.

    Each microbatch goes to the pipeline that is then done first, which is best for equal microbatches.
    """
    layers_s = layer_times_s(job, stage)
    taken_s: dict[int, list[tuple[float, float]]] = defaultdict(list)
    held: dict[int, int] = defaultdict(int)
    for worker in workers:
        common = layers_s.keys() & range(worker.stage.first_layer, worker.stage.end_layer)
        taken_s[worker.pipeline].append((worker.busy_s, sum(layers_s[layer] for layer in common)))
        held[worker.pipeline] += len(common)

    def done_s(pipeline: int, count: int) -> float:
        return max((busy_s + count * each_s for busy_s, each_s in taken_s[pipeline] if each_s), default=0.0)

    next_s = [
        (done_s(pipeline, 1), pipeline, 1) for pipeline, count in held.items() if count == len(layers_s)
    ]
    if not next_s:
        return math.inf
    heapify(next_s)
    last_s = 0.0
    for _ in range(microbatches):
        at_s, pipeline, count = next_s[0]
        last_s = max(last_s, at_s)
        heapreplace(next_s, (done_s(pipeline, count + 1), pipeline, count + 1))
    return last_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Samples that the best choice at each failure of a replay adds to ftd."""

    outcome: Outcome
    ratios: tuple[float, ...]
    """R / T of each failure."""
    wins: int
    gain: float
    """Share of ftd's samples."""

    @property
    def median_ratio(self) -> float:
        return statistics.median(self.ratios) if self.ratios else math.nan


def bound_choice(job: ReplayJob, trace: Trace, link_bytes_per_s: float | None) -> Bound:
    """Replay ftd, and bound what the best choices would add."""
    parameters = msgspec.structs.replace(
        read_parameters().section("ftd", FtdParameters), transfer_bytes_per_s=link_bytes_per_s
    )
    policy = RecordedFtd(job, parameters)
    outcome = replay(policy, trace)
    ratios, wins, added = [], 0, 0.0
    for loss in policy.losses:
        running = loss.reaction.running
        assert running is not None
        planned_s = running.iteration_s
        rerouted_s = least_rerouted_s(job, loss.before, loss.change.removed)
        ratios.append(rerouted_s / planned_s)
        pauses = loss.reaction.pauses
        moving_s = sum(pause.seconds for pause in pauses if pause.category == "moving")
        other_s = sum(pause.seconds for pause in pauses) - moving_s
        left_s = max(0.0, loss.change.until_s - loss.change.at_s - other_s)
        moving_s = min(moving_s, left_s)
        planned = (left_s - moving_s) / planned_s
        best = moving_s / rerouted_s + (left_s - moving_s) / min(planned_s, rerouted_s)
        wins += left_s / rerouted_s > planned
        added += max(0.0, best - planned) * job.policy.global_batch
    return Bound(outcome=outcome, ratios=tuple(ratios), wins=wins, gain=added / outcome.samples)


def rerouting_alone(job: ReplayJob, trace: Trace, changed: Mapping[str, object]) -> Outcome:
    """Replay the policy recycle with the phases of ftd's recovery."""
    shipped = read_parameters()
    ftd = shipped.section("ftd", FtdParameters)
    phases = {"detect_s": ftd.detect_s, "reroute_s": ftd.quiesce_s + ftd.plan_s + ftd.rendezvous_s}
    return replay(RecyclePolicy(job, shipped.changed("recycle", {**phases, **changed})), trace)


def measure(models: Sequence[str], traces: Sequence[str]) -> tuple[Result, Result]:
    """Return the bound on the choice, and rerouting alone."""
    bounds = Result(
        name="rerouting",
        what="What a choice between ftd's plan and rerouting, at each failure, adds at most (simulated)",
        columns=("model, trace", "ftd / ideal", "failures", "median R / T", "wins", *LINKS),
    )
    alone = Result(
        name="rerouting-alone",
        what="Committed samples of rerouting alone, as a share of ftd's (simulated)",
        columns=("model, trace", "ftd / ideal", *VARIANTS, "ReCycle as published"),
    )
    gains: dict[str, float] = dict.fromkeys(LINKS, 0.0)
    for model in models:
        job = read_card(model)
        for name in traces:
            trace = read_trace(TRACES / f"{name}.csv")
            ideal = replay(make_policy("ideal", job, read_parameters()), trace).samples
            found = {link: bound_choice(job, trace, rate) for link, rate in LINKS.items()}
            for link, bound in found.items():
                gains[link] = max(gains[link], bound.gain)
            ftd = found["card"]
            row, goodput = f"{model}, {name}", f"{ftd.outcome.samples / ideal:.3f}"
            bounds.rows.append(
                (
                    row,
                    goodput,
                    str(len(ftd.ratios)),
                    f"{ftd.median_ratio:.3f}",
                    str(ftd.wins),
                    *(f"{bound.gain:+.2%}" for bound in found.values()),
                )
            )
            others = {
                title: rerouting_alone(job, trace, changed).samples for title, changed in VARIANTS.items()
            }
            others["ReCycle as published"] = replay(
                make_policy("recycle", job, read_parameters()), trace
            ).samples
            shares = {title: samples / ftd.outcome.samples for title, samples in others.items()}
            alone.rows.append((row, goodput, *(f"{share:.3f}" for share in shares.values())))
            bounds.data[row] = {
                "goodput": ftd.outcome.samples / ideal,
                "median_ratio": ftd.median_ratio if math.isfinite(ftd.median_ratio) else None,
                "ratios": [ratio if math.isfinite(ratio) else None for ratio in ftd.ratios],
                "wins": ftd.wins,
                "gains": {link: bound.gain for link, bound in found.items()},
            }
            alone.data[row] = shares
    bounds.limits.append(
        Limit(
            name="most samples that the choice adds at the network of the cards",
            measured=gains["card"],
            limit=WORTHWHILE,
        )
    )
    bounds.notes.append(
        "R, the time of a rerouted iteration, is a lower bound; each gain is therefore an upper bound."
    )
    return bounds, alone


if __name__ == "__main__":
    parser = command_line(__doc__, "directory for the JSON files")
    parser.add_argument("--models", default=",".join(MODELS), help="model cards")
    parser.add_argument(
        "--traces", default=",".join(sorted(path.stem for path in TRACES.glob("*.csv"))), help="shared traces"
    )
    options = parser.parse_args()
    bounds, alone = measure(options.models.split(","), options.traces.split(","))
    directory = options.out or EVALUATION
    alone.finish(directory / "rerouting-alone.json")
    main(bounds, directory / "rerouting.json")
