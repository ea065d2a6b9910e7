"""Receiving blocks of parts straight into memory, verified while more of them arrive."""

import asyncio
import re
from collections.abc import Mapping

from ftd.errors import PeerError
from ftd.snapshots.shards.protocol import DIGEST_HEADER
from ftd.snapshots.shards.sources import PartLocation, check_status
from storage.manifest import BLOCK_BYTES

_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)


class BlockTransfer:
    """A requested block, and how much of it has arrived."""

    def __init__(self, place: PartLocation, first: int, into: memoryview) -> None:
        self.location, self.first, self.into = place, first, into
        self.received = 0
        self.progress = asyncio.Event()
        """Event that is set when more bytes can be verified than before."""
        self.hashed = False
        self.digest = ""
        """Digest of these bytes as the server computed it, if one was requested."""

    def check_head(self, status: int, headers: Mapping[str, str]) -> None:
        """Check the head of an answer.

        :param headers: values by name in lower case.
        :raises PeerError, SourceBusy: the answer is not acceptable.
        """
        source, part = self.location.source, self.location.part
        check_status(source, status, 206)
        first, last = self.first + self.received, self.first + len(self.into) - 1
        lengths = headers.get("content-length"), headers.get("content-range")
        if lengths != (str(last + 1 - first), f"bytes {first}-{last}/{part.size_bytes}"):
            raise PeerError(
                f"{source} answered bytes {first}-{last} with {lengths[1]} of length {lengths[0]}"
            )
        digest = headers.get(DIGEST_HEADER.lower(), "")
        if self.hashed and not _DIGEST.fullmatch(digest):
            raise PeerError(f"{source} sent no digest with the bytes")
        if not self.received:
            self.digest = digest

    def buffer(self) -> memoryview:
        """Return the memory for the next bytes; empty when all have arrived."""
        return self.into[self.received :]

    def advance(self, size_bytes: int) -> None:
        """Note that this number of bytes was written there."""
        before, self.received = self.received, self.received + size_bytes
        if before // BLOCK_BYTES < self.received // BLOCK_BYTES or self.received == len(self.into):
            self.progress.set()


async def verify(block: BlockTransfer) -> None:
    """Verify the manifest's blocks within ``block`` as they arrive, while they are in the cache.

    :raises PeerError: a block differs from what was written.
    """
    part, done = block.location.part, 0

    def sound(numbers: range) -> bool:
        runs = ((n, *part.block(n)) for n in numbers)
        return all(
            part.is_block_intact(n, block.into[low - block.first : high - block.first])
            for n, low, high in runs
        )

    while done < len(block.into):
        await block.progress.wait()
        block.progress.clear()
        end = block.received
        if end < len(block.into):
            end -= end % BLOCK_BYTES
        if end > done and not await asyncio.to_thread(
            sound, part.blocks_covering(block.first + done, block.first + end)
        ):
            raise corrupt_answer_error(block.location)
        done = end


def corrupt_answer_error(place: PartLocation) -> PeerError:
    return PeerError(f"{place.source} sent bytes that differ from what was written as {place.part.name}")
