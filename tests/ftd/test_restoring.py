"""Whether a snapshot can be put together from those who are here."""

import pytest

from ftd.coordinator.restoring import check_restore
from statemachine.effects import CheckRestore
from statemachine.values import Snapshot, SnapshotGroup, Vote

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
def test_what_the_codes_withstand(protection: str, present: str, possible: bool, tier: str) -> None:
    answer = check_restore(asked(protection, present), at=1.0)
    assert (answer.generation, answer.possible, answer.tier) == (5, possible, tier)


def test_the_reason_names_who_is_missing() -> None:
    no = check_restore(asked("aec", "ac"), at=1.0).reason
    assert no == "layers 0 to 2 cannot be made without b, d: aec of 4 owners withstands the loss of any 1"
    assert check_restore(asked("aec", "abc"), at=1.0).reason == "decoded layers 0 to 2 without d"
