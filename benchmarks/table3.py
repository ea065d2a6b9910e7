"""Oobleck's Table 3, planned exactly: every cell from cold caches on one core, against the known optima.

    python -m benchmarks.table3 --profiles ../shared/planner

DIR holds profiles (``KIND_L96.json``: times of 96 layers) and ``optima.json``, a list of cells with the
``profile``, ``nodes``, ``gpus_per_node``, ``paper_table3_s`` and, for both interpretations of "in one
node", ``optimum_ms``. Each cell is planned in a separate process. Its CPU seconds are from the loaded
profile to the proved template, including stage costs, without imports. In addition to the paper's
objective, each cell is planned for the step really run, and both plans are simulated with 128 microbatches.
"""

import json
import math
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from benchmarks.common import Limit, Result, command_line, main
from ftd.config.profile_file import load_profile
from planner.mapping.mapper import best_templates
from planner.stages.costs import StageCosts
from planner.values import Policy

DEFAULT = Path(__file__).parents[2] / "shared" / "planner"
MICROBATCHES = 128
READINGS: dict[Literal["any", "aligned"], str] = {
    "any": "any_order_power_of_two_split",
    "aligned": "aligned_power_of_two_split",
}
CELL_S, LARGEST_S, ALL_SIZES_S = 1.0, 0.5, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Profile and nodes of one cell, which one process plans."""

    profile: Path
    nodes: int
    devices: int

    @property
    def name(self) -> str:
        kind, _, layers = self.profile.stem.partition("_L")
        return f"{kind} {self.nodes}×{self.devices}×{layers}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """CPU seconds and objectives, by split where there are two."""

    seconds: dict[str, float]
    objective_ms: dict[str, float]
    proved: bool
    paper_step_ms: float
    """Simulated step time of the paper's plan."""
    step_ms: float
    """Step time of the plan for the step really run."""
    step_bound_ms: float
    step_seconds: float
    """CPU seconds to plan for the step really run."""


def policy_of(
    devices: int, split: Literal["any", "aligned"], objective: Literal["paper", "iteration"]
) -> Policy:
    return Policy(
        devices_per_node=devices,
        global_batch=MICROBATCHES,
        microbatch_rows=1,
        objective=objective,
        split=split,
    )


def plan(cell: Cell) -> Planned:
    """Plan one cell for both interpretations and both objectives, without sharing caches between them."""
    profile = load_profile(cell.profile)
    seconds: dict[str, float] = {}
    objective_ms: dict[str, float] = {}
    proved = True
    paper_step_ms = 0.0
    for split in READINGS:
        began = time.process_time()
        costs = StageCosts(profile, policy_of(cell.devices, split, "paper"))
        template = best_templates(costs, {cell.nodes: MICROBATCHES}).get(cell.nodes)
        seconds[split] = time.process_time() - began
        assert template is not None, "there is no memory limit"
        objective_ms[split], proved = template.objective_ms, proved and template.proved_optimal
        if split == "any":
            paper_step_ms = costs.clock(template.stages).makespan_ms(MICROBATCHES)
    began = time.process_time()
    costs = StageCosts(profile, policy_of(cell.devices, "any", "iteration"))
    quickest = best_templates(costs, {cell.nodes: MICROBATCHES}).get(cell.nodes)
    step_seconds = time.process_time() - began
    assert quickest is not None, "there is no memory limit"
    return Planned(
        seconds=seconds,
        objective_ms=objective_ms,
        proved=proved,
        paper_step_ms=paper_step_ms,
        step_ms=costs.clock(quickest.stages).makespan_ms(MICROBATCHES),
        step_bound_ms=quickest.lower_bound_ms,
        step_seconds=step_seconds,
    )


def plan_all_sizes(cell: Cell) -> tuple[float, int]:
    """Return the CPU seconds for the templates of 1 … ``nodes`` nodes in one call, and how many are proved."""
    profile = load_profile(cell.profile)
    began = time.process_time()
    costs = StageCosts(profile, policy_of(cell.devices, "any", "paper"))
    templates = best_templates(costs, dict.fromkeys(range(1, cell.nodes + 1), MICROBATCHES))
    return time.process_time() - began, sum(t.proved_optimal for t in templates.values())


def extent(cell: Cell) -> tuple[int, int]:
    return cell.nodes * cell.devices, len(load_profile(cell.profile).layers)


def measure(folder: Path) -> Result:
    known: list[dict[str, Any]] = json.loads((folder / "optima.json").read_text())
    cells = [
        Cell(profile=folder / entry["profile"], nodes=entry["nodes"], devices=entry["gpus_per_node"])
        for entry in known
    ]
    os.environ["OMP_NUM_THREADS"] = "1"
    # Two processes at a time would slow each other down; a new process for each cell has no caches.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        planned = list(processes.map(plan, cells))
        most = max(map(extent, cells))
        largest = [index for index, cell in enumerate(cells) if extent(cell) == most]
        all_sizes = {cells[index].name: processes.map(plan_all_sizes, [cells[index]]) for index in largest}
        sizes = {name: next(iter(found)) for name, found in all_sizes.items()}
    return report(known, cells, planned, largest, sizes)


def report(
    known: list[dict[str, Any]],
    cells: list[Cell],
    planned: list[Planned],
    largest: list[int],
    sizes: dict[str, tuple[float, int]],
) -> Result:
    result = Result(
        name="table3",
        what="Table 3: one template from cold caches, CPU seconds; step with 128 microbatches, simulated",
        columns=(
            "nodes×GPUs×layers", "paper s", "ours s", "optimum", "equal",
            "step ms", "less %", "gap %", "its s",
        ),
    )  # fmt: skip
    gains = [100 * (1 - found.step_ms / found.paper_step_ms) for found in planned]
    gaps = [
        100 * (found.step_ms / found.step_bound_ms - 1) if found.step_bound_ms else math.inf
        for found in planned
    ]
    unequal = 0
    for entry, cell, found, gain, gap in zip(known, cells, planned, gains, gaps, strict=True):
        wanted = {split: entry["optimum_ms"][name] for split, name in READINGS.items()}
        equal = found.objective_ms == wanted and found.proved
        unequal += not equal
        result.rows.append((
            cell.name, f"{entry['paper_table3_s']:,.2f}", f"{max(found.seconds.values()):.3f}",
            f"{found.objective_ms['any']:.3f}", "yes" if equal else "NO",
            f"{found.step_ms:.2f}", f"{gain:.1f}", f"{gap:.2f}", f"{found.step_seconds:.2f}",
        ))  # fmt: skip
    result.limits = limits(cells, planned, unequal, largest, sizes)
    result.notes = [
        "ours: the slower of the two node splits; optimum: ms, with the split in any order",
        "equal: both splits' objectives are the known ones to the last bit, and are proved",
        "step: of the plan for 128 microbatches, simulated; less: than the step of the paper's plan",
        "gap: how far its step may at most be from the best one; its s: to plan it",
        *(
            f"all templates of {name} in one go: {seconds:.3f} s, {proved} proved"
            for name, (seconds, proved) in sizes.items()
        ),
        f"less: {statistics.mean(gains):.1f}% in the mean, {max(gains):.1f}% at most; "
        f"gap: {statistics.mean(gaps):.2f}% in the mean, {max(gaps):.2f}% at most",
    ]
    result.data = {
        cell.name: {**asdict(found), "paper_s": entry["paper_table3_s"], "known_ms": entry["optimum_ms"]}
        for entry, cell, found in zip(known, cells, planned, strict=True)
    }
    result.data["all_sizes"] = {name: seconds for name, (seconds, _) in sizes.items()}
    return result


def limits(
    cells: list[Cell],
    planned: list[Planned],
    unequal: int,
    largest: list[int],
    sizes: dict[str, tuple[float, int]],
) -> list[Limit]:
    return [
        Limit(name="cells that differ from the known optimum", measured=unequal, limit=0),
        Limit(
            name="slowest cell, CPU s",
            measured=max(max(found.seconds.values()) for found in planned),
            limit=CELL_S,
        ),
        Limit(
            name=f"largest cell ({cells[largest[0]].name}), CPU s",
            measured=max(max(planned[index].seconds.values()) for index in largest),
            limit=LARGEST_S,
        ),
        Limit(
            name="all templates of the largest cell, CPU s",
            measured=max(seconds for seconds, _ in sizes.values()),
            limit=ALL_SIZES_S,
        ),
        Limit(
            name="of these, without proof",
            measured=max(cells[largest[0]].nodes - proved for _, proved in sizes.values()),
            limit=0,
        ),
        Limit(
            name="cells where the paper's plan has the quicker step",
            measured=sum(found.step_ms > found.paper_step_ms for found in planned),
            limit=0,
        ),
    ]


if __name__ == "__main__":
    parser = command_line(__doc__)
    there = DEFAULT if DEFAULT.is_dir() else None
    parser.add_argument("--profiles", type=Path, metavar="DIR", default=there, required=there is None)
    parsed = parser.parse_args(sys.argv[1:])
    main(measure(parsed.profiles), parsed.out)
