"""Tensor-parallel stages, where the planner chooses, and their cost."""

from typing import Any

import pytest
from msgspec.structs import replace

from planner.errors import InfeasibleError
from planner.mapping.mapper import best_templates
from planner.planner import Planner
from planner.stages.costs import StageCosts
from planner.stages.layers import expected_ms
from planner.stages.memory import MemoryModel
from planner.values import LayerProfile, Link, Mode, ModelProfile, Policy, TensorSplit, WithinNode

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
