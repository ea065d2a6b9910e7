"""Speed of instantiation and batch distribution, and their results against enumeration and integer programs.

    python -m benchmarks.instantiation

* N' = 10,000 nodes from a cold start, seconds of CPU, for several jobs of 24 to 96 layers: the fastest
  pipelines and their shares of the batch. Templates are even cuts of the layers here; `benchmarks.table3`
  measures how they are found.
* All numbers of nodes up to 64, 256 and 1,000, as they are computed before a job's first failure.
* Every N' ≤ 32 against every multiset of templates.
* 1,000 random min-max distributions against HiGHS, and 1,000 by variance against brute force, 100 of them
  against HiGHS too.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise
from random import Random
from statistics import pvariance

from benchmarks.common import Limit, Result, command_line, main
from planner.pipelines.batch import Cost, distribute
from planner.pipelines.instantiation import Instantiator
from planner.pipelines.programs import distribute_by_model, least_variance_by_model
from planner.pipelines.variance import least_variance
from planner.stages.costs import StageCosts
from planner.stages.makespan import PipelineClock
from planner.templates import Templates
from planner.values import LayerProfile, Link, ModelProfile, Policy, StageTemplate, Template

NODES = 10_000
ENUMERATED_NODES = 32
CLOSE = 1e-8
"""Relative tolerance of times, as two results that are each exact to 1e-9 can differ."""


FREE = Link(latency_ms=0.0, bytes_per_s=1e30)
USUAL = Link(latency_ms=0.05, bytes_per_s=12.5e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    layers: int
    microbatches: int
    smallest: int = 2
    """Number of nodes of the smallest template."""
    uneven: int | None = None
    """Seed of the layers' times; with ``None`` all are equal."""
    ring: Link = USUAL
    tolerate: int = 1

    @property
    def name(self) -> str:
        kind = "even" if self.uneven is None else f"uneven {self.uneven}"
        ring = "free ring" if self.ring == FREE else f"ring {self.ring.latency_ms:g} ms"
        return f"{self.layers} layers, {kind}, {self.microbatches} microbatches, n0 {self.smallest}, {ring}"


LARGE = (
    Job(layers=96, microbatches=40_000),
    Job(layers=96, microbatches=40_000, uneven=1),
    Job(layers=96, microbatches=4_096, uneven=1),
    Job(layers=96, microbatches=12_000, uneven=2, ring=Link(latency_ms=0.5, bytes_per_s=1e9)),
    Job(layers=96, microbatches=40_000, uneven=3, ring=FREE),
    Job(layers=96, microbatches=65_536, ring=FREE),
    Job(layers=24, microbatches=100_000, uneven=4),
    Job(layers=96, microbatches=37_501, uneven=5, smallest=1, tolerate=3),
)
ENUMERATED = (
    Job(layers=8, microbatches=48, uneven=1),
    Job(layers=7, microbatches=200, smallest=3, ring=Link(latency_ms=2.0, bytes_per_s=1e9), tolerate=2),
    Job(layers=6, microbatches=37, smallest=1, uneven=2, ring=FREE),
)
BEFOREHAND = (Job(layers=24, microbatches=1024, uneven=1), Job(layers=96, microbatches=4096, uneven=2))


def instantiator_of(job: Job) -> Instantiator:
    """Return an instantiator with a one-device-per-node template for every possible number of nodes."""
    random = Random(job.uneven)
    times_ms = [1.0 if job.uneven is None else random.uniform(0.5, 2.0) for _ in range(job.layers)]
    layers = tuple(
        LayerProfile(
            forward_ms=time_ms,
            backward_ms=2 * time_ms,
            parameter_bytes=50_000_000,
            gradient_bytes=50_000_000,
            optimizer_bytes=100_000_000,
            activation_bytes=1_000_000,
            output_bytes=1_000_000,
        )
        for time_ms in times_ms
    )
    link = Link(latency_ms=0.02, bytes_per_s=12.5e9)
    policy = Policy(global_batch=job.microbatches, microbatch_rows=1, tolerate=job.tolerate)
    costs = StageCosts(ModelProfile(layers=layers, microbatch_rows=1, link=link, ring=job.ring), policy)
    by_nodes = {size: even_cuts(job.layers, size) for size in range(job.smallest, job.layers + 1)}
    templates = Templates(costs, max(by_nodes), by_nodes)
    # The smallest template is set as if memory required this many nodes.
    templates.n0 = job.smallest
    return Instantiator(costs, templates)


def even_cuts(layers: int, nodes: int) -> Template:
    cuts = [layers * stage // nodes for stage in range(nodes + 1)]
    stages = tuple(
        StageTemplate(first_layer=first, end_layer=end, node_offset=node, devices=1)
        for node, (first, end) in enumerate(pairwise(cuts))
    )
    return Template(nodes=nodes, stages=stages, objective_ms=0.0, lower_bound_ms=0.0)


def multisets(total: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
    for number, size in enumerate(sizes):
        if size <= total:
            for rest in multisets(total - size, sizes[: number + 1]):
                yield (size, *rest)


def shares_of(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, total)))


def measure_large(result: Result) -> None:
    slowest_s = 0.0
    for job in LARGE:
        instantiator = instantiator_of(job)
        begun = time.process_time()
        found = instantiator.best(NODES)
        spent_s = time.process_time() - begun
        slowest_s = max(slowest_s, spent_s)
        kinds = ", ".join(f"{found.sizes.count(size)} × {size}" for size in sorted(set(found.sizes)))
        result.rows.append(
            (job.name, f"{NODES}", f"{spent_s:.3f} s", f"{kinds}: {found.iteration_ms:.1f} ms")
        )
        assert found.nodes == NODES and sum(found.microbatches) == job.microbatches
    result.limits.append(Limit(name=f"N' = {NODES}, slowest job, CPU seconds", measured=slowest_s, limit=1.0))


def measure_beforehand(result: Result) -> None:
    for job in BEFOREHAND:
        for most in (64, 256, 1000):
            instantiator = instantiator_of(job)
            begun = time.process_time()
            for nodes in range(job.smallest, most + 1):
                instantiator.best(nodes)
            spent_s = time.process_time() - begun
            each = f"{spent_s / most * 1e3:.1f} ms each"
            result.rows.append((job.name, f"all ≤ {most}", f"{spent_s:.2f} s", each))


def compare_with_enumeration(result: Result) -> None:
    wrong = compared = 0
    for job in ENUMERATED:
        instantiator = instantiator_of(job)
        begun, seen = time.process_time(), compared
        for nodes in range(job.smallest, ENUMERATED_NODES + 1):
            found = instantiator.best(nodes)
            fewest = instantiator.required(nodes)
            quickest_ms = float("inf")
            for sizes in multisets(nodes, range(job.smallest, job.layers + 1)):
                if fewest <= len(sizes) <= job.microbatches:
                    kinds = {size: partial(instantiator.cost_ms, size, len(sizes)) for size in sizes}
                    shares = distribute([kinds[size] for size in sizes], job.microbatches)
                    spent = {kinds[size](share) for size, share in set(zip(sizes, shares, strict=True))}
                    quickest_ms = min(quickest_ms, max(spent))
                    compared += 1
            wrong += abs(found.iteration_ms - quickest_ms) > CLOSE * quickest_ms
        took = f"{time.process_time() - begun:.1f} s"
        result.rows.append((job.name, f"all ≤ {ENUMERATED_NODES}", took, f"{compared - seen} multisets"))
    result.limits.append(Limit(name="N' ≤ 32: answers other than enumeration's", measured=wrong, limit=0))


def compare_distributions(result: Result, instances: int) -> None:
    random, wrong, own_s, model_s = Random(11), 0, 0.0, 0.0
    for _ in range(instances):
        pipelines = random.randint(1, 5)
        microbatches = random.randint(pipelines, 32)
        costs: list[Cost] = []
        for _ in range(pipelines):
            times = [random.random() for _ in range(random.randint(1, 4))]
            clock = PipelineClock(times, [2 * t for t in times], [0.01] * (len(times) - 1))
            costs.append(clock.makespan_ms)
        begun = time.process_time()
        own = distribute(costs, microbatches)
        between = time.process_time()
        model = distribute_by_model(costs, microbatches)
        own_s, model_s = own_s + between - begun, model_s + time.process_time() - between
        slowest = [max(c(k) for c, k in zip(costs, s, strict=True)) for s in (own, model)]
        wrong += abs(slowest[0] - slowest[1]) > 1e-6 * slowest[0]
    row = f"{own_s / instances * 1e3:.2f} ms", f"HiGHS {model_s / instances * 1e3:.0f} ms"
    result.rows.append((f"{instances} random batches, min-max", "", *row))
    result.limits.append(Limit(name="min-max: other than HiGHS", measured=wrong, limit=0))


def compare_variances(result: Result, instances: int) -> None:
    random, wrong, wrong_model, own_s, model_s = Random(12), 0, 0, 0.0, 0.0
    modelled = instances // 10
    for number in range(instances):
        pipelines = random.randint(1, 5)
        microbatches = random.randint(pipelines, 14)
        kinds = [random.choice([1.0, 2.0, random.uniform(0.2, 5)]) for _ in range(pipelines)]
        times_ms = [random.choice(kinds) for _ in range(pipelines)]
        begun = time.process_time()
        own = least_variance(times_ms, microbatches)
        own_s += time.process_time() - begun
        least = min(variance(times_ms, shares) for shares in shares_of(microbatches, pipelines))
        wrong += not abs(variance(times_ms, own) - least) <= CLOSE * least + 1e-12
        if number < modelled:
            times_ms = [random.uniform(0.5, 5) for _ in range(random.randint(2, 10))]
            microbatches = random.randint(len(times_ms), 200)
            begun = time.process_time()
            model = least_variance_by_model(times_ms, microbatches)
            model_s += time.process_time() - begun
            least = variance(times_ms, least_variance(times_ms, microbatches))
            wrong_model += not abs(variance(times_ms, model) - least) <= 1e-6 * least + 1e-9
    row = f"{own_s / instances * 1e3:.2f} ms", f"HiGHS {model_s / max(modelled, 1) * 1e3:.0f} ms"
    result.rows.append((f"{instances} random batches, variance", "", *row))
    result.limits.append(Limit(name="variance: other than brute force", measured=wrong, limit=0))
    result.limits.append(Limit(name=f"variance: {modelled} other than HiGHS", measured=wrong_model, limit=0))


def variance(times_ms: Sequence[float], shares: Sequence[int]) -> float:
    return pvariance([time_ms * share for time_ms, share in zip(times_ms, shares, strict=True)])


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--instances", type=int, default=1000, help="random batches of each kind")
    arguments = parser.parse_args()
    result = Result(
        name="instantiation",
        what="Instantiation and batch distribution, CPU seconds on one core, templates given",
        columns=("job", "nodes", "took", "answer"),
    )
    measure_large(result)
    measure_beforehand(result)
    compare_with_enumeration(result)
    compare_distributions(result, arguments.instances)
    compare_variances(result, arguments.instances)
    main(result, arguments.out)
