"""The protocol between trainers and the rendezvous server. The module does not import torch.

The server is a key–value store with one name space per generation, through which the process groups of a
generation are formed. Frames of ``runtime.wire.frames`` travel over plain TCP. The first one must be a
StoreHello, which proves that the sender knows the secret. A proof is valid for one generation: whoever
overhears it, or receives it in place of our server, cannot use it for another.
"""

import hashlib
import hmac

from runtime.wire.frames import Frame


class StoreHello(Frame, frozen=True, kw_only=True):
    """The first message: it proves that the sender knows the secret."""

    proof: str
    """Result of ``make_proof``."""
    generation: int
    rank: int


class StoreSet(Frame, frozen=True, kw_only=True):
    """Set the value of a key."""

    key: str
    value: bytes


class StoreAdd(Frame, frozen=True, kw_only=True):
    """Add to the decimal number under ``key`` (0 if absent); answered with the sum."""

    key: str
    amount: int


class StoreGet(Frame, frozen=True, kw_only=True):
    """Wait for values. It is answered when all ``keys`` exist, in their order, or with ``StoreRejected`` after
    ``timeout_s``.
    """

    keys: tuple[str, ...]
    timeout_s: float


class StoreCheck(Frame, frozen=True, kw_only=True):
    """Ask whether all keys exist. It is answered at once with ``b"1"`` or ``b"0"``."""

    keys: tuple[str, ...]


class StoreDelete(Frame, frozen=True, kw_only=True):
    """Delete a key. It is answered with ``b"1"`` if the key existed, else ``b"0"``."""

    key: str


class StoreValues(Frame, frozen=True, kw_only=True):
    """The values that were requested."""

    values: tuple[bytes, ...]


class StoreRejected(Frame, frozen=True, kw_only=True):
    """The request could not be answered."""

    reason: str


StoreRequest = StoreHello | StoreSet | StoreAdd | StoreGet | StoreCheck | StoreDelete
StoreReply = StoreValues | StoreRejected
"""The answers to requests. Those to StoreHello and StoreSet are empty ``StoreValues``."""

MAX_STORE_FRAME_BYTES = 1024 * 1024
MAX_HELLO_BYTES = 1024
"""Maximum size of a StoreHello. This is all that is read from a sender that has not proved anything."""


def secret_fingerprint(secret: str) -> str:
    """Return a mark by which holders of the same secret recognise each other; it grants no access."""
    return hmac.new(secret.encode(), b"ftd mark 1", hashlib.sha256).hexdigest()[:16]


def make_proof(secret: str, generation: int) -> str:
    """Return the proof that the sender knows the secret, for one generation; it does not reveal the secret."""
    return hmac.new(secret.encode(), b"ftd rendezvous 1 %d" % generation, hashlib.sha256).hexdigest()
