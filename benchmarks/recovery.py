"""Time from a failure to the next committed step, by phase, with real processes and default settings.

    python -m benchmarks.recovery --kind kill --times 20
    make peer-venv && python -m benchmarks.recovery --kind kill --times 20 --peer   # torchft as well
    python -m benchmarks.recovery --model llama --times 5 --apart 16           # 30 million parameters

Kinds: ``kill`` (daemon and trainer of one node SIGKILLed together), ``trainer`` (its trainer alone),
``stop`` (SIGSTOP of the trainer), ``hang`` (main thread asleep, other threads alive), ``join``.

``besides`` is the time from the fault to the next commit without the step that is computed then, and
without ``state``: the rendezvous of the new group and the bytes that it moves.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.clusters import REPOSITORY, Fault, Report, run_local
from benchmarks.common import Limit, Result, Summary, command_line, main
from benchmarks.peers import torchft
from ftd.config.job import load_job

WARM_UP_STEPS = 30
APART_STEPS = 80
MODELS = ("tiny", "llama")
"""Jobs in ``benchmarks/jobs``."""
ADDITIONAL_LIMIT_MS = 150
PHASES = ("detected_ms", "quiesce_ms", "plan_ms", "state_ms", "resume_ms", "total_ms")
CAUSES = {"kill": "node_lost", "join": "node_joined"}
KINDS = ("kill", "trainer", "stop", "hang", "join")
LIMITS_MS: dict[str, tuple[float, float]] = {
    # kind: (median, worst) of ``total_ms``
    "kill": (400, 1000),
    "trainer": (400, 1000),
    "stop": (1500, 1500),
    "hang": (1500, 1500),
}


def faults_of(kind: str, times: int, nodes: int, apart_steps: int = APART_STEPS) -> list[Fault]:
    """Return ``times`` faults, far enough apart that the cluster is complete again before each."""
    faults: list[Fault] = []
    for number in range(times):
        step = min(WARM_UP_STEPS, apart_steps) + number * apart_steps
        node = f"node-{1 + number % (nodes - 1)}"
        match kind:
            case "kill" | "join":
                faults.append({"at_step": step, "do": "kill", "node": node})
                faults.append({"at_step": step + min(10, apart_steps // 2), "do": "start", "node": node})
            case "trainer":
                faults.append({"at_step": step, "do": "kill", "node": node, "target": "trainer"})
            case "stop":
                faults.append({"at_step": step, "do": "stop", "node": node, "target": "trainer"})
            case "hang":
                faults.append({"at_step": step, "do": "hang", "node": node, "for_s": 60})
    return faults


def measured_recoveries(report: Report, kind: str) -> list[dict[str, Any]]:
    cause = CAUSES.get(kind, "trainer_lost")
    return [recovery for recovery in report["recoveries"] if recovery["cause"] == cause]


def additional_ms(report: Report, recoveries: list[dict[str, Any]]) -> tuple[float, ...]:
    """Return milliseconds of each recovery without the first step after it and without ``state``."""
    step_ms = {step["step"]: step["step_s"] * 1000 for step in report["steps"] if step["step_s"]}
    return tuple(
        recovery["total_ms"] - recovery["state_ms"] - step_ms[recovery["step"] + 1]
        for recovery in recoveries
        if recovery["step"] + 1 in step_ms
    )


def phase_rows(recoveries: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return name and milliseconds of each phase that occurs in the recoveries."""
    values = {phase: tuple(r[phase] for r in recoveries if r[phase] is not None) for phase in PHASES}
    return [
        (phase.removesuffix("_ms"), str(Summary(values=of_one))) for phase, of_one in values.items() if of_one
    ]


def returns_ms(report: Report) -> list[float]:
    """Return the milliseconds from each fault to the first step committed with the node back in the plan."""
    times = []
    for fault in report["faults"]:
        back = [
            recovery
            for recovery in report["recoveries"]
            if recovery["cause"] == "node_returned"
            and fault["node"] in recovery["nodes"]
            and recovery["at_s"] > fault["at_s"]
        ]
        if back:
            times.append((back[0]["at_s"] - fault["at_s"]) * 1000 + back[0]["total_ms"])
    return times


def measure(arguments: argparse.Namespace) -> Result:
    apart_steps = arguments.apart
    steps = min(WARM_UP_STEPS, apart_steps) + arguments.times * apart_steps
    faults = faults_of(arguments.kind, arguments.times, arguments.nodes, apart_steps)
    keep_all = {"FTD_QUARANTINE_FAILURES": "0"}  # The faults are on purpose.
    report = run_local(arguments.job, nodes=arguments.nodes, steps=steps, faults=faults, environment=keep_all)
    recoveries = measured_recoveries(report, arguments.kind)
    step_ms = statistics.median(s["step_s"] for s in report["steps"] if s["step_s"]) * 1000
    result = Result(
        name=f"recovery-{arguments.kind}{'' if arguments.model == 'tiny' else f'-{arguments.model}'}",
        what=f"{arguments.kind}, {arguments.job.stem}: {len(recoveries)} times, {arguments.nodes} nodes,"
        f" steps of {step_ms:.0f} ms, mosquitto, default settings; milliseconds (min / median / max)",
        columns=("phase", "milliseconds"),
    )
    result.rows += phase_rows(recoveries)
    additional = additional_ms(report, recoveries)
    if additional:
        result.rows.append(("besides", str(Summary(values=additional))))
    totals = [r["total_ms"] for r in recoveries]
    result.data = {"recoveries": recoveries, "step_ms": step_ms, "final": report["final"]}
    result.limits = [
        Limit(name="recoveries seen", measured=len(recoveries), limit=arguments.times, at_least=True),
        Limit(name="rolled back steps", measured=sum(r["rolled_back_steps"] for r in recoveries), limit=0),
        Limit(
            name="recomputed steps, worst", measured=max(r["recomputed_steps"] for r in recoveries), limit=1
        ),
    ]
    if arguments.model == "llama":
        if arguments.kind == "kill":
            name = "besides the step and the bytes, median ms"
            limit = Limit(name=name, measured=statistics.median(additional), limit=ADDITIONAL_LIMIT_MS)
            result.limits.append(limit)
    elif arguments.kind in LIMITS_MS:
        median, worst = LIMITS_MS[arguments.kind]
        result.limits += [
            Limit(name="fault to next commit, median ms", measured=statistics.median(totals), limit=median),
            Limit(name="fault to next commit, worst ms", measured=max(totals), limit=worst),
        ]
    add_kind_specific(result, report, arguments.kind, recoveries, step_ms)
    add_restarts(result, report, arguments.kind)
    return result


def add_kind_specific(
    result: Result, report: Report, kind: str, recoveries: list[dict[str, Any]], step_ms: float
) -> None:
    if kind == "kill":
        detections = [r["detected_ms"] for r in recoveries]
        result.limits.append(
            Limit(
                name="kill to coordinator knowing, median ms",
                measured=statistics.median(detections),
                limit=50,
            )
        )
    if kind == "trainer":
        back = tuple(returns_ms(report))
        result.rows.append(("fault to the trainer back in the plan", str(Summary(values=back))))
        result.limits.append(
            Limit(name="trainer back in the plan, median ms", measured=statistics.median(back), limit=1500)
        )
    if kind == "join":
        stalls = tuple(r["commit_gap_ms"] - step_ms for r in recoveries if r["commit_gap_ms"] is not None)
        result.rows.append(("stall of the others, state copy included", str(Summary(values=stalls))))
        result.limits.append(Limit(name="stall of a join, worst ms", measured=max(stalls), limit=300))


def add_restarts(result: Result, report: Report, kind: str) -> None:
    """Add the limit that no surviving process was restarted: a node without faults has one pid of each process."""
    hit = {fault["node"] for fault in report["faults"]}
    restarted = 0
    for node, processes in report["processes"].items():
        if node not in hit:
            restarted += len(processes["daemon"]) - 1
            restarted += sum(len(pids) - 1 for pids in processes["trainers"].values())
    result.limits.append(Limit(name="surviving processes restarted", measured=restarted, limit=0))


def add_peer(result: Result, arguments: argparse.Namespace) -> None:
    """Add the same kill under torchft, with the same model and batch."""
    job = load_job(arguments.job)
    result.columns = (*result.columns, "recoveries")
    result.rows = [(*row, str(len(result.data["recoveries"]))) for row in result.rows]
    with tempfile.TemporaryDirectory(prefix="ftd-peer-") as directory:
        training = Path(directory) / "training.json"
        training.write_bytes(msgspec.json.encode(job.training))
        for settings, times in (
            (torchft.TUNED, arguments.times),
            (torchft.AS_SHIPPED, min(5, arguments.times)),
        ):
            measured = torchft.recoveries(arguments.peer, training, arguments.nodes, times, settings)
            values = tuple(measured.milliseconds)
            shown = str(Summary(values=values)) if values else "–"
            result.rows.append((settings.name, shown, f"{len(values)} of {times}"))
            result.data[settings.name] = values
            name = f"recoveries of {settings.name}"
            result.limits.append(Limit(name=name, measured=len(values), limit=times, at_least=True))
            if measured.error:
                sys.stderr.write(f"{settings.name}: {measured.error}\n")


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--kind", choices=KINDS, default="kill")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--model", choices=MODELS, default="tiny", help="job of benchmarks/jobs")
    parser.add_argument("--job", type=Path, help="another job file")
    parser.add_argument("--apart", type=int, default=APART_STEPS, help="steps from one fault to the next")
    parser.add_argument(
        "--peer",
        type=Path,
        nargs="?",
        const=REPOSITORY / ".peer-venv",
        help="measure torchft, too; its virtual environment, by default that of make peer-venv",
    )
    given = parser.parse_args()
    if given.peer is not None and given.kind != "kill":
        parser.error("--peer measures --kind kill only")
    if given.peer is not None and (problem := torchft.find_problem(given.peer)):
        parser.error(f"--peer {given.peer}: {problem}\nmake peer-venv makes an environment with torchft")
    given.job = given.job or REPOSITORY / f"benchmarks/jobs/{given.model}.toml"
    return given


if __name__ == "__main__":
    parsed = parse()
    outcome = measure(parsed)
    if parsed.peer is not None:
        add_peer(outcome, parsed)
    main(outcome, parsed.out)
