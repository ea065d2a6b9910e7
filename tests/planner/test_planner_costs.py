"""The tables of stage costs, and the errors for invalid profiles and policies."""

import pytest
from msgspec.structs import replace

from planner.errors import InfeasibleError
from planner.stages.costs import MOST_DEVICES, StageCosts
from planner.values import Link, Mode, ModelProfile, Policy, Recomputation, Recompute, SplitTime
from tests.helpers.oracles import layer, profile_of, stage_ms

NAN, INF = float("nan"), float("inf")


def policy_of(**changes: object) -> Policy:
    settings: dict[str, object] = {"global_batch": 64, "microbatch_rows": 4, **changes}
    return Policy(**settings)  # type: ignore[arg-type]


def with_split(*entries: SplitTime) -> ModelProfile:
    return ModelProfile(layers=(layer(), replace(layer(), split=entries)), microbatch_rows=4)


def split(devices: int = 2, forward_ms: float = 1.0, backward_ms: float = 1.0) -> SplitTime:
    return SplitTime(devices=devices, forward_ms=forward_ms, backward_ms=backward_ms)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_every_stage_costs_what_its_layers_cost(recompute: Recompute) -> None:
    """Two devices are measured, three are modelled by rows."""
    layers = tuple(
        replace(
            layer(forward_ms=n, backward_ms=3 * n),
            split=(split(2, n / 2 + 0.25, n + 0.25),),
            selective=Recomputation(activation_bytes=1, recompute_ms=n / 4),
        )
        for n in (1.0, 2.5, 4.0)
    )
    profile = ModelProfile(layers=layers, microbatch_rows=4)
    policy = policy_of(devices_per_node=3, activation_checkpointing=recompute)
    costs = StageCosts(profile, policy)
    assert costs.stage_devices == (1, 2, 3)
    for devices in (1, 2, 3):
        for first in range(3):
            for end in range(first + 1, 4):
                there, back = stage_ms(profile, (first, end, devices), 4, recompute)
                cell = devices, first, end
                assert (costs.forward_ms[0][cell], costs.backward_ms[0][cell]) == (there, back)
                assert costs.time_ms[0][cell] == there + back
                assert costs.time_ms[0, devices, end, first] == INF


def test_ways_to_recompute_that_a_job_can_choose_among() -> None:
    """Nothing is recomputed without need, and selectively only where every layer was measured so."""
    known = replace(layer(), selective=Recomputation(activation_bytes=1, recompute_ms=0.5))
    whole = ModelProfile(layers=(known, known), microbatch_rows=4)
    partly = ModelProfile(layers=(known, layer()), microbatch_rows=4)
    auto = policy_of(activation_checkpointing="auto", device_memory_bytes=100)
    assert StageCosts(whole, policy_of(activation_checkpointing="auto")).modes == (Mode("none", "replicate"),)
    assert [mode.recompute for mode in StageCosts(whole, auto).modes] == ["none", "selective", "full"]
    assert [mode.recompute for mode in StageCosts(partly, auto).modes] == ["none", "full"]
    with pytest.raises(InfeasibleError, match=r"profile\.layers\[1\]\.selective is missing.*or use full"):
        StageCosts(partly, policy_of(activation_checkpointing="selective"))


def test_the_time_and_the_memory_of_a_selective_recomputation_are_checked() -> None:
    for name, selective in {
        "activation_bytes": Recomputation(activation_bytes=-1, recompute_ms=1.0),
        "recompute_ms": Recomputation(activation_bytes=1, recompute_ms=NAN),
    }.items():
        profile = ModelProfile(layers=(layer(selective=selective),), microbatch_rows=4)
        with pytest.raises(InfeasibleError, match=rf"profile\.layers\[0\]\.selective\.{name} is"):
            StageCosts(profile, policy_of())


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (with_split(split(devices=1)), r"layers\[1\]\.split\[0\]\.devices is 1; it must be ≥ 2"),
        (with_split(split(), split(devices=0)), r"layers\[1\]\.split\[1\]\.devices is 0"),
        (with_split(split(), split(4), split()), r"layers\[1\]\.split\[2\]\.devices is 2, and so is"),
        (with_split(split(forward_ms=NAN)), r"layers\[1\]\.split\[0\]\.forward_ms is nan"),
        (with_split(split(backward_ms=-1.0)), r"layers\[1\]\.split\[0\]\.backward_ms is -1\.0"),
        (with_split(split(backward_ms=INF)), r"layers\[1\]\.split\[0\]\.backward_ms is inf"),
    ],
)
def test_invalid_measured_splits_are_named(profile: ModelProfile, message: str) -> None:
    with pytest.raises(InfeasibleError, match=rf"profile\.{message}"):
        StageCosts(profile, policy_of(devices_per_node=2))


@pytest.mark.parametrize("sizes", [(), (0, 1), (-1,), (2, 1), (1, 1, 2)])
def test_stage_devices_are_ascending_numbers(sizes: tuple[int, ...]) -> None:
    with pytest.raises(InfeasibleError, match=r"profile\.stage_devices is \[.*ascending"):
        StageCosts(replace(profile_of([1.0]), stage_devices=sizes), policy_of())


@pytest.mark.parametrize("name", ["link", "ring"])
@pytest.mark.parametrize(
    ("link", "field"),
    [
        (Link(latency_ms=NAN), "latency_ms"),
        (Link(latency_ms=-0.5), "latency_ms"),
        (Link(latency_ms=INF), "latency_ms"),
        (Link(bytes_per_s=NAN), "bytes_per_s"),
        (Link(bytes_per_s=0.0), "bytes_per_s"),
        (Link(bytes_per_s=-1.0), "bytes_per_s"),
    ],
)
def test_invalid_links_are_named(name: str, link: Link, field: str) -> None:
    changes: dict[str, Link] = {name: link}
    profile = replace(profile_of([1.0]), **changes)  # type: ignore[arg-type]
    with pytest.raises(InfeasibleError, match=rf"profile\.{name}\.{field}"):
        StageCosts(profile, policy_of())


@pytest.mark.parametrize("wrong", [0, -5])
def test_invalid_memory_sizes_are_named(wrong: int) -> None:
    with pytest.raises(InfeasibleError, match=r"profile\.device_memory_bytes"):
        StageCosts(profile_of([1.0], memory_bytes=wrong), policy_of())
    with pytest.raises(InfeasibleError, match=r"policy\.device_memory_bytes"):
        StageCosts(profile_of([1.0]), policy_of(device_memory_bytes=wrong))


@pytest.mark.parametrize("name", ["devices_per_node", "global_batch", "microbatch_rows"])
def test_invalid_policies_are_named(name: str) -> None:
    with pytest.raises(InfeasibleError, match=rf"policy\.{name} is 0; it must be ≥ 1"):
        StageCosts(profile_of([1.0]), policy_of(**{name: 0}))


def test_a_node_has_no_more_devices_than_tables_can_hold() -> None:
    with pytest.raises(InfeasibleError, match=f"devices_per_node is 1000000; it must be ≤ {MOST_DEVICES}"):
        StageCosts(profile_of([1.0]), policy_of(devices_per_node=1_000_000))


def test_times_whose_sum_overflows_are_rejected() -> None:
    with pytest.raises(InfeasibleError, match="add up to more"):
        StageCosts(profile_of([5e307] * 4), policy_of())


@pytest.mark.parametrize(
    ("sizes", "devices", "split", "message"),
    [
        ((1, 2, 4, 8), 6, "any", r"devices_per_node is 6.* use 4 or 8 devices per node"),
        (None, 6, "aligned", r"devices_per_node is 6.* use 4 or 8, or split = any"),
        ((3,), 4, "aligned", r"stage_devices is 3; use split = any"),
        ((3,), 4, "any", r"devices_per_node is 4.* use 3 or 6 devices per node"),
        ((4,), 2, "any", r"devices_per_node is 2.* use 4 devices per node"),
        ((3, 4), 5, "any", r"devices_per_node is 5.* use 4 or 6 devices per node"),
    ],
)
def test_the_error_for_nodes_that_cannot_be_split_recommends_sizes(
    sizes: tuple[int, ...] | None, devices: int, split: str, message: str
) -> None:
    profile = replace(profile_of([1.0] * 8, rows=8), stage_devices=sizes)
    with pytest.raises(InfeasibleError, match=message):
        StageCosts(profile, policy_of(microbatch_rows=8, devices_per_node=devices, split=split))


def test_nodes_are_split_as_the_policy_and_the_profile_allow() -> None:
    profile = replace(profile_of([1.0] * 8, rows=8), stage_devices=(1, 2, 4))
    splits = {
        split: StageCosts(profile, policy_of(devices_per_node=4, split=split)).node_splits
        for split in ("any", "aligned")
    }
    aligned = {(1, 1, 1, 1), (1, 1, 2), (2, 1, 1), (2, 2), (4,)}
    assert set(splits["aligned"]) == aligned
    assert set(splits["any"]) == aligned | {(1, 2, 1)}
    single = StageCosts(replace(profile, stage_devices=(1,)), policy_of(devices_per_node=3))
    assert single.node_splits == ((1, 1, 1),) and single.most_nodes == 2
