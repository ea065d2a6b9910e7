"""Persistent checkpoints: complete or absent; corrupt ones are skipped and reported."""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFile

from storage.checkpoint import MANIFEST, CheckpointManifest, CheckpointStore
from storage.description import ModelDescription, encode_description
from storage.errors import (
    CheckpointMissingError,
    CorruptDataError,
    ForeignCheckpointError,
    LocationError,
    LocationFullError,
    TransferCancelledError,
)
from storage.layerstate import fingerprint_of
from storage.manifest import digest_of, encode_record
from storage.rate_limit import RateLimiter
from storage.values import job_mark
from tests.helpers.kept_checkpoints import DESCRIPTION, LAYERS, about, holds, in_chunks, layer_state, write
from tests.helpers.waiting import until

ROOT = Path(__file__).parents[2]
STEP_7 = "step-000000000007"


@pytest.fixture(params=["path", "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    match request.param:
        case "path":
            yield str(tmp_path / "a" / "kept")
        case "file":
            yield f"file://{tmp_path}/kept"
        case _:
            yield f"memory://{tmp_path}"
            fsspec.filesystem("memory").rm(str(tmp_path), recursive=True)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore.at(str(tmp_path / "kept"), create=True)


def root_of(store: CheckpointStore) -> Path:
    return Path(store.location.url)


# --- complete checkpoints --------------------------------------------------------------------------


def test_another_process_reads_the_layers_that_were_written(url: str) -> None:
    written = [write(CheckpointStore.at(url, create=True), step) for step in (7, 30, 12)]
    store = CheckpointStore.at(url)
    assert store.steps() == (30, 12, 7) and store.problems == []
    assert store.open().manifest == written[1]
    assert all(holds(store, step) for step in (7, 12, 30))
    assert store.open(12).verify() == ()
    assert store.open(7).header(2).entries[0].name == "2.weight"
    assert len({manifest.fingerprint for manifest in written}) == 1
    assert written[0].vote == {"loss": 2.5, "gradient_norm": 1.0}


def test_hosts_write_their_layers_in_parallel_and_one_commits(url: str) -> None:
    CheckpointStore.at(url, create=True)

    def host(layer: int) -> Any:
        store = CheckpointStore.at(url)
        header, payload = layer_state(layer, 7)
        # The file goes over the wire in this form to the host that commits.
        file = store.write_layer(store.begin(7, "g4"), layer, header, in_chunks(payload))
        return msgspec.json.decode(msgspec.json.encode(file), type=type(file))

    with ThreadPoolExecutor(LAYERS) as hosts:
        files = list(hosts.map(host, range(LAYERS)))
    store = CheckpointStore.at(url)
    assert store.steps() == ()
    store.commit(store.begin(7, "g4"), files, **about())
    assert store.steps() == (7,) and holds(store, 7)


def test_a_repeated_step_replaces_its_checkpoint_when_it_is_complete(url: str) -> None:
    store = CheckpointStore.at(url, create=True)
    write(store, 7, attempt="1", seed=1)
    header, payload = layer_state(0, 2)
    store.write_layer(store.begin(7, "2"), 0, header, [payload])
    assert holds(store, 7, seed=1)
    write(store, 7, attempt="3", seed=3)
    assert CheckpointStore.at(url).steps() == (7,) and holds(store, 7, seed=3)


def test_an_empty_layer_and_one_of_several_chunks(url: str) -> None:
    store = CheckpointStore.at(url, create=True)
    draft = store.begin(1)
    empty = msgspec.msgpack.encode(
        {"format": 1, "layer": 0, "entries": [], "scalars": {}, "schedule": {}, "size_bytes": 0}
    )
    header, payload = layer_state(1, numel=2_000_000)
    files = [store.write_layer(draft, 0, empty, []), store.write_layer(draft, 1, header, [payload])]
    store.commit(draft, files, **about())
    checkpoint = store.open(1)
    assert len(checkpoint.read_layer(0)[2]) == 0 and checkpoint.verify() == ()
    assert np.array_equal(checkpoint.read_layer(1)[2], payload)


def test_the_newest_checkpoints_and_the_newest_draft_stay(url: str) -> None:
    store = CheckpointStore.at(url, create=True)
    for step in (10, 20, 30, 40):
        write(store, step)
    store.begin(35, "killed")
    header, payload = layer_state(0, 50)
    draft = store.begin(50)
    first = store.write_layer(draft, 0, header, [payload])
    assert store.prune(2) == (10, 20)
    assert store.steps() == (40, 30)
    rest = [store.write_layer(draft, k, layer_state(k, 50)[0], [layer_state(k, 50)[1]]) for k in (1, 2)]
    store.commit(draft, [first, *rest], **about())
    assert store.prune(2) == (30,) and store.steps() == (50, 40)
    assert not any("35" in name for name in store.location.names())
    with pytest.raises(ValueError, match="at least one"):
        store.prune(0)


def test_an_abandoned_draft_leaves_nothing_and_others_stay(url: str) -> None:
    store = CheckpointStore.at(url, create=True)
    write(store, 7)
    draft = store.begin(7, "2")
    store.write_layer(draft, 0, layer_state(0)[0], [layer_state(0)[1]])
    store.abandon(draft)
    assert holds(store, 7) and store.steps() == (7,) and store.problems == []
    assert len(store.location.sizes(STEP_7)) == LAYERS + 2  # The manifest and the description.


# --- incomplete checkpoints ------------------------------------------------------------------------


def test_missing_and_duplicate_layers_are_not_committed(url: str) -> None:
    store = CheckpointStore.at(url, create=True)
    draft = store.begin(7)
    files = [store.write_layer(draft, k, layer_state(k)[0], [layer_state(k)[1]]) for k in range(LAYERS)]
    for some in ([], files[:1] + files[2:], [files[0], *files], files[1:]):
        with pytest.raises(CorruptDataError, match="exactly once"):
            store.commit(draft, some, **about())
    lying = msgspec.structs.replace(files[1], name="layer-0077.bin")
    with pytest.raises(CorruptDataError, match=r"layer-0077\.bin is missing"):
        store.commit(draft, [files[0], lying, files[2]], **about())
    escaping = msgspec.structs.replace(files[1], name="../../etc/passwd")
    with pytest.raises(CorruptDataError, match="inconsistent for layer 1"):
        store.commit(draft, [files[0], escaping, files[2]], **about())
    assert store.steps() == ()
    store.commit(draft, files, **about())
    assert store.steps() == (7,)


def test_bytes_that_do_not_fit_the_header_are_rejected(url: str) -> None:
    store = CheckpointStore.at(url, create=True)
    draft = store.begin(7)
    header, payload = layer_state(0)
    for layer, head, chunks in ((0, header, [payload[:-1]]), (1, header, [payload]), (0, b"no", [payload])):
        with pytest.raises(CorruptDataError, match="header"):
            store.write_layer(draft, layer, head, chunks)
    assert store.location.sizes(draft.directory) == {}
    for step, attempt in ((-1, "1"), (10**12, "1"), (1, "../x"), (1, "")):
        with pytest.raises(ValueError, match="invalid step or attempt"):
            store.begin(step, attempt)


def test_a_source_that_fails_leaves_no_file(url: str) -> None:
    store = CheckpointStore.at(url, create=True)
    draft = store.begin(7)
    header, payload = layer_state(0)

    def broken() -> Iterator[memoryview]:
        yield memoryview(payload)[:100]
        raise KeyError("shared memory went away")

    with pytest.raises(KeyError, match="shared memory"):
        store.write_layer(draft, 0, header, broken())
    assert store.location.sizes(draft.directory) == {}


def test_writing_is_cancelled_from_another_thread_and_leaves_no_file(store: CheckpointStore) -> None:
    flow = RateLimiter(bytes_per_s=8e6)
    header, payload = layer_state(0, numel=10_000_000)
    draft = store.begin(7)
    threading.Timer(0.2, flow.cancel).start()
    begun = time.monotonic()
    with pytest.raises(TransferCancelledError):
        store.write_layer(draft, 0, header, [payload], flow)
    assert time.monotonic() - begun < 5
    assert list((root_of(store) / draft.directory).iterdir()) == []


def test_threads_share_one_rate() -> None:
    flow = RateLimiter(bytes_per_s=1e6)
    begun = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(flow.acquire, [50_000] * 8))
    assert time.monotonic() - begun >= 0.4
    assert RateLimiter().acquire(10**15)
    with pytest.raises(ValueError, match="bytes_per_s is 0"):
        RateLimiter(bytes_per_s=0)


# --- corruption ------------------------------------------------------------------------------------


def rewritten(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    """Return a change of the manifest with a valid digest, as of a malicious writer or another version."""

    def damage(directory: Path) -> None:
        _, _, body = (directory / MANIFEST).read_bytes().partition(b"\n")
        plain = msgspec.json.decode(body)
        change(plain)
        (directory / MANIFEST).write_bytes(encode_record(plain))

    return damage


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no manifest": (lambda d: (d / MANIFEST).unlink(), "no manifest"),
    "cut manifest": (lambda d: os.truncate(d / MANIFEST, 200), "truncated or changed"),
    "empty manifest": (lambda d: os.truncate(d / MANIFEST, 0), "truncated or changed"),
    "other version": (rewritten(lambda m: m.update(format=3)), "format 3; this version reads 2"),
    "newer fields": (rewritten(lambda m: m.update(new=2)), "not a CheckpointManifest"),
    "other step": (rewritten(lambda m: m.update(step=8)), "manifest is of step 8"),
    "path trick": (rewritten(lambda m: m["layers"][1].update(name="../x.bin")), "inconsistent for layer 1"),
    "negative": (rewritten(lambda m: m["layers"][1].update(payload_bytes=-5)), "inconsistent for layer 1"),
    "missing file": (lambda d: (d / "layer-0001.bin").unlink(), "layer-0001.bin is missing"),
    "cut file": (lambda d: os.truncate(d / "layer-0001.bin", 5000), "layer-0001.bin has 5000 bytes"),
    "lost description": (lambda d: (d / "description.bin").unlink(), "description.bin is missing"),
    "description's name": (
        rewritten(lambda m: m["description"].update(name="../x")),
        "inconsistent for the desc",
    ),
    "longer file": (lambda d: os.truncate(d / "layer-0001.bin", 90000), "has 90000 bytes"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_corrupt_checkpoint_is_reported_and_the_one_before_is_used(
    store: CheckpointStore, damage: str
) -> None:
    write(store, 5)
    write(store, 7)
    corrupt, words = DAMAGE[damage]
    corrupt(root_of(store) / STEP_7)
    assert store.steps() == (5,)
    (problem,) = store.problems
    assert words in problem and STEP_7 in problem
    assert store.open().manifest.step == 5
    with pytest.raises((CorruptDataError, ForeignCheckpointError, CheckpointMissingError), match=words):
        store.open(7)
    if damage == "other version":
        with pytest.raises(ForeignCheckpointError, match="format 3"):
            write(store, 7, attempt="2")
    else:
        write(store, 7, attempt="2")
        assert store.steps() == (7, 5) and holds(store, 7)


@pytest.mark.parametrize("place", [8, 3000, -300, -10, -1])
def test_a_flipped_bit_is_found_by_verify_and_by_reading_that_layer(
    store: CheckpointStore, place: int
) -> None:
    write(store, 7)
    path = root_of(store) / STEP_7 / "layer-0001.bin"
    data = bytearray(path.read_bytes())
    data[place] ^= 16
    path.write_bytes(data)
    assert store.steps() == (7,)
    (problem,) = store.open().verify()
    assert "layer-0001.bin" in problem
    with pytest.raises(CorruptDataError, match=r"layer-0001\.bin"):
        store.open().read_layer(1)
    assert store.open().read_layer(2)


def test_the_description_is_read_and_verified_and_older_formats_have_none(store: CheckpointStore) -> None:
    write(store, 7)
    assert store.open().description() == DESCRIPTION
    path = root_of(store) / STEP_7 / "description.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (problem,) = store.open().verify()
    assert "description.bin is truncated or changed" in problem
    with pytest.raises(CorruptDataError, match="the description of the model is malformed"):
        store.write_description(store.begin(8), digest_of(b"x").encode() + b"\nx")
    store.abandon(store.begin(8))
    write(store, 9)
    rewritten(lambda m: (m.update(format=1), m.pop("description")))(root_of(store) / "step-000000000009")
    assert store.open(9).description() == ModelDescription() and holds(store, 9)
    files = encode_description(ModelDescription(files={"../x": b""}))
    with pytest.raises(CorruptDataError, match=r"has the invalid file name '\.\./x'"):
        store.write_description(store.begin(10), files)


def test_another_jobs_checkpoints_are_skipped_and_never_overwritten_or_removed(url: str) -> None:
    write(CheckpointStore.at(url, create=True), 7, job="bert")
    store = CheckpointStore.at(url, job="gpt")
    assert store.steps() == () and "of job 'bert', not of 'gpt'" in store.problems[0]
    with pytest.raises(ForeignCheckpointError, match="bert"):
        store.open(7)
    with pytest.raises(CheckpointMissingError, match=r"no complete checkpoint.*bert"):
        store.open()
    with pytest.raises(ForeignCheckpointError, match="a directory of its own"):
        write(store, 7, attempt="2")
    for step in (8, 9):
        write(store, step)
    assert store.prune(1) == (8,)
    assert CheckpointStore.at(url, job="bert").steps() == (7,)


def test_another_jobs_draft_stays_while_it_is_written(url: str) -> None:
    gpt, bert = (CheckpointStore.at(url, job=job, create=True) for job in ("gpt", "bert"))
    layers = [layer_state(k) for k in range(LAYERS)]
    draft = bert.begin(7, f"3_7_ab12cd34{job_mark('bert')}")
    first = bert.write_layer(draft, 0, layers[0][0], [layers[0][1]])
    stopped = gpt.begin(8, f"3_8_ef56ab78{job_mark('gpt')}")
    gpt.write_layer(stopped, 0, layers[0][0], [layers[0][1]])
    for step in (9, 10, 11):
        write(gpt, step)
    assert gpt.prune(2) == (9,)
    assert not gpt.location.sizes(stopped.directory)
    rest = [bert.write_layer(draft, k, layers[k][0], [layers[k][1]]) for k in range(1, LAYERS)]
    bert.commit(draft, [first, *rest], **about("bert"))
    assert bert.steps() == (7,) and gpt.steps() == (11, 10)


@pytest.mark.parametrize("before", ["sizes", "open"])
def test_a_checkpoint_that_is_removed_while_all_are_listed_is_neither_an_error_nor_a_problem(
    url: str, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    store = CheckpointStore.at(url, create=True)
    for step in (7, 8):
        write(store, step)
    work = getattr(store.location, before)

    def removed_meanwhile(directory: str, *name: str) -> Any:
        if directory == STEP_7:
            CheckpointStore.at(url).location.remove(STEP_7)
        return work(directory, *name)

    monkeypatch.setattr(store.location, before, removed_meanwhile)
    assert store.steps() == (8,) and store.problems == store.unfinished == []


def test_directories_of_others_stay_whatever_their_names(store: CheckpointStore) -> None:
    for name in ("model", "model.replaced", "old.replaced", ".step-1.x.replaced"):
        (root_of(store) / name).mkdir()
    write(store, 7)
    store.prune(1)
    assert store.location.names() == [".step-1.x.replaced", "model", "model.replaced", "old.replaced", STEP_7]


def test_a_checkpoint_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore.at(str(tmp_path / "kept"), job="gpt", create=True)
    write(store, 7)
    rename = Path.rename

    def refused(path: Path, target: Path) -> Path:
        if path.name.endswith(".partial"):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(LocationError, match="Input/output error"):
        write(store, 7, attempt="2")
    assert store.steps() == (7,) and holds(store, 7)


def test_a_writer_that_begins_during_a_replacement_does_not_fail_it(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, 7, seed=1)
    rename, begun = Path.rename, []

    def begin_between(path: Path, target: Path) -> Path:
        moved = rename(path, target)
        if target.name == f".{STEP_7}.replaced" and not begun:
            begun.append(CheckpointStore(store.location).begin(8))
        return moved

    monkeypatch.setattr(Path, "rename", begin_between)
    again = write(store, 7, attempt="2", seed=2)
    assert begun and store.open(7).manifest.fingerprint == again.fingerprint


def test_the_fingerprint_depends_on_the_model_and_not_on_the_step(store: CheckpointStore) -> None:
    fingerprint = write(store, 7).fingerprint
    assert write(store, 8).fingerprint == fingerprint == fingerprint_of(store.open(7).headers())
    assert write(store, 9, numel=2000).fingerprint != fingerprint


def test_a_missing_step_is_an_error(url: str) -> None:
    store = CheckpointStore.at(url, create=True)
    write(store, 7)
    with pytest.raises(CheckpointMissingError, match="no checkpoint of step 8; complete ones: 7"):
        store.open(8)


# --- faults ----------------------------------------------------------------------------------------

WRITER = """
import sys
from storage.checkpoint import CheckpointStore
from tests.helpers.kept_checkpoints import write
store = CheckpointStore.at(sys.argv[1])
step = 100
while True:
    print(step, flush=True)
    write(store, step, numel=400_000)
    step += 1
"""


@pytest.mark.processes
def test_a_writer_killed_at_any_moment_leaves_complete_checkpoints_or_none(store: CheckpointStore) -> None:
    draw = np.random.default_rng(3)
    write(store, 7)
    for _ in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, store.location.url], cwd=ROOT, stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"100\n"
        time.sleep(draw.uniform(0, 0.15))
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        for step in (steps := store.steps()):
            assert store.open(step).verify() == ()
        assert steps[-1] == 7
        assert store.problems == []
        assert all("being written, or its writer was stopped" in one for one in store.unfinished)
    write(store, 10**6)
    store.prune(1)
    assert store.location.names() == ["step-000001000000"]
    assert store.steps() == (10**6,) and store.problems == []


@pytest.mark.processes
def test_a_writer_killed_while_writing_is_reported_as_unfinished(store: CheckpointStore) -> None:
    write(store, 7)
    slow = WRITER.replace("write(store, step, numel=400_000)", "").replace(
        "step += 1",
        "from tests.helpers.kept_checkpoints import layer_state; from storage.rate_limit import RateLimiter; "
        "h, p = layer_state(0, "
        "numel=4_000_000); store.write_layer(store.begin(step), 0, h, [p], RateLimiter(bytes_per_s=1e6))",
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", slow, store.location.url], cwd=ROOT, stdout=subprocess.PIPE
    )
    draft = root_of(store) / ".step-000000000100.1.partial"
    until(
        lambda: writer.poll() is not None or any(path.stat().st_size > 1e6 for path in draft.glob(".layer-*"))
    )
    assert writer.poll() is None
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert store.steps() == (7,)
    assert store.unfinished == [
        ".step-000000000100.1.partial is skipped: it is being written, or its writer was stopped"
    ]
    write(store, 100)
    assert holds(store, 100)


@pytest.mark.parametrize("moment", ["moved aside", "moved aside and replaced", "half removed"])
def test_a_killed_replacement_is_finished_by_the_next_writer(store: CheckpointStore, moment: str) -> None:
    root = root_of(store)
    write(store, 7)
    match moment:
        case "moved aside":
            (root / STEP_7).rename(root / f".{STEP_7}.replaced")
        case "moved aside and replaced":
            (root / STEP_7).rename(root / f".{STEP_7}.replaced")
            write_elsewhere = CheckpointStore.at(str(root.parent / "other"), create=True)
            write(write_elsewhere, 7)
            (root.parent / "other" / STEP_7).rename(root / STEP_7)
        case _:
            (root / f".{STEP_7}.removed").mkdir()
    store.begin(8)
    assert holds(store, 7)
    assert sorted(store.location.names()) == [".step-000000000008.1.partial", STEP_7]


TINY = """
set -e
mount -t tmpfs -o size=96k tmpfs "$1"
exec "$2" -c '
import sys
from pathlib import Path
from storage.checkpoint import CheckpointStore
from storage.errors import LocationFullError
from tests.helpers.kept_checkpoints import holds, layer_state, write
store = CheckpointStore.at(sys.argv[1])
write(store, 7)
draft = store.begin(8)
try:
    for layer in range(50):
        store.write_layer(draft, layer, *(lambda h, p: (h, [p]))(*layer_state(layer)))
except LocationFullError as error:
    print(error)
assert not list((Path(sys.argv[1]) / draft.directory).glob(".layer*"))
store.abandon(draft)
assert store.steps() == (7,) and store.problems == [] and holds(store, 7)
write(store, 9)
assert holds(store, 9)
' "$1"
"""


@pytest.mark.processes
def test_a_full_disk_is_reported_and_costs_only_the_draft(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace of its own can be made here")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", TINY, "sh", str(tmp_path), sys.executable],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "no space left" in done.stdout and str(tmp_path) in done.stdout


def test_a_limit_on_the_size_of_files_is_reported_as_such(store: CheckpointStore) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    write(store, 7)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(LocationFullError, match="larger than this process may write"):
            write(store, 8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert store.steps() == (7,) and holds(store, 7)


READ_ONLY = """
set -e
mount --bind "$1" "$1"
mount -o remount,ro,bind "$1"
exec "$2" -c '
import sys
from storage.checkpoint import CheckpointStore
from storage.errors import LocationError
from tests.helpers.kept_checkpoints import holds
store = CheckpointStore.at(sys.argv[1], create=True)
assert holds(store, 7)
for fails in (lambda: store.begin(8), lambda: CheckpointStore.at(sys.argv[1] + "/new", create=True)):
    try:
        fails()
    except LocationError as error:
        print(error)
' "$1"
"""


@pytest.mark.processes
def test_a_read_only_directory_is_reported_and_can_be_read(store: CheckpointStore) -> None:
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace of its own can be made here")
    write(store, 7)
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", READ_ONLY, "sh", store.location.url, sys.executable],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("it is read-only") == 2


def test_a_directory_that_vanishes_is_reported_and_not_made_again(store: CheckpointStore) -> None:
    write(store, 7)
    draft, opened = store.begin(8), store.open(7)
    root_of(store).rename(root_of(store).with_name("unmounted"))
    header, payload = layer_state(0)
    for fails in (
        lambda: store.write_layer(draft, 0, header, [payload]),
        lambda: store.begin(9),
        store.steps,
        lambda: opened.read_layer(0),
        lambda: store.prune(1),
    ):
        with pytest.raises(LocationError, match="does not exist"):
            fails()
    assert not root_of(store).exists()


@pytest.mark.parametrize(
    ("url", "words"),
    [("", "path is empty"), ("nosuch://bucket/x", "nosuch"), ("s3://bucket/x", "s3fs|fsspec package")],
)
def test_an_unusable_url_is_rejected_with_a_remedy(url: str, words: str) -> None:
    with pytest.raises(LocationError, match=words):
        CheckpointStore.at(url)


def test_a_file_in_place_of_the_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("")
    with pytest.raises(LocationError, match="cannot be made"):
        CheckpointStore.at(str(tmp_path / "kept"), create=True)
    for place in (tmp_path / "kept", tmp_path / "kept" / "gpt"):
        with pytest.raises(
            LocationError, match=f"{place} cannot be read: it is not a directory, or is below a file$"
        ):
            CheckpointStore.at(str(place)).steps()


def test_a_failing_object_store_raises_a_location_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = CheckpointStore.at(f"memory://{tmp_path}", create=True)
    write(store, 7)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("503 slow down")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "open", refuse)
    with pytest.raises(LocationError, match="cannot be written: 503 slow down"):
        write(store, 8)
    with pytest.raises(LocationError, match="cannot be read: 503 slow down"):
        store.open(7)
    monkeypatch.undo()
    assert store.steps() == (7,)


def test_a_manifest_that_is_not_written_again_leaves_the_former_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = CheckpointStore.at(f"memory://{tmp_path}", create=True)
    write(store, 7)

    class Refusing(MemoryFile):
        """A file that an object store receives at once, or not at all."""

        def write(self, *_: object) -> int:
            raise RuntimeError("503 slow down")

        def close(self) -> None:
            pass

    files = type(fsspec.filesystem("memory"))
    real = files.open

    def refuse(self: object, path: str, mode: str = "rb", **options: object) -> object:
        return (
            Refusing()
            if path.endswith("manifest.json") and mode == "wb"
            else real(self, path, mode, **options)
        )

    monkeypatch.setattr(files, "open", refuse)
    with pytest.raises(LocationError, match="cannot be written: 503 slow down"):
        write(store, 7, attempt="b")
    assert store.steps() == (7,)


def test_data_files_are_written_without_asking_what_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A question to an object store takes tens of milliseconds. Only the manifest may replace another attempt's."""
    asked: list[str] = []
    files = type(fsspec.filesystem("memory"))
    real = files.ukey

    def ukey(self: object, path: str) -> object:
        asked.append(path.rpartition("/")[2])
        return real(self, path)

    monkeypatch.setattr(files, "ukey", ukey)
    write(CheckpointStore.at(f"memory://{tmp_path}", create=True), 7)
    assert asked == ["manifest.json"]


def test_the_documentation_lists_the_fields_of_the_manifest() -> None:
    page = (ROOT / "docs" / "how-to" / "checkpoints.md").read_text()
    fields = [field.encode_name for field in msgspec.structs.fields(CheckpointManifest)]
    assert [name for name in fields if f"`{name}`" not in page] == []
