"""Tests of held-out data: which rows an evaluation reads, and when one is due."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data.held_out import HeldOutSampler


def held_out(length: int, **changes: int) -> HeldOutSampler:
    fields = {"global_batch": 16, "microbatch_rows": 4, "steps": 10, "every_steps": 3}
    return HeldOutSampler(dataset_length=length, **(fields | changes))


def test_evaluations_are_due_every_so_many_steps_and_at_the_end() -> None:
    assert [step for step in range(12) if held_out(40).is_due(step)] == [3, 6, 9, 10]
    assert not any(held_out(40, every_steps=0).is_due(step) for step in range(12))


@pytest.mark.parametrize(
    ("length", "most", "batches", "samples", "last"),
    [(37, 0, 3, 37, 1), (37, 2, 2, 32, 0), (32, 0, 2, 32, 0), (3, 0, 1, 3, 3), (37, 9, 3, 37, 1)],
)
def test_the_last_batch_ends_where_the_set_does(
    length: int, most: int, batches: int, samples: int, last: int
) -> None:
    found = held_out(length, max_batches=most)
    assert (found.batches, found.samples, found.last_microbatch_rows) == (batches, samples, last)


@given(st.integers(1, 100), st.integers(0, 5), st.integers(1, 5), st.integers(1, 5))
def test_every_sample_is_taken_once_and_in_order(
    length: int, most: int, rows: int, microbatches: int
) -> None:
    found = held_out(length, global_batch=rows * microbatches, microbatch_rows=rows, max_batches=most)
    indices: list[int] = []
    for batch in range(found.batches):
        for microbatch in range(microbatches):
            draws = found.draws(found.pseudo_step(batch), microbatch * rows, rows)
            assert len(draws) == found.rows(batch, microbatch)
            indices += [draw.index for draw in draws]
    assert indices == list(range(found.samples))
