"""The description of a preview: consistent numbers, and shares that the integer program confirms."""

from dataclasses import replace

import msgspec
import pytest

from planner.crosscheck import cross_check
from planner.describe import describe, timeline_of
from planner.errors import BatchError, InfeasibleError
from planner.planner import Planner
from planner.preview import Preview, preview
from planner.values import Policy
from tests.helpers.oracles import profile_of
from tests.helpers.timelines import idle_ms

POLICY = Policy(global_batch=64, microbatch_rows=4)


def seen(nodes: int = 6) -> Preview:
    return preview(profile_of([1.0] * 8, memory_bytes=150), POLICY, nodes)


def test_the_description_adds_up() -> None:
    description, planner = describe(seen()), Planner(profile_of([1.0] * 8, memory_bytes=150), POLICY)
    assert description.memory_limit_bytes == 150 and (
        description.nodes,
        description.idle_nodes,
        description.layers,
    ) == (6, 0, 8)
    assert [row.nodes for row in description.templates] == list(planner.instantiator(6).templates.sizes)
    for row in description.templates:
        assert [stage.first_layer for stage in row.stages][1:] == [s.end_layer for s in row.stages][:-1]
        assert row.memory_bytes == max(stage.memory_bytes for stage in row.stages) <= 150
        clock = planner.costs.clock(planner.instantiator(6).templates.by_nodes[row.nodes].stages)
        assert row.objective_ms == clock.makespan_ms(row.microbatches)
        assert row.gap >= 0 and (row.gap == 0) == row.proved_optimal
    best = planner.instantiator(6).best(6)
    assert sum(row.count * row.nodes for row in description.pipelines) == 6
    assert sum(row.count * row.microbatches for row in description.pipelines) == 16
    assert {row.step_ms for row in description.pipelines} == set(best.pipeline_ms)
    assert max(row.step_ms for row in description.pipelines) == description.iteration_ms == best.iteration_ms
    assert all(0 <= row.bubble_ratio < 1 for row in description.pipelines)
    assert description.samples_per_s == 64 / (description.iteration_ms / 1e3)


def test_the_timeline_of_a_pipeline_takes_its_makespan() -> None:
    description = describe(seen())
    for row in description.pipelines:
        drawn = timeline_of(description.template(row.nodes), row.microbatches)
        assert drawn.makespan_ms == pytest.approx(row.makespan_ms)
        waits = idle_ms(drawn).mean() / drawn.makespan_ms
        assert waits == pytest.approx(row.bubble_ratio)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 8), (2, 8), (4, 12)])
def test_equal_stages_have_the_known_bubble_ratio(stages: int, microbatches: int) -> None:
    """It is (S - 1) / (N + S - 1), as in GPipe: only filling and draining the pipeline takes time."""
    # A layer's state is 12 bytes and its activations 1: a device has room for one layer.
    profile = profile_of([1.0] * stages, memory_bytes=12 + stages)
    policy = Policy(global_batch=microbatches, microbatch_rows=1, tolerate=0)
    description = describe(preview(profile, policy, stages))
    (row,) = description.pipelines
    assert row.bubble_ratio == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert description.bubble_ratio == pytest.approx(row.bubble_ratio)


def test_the_integer_program_checks_the_shares() -> None:
    plan = seen()
    check = cross_check(plan)
    assert check.agrees and check.score_ms == check.iteration_ms == plan.instantiation.iteration_ms
    assert check.microbatches == plan.instantiation.microbatches
    assert sum(check.model_microbatches) == sum(check.microbatches) == 16
    assert len(check.microbatches) > 1
    shares = (sum(check.microbatches) - len(check.microbatches) + 1, *(1 for _ in check.microbatches[1:]))
    worse = replace(plan, instantiation=replace(plan.instantiation, microbatches=shares))
    assert not cross_check(worse).agrees


def test_shares_of_least_variance_are_checked_as_such() -> None:
    policy = msgspec.structs.replace(POLICY, batch_objective="variance", global_batch=84)
    plan = preview(profile_of([3.0, 1, 4, 1, 5, 9, 2, 6]), policy, 5)
    check = cross_check(plan)
    assert check.agrees and check.score_ms < check.iteration_ms
    assert check.score_ms == pytest.approx(check.model_score_ms, abs=1e-6)


def test_one_size_is_the_same_template_without_the_others() -> None:
    profile, policy = profile_of([3.0, 1, 4, 1, 5, 9, 2, 6]), msgspec.structs.replace(POLICY, tolerate=0)
    whole, alone = preview(profile, policy, 4), preview(profile, policy, 4, template_nodes=4)
    assert list(alone.templates) == [4]
    assert alone.templates[4] == whole.templates[4]
    assert alone.instantiation.sizes == (4,) and alone.idle_nodes == 0
    assert alone.instantiation.iteration_ms == alone.templates[4].objective_ms


def test_one_size_makes_as_many_pipelines_as_it_can() -> None:
    alone = preview(profile_of([1.0] * 8), msgspec.structs.replace(POLICY, tolerate=2), 11, template_nodes=3)
    assert alone.instantiation.sizes == (3, 3, 3) and alone.idle_nodes == 2
    assert alone.instantiation.microbatches == (6, 5, 5)
    few = preview(
        profile_of([1.0] * 8), msgspec.structs.replace(POLICY, global_batch=8), 11, template_nodes=3
    )
    assert few.instantiation.microbatches == (1, 1) and few.idle_nodes == 5


@pytest.mark.parametrize(
    ("size", "changes", "says"),
    [
        (9, {}, "8 layers fill at most 8 nodes|the largest that works has 8 nodes"),
        (7, {"tolerate": 1}, "2 of them must fit into 12 nodes; the largest that works has 6"),
        (1, {"device_memory_bytes": 60}, "the smallest template that fits has 3 nodes"),
        (2, {"devices_per_node": 9, "microbatch_rows": 1}, "8 layers cannot fill even one node"),
    ],
)
def test_the_error_for_an_impossible_size_names_possible_ones(
    size: int, changes: dict[str, int], says: str
) -> None:
    policy = msgspec.structs.replace(POLICY, **{"tolerate": 0, **changes})  # type: ignore[arg-type]
    with pytest.raises(InfeasibleError) as caught:
        preview(profile_of([1.0] * 8), policy, 12, template_nodes=size)
    assert all(part in str(caught.value) for part in says.split("|"))


def test_one_size_needs_a_microbatch_for_each_pipeline() -> None:
    with pytest.raises(BatchError, match="3 pipelines"):
        preview(
            profile_of([1.0] * 8),
            msgspec.structs.replace(POLICY, tolerate=2, global_batch=8),
            12,
            template_nodes=2,
        )
