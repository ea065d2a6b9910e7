"""Goodput of a job with a node that raises every few steps, next to the job without that node.

    python -m benchmarks.quarantine

The same job runs for the same number of steps three times: without the bad node, with it, and with it while
no node is set aside (``quarantine.failures = 0``). The time counts from the first committed step to the last
one, so start-up is left out. On a machine whose load changes between the runs their times cannot be compared.
So the run with the bad node is also compared with its own pace after the node was set aside: the same nodes
train then, without the bad one, a moment later.
"""

import argparse
from typing import Any

from benchmarks.clusters import REPOSITORY, Fault, Report, run_local
from benchmarks.common import Limit, Result, command_line, main

JOB = REPOSITORY / "benchmarks" / "jobs" / "tiny.toml"
GOODPUT_LIMIT = 0.9
FAILURES_LIMIT = 3


def faults_of(node: str, every_steps: int, steps: int) -> list[Fault]:
    """Return an error of this node at every so many steps. While the node has no work nothing happens."""
    return [{"at_step": step, "do": "raise", "node": node} for step in range(every_steps, steps, every_steps)]


def duration_s(report: Report) -> float:
    """Return the seconds from the first committed step to the last one."""
    times = [step["at_s"] for step in report["steps"]]
    return float(times[-1] - times[0])


def own_pace_share(report: Report) -> float:
    """Return the time that the steps would have taken at the pace after the last recovery, as a share of the
    time that they took.
    """
    last = max((recovery["step"] for recovery in report["recoveries"]), default=0)
    after = [step for step in report["steps"] if step["step"] > last + 1]
    pace_s = (after[-1]["at_s"] - after[0]["at_s"]) / (len(after) - 1)
    return float(pace_s * (len(report["steps"]) - 1) / duration_s(report))


def failures(report: Report) -> int:
    return sum(1 for recovery in report["recoveries"] if recovery["cause"] == "trainer_lost")


def measure(arguments: argparse.Namespace) -> Result:
    steps, good = arguments.steps, arguments.nodes - 1
    faults = faults_of(f"node-{good}", arguments.every, steps)
    off = {"FTD_QUARANTINE_FAILURES": "0"}
    runs: dict[str, Report] = {
        f"{good} nodes, without the bad one": run_local(JOB, nodes=good, steps=steps, faults=[]),
        f"{arguments.nodes} nodes, one of them bad": run_local(
            JOB, nodes=arguments.nodes, steps=steps, faults=faults
        ),
        "the same, and no node is set aside": run_local(
            JOB, nodes=arguments.nodes, steps=steps, faults=faults, environment=off
        ),
    }
    times: dict[str, float] = {name: duration_s(report) for name, report in runs.items()}
    without, with_it = list(times.values())[:2]
    bad: Any = list(runs.values())[1]
    return Result(
        name="quarantine",
        what=f"a node that raises every {arguments.every} steps, {JOB.stem}, {steps} steps, mosquitto, "
        "default settings",
        columns=("run", "seconds", "goodput", "failures"),
        rows=[
            (name, f"{taken:.1f}", f"{without / taken:.3f}", str(failures(runs[name])))
            for name, taken in times.items()
        ],
        limits=[
            Limit(
                name="goodput with the bad node, by its pace afterwards",
                measured=own_pace_share(bad),
                limit=GOODPUT_LIMIT,
                at_least=True,
            ),
            Limit(
                name="goodput with the bad node",
                measured=without / with_it,
                limit=GOODPUT_LIMIT,
                at_least=True,
            ),
            Limit(name="failures until it is set aside", measured=failures(bad), limit=FAILURES_LIMIT),
        ],
        data={"seconds": times, "failures": {name: failures(report) for name, report in runs.items()}},
    )


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=4)
    given = parser.parse_args()
    main(measure(given), given.out)
