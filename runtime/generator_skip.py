"""Skips values of torch's CPU generator in a time that hardly depends on their number.

The generator is the Mersenne Twister MT19937 (M. Matsumoto, T. Nishimura, "Mersenne Twister: a
623-dimensionally equidistributed uniform pseudo-random number generator", 1998). Its words of 32 bits obey a
linear recurrence over GF(2) with the characteristic polynomial φ of degree 19937 (section 3.1 and appendix of
the paper). So the state J words later is a sum of the next 19937 states, and the coefficients of t^J mod φ say
of which ones (H. Haramoto et al., "Efficient jump ahead for F2-linear random number generators", 2008).

Polynomials over GF(2) are integers, whose bit i is the coefficient of t^i.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

_Words = np.ndarray[tuple[int], np.dtype[np.uint32]]
_WORDS = 624
_MIDDLE = 397
_UPPER, _LOWER = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)
_MATRIX = 0x9908B0DF
_DEGREE = 19937
_FEW = 1 << 20
"""Number of values that are drawn rather than skipped, because that is quicker."""
FEWEST_VALUES = 16
"""Number of values from which torch draws by the rules of ``draws_of``."""
_LEFT, _NEXT, _STATE = slice(8, 12), slice(16, 24), slice(24, 24 + 8 * _WORDS)
"""Bytes of ``torch.Generator.get_state()``: words left before the next twist plus one (int32), index of the next
word (int64), and the words (int64 each).
"""
_TRIED = (1248, 1250, 1270)
"""Numbers of values for which ``draws_of`` compares states: a multiple of 16, and others."""
_RULES: tuple[Callable[[int], int], ...] = (
    lambda count: count,
    lambda count: (
        count + (16 if count % 16 else 0)
    ),  # Normal values are made in groups of 16, the last ones again.
    lambda count: -(-count // 16) * 16,
    lambda count: 2 * count,
    lambda count: 2 * count + (32 if count % 16 else 0),
)
"""Number of values → words drawn for them; a value of float64 takes two words."""


def skip(state: Tensor, draws: int) -> Tensor:
    """Return the generator's state after ``draws`` further words of 32 bits.

    :param state: as ``torch.Generator.get_state`` returns it.
    """
    if draws <= _FEW:
        return _after("random_", torch.uint8, state, draws)  # It draws one word for each value.
    return _jump(state, draws)


def draws_of(kind: str, dtype: torch.dtype, count: int) -> int | None:
    """Return how many words torch draws to fill contiguous memory of ``count`` values, at least
    ``FEWEST_VALUES``. ``None``: that follows no known rule.

    :param kind: ``normal_`` or ``uniform_``.
    """
    rule = _rule(kind, dtype)
    return None if rule is None else rule(count)


def marked(state: Tensor, mark: int) -> Tensor:
    """Return another state of the same seed.

    :param mark: a number other than 0, of 32 bits; each gives a state of its own.
    """
    made = state.numpy().copy()
    made[_STATE].view(np.int64)[1] ^= mark
    return torch.from_numpy(made)


@cache
def _rule(kind: str, dtype: torch.dtype) -> Callable[[int], int] | None:
    """Find the rule by a comparison of states, which also shows whether this version of torch keeps the state as
    ``skip`` expects it.
    """
    start = torch.Generator().manual_seed(1).get_state()
    reached = {count: _after(kind, dtype, start, count) for count in _TRIED}
    for rule in _RULES:
        if all(torch.equal(state, _jump(start, rule(count))) for count, state in reached.items()):
            return rule
    return None


def _after(kind: str, dtype: torch.dtype, state: Tensor, count: int) -> Tensor:
    """Return the generator's state after ``count`` values were drawn."""
    generator = torch.Generator()
    generator.set_state(state)
    getattr(torch.empty(count, dtype=dtype), kind)(generator=generator)
    return generator.get_state()


def _jump(state: Tensor, draws: int) -> Tensor:
    """Do what ``skip`` does without drawing, for more words than a state has."""
    made = state.numpy().copy()
    used = _WORDS + 1 - int(made[_LEFT].view(np.int32)[0])
    twists, position = divmod(used + draws - 1, _WORDS)
    position += 1
    words = made[_STATE].view(np.int64)
    # Every bit of the words after a twist obeys the recurrence; the lower bits of a seed's first word do not.
    first = _following(words.astype(np.uint32), _WORDS)[_WORDS:]
    words[:] = _jumped(first, _WORDS * (twists - 1))
    made[_LEFT].view(np.int32)[0] = _WORDS + 1 - position
    made[_NEXT].view(np.int64)[0] = position
    return torch.from_numpy(made)


def _jumped(words: _Words, count: int) -> _Words:
    """Return the state ``count`` words after the state ``words``."""
    polynomial = _power(count)
    chosen = np.flatnonzero(
        np.unpackbits(
            np.frombuffer(polynomial.to_bytes(_DEGREE // 8 + 1, "little"), np.uint8), bitorder="little"
        )
    )
    states = np.lib.stride_tricks.sliding_window_view(_following(words, _DEGREE), _WORDS)
    result = np.zeros(_WORDS, np.uint32)
    for some in np.array_split(chosen, 16):
        result ^= np.bitwise_xor.reduce(states[some], axis=0)
    return result


def _following(words: _Words, count: int) -> _Words:
    """Return a state and the ``count`` words after it."""
    made = np.concatenate([words, np.zeros(count, np.uint32)])
    step = _WORDS - _MIDDLE
    for start in range(0, count, step):
        size = min(step, count - start)
        low = made[start + 1 : start + 1 + size]
        mixed = (made[start : start + size] & _UPPER) | (low & _LOWER)
        made[start + _WORDS : start + _WORDS + size] = (
            made[start + _MIDDLE : start + _MIDDLE + size] ^ (mixed >> 1) ^ ((low & 1) * np.uint32(_MATRIX))
        )
    return made


@cache
def _characteristic_polynomial() -> int:
    """Return φ without its leading term, from the formula in the appendix of the paper (w = 32, r = 31)."""
    whole = (_WORDS, _MIDDLE)
    shorter = (_WORDS - 1, _MIDDLE - 1)
    powers = [1]
    for _ in range(31):
        powers.append(_times(powers[-1], shorter))
    found = _times(powers[31], whole) ^ (_MATRIX >> 31)
    for bit in range(31):
        if _MATRIX >> bit & 1:
            found ^= _times(powers[30 - bit], whole)
    return found ^ (1 << _DEGREE)


@cache
def _power(exponent: int) -> int:
    """Return t^exponent mod φ."""
    result = 1
    for bit in f"{exponent:b}":
        result = _reduced(int(f"{result:b}", 4) << int(bit))  # A square has zeros between the bits.
    return result


@cache
def _lower_terms() -> tuple[int, ...]:
    """Return the exponents of φ but for the largest."""
    bits = f"{_characteristic_polynomial():b}"[::-1]
    return tuple(exponent for exponent, bit in enumerate(bits) if bit == "1")


def _reduced(polynomial: int) -> int:
    """Return the remainder of the division by φ."""
    terms = _lower_terms()
    at_once = _DEGREE - terms[-1]
    while (size := polynomial.bit_length()) > _DEGREE:
        shift = max(size - at_once, _DEGREE)
        top = polynomial >> shift
        polynomial ^= (top << shift) ^ (_times(top, terms) << (shift - _DEGREE))
    return polynomial


def _times(polynomial: int, terms: tuple[int, ...]) -> int:
    """Return the product with the polynomial that has these exponents."""
    product = 0
    for exponent in terms:
        product ^= polynomial << exponent
    return product
