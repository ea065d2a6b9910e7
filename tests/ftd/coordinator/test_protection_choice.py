"""The choice of the cheapest protection: compared with every scheme, with limits of memory, ZeRO-1 and too few
owners.
"""

import pytest
from msgspec.structs import replace

from ftd.coordinator.protection_choice import choose_protection, choose_scheme
from ftd.snapshots.protection import make_bounded_code, stated_guarantee
from planner.planner import Planner
from planner.values import LayerProfile, ModelProfile, Plan, Policy
from statemachine.messages.values import ProtectionChoice, ProtectionRequest
from storage.codes import parse_scheme

ALL = ["none", *(f"arc:{k}" for k in range(1, 5)), "aec", "aec2"]
ALL += [f"{parity}+arc:{k}" for parity in ("aec", "aec2") for k in range(1, 4)]


def chosen(
    owners: int, losses: int, *, zero1: bool = False, limit_bytes: int | None = None
) -> ProtectionChoice:
    """Return the choice for a bucket of 1200 bytes."""

    def fullest(scheme: str) -> int:
        return round(1200 / owners * (1 + make_bounded_code(scheme, owners).overhead))

    return choose_scheme(owners, losses, zero1=zero1, fullest_bytes=fullest, limit_bytes=limit_bytes)


def touched(scheme: str, owners: int) -> float:
    """Return the bytes stored and read to make them, per byte of the bucket."""
    code = make_bounded_code(scheme, owners)
    read = sum(len(cells) for extra in code.extra for cells in extra)
    return code.overhead + read / (code.owners * code.cells)


@pytest.mark.parametrize("owners", [2, 3, 4, 5, 6, 8, 12, 16])
@pytest.mark.parametrize("losses", [1, 2, 3])
def test_nothing_that_withstands_as_much_is_cheaper(owners: int, losses: int) -> None:
    scheme = chosen(owners, losses).scheme
    wanted = min(losses, owners - 1)
    assert stated_guarantee(scheme, owners) == wanted
    enough = [one for one in ALL if stated_guarantee(one, owners) >= wanted]
    assert touched(scheme, owners) == min(touched(one, owners) for one in enough)


@pytest.mark.parametrize(
    ("owners", "losses", "scheme"),
    [(1, 2, "none"), (2, 0, "arc:1"), (2, 3, "arc:1"), (3, 1, "aec"), (3, 2, "arc:2"), (4, 2, "aec2")],
)
def test_choices_match_examples_computed_by_hand(owners: int, losses: int, scheme: str) -> None:
    assert chosen(owners, losses).scheme == scheme


def test_more_owners_than_aec2_is_for_get_copies() -> None:
    assert chosen(16, 2).scheme == "aec2"
    assert chosen(17, 2).scheme == "arc:2"


def test_the_reason_compares_schemes() -> None:
    assert chosen(3, 1).reason == (
        "aec: any 1 of 3 owners may be lost, for 50% more bytes; cheaper to make than arc:1 (100%)"
    )
    assert "one owner" in chosen(1, 1).reason


def test_schemes_that_do_not_fit_into_memory_are_not_chosen() -> None:
    # Of 1200 bytes each of four owners holds 300, 400 with a parity, 600 with two parities; in three slots.
    assert chosen(4, 2, limit_bytes=1800).scheme == "aec2"
    less = chosen(4, 2, limit_bytes=1799)
    assert less.scheme == "aec" and less.reason.startswith("aec2 would take")
    assert chosen(4, 2, limit_bytes=1000).scheme == "none"
    assert chosen(4, 2, limit_bytes=10).scheme == "none"


def test_with_zero1_the_replica_is_what_can_be_copied() -> None:
    assert chosen(4, 1, zero1=True).scheme == chosen(4, 3, zero1=True).scheme == "arc:1+aor"
    assert chosen(4, 1, zero1=True, limit_bytes=1000).scheme == "aor"
    assert chosen(1, 1, zero1=True).scheme == "aor"


def test_a_single_owner_gets_a_replica_peer_if_there_is_another_node() -> None:
    def of(nodes: int, limit_bytes: int | None = None, *, zero1: bool = False) -> str:
        choice = choose_scheme(
            1, 1, zero1=zero1, fullest_bytes=lambda _: 1200, limit_bytes=limit_bytes, nodes=nodes
        )
        assert parse_scheme(choice.scheme)
        return choice.scheme

    assert (of(2), of(1), of(2, 3600), of(2, 3599)) == ("buddy", "none", "buddy", "none")
    assert of(2, zero1=True) == "aor+buddy"


def plan_of(pipelines: int) -> tuple[Plan, tuple[LayerProfile, ...]]:
    layer = LayerProfile(
        forward_ms=1.0,
        backward_ms=2.0,
        parameter_bytes=400,
        gradient_bytes=400,
        optimizer_bytes=800,
        activation_bytes=10,
        output_bytes=10,
    )
    profile = ModelProfile(layers=(layer,), microbatch_rows=1)
    policy = Policy(global_batch=pipelines, microbatch_rows=1, tolerate=0)
    planner = Planner(profile, policy)
    plan = planner.plan(planner.initial_situation([f"n{i}" for i in range(pipelines)]))
    assert len(plan.pipelines) == pipelines
    return plan, profile.layers


def test_a_requested_scheme_is_used_if_the_owners_allow_it() -> None:
    plan, layers = plan_of(4)
    assert choose_protection(plan, layers, ProtectionRequest(scheme="aec2", losses=1)).scheme == "aec2"
    auto = ProtectionRequest(scheme=None, losses=1, limits={"n0": 10**9, "n3": 3 * 399})
    assert choose_protection(plan, layers, auto).scheme == "none"
    assert (
        choose_protection(plan, layers, ProtectionRequest(scheme=None, losses=1, limits={})).scheme == "aec"
    )


def test_an_idle_node_that_holds_copies_must_have_room_for_them() -> None:
    plan, layers = plan_of(1)
    plan = replace(plan, idle_nodes=("idle-0", "idle-1"))

    def of(limits: dict[str, int]) -> str:
        return choose_protection(plan, layers, ProtectionRequest(scheme=None, losses=1, limits=limits)).scheme

    enough = 3 * 1216  # Three slots for 1200 bytes, aligned.
    assert of({"n0": enough, "idle-0": enough, "idle-1": enough}) == "buddy"
    assert of({"n0": enough, "idle-0": enough - 1, "idle-1": enough}) == "none"
    assert of({"n0": enough, "idle-0": enough, "idle-1": 1}) == "buddy"


def test_half_of_a_limit_is_for_copies_with_an_automatic_protection() -> None:
    plan, layers = plan_of(
        4
    )  # Each owner holds 400 bytes with a parity and 300 without, in three slots, aligned.

    def of(own_limit_bytes: int) -> ProtectionChoice:
        limits, own_limits = {"n1": 2 * own_limit_bytes}, {"n1": own_limit_bytes}
        return choose_protection(
            plan, layers, ProtectionRequest(scheme=None, losses=1, limits=limits, own_limits=own_limits)
        )

    takes = 3 * 512
    assert of(takes).scheme == "aec"
    less = of(takes - 1)
    assert less.scheme == "none" and "are for its own snapshots and as much for copies" in less.reason
    alone, layers = plan_of(1)
    uneven = replace(alone, idle_nodes=("idle-0",))
    limits = {"n0": 3 * 2432, "idle-0": 3 * 2432}
    assert (
        choose_protection(
            uneven,
            layers,
            ProtectionRequest(scheme=None, losses=1, limits=limits, own_limits={"n0": 3 * 1216}),
        ).scheme
        == "buddy"
    )
    assert (
        choose_protection(
            uneven,
            layers,
            ProtectionRequest(scheme=None, losses=1, limits=limits, own_limits={"n0": 3 * 1216 - 1}),
        ).scheme
        == "none"
    )


def test_an_impossible_request_is_replaced_by_an_equally_safe_scheme() -> None:
    plan, layers = plan_of(17)
    choice = choose_protection(plan, layers, ProtectionRequest(scheme="aec2", losses=1))
    assert (choice.scheme, choice.fallback) == ("arc:2", True)
    assert choice.reason.startswith("aec2 is for groups of up to 16 owners, not 17; arc:2: any 2 of 17")
    assert parse_scheme(choice.scheme)
