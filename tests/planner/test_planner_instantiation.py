"""Instantiation against every multiset of templates and every share of the batch."""

from collections.abc import Sequence
from functools import partial
from random import Random

import pytest
from oracles import layer, multisets, profile_of, shares

from planner.batch import distribute
from planner.instantiation import Instantiator
from planner.planner import Planner
from planner.values import Link, ModelProfile, Policy


def random_planner(random: Random, microbatches: int) -> Planner:
    layers = [
        layer(
            forward_ms=random.uniform(0.5, 3.0),
            backward_ms=random.uniform(1.0, 5.0),
            state_bytes=4 * random.randint(1, 8),
            output_bytes=random.randint(0, 4),
        )
        for _ in range(random.randint(2, 7))
    ]
    profile = ModelProfile(
        layers=tuple(layers),
        microbatch_rows=2,
        device_memory_bytes=random.choice([None, max(60, sum(x.state_bytes for x in layers))]),
        link=(link := Link(latency_ms=0.05, bytes_per_s=random.choice([4e3, 1e5]))),
        ring=link,
    )
    policy = Policy(
        global_batch=2 * microbatches,
        microbatch_rows=2,
        tolerate=random.randint(0, 2),
        devices_per_node=random.randint(1, 2),
    )
    return Planner(profile, policy)


def slowest_ms(instantiator: Instantiator, sizes: Sequence[int], given: Sequence[int]) -> float:
    return max(instantiator.cost_ms(n, len(sizes), share) for n, share in zip(sizes, given, strict=True))


def test_against_every_multiset_and_every_distribution() -> None:
    random = Random(3)
    for _ in range(25):
        microbatches = random.randint(1, 9)
        planner = random_planner(random, microbatches)
        nodes = planner.n0 + random.randint(0, 5)
        instantiator = planner.instantiator(nodes)
        sizes = planner.templates(nodes).sizes
        found = instantiator.best(nodes)
        wanted = min(planner.policy.tolerate + 1, nodes // planner.n0, microbatches)
        for used in range(nodes, 0, -1):
            options = [m for m in multisets(used, sizes) if wanted <= len(m) <= microbatches]
            if options:
                break
        expected = min(
            slowest_ms(instantiator, option, given)
            for option in options
            for given in shares(microbatches, len(option))
        )
        assert found.nodes == used
        assert found.iteration_ms == pytest.approx(expected, rel=1e-8)
        assert slowest_ms(instantiator, found.sizes, found.microbatches) == found.iteration_ms


def test_against_every_multiset_of_up_to_16_nodes() -> None:
    planner = Planner(profile_of([1.0, 2.0, 1.0, 3.0, 1.5, 1.0]), Policy(global_batch=96, microbatch_rows=2))
    instantiator = planner.instantiator(16)
    sizes = planner.templates(16).sizes
    for nodes in range(1, 17):
        options = [m for m in multisets(nodes, sizes) if len(m) >= min(2, nodes)]
        scores = []
        for option in options:
            costs = [partial(instantiator.cost_ms, size, len(option)) for size in option]
            scores.append(slowest_ms(instantiator, option, distribute(costs, 48)))
        assert instantiator.best(nodes).iteration_ms == pytest.approx(min(scores), rel=1e-8)


def test_more_pipelines_than_microbatches_are_never_made() -> None:
    planner = Planner(profile_of([1.0] * 2), Policy(global_batch=4, microbatch_rows=4, tolerate=0))
    found = planner.instantiator(5).best(5)
    assert (found.sizes, found.microbatches) == ((2,), (1,))
