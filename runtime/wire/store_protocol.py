"""What trainers and the rendezvous server say to each other. No torch in here.

A key–value store, one name space per generation, that the process groups of a generation are formed
through. Plain TCP with frames as in ``runtime.wire.frames``; the first must be a StoreHello with the proof
that whoever says it knows the secret. It is good for one generation: heard on the wire, or told to a server
that is not ours, it opens no other.
"""

import hashlib
import hmac

from runtime.wire.frames import Frame


class StoreHello(Frame, frozen=True, kw_only=True):
    proof: str
    """``make_proof``."""
    generation: int
    rank: int


class StoreSet(Frame, frozen=True, kw_only=True):
    key: str
    value: bytes


class StoreAdd(Frame, frozen=True, kw_only=True):
    """Adds to the decimal number under ``key`` (0 when absent); answered with the sum."""

    key: str
    amount: int


class StoreGet(Frame, frozen=True, kw_only=True):
    """Answered when all ``keys`` exist, in their order, or with ``StoreRejected`` after ``timeout_s``."""

    keys: tuple[str, ...]
    timeout_s: float


class StoreCheck(Frame, frozen=True, kw_only=True):
    """Answered at once with one value: ``b"1"`` if all keys exist, else ``b"0"``."""

    keys: tuple[str, ...]


class StoreDelete(Frame, frozen=True, kw_only=True):
    """Answered with ``b"1"`` if the key was there, else ``b"0"``."""

    key: str


class StoreValues(Frame, frozen=True, kw_only=True):
    values: tuple[bytes, ...]


class StoreRejected(Frame, frozen=True, kw_only=True):
    reason: str


StoreRequest = StoreHello | StoreSet | StoreAdd | StoreGet | StoreCheck | StoreDelete
StoreReply = StoreValues | StoreRejected
"""StoreHello and StoreSet are answered with empty ``StoreValues``."""

MAX_STORE_FRAME_BYTES = 1024 * 1024
MAX_HELLO_BYTES = 1024
"""Of a StoreHello: no more is kept of somebody who has not proved anything."""


def secret_fingerprint(secret: str) -> str:
    """By which those who have the same secret know each other beforehand; opens nothing."""
    return hmac.new(secret.encode(), b"ftd mark 1", hashlib.sha256).hexdigest()[:16]


def make_proof(secret: str, generation: int) -> str:
    """That one knows the secret, for one generation; says nothing of the secret."""
    return hmac.new(secret.encode(), b"ftd rendezvous 1 %d" % generation, hashlib.sha256).hexdigest()
