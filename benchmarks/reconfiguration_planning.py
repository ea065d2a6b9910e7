"""Time to plan for 1,000 nodes after 1, 10 and 100 failures, with everything precomputed.

    python -m benchmarks.reconfiguration_planning --seeds 5

The figure is CPU time of ``Planner.plan`` alone: it computes masks of the layers that devices hold,
compares the costs of layouts, assigns nodes and lists the transfers. Templates and the best instantiations
were computed before, as in a job. Nodes fail at random. The table also has the bytes that the plan moves,
and those that the published steps (simple, borrow, merge) would move.
"""

import random
import time
from dataclasses import dataclass

from msgspec.structs import replace

from benchmarks.common import Limit, Result, Summary, command_line, main
from planner.changes.assignment import Assigner
from planner.changes.candidates import candidate_layouts
from planner.changes.cover import whole_layers
from planner.changes.tradeoff import DEFAULT_HORIZON_S, choose_layout
from planner.errors import PlanningError
from planner.mapping.mapper import best_templates
from planner.planner import Planner
from planner.precomputed import Precomputed
from planner.templates import expected_share
from planner.values import Device, LayerProfile, ModelProfile, Plan, Policy, Situation

NODES = 1000
LOST = (1, 10, 100)
LIMIT_MS = 100.0
MICROBATCHES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model and of its templates."""

    layers: int
    devices: int
    largest: int

    def __str__(self) -> str:
        return f"{self.layers} layers, {self.devices} per node, templates of 1–{self.largest}"


SHAPES = (
    Shape(layers=48, devices=1, largest=8),
    Shape(layers=96, devices=1, largest=12),
    Shape(layers=48, devices=8, largest=8),
    Shape(layers=96, devices=8, largest=12),
)


def profile(shape: Shape, seed: int) -> ModelProfile:
    """Return a profile of uneven layers of about 1 GB of state."""
    draw = random.Random(seed)
    layers = [
        LayerProfile(
            forward_ms=draw.uniform(3, 9),
            backward_ms=draw.uniform(6, 18),
            parameter_bytes=draw.randrange(1, 5) * 10**8,
            gradient_bytes=2 * 10**8,
            optimizer_bytes=8 * 10**8,
            activation_bytes=10**7,
            output_bytes=10**6,
        )
        for _ in range(shape.layers)
    ]
    return ModelProfile(layers=tuple(layers), microbatch_rows=8)


def prepared(shape: Shape, seed: int) -> Planner:
    """Return a planner that has templates of these sizes and no others."""
    policy = Policy(
        devices_per_node=shape.devices,
        tolerate=2,
        global_batch=MICROBATCHES * 8,
        microbatch_rows=8,
        objective="paper",
        split="aligned" if shape.devices > 1 else "any",
    )
    planner = Planner(profile(shape, seed), policy)
    shares = {size: expected_share(policy, size, NODES) for size in range(1, shape.largest + 1)}
    templates = tuple(best_templates(planner.costs, shares).values())
    planner.restore(Precomputed(nodes=NODES, templates=templates, instantiations={}))
    return planner


def owned(plan: Plan) -> dict[Device, frozenset[int]]:
    """Return the layers that each device holds while it trains under ``plan``."""
    return {
        device: frozenset(range(stage.first_layer, stage.end_layer))
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for device in stage.devices
    }


def published_bytes(planner: Planner, situation: Situation) -> str:
    """Return the GB that the published steps move, or ``none`` if no layout follows from them."""
    assert situation.previous is not None
    nodes = sorted(situation.nodes)
    usable = set(nodes)
    pipelines = [pipeline.nodes for pipeline in situation.previous.pipelines]
    instantiator = planner.instantiator(len(nodes))
    proposed = candidate_layouts(
        before=[len(names) for names in pipelines],
        left=[sum(name in usable for name in names) for names in pipelines],
        nodes=len(nodes),
        instantiator=instantiator,
        most=MICROBATCHES,
    )
    steps = [layout for layout in proposed if layout.method in ("simple", "borrow", "merge")]
    if not steps:
        return "none"
    assigner = Assigner(planner.profile)
    masks = assigner.masks(nodes, planner.policy.devices_per_node, situation.holdings)
    weighed, _ = choose_layout(
        steps,
        instantiator=instantiator,
        assigner=assigner,
        nodes=nodes,
        masks=masks,
        needs=whole_layers(masks, len(planner.profile.layers)),
        earlier=pipelines,
        link=planner.profile.link,
        horizon_s=DEFAULT_HORIZON_S,
    )
    return f"{weighed.assignment.moved_bytes / 1e9:.0f}"


def measure(shape: Shape, seeds: int, result: Result) -> None:
    planner = prepared(shape, 1)
    names = [f"node-{number}" for number in range(NODES)]
    planner.precompute(NODES)
    start = planner.plan(planner.initial_situation(names))
    running = Situation(nodes=tuple(names), holdings=owned(start), previous=start)
    for lost in LOST:
        times: list[float] = []
        moved: list[float] = []
        published: list[str] = []
        methods: set[str] = set()
        transfers = 0
        for seed in range(seeds):
            gone = set(random.Random(seed).sample(names, lost))
            left = tuple(name for name in names if name not in gone)
            held = {device: layers for device, layers in running.holdings.items() if device.node not in gone}
            situation = replace(running, nodes=left, holdings=held)
            begun = time.process_time()
            plan = planner.plan(situation)
            times.append((time.process_time() - begun) * 1e3)
            moved.append(sum(transfer.size_bytes for transfer in plan.transfers) / 1e9)
            transfers = max(transfers, len(plan.transfers))
            methods.add(plan.method)
            published.append(published_bytes(planner, situation))
        summary = Summary(values=tuple(times))
        result.rows.append(
            (
                str(shape),
                str(lost),
                str(summary),
                str(transfers),
                str(Summary(values=tuple(moved))),
                " ".join(published),
                " ".join(sorted(methods)),
            )
        )
        limit = Limit(name=f"{shape}, {lost} lost: median ms", measured=summary.median, limit=LIMIT_MS)
        result.limits.append(limit)
        result.data[f"{shape}; {lost} lost"] = {"ms": times, "moved_gb": moved, "published_gb": published}


def run(seeds: int) -> Result:
    result = Result(
        name="reconfiguration_planning",
        what=f"CPU time of a full plan with its transfers on {NODES} nodes, {seeds} random failures each",
        columns=("model", "lost", "ms min/median/max", "transfers", "GB moved", "GB published", "method"),
    )
    for shape in SHAPES:
        try:
            measure(shape, seeds, result)
        except PlanningError as error:
            result.limits.append(Limit(name=f"{shape}: {error}", measured=1.0, limit=0.0))
    worst = max((max(entry["ms"]) for entry in result.data.values()), default=0.0)
    result.notes.append(f"the slowest single plan took {worst:.0f} ms")
    result.notes.append(
        "best instantiations looked up; GB published: what simple, borrow and merge would move"
    )
    return result


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    main(run(arguments.seeds), arguments.out)
