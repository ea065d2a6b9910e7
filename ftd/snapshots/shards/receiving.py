"""Pieces of parts on their way here, straight into memory; verified while more of them come."""

import asyncio
import re
from collections.abc import Mapping

from ftd.errors import PeerError
from ftd.snapshots.shards.protocol import DIGEST_HEADER
from ftd.snapshots.shards.sources import PartLocation, check_status
from storage.manifest import BLOCK_BYTES

_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)


class BlockTransfer:
    """A piece of what is wanted, and how much of it has come."""

    def __init__(self, place: PartLocation, first: int, into: memoryview) -> None:
        self.place, self.first, self.into = place, first, into
        self.received = 0
        self.news = asyncio.Event()
        """More can be verified than before."""
        self.hashed = False
        self.digest = ""
        """Of these bytes, as the node says that asks for it."""

    def answered(self, status: int, headers: Mapping[str, str]) -> None:
        source, part = self.place.source, self.place.part
        check_status(source, status, 206)
        first, last = self.first + self.received, self.first + len(self.into) - 1
        said = headers.get("content-length"), headers.get("content-range")
        if said != (str(last + 1 - first), f"bytes {first}-{last}/{part.size_bytes}"):
            raise PeerError(f"{source} answered bytes {first}-{last} with {said[1]} of length {said[0]}")
        digest = headers.get(DIGEST_HEADER.lower(), "")
        if self.hashed and not _DIGEST.fullmatch(digest):
            raise PeerError(f"{source} sent no digest with the bytes")
        if not self.received:
            self.digest = digest

    def rest(self) -> memoryview:
        return self.into[self.received :]

    def took(self, size_bytes: int) -> None:
        before, self.received = self.received, self.received + size_bytes
        if before // BLOCK_BYTES < self.received // BLOCK_BYTES or self.received == len(self.into):
            self.news.set()


async def verify(block: BlockTransfer) -> None:
    """The manifest's blocks that it consists of, as they come, while they are in the cache.

    :raises PeerError: one is not as it was written.
    """
    part, done = block.place.part, 0

    def sound(numbers: range) -> bool:
        runs = ((n, *part.block(n)) for n in numbers)
        return all(
            part.is_block_intact(n, block.into[low - block.first : high - block.first])
            for n, low, high in runs
        )

    while done < len(block.into):
        await block.news.wait()
        block.news.clear()
        end = block.received
        if end < len(block.into):
            end -= end % BLOCK_BYTES
        if end > done and not await asyncio.to_thread(
            sound, part.covering(block.first + done, block.first + end)
        ):
            raise other_bytes(block.place)
        done = end


def other_bytes(place: PartLocation) -> PeerError:
    return PeerError(f"{place.source} sent other bytes than were written as {place.part.name}")
