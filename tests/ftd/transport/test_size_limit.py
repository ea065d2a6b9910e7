"""Tests of what a process concludes about the size from which on its broker refuses messages."""

from typing import Any

import pytest

from ftd.transport.mqtt import size_limit
from ftd.transport.mqtt.size_limit import LEAST_BYTES, SizeLimit


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(
        size_limit._log, "error", lambda event, **words: found.append({"event": event, **words})
    )
    return found


def test_a_size_that_was_under_way_at_two_ends_in_a_row_is_refused(errors: list[dict[str, Any]]) -> None:
    limit = SizeLimit()
    limit.note_end("t", 9000)
    assert not limit.refuses(2**30) and not errors
    limit.note_end("t", 8000)
    assert limit.refuses(8000) and limit.refuses(9000) and not limit.refuses(7999)
    assert [error["size_bytes"] for error in errors] == [8000]


@pytest.mark.parametrize("size", [0, LEAST_BYTES - 1])
def test_an_end_without_a_large_message_under_way_has_another_reason(size: int) -> None:
    """The broker may have been restarted with a higher limit."""
    limit = SizeLimit()
    for _ in range(2):
        limit.note_end("t", 9000)
    limit.note_end("t", size)
    assert not limit.refuses(9000)
    limit.note_end("t", 9000)
    assert not limit.refuses(9000)


def test_a_message_that_is_acknowledged_did_not_end_the_connection() -> None:
    limit = SizeLimit()
    limit.note_end("t", 9000)
    limit.note_acknowledged(8999)
    limit.note_acknowledged(9000)
    limit.note_end("t", 9000)
    assert not limit.refuses(9000)


def test_a_size_that_does_not_come_back_twice_is_refused_although_it_is_acknowledged(
    errors: list[dict[str, Any]],
) -> None:
    limit = SizeLimit()
    for _ in range(2):
        limit.note_acknowledged(9000)
        limit.note_missing("t", 9000)
    assert limit.refuses(9000) and len(errors) == 1
    limit.note_returned(9000)
    assert not limit.refuses(9000), "it came late"


def test_a_message_that_comes_back_was_not_dropped() -> None:
    limit = SizeLimit()
    limit.note_missing("t", 9000)
    limit.note_returned(9000)
    limit.note_missing("t", 9000)
    assert not limit.refuses(9000)


def test_a_refused_size_is_tried_again_after_pauses_that_double(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(size_limit.time, "monotonic", lambda: now)
    limit = SizeLimit()
    limit.note_end("t", 9000)
    for pause_s in (60.0, 120.0, 240.0):
        limit.note_end("t", 9000)
        now += pause_s - 1
        assert limit.refuses(9000)
        now += 1
        assert not limit.refuses(9000)
    limit.note_acknowledged(9000)
    limit.note_end("t", 9000)
    assert not limit.refuses(9000), "the broker takes this size"
