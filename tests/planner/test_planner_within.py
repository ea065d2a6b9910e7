"""Stages that hold shards, where the planner chooses, and the cost of shards."""

import dataclasses
from itertools import product
from random import Random
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from planner.errors import InfeasibleError, RestoreError
from planner.mapping import iteration
from planner.mapping.mapper import best_templates
from planner.planner import Planner
from planner.stages.costs import StageCosts
from planner.stages.layers import expected_ms
from planner.stages.memory import MemoryModel
from planner.templates import smallest_pipeline
from planner.values import (
    LayerProfile,
    Link,
    Mode,
    ModelProfile,
    Policy,
    Situation,
    StageTemplate,
    StatePart,
    Template,
    Within,
    WithinNode,
)
from tests.helpers.oracles import (
    all_mappings,
    best_mapping_ms,
    check_way,
    layer,
    pipeline_ms,
    random_model,
    stage_bytes,
    stage_ms,
    ways,
)


def model(layers: int = 4, memory_bytes: int | None = None, **changes: Any) -> ModelProfile:
    """Return equal layers: 100 bytes of parameters, 100 of gradients, 800 of optimizer state, 40 of
    activations.
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
    changes = {"inner": Link(latency_ms=0.1, bytes_per_s=1e6), **changes}
    return ModelProfile(
        layers=(one,) * layers, microbatch_rows=4, device_memory_bytes=memory_bytes, **changes
    )


def policy_of(within: WithinNode, **changes: Any) -> Policy:
    settings = {"devices_per_node": 2, "global_batch": 64, "microbatch_rows": 4, "tolerate": 0, **changes}
    return Policy(within_node=within, **settings)


def best(profile: ModelProfile, policy: Policy, nodes: int) -> Template:
    template = best_templates(StageCosts(profile, policy), {nodes: 16}).get(nodes)
    assert template is not None
    return template


def withins(template: Template) -> set[tuple[int, Within]]:
    return {(stage.devices, stage.within) for stage in template.stages}


# --- what shards take ------------------------------------------------------------------------------


def test_a_shard_takes_its_part_of_the_state_and_what_is_gathered_of_one_layer() -> None:
    """The bytes are counted by hand, for four layers on two devices, each with one of two microbatches' rows."""
    memory = MemoryModel(model(), policy_of("shard"))
    replicas = memory.breakdown(0, 4, 2, 1, Mode("none"))
    assert (replicas.parameters, replicas.gradients, replicas.optimizer) == (400, 400, 3200)
    assert (replicas.gathered, replicas.activations) == (0, 4 * 40 // 2 * 2)
    shards = memory.breakdown(0, 4, 2, 1, Mode("none", "shard"))
    assert (shards.parameters, shards.gradients, shards.optimizer) == (200, 200, 1600)
    assert (shards.gathered, shards.activations) == (2 * 100 + 100, replicas.activations)
    assert shards.total == memory.stage_bytes(0, 4, 2, 1, Mode("none", "shard"))


def test_what_a_layer_needs_for_a_moment_counts_once_for_each_stage() -> None:
    needs = [50, 20, 300, 0]
    layers = [replace(layer, working_bytes=need) for layer, need in zip(model().layers, needs, strict=True)]
    before, memory = (
        MemoryModel(profile, policy_of("shard"))
        for profile in (model(), replace(model(), layers=tuple(layers)))
    )
    for first, end in ((0, 2), (0, 4), (3, 4)):
        found, without = (one.breakdown(first, end, 2, 1, Mode("none")) for one in (memory, before))
        assert found == dataclasses.replace(without, working=max(needs[first:end]))
        assert (
            memory.stage_bytes(first, end, 2, 1, Mode("none"))
            == memory.table(2, 1, Mode("none"))[first, end]
            == found.total
        )
    shards = memory.breakdown(0, 4, 2, 1, Mode("none", "shard"))
    assert (shards.gathered, shards.working) == (2 * 100 + 100, 300 - 100), (
        "gradients are part of what is gathered"
    )
    larger = MemoryModel(replace(model(), layers=tuple(layers)), policy_of("shard", microbatch_rows=8))
    assert larger.breakdown(0, 2, 1, 1, Mode("none")).working == 2 * 50


def test_frozen_parameters_are_divided_and_buffers_are_whole_on_each_device() -> None:
    frozen = replace(model().layers[0], gradient_bytes=0, optimizer_bytes=0)
    partly = replace(model().layers[0], gradient_bytes=20, buffer_bytes=70)
    profile = replace(model(), layers=(frozen, partly))
    memory, costs = MemoryModel(profile, policy_of("shard")), StageCosts(profile, policy_of("shard"))
    assert memory.breakdown(0, 1, 2, 0, Mode("none", "shard")).parameters == 50
    assert memory.breakdown(1, 2, 2, 0, Mode("none", "shard")).parameters == 70 + 15
    assert memory.breakdown(0, 2, 2, 0, Mode("none", "shard")).undivided == 70
    assert (
        memory.breakdown(0, 2, 2, 0, Mode("none")).undivided
        == memory.breakdown(0, 2, 1, 0, Mode("none", "shard")).undivided
        == 0
    )
    tight = replace(profile, device_memory_bytes=400, stage_devices=(2,), layers=(partly,))
    with pytest.raises(
        InfeasibleError, match=r"parameters .*, .* of them buffers, whole on each device, gradients"
    ):
        Planner(tight, policy_of("shard"))
    assert memory.breakdown(0, 1, 2, 0, Mode("none", "shard")).gathered == 2 * 100
    assert memory.breakdown(1, 2, 2, 0, Mode("none", "shard")).gathered == 2 * 30 + 20
    assert costs.time_ms[0, 2, 0, 1] == pytest.approx(6.0 + 2 * 0.15), "there is no gradient to scatter"
    assert costs.time_ms[0, 2, 1, 2] == pytest.approx(6.0 + 2 * 0.115 + 0.11)


def test_shards_and_zero1_divide_the_optimizer_s_state_by_devices_and_pipelines() -> None:
    memory = MemoryModel(model(), policy_of("shard", zero1=True, tolerate=2))
    assert memory.breakdown(0, 4, 2, 0, Mode("none", "shard")).optimizer == 4 * -(-800 // 6)
    assert memory.breakdown(0, 4, 2, 0, Mode("none")).optimizer == 4 * -(-800 // 3)


def test_each_pass_gathers_the_parameters_and_the_backward_pass_scatters_gradients() -> None:
    """A ring of k devices takes k − 1 hops of 100 / k bytes at 1000 bytes per millisecond, plus 0.1 ms each."""
    costs = StageCosts(model(), policy_of("shard", devices_per_node=4))
    for devices, share in ((1, 1.0), (2, 0.5), (4, 0.25)):
        ring_ms = (devices - 1) * (0.1 + 100 / devices / 1e3)
        assert costs.forward_ms[0, devices, 0, 1] == pytest.approx(4 * share + ring_ms)
        assert costs.backward_ms[0, devices, 0, 1] == pytest.approx(8 * share + 2 * ring_ms)
    slow = replace(model(), inner=None, ring=Link(latency_ms=1.0, bytes_per_s=1e6))
    assert StageCosts(slow, policy_of("shard")).forward_ms[0, 2, 0, 1] == pytest.approx(2 + 1.05)


def test_shards_reduce_only_their_part_among_pipelines() -> None:
    profile = replace(model(), ring=Link(latency_ms=0.0, bytes_per_s=1e6))
    costs = StageCosts(profile, policy_of("auto"))
    one = StageTemplate(first_layer=0, end_layer=4, node_offset=0, devices=2)
    shard = replace(one, within="shard")
    assert costs.sync_ms((one,), 1) == pytest.approx(2 * 1 * 400 / 2 / 1e3)
    assert costs.sync_ms((one,), 3) == pytest.approx(2 * 5 * 400 / 6 / 1e3)
    assert costs.sync_ms((shard,), 1) == 0.0
    assert costs.sync_ms((shard,), 3) == pytest.approx(2 * 2 * 200 / 3 / 1e3)


def test_the_instantiation_counts_the_all_reduce_of_shards() -> None:
    """The search computes with arrays what ``sync_ms`` computes one by one."""
    profile = replace(model(layers=8, memory_bytes=3000), ring=Link(latency_ms=0.0, bytes_per_s=1e4))
    planner = Planner(profile, policy_of("auto", tolerate=1))
    planner.precompute(6)
    found = planner.instantiator(6).best(6)
    templates = planner.instantiator(6).templates.by_nodes
    for size, share, pipeline_ms_ in zip(found.sizes, found.microbatches, found.pipeline_ms, strict=True):
        stages = templates[size].stages
        sync_ms = planner.costs.sync_ms(stages, len(found.sizes))
        assert pipeline_ms_ == pytest.approx(planner.costs.clock(stages).makespan_ms(share) + sync_ms)
    kinds = {stage.within for template in templates.values() for stage in template.stages}
    assert kinds == {"replicate", "shard"}


# --- the choice ------------------------------------------------------------------------------------


def test_stages_are_sharded_only_where_replicas_do_not_fit() -> None:
    """A layer takes 1,000 bytes of state: four of them on two devices need 4,000, or half of that sharded."""
    one_stage = {"split": "aligned", "activation_checkpointing": "none"}
    auto = policy_of("auto", **one_stage)
    pair = (2,)
    assert withins(best(model(memory_bytes=5000, stage_devices=pair), auto, 1)) == {(2, "replicate")}
    assert withins(best(model(memory_bytes=2600, stage_devices=pair), auto, 1)) == {(2, "shard")}
    assert StageCosts(model(), auto).modes == (Mode("none", "replicate"),), (
        "without a limit nothing is sharded"
    )
    assert len(StageCosts(model(memory_bytes=4319), auto).modes) == 2
    assert len(StageCosts(model(memory_bytes=4320), auto).modes) == 1, "nor where any stage fits as replicas"
    always = policy_of("shard", **one_stage)
    assert withins(best(model(stage_devices=pair), always, 1)) == {(2, "shard")}


def test_a_stage_is_sharded_where_recomputing_would_take_longer() -> None:
    """Replicas fit that recompute fully, which takes 2 ms more for each layer; shards take 0.45 ms."""
    heavy = replace(model().layers[0], activation_bytes=800, output_bytes=8)
    profile = replace(model(memory_bytes=4500, stage_devices=(2,)), layers=(heavy,) * 4)
    auto = policy_of("auto", activation_checkpointing="auto")
    (stage,) = best(profile, auto, 1).stages
    assert (stage.recompute, stage.within) == ("none", "shard")
    slow = replace(profile, inner=Link(latency_ms=1.0, bytes_per_s=1e6))
    (stage,) = best(slow, auto, 1).stages
    assert (stage.recompute, stage.within) == ("full", "replicate")


def test_one_device_has_nothing_to_share() -> None:
    profile = model(memory_bytes=5000)
    for within in ("auto", "shard"):
        alone = policy_of(within, devices_per_node=1)  # type: ignore[arg-type]
        assert StageCosts(profile, alone).modes == (Mode("none", "replicate"),)
    template = best(profile, policy_of("shard"), 1)
    assert withins(template) == {(1, "replicate")}, "a pipeline within the node is quicker here"


def test_the_choice_is_in_the_plan_and_what_is_computed_does_not_change() -> None:
    planner = Planner(model(memory_bytes=2600, stage_devices=(2,)), policy_of("auto"))
    plan = planner.plan(planner.initial_situation(["n"]))
    (stage, *_) = plan.pipelines[0].stages
    assert (
        stage.within == "shard"
        and "; all stages of several devices have their layers in shards" in plan.reason
    )
    computing = expected_ms(planner.profile, planner.policy, plan.pipelines)
    assert computing[stage.devices[0]] == pytest.approx(6.0 * (stage.end_layer - stage.first_layer))


def test_a_pipeline_cut_again_for_a_slow_node_keeps_shards_only_where_it_must() -> None:
    planner = Planner(
        model(layers=12, memory_bytes=6000, stage_devices=(2,)), policy_of("auto", global_batch=256)
    )
    fresh = planner.initial_situation(["a", "b"])
    before = planner.plan(fresh)
    slow = before.pipelines[0].stages[0].devices[0].node
    after = planner.plan(replace(fresh, previous=before, speeds={slow: 0.3}, horizon_s=1e6))
    for number, stage in enumerate(after.pipelines[0].stages):
        shape = stage.first_layer, stage.end_layer, 2
        check_way(planner.profile, planner.policy, shape, 1 - number, (stage.recompute, stage.within))
    kinds = [stage.within for stage in after.pipelines[0].stages]
    assert sorted(kinds) == ["replicate", "shard"]
    assert "; 1 of 2 stages of several devices have their layers in shards" in after.reason
    roomy = Planner(model(memory_bytes=10**4, stage_devices=(2,)), policy_of("auto"))
    assert "shard" not in roomy.plan(roomy.initial_situation(["a"])).reason


def heavy(random: Random, profile: ModelProfile) -> ModelProfile:
    """Return the profile with ten times the optimizer's state, so that shards pay, and tight memory."""
    layers = tuple(replace(x, optimizer_bytes=10 * x.optimizer_bytes) for x in profile.layers[:6])
    return replace(profile, layers=layers, device_memory_bytes=random.randint(80, 160))


@pytest.mark.parametrize("objective", ["paper", "iteration"])
def test_the_search_is_exact_where_shards_decide(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is tight, and mappings are treated as too many to enumerate."""
    monkeypatch.setattr(iteration, "ENUMERATED_MAPPINGS", 0)
    random, mixed, sharded, proved = Random(objective), 0, 0, 0
    for _ in range(160):
        profile, policy, nodes = random_model(random, objective)
        if policy.devices_per_node == 1 or policy.within_node == "replicate":
            continue
        profile = heavy(random, profile)
        microbatches = random.randint(1, 12)
        template = best_templates(StageCosts(profile, policy), {nodes: microbatches}).get(nodes)
        expected = best_mapping_ms(profile, policy, nodes, microbatches)
        assert (template is None) == (expected is None)
        if template is None or expected is None:
            continue
        assert template.lower_bound_ms <= expected * (1 + 1e-12)
        assert template.objective_ms >= expected * (1 - 1e-12)
        if template.proved_optimal:
            assert template.objective_ms == pytest.approx(expected, rel=1e-11)
        for number, stage in enumerate(template.stages):
            shape = stage.first_layer, stage.end_layer, stage.devices
            way = stage.recompute, stage.within
            check_way(profile, policy, shape, len(template.stages) - 1 - number, way)
        kinds = {stage.within for stage in template.stages if stage.devices > 1}
        mixed += len(kinds) > 1
        sharded += kinds == {"shard"}
        proved += template.proved_optimal
    assert mixed >= 3 and sharded >= 8 and proved >= 20


@pytest.mark.long
def test_no_other_choice_for_any_stage_is_notably_better() -> None:
    """Compare with every mapping under every combination of ways that fits. The rule, both passes together,
    is not exact here: shards make the forward pass longer, recomputation only the backward pass.
    """
    random, sharded, compared = Random(7), 0, 0
    for _ in range(60):
        profile, policy, nodes = random_model(random)
        policy = msgspec.structs.replace(policy, activation_checkpointing="auto", within_node="auto")
        profile = heavy(random, replace(profile, layers=profile.layers[:4]))
        if policy.devices_per_node == 1:
            continue
        scores: list[float] = []
        for mapping in all_mappings(profile, policy, nodes):
            fitting = [
                [
                    stage_ms(profile, stage, policy.microbatch_rows, *way)
                    for way in ways(profile, policy, stage[2])
                    if stage_bytes(profile, policy, stage, len(mapping) - 1 - number, *way)
                    <= (profile.device_memory_bytes or 0)
                ]
                for number, stage in enumerate(mapping)
            ]
            scores += [pipeline_ms(profile, policy, mapping, times, 6) for times in product(*fitting)]
        template = best_templates(StageCosts(profile, policy), {nodes: 6}).get(nodes)
        assert (template is None) == (not scores)
        if template is None:
            continue
        assert min(scores) * (1 - 1e-12) <= template.objective_ms <= min(scores) * 1.02
        sharded += any(stage.within == "shard" for stage in template.stages)
        compared += 1
    assert sharded >= 3 and compared >= 10


def test_a_precomputation_with_another_choice_is_rejected() -> None:
    profile = model(memory_bytes=2600, stage_devices=(2,))
    planner = Planner(profile, policy_of("auto"))
    planner.precompute(2)
    made = planner.precomputed()
    Planner(profile, policy_of("auto")).restore(made)
    with pytest.raises(RestoreError, match="a stage that is sharded and should be replicated"):
        Planner(replace(profile, device_memory_bytes=5000), policy_of("auto")).restore(made)


# --- what cannot be --------------------------------------------------------------------------------


def test_impossible_shards_are_rejected() -> None:
    reason = "its optimizer Muon is not known to update each element by itself"
    muon = replace(model(memory_bytes=2600, stage_devices=(2,)), shard_problem=reason)
    with pytest.raises(
        InfeasibleError, match=f"within_node = shard, and .*: {reason}; use within_node = rep"
    ):
        StageCosts(muon, policy_of("shard"))
    with pytest.raises(
        InfeasibleError, match=f"on 2 devices, replicated, needs .*cannot be sharded: {reason}"
    ):
        Planner(muon, policy_of("auto")).precompute(1)
    one_row = policy_of("shard", microbatch_rows=1)
    with pytest.raises(
        InfeasibleError, match="a microbatch of 1 keeps one busy; use a microbatch of 2 or more"
    ):
        StageCosts(model(), one_row)
    with pytest.raises(InfeasibleError, match="knows stages of 1 device only; use within_node = auto"):
        StageCosts(model(stage_devices=(1,)), policy_of("shard"))
    with pytest.raises(InfeasibleError, match=r"profile\.inner\.latency_ms is -1"):
        StageCosts(replace(model(), inner=Link(latency_ms=-1)), policy_of("auto"))


def test_a_model_that_would_fit_with_shards_says_so() -> None:
    profile = model(memory_bytes=2600, stage_devices=(2,))
    with pytest.raises(
        InfeasibleError,
        match=r"layers 0 to 3 on 2 devices, replicated, needs .*; start 2 nodes or more, or use within_node = auto",
    ):
        Planner(profile, policy_of("replicate")).precompute(1)
    # One layer on two devices takes 1,000 bytes of state as replicas, and 800 as shards.
    tight = model(layers=1, memory_bytes=900, stage_devices=(2,))
    with pytest.raises(InfeasibleError, match=r"or within_node = auto, which fits on 1 node or more$"):
        smallest_pipeline(StageCosts(tight, policy_of("replicate")))
    assert smallest_pipeline(StageCosts(tight, policy_of("auto"))) == 1
    # The first of two stages keeps 40 bytes of activations in flight, or recomputes 20 at a time.
    tighter = model(layers=2, memory_bytes=830, stage_devices=(2,))
    with pytest.raises(
        InfeasibleError, match="checkpointing = auto with within_node = auto, which fits on 2 nodes"
    ):
        smallest_pipeline(StageCosts(tighter, policy_of("replicate")))


def test_a_layer_larger_than_a_device_even_as_shards_is_named_with_its_bytes() -> None:
    profile = model(layers=2, memory_bytes=700, stage_devices=(2,))
    with pytest.raises(
        InfeasibleError,
        match=r"any number of nodes: the stage of layer \d on 2 devices, sharded, needs .*\(8[0-9]0 bytes\) per device "
        r"\(parameters .*, gathered of a layer at a time 0.0 MiB, activations .*smaller layers",
    ):
        Planner(profile, policy_of("auto"))


def test_shards_that_do_not_fit_where_replicas_would_are_named() -> None:
    """The layer has no optimizer state, so gathering it takes more memory than two devices save."""
    plain = layer(state_bytes=0, activation_bytes=0)
    big = replace(plain, parameter_bytes=100, gradient_bytes=100)
    profile = ModelProfile(layers=(big,), microbatch_rows=4, device_memory_bytes=250, stage_devices=(2,))
    with pytest.raises(
        InfeasibleError, match=r"sharded, needs .* or within_node = auto, which fits on 1 node"
    ):
        Planner(profile, policy_of("shard"))
    (stage,) = best(profile, policy_of("auto"), 1).stages
    assert stage.within == "replicate"


def test_the_bytes_of_a_layout_are_those_of_the_shards() -> None:
    profile, policy = model(stage_devices=(2,)), policy_of("shard", tolerate=1)
    planner = Planner(profile, policy)
    before = planner.plan(planner.initial_situation(["a", "b"]))
    (stage,) = before.pipelines[0].stages
    assert stage.within == "shard" and stage.devices[0].node == "a"
    halves = {
        device: tuple(StatePart(layer=i, start=index, end=index + 1, of=2) for i in range(4))
        for index, device in enumerate(stage.devices)
    }
    situation = Situation(
        nodes=("a", "c"), holdings=dict.fromkeys(halves, frozenset()), previous=before, parts=halves
    )
    plan = planner.plan(situation)
    assert plan.part_bytes == 4 * 900, "each device of the new node receives half of four layers"
    considered = plan.considered[0]
    assert considered.transfer_bytes == plan.part_bytes
    assert considered.transfer_s == plan.part_bytes / 2 / profile.link.bytes_per_s
