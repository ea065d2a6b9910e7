"""Tests of skipping values of torch's generator: the state is the one after drawing them."""

import pytest
import torch
from torch import Tensor

from runtime import generator_skip
from runtime.generator_skip import draws_of, marked, skip


def after(state: Tensor, words: int) -> Tensor:
    generator = torch.Generator()
    generator.set_state(state)
    torch.empty(words, dtype=torch.uint8).random_(generator=generator)
    return generator.get_state()


def started(words: int) -> Tensor:
    """Return a state in the middle of a block of words, with one normal value in reserve."""
    generator = torch.Generator().manual_seed(5)
    torch.empty(1).normal_(generator=generator)
    return after(generator.get_state(), words)


@pytest.mark.parametrize("used", (0, 1, 621, 622, 623, 624, 1000))
@pytest.mark.parametrize("words", (0, 1, 623, 624, 625, 4992, 1_000_000, 2_000_001))
def test_the_state_is_the_one_after_drawing(used: int, words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    state = started(used)
    wanted = after(state, words)
    assert torch.equal(skip(state, words), wanted)
    monkeypatch.setattr(generator_skip, "_FEW", 624)
    assert torch.equal(skip(state, words), wanted)


def test_a_fresh_seed_is_skipped_from_as_well() -> None:
    state = torch.Generator().manual_seed(2**40 + 1).get_state()
    assert torch.equal(skip(state, 3_000_000), after(state, 3_000_000))


def test_long_distances_add_up() -> None:
    """They are too long to be drawn, but two of them in a row must lead to where their sum leads."""
    state, one, other = started(17), 68_000_000_123, 7_777_777_777_777
    there = skip(skip(state, one), other)
    assert torch.equal(there, skip(state, one + other))
    assert not torch.equal(there, skip(state, one + other + 1))
    assert torch.equal(skip(there, 5), skip(state, one + other + 5))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("kind", ("normal_", "uniform_"))
@pytest.mark.parametrize("count", (16, 17, 31, 4096, 70_001))
def test_the_number_of_words_is_known(kind: str, dtype: torch.dtype, count: int) -> None:
    generator = torch.Generator().manual_seed(9)
    words = draws_of(kind, dtype, count)
    assert words is not None
    wanted = after(generator.get_state(), words)
    getattr(torch.empty(count, dtype=dtype), kind)(generator=generator)
    assert torch.equal(generator.get_state(), wanted)


def test_a_rule_that_does_not_fit_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as in a version of torch that draws otherwise."""
    monkeypatch.setattr(generator_skip, "_RULES", (lambda count: count + 1, lambda count: 3 * count))
    generator_skip._rule.cache_clear()
    try:
        assert draws_of("normal_", torch.float32, 4096) is None
    finally:
        generator_skip._rule.cache_clear()


def test_a_marked_state_differs_and_has_the_seed() -> None:
    generator = torch.Generator().manual_seed(11)
    state = generator.get_state()
    generator.set_state(marked(state, 77))
    assert not torch.equal(generator.get_state(), state)
    assert torch.equal(generator.get_state(), marked(state, 77))
    assert generator.initial_seed() == 11
