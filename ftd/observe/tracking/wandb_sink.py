"""Logs to Weights & Biases, online or as files for ``wandb sync``.

W&B accepts the steps of a run only in rising order, so superseded values cannot be taken back. After a
rollback, the run is ended and a new run of the same group with the whole valid history takes its place.
Offline, every writer makes a directory of its own under the same run id. The sink reads from the files of
earlier writers which steps they contain, because W&B buffers the newest steps in memory and may lose them. W&B's
service process outlives a killed writer and still writes what it had received, so the sink waits until it ends.
"""

import logging
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import wandb
from wandb.proto import wandb_internal_pb2 as protocol

from ftd.observe.tracking.record import Cursor
from ftd.observe.tracking.rows import LoggedRow
from statemachine.messages.values import WandbPolicy

_log = logging.getLogger(__name__)

_SERVICE_END_S = 30.0
"""Seconds for which the service process of a killed writer is awaited; it ends within one after the writer."""
_BLOCK = 32768
_MAGIC = 7
_HEADER = struct.Struct("<IHB")
"""Checksum, length and kind of a fragment (1 whole, 2 first, 3 middle, 4 last)."""


class WandbSink:
    """A run in Weights & Biases."""

    def __init__(self, policy: WandbPolicy, directory: Path, run: str, config: Mapping[str, Any]) -> None:
        """:param directory: parent of the directory ``wandb`` that W&B creates.
        :param run: the job's id.
        :param config: the job's parameters, shown with the run.
        """
        self._policy, self._directory, self._job, self._config = policy, directory, run, config
        self._run: Any = None
        self._step = 0
        """The current step of the W&B run, which rejects earlier ones."""

    def reopen(self, superseded: Sequence[int]) -> Cursor:
        """See ``TrackingSink``."""
        self.close(None)
        offline = self._policy.mode == "offline"
        number = len(superseded)
        identity = f"{self._job}-{number}" if number else self._job
        cursor = Cursor()
        if offline:
            files = sorted(self._directory.glob(f"wandb/offline-run-*-{identity}/*.wandb"))
            _wait_until_written(files)
            for path in files:
                cursor = _advance(path, cursor)
            # W&B names directories by the second and would overwrite files in an existing one.
            taken = {path.parent.name.split("-")[2] for path in files}
            while time.strftime("%Y%m%d_%H%M%S") in taken:
                time.sleep(0.05)
        self._run = wandb.init(
            project=self._policy.project,
            entity=self._policy.entity or None,
            group=self._job,
            name=self._job + (f" from step {superseded[-1]}" if number else ""),
            id=identity,
            resume=None if offline else "allow",
            mode=self._policy.mode,
            tags=self._policy.tags or None,
            config=dict(self._config),
            dir=str(self._directory),
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
                x_disable_meta=True,
            ),
        )
        if not offline and self._run.resumed:
            cursor = Cursor(step=self._run.step - 1, evaluation=self._run.step - 1)
        self._step = max(cursor.step, cursor.evaluation)
        return cursor

    def write(self, rows: Sequence[LoggedRow]) -> None:
        """See ``TrackingSink``."""
        for row in rows:
            self._step = max(self._step, row.step)
            self._run.log(row.scalars(), step=self._step)

    def close(self, outcome: str | None) -> None:
        """See ``TrackingSink``."""
        run, self._run = self._run, None
        if run is not None:
            try:
                run.finish(exit_code=0 if outcome != "FAILED" else 1)
            finally:
                wandb.teardown()  # Ends W&B's service process, which still holds the run's id and the end of its file.


def _wait_until_written(files: Sequence[Path]) -> None:
    """Wait until no process has one of the files open, for at most ``_SERVICE_END_S``."""
    wanted = {str(path.resolve()) for path in files}
    deadline = time.monotonic() + _SERVICE_END_S
    while wanted and not wanted.isdisjoint(_open_files()):
        if time.monotonic() > deadline:
            _log.warning(
                "a process still writes a W&B file of this run; its newest steps may be logged twice"
            )
            return
        time.sleep(0.05)


def _open_files() -> Iterator[str]:
    """Yield the paths that the processes of this user have open."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                for descriptor in (process / "fd").iterdir():
                    with suppress(FileNotFoundError):
                        yield str(descriptor.readlink())
            except (FileNotFoundError, PermissionError, ProcessLookupError):
                continue  # The process has ended or belongs to another user.


def _advance(path: Path, cursor: Cursor) -> Cursor:
    """Return the cursor advanced by the steps that a W&B file contains."""
    for payload in payloads(path.read_bytes()):
        record = protocol.Record.FromString(payload)
        if record.WhichOneof("record_type") == "history":
            keys = {item.key or "/".join(item.nested_key) for item in record.history.item}
            step = record.history.step.num
            cursor = Cursor(
                step=max(cursor.step, step) if "train/loss" in keys else cursor.step,
                evaluation=max(cursor.evaluation, step) if "evaluation/loss" in keys else cursor.evaluation,
            )
    return cursor


def payloads(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format, up to the first incomplete one."""
    at, parts = _MAGIC, [b""]
    while at + _HEADER.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER.size:
            at += left
            continue
        _, size, kind = _HEADER.unpack_from(data, at)
        begin = at + _HEADER.size
        if kind not in (1, 2, 3, 4) or begin + size > len(data):
            return
        parts = [*(parts if kind in (3, 4) else []), data[begin : begin + size]]
        if kind in (1, 4):
            yield b"".join(parts)
        at = begin + size
