"""The record of a job's steps: continued after a cut, complete after a full disk, correct after a rollback."""

import math
import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftd.observe.tracking.record import Cursor, JobRecord
from ftd.observe.tracking.rows import decode_row, encode_row
from tests.helpers.python_process import run_python
from tests.helpers.tracking_logs import evaluation, row


def read(record: JobRecord, after: Cursor | None = None) -> list[tuple[str, int, float]]:
    found = []
    cursor = after or Cursor()
    while rows := record.read_rows(cursor, 3):
        found += [(one.kind, one.step, one.details["loss"]) for one in rows]
        cursor = cursor.after(rows)
    return found


def test_a_row_is_a_flat_line_and_is_read_back_unchanged() -> None:
    for one in (row(3), evaluation(3)):
        assert decode_row(encode_row(one)) == one
    line = msgspec.json.decode(encode_row(row(3)))
    assert (line["kind"], line["step"], line["learning_rate"]) == ("step", 3, 0.03)


def test_the_duration_of_a_step_does_not_change_its_fingerprint() -> None:
    assert row(3).fingerprint == row(3, step_s=9.0, samples_per_s=None).fingerprint
    assert row(3).fingerprint != row(3, loss=9.0).fingerprint
    assert row(3).fingerprint != row(3, metrics={"accuracy": 0.5}).fingerprint


def test_the_plotted_numbers_of_a_step() -> None:
    scalars = row(2, loss_scale=1024.0, tokens_per_s=81920.0, mfu=0.4).scalars()
    assert scalars == {
        "train/loss": 0.5,
        "train/learning_rate": 0.02,
        "train/gradient_norm": 1.0,
        "train/samples_per_s": 320.0,
        "train/tokens_per_s": 81920.0,
        "train/mfu": 0.4,
        "train/step_s": 0.1,
        "train/loss_scale": 1024.0,
        "train/metrics/accuracy": 0.002,
    }
    assert "train/tokens_per_s" not in row(2).scalars()
    assert math.isnan(row(2, gradient_norm=None).scalars()["train/gradient_norm"])
    assert evaluation(2).scalars() == {"evaluation/loss": 3.0}


def test_a_record_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    record = JobRecord(path)
    assert (record.last_step, read(record)) == (0, [])
    record.append([row(1), row(2), evaluation(2), row(3)])
    record.close()
    record = JobRecord(path)
    assert (record.last_step, record.last_evaluation) == (3, 2)
    record.append([row(4)])
    assert read(record, Cursor(step=1)) == [
        ("step", 2, 0.5), ("evaluation", 2, 3.0), ("step", 3, 1 / 3), ("step", 4, 0.25)
    ]  # fmt: skip
    record.close()


def test_a_truncated_line_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    record = JobRecord(path)
    record.append([row(1), row(2)])
    record.close()
    whole = path.read_bytes()
    for size in range(len(encode_row(row(1))), len(whole)):
        path.write_bytes(whole[:size])
        record = JobRecord(path)
        assert record.last_step == 1
        record.append([row(2)])
        record.close()
        assert path.read_bytes() == whole


def test_superseded_rows_are_gone_after_a_restart_too(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    record = JobRecord(path)
    record.append([row(1), row(2), evaluation(2), row(3), row(4)])
    assert record.contradicts(row(3, loss=9.0)) and not record.contradicts(row(3))
    assert record.contradicts(evaluation(2, 4.0)) and not record.contradicts(evaluation(4, 4.0))
    record.supersede(2)
    assert (record.last_step, record.last_evaluation, record.superseded) == (1, 0, [2])
    record.append([row(2, loss=9.0)])
    record.close()
    record = JobRecord(path)
    assert record.superseded == [2]
    assert read(record) == [("step", 1, 1.0), ("step", 2, 9.0)]
    record.close()


def test_a_missing_step_leaves_a_gap(tmp_path: Path) -> None:
    record = JobRecord(tmp_path / "steps.jsonl")
    record.append([row(7), row(9)])
    assert record.last_step == 9
    assert read(record) == [("step", 7, 1 / 7), ("step", 9, 1 / 9)]
    assert not record.contradicts(row(8)) and not record.contradicts(row(6))
    record.supersede(9)
    assert record.last_step == 7
    record.close()


def test_a_sink_gets_past_more_missing_steps_than_it_reads_at_once(tmp_path: Path) -> None:
    record = JobRecord(tmp_path / "steps.jsonl")
    record.append([row(1), row(2)])
    record.append([row(9)])
    record.append([evaluation(9), row(10)])
    assert read(record, Cursor(step=2)) == [
        ("step", 9, 1 / 9), ("evaluation", 9, 3.0), ("step", 10, 0.1)
    ]  # fmt: skip
    record.close()


def test_a_full_disk_leaves_the_record_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = JobRecord(tmp_path / "steps.jsonl")
    record.append([row(1)])
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: real(file, data[: len(data) // 2], offset))
    for write in (lambda: record.append([row(2)]), lambda: record.supersede(1)):
        with pytest.raises(OSError, match="No space left"):
            write()
    monkeypatch.undo()
    record.append([row(2)])
    assert read(record) == [("step", 1, 1.0), ("step", 2, 0.5)]
    record.close()


def test_a_file_that_is_not_a_record_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for line in (b"[]\n", b'{"kind": "step"}\n', b"nonsense\n"):
        path.write_bytes(line)
        with pytest.raises(ValueError):
            JobRecord(path)
        assert path.read_bytes() == line


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("append"), st.integers(1, 5)),
            st.tuples(st.just("supersede"), st.integers(1, 30)),
            st.tuples(st.just("reopen"), st.just(0)),
        ),
        max_size=25,
    )
)
def test_a_record_always_has_the_last_value_of_each_step(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[str, int]]
) -> None:
    path = tmp_path_factory.mktemp("record") / "steps.jsonl"
    record, expected, version = JobRecord(path), dict[int, float](), 0.0
    for move, number in moves:
        version += 1
        if move == "append":
            new = range(record.last_step + 1, record.last_step + 1 + number)
            record.append([row(step, loss=version) for step in new])
            expected |= dict.fromkeys(new, version)
        elif move == "supersede":
            record.supersede(number)
            expected = {step: value for step, value in expected.items() if step < number}
        else:
            record.close()
            record = JobRecord(path)
        assert read(record) == [("step", step, value) for step, value in sorted(expected.items())]
    record.close()


READS_IN_THREADS = """
import importlib
from ftd.observe.tracking import rows
from tests.helpers.python_process import call_in_threads

line = b'{"kind": "step", "step": 1, "at": "", "generation": 1, "loss": 2.0}'
for _ in range(1000):
    importlib.reload(rows)  # for msgspec its type is new
    assert {row.step for row in call_in_threads(lambda: rows.decode_row(line))} == {1}
"""


@pytest.mark.processes
def test_sinks_may_read_their_first_rows_at_the_same_moment() -> None:
    """In a process of its own, which msgspec would end."""
    run_python(READS_IN_THREADS)
