"""Tests of sampling: a pure function of (seed, step) that uses every sample exactly once per epoch."""

import itertools
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data.sampling import Sampler, sample_indices


@given(st.integers(1, 60), st.integers(1, 25), st.integers(0, 2**40))
def test_the_stream_of_steps_is_one_permutation_after_the_other(length: int, batch: int, seed: int) -> None:
    sampler = Sampler(length, batch, seed)
    steps = 3 * length // batch + 1
    stream = [index for step in range(1, steps + 1) for index in sampler.indices(step)]
    assert len(stream) == steps * batch
    for first in range(0, len(stream) - length + 1, length):
        assert sorted(stream[first : first + length]) == list(range(length))
    counts = Counter(stream)
    assert max(counts.values()) - min(counts[i] for i in range(length)) <= 1


def test_a_batch_larger_than_the_data_set_takes_whole_epochs() -> None:
    counts = Counter(Sampler(4, 12, 0).indices(1))
    assert counts == {0: 3, 1: 3, 2: 3, 3: 3}


def test_a_step_does_not_depend_on_the_steps_before() -> None:
    assert Sampler(1000, 32, 7).indices(500) == Sampler(1000, 32, 7).indices(500)
    sampler = Sampler(1000, 32, 7)
    in_order = [sampler.indices(step) for step in range(1, 40)]
    assert [Sampler(1000, 32, 7).indices(step) for step in reversed(range(1, 40))] == in_order[::-1]


def test_the_indices_never_change_between_versions() -> None:
    assert Sampler(1000, 6, 7).indices(1) == GOLDEN


def test_seeds_and_epochs_differ_and_look_shuffled() -> None:
    one, other = Sampler(1000, 1000, 1), Sampler(1000, 1000, 2)
    assert one.indices(1) != one.indices(2) != other.indices(2)
    indices = one.indices(1)
    fixed = sum(position == index for position, index in enumerate(indices))
    neighbours = sum(abs(a - b) == 1 for a, b in itertools.pairwise(indices))
    assert fixed < 8
    assert neighbours < 12


def test_a_huge_data_set_needs_no_memory() -> None:
    indices = Sampler(10**12, 64, 1).indices(10**9)
    assert len(set(indices)) == 64
    assert all(0 <= index < 10**12 for index in indices)


@given(st.integers(1, 30), st.integers(1, 25), st.integers(1, 40), st.data())
def test_any_rows_of_a_step_are_found_by_themselves(
    length: int, batch: int, step: int, data: st.DataObject
) -> None:
    sampler = Sampler(length, batch, 3)
    first = data.draw(st.integers(0, batch))
    rows = data.draw(st.integers(0, batch - first))
    draws = sampler.draws(step, first, rows)
    assert [draw.index for draw in draws] == sampler.indices(step)[first : first + rows]
    assert [draw.epoch for draw in draws] == [
        ((step - 1) * batch + row) // length for row in range(first, first + rows)
    ]


def test_rows_beyond_the_batch_are_rejected() -> None:
    with pytest.raises(ValueError, match="rows 3 to 5 of a batch of 4"):
        Sampler(40, 4, 0).draws(1, 3, 2)


def test_scripts_get_the_indices_of_a_step_without_torch() -> None:
    code = (
        "import sys; from ftd import sample_indices; "
        "print(*sample_indices(1000, 6, seed=7, step=1)); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [int(word) for word in done.stdout.split()] == GOLDEN


def test_a_batch_that_is_left_out_moves_the_later_ones_to_earlier_steps() -> None:
    batches = [sample_indices(1000, 6, 7, step) for step in range(1, 7)]
    left_out = [sample_indices(1000, 6, 7, step, skipped_batches=(4, 2)) for step in range(1, 5)]
    assert left_out == [batches[0], batches[2], batches[4], batches[5]]


@pytest.mark.parametrize(("length", "batch"), [(0, 1), (1, 0)])
def test_an_empty_data_set_or_batch_is_rejected(length: int, batch: int) -> None:
    with pytest.raises(ValueError, match="samples for a global batch"):
        Sampler(length, batch, 0)


def test_steps_are_counted_from_one() -> None:
    with pytest.raises(ValueError, match="from 1"):
        Sampler(4, 2, 0).indices(0)


GOLDEN = [866, 772, 535, 89, 95, 338]
