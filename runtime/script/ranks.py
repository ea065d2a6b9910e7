"""The ranks of a script, and the collectives by which they agree."""

import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from runtime.script.plain_state import SnapshotError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks of ``torch.distributed`` where it is initialised, otherwise those that torchrun's environment
    names.
    """

    rank: int
    count: int
    is_initialized: bool
    """Whether there is a process group, so that ranks can communicate."""

    @classmethod
    def current(cls) -> "Ranks":
        """Return the present ranks."""
        if dist.is_available() and dist.is_initialized():
            return cls(rank=dist.get_rank(), count=dist.get_world_size(), is_initialized=True)
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            count=int(os.environ.get("WORLD_SIZE", "1")),
            is_initialized=False,
        )

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of every rank, by rank. All ranks call it, with equally many numbers.

        :raises SnapshotError: there are several ranks, but no process group yet.
        """
        if self.count == 1:
            return [list(numbers)]
        if not self.is_initialized:
            raise SnapshotError(
                f"this is rank {self.rank} of {self.count}, and torch.distributed is not initialised: call "
                "restore() after init_process_group(), so that all ranks agree on a step"
            )
        device = "cpu" if "gloo" in str(dist.get_backend_config()) else "cuda"
        mine = torch.tensor(numbers, dtype=torch.int64, device=device)
        rows = [torch.empty_like(mine) for _ in range(self.count)]
        dist.all_gather(rows, mine)
        return [[int(number) for number in row] for row in rows]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, by rank; lengths may differ. All ranks call it.

        :raises SnapshotError: see ``gather``.
        """
        lengths = [row[0] for row in self.gather([len(data)])]
        words = -(-max(lengths) // 8)
        numbers = struct.Struct(f"<{words}q")
        rows = self.gather(numbers.unpack(data.ljust(numbers.size, b"\0")))
        return [numbers.pack(*row)[:length] for row, length in zip(rows, lengths, strict=True)]

    def first_problem(self, problem: str) -> str:
        """Return the problem of the first rank that has one; empty if none has. All ranks call it."""
        rows = self.gather_bytes(msgspec.msgpack.encode(problem))
        problems = [msgspec.msgpack.decode(row, type=str) for row in rows]
        return next(
            (f"rank {rank}: {one}" if self.count > 1 else one for rank, one in enumerate(problems) if one), ""
        )


def directory_id(directory: Path) -> int:
    """Return a number that is equal on ranks which see the same directory: in memory, those of one host."""
    found = directory.stat()
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = f"{boot.read_text() if boot.exists() else ''}:{found.st_dev}:{found.st_ino}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
