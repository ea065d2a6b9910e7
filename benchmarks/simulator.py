"""Rate at which the deterministic simulator runs seeds, per minute on one core.

python -m benchmarks.simulator --seeds 1000
"""

import subprocess
import sys
import time

from benchmarks.clusters import FTD, REPOSITORY
from benchmarks.common import Limit, Result, command_line, main


def measure(seeds: int) -> Result:
    began = time.monotonic()
    done = subprocess.run(
        [FTD, "sim", "--seeds", str(seeds)], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    seconds = time.monotonic() - began
    result = Result(
        name="simulator",
        what="Simulated runs of the state machines and the planner",
        columns=("what", "value"),
    )
    result.rows = [
        ("seeds", str(seeds)),
        ("seconds, start-up included", f"{seconds:.1f}"),
        ("milliseconds a seed", f"{seconds / seeds * 1000:.1f}"),
        ("broken invariants", "none" if done.returncode == 0 else "see below"),
    ]
    result.data = {"seeds": seeds, "seconds": seconds}
    result.notes = [line for line in done.stdout.splitlines()[-5:] if line.strip()]
    result.limits = [
        Limit(name="exit code", measured=done.returncode, limit=0),
        Limit(name="seeds in 60 s", measured=seeds / seconds * 60, limit=400, at_least=True),
    ]
    return result


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parsed = parser.parse_args(sys.argv[1:])
    main(measure(parsed.seeds), parsed.out)
