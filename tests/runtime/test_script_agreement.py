"""The agreement of a script's ranks on what they restore, without processes: each rank is a thread."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from runtime.script.protection import RestorableSnapshot, ScriptProtection
from runtime.script.ranks import Ranks
from runtime.wire.snapshot_agent_protocol import RankSnapshotLayout, SnapshotKey

Agreed = tuple[list[RestorableSnapshot], list[str]]


@dataclass
class Meeting:
    """The ranks of a job, of which each one is a thread."""

    count: int

    def __post_init__(self) -> None:
        self._barrier, self._rows = threading.Barrier(self.count), [b""] * self.count

    def gather_bytes(self, rank: int, data: bytes) -> list[bytes]:
        self._rows[rank] = data
        self._barrier.wait(60)
        rows = list(self._rows)
        self._barrier.wait(60)
        return rows

    def of_all(self, work: Callable[[Ranks], Agreed]) -> list[Agreed]:
        with ThreadPoolExecutor(self.count) as threads:
            ranks = [Member(self, rank, self.count) for rank in range(self.count)]
            return list(threads.map(work, cast(list[Ranks], ranks)))


@dataclass
class Member:
    meeting: Meeting
    rank: int
    count: int

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return self.meeting.gather_bytes(self.rank, data)


def layout(rank: int, ranks: int) -> RankSnapshotLayout:
    return RankSnapshotLayout(rank=rank, ranks=ranks, own_bytes=64)


def agree(
    place: Path, steps: list[list[int]], *, saved_by: int, started: list[bool], unfit: str = ""
) -> list[Agreed]:
    """Return what each rank learns if rank r holds the snapshots of ``steps[r]``."""

    def meet(ranks: Ranks) -> Agreed:
        own: list[tuple[SnapshotKey, RankSnapshotLayout]] = [
            ((5, step), layout(ranks.rank, saved_by)) for step in steps[ranks.rank]
        ]
        protection = ScriptProtection("job", "none", None, None)
        problems = [unfit] if unfit and ranks.rank == 0 else []
        return protection.agree(ranks, place, own, 5, "", started=started[ranks.rank], unfit=problems)

    return Meeting(len(steps)).of_all(meet)


@pytest.mark.parametrize(
    ("steps", "started", "unfit", "found", "why_not"),
    [
        ([[], []], [False, False], "", [], []),  # the first start
        ([[4, 3], [3]], [True, True], "", [3], []),
        ([[1], []], [True, True], "", [], []),  # killed while the first snapshot was written
        ([[1], []], [True, False], "", [], ["step 1: the own state of rank 1 is lost"]),
        ([[], []], [True, True], "step 1: corrupt", [], ["step 1: corrupt"]),
    ],
)
def test_all_ranks_learn_what_can_be_restored_and_why_the_rest_cannot(
    tmp_path: Path,
    steps: list[list[int]],
    started: list[bool],
    unfit: str,
    found: list[int],
    why_not: list[str],
) -> None:
    for candidates, reasons in agree(tmp_path, steps, saved_by=2, started=started, unfit=unfit):
        assert [one.key[1] for one in candidates] == found
        assert [why for why in reasons if "step 4" not in why] == why_not
