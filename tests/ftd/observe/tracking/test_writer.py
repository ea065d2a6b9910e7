"""The tracking writer: each step is logged once, despite kills, new leaders, rollbacks and full disks."""

import fcntl
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ftd.observe.tracking.protocol import SinkFailed, SinkRestored, StepsMissing, StepsSkipped
from ftd.observe.tracking.writer import INCOMPLETE
from statemachine.messages.values import LoggingPolicy, MlflowPolicy, WandbPolicy
from tests.helpers.tracking_logs import (
    JOB,
    JobJournal,
    WriterProcess,
    WriterThread,
    details_of,
    event,
    logged_steps,
    plotted,
    steps_of,
)
from tests.helpers.waiting import until
from tests.helpers.wandb_files import offline_history


@pytest.fixture
def job_journal(tmp_path: Path) -> Iterator[JobJournal]:
    job_journal = JobJournal(tmp_path / "coordinator")
    yield job_journal
    job_journal.journal.close()


@pytest.fixture
def policy(tmp_path: Path) -> LoggingPolicy:
    return LoggingPolicy(directory=str(tmp_path / "logs"), tensorboard=str(tmp_path / "logs"))


def logs(policy: LoggingPolicy) -> Path:
    return Path(policy.directory)


def upto(last: int) -> list[int]:
    return list(range(1, last + 1))


def all_once(policy: LoggingPolicy, last: int) -> None:
    """Check the record, and the event files for every plotted number."""
    assert logged_steps(logs(policy)) == upto(last)
    shown = plotted(logs(policy))
    for tag in ("train/loss", "train/learning_rate", "train/gradient_norm", "train/samples_per_s"):
        assert steps_of(shown[tag]) == upto(last)


def test_steps_are_logged_as_they_are_committed_and_the_rest_at_the_end(
    job_journal: JobJournal, policy: LoggingPolicy
) -> None:
    job_journal.commit(1, 5)
    writer = WriterThread(job_journal, policy)
    until(lambda: logged_steps(logs(policy)) == upto(5), "what was there is logged")
    job_journal.commit(6, 9)
    job_journal.evaluated(9)
    until(lambda: logged_steps(logs(policy)) == upto(9), "what came is logged")
    job_journal.commit(10, 5000)
    assert writer.end("FINISHED") == 0
    all_once(policy, 5000)
    assert plotted(logs(policy))["evaluation/loss"] == [(9, 3.0)]
    assert writer.reports == []


@pytest.mark.processes
def test_a_job_goes_to_all_sinks_at_once(
    job_journal: JobJournal, policy: LoggingPolicy, tmp_path: Path
) -> None:
    policy = LoggingPolicy(
        directory=policy.directory,
        tensorboard=policy.tensorboard,
        wandb=WandbPolicy(project="p", mode="offline"),
        mlflow=MlflowPolicy(tracking_uri=str(tmp_path / "mlruns"), experiment="x"),
    )
    job_journal.commit(1, 20)
    assert WriterProcess(job_journal, policy).end("FINISHED") == 0
    all_once(policy, 20)
    assert [step for step, _ in offline_history(logs(policy) / JOB, JOB)] == upto(20)
    [loss] = (tmp_path / "mlruns").glob("*/*/metrics/train/loss")
    assert [int(line.split()[2]) for line in loss.read_text().splitlines()] == upto(20)


@pytest.mark.processes
def test_the_next_writer_continues_after_a_kill_at_any_time(
    job_journal: JobJournal, policy: LoggingPolicy
) -> None:
    last = 0
    for term in range(1, 4):
        writer = WriterProcess(job_journal, policy, term=term)
        for _ in range(40):
            last += 1
            job_journal.commit(last, last)
            time.sleep(0.02 * term)
        writer.kill()
    assert WriterProcess(job_journal, policy, term=4).end() == 0
    all_once(policy, last)


@pytest.mark.processes
def test_the_writer_of_a_later_leader_takes_over_from_a_running_one(
    job_journal: JobJournal, policy: LoggingPolicy, tmp_path: Path
) -> None:
    """The first leader hangs, is deposed, and then writes nothing, although its journal has more steps."""
    other = JobJournal(tmp_path / "standby")
    job_journal.commit(1, 50)
    first = WriterProcess(job_journal, policy, term=1)
    until(lambda: len(logged_steps(logs(policy))) == 50, "the first writes")
    other.commit(1, 60)
    second = WriterProcess(other, policy, term=2)
    assert first.await_exit() == 0
    job_journal.commit(51, 90, shift=5.0)
    until(lambda: len(logged_steps(logs(policy))) == 60, "the second writes")
    assert WriterProcess(job_journal, policy, term=1).await_exit() == 0, "one that comes late leaves at once"
    other.commit(61, 70)
    assert second.end() == 0
    all_once(policy, 70)
    assert plotted(logs(policy))["train/loss"][60][1] == pytest.approx(1 / 61)
    other.journal.close()


@pytest.mark.processes
def test_a_suspended_writer_is_waited_for_and_adds_nothing_when_it_resumes(
    job_journal: JobJournal, policy: LoggingPolicy
) -> None:
    job_journal.commit(1, 10)
    first = WriterProcess(job_journal, policy, term=1)
    until(lambda: len(logged_steps(logs(policy))) == 10, "the first writes")
    first.process.send_signal(signal.SIGSTOP)
    job_journal.commit(11, 20)
    second = WriterProcess(job_journal, policy, term=2)
    until(lambda: json.loads((logs(policy) / JOB / "writer.json").read_text())["term"] == 2, "it is there")
    time.sleep(1.5)
    assert logged_steps(logs(policy)) == upto(10), "who holds the lock might write"
    first.process.send_signal(signal.SIGCONT)
    assert first.await_exit() == 0
    until(lambda: len(logged_steps(logs(policy))) == 20, "the second writes")
    assert second.end() == 0
    all_once(policy, 20)


def test_a_writer_that_starts_at_the_end_of_a_job_waits_for_the_previous_one(
    job_journal: JobJournal, policy: LoggingPolicy
) -> None:
    """A leader took over right before the end, and the previous leader's writer is still running."""
    job_journal.commit(1, 10)
    place = Path(policy.directory) / JOB
    place.mkdir(parents=True)
    with (place / "writer.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        writer = WriterThread(job_journal, policy, term=2)
        writer.finish("FINISHED")
        until((place / "writer.json").exists, "it is there")
        assert logged_steps(logs(policy)) == []
    assert writer.await_end() == 0
    all_once(policy, 10)


@pytest.mark.processes
@pytest.mark.parametrize("again", [False, True], ids=["at work", "begun again"])
def test_steps_that_a_rollback_undid_are_superseded(
    job_journal: JobJournal, policy: LoggingPolicy, again: bool
) -> None:
    job_journal.commit(1, 30)
    job_journal.evaluated(20)
    job_journal.evaluated(30)
    writer = WriterProcess(job_journal, policy)
    until(lambda: len(logged_steps(logs(policy))) == 30, "what came before it is logged")
    if again:
        writer.kill()
    job_journal.roll_back(15)
    job_journal.commit(16, 22, generation=2)
    job_journal.commit(23, 40, generation=2, shift=5.0)
    job_journal.evaluated(20)
    job_journal.evaluated(30, 4.0)
    if again:
        writer = WriterProcess(job_journal, policy, term=2)
    assert writer.end() == 0
    shown = plotted(logs(policy))
    assert steps_of(shown["train/loss"]) == upto(40)
    losses = [1 / step + (5.0 if step > 22 else 0.0) for step in upto(40)]
    assert [value for _, value in shown["train/loss"]] == pytest.approx(losses)
    assert shown["evaluation/loss"] == [(20, 3.0), (30, 4.0)]
    lines = [msgspec.json.decode(line) for line in (logs(policy) / JOB / "steps.jsonl").open("rb")]
    assert [line["step"] for line in lines if line["kind"] == "superseded"] == [23], "equal steps stay"


def test_a_repeated_evaluation_of_a_step_replaces_the_first(
    job_journal: JobJournal, policy: LoggingPolicy
) -> None:
    job_journal.commit(1, 10)
    job_journal.evaluated(5)
    writer = WriterThread(job_journal, policy)
    until(lambda: len(logged_steps(logs(policy))) == 10, "the first is logged")
    job_journal.evaluated(5, 4.0)
    assert writer.end() == 0
    shown = plotted(logs(policy))
    assert (shown["evaluation/loss"], steps_of(shown["train/loss"])) == ([(5, 4.0)], upto(10))


@pytest.mark.processes
def test_a_full_disk_is_reported_once_and_nothing_is_missing_later(
    job_journal: JobJournal, policy: LoggingPolicy
) -> None:
    job_journal.commit(1, 3)
    writer = WriterProcess(job_journal, policy, file_bytes=3000)
    until(lambda: len(logged_steps(logs(policy))) == 3, "there is room for some")
    job_journal.commit(4, 100)
    until(writer.read_reports, "it is reported")
    time.sleep(2.0)
    job_journal.commit(101, 110)
    assert [type(reports) for reports in writer.read_reports()] == [SinkFailed]
    [failed] = writer.reports
    assert isinstance(failed, SinkFailed) and failed.sink == "record" and "No space left" in failed.detail
    writer.give_room()
    until(lambda: len(logged_steps(logs(policy))) == 110, "what waited is logged")
    assert writer.end() == 0
    assert writer.reports == [failed, SinkRestored(sink="record")]
    all_once(policy, 110)


def test_an_unwritable_sink_does_not_disturb_the_others(
    job_journal: JobJournal, policy: LoggingPolicy, tmp_path: Path
) -> None:
    place = tmp_path / "boards"
    place.write_text("a file where a directory should be")
    policy = LoggingPolicy(directory=policy.directory, tensorboard=str(place))
    job_journal.commit(1, 10)
    writer = WriterThread(job_journal, policy)
    until(lambda: logged_steps(logs(policy)) == upto(10) and writer.reports, "the record is written")
    [failed] = writer.reports
    assert isinstance(failed, SinkFailed) and failed.sink == "tensorboard"
    place.unlink()
    until(lambda: SinkRestored(sink="tensorboard") in writer.reports, "it works again")
    assert writer.end() == 0
    assert steps_of(plotted(place)["train/loss"]) == upto(10)


def test_a_directory_that_cannot_be_created_is_reported(job_journal: JobJournal, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    job_journal.commit(1, 2)
    writer = WriterThread(job_journal, LoggingPolicy(directory=str(tmp_path / "file" / "logs")))
    until(lambda: writer.reports, "it is reported")
    assert writer.end() == INCOMPLETE
    assert [reports.sink for reports in writer.reports if isinstance(reports, SinkFailed)] == ["record"]


def test_steps_that_no_journal_has_are_reported_and_left_out(
    job_journal: JobJournal, policy: LoggingPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftd.observe.tracking.writer.ASK_S", 0.1)
    monkeypatch.setattr("ftd.observe.tracking.writer.GAP_S", 1.0)
    job_journal.commit(1, 3)
    for step in (6, 7):
        job_journal.journal.record(event("StepCommitted", step, **details_of(step)))
    job_journal.journal.flush()
    writer = WriterThread(job_journal, policy)
    until(lambda: logged_steps(logs(policy)) == [1, 2, 3, 6, 7], "it goes on")
    assert writer.end() == 0
    asked = StepsMissing(first=4, last=5)
    assert writer.reports[0] == asked and writer.reports[-1] == StepsSkipped(first=4, last=5)
    assert set(map(str, writer.reports[:-1])) == {str(asked)}


def test_the_writer_waits_for_late_steps(job_journal: JobJournal, policy: LoggingPolicy) -> None:
    job_journal.commit(1, 3)
    job_journal.commit(5, 6)
    writer = WriterThread(job_journal, policy)
    until(lambda: writer.reports and logged_steps(logs(policy)) == [1, 2, 3], "it waits")
    job_journal.commit(4, 4)
    until(lambda: logged_steps(logs(policy)) == upto(6), "it goes on")
    assert writer.end() == 0
    assert set(map(type, writer.reports)) == {StepsMissing}


def test_a_corrupt_or_missing_journal_is_reported_and_survived(policy: LoggingPolicy, tmp_path: Path) -> None:
    job_journal = JobJournal(tmp_path / "coordinator")
    job_journal.journal.close()
    job_journal.journal.path.unlink()
    writer = WriterThread(job_journal, policy)
    until(lambda: writer.reports, "it is reported")
    assert writer.end() == INCOMPLETE
    [failed] = writer.reports
    assert isinstance(failed, SinkFailed) and "journal cannot be read" in failed.detail
