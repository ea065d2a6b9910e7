"""Tests of the rule that decides which snapshots can be restored, also compared with the codes themselves."""

from itertools import combinations

import msgspec
import pytest

from runtime.script.protection import find_restorable, scheme_of, tolerated_losses
from runtime.wire.snapshot_agent_protocol import HeldRankSnapshot, ProtectedRun, RankSnapshotLayout
from storage.codes import make_code, solve_lost_cells


def layout(
    rank: int, ranks: int, *, shared: int = 0, scheme: str = "none", owner: int = -1
) -> RankSnapshotLayout:
    owners = ranks if shared else 1
    return RankSnapshotLayout(
        rank=rank, ranks=ranks, own_bytes=1, shared_bytes=shared, scheme=scheme, owners=owners, owner=owner
    )


def held_by_hosts(run: ProtectedRun, step: int, scheme: str, *, shared: int) -> list[HeldRankSnapshot]:
    """Return all that the hosts of a run hold of a step, with one rank on each."""
    ranks, scheme, found = len(run.host_of_rank), scheme if shared else "none", []
    for rank, host in enumerate(run.host_of_rank):
        copy = layout(rank, ranks, shared=shared, scheme=scheme)
        own = layout(rank, ranks, shared=shared, scheme=scheme, owner=host if shared else -1)
        found.append(HeldRankSnapshot(address=run.hosts[host], generation=1, step=step, layout=own))
        for holder in run.copy_holders(host):
            found.append(HeldRankSnapshot(address=holder, generation=1, step=step, layout=copy, is_copy=True))
    return found


@pytest.mark.parametrize("scheme", ["arc:1", "arc:2", "aec", "aec2", "aec+arc:1"])
@pytest.mark.parametrize("hosts", [2, 3, 4, 5])
@pytest.mark.parametrize("shared", [0, 1000])
def test_any_loss_within_the_guarantee_is_survived(scheme: str, hosts: int, shared: int) -> None:
    copies = min(tolerated_losses(scheme), hosts - 1)
    run = ProtectedRun(
        job="j", generation=1, hosts=tuple("abcde"[:hosts]), host_of_rank=tuple(range(hosts)), copies=copies
    )
    held = held_by_hosts(run, 7, scheme, shared=shared)
    for lost in combinations(run.hosts, copies):
        left = [one for one in held if one.address not in lost]
        found, _ = find_restorable(left, hosts)
        assert [one.key for one in found] == [(1, 7)]
        assert all(address not in lost for some in found[0].own.values() for address in some)
        gone = frozenset(range(hosts)) - set(found[0].shards)
        assert not shared or solve_lost_cells(make_code(scheme, hosts), gone) is not None
    beyond = [
        find_restorable([one for one in held if one.address not in lost], hosts)[0]
        for lost in combinations(run.hosts, copies + 1)
    ]
    assert [] in beyond


def test_the_newest_snapshot_that_all_ranks_can_restore_is_chosen() -> None:
    held = [
        HeldRankSnapshot(address="", generation=g, step=s, layout=layout(rank, 2))
        for rank, keys in enumerate([[(1, 5), (1, 6), (2, 2)], [(1, 4), (1, 5), (2, 2), (2, 3)]])
        for g, s in keys
    ]
    found, refused = find_restorable(held, 2)
    assert [one.key for one in found] == [(2, 2), (1, 5)]
    assert {one.key: one.why for one in refused}[2, 3] == "the own state of rank 0 is lost"


def test_a_different_number_of_ranks() -> None:
    held = [HeldRankSnapshot(address="a", generation=1, step=1, layout=layout(rank, 2)) for rank in range(2)]
    found, refused = find_restorable(held, 3)
    assert not found and "it was saved by 2 ranks, and there are 3" in refused[0].why
    run = ProtectedRun(job="j", generation=1, hosts=("a", "b"), host_of_rank=(0, 1), copies=1)
    found, _ = find_restorable(held_by_hosts(run, 1, "aec", shared=10), 3)
    assert [found[0].source_of(rank) for rank in range(3)] == [0, 1, 0]
    assert find_restorable(held_by_hosts(run, 1, "aec", shared=10), 1)[0][0].key == (1, 1)


def test_snapshots_of_all_ranks_come_before_those_with_replicas_of_lost_ones() -> None:
    """A lost rank's random states are in no replica, so an older snapshot of all ranks is better."""

    def held(step: int, *ranks: int) -> list[HeldRankSnapshot]:
        return [
            HeldRankSnapshot(
                address="a",
                generation=1,
                step=step,
                layout=msgspec.structs.replace(layout(rank, 4), resizable=True, replicas=2),
            )
            for rank in ranks
        ]

    found, _ = find_restorable([*held(6, 0, 3), *held(5, 0, 1, 2, 3), *held(4, 0, 1, 2)], 4)
    assert [(one.key[1], one.missing) for one in found] == [(5, ()), (6, (1, 2)), (4, (3,))]
    assert [found[1].source_of(rank) for rank in range(4)] == [0, 0, 0, 3]
    assert found[0].sources_near(2, 3) == [3, 2, 1, 0]


def test_spare_hosts_hold_copies_too() -> None:
    run = ProtectedRun(
        job="j", generation=1, hosts=("a",), host_of_rank=(0, 0), spare_hosts=("x", "y"), copies=2
    )
    assert (
        run.copy_holders(0) == ("x", "y") and run.hosts_copied_by("y") == (0,) and run.ranks_of("a") == (0, 1)
    )


def test_the_names_of_protections() -> None:
    assert scheme_of("buddy") == "arc:1" and scheme_of("aec + buddy") == "aec+arc:1"
    losses = {"none": 0, "buddy": 1, "arc:3": 3, "aec": 1, "aec2": 2, "aec+arc:1": 2}
    assert {protection: tolerated_losses(scheme_of(protection)) for protection in losses} == losses
    with pytest.raises(ValueError, match="not a protection scheme"):
        tolerated_losses(scheme_of("raid5"))
    with pytest.raises(
        ValueError, match=r"'aor' is not a protection scheme; use none, arc:k .*, aec, aec2, joined"
    ):
        tolerated_losses(scheme_of("aor"))  # For jobs of a cluster.
