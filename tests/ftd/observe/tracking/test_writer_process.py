"""The coordinator's side of tracking: it starts a writer when it leads, replaces a dead one, and ends
the last one.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from ftd.observe.tracking.writer_process import TrackingWriterProcess
from planner.values import Policy
from statemachine.messages.values import Job, LoggingPolicy
from tests.helpers.tracking_logs import JOB, JobJournal, logged_steps, plotted, steps_of
from tests.helpers.waiting import until_async

pytestmark = pytest.mark.processes


def job_at(directory: Path) -> Job:
    return Job(
        job_id=JOB,
        name="gpt",
        steps=30,
        policy=Policy(global_batch=8, microbatch_rows=4),
        training={"seed": 3, "arguments": {"width": 8}},
        logging=LoggingPolicy(directory=str(directory)),
    )


class LedJob:
    """A coordinator's journal and the reports of its writers."""

    def __init__(self, directory: Path) -> None:
        self.job_journal = JobJournal(directory / "coordinator")
        self.logs = directory / "logs"
        self.failures: list[tuple[str, str]] = []
        self.missed: list[tuple[int, int]] = []
        self.tracking = TrackingWriterProcess(
            self.job_journal.journal.path,
            on_failed=lambda sink, detail: self.failures.append((sink, detail)),
            on_missing=lambda first, last: self.missed.append((first, last)),
        )

    async def close(self) -> None:
        await self.tracking.close()
        self.job_journal.journal.close()


def upto(last: int) -> list[int]:
    return list(range(1, last + 1))


def test_a_job_is_logged_from_leadership_to_its_end(tmp_path: Path) -> None:
    async def play() -> None:
        led_job, job = LedJob(tmp_path), job_at(tmp_path / "logs")
        led_job.tracking.set_job(None, 0, None)
        led_job.job_journal.commit(1, 5)
        led_job.tracking.set_job(job, 1, None)
        await until_async(lambda: logged_steps(led_job.logs) == upto(5), "steps are logged")
        led_job.job_journal.commit(6, 30)
        led_job.tracking.set_job(job, 1, "FINISHED")
        await until_async(lambda: logged_steps(led_job.logs) == upto(30), "all are")
        led_job.tracking.set_job(job, 1, "FINISHED")
        await led_job.close()
        assert led_job.failures == []

    asyncio.run(play())


def test_a_job_that_ends_right_after_it_began_is_logged(tmp_path: Path) -> None:
    async def play() -> None:
        led_job, job = LedJob(tmp_path), job_at(tmp_path / "logs")
        led_job.job_journal.commit(1, 30)
        led_job.tracking.set_job(job, 1, "FINISHED")
        await led_job.close()
        assert logged_steps(led_job.logs) == upto(30)

    asyncio.run(play())


def test_a_deposed_leader_stops_writing(tmp_path: Path) -> None:
    async def play() -> None:
        led_job, job = LedJob(tmp_path), job_at(tmp_path / "logs")
        led_job.job_journal.commit(1, 5)
        led_job.tracking.set_job(job, 1, None)
        await until_async(lambda: logged_steps(led_job.logs) == upto(5), "steps are logged")
        led_job.tracking.set_job(None, 0, None)
        await until_async(lambda: led_job.tracking.idle, "the writer is gone")
        led_job.job_journal.commit(6, 9)
        await asyncio.sleep(1.0)
        assert logged_steps(led_job.logs) == upto(5)
        led_job.tracking.set_job(job, 3, None)
        await until_async(lambda: logged_steps(led_job.logs) == upto(9), "it leads again")
        await led_job.close()

    asyncio.run(play())


def test_another_job_is_logged_in_another_directory(tmp_path: Path) -> None:
    async def play() -> None:
        led_job, job = LedJob(tmp_path), job_at(tmp_path / "logs")
        led_job.job_journal.commit(1, 3)
        led_job.tracking.set_job(job, 1, None)
        await until_async(lambda: logged_steps(led_job.logs) == upto(3), "steps are logged")
        led_job.job_journal.journal.set_job("gpt-2")
        led_job.job_journal.commit(1, 4)
        led_job.tracking.set_job(replace(job, job_id="gpt-2"), 1, None)
        record = tmp_path / "logs" / "gpt-2" / "steps.jsonl"
        await until_async(lambda: record.exists() and record.read_text().count("\n") == 4, "the other's, too")
        await led_job.close()
        assert logged_steps(led_job.logs) == upto(3)

    asyncio.run(play())


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ([sys.executable, "-c", "raise SystemExit(4)"], "the writer exited with status 4"),
        (["/nowhere/python"], "the writer cannot be started"),
    ],
)
def test_a_writer_that_cannot_run_is_reported_once_and_retried(
    tmp_path: Path, command: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftd.observe.tracking.writer_process._FIRST_RETRY_S", 0.01)
    monkeypatch.setattr("ftd.observe.tracking.writer_process._LAST_RETRY_S", 0.02)
    monkeypatch.setattr("ftd.observe.tracking.writer_process.COMMAND", command)

    async def play() -> None:
        led_job, job = LedJob(tmp_path), job_at(tmp_path / "logs")
        led_job.tracking.set_job(job, 1, None)
        await until_async(lambda: bool(led_job.failures), "it is reported")
        await asyncio.sleep(0.3)
        assert [(sink, expected in detail) for sink, detail in led_job.failures] == [("writer", True)]
        await led_job.close()

    asyncio.run(play())


def test_an_ended_job_is_retried_a_limited_number_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftd.observe.tracking.writer_process._FIRST_RETRY_S", 0.01)
    monkeypatch.setattr("ftd.observe.tracking.writer_process._LAST_RETRY_S", 0.02)
    count = tmp_path / "count"
    script = f"open({str(count)!r}, 'a').write('x'); raise SystemExit(3)"
    monkeypatch.setattr("ftd.observe.tracking.writer_process.COMMAND", [sys.executable, "-c", script])

    async def play() -> None:
        led_job, job = LedJob(tmp_path), job_at(tmp_path / "logs")
        led_job.tracking.set_job(job, 1, "FINISHED")
        await until_async(lambda: led_job.tracking.idle, "it is given up")
        led_job.tracking.set_job(job, 1, "FINISHED")
        assert led_job.tracking.idle and count.read_text() == "xxxxx"
        assert led_job.failures == [("writer", "the writer left before everything was logged")]
        await led_job.close()

    asyncio.run(play())


def test_a_sink_that_fails_at_the_end_of_a_job_receives_the_rest_later(tmp_path: Path) -> None:
    async def play() -> None:
        led_job, job = LedJob(tmp_path), job_at(tmp_path / "logs")
        board = tmp_path / "boards"
        board.write_text("a file where a directory should be")
        policy = replace(job.logging, tensorboard=str(board))
        led_job.job_journal.commit(1, 9)
        led_job.tracking.set_job(replace(job, logging=policy), 1, "FINISHED")
        await until_async(
            lambda: len(led_job.failures) == 2, "both that it fails and that it left are reported"
        )
        board.unlink()
        await until_async(lambda: led_job.tracking.idle, "all is logged")
        assert steps_of(plotted(board)["train/loss"]) == upto(9)
        await led_job.close()

    asyncio.run(play())


def test_steps_that_the_journal_lacks_are_requested(tmp_path: Path) -> None:
    async def play() -> None:
        led_job, job = LedJob(tmp_path), job_at(tmp_path / "logs")
        led_job.job_journal.commit(1, 3)
        led_job.job_journal.commit(7, 9)
        led_job.tracking.set_job(job, 1, None)
        await until_async(lambda: led_job.missed[:1] == [(4, 6)], "the coordinator is asked")
        led_job.job_journal.commit(4, 6)
        await until_async(lambda: logged_steps(led_job.logs) == upto(9), "it goes on")
        await led_job.close()
        assert led_job.failures == []

    asyncio.run(play())


def test_a_writer_that_is_killed_is_replaced(tmp_path: Path) -> None:
    async def play() -> None:
        led_job, job = LedJob(tmp_path), job_at(tmp_path / "logs")
        led_job.job_journal.commit(1, 5)
        led_job.tracking.set_job(job, 1, None)
        await until_async(lambda: logged_steps(led_job.logs) == upto(5), "steps are logged")
        writer = json.loads((led_job.logs / job.job_id / "writer.json").read_bytes())
        os.kill(writer["pid"], signal.SIGKILL)
        led_job.job_journal.commit(6, 9)
        await until_async(lambda: logged_steps(led_job.logs) == upto(9), "another one goes on")
        await led_job.close()
        assert led_job.failures == [("writer", "the writer exited with status -9")]

    asyncio.run(play())


def test_a_job_without_logging_starts_no_writer(tmp_path: Path) -> None:
    async def play() -> None:
        led_job = LedJob(tmp_path)
        led_job.tracking.set_job(replace(job_at(tmp_path), logging=LoggingPolicy()), 1, None)
        assert led_job.tracking.idle
        await led_job.close()

    asyncio.run(play())
