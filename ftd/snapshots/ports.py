"""The interfaces between a node's snapshots and what holds them, as small protocols.

``ftd.snapshots.storage`` implements them with files in memory, HTTP between nodes and checkpoints on a
disk; the simulator (``ftd.faults.sim``) with values in memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ftd.snapshots.restoring.holders import ReportCorruption
from ftd.snapshots.shards.arenas import Corruption
from statemachine.effects import SendSnapshotCopy
from statemachine.messages.cluster import Persist
from statemachine.messages.trainer import Instruction
from statemachine.messages.values import HeldSnapshot, LayerFile, LinkHealth, ReplicaPeer, Restore
from storage.rate_limit import RateLimiter


class TrainerControl(Protocol):
    """The trainers, which write the arenas of this node's own snapshots."""

    def pids(self, device: int | None) -> list[int]:
        """Return the running processes of one device or of all."""

    def send(self, device: int, frame: Instruction) -> bool:
        """Send a frame to the device's trainer and return whether there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptBlocks:
    """Blocks of a part that differ from what was written."""

    owner: str
    """For a copy, the node whose snapshot it is; empty for this node's own."""
    part: str
    blocks: tuple[int, ...]
    size_bytes: int
    """Bytes of these blocks."""


class StagingOperations(Protocol):
    """Reading layers of a snapshot or a checkpoint into directories for trainers."""

    @property
    def root(self) -> Path:
        """Directory that holds everything that is staged."""

    def make_staging(self, job_id: str, generation: int) -> Path:
        """Make an empty directory for layers on their way to the trainers, and remove an older one.

        :raises OSError: it cannot be made.
        :raises ValueError: the job's id cannot name a directory.
        """

    def remove_staging(self, job_id: str) -> None:
        """Remove the directory of a job's staged layers."""

    async def stage(
        self,
        restore: Restore,
        layers: Sequence[int],
        directory: Path,
        *,
        borrows: bool,
        on_layer: Callable[[int], None],
        on_staged: Callable[[], None],
        report_corruption: ReportCorruption,
    ) -> dict[str, int]:
        """Stage these layers, and return figures for the log.

        :param borrows: refer to bytes that this node's memory holds unchanged, instead of copying them.
        :param on_layer: called with each layer that is staged.
        :param on_staged: called when all of them are staged from a snapshot.
        :raises LayerRestoreError: they cannot be read.
        :raises OSError, ValueError: they cannot be staged.
        """


class CheckpointWriting(Protocol):
    """Writing layers of a snapshot into a persistent checkpoint."""

    async def write(
        self, order: Persist, description: bytes, flow: RateLimiter, report_corruption: ReportCorruption
    ) -> list[LayerFile]:
        """Write the layers of an order until done or cancelled.

        :param description: description of the job's model; empty: unknown.
        :raises Exception: they cannot be read or written.
        """


class ScrubOperations(Protocol):
    """Verifying and repairing what this node holds of a snapshot."""

    async def find_corrupt(self, snapshot: Restore, flow: RateLimiter) -> Sequence[CorruptBlocks]:
        """Read everything that is held, and return the blocks that differ from what was written.

        :raises OSError, ValueError, PeerError: the memory was removed with its job.
        """

    def is_held(self, snapshot: Restore, corrupt: CorruptBlocks) -> bool:
        """Return whether the snapshot of these blocks was not released meanwhile."""

    async def repair(self, snapshot: Restore, corrupt: CorruptBlocks) -> Sequence[str]:
        """Repair blocks from other nodes, and return the names of these nodes.

        :raises RepairError: they cannot be repaired.
        """


class SnapshotStorage(Protocol):
    """The memory of a node for snapshots: its own, and copies of other nodes' ones."""

    @property
    def staging(self) -> StagingOperations: ...

    @property
    def checkpoints(self) -> CheckpointWriting: ...

    @property
    def scrubbing(self) -> ScrubOperations: ...

    @property
    def root(self) -> Path:
        """Directory of the arenas."""

    @property
    def port(self) -> int:
        """Port on which other nodes read the snapshots."""

    @property
    def size_bytes(self) -> int:
        """Bytes that the arenas of all devices may take together."""

    @property
    def device_limit_bytes(self) -> int | None:
        """Limit of one device's arena."""

    def connect(self, trainers: TrainerControl, on_copies_changed: Callable[[], None]) -> None:
        """Take the trainers, and the function to call when other copies than before are held. Called first."""

    def metrics(self) -> dict[str, int]:
        """Return figures for metrics: bytes sent to other nodes, requests without the token, and the memory
        limit.
        """

    async def start(self) -> None:
        """Acquire the memory and serve it.

        :raises ConfigurationError: the directory, the limit or the port cannot be used.
        """

    async def close(self) -> None:
        """Stop serving. What is held stays."""

    def acquire(self) -> bool:
        """Return whether this daemon may use the memory; false while another daemon of its name runs here."""

    async def scan(self) -> tuple[tuple[HeldSnapshot, ...], list[Corruption]]:
        """Return what is complete and what is corrupt, before any trainer runs."""

    def directory(self, job_id: str, device: int) -> Path:
        """Return the directory of a device's arena.

        :raises ValueError: the job's id cannot name a directory.
        """

    def remove_others(self, job_id: str) -> None:
        """Remove what other jobs left."""

    async def remove(self, job_id: str) -> None:
        """Release the memory of a job that is over."""

    def has_data(self, snapshot: Restore | None, device: int | None) -> bool:
        """Return whether there is something for ``flip_bit`` to change."""

    def flip_bit(self, snapshot: Restore | None, device: int | None) -> None:
        """Flip a bit of this node's own part, or of one device's, as an injected fault."""

    # --- copies ----------------------------------------------------------------------------------

    def begin_copies(self, job_id: str) -> None:
        """Accept copies of this job's snapshots from now on."""

    def end_copies(self) -> None:
        """Accept no more copies."""

    def held_copies(self) -> tuple[HeldSnapshot, ...]:
        """Return the copies that are complete here."""

    def release_copies(self, job_id: str, step: int) -> None:
        """Release copies older than ``step``."""

    async def send_copy(self, order: SendSnapshotCopy) -> int:
        """Send this node's part of a snapshot to its replica peer, and return the bytes.

        :raises PeerError, OSError, ValueError: it cannot be sent.
        """

    async def check_links(self, peers: Sequence[ReplicaPeer]) -> tuple[LinkHealth, ...]:
        """Test the links to these nodes in bounded time, and return those that answered."""
