"""Instantiation compared with every multiset of templates and every share of the batch."""

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from random import Random

import pytest
from msgspec.structs import replace

from planner.errors import TooFewNodesError
from planner.pipelines.batch import distribute
from planner.pipelines.instantiation import Instantiator
from planner.planner import Planner
from planner.values import Link, ModelProfile, Policy
from tests.helpers.oracles import layer, multisets, profile_of, shares


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
        sizes = planner.instantiator(nodes).templates.sizes
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


def quickest_ms(instantiator: Instantiator, options: Sequence[tuple[int, ...]], microbatches: int) -> float:
    fastest = float("inf")
    for option in options:
        kinds = {size: partial(instantiator.cost_ms, size, len(option)) for size in option}
        given = distribute([kinds[size] for size in option], microbatches)
        fastest = min(fastest, slowest_ms(instantiator, option, given))
    return fastest


@pytest.mark.parametrize(
    ("times_ms", "memory_bytes", "ring", "microbatches"),
    [
        ([1.0, 2.0, 1.0, 3.0, 1.5, 1.0], 50, Link(latency_ms=0.0, bytes_per_s=1e12), 48),
        ([1.0, 1.5, 0.7, 1.1, 0.9, 1.3, 1.2], 64, Link(latency_ms=0.3, bytes_per_s=1e5), 40),
        ([2.0] * 8, 40, Link(latency_ms=1.0, bytes_per_s=1e6), 200),
    ],
)
def test_against_every_multiset_of_up_to_32_nodes(
    times_ms: list[float], memory_bytes: int | None, ring: Link, microbatches: int
) -> None:
    profile = replace(profile_of(times_ms, memory_bytes=memory_bytes), ring=ring)
    planner = Planner(profile, Policy(global_batch=4 * microbatches, microbatch_rows=4))
    instantiator = planner.instantiator(32)
    sizes = planner.instantiator(32).templates.sizes
    for nodes in range(planner.n0, 33):
        found = instantiator.best(nodes)
        fewest = min(2, nodes // planner.n0)
        for used in range(nodes, 0, -1):
            options = [m for m in multisets(used, sizes) if len(m) >= fewest]
            if options:
                break
        assert found.nodes == used
        expected = quickest_ms(instantiator, options, microbatches)
        assert found.iteration_ms == pytest.approx(expected, rel=1e-9)


def test_of_equally_quick_ones_the_most_pipelines_are_made() -> None:
    """All of them take no time; or there is one microbatch, and so only one pipeline is possible."""
    free = Link(latency_ms=0.0, bytes_per_s=math.inf)
    for time_ms, microbatches in ((0.0, 16), (1.0, 1)):
        profile = replace(profile_of([time_ms] * 4), ring=free)
        policy = Policy(global_batch=4 * microbatches, microbatch_rows=4, tolerate=0)
        found = Planner(profile, policy).instantiator(4).best(4)
        assert len(found.sizes) == min(4, microbatches)


def test_nodes_that_no_templates_add_up_to_are_left_over() -> None:
    planner = Planner(profile_of([1.0] * 6), Policy(global_batch=16, microbatch_rows=4, tolerate=0))
    found = planner.instantiator(40).best(40)
    assert found.nodes == 24 and len(found.sizes) == 4


def test_ten_thousand_nodes_are_all_used_and_no_neighbour_is_quicker() -> None:
    random = Random(7)
    profile = profile_of([random.uniform(1, 3) for _ in range(12)], memory_bytes=60)
    profile = replace(profile, ring=Link(latency_ms=0.01, bytes_per_s=1e9))
    planner = Planner(profile, Policy(global_batch=4 * 37501, microbatch_rows=4))
    instantiator = planner.instantiator(60)
    found = instantiator.best(10_000)
    assert found.nodes == 10_000 and sum(found.microbatches) == 37501
    by_size = Counter(found.sizes)
    for one in by_size:
        for other in by_size:
            for grown, shrunk in ((one + 1, other - 1), (one + 2, other - 2)):
                sizes = list(found.sizes)
                sizes.remove(one)
                if other in sizes and {grown, shrunk} <= set(planner.instantiator(60).templates.sizes):
                    sizes.remove(other)
                    changed = instantiator.of([*sizes, grown, shrunk])
                    assert changed.iteration_ms >= found.iteration_ms * (1 - 1e-9)


def test_the_templates_are_the_same_where_the_shares_minimise_the_variance() -> None:
    profile = profile_of([1.0, 1.5, 0.7, 1.1, 0.9, 1.3, 1.2], memory_bytes=64)
    chosen = []
    for objective in ("minmax", "variance"):
        policy = Policy(global_batch=4 * 61, microbatch_rows=4, batch_objective=objective)
        chosen.append(Planner(profile, policy).instantiator(11).best(11))
    minmax, variance = chosen
    assert minmax.sizes == variance.sizes and sum(variance.microbatches) == 61
    assert variance.iteration_ms >= minmax.iteration_ms


def test_more_pipelines_than_microbatches_are_never_made() -> None:
    planner = Planner(profile_of([1.0] * 2), Policy(global_batch=4, microbatch_rows=4, tolerate=0))
    found = planner.instantiator(5).best(5)
    assert (found.sizes, found.microbatches) == ((2,), (1,))


def test_fewer_nodes_than_any_template_has_are_an_error_and_no_endless_search() -> None:
    planner = Planner(profile_of([1.0] * 8, memory_bytes=60), Policy(global_batch=16, microbatch_rows=4))
    assert planner.n0 > 1
    with pytest.raises(TooFewNodesError, match=f"the {planner.n0} of the smallest template"):
        planner.instantiator(8).best(planner.n0 - 1)
