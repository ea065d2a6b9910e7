"""Journals to log from, tracking writers as threads and processes, and functions that read their logs."""

import os
import resource
import select
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ftd.coordinator.journal import Journal
from ftd.observe.tracking.protocol import FromWriter, LoggedJobEnded, WriterAssignment
from ftd.observe.tracking.rows import LoggedRow
from ftd.observe.tracking.writer import INCOMPLETE, TrackingWriter
from ftd.observe.tracking.writer_process import COMMAND
from ftd.transport.wire.public import EventMessage
from statemachine.messages.values import LoggingPolicy
from tests.helpers.waiting import PATIENCE_S

JOB = "gpt-1"


def row(step: int, loss: float | None = None, **details: Any) -> LoggedRow:
    return LoggedRow(
        kind="step",
        step=step,
        at="2026-05-04T12:00:05.003Z",
        generation=1,
        details=details_of(step, loss, **details),
    )


def details_of(step: int, loss: float | None = None, **details: Any) -> dict[str, Any]:
    given = {
        "loss": 1 / step if loss is None else loss,
        "gradient_norm": 1.0,
        "skipped": False,
        "step_s": 0.1,
        "samples_per_s": 320.0,
        "learning_rate": 0.01 * step,
        "weight": 32.0,
        "tokens_per_s": None,
        "loss_scale": 1.0,
        "metrics": {"accuracy": step / 1000},
    }
    return given | details


def evaluation(step: int, loss: float = 3.0) -> LoggedRow:
    return LoggedRow(
        kind="evaluation",
        step=step,
        at="2026-05-04T12:00:06.003Z",
        generation=1,
        details={"loss": loss, "weight": 8.0, "metrics": {}, "took_s": 0.5},
    )


def event(name: str, step: int | None = None, generation: int = 1, **details: Any) -> EventMessage:
    return EventMessage(
        event=name,
        node=None,
        generation=generation,
        step=step,
        reason="r",
        at="2026-05-04T12:00:05.003Z",
        monotonic=1.0,
        cause="c",
        details=details,
    )


class JobJournal:
    """A coordinator's journal."""

    def __init__(self, directory: Path, job: str = JOB) -> None:
        self.directory = directory
        self.journal = Journal(directory)
        self.journal.set_job(job)

    def commit(self, first: int, last: int, *, generation: int = 1, shift: float = 0.0) -> None:
        for step in range(first, last + 1):
            self.journal.record(
                event("StepCommitted", step, generation, **details_of(step, 1 / step + shift))
            )
        self.journal.flush()

    def evaluated(self, step: int, loss: float = 3.0) -> None:
        self.journal.record(event("Evaluated", step, **evaluation(step, loss).details))
        self.journal.flush()

    def roll_back(self, step: int) -> None:
        self.journal.record(event("RolledBack", step, 2))
        self.journal.flush()


def assignment_of(job_journal: JobJournal, policy: LoggingPolicy, term: int) -> WriterAssignment:
    return WriterAssignment(
        journal=str(job_journal.journal.path), job=JOB, term=term, policy=policy, parameters={"seed": 3}
    )


class WriterThread:
    """A writer on a thread, for tests that do not kill or suspend it."""

    def __init__(self, job_journal: JobJournal, policy: LoggingPolicy, *, term: int = 1) -> None:
        self.reports: list[FromWriter] = []
        self._complete = False
        out, self._input = os.pipe()
        writer = TrackingWriter(assignment_of(job_journal, policy, term), self.reports.append, input_fd=out)

        def run() -> None:
            self._complete = writer.run()
            os.close(out)

        self._thread = threading.Thread(target=run, name="writer")
        self._thread.start()

    def finish(self, outcome: str | None = None) -> None:
        """Close the coordinator's end of the pipe, after the outcome if there is one."""
        if outcome is not None:
            os.write(self._input, msgspec.json.encode(LoggedJobEnded(outcome=outcome)) + b"\n")
        os.close(self._input)

    def end(self, outcome: str | None = None) -> int:
        """Finish the writer and return the exit status that its process would have."""
        self.finish(outcome)
        return self.await_end()

    def await_end(self) -> int:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        return 0 if self._complete else INCOMPLETE


class WriterProcess:
    """A writer process, started as a coordinator does it."""

    def __init__(
        self, job_journal: JobJournal, policy: LoggingPolicy, *, term: int = 1, file_bytes: int | None = None
    ) -> None:
        """:param file_bytes: limit of each file that it writes, to simulate a full disk."""
        self.reports: list[FromWriter] = []
        self._unread = b""

        self.process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        if file_bytes is not None:
            limits = (file_bytes, resource.RLIM_INFINITY)
            resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, limits)
        self.send(assignment_of(job_journal, policy, term))

    def send(self, message: WriterAssignment | LoggedJobEnded) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(message) + b"\n")
        self.process.stdin.flush()

    def read_reports(self) -> list[FromWriter]:
        """Return everything that the writer has reported."""
        assert self.process.stdout is not None
        out = self.process.stdout.fileno()
        while select.select([out], [], [], 0)[0] and (data := os.read(out, 65536)):
            *lines, self._unread = (self._unread + data).split(b"\n")
            self.reports += [msgspec.json.decode(line, type=FromWriter) for line in lines]
        return self.reports

    def give_room(self) -> None:
        limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, limits)

    def kill(self) -> None:
        """Kill the writer and its children with SIGKILL."""
        os.killpg(self.process.pid, 9)
        self.process.wait()
        self._close()

    def end(self, outcome: str | None = None) -> int:
        """Close the pipe, after the outcome if there is one; return the exit status."""
        if outcome is not None:
            self.send(LoggedJobEnded(outcome=outcome))
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = self.process.wait(PATIENCE_S)
        self.read_reports()
        self._close()
        return code

    def await_exit(self) -> int:
        """Wait until the writer ends by itself; return its exit status."""
        code = self.process.wait(PATIENCE_S)
        self._close()
        return code

    def _close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


def record_of(run: Path) -> list[tuple[int, float]]:
    """Return the steps and losses of a job's record in the order of the file."""
    path = run / "steps.jsonl"
    whole, _, _ = path.read_bytes().rpartition(b"\n") if path.exists() else (b"", b"", b"")
    lines = [msgspec.json.decode(line) for line in whole.splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "step"]


def logged_steps(directory: Path) -> list[int]:
    """Return the steps of the record of ``JOB`` in the order of the file."""
    return steps_of(record_of(directory / JOB))


def plotted_run(run: Path) -> Mapping[str, list[tuple[int, float]]]:
    """Return the steps and values that TensorBoard shows of a run, by tag and in the order of the file."""
    shown = EventAccumulator(str(run), size_guidance={"scalars": 0})
    shown.Reload()
    return {tag: [(e.step, e.value) for e in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]}


def plotted(directory: Path) -> Mapping[str, list[tuple[int, float]]]:
    """Return the steps and values that TensorBoard shows of ``JOB``."""
    return plotted_run(directory / JOB)


def steps_of(points: list[tuple[int, float]]) -> list[int]:
    return [step for step, _ in points]
