"""Makes valid messages invalid, by random numbers from a seed, so that a failure can be repeated."""

import random
from collections.abc import Callable, Iterator
from typing import Any

EXTREMES: tuple[Any, ...] = (
    0, -1, 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 1.5, 1e308, float("nan"), float("inf"),
    "", "x", "..", "../../etc/passwd", "a/b", "+", "#", "\x00", "é" * 70, "x" * 5000, b"", b"\xff\xfe" * 20,
    True, None, [], {}, [[]], {"": {}},
)  # fmt: skip
BYTES = (0x00, 0x7F, 0x80, 0xC1, 0xD9, 0xDF, 0xFF, ord("["), ord("{"), ord('"'))
DEEP = 3000


def seeded(seed: int, count: int) -> Iterator[random.Random]:
    """Yield this many random generators; each is seeded with its own number, so that one can be replayed
    alone.
    """
    for number in range(count):
        yield random.Random(f"{seed}/{number}")


def garbled(rng: random.Random, payload: bytes) -> bytes:
    """Return the bytes of a message with bits flipped, and with parts cut off, repeated or inserted."""
    data = bytearray(payload)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = bytes(rng.choice(BYTES) for _ in range(rng.randrange(1, 9)))
            case 3:
                end = rng.randrange(at, len(data) + 1)
                data[at:at] = data[at:end]
            case 4 if data:
                data[at % len(data)] = rng.choice(BYTES)
            case _:
                del data[at : at + rng.randrange(1, 9)]
    return bytes(data)


def twisted(rng: random.Random, value: Any) -> Any:
    """Return plain data in which one value, name or branch is changed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                return {other: value[other] for other in value if other != name}
            case 1:
                return {**value, rng.choice(("x", "", "type", "do")): rng.choice(EXTREMES)}
            case _:
                return {**value, name: twisted(rng, value[name])}
    if isinstance(value, (list, tuple)) and value and rng.random() < 0.9:
        number = rng.randrange(len(value))
        match rng.randrange(6):
            case 0:
                return [*value[:number], *value[number + 1 :]]
            case 1:
                return [*value, *value]
            case _:
                return [*value[:number], twisted(rng, value[number]), *value[number + 1 :]]
    # Half of the values keep the type, so that they pass the codec.
    alike = [other for other in EXTREMES if type(other) is type(value)]
    return rng.choice(alike if alike and rng.random() < 0.5 else EXTREMES)


def deep(opening: bytes, closing: bytes = b"") -> bytes:
    """Return data that is nested deeper than any of our decoders may follow."""
    return opening * DEEP + closing * DEEP


def survives(feed: Callable[[bytes], object], payload: bytes, allowed: tuple[type[Exception], ...]) -> bool:
    """Return whether ``feed`` accepted the payload. Fail the test if it raised anything but an allowed
    exception.
    """
    try:
        feed(payload)
    except allowed:
        return False
    except Exception as error:
        raise AssertionError(f"{type(error).__name__}: {error}\nby {payload[:600]!r}") from error
    return True
