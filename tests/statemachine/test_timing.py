"""Tests that limits which cannot work together are rejected."""

import pytest

from statemachine.timing import Timing


def test_the_defaults_are_in_order() -> None:
    timing = Timing()
    assert timing.hang_s(0.1) == timing.hang_floor_s
    assert timing.hang_s(1.0) == 4.0
    assert timing.boundary_limit_s(0.5) == 12.0


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("quiesce_s", 0.0, "quiesce_s must be positive"),
        ("silence_s", 0.4, "at least twice heartbeat_s"),
        ("hello_retry_s", 5.0, "must not exceed silence_s"),
        ("lost_record_timeout_s", 2.5, "must be above leader_silence_s"),
        ("leader_silence_s", 40.0, "lost_record_timeout_s .30.0. must be above"),
    ],
)
def test_a_value_that_cannot_work_is_named(field: str, value: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Timing(**{field: value})
