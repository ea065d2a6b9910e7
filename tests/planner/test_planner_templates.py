"""Memory, n₀, template sizes, and the errors when there are none."""

import re
from random import Random

import pytest
from msgspec.structs import replace

from planner.errors import BatchError, InfeasibleError, TooFewNodesError
from planner.planner import Planner
from planner.stages.costs import StageCosts
from planner.stages.feasibility import fewest_nodes, find_fullest_stage
from planner.stages.memory import MemoryModel, in_flight
from planner.templates import Templates, check_tolerance, smallest_pipeline
from planner.values import Mode, ModelProfile, Policy, Recomputation, Recompute, SplitTime
from tests.helpers.oracles import all_mappings, fits, layer, profile_of, random_model, stage_bytes, ways


def policy_of(**changes: object) -> Policy:
    settings: dict[str, object] = {"global_batch": 64, "microbatch_rows": 4, **changes}
    return Policy(**settings)  # type: ignore[arg-type]


def test_in_flight_falls_towards_the_last_stage_and_never_exceeds_the_batch() -> None:
    assert [in_flight(behind, 8) for behind in (3, 2, 1, 0)] == [4, 3, 2, 1]
    assert [in_flight(behind, 2) for behind in (3, 2, 1, 0)] == [2, 2, 2, 1]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_stage_bytes_term_by_term(recompute: Recompute, devices: int) -> None:
    """Activations on two devices are measured, on three they are the share by rows."""
    layers = tuple(
        replace(
            layer(state_bytes=4 * n, activation_bytes=7 * n, output_bytes=3 * n),
            selective=Recomputation(activation_bytes=5 * n, recompute_ms=0.0),
            split=(SplitTime(devices=2, forward_ms=1.0, backward_ms=1.0, activation_bytes=4 * n + 1),),
        )
        for n in range(1, 6)
    )
    profile = ModelProfile(layers=layers, microbatch_rows=4)
    memory = MemoryModel(profile, policy_of())
    for first in range(5):
        for end in range(first + 1, 6):
            for behind in range(5):
                expected = stage_bytes(profile, policy_of(), (first, end, devices), behind, recompute)
                assert memory.stage_bytes(first, end, devices, behind, Mode(recompute)) == expected
                assert memory.table(devices, behind, Mode(recompute))[first, end] == expected


def test_a_smaller_microbatch_than_measured_takes_less_memory_and_time() -> None:
    profile = profile_of([4.0, 4.0], rows=4)
    costs = StageCosts(profile, policy_of(microbatch_rows=2))
    assert costs.memory.stage_bytes(0, 1, 1, 0, Mode("none")) == 12 + 2
    assert costs.time_ms[0, 1, 0, 1] == 2.0


def test_the_policy_overrides_the_device_memory() -> None:
    profile = profile_of([1.0] * 4, memory_bytes=10**9)
    assert Planner(profile, policy_of()).n0 == 1
    assert Planner(profile, policy_of(device_memory_bytes=40)).n0 > 1


def covers_all(templates: Templates) -> bool:
    """Return whether Theorem A.1's conditions hold: p > n₀ − 1 sizes, consecutive. Then no number of nodes
    from n₀ on leaves a node idle.
    """
    consecutive = templates.sizes[-1] - templates.sizes[0] + 1 == len(templates.sizes)
    return consecutive and len(templates.sizes) > templates.n0 - 1


def test_sizes_run_from_n0_to_n_minus_f_n0() -> None:
    """Oobleck §4.1.1: 13 nodes, n₀ = 2, f = 2 give sizes 2 … 9."""
    costs = StageCosts(profile_of([1.0] * 12, memory_bytes=180), policy_of(tolerate=2))
    templates = Templates(costs, 13)
    assert templates.n0 == 2
    assert templates.sizes == tuple(range(2, 10))
    assert covers_all(templates)


def test_sizes_reach_far_enough_for_a_single_replica() -> None:
    """Four nodes, n₀ = 2, f = 1: the paper makes size 2 only; with three left a size of 3 leaves no node idle."""
    costs = StageCosts(profile_of([1.0] * 8, memory_bytes=120), policy_of(tolerate=1))
    templates = Templates(costs, 4)
    assert (templates.n0, templates.sizes, covers_all(templates)) == (2, (2, 3), True)


def test_more_nodes_than_layers_make_no_template() -> None:
    templates = Templates(StageCosts(profile_of([1.0] * 3), policy_of()), 8)
    assert templates.sizes == (1, 2, 3)


def test_a_layer_that_fits_nowhere_is_named_with_its_bytes() -> None:
    layers = (layer(), layer(state_bytes=4000), layer())
    profile = ModelProfile(layers=layers, microbatch_rows=4, device_memory_bytes=2000)
    with pytest.raises(InfeasibleError, match=r"stage of layer 1 .*\(40\d\d bytes\).*\(2000 bytes\)"):
        Planner(profile, policy_of())


def test_the_error_for_a_cluster_below_n0_names_the_nodes_needed() -> None:
    planner = Planner(profile_of([1.0] * 8, memory_bytes=40), policy_of())
    with pytest.raises(InfeasibleError, match=f"start {planner.n0} nodes or more"):
        planner.precompute(planner.n0 - 1)


def test_one_row_per_microbatch_cannot_keep_two_devices_busy_with_one_layer() -> None:
    with pytest.raises(InfeasibleError, match="larger microbatch"):
        Planner(profile_of([1.0], rows=1), policy_of(devices_per_node=2, microbatch_rows=1))


def test_f_too_large_names_the_setting_and_what_would_work() -> None:
    with pytest.raises(InfeasibleError, match=r"tolerance\.failures = 2 .* at most 1, or start 6 nodes"):
        check_tolerance(policy_of(tolerate=2), n0=2, nodes=4)
    with pytest.raises(InfeasibleError, match=r"set tolerance\.failures to 0, or start 4 nodes"):
        check_tolerance(policy_of(tolerate=1), n0=2, nodes=3)
    with pytest.raises(InfeasibleError, match=r"2 replicas of 1 node each, 2 nodes, and there is 1 node; "):
        check_tolerance(policy_of(tolerate=1), n0=1, nodes=1)
    check_tolerance(policy_of(tolerate=1), n0=2, nodes=4)


def test_too_few_nodes_for_one_replica_names_the_stage_that_does_not_fit_on_fewer() -> None:
    costs = StageCosts(profile_of([1.0] * 12, memory_bytes=180), policy_of(tolerate=0))
    assert smallest_pipeline(costs) == 2
    words = r"needs one replica, 2 nodes, and there is 1 node \(on 1 node the stage of layers 0 to 11 .*\); start 2"
    with pytest.raises(InfeasibleError, match=words):
        check_tolerance(policy_of(tolerate=0), n0=2, nodes=1, costs=costs)


def test_f_too_large_for_the_batch_recommends_a_batch() -> None:
    with pytest.raises(BatchError) as raised:
        check_tolerance(policy_of(tolerate=2, global_batch=8), n0=1, nodes=4)
    assert raised.value.nearest == (12,)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0])
def test_invalid_profile_entries_are_named(wrong: float) -> None:
    profile = ModelProfile(layers=(layer(), layer(backward_ms=wrong)), microbatch_rows=4)
    with pytest.raises(InfeasibleError, match=r"profile\.layers\[1\]\.backward_ms"):
        Planner(profile, policy_of())


def test_no_layers_and_no_devices_are_rejected() -> None:
    with pytest.raises(InfeasibleError, match="no layers"):
        Planner(ModelProfile(layers=(), microbatch_rows=4), policy_of())
    with pytest.raises(InfeasibleError, match="devices_per_node"):
        Planner(profile_of([1.0]), policy_of(devices_per_node=0))


def test_n0_and_the_fullest_stage_against_all_mappings() -> None:
    random, outcomes = Random(3), set()
    for _ in range(150):
        profile, policy, _ = random_model(random)
        profile = replace(profile, device_memory_bytes=random.randint(20, 120))
        costs = StageCosts(profile, policy)
        fitting = [
            nodes
            for nodes in range(1, costs.most_nodes + 1)
            if any(fits(profile, policy, mapping) for mapping in all_mappings(profile, policy, nodes))
        ]
        assert fewest_nodes(costs) == min(fitting, default=None)
        outcomes.add(min(fitting, default=None))
        for nodes in range(1, costs.most_nodes + 1):
            fullest = find_fullest_stage(costs, nodes)
            stage = fullest.first_layer, fullest.end_layer
            sizes = [
                stage_bytes(
                    profile,
                    policy,
                    (*stage, d),
                    fullest.stages_after,
                    fullest.mode.recompute,
                    fullest.mode.within,
                )
                for d in costs.stage_devices
            ]
            assert fullest.size_bytes in sizes
            if costs.stage_devices == (1,):
                fullest_of = [
                    max(
                        min(
                            stage_bytes(profile, policy, stage, len(mapping) - 1 - number, *way)
                            for way in ways(profile, policy, stage[2])
                        )
                        for number, stage in enumerate(mapping)
                    )
                    for mapping in all_mappings(profile, policy, nodes)
                ]
                assert fullest.size_bytes == min(fullest_of)
    assert {None, 1, 2} <= outcomes


def test_a_large_model_that_fits_nowhere_is_rejected_quickly() -> None:
    """The model has 96 layers: looking for the fullest stage of all cuts one by one took minutes."""
    profile = profile_of([1.0] * 96, memory_bytes=14)
    with pytest.raises(
        InfeasibleError, match=r"stage of layer \d+ on 4 devices, replicated, needs .* and a device has"
    ):
        smallest_pipeline(StageCosts(profile, policy_of(devices_per_node=4)))


def test_a_layer_larger_than_a_device_is_named_with_its_bytes() -> None:
    """The error names the purpose of the bytes, and gives no advice that cannot help."""
    small, large = layer(), layer(state_bytes=1600)
    profile = ModelProfile(layers=(small, small, large, small), microbatch_rows=4, device_memory_bytes=1000)
    with pytest.raises(InfeasibleError) as refused:
        smallest_pipeline(StageCosts(profile, policy_of()))
    said = str(refused.value)
    assert re.search(
        r"layer 2 needs .*parameters .*gradients .*optimizer .*activations .* a device has", said
    )
    assert "(1000 bytes)" in said and "smaller microbatch" not in said and "smaller layers" in said


def test_the_error_for_too_few_nodes_names_the_stage_that_is_too_large() -> None:
    profile = profile_of([1.0] * 4, memory_bytes=40)
    planner = Planner(profile, policy_of())
    assert planner.fewest_nodes > 1
    with pytest.raises(
        TooFewNodesError, match=r"because on \d+ nodes? the stage of layers? .* needs .* bytes"
    ):
        planner.plan(planner.initial_situation(["n1"]))
