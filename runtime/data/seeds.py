"""Seeds of random streams. No torch: whoever computes the indices of a step needs nothing but numpy."""

import struct
from hashlib import blake2b


def stream_seed(*key: int) -> int:
    """Return a 63-bit seed for a tuple of integers; close keys give unrelated seeds."""
    digest = blake2b(struct.pack(f"<{len(key)}q", *key), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
