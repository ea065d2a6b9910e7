"""Reproduces the papers' evaluation with ``ftd replay``: throughput under failures, and what the failures cost.

    python -m benchmarks.evaluation                       # all parts, a quarter of an hour on one core
    python -m benchmarks.evaluation --parts table2,bars   # some of them
    python -m benchmarks.evaluation --plot docs/images    # also draw the figures
    python -m benchmarks.evaluation --fit                 # the fitted constants of the model cards

Everything here is simulated: no model is trained. Parts: ``table2`` and ``table4`` (Oobleck's Tables 2 and 4), ``spot``
(Figures 10 and 12), ``breakdown`` (Figures 1 and 11), ``phases`` (what ftd's recoveries consist of), ``bars`` (ftd
against every other policy at the same throughput without failures), ``sensitivity`` (each constant of a published
system changed by 10%), ``reft`` (REFT's overheads and loading times), ``chance`` (ftd against torchft and Oobleck
where they are close, with failures at slightly other times), and ``gap`` (what closes the gap between ftd and the
policies or aims that it does not reach: ReCycle under other assumptions, and ftd if it kept gradients). Each part
prints a table and writes ``PART.json`` into ``benchmarks/results/evaluation``, from which ``make docs`` writes the
tables of ``docs/explanation/evaluation.md``.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median, stdev
from typing import Any

import msgspec
import numpy as np

from benchmarks.artifact_simulator import bamboo_samples_per_s, oobleck_samples_per_s
from benchmarks.common import EVALUATION, Limit, Result, command_line
from benchmarks.evaluation_plots import draw
from benchmarks.evaluation_runs import (
    MODELS,
    RATES,
    SPOT,
    SYSTEMS,
    job_of,
    run,
    run_job,
    shared_traces,
    trace_of,
)
from ftd.replay.cards import CardFit, card_job, card_names, load_card
from ftd.replay.comparison import estimate
from ftd.replay.job import PublishedThroughput
from ftd.replay.outcome import Outcome
from ftd.replay.parameters import read_parameters
from ftd.replay.policies.registry import POLICIES, ThroughputSource, make_policy
from ftd.replay.policy import CATEGORIES
from ftd.replay.replay import replay
from ftd.replay.traces.trace import Trace

TABLE2 = {
    "bamboo": {"bert-large": (77.04, 75.60, 69.84), "gpt2": (17.47, 17.13, 16.01)},
    "varuna": {
        "bert-large": (259.57, 245.39, 168.15),
        "gpt2": (86.42, 83.94, 69.67),
        "gpt3-medium": (29.52, 27.61, 20.71),
        "gpt3-2.7b": (7.27, 6.41, 0.36),
        "gpt3-6.7b": (4.02, 2.91, 0.12),
    },
    "oobleck": {
        "bert-large": (287.10, 286.28, 282.11),
        "gpt2": (85.59, 85.42, 84.80),
        "gpt3-medium": (29.30, 29.21, 28.70),
        "gpt3-2.7b": (7.29, 7.23, 6.89),
        "gpt3-6.7b": (4.33, 4.22, 3.55),
    },
}
"""Oobleck's Table 2, samples/s, by system and model for each of ``RATES``. Bamboo ran no GPT-3 model."""

ARTIFACT_VARUNA = {
    "bert-large": (260.11, 246.03, 173.52),
    "gpt2": (86.51, 85.17, 76.39),
    "gpt3-medium": (29.50, 28.49, 20.19),
    "gpt3-2.7b": (7.27, 6.54, 1.76),
    "gpt3-6.7b": (4.15, 2.69, 0.26),
}
"""Output of the artifact's simulator of Varuna as it was published (commit 5dfe0bb), samples/s. It is not Table 2."""

TABLE4 = {"bert-large": (275.27, 270.81, 245.78), "gpt3-6.7b": (4.57, 4.00, 0.36)}
"""Oobleck's Table 4, Varuna without the overhead of checkpoints, samples/s."""

ARTIFACT_BREAKDOWN = {
    "bamboo": {"computing": 0.150, "redundant": 0.610, "restarting": 0.093, "redone": 0.147},
    "varuna": {"computing": 0.544, "stalled": 0.040, "restarting": 0.067, "redone": 0.348},
    "oobleck": {"computing": 0.955, "restarting": 0.003, "redone": 0.042},
}
"""Shares of time for BERT-Large with a failure every 10 minutes, which the artifact's README prints; the paper shows
Figures 1 and 11 without numbers."""


def samples_per_s(outcome: Outcome | str) -> float | None:
    """Return the throughput, or ``None`` for a policy that is excluded."""
    return None if isinstance(outcome, str) else outcome.samples_per_s


def by_rules(system: str, model: str, rate: str) -> float | None:
    """Return a cell of Table 2 by the rules of the artifact's simulator; ``None``: the system does not run the model.

    Varuna's are what the artifact printed when we ran it.
    """
    constants, trace = job_of(model).published.get(system), trace_of(f"oobleck_fail_{rate}")
    if constants is None:
        return None
    if system == "varuna":
        return ARTIFACT_VARUNA[model][RATES.index(rate)]
    removals = [(round(change.at_s * 1e3), node) for change in trace.changes for node in change.removed]
    batch, pause_s = constants.global_batch, constants.restart_s
    if system == "bamboo":
        return bamboo_samples_per_s(constants.throughput, batch, pause_s, trace.initial_nodes, removals)
    return oobleck_samples_per_s(constants.throughput, batch, pause_s, len(trace.initial_nodes), removals)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _percent(ours: float | None, published: float | None) -> str:
    return "–" if ours is None or not published else f"{ours / published - 1:+.1%}"


def table2() -> Result:
    """Return Oobleck's Table 2: published, by the simulator's rules, by the replay, and ftd."""
    result = Result(
        name="evaluation-table2",
        what="Oobleck's Table 2, samples/s with 15 failures on 30 nodes (simulated)",
        columns=(
            "system, model, time between failures",
            "published",
            "simulator's rules",
            "difference",
            "replay",
            "difference",
        ),
        notes=[
            "Simulator's rules: those of Oobleck's artifact, from which the table comes. Replay: the rules of ftd "
            "replay with the throughput that the card states for the system.",
            "Varuna: the published simulator itself does not give the table, so another version of it must have.",
            "ftd: the planner's throughput, which is fitted to Oobleck's on 30 nodes; difference from Oobleck.",
        ],
    )
    largest = dict.fromkeys(SYSTEMS, 0.0)
    for system in SYSTEMS:
        for model in TABLE2[system]:
            for number, (rate, ours) in enumerate(zip(RATES, table2_cells(system, model), strict=True)):
                published = TABLE2[system][model][number]
                rules = by_rules(system, model, rate)
                if rules is not None:
                    largest[system] = max(largest[system], abs(rules - published))
                cells = (published, rules, None if rules is None else rules - published, ours)
                result.data[f"{system},{model},{rate}"] = dict(
                    zip(("published", "rules", "rules_difference", "replay"), cells, strict=True)
                )
                result.rows.append(
                    (
                        f"{system}, {model}, {rate}",
                        _number(published),
                        _number(rules),
                        "–" if rules is None else f"{rules - published:+.3f}",
                        _number(ours),
                        _percent(ours, published),
                    )
                )
    for policy in _variants("ftd"):
        for model in MODELS:
            for number, rate in enumerate(RATES):
                ours = _replayed(policy, model, rate, "common")
                oobleck = TABLE2["oobleck"][model][number]
                result.data[f"{policy},{model},{rate}"] = {"replay": ours, "published_oobleck": oobleck}
                result.rows.append(
                    (f"{policy}, {model}, {rate}", "–", "–", "–", _number(ours), _percent(ours, oobleck))
                )
    result.limits = [
        Limit(
            name="Oobleck by the simulator's rules, largest difference",
            measured=largest["oobleck"],
            limit=0.01,
        ),
        Limit(
            name="Bamboo by the simulator's rules, largest difference", measured=largest["bamboo"], limit=0.02
        ),
    ]
    return result


def _variants(name: str) -> Iterator[str]:
    """Yield the policies whose name begins with ``name``."""
    yield from (policy for policy in POLICIES if policy.split("-")[0] == name)


def table2_cells(system: str, model: str) -> list[float | None]:
    """Return the replayed cells of Table 2 of a system and a model, for each of ``RATES``."""
    return [_replayed(system, model, rate, "published") for rate in RATES]


def _replayed(policy: str, model: str, rate: str, source: ThroughputSource) -> float | None:
    if policy not in POLICIES:
        return None
    return samples_per_s(run(policy, model, f"oobleck_fail_{rate}", source))


def table4() -> Result:
    """Return Oobleck's Table 4."""
    result = Result(
        name="evaluation-table4",
        what="Oobleck's Table 4, Varuna without the overhead of checkpoints, samples/s (simulated)",
        columns=("model, time between failures", "published", "replay", "difference"),
        notes=["Checkpoints every 2 iterations take no time; a restart still loads one (section 7.4.3)."],
    )
    for model, cells in TABLE4.items():
        for rate, published in zip(RATES, cells, strict=True):
            ours = _replayed("varuna-no-checkpoints", model, rate, "published")
            result.data[f"{model},{rate}"] = {"published": published, "replay": ours}
            result.rows.append(
                (f"{model}, {rate}", _number(published), _number(ours), _percent(ours, published))
            )
    return result


def spot() -> Result:
    """Return the mean throughput of Figures 10 and 12."""
    shown = (*SYSTEMS, *_variants("ftd"))
    result = Result(
        name="evaluation-spot",
        what="Oobleck's Figures 10 and 12, mean samples/s on the spot traces (simulated)",
        columns=("trace, model", *shown, "ftd / Oobleck"),
        notes=[
            "The systems run at their published throughput, ftd at the planner's. The paper prints no means of "
            "these figures; section 7.3 says up to 9.1 times the other systems' throughput for Oobleck.",
            "The traces give no notice of a removal; the paper's systems had one.",
        ],
    )
    for trace in SPOT:
        for model in MODELS:
            found: dict[str, float | None] = {}
            for policy in shown:
                if policy in SYSTEMS and policy not in job_of(model).published:
                    found[policy] = None  # It runs out of memory (Table 2).
                else:
                    found[policy] = samples_per_s(
                        run(policy, model, trace, "published" if policy in SYSTEMS else "common")
                    )
            ours, other = found.get("ftd"), found["oobleck"]
            result.data[f"{trace},{model}"] = found
            ratio = "–" if ours is None or not other else f"{ours / other:.2f}"
            result.rows.append((f"{trace}, {model}", *map(_number, found.values()), ratio))
    return result


def breakdown() -> Result:
    """Return where the time went, as in Figures 1 and 11."""
    result = Result(
        name="evaluation-breakdown",
        what="Oobleck's Figures 1 and 11, share of the time by use (simulated)",
        columns=("system, model, time between failures", *CATEGORIES),
        notes=[
            "Bamboo's redundant work, and nodes that a system leaves idle, are in reduced.",
            "artifact: what the README of Oobleck's artifact prints; its shares are of a sum that counts some time "
            "twice, and redundant work is not in a column here "
            f"({ARTIFACT_BREAKDOWN['bamboo']['redundant']:.0%} for Bamboo).",
        ],
    )
    for model in ("bert-large", "gpt3-6.7b"):
        for rate in RATES:
            for policy in (*SYSTEMS, *_variants("ftd")):
                if policy in SYSTEMS and policy not in job_of(model).published:
                    continue
                source: ThroughputSource = "published" if policy in SYSTEMS else "common"
                outcome = run(policy, model, f"oobleck_fail_{rate}", source)
                if isinstance(outcome, str):
                    continue
                shares = {category: outcome.seconds[category] / outcome.wall_s for category in CATEGORIES}
                result.data[f"{policy},{model},{rate}"] = shares
                result.rows.append((f"{policy}, {model}, {rate}", *_shares(shares)))
                if (model, rate) == ("bert-large", "10m") and policy in ARTIFACT_BREAKDOWN:
                    result.rows.append(("  artifact", *_shares(ARTIFACT_BREAKDOWN[policy])))
    return result


def _shares(shares: dict[Any, float]) -> Iterator[str]:
    for category in CATEGORIES:
        yield f"{shares[category]:.1%}" if shares.get(category) else ""


def phases(models: Sequence[str] = MODELS) -> Result:
    """Return what recoveries of ftd consist of, and how much of it is the transfer of state."""
    result = Result(
        name="evaluation-phases",
        what="ftd with 15 failures on 30 nodes: committed samples and median recovery (simulated)",
        columns=(
            "model, time between failures",
            "samples/s",
            "of ideal",
            "of ideal, transfers as here",
            "measured phases, s",
            "transfer, s",
            "lost work, s",
        ),
        notes=[
            "Measured phases: detecting, stopping, planning and forming groups, as measured on the developers' "
            "machine. Transfer: the bytes that the plan moves over the card's link. Lost work: the iteration in "
            "flight. Medians of the 14 failures after which the job goes on.",
            f"Transfers as here: at the rate measured on the developers' machine, in {MEASURED.name}.",
        ],
    )
    for model in models:
        for rate in RATES:
            name = f"oobleck_fail_{rate}"
            ours, ideal = run("ftd", model, name, "common"), run("ideal", model, name, "common")
            here = replay(
                make_policy("ftd", job_of(model), read_parameters(MEASURED), "common"), trace_of(name)
            )
            assert isinstance(ours, Outcome) and isinstance(ideal, Outcome)
            recoveries = [recovery for recovery in ours.recoveries if recovery.lost]
            found = {
                "samples_per_s": ours.samples_per_s,
                "of_ideal": ours.samples / ideal.samples,
                "of_ideal_as_here": here.samples / ideal.samples,
                "phases_s": median(
                    sum(spent for use, spent in recovery.seconds.items() if use != "moving")
                    for recovery in recoveries
                ),
                "transfer_s": median(recovery.seconds.get("moving", 0.0) for recovery in recoveries),
                "redone_s": median(recovery.redone_s for recovery in recoveries),
            }
            result.data[f"{model},{rate}"] = found
            result.rows.append(
                (
                    f"{model}, {rate}",
                    f"{found['samples_per_s']:.2f}",
                    f"{found['of_ideal']:.1%}",
                    f"{found['of_ideal_as_here']:.1%}",
                    f"{found['phases_s']:.3f}",
                    f"{found['transfer_s']:.3f}",
                    f"{found['redone_s']:.1f}",
                )
            )
    return result


MEASURED = Path(__file__).with_name("measured_transfers.toml")
"""Parameters of ftd with the rate of transfers on the developers' machine."""


def bars(models: Sequence[str] = MODELS, traces: Sequence[str] | None = None) -> Result:
    """Return the committed samples of every policy as a share of ``ideal``, all at the planner's throughput."""
    shown = [policy for policy in POLICIES if policy != "ideal"]
    result = Result(
        name="evaluation-bars",
        what="Committed samples as a share of ideal, same throughput without failures for all (simulated)",
        columns=("trace, model", *shown, "ftd less best other"),
        notes=[],
    )
    margins: dict[str, float] = {}
    hourly: dict[str, float] = {}
    for trace in traces or shared_traces():
        for model in models:
            ideal = run("ideal", model, trace, "common")
            assert isinstance(ideal, Outcome)
            found: dict[str, float] = {}
            for policy in shown:
                outcome = run(policy, model, trace, "common")
                if isinstance(outcome, Outcome):
                    found[policy] = outcome.samples / ideal.samples
                else:
                    result.data.setdefault("excluded", {})[f"{policy},{model}"] = outcome
            result.data[f"{trace},{model}"] = found
            others = [share for policy, share in found.items() if policy.split("-")[0] != "ftd"]
            margin = found["ftd"] - max(others) if "ftd" in found and others else None
            if margin is not None:
                margins[f"{trace}, {model}"] = margin
            if trace == "oobleck_fail_1h" and "ftd" in found:
                hourly[model] = found["ftd"]
            shares = (f"{found[policy]:.1%}" if policy in found else "excluded" for policy in shown)
            result.rows.append(
                (f"{trace}, {model}", *shares, "–" if margin is None else f"{100 * margin:+.1f} points")
            )
    for pair, why in result.data.get("excluded", {}).items():
        result.notes.append(f"{pair.replace(',', ' on ')}: {why}")
    if margins:
        worst = min(margins, key=lambda pair: margins[pair])
        result.limits.append(
            Limit(
                name=f"ftd less the best other policy, share of ideal, worst on {worst}",
                measured=margins[worst],
                limit=0.0,
                at_least=True,
            )
        )
    if hourly:
        lowest = min(hourly, key=lambda model: hourly[model])
        result.limits.append(
            Limit(
                name=f"ftd of ideal at a failure per hour on 30 nodes, worst with {lowest}",
                measured=hourly[lowest],
                limit=0.97,
                at_least=True,
            )
        )
    return result


CHANGES: dict[str, Callable[[PublishedThroughput], PublishedThroughput]] = {
    "throughput × 1.1": lambda c: _scaled(c, 1.1),
    "throughput × 0.9": lambda c: _scaled(c, 0.9),
    "exponent × 1.1, none measured": lambda c: _power_law(c, 1.1),
    "exponent × 0.9, none measured": lambda c: _power_law(c, 0.9),
    "batch × 1.1": lambda c: msgspec.structs.replace(c, global_batch=1.1 * c.global_batch),
    "batch × 0.9": lambda c: msgspec.structs.replace(c, global_batch=0.9 * c.global_batch),
    "pause × 1.1": lambda c: msgspec.structs.replace(c, restart_s=1.1 * c.restart_s),
    "pause × 0.9": lambda c: msgspec.structs.replace(c, restart_s=0.9 * c.restart_s),
    "stall × 1.1": lambda c: msgspec.structs.replace(c, checkpoint_stall_s=1.1 * c.checkpoint_stall_s),
    "stall × 0.9": lambda c: msgspec.structs.replace(c, checkpoint_stall_s=0.9 * c.checkpoint_stall_s),
}
"""Changes of one constant of a system."""


def _scaled(constants: PublishedThroughput, factor: float) -> PublishedThroughput:
    return msgspec.structs.replace(
        constants,
        samples_per_s=factor * constants.samples_per_s,
        measured=tuple(factor * value for value in constants.measured),
    )


def _power_law(constants: PublishedThroughput, factor: float) -> PublishedThroughput:
    """Return the fitted power law with a changed exponent, in place of what was measured."""
    return msgspec.structs.replace(constants, exponent=factor * constants.exponent, measured=())


def sensitivity(models: Sequence[str] = MODELS) -> Result:
    """Return how much each cell of Table 2 changes with each constant."""
    result = Result(
        name="evaluation-sensitivity",
        what="Change of the replayed cells of Table 2 if one constant changes by 10% (simulated)",
        columns=("system, constant, time between failures", *models),
        notes=["The exponent is that of the fitted power law, compared with the measured throughputs."],
    )
    for system in SYSTEMS:
        if system not in POLICIES:
            continue
        for what, change in CHANGES.items():
            if what.startswith("stall") and system != "varuna":
                continue
            for rate in RATES:
                cells = [_change(system, model, rate, change) for model in models]
                result.data[f"{system},{what},{rate}"] = dict(zip(models, cells, strict=True))
                shown = ("–" if cell is None else f"{cell:+.1%}" for cell in cells)
                result.rows.append((f"{system}, {what}, {rate}", *shown))
    return result


def _change(
    system: str, model: str, rate: str, change: Callable[[PublishedThroughput], PublishedThroughput]
) -> float | None:
    """Return the relative change of a cell; ``None``: the system does not run the model, or commits nothing."""
    job = job_of(model)
    if system not in job.published:
        return None
    changed = dataclasses.replace(job, published={**job.published, system: change(job.published[system])})
    before = _replayed(system, model, rate, "published")
    after = samples_per_s(run_job(system, changed, trace_of(f"oobleck_fail_{rate}"), "published"))
    return None if not before or after is None else after / before - 1


def reft() -> Result:
    """Return REFT's published overheads and loading times next to cost models."""
    result = Result(
        name="evaluation-reft",
        what="REFT's overheads and loading times (simulated)",
        columns=("what", "published", "cost model", "difference"),
    )
    card = load_card("llama2-1.3b")
    parameters = sum(layer.parameter_bytes for layer in job_of("llama2-1.3b").profile.layers) / 2
    # "Adam introduces triple extra parameters to save" (section 7.1): four numbers for each parameter, of 2 bytes.
    saved_bytes = 4 * 2 * parameters
    partitions = TP * PP
    lost_bytes = saved_bytes / partitions * TP
    nfs_s = saved_bytes / NFS_BYTES_PER_S
    own_s = saved_bytes / partitions / HOST_TO_DEVICE_BYTES_PER_S
    # Parity that the survivors sum on its way passes the link of the lost node's successor once, as a replica does.
    copy_s = own_s + lost_bytes / card.cluster.link_bytes_per_s
    for what, published, ours in (
        ("loading Llama-2 1.3B from NFS, s (section 7.4)", 9.27, nfs_s),
        ("loading it from replicas in memory (ARC), s", 0.84, copy_s),
        ("loading it from parity in memory (AEC), s", 0.75, copy_s),
        ("NFS / AEC", 12.36, nfs_s / copy_s),
    ):
        result.data[what] = {"published": published, "model": ours}
        result.rows.append((what, _number(published), _number(ours), _percent(ours, published)))
    for what, share in PUBLISHED_OVERHEADS.items():
        result.data[what] = {"published": share}
        result.rows.append((what, f"{share:+.1%}", "–", "–"))
    result.notes = [
        "Loading: bytes over the bandwidths of section 7.1 and Table 1 and nothing else. The published times in "
        "memory also contain processes and groups that start, which the paper does not state.",
        "Overheads: the paper's iteration times. They are of the order of the noise (one is negative), and a cost "
        "model has nothing to add. ftd's own is measured by python -m benchmarks.stall and benchmarks.overhead.",
        "Figure 8 follows from planner.reliability; see ftd reliability.",
    ]
    return result


CLOSE = 0.02
"""Difference of shares of ``ideal`` below which failures at other times of an iteration may decide."""
MOVED_TRACES = 8
LEAST_GAP_S = 1.0
"""Least time between two instants of a trace whose instants were moved."""


def moved(trace: Trace, by_s: float, seed: int) -> Trace:
    """Return the trace with each instant moved by up to half of ``by_s`` to either side, in the same order.

    The initial nodes stay. Whoever has iterations of ``by_s`` is struck at any time of an iteration alike.
    """
    random = np.random.default_rng(seed)
    at_s, last_s = {0.0: 0.0}, 0.0
    for instant_s in sorted({event.at_s for event in trace.events} - {0.0}):
        last_s = max(last_s + LEAST_GAP_S, instant_s + by_s * (float(random.random()) - 0.5))
        at_s[instant_s] = last_s
    events = tuple(dataclasses.replace(event, at_s=at_s[event.at_s]) for event in trace.events)
    return dataclasses.replace(trace, events=events, end_s=max(trace.end_s, last_s))


def chance(
    models: Sequence[str] = MODELS,
    traces: Sequence[str] | None = None,
    most: int = MOVED_TRACES,
) -> Result:
    """Return by how much ftd commits more than torchft and Oobleck, if each failure comes a little sooner or later."""
    result = Result(
        name="evaluation-chance",
        what=f"ftd less another policy, points of ideal, on {most} traces with moved failures (simulated)",
        columns=("trace, model", "other", "trace as it is", "mean", "spread", "95% interval", "ahead"),
        notes=[
            f"Each instant of a trace moves by up to half an iteration. All pairs where ftd and the other differ by "
            f"less than {100 * CLOSE:g} points on the trace as it is.",
            "Spread: the standard deviation. Ahead: the policy for which the interval of the mean speaks.",
        ],
    )
    for trace in traces or shared_traces():
        for model in models:
            ideal, ours = run("ideal", model, trace, "common"), run("ftd", model, trace, "common")
            assert isinstance(ideal, Outcome) and isinstance(ours, Outcome)
            close: dict[str, float] = {}
            for policy in ("torchft", "oobleck"):
                outcome = run(policy, model, trace, "common")
                if isinstance(outcome, Outcome):
                    difference = (ours.samples - outcome.samples) / ideal.samples
                    if abs(difference) < CLOSE:
                        close[policy] = difference
            for policy, values in _moved_differences(model, trace, tuple(close), most).items():
                mean = estimate(values)
                assert mean.half_width is not None
                low, high = mean.mean - mean.half_width, mean.mean + mean.half_width
                ahead = "ftd" if low > 0 else policy if high < 0 else "neither"
                result.data[f"{trace},{model},{policy}"] = {
                    "as_it_is": close[policy],
                    "differences": values,
                    "mean": mean.mean,
                    "half_width": mean.half_width,
                    "spread": stdev(values),
                    "ahead": ahead,
                }
                result.rows.append(
                    (
                        f"{trace}, {model}",
                        policy,
                        f"{100 * close[policy]:+.1f}",
                        f"{100 * mean.mean:+.2f}",
                        f"{100 * stdev(values):.2f}",
                        f"{100 * low:+.2f} to {100 * high:+.2f}",
                        ahead,
                    )
                )
    return result


def _moved_differences(model: str, trace: str, others: Sequence[str], most: int) -> dict[str, list[float]]:
    """Return, for each of the other policies, by how much ftd is better, as a share of ``ideal``, on each trace."""
    differences: dict[str, list[float]] = {policy: [] for policy in others}
    if not others:
        return differences
    source = trace_of(trace)
    job = job_of(model, source.most_nodes)
    iteration_s = job.iteration_s(len(source.initial_nodes))
    assert iteration_s is not None, "the job runs on the first nodes"
    for seed in range(most):
        changed = moved(source, iteration_s, seed)
        found: dict[str, float] = {}
        for policy in ("ideal", "ftd", *others):
            outcome = run_job(policy, job, changed, "common")
            assert isinstance(outcome, Outcome), "it ran on the trace as it is"
            found[policy] = outcome.samples
        for policy in others:
            differences[policy].append((found["ftd"] - found[policy]) / found["ideal"])
    return differences


GAP: dict[str, tuple[str, dict[str, Any]]] = {
    "ftd": ("ftd", {}),
    "ftd, gradients kept": ("ftd", {"keep_gradients": True}),
    "recycle": ("recycle", {}),
    "equal pipelines": ("recycle", {"baseline": "equal"}),
    "equal, coupled": ("recycle", {"baseline": "equal", "decoupled": False}),
    "equal, 1F1B memory": ("recycle", {"baseline": "equal", "memory_cap": "1f1b"}),
}
"""Policies of part ``gap`` with the parameters that differ from those that ship."""


def gap(models: Sequence[str] = MODELS, traces: Sequence[str] | None = None) -> Result:
    """Return ftd if it kept gradients, and ReCycle with less favourable assumptions, as shares of ``ideal``."""
    result = Result(
        name="evaluation-gap",
        what="ftd if it kept gradients, and ReCycle under other assumptions, as a share of ideal (simulated)",
        columns=("trace, model", *GAP),
        notes=[
            "Gradients kept: an estimate of what ftd does not do (keep_gradients in parameters.toml). Equal "
            "pipelines: ReCycle at the pace of its own pipelines. Coupled: no gradients of weights wait. 1F1B memory: "
            "no stage keeps more microbatches than with 1F1B.",
        ],
    )
    for trace in traces or shared_traces():
        for model in models:
            ideal = run("ideal", model, trace, "common")
            assert isinstance(ideal, Outcome)
            found: dict[str, float] = {}
            for title, (policy, changed) in GAP.items():
                job = job_of(model, trace_of(trace).most_nodes)
                parameters = read_parameters().changed(policy, changed)
                found[title] = replay(make_policy(policy, job, parameters), trace_of(trace)).samples
            shares = {title: samples / ideal.samples for title, samples in found.items()}
            result.data[f"{trace},{model}"] = shares
            result.rows.append((f"{trace}, {model}", *(f"{share:.1%}" for share in shares.values())))
    return result


TP, PP = 4, 4
"""Devices of a tensor-parallel group, and stages, of REFT's section 7.4."""
NFS_BYTES_PER_S = 1.25e9
"""REFT's 10 Gb/s network to NFS (section 7.1)."""
HOST_TO_DEVICE_BYTES_PER_S = 16e9
"""REFT's Table 1, V100."""

PUBLISHED_OVERHEADS = {
    "HAS, DP1 PP16 TP4: 7.69 to 7.63 samples/s (Table 3)": 7.69 / 7.63 - 1,
    "HAS, DP2 PP16 TP4: 15.15 to 15.17 samples/s (Table 3)": 15.15 / 15.17 - 1,
    "HAS, DP4 PP16 TP4: 30.07 to 29.67 samples/s (Table 3)": 30.07 / 29.67 - 1,
    "ARC, Llama-2 34B on Frontier: 6.26 to 6.32 s (section 7.5)": 6.32 / 6.26 - 1,
    "AOR with ZeRO-1, Llama-2 34B on Frontier: 6.59 to 6.63 s (section 7.5)": 6.63 / 6.59 - 1,
}
"""Longer iterations, as REFT measured them."""

PARTS: dict[str, Callable[[], Result]] = {
    "table2": table2,
    "table4": table4,
    "spot": spot,
    "breakdown": breakdown,
    "phases": phases,
    "bars": bars,
    "sensitivity": sensitivity,
    "reft": reft,
    "chance": chance,
    "gap": gap,
}


def fit(model: str) -> float:
    """Return the rate of computation, in operations per second, at which the planner has Oobleck's throughput."""
    card = load_card(model)
    nodes, rate = card.cluster.nodes, card.fitted.flops_per_s
    wanted = card.published["oobleck"].throughput(nodes)
    for _ in range(20):
        changed = msgspec.structs.replace(card, fitted=CardFit(flops_per_s=rate))
        found = card_job(model, changed).samples_per_s(nodes)
        if abs(found / wanted - 1) < 1e-5:
            break
        rate *= wanted / found
    return rate


def main() -> None:
    """Run the parts that the command line names."""
    parser = command_line(__doc__, "directory for the JSON files")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts, separated by commas")
    parser.add_argument("--plot", type=Path, metavar="DIRECTORY", help="draw the figures there")
    parser.add_argument("--fit", action="store_true", help="fit the rate of computation of the cards")
    options = parser.parse_args()
    if options.fit:
        for model in card_names():
            if "oobleck" in load_card(model).published:
                print(f"{model}: flops_per_s = {fit(model) / 1e12:.5f}e12")
        return
    names = options.parts.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}; the parts are {', '.join(PARTS)}")
    directory = options.out or EVALUATION
    code = 0
    for name in names:
        code = max(code, PARTS[name]().finish(directory / f"{name}.json"))
    if options.plot is not None:
        draw(options.plot)
    sys.exit(code)


if __name__ == "__main__":
    main()
