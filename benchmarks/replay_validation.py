"""The replay's prediction compared with real runs: committed steps, and the time of each kind of recovery.

    python -m benchmarks.replay_validation                     # about 20 minutes, of which a run has 3 to 4
    python -m benchmarks.replay_validation --scenario kills

A first run with other faults measures the durations of the phases. Then each scenario runs for real with
``ftd local``, and its faults, at the times at which they were injected, are replayed with these durations and the
job's measured profile. The layers wait instead of computing (``benchmarks/jobs/paced.py``), so that four nodes on one
machine are as quick as four hosts. The result is kept for the page of the evaluation (``benchmarks.evaluation_page``).
"""

import argparse
import dataclasses
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace as changed

from benchmarks.clusters import FTD, REPOSITORY, Fault, Report, run_local
from benchmarks.common import EVALUATION, Limit, Result, command_line, main
from ftd.replay.job import ReplayJob
from ftd.replay.outcome import Outcome, Recovery
from ftd.replay.parameters import read_parameters
from ftd.replay.policies.ftd import FtdPolicy
from ftd.replay.replay import replay
from ftd.replay.sources import load_replay_job
from ftd.replay.traces.trace import Trace, TraceEvent
from ftd.replay.virtual_cluster import FtdParameters

JOBS = REPOSITORY / "benchmarks" / "jobs"
NODES, MOST_NODES = 4, 6
WINDOW_S = 185.0
"""Length of the comparison, from the begin of the first step."""
STEPS_OFF, TIME_OFF = 0.05, 0.25
"""Limits of the issue: relative differences of committed steps, and of the median time of a kind of recovery."""
LEAVE_S = 60.0
"""A node that is ordered to leave is replayed as one that announces its end so long before."""


def fault(after_s: float, do: str, node: str, **more: Any) -> Fault:
    return {"after_s": after_s, "do": do, "node": node, **more}


CALIBRATION = [
    fault(10, "kill", "node-2"),
    fault(15, "start", "node-2"),
    fault(45, "hang", "node-1", for_s=60),
    fault(70, "kill", "node-3"),
    fault(75, "start", "node-3"),
    fault(105, "hang", "node-2", for_s=60),
    fault(130, "kill", "node-1"),
    fault(135, "start", "node-1"),
]
SCENARIOS: dict[str, list[Fault]] = {
    "kills": [
        fault(20, "kill", "node-1"),
        fault(45, "start", "node-1"),
        fault(70, "kill", "node-3"),
        fault(95, "start", "node-3"),
        fault(120, "kill", "node-0"),
        fault(145, "start", "node-0"),
        fault(165, "kill", "node-2"),
    ],
    "joins": [
        fault(20, "start", "node-4"),
        fault(50, "start", "node-5"),
        fault(80, "term", "node-1"),
        fault(110, "start", "node-1"),
        fault(140, "term", "node-4"),
        fault(165, "start", "node-4"),
    ],
    "hangs": [
        fault(20, "hang", "node-1", for_s=60),
        fault(50, "hang", "node-3", for_s=60),
        fault(80, "hang", "node-0", for_s=60),
        fault(110, "hang", "node-2", for_s=60),
        fault(140, "hang", "node-1", for_s=60),
        fault(165, "hang", "node-3", for_s=60),
    ],
    "rollback": [
        {"after_s": 40, "do": "kill", "role": "owners of layer 0", "id": "all copies"},
        fault(60, "start", "node-4"),
        fault(60, "start", "node-5"),
        fault(120, "kill", "node-4"),
        fault(140, "start", "node-4"),
    ],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A scenario's figures. Times are seconds from a fault to the next committed step, by kind of recovery."""

    real_steps: int
    predicted_steps: int
    real_s: dict[str, list[float]]
    predicted_s: dict[str, list[float]]


class Bench:
    """A directory with the job, its measured profile and its checkpoints."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        shutil.copy(JOBS / "paced.py", directory)
        text = (JOBS / "paced.toml").read_text()
        profile = directory / "profile.json"
        job = directory / "paced.toml"
        job.write_text(text)
        subprocess.run([FTD, "profile", job, "--output", profile], check=True, capture_output=True)
        job.write_text(text.replace("[planner]\n", '[planner]\nprofile = "profile.json"\n'))
        self.job: ReplayJob = load_replay_job(str(job), MOST_NODES)
        self._file = job

    def run(self, faults: list[Fault], window_s: float) -> Report:
        """Run the job for real, for as many steps as fit into a little more than ``window_s`` without a failure."""
        shutil.rmtree(self._directory / "checkpoints", ignore_errors=True)
        started = {one["node"] for one in faults if one["do"] == "start"}
        most = len(started | {f"node-{number}" for number in range(NODES)})
        step_s = self.job.iteration_s(most)
        assert step_s is not None
        return run_local(self._file, nodes=NODES, steps=int(1.05 * window_s / step_s), faults=faults)


def begin_s(report: Report) -> float:
    """Return the time at which the first step began."""
    first = report["steps"][0]
    return float(first["at_s"] - first["step_s"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """A fault as it happened; ``at_s`` counts from the run's first event."""

    at_s: float
    do: str
    node: str


def injected_faults(report: Report, faults: list[Fault]) -> list[Injected]:
    """Return what was injected, in the order of time.

    The report has the faults of nodes with their times. A start of a node is no fault: it came ``after_s`` after the
    scenario began, at the first commit.
    """
    began_s = report["steps"][0]["at_s"]
    found = [Injected(at_s=one["at_s"], do=one["fault"], node=one["node"]) for one in report["faults"]]
    found += [
        Injected(at_s=began_s + one["after_s"], do="start", node=one["node"])
        for one in faults
        if one["do"] == "start"
    ]
    return sorted(found, key=lambda one: one.at_s)


def calibrate(report: Report) -> tuple[FtdParameters, FtdParameters]:
    """Return the durations of the phases, of nodes that are killed and of trainers that hang."""
    shipped = read_parameters().section("ftd", FtdParameters)
    recoveries = report["recoveries"]

    def median_s(key: str, among: Iterable[dict[str, Any]]) -> float:
        return statistics.median(one[key] for one in among) / 1e3

    lost = [one for one in recoveries if one["cause"] == "node_lost"]
    hung = [one for one in recoveries if one["cause"] == "trainer_lost"]
    joined = [one for one in recoveries if one["cause"] in ("node_joined", "node_returned")]

    def prepare_s(do: str, delay_s: float) -> float:
        """Return the median time from a fault's detection until its node can take part."""
        found = []
        for one in injected_faults(report, CALIBRATION):
            after = [join["at_s"] for join in joined if one.node in join["nodes"] and join["at_s"] > one.at_s]
            if one.do == do and after:
                found.append(min(after) - one.at_s - delay_s)
        return statistics.median(found)

    settle_s = 0.1  # ``timing.join_settle_s``, which the machine adds in the replay too.
    kills = changed(
        shipped,
        detect_s=median_s("detected_ms", lost),
        quiesce_s=median_s("quiesce_ms", lost),
        plan_s=median_s("plan_ms", recoveries),
        rendezvous_s=median_s("state_ms", recoveries),
        prepare_s=prepare_s("start", settle_s),
        snapshot_every=5,
        checkpoint_every=10,
        protection="aec",  # The default of jobs.
    )
    detect_s = median_s("detected_ms", hung)
    hangs = changed(
        kills,
        detect_s=detect_s,
        quiesce_s=median_s("quiesce_ms", hung),
        prepare_s=prepare_s("hang", detect_s + settle_s),
    )
    return kills, hangs


def trace_of(report: Report, faults: list[Fault], window_s: float) -> Trace:
    """Return the faults that were injected, as a trace that begins with the first step."""
    zero_s = begin_s(report)
    events = [TraceEvent(at_s=0.0, kind="add", node=f"node-{number}") for number in range(NODES)]
    for one in injected_faults(report, faults):
        at_s, node = one.at_s - zero_s, one.node
        match one.do:
            case "kill":
                events.append(TraceEvent(at_s=at_s, kind="remove", node=node))
            case "start":
                events.append(TraceEvent(at_s=at_s, kind="add", node=node))
            case "hang":
                events.append(TraceEvent(at_s=at_s, kind="remove", node=node))
                events.append(TraceEvent(at_s=at_s, kind="add", node=node))
            case "term":
                events.append(TraceEvent(at_s=at_s + LEAVE_S, kind="remove", node=node, notice_s=LEAVE_S))
    events.sort(key=lambda event: event.at_s)
    return Trace(name="faults", source="ftd local", events=tuple(_valid(events, window_s)), end_s=window_s)


def _valid(events: Sequence[TraceEvent], window_s: float) -> Iterable[TraceEvent]:
    """Yield the events in the window. A node that leaves and returns sooner than ``LEAVE_S`` leaves before that."""
    present: set[str] = set()
    leaving: dict[str, TraceEvent] = {}
    kept: list[TraceEvent] = []
    for event in events:
        if event.kind == "add" and event.node in present:
            later = next(
                e for e in events if e.node == event.node and e.kind == "remove" and e.at_s > event.at_s
            )
            notice_s = later.notice_s - (later.at_s - event.at_s)
            leaving[event.node] = later
            kept.append(dataclasses.replace(later, at_s=event.at_s, notice_s=notice_s))
        if event.kind == "remove" and leaving.get(event.node) is event:
            continue
        present.add(event.node) if event.kind == "add" else present.discard(event.node)
        kept.append(event)
    return [event for event in kept if event.at_s <= window_s]


def kind_of(recovery: Recovery) -> str:
    """Return the kind of a recovery of the replay."""
    if recovery.rolled_back and recovery.seconds.get("waiting"):
        return "rollback"
    return "loss" if recovery.lost and "detecting" in recovery.seconds else "boundary"


def predicted_times(outcome: Outcome, job: ReplayJob) -> dict[str, list[float]]:
    """Return seconds from the begin of each recovery of the replay to the next commit."""
    found: dict[str, list[float]] = {}
    for recovery in outcome.recoveries:
        after = [span for span in outcome.spans if span.begin_s >= recovery.at_s - 1e-3]
        if after:
            span = after[0]
            step_s = (span.end_s - span.begin_s) * job.policy.global_batch / span.samples
            found.setdefault(kind_of(recovery), []).append(span.begin_s + step_s - recovery.at_s)
    return found


def real_times(report: Report, window_s: float) -> dict[str, list[float]]:
    """Return seconds from each fault, or from the boundary of a join or drain, to the next commit."""
    found: dict[str, list[float]] = {}
    end_s = begin_s(report) + window_s
    for one in report["recoveries"]:
        if one["at_s"] > end_s:
            continue
        if one["tier"] == "persistent":
            lost = [f for f in report["faults"] if f["fault"] == "kill" and f["at_s"] < one["at_s"]]
            if lost and lost[-1]["total_ms"] is not None:
                found.setdefault("rollback", []).append(lost[-1]["total_ms"] / 1e3)
        elif one["cause"] in ("node_lost", "trainer_lost"):
            found.setdefault("loss", []).append(one["total_ms"] / 1e3)
        elif one["cause"] in ("node_joined", "node_returned", "node_drained"):
            found.setdefault("boundary", []).append(
                (one["plan_ms"] + one["state_ms"] + one["resume_ms"]) / 1e3
            )
    return found


def compare(
    report: Report, faults: list[Fault], job: ReplayJob, parameters: FtdParameters, window_s: float
) -> Compared:
    """Return what happened and what the replay predicts."""
    zero_s = begin_s(report)
    outcome = replay(FtdPolicy(job, parameters), trace_of(report, faults, window_s))
    committed = [step["step"] for step in report["steps"] if step["at_s"] - zero_s <= window_s]
    return Compared(
        real_steps=max(committed),
        predicted_steps=outcome.iterations,
        real_s=real_times(report, window_s),
        predicted_s=predicted_times(outcome, job),
    )


def off(predicted: float, real: float) -> float:
    return abs(predicted - real) / real


def measure(arguments: argparse.Namespace) -> Result:
    result = Result(
        name="replay-validation",
        what=f"the replay's prediction (simulated) next to real runs of {WINDOW_S:.0f} s on {NODES} nodes; "
        "seconds are medians from a fault to the next commit",
        columns=("scenario", "figure", "predicted", "real", "difference"),
    )
    with tempfile.TemporaryDirectory(prefix="ftd-validation-") as directory:
        bench = Bench(Path(directory))
        kills, hangs = calibrate(bench.run(CALIBRATION, 165.0))
        for name in arguments.scenario or SCENARIOS:
            report = bench.run(SCENARIOS[name], WINDOW_S)
            found = compare(report, SCENARIOS[name], bench.job, hangs if name == "hangs" else kills, WINDOW_S)
            add(result, name, found)
            result.data[name] = dataclasses.asdict(found)
        result.data["parameters"] = {"kills": kills, "hangs": hangs}
    result.data = msgspec.to_builtins(result.data)
    return result


def add(result: Result, name: str, found: Compared) -> None:
    """Add a scenario's rows and limits."""
    steps_off = off(found.predicted_steps, found.real_steps)
    result.rows.append(
        (name, "committed steps", str(found.predicted_steps), str(found.real_steps), f"{steps_off:.1%}")
    )
    result.limits.append(Limit(name=f"{name}: committed steps", measured=steps_off, limit=STEPS_OFF))
    for kind in sorted(found.real_s.keys() | found.predicted_s.keys()):
        real, predicted = found.real_s.get(kind, []), found.predicted_s.get(kind, [])
        if not real or not predicted:
            result.notes.append(f"{name}: {kind}: {len(predicted)} predicted, {len(real)} real")
            continue
        medians = statistics.median(predicted), statistics.median(real)
        result.rows.append(
            (
                name,
                f"{kind}, {len(predicted)} and {len(real)} times",
                f"{medians[0]:.2f} s",
                f"{medians[1]:.2f} s",
                f"{off(*medians):.1%}",
            )
        )
        result.limits.append(Limit(name=f"{name}: {kind}", measured=off(*medians), limit=TIME_OFF))


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument(
        "--scenario", choices=SCENARIOS, action="append", help="only this one; may be repeated"
    )
    return parser.parse_args()


if __name__ == "__main__":
    given = parse()
    main(measure(given), given.out or EVALUATION / "validation.json")
