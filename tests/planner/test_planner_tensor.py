"""Tensor-parallel stages, where the planner chooses, and their cost."""

from collections.abc import Iterator
from itertools import combinations, product
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from planner.errors import InfeasibleError
from planner.mapping import iteration
from planner.mapping.mapper import best_templates
from planner.planner import Planner
from planner.stages.costs import StageCosts
from planner.stages.layers import expected_ms
from planner.stages.memory import MemoryModel
from planner.values import LayerProfile, Link, Mode, ModelProfile, Policy, TensorSplit, WithinNode
from tests.helpers.oracles import Stage, compositions, pipeline_ms

SPLIT = TensorSplit(
    parameter_bytes=80,
    column_bytes=40,
    activation_bytes=30,
    forward_bytes=20,
    forward_exchanges=2,
    backward_bytes=10,
    backward_exchanges=1,
)


def model(layers: int = 4, memory_bytes: int | None = None, **changes: Any) -> ModelProfile:
    """Return equal layers: 100 bytes of parameters, 100 of gradients, 800 of optimizer state, 40 of
    activations; the first one is not divided.
    """
    one = LayerProfile(
        forward_ms=4.0,
        backward_ms=8.0,
        parameter_bytes=100,
        gradient_bytes=100,
        optimizer_bytes=800,
        activation_bytes=40,
        output_bytes=0,
    )
    split = replace(one, tensor=SPLIT)
    changes = {
        "inner": Link(latency_ms=0.1, bytes_per_s=1e6),
        "tensor_counts": (("the number of attention heads of blocks.*", 6), ("blocks.*.up.out_features", 12)),
        **changes,
    }
    return ModelProfile(
        layers=(one, *(split,) * (layers - 1)), microbatch_rows=4, device_memory_bytes=memory_bytes, **changes
    )


def policy_of(within: WithinNode, **changes: Any) -> Policy:
    settings = {"devices_per_node": 2, "global_batch": 64, "microbatch_rows": 4, "tolerate": 0, **changes}
    return Policy(within_node=within, **settings)


def test_a_device_keeps_its_part_of_the_state_columns_and_the_activations_of_all_rows() -> None:
    """Counted by hand: of two layers, half of the state is kept, and twice half of 40 bytes of columns each."""
    memory = MemoryModel(model(), policy_of("tensor"))
    found = memory.breakdown(1, 3, 2, 1, Mode("none", "tensor"))
    assert (found.parameters, found.gradients, found.optimizer) == (2 * (50 + 20), 2 * (50 + 20), 800)
    assert found.gathered == 2 * 40, "the parameters that are not divided take 3 · 20, whole weights 2 · 40"
    assert found.activations == 2 * 2 * (10 + 15), "of two microbatches in flight"
    assert found.total == memory.stage_bytes(1, 3, 2, 1, Mode("none", "tensor"))
    first = memory.breakdown(0, 1, 2, 0, Mode("none", "tensor"))
    assert (first.parameters, first.gathered, first.activations) == (50, 300, 40)
    again = memory.breakdown(1, 3, 2, 0, Mode("full", "tensor"))
    assert again.activations == 25, "inputs of no bytes, and one layer at a time"
    alone = memory.breakdown(1, 3, 1, 1, Mode("none", "tensor"))
    assert alone == memory.breakdown(1, 3, 1, 1, Mode("none", "replicate"))


def test_a_step_takes_its_part_of_the_time_and_what_is_exchanged() -> None:
    """A ring of k devices takes k − 1 hops of a k-th of the bytes at 1000 bytes per millisecond, plus 0.1 ms
    each; an all-reduce takes two rings. 16 microbatches share the copying of columns.
    """
    costs = StageCosts(model(), policy_of("tensor", devices_per_node=3))
    for k in (2, 3):
        gather_ms = (k - 1) * (0.1 + 20 / k / 1e3)
        columns_ms = (k - 1) * (0.1 + 40 / k / 1e3) / 16
        there_ms = 2 * (k - 1) * 2 * (0.1 + 10 / k / 1e3)
        back_ms = 2 * (k - 1) * (0.1 + 10 / k / 1e3)
        assert costs.forward_ms[0, k, 1, 2] == pytest.approx(4 / k + gather_ms + columns_ms + there_ms)
        assert costs.backward_ms[0, k, 1, 2] == pytest.approx(8 / k + gather_ms + columns_ms + back_ms)
        whole_ms = (k - 1) * (0.1 + 100 / k / 1e3)
        assert costs.forward_ms[0, k, 0, 1] == pytest.approx(4 + whole_ms), "a layer that is not divided"
    again = StageCosts(model(), policy_of("tensor", activation_checkpointing="full"))
    longer_ms = again.backward_ms[0, 2, 1, 2] - costs.backward_ms[0, 2, 1, 2]
    assert longer_ms == pytest.approx(2 + 4 * (0.1 + 0.005)), "the forward pass again, with what it exchanges"


def test_stages_are_tensor_parallel_where_replicas_do_not_fit_and_that_is_quicker_than_shards() -> None:
    pair = {"stage_devices": (2,)}
    assert {mode.within for mode in StageCosts(model(**pair), policy_of("auto")).modes} == {"replicate"}
    tight = replace(model(layers=8, memory_bytes=5000, **pair), inner=Link(latency_ms=0.0, bytes_per_s=1e5))
    template = best_templates(StageCosts(tight, policy_of("auto")), {1: 16}).get(1)
    assert template is not None
    assert [stage.within for stage in template.stages] == ["tensor"]
    none = replace(tight, tensor_problem="its plan names no module")
    sharded = best_templates(StageCosts(none, policy_of("auto")), {1: 16}).get(1)
    assert sharded is not None
    assert [stage.within for stage in sharded.stages] == ["shard"]
    assert template.objective_ms < sharded.objective_ms


def test_tensor_parallel_stages_may_have_more_devices_than_a_microbatch_has_rows() -> None:
    profile, policy = (
        replace(model(), microbatch_rows=1),
        policy_of("auto", microbatch_rows=1, split="aligned"),
    )
    costs = StageCosts(profile, policy)
    assert {costs.modes[number].within for number in costs.modes_of(2)} == {"tensor"}
    template = best_templates(StageCosts(replace(profile, stage_devices=(2,)), policy), {1: 16}).get(1)
    assert template is not None and template.stages[0].within == "tensor"


def test_replicas_of_tensor_parallel_devices_split_the_rows() -> None:
    """Counted by hand: four devices are two replicas of two, and each replica has two of four rows."""
    policy = policy_of("auto", devices_per_node=4)
    memory = MemoryModel(model(), policy)
    found = memory.breakdown(1, 3, 4, 1, Mode("none", "tensor", 2))
    pair = memory.breakdown(1, 3, 2, 1, Mode("none", "tensor"))
    assert (found.parameters, found.gradients, found.optimizer) == (140, 140, 800), "as two devices"
    assert (found.gathered, found.activations) == (pair.gathered, pair.activations // 2)
    assert memory.breakdown(1, 3, 4, 0, Mode("full", "tensor", 2)).activations == -(-25 // 2)
    tight = model(memory_bytes=4000, stage_devices=(4,))
    costs = StageCosts(tight, policy)
    number = costs.modes.index(Mode("none", "tensor", 2))
    gather_ms, columns_ms = 0.1 + 20 / 2 / 1e3, (0.1 + 40 / 2 / 1e3) / 16
    there_ms = 2 * 2 * (0.1 + 10 / 2 / 1e3 / 2)
    assert costs.forward_ms[number, 4, 1, 2] == pytest.approx(4 / 4 + gather_ms + columns_ms + there_ms)
    (stage,) = stages = costs.stages((0, 4), (4,))
    fitting = [
        (float(costs.time_ms[mode, 4, 0, 4]), costs.modes[mode])
        for mode in costs.modes_of(4)
        if memory.stage_bytes(0, 4, 4, 0, costs.modes[mode]) <= 4000
    ]
    assert stage.mode == min(fitting)[1]
    assert costs.stage_times_ms(stages) == [min(fitting)[0]]
    two = replace(stage, within="tensor", replicas=2)
    assert two.parts == 2
    assert costs.gradient_bytes((two,)) == {2: 200.0}, "two owners of each half"


def test_replicas_are_used_where_the_heads_or_the_memory_allow_no_other_division() -> None:
    """Six heads are not divisible by four devices; two replicas of two devices each can divide them."""
    costs = StageCosts(model(stage_devices=(4,)), policy_of("tensor", devices_per_node=4))
    assert costs.modes == (Mode("none", "tensor", 2),)
    narrow = model(stage_devices=(4,), tensor_counts=(("heads", 4),))
    assert StageCosts(narrow, policy_of("tensor", devices_per_node=4)).modes == (Mode("none", "tensor"),)
    tight = replace(
        model(layers=8, memory_bytes=5500, stage_devices=(4,)), inner=Link(latency_ms=0.0, bytes_per_s=1e5)
    )
    template = best_templates(StageCosts(tight, policy_of("auto", devices_per_node=4)), {1: 16}).get(1)
    assert template is not None
    assert [(stage.within, stage.replicas) for stage in template.stages] == [("tensor", 2)]


def test_plans_say_it_and_expected_times_leave_communication_out() -> None:
    profile, policy = model(stage_devices=(2,)), policy_of("tensor")
    planner = Planner(profile, policy)
    planner.precompute(2)
    plan = planner.plan(planner.initial_situation(["a", "b"]))
    assert {stage.within for pipeline in plan.pipelines for stage in pipeline.stages} == {"tensor"}
    assert "all stages of several devices are tensor-parallel" in plan.reason
    stage = plan.pipelines[0].stages[0]
    expected = expected_ms(profile, policy, plan.pipelines)
    divided = stage.end_layer - stage.first_layer - (stage.first_layer == 0)
    assert expected[stage.devices[0]] == divided * 6.0 + 12.0 * (stage.first_layer == 0)


@pytest.mark.parametrize(
    ("changes", "devices", "words"),
    [
        (
            {"tensor_problem": "the model has no plan"},
            2,
            "in parts: the model has no plan; use within_node = rep",
        ),
        ({"shard_problem": "its optimizer Muon"}, 2, "in parts: its optimizer Muon"),
        ({"stage_devices": (1,)}, 2, "knows stages of 1 device only"),
        ({"stage_devices": (5,)}, 5, r"heads of blocks.\* is 6, which 5 devices do not divide"),
        (
            {"tensor_counts": (("kv of blocks.*", 3),)},
            4,
            r"kv of blocks.\* is 3, which 4 devices do not divide",
        ),
        (
            {"stage_devices": (4,), "microbatch_rows": 1},
            4,
            r"heads of blocks.\* is 6, which 4 devices do not divide",
        ),
    ],
)
def test_impossible_tensor_parallelism_is_rejected(changes: dict[str, Any], devices: int, words: str) -> None:
    with pytest.raises(InfeasibleError, match=f"within_node = tensor, and no stage can .*{words}"):
        if "tensor_counts" in changes:
            changes = {**changes, "stage_devices": (2, 4)}
        rows = changes.pop("microbatch_rows", 4)
        StageCosts(model(**changes), policy_of("tensor", devices_per_node=devices, microbatch_rows=rows))


def test_a_profile_without_a_plan_is_rejected() -> None:
    plain = model()
    profile = replace(plain, layers=(plain.layers[0],) * 4)
    with pytest.raises(InfeasibleError, match="measured without a tensor-parallel plan"):
        StageCosts(profile, policy_of("tensor"))
    odd = replace(
        plain, layers=(plain.layers[0], replace(plain.layers[1], tensor=replace(SPLIT, forward_bytes=-1)))
    )
    with pytest.raises(InfeasibleError, match=r"profile.layers\[1\].tensor.forward_bytes is -1"):
        StageCosts(odd, policy_of("auto"))


def random_model(random: Random) -> tuple[ModelProfile, Policy]:
    """Return a model that four devices or more may compute in parts, with few enough mappings to try all."""

    def one() -> LayerProfile:
        split = replace(SPLIT, parameter_bytes=random.randint(40, 100), forward_bytes=random.randint(0, 100))
        return LayerProfile(
            forward_ms=random.uniform(1, 20),
            backward_ms=random.uniform(1, 40),
            parameter_bytes=100,
            gradient_bytes=100,
            optimizer_bytes=random.choice([200, 800]),
            activation_bytes=random.choice([40, 400]),
            output_bytes=random.randint(0, 100),
            tensor=random.choice([None, split, split]),
        )

    rows = random.choice([1, 2, 3, 4])
    profile = ModelProfile(
        layers=tuple(one() for _ in range(random.randint(1, 5))),
        microbatch_rows=rows,
        device_memory_bytes=random.choice([None, random.randint(1000, 6000)]),
        link=Link(latency_ms=0.5, bytes_per_s=1e5),
        inner=Link(latency_ms=random.choice([0.01, 1.0]), bytes_per_s=1e6),
        tensor_counts=random.choice([(), (("heads", 4),), (("heads", 6),)]),
    )
    policy = policy_of(
        random.choice(["auto", "auto", "tensor"]),
        devices_per_node=random.choice([4, 4, 6, 8]),
        microbatch_rows=rows,
        global_batch=8 * rows,
        activation_checkpointing=random.choice(["none", "auto"]),
        objective=random.choice(["iteration", "paper"]),
    )
    return profile, policy


def mappings(costs: StageCosts, nodes: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the cuts and the devices of the stages of every mapping."""
    node_splits = [
        split
        for split in compositions(costs.devices_per_node, costs.max_devices)
        if set(split) <= set(costs.stage_devices)
    ]
    for splits in product(node_splits, repeat=nodes):
        devices = [size for split in splits for size in split]
        for cuts in combinations(range(1, costs.layers), len(devices) - 1):
            yield [0, *cuts, costs.layers], devices


def fitting_times_ms(costs: StageCosts, stage: Stage, after: int) -> tuple[float, float] | None:
    """Return forward and backward of a stage in its quickest mode that fits, ``None`` if none fits."""
    first, end, devices = stage
    limit = costs.memory.limit_bytes
    times = [
        (
            float(costs.forward_ms[number, devices, first, end]),
            float(costs.backward_ms[number, devices, first, end]),
        )
        for number in costs.modes_of(devices)
        if limit is None or costs.memory.stage_bytes(first, end, devices, after, costs.modes[number]) <= limit
    ]
    return min(times, key=sum, default=None)


@pytest.mark.parametrize("enumerated", [0, iteration.ENUMERATED_MAPPINGS])
def test_no_mapping_with_tensor_parallel_stages_is_quicker(
    enumerated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some modes are possible on some numbers of devices alone, such as two replicas on four devices."""
    monkeypatch.setattr(iteration, "ENUMERATED_MAPPINGS", enumerated)
    random, compared = Random(5), 0
    while compared < 40:
        profile, policy = random_model(random)
        nodes, microbatches = random.randint(1, 2), random.randint(1, 6)
        try:
            costs = StageCosts(profile, policy)
        except InfeasibleError:
            continue
        if nodes > costs.most_nodes:
            continue
        scores = []
        for cuts, devices in mappings(costs, nodes):
            stages = list(zip(cuts, cuts[1:], devices, strict=False))
            times = [fitting_times_ms(costs, stage, len(stages) - 1 - i) for i, stage in enumerate(stages)]
            known = [each for each in times if each is not None]
            if len(known) == len(stages):
                scores.append(pipeline_ms(profile, policy, stages, known, microbatches))
        template = best_templates(costs, {nodes: microbatches}).get(nodes)
        assert (template is None) == (not scores)
        if template is not None:
            assert template.objective_ms == pytest.approx(min(scores))
            assert template.lower_bound_ms <= min(scores) * (1 + 1e-9)
            assert costs.memory.fit(template.stages)
            compared += 1
