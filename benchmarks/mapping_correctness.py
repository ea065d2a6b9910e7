"""Mappings of random small models compared with all possible mappings, for both objectives.

    python -m benchmarks.mapping_correctness --cases 5000

Models have one to seven layers and up to twelve devices, with or without memory limits, with times that
doubles represent exactly and with others, with times measured on several devices, and with node splits in
any order, aligned, or of few sizes. The reference is the tests' oracle, which shares no code with the
planner. The answer for either objective must be the best of all, and must be marked as proved.

There are so few mappings that all are enumerated for the step really run. The third row has that disabled,
as with large models: an answer may then be worse than the best, but never below its bound, and never if it
is marked as proved.
"""

import argparse
import time
from dataclasses import dataclass
from random import Random

from benchmarks.common import Limit, Result, command_line, main
from planner.mapping import iteration
from planner.mapping.mapper import best_templates
from planner.stages.costs import StageCosts
from planner.values import Template
from tests.helpers import oracles

ROUNDING = 1e-12


@dataclass(slots=True)
class Count:
    """Numbers of results for one objective."""

    cases: int = 0
    infeasible: int = 0
    wrong: int = 0
    worse: int = 0
    unproved: int = 0
    first_wrong: int | None = None
    seconds: float = 0.0


def check(seed: int, objective: str, count: Count, must_be_best: bool) -> None:
    """Check the model of one seed; the seed of the first mismatch is recorded, so that you can reproduce it."""
    random = Random(seed)
    profile, policy, nodes = oracles.random_model(random, objective)
    microbatches = random.randint(1, 12)
    began = time.process_time()
    found = best_templates(StageCosts(profile, policy), {nodes: microbatches}).get(nodes)
    count.seconds += time.process_time() - began
    count.cases += 1
    best_ms = oracles.best_mapping_ms(profile, policy, nodes, microbatches)
    if best_ms is None or found is None:
        right = best_ms is None and found is None
        count.infeasible += right
    else:
        mapping = [(stage.first_layer, stage.end_layer, stage.devices) for stage in found.stages]
        again_ms = oracles.mapping_ms(profile, policy, mapping, microbatches)
        fits = oracles.fits(profile, policy, mapping)
        best = near(found.objective_ms, best_ms)
        within = found.lower_bound_ms <= best_ms * (1 + ROUNDING)
        honest = within and (best or not (must_be_best or found.proved_optimal))
        right = fits and honest and near(found.objective_ms, again_ms) and legal(found, nodes)
        count.unproved += not found.proved_optimal
        count.worse += not best
    if not right:
        count.wrong += 1
        count.first_wrong = seed if count.first_wrong is None else count.first_wrong


def near(one_ms: float, other_ms: float) -> bool:
    return abs(one_ms - other_ms) <= ROUNDING * max(one_ms, other_ms)


def legal(template: Template, nodes: int) -> bool:
    """Return whether each node is used, in order."""
    return [*dict.fromkeys(stage.node_offset for stage in template.stages)] == list(range(nodes))


def measure(arguments: argparse.Namespace) -> Result:
    result = Result(
        name="mapping_correctness",
        what="Best mappings of random small models against all possible mappings",
        columns=(
            "objective",
            "models",
            "fit nowhere",
            "wrong",
            "not the best",
            "not proved",
            "CPU ms a model",
        ),
    )
    enumerated = iteration.ENUMERATED_MAPPINGS
    for name, most in (("paper", enumerated), ("iteration", enumerated), ("iteration, searched", 0)):
        count = Count()
        iteration.ENUMERATED_MAPPINGS = most
        for seed in range(arguments.cases):
            check(seed, name.split(",")[0], count, must_be_best=most > 0)
        result.rows.append((
            name, str(count.cases), str(count.infeasible), str(count.wrong), str(count.worse),
            str(count.unproved), f"{count.seconds / count.cases * 1e3:.2f}",
        ))  # fmt: skip
        result.limits.append(Limit(name=f"{name}: wrong", measured=count.wrong, limit=0))
        if most:
            result.limits.append(Limit(name=f"{name}: not proved", measured=count.unproved, limit=0))
        if count.first_wrong is not None:
            result.notes.append(f"{name}: the first model with a wrong answer has seed {count.first_wrong}")
    return result


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--cases", type=int, default=5000, help="models for each objective")
    parsed = parser.parse_args()
    main(measure(parsed), parsed.out)
