"""Whether a snapshot can be restored from the nodes that are present."""

import pytest

from ftd.coordinator.restore_check import check_restore
from statemachine.effects import CheckRestore
from statemachine.messages.values import Snapshot, SnapshotGroup, Vote

OWNERS = ("a", "b", "c", "d")


def asked(protection: str, present: str) -> CheckRestore:
    groups = (
        SnapshotGroup(first_layer=0, end_layer=3, owners=OWNERS, protection=protection),
        SnapshotGroup(first_layer=3, end_layer=4, owners=("a", "b"), protection=protection),
    )
    record = Snapshot(step=8, generation=2, vote=Vote(loss=1.0, gradient_norm=1.0), groups=groups)
    return CheckRestore(cause="c", generation=5, record=record, present=tuple(present))


@pytest.mark.parametrize(
    ("protection", "present", "possible", "tier"),
    [
        ("none", "abcd", True, "memory"),
        ("none", "abc", False, "memory"),
        ("aec", "abc", True, "decoded"),
        ("aec", "bcd", True, "decoded"),
        ("aec", "ab", False, "memory"),
        ("aec2", "ab", True, "decoded"),
        ("arc:1", "ac", True, "decoded"),
        ("arc:1", "cd", False, "memory"),
        ("aec+arc:1", "", False, "memory"),
    ],
)
def test_losses_that_the_codes_withstand(protection: str, present: str, possible: bool, tier: str) -> None:
    answer = check_restore(asked(protection, present), at=1.0)
    assert (answer.generation, answer.possible, answer.tier) == (5, possible, tier)


@pytest.mark.parametrize(
    ("present", "copied", "tier"), [("ab", "b", "memory"), ("a", "b", "buddy"), ("a", "", "")]
)
def test_a_replica_peers_copy_replaces_its_owner(present: str, copied: str, tier: str) -> None:
    groups = (
        SnapshotGroup(first_layer=0, end_layer=3, owners=("a",), protection="aec+buddy", replica_peer="b"),
        SnapshotGroup(first_layer=3, end_layer=4, owners=("b",), protection="aec+buddy", replica_peer="a"),
    )
    record = Snapshot(step=8, generation=2, vote=Vote(loss=1.0, gradient_norm=1.0), groups=groups)
    asked = CheckRestore(cause="c", generation=5, record=record, present=tuple(present), copied=tuple(copied))
    answer = check_restore(asked, at=1.0)
    assert answer.possible == bool(tier) and (not tier or answer.tier == tier)
    if tier == "buddy":
        assert answer.reason == "layers 3 to 3 from the copy of b at a"
    if not tier:
        assert "a, which had a copy, does not have it now" in answer.reason


@pytest.mark.parametrize(("present", "possible"), [("ab", True), ("b", True), ("", False)])
def test_any_owner_holds_a_whole_group_whose_devices_hold_shards(present: str, possible: bool) -> None:
    groups = (SnapshotGroup(first_layer=0, end_layer=3, owners=("a", "b"), protection="none", whole=True),)
    record = Snapshot(step=8, generation=2, vote=Vote(loss=1.0, gradient_norm=1.0), groups=groups)
    answer = check_restore(
        CheckRestore(cause="c", generation=5, record=record, present=tuple(present)), at=1.0
    )
    assert (answer.possible, answer.tier) == (possible, "memory")
    assert present != "b" or answer.reason == "layers 0 to 2 are held whole by b"


def test_the_reason_names_the_missing_nodes() -> None:
    no = check_restore(asked("aec", "ac"), at=1.0).reason
    assert (
        no == "layers 0 to 2 cannot be restored without b, d: 'aec' of 4 owners withstands the loss of any 1"
    )
    assert check_restore(asked("aec", "abc"), at=1.0).reason == "decoded layers 0 to 2 without d"
