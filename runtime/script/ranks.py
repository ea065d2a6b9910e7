"""The ranks of a script: who they are, and what they agree on."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from runtime.script.plain_state import SnapshotError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """``torch.distributed``'s ranks where it is initialised, else this process alone."""

    rank: int
    count: int
    is_initialized: bool
    """They can be asked: a process group is there."""

    @classmethod
    def current(cls) -> "Ranks":
        if dist.is_available() and dist.is_initialized():
            return cls(rank=dist.get_rank(), count=dist.get_world_size(), is_initialized=True)
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            count=int(os.environ.get("WORLD_SIZE", "1")),
            is_initialized=False,
        )

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Everybody's, by rank; each rank gives as many. Everybody must call it.

        :raises SnapshotError: this is one of several ranks, and they cannot be asked yet.
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
        """Everybody's, by rank, of any lengths. Everybody must call it.

        :raises SnapshotError: see ``gather``.
        """
        lengths = [row[0] for row in self.gather([len(data)])]
        words = -(-max(lengths) // 8)
        padded = data.ljust(8 * words, b"\0")
        numbers = [int.from_bytes(padded[i : i + 8], "little", signed=True) for i in range(0, 8 * words, 8)]
        rows = self.gather(numbers)
        whole = [b"".join(n.to_bytes(8, "little", signed=True) for n in row) for row in rows]
        return [some[:length] for some, length in zip(whole, lengths, strict=True)]

    def all_true(self, flag: bool) -> bool:
        """Whether it is so on every rank. Everybody must call it."""
        return all(row[0] for row in self.gather([int(flag)]))


def directory_id(directory: Path) -> int:
    """Equal on ranks that see the same directory: those of one host, where it is in memory."""
    found = directory.stat()
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = f"{boot.read_text() if boot.exists() else ''}:{found.st_dev}:{found.st_ino}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
