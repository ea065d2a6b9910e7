"""The coordinator's work at a checkpoint location: it commits, removes, finds and rejects."""

import asyncio
import queue
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import msgspec
import pytest
from msgspec.structs import replace

from ftd.coordinator.checkpoints import (
    CheckpointService,
    abandon,
    commit,
    export,
    find,
    find_initial_checkpoint,
)
from ftd.errors import ConfigurationError
from ftd.snapshots.checkpoint_export import export_for_job
from planner.values import Policy
from statemachine.effects import AbandonCheckpoint, CommitCheckpoint, ExportCheckpoint, FindCheckpoint
from statemachine.events import (
    CheckpointCommitFailed,
    CheckpointCommitted,
    CheckpointFound,
    Event,
    ExportCompleted,
    ExportFailed,
)
from statemachine.messages.values import CheckpointPolicy, Job, LayerFile, Vote
from storage.checkpoint import CheckpointStore
from storage.errors import ForeignCheckpointError, LocationError, StorageError
from storage.huggingface import export_huggingface
from storage.locations import LocalLocation
from storage.values import job_mark
from tests.helpers.kept_checkpoints import LAYERS, holds, layer_state, write

OLDER = Vote(loss=2.5, gradient_norm=1.0)
"""A vote without its optional fields."""
VOTE = Vote(loss=2.5, gradient_norm=1.0, weight=64.0, loss_scale=8.0, metrics={"accuracy": 0.5})


def job_at(url: object, **policy: object) -> Job:
    training = Policy(devices_per_node=1, global_batch=8, microbatch_rows=4)
    checkpoint = CheckpointPolicy(url=str(url), every_steps=10, **policy)  # type: ignore[arg-type]
    return Job(job_id="gpt-1", name="gpt", steps=99, policy=training, checkpoint=checkpoint)


def layers_written(store: CheckpointStore, step: int, attempt: str) -> tuple[LayerFile, ...]:
    """Return what nodes report after writing a draft."""
    draft = store.begin(step, attempt)
    states = [layer_state(layer, step) for layer in range(LAYERS)]
    files = [store.write_layer(draft, n, header, [payload]) for n, (header, payload) in enumerate(states)]
    return tuple(files)


def committing(job: Job, step: int, layers: tuple[LayerFile, ...], attempt: str = "a") -> CommitCheckpoint:
    return CommitCheckpoint(cause="c", job=job, attempt=attempt, step=step, vote=VOTE, layers=layers)


def finding(job: Job, *corrupt: int) -> FindCheckpoint:
    return FindCheckpoint(cause="c", generation=4, job=job, corrupt_steps=corrupt)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore.at(str(tmp_path / "kept"), job="gpt", create=True)


def test_what_the_nodes_wrote_is_committed_and_the_oldest_are_removed(store: CheckpointStore) -> None:
    """Newer ones are removed, too: they belong to undone steps."""
    job = job_at(store.location.url, keep=2)
    for step in (10, 20, 50):
        write(store, step)
    event = commit(committing(job, 30, layers_written(store, 30, "a")), at=1.0)
    assert isinstance(event, CheckpointCommitted)
    assert (event.attempt, event.step, event.pruned) == ("a", 30, (10, 50))
    assert store.steps() == (30, 20) and holds(store, 30)
    assert msgspec.convert(store.open(30).manifest.vote, Vote) == VOTE


def test_failed_commits_are_reported_and_abandoned_drafts_removed(store: CheckpointStore) -> None:
    job = job_at(store.location.url)
    write(store, 20)
    layers = layers_written(store, 30, "a")
    event = commit(committing(job, 30, layers[:1] + layers[2:]), at=1.0)
    assert isinstance(event, CheckpointCommitFailed) and "layers [0, 2]" in event.detail
    abandon(AbandonCheckpoint(cause="c", job=job, attempt="a", step=30))
    assert store.location.names() == ["step-000000000020"] and store.steps() == (20,)
    # The coordinator ended before it learned of this commit, which remains.
    commit(committing(job, 30, layers_written(store, 30, "b"), "b"), at=1.0)
    abandon(AbandonCheckpoint(cause="c", job=job, attempt="b", step=30))
    assert store.steps() == (30, 20) and holds(store, 30)


def test_a_commit_of_an_object_store_that_was_never_acknowledged_remains() -> None:
    job = job_at(f"memory://{uuid4()}")
    store = CheckpointStore.at(job.checkpoint.url, job="gpt", create=True)
    commit(committing(job, 30, layers_written(store, 30, "b"), "b"), at=1.0)
    layers_written(store, 30, "c")
    for attempt in ("b", "c"):
        abandon(AbandonCheckpoint(cause="c", job=job, attempt=attempt, step=30))
    assert store.steps() == (30,) and holds(store, 30)
    assert len(store.location.sizes("step-000000000030")) == LAYERS + 1
    store.location.remove("step-000000000030")


def test_the_newest_usable_one_is_found_and_skipped_ones_are_reported(store: CheckpointStore) -> None:
    job = job_at(store.location.url)
    for step in (10, 20, 30, 40, 50):
        write(store, step)
    found = find(finding(job), at=1.0)
    assert found.checkpoint is not None and found.skipped == ()
    assert (found.checkpoint.step, found.checkpoint.vote, found.checkpoint.layers) == (50, OLDER, LAYERS)
    root = Path(store.location.url)
    (root / "step-000000000050" / "layer-0001.bin").unlink()
    header = root / "step-000000000030" / "layer-0002.bin"
    data = bytearray(header.read_bytes())
    data[-20] ^= 1
    header.write_bytes(data)
    store.begin(60)
    found = find(finding(job, 40), at=1.0)
    assert found.checkpoint is not None and found.checkpoint.step == 20
    words = " / ".join(passed.reason for passed in found.skipped)
    for met in (
        "layer-0001.bin is missing",
        "step-000000000060",
        "a node found it corrupt",
        "layer-0002.bin",
    ):
        assert met in words
    none = find(finding(replace(job, name="bert")), at=1.0)
    assert none.checkpoint is None and "has no checkpoint of job 'bert'" in none.reason
    nowhere = find(finding(job_at(root / "nowhere")), at=1.0)
    assert nowhere.checkpoint is None and "does not exist" in nowhere.reason


def test_a_newest_checkpoint_that_cannot_be_read_now_is_not_passed_over(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job would continue from an older one, and the next commit remove the newest one."""
    job = job_at(store.location.url)
    write(store, 10)
    write(store, 20)
    opened = LocalLocation.open

    def failing(location: LocalLocation, directory: str, name: str) -> AbstractContextManager[BinaryIO]:
        if (directory, name) == ("step-000000000020", "layer-0001.bin"):
            raise LocationError("503 slow down")
        return opened(location, directory, name)

    with monkeypatch.context() as patched:
        patched.setattr(LocalLocation, "open", failing)
        found = find(finding(job), at=1.0)
        assert (found.checkpoint, found.unreadable, found.reason) == (None, True, "503 slow down")
        with pytest.raises(ConfigurationError, match="503 slow down"):
            find_initial_checkpoint(job)
    found = find(finding(job), at=1.0)
    assert found.checkpoint is not None and found.checkpoint.step == 20


def test_a_job_begins_from_an_existing_checkpoint_or_is_rejected(
    store: CheckpointStore, tmp_path: Path
) -> None:
    assert find_initial_checkpoint(job_at("")) is None
    assert find_initial_checkpoint(job_at(tmp_path / "new")) is None and (tmp_path / "new").is_dir()
    write(store, 20)
    begin = find_initial_checkpoint(job_at(store.location.url))
    assert begin is not None and begin.step == 20
    with pytest.raises(ConfigurationError, match="the newest of step 20") as caught:
        find_initial_checkpoint(job_at(store.location.url, resume=False))
    assert caught.value.field == "checkpoint.resume"
    assert find_initial_checkpoint(replace(job_at(store.location.url, resume=False), name="bert")) is None
    (tmp_path / "file").write_text("")
    for url in (tmp_path / "file", "nosuch://x"):
        with pytest.raises(ConfigurationError) as caught:
            find_initial_checkpoint(job_at(url))
        assert caught.value.field == "checkpoint.url"


def exporting(job: Job, step: int, limit_s: float = 240.0) -> ExportCheckpoint:
    return ExportCheckpoint(cause="c", job=job, step=step, limit_s=limit_s)


def exported(job: Job, step: int, limit_s: float = 240.0) -> ExportCompleted | ExportFailed:
    return export(exporting(job, step, limit_s), lambda: 1.0)


@pytest.mark.processes
def test_a_job_s_checkpoint_is_exported_once(store: CheckpointStore, tmp_path: Path) -> None:
    exports = tmp_path / "exports"
    job = job_at(store.location.url, huggingface_every_steps=10, huggingface_directory=str(exports))
    find_initial_checkpoint(job)
    write(store, 20)
    (exports / f".step-000000000010{job_mark('gpt')}.partial").mkdir()
    done = exported(job, 20)
    target = exports / "step-000000000020"
    assert isinstance(done, ExportCompleted) and done.directory == str(target)
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "ftd.json", "model.safetensors"]
    assert done.size_bytes == (target / "model.safetensors").stat().st_size > 0
    made = target.stat().st_ino
    assert isinstance(exported(job, 20), ExportCompleted) and target.stat().st_ino == made
    write(store, 20, attempt="2", seed=9)  # All nodes were rolled back and reached this step again.
    origin = msgspec.json.decode((target / "ftd.json").read_bytes())
    assert (origin["job"], origin["job_id"], origin["step"]) == ("gpt", "gpt-1", 20)
    (target / "ftd.json").write_text("of another past")
    assert isinstance(exported(job, 20), ExportCompleted) and target.stat().st_ino != made
    assert [path.name for path in exports.iterdir()] == [target.name]


def test_what_a_killed_export_has_written_is_removed_by_the_next(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exports = tmp_path / "exports"
    url = store.location.url
    for step in (20, 30):
        write(store, step)
    with monkeypatch.context() as patch:
        patch.setattr("storage.huggingface.write_safetensors", lambda *_: 1 / 0)
        patch.setattr("storage.huggingface.shutil.rmtree", lambda *_, **__: None)
        with pytest.raises(ZeroDivisionError):
            export_for_job(url, "gpt", 20, exports)
    assert list(exports.iterdir())
    export_for_job(url, "gpt", 30, exports)
    assert [path.name for path in exports.iterdir()] == ["step-000000000030"]


def test_another_jobs_exports_are_neither_replaced_nor_removed_while_they_are_written(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exports, other = tmp_path / "exports", str(tmp_path / "other")
    for step in (20, 30):
        write(store, step)
        write(CheckpointStore.at(other, job="bert", create=True), step, job="bert")
    export_for_job(store.location.url, "gpt", 20, exports)
    made = (exports / "step-000000000020").stat().st_ino
    with pytest.raises(ForeignCheckpointError, match=r"of job 'gpt'.*give 'bert'.*of its own"):
        export_for_job(other, "bert", 20, exports)
    assert (exports / "step-000000000020").stat().st_ino == made
    name = "ftd.snapshots.checkpoint_export.export_huggingface"

    def meanwhile(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(name, export_huggingface)
        written = export_huggingface(*arguments, **options)
        write(store, 40)
        export_for_job(store.location.url, "gpt", 40, exports)
        return written

    monkeypatch.setattr(name, meanwhile)
    export_for_job(other, "bert", 30, exports)
    assert sorted(path.name for path in exports.iterdir()) == [
        f"step-0000000000{step}" for step in (20, 30, 40)
    ]


def test_an_export_never_replaces_a_checkpoint(store: CheckpointStore) -> None:
    """The directory of the exports may be that of checkpoints, under another name such as file://…"""
    write(store, 20)
    with pytest.raises(StorageError, match=r"step-000000000020 is there and is no export"):
        export_for_job(f"file://{store.location.url}", "gpt", 20, Path(store.location.url))
    assert store.location.names() == ["step-000000000020"] and holds(store, 20)


@pytest.mark.processes
def test_a_failed_export_is_reported_and_leaves_nothing(store: CheckpointStore, tmp_path: Path) -> None:
    exports = tmp_path / "exports"
    job = job_at(store.location.url, huggingface_every_steps=10, huggingface_directory=str(exports))
    failed = exported(job, 20)
    assert isinstance(failed, ExportFailed) and "no checkpoint of step 20" in failed.detail
    write(store, 20)
    (tmp_path / "kept" / "step-000000000020" / "layer-0001.bin").write_bytes(b"")
    failed = exported(job, 20)
    assert isinstance(failed, ExportFailed) and "layer-0001.bin has 0 bytes" in failed.detail
    failed = exported(job, 20, limit_s=0.001)
    assert isinstance(failed, ExportFailed) and failed.detail == "it did not end in 0.001 s"
    assert not exports.exists() or not list(exports.iterdir())
    with pytest.raises(ConfigurationError) as caught:
        find_initial_checkpoint(job_at(store.location.url, huggingface_directory="/proc/x"))
    assert caught.value.field == "checkpoint.huggingface_directory"


def test_a_checkpoint_being_exported_is_not_removed(store: CheckpointStore) -> None:
    job = job_at(store.location.url, keep=1)
    for step in (5, 10, 20):
        write(store, step)
    event = commit(committing(job, 30, layers_written(store, 30, "a")), at=1.0, spared=(5, 10))
    assert isinstance(event, CheckpointCommitted) and event.pruned == (20,)
    assert store.steps() == (30, 10, 5)
    event = commit(committing(job, 40, layers_written(store, 40, "a")), at=1.0)
    assert isinstance(event, CheckpointCommitted) and event.pruned == (5, 10, 30)


@pytest.mark.processes
def test_the_machine_is_informed_of_an_export(store: CheckpointStore, tmp_path: Path) -> None:
    directory = str(tmp_path / "exports")
    job = job_at(store.location.url, huggingface_every_steps=10, huggingface_directory=directory)
    write(store, 20)
    answers: queue.SimpleQueue[Event] = queue.SimpleQueue()

    async def body() -> None:
        checkpoints = CheckpointService(answers.put, lambda: 1.0)
        checkpoints.export(exporting(job, 20))
        done = await asyncio.to_thread(answers.get, timeout=240)
        assert isinstance(done, ExportCompleted) and (done.job_id, done.step) == ("gpt-1", 20)

    asyncio.run(body())


def test_unexpected_errors_are_answers_too(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine waits for an answer, and the thread has more to do."""
    job = job_at(store.location.url)
    answers: queue.SimpleQueue[Event | str] = queue.SimpleQueue()

    def broken(*_: object, **__: object) -> None:
        raise KeyError("region")

    async def body() -> None:
        checkpoints = CheckpointService(answers.put, lambda: 1.0)
        with monkeypatch.context() as patched:
            patched.setattr(CheckpointStore, "at", broken)
            checkpoints.commit(committing(job, 30, ()))
            failed = await asyncio.to_thread(answers.get, timeout=240)
            assert isinstance(failed, CheckpointCommitFailed) and failed.detail == "KeyError: 'region'"
            checkpoints.find(finding(job))
            found = await asyncio.to_thread(answers.get, timeout=240)
            assert isinstance(found, CheckpointFound) and found.unreadable and "region" in found.reason
            checkpoints.find_initial(job, lambda _, rejection: answers.put(rejection))
            assert await asyncio.to_thread(answers.get, timeout=240) == "KeyError: 'region'"
            checkpoints.abandon(AbandonCheckpoint(cause="c", job=job, attempt="z", step=20))
        checkpoints.commit(committing(job, 30, layers_written(store, 30, "a")))
        assert isinstance(await asyncio.to_thread(answers.get, timeout=240), CheckpointCommitted)

    asyncio.run(body())
