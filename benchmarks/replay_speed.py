"""CPU time of ``ftd replay``: all policies on 30 nodes for 12 hours, and ftd on 1,000 nodes for 30 days.

    python -m benchmarks.replay_speed
    python -m benchmarks.replay_speed --models gpt2      # some of the model cards

The command runs as users run it, with traces that it generates: 30 nodes with about 300 changes in 12 hours under all
policies, and 1,000 nodes with about 1,350 changes in 30 days under ftd. The CPU time includes the start of the command
and the planner's templates. On a busy machine it is longer than on a quiet one, because caches are shared.
"""

import os
import resource
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.clusters import FTD, REPOSITORY
from benchmarks.common import Limit, Result, command_line, main

MODELS = ("bert-large", "gpt2", "gpt3-medium", "gpt3-2.7b", "gpt3-6.7b")
FAILURE_MODEL = """
nodes = {nodes}
duration_h = {hours}
[failures]
mean_h = {mean_h}
[repair]
law = "lognormal"
mean_h = {repair_h}
sigma = 1.0
"""
SMALL = FAILURE_MODEL.format(nodes=30, hours=12, mean_h=2.36, repair_h=0.2)
LARGE = FAILURE_MODEL.format(nodes=1000, hours=720, mean_h=1000, repair_h=2)
SMALL_S, LARGE_S = 10.0, 120.0
"""Most CPU seconds that a replay on the small and on the large cluster may take."""


def replay_s(model: str, failures: str, *options: str) -> float:
    """Return the CPU seconds of one replay, in this process's children."""
    with TemporaryDirectory() as directory:
        file = Path(directory) / "failures.toml"
        file.write_text(failures, encoding="utf-8")
        before = _children_s()
        subprocess.run(
            [FTD, "replay", model, "--failures", str(file), "--repeat", "1", "--json", *options],
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return _children_s() - before


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(models: list[str]) -> Result:
    """Return the times of both replays for each model."""
    result = Result(
        name="replay-speed",
        what="CPU seconds of ftd replay",
        columns=("model", "30 nodes, 12 h, all policies", "1,000 nodes, 30 days, ftd"),
    )
    for model in models:
        small_s, large_s = replay_s(model, SMALL), replay_s(model, LARGE, "--policy", "ftd")
        result.rows.append((model, f"{small_s:.1f}", f"{large_s:.1f}"))
        result.data[model] = {"small_s": small_s, "large_s": large_s}
        result.limits += [
            Limit(name=f"{model}, 30 nodes, 12 h, all policies", measured=small_s, limit=SMALL_S),
            Limit(name=f"{model}, 1,000 nodes, 30 days, ftd", measured=large_s, limit=LARGE_S),
        ]
    return result


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="model cards, separated by commas")
    parsed = parser.parse_args(sys.argv[1:])
    main(measure(parsed.models.split(",")), parsed.out)
