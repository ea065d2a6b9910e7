"""The arena: complete snapshots stay, whichever process dies and whatever is full."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from storage.arena import SLOTS, Arena, manifest_path
from storage.errors import ArenaFullError
from storage.free_memory import free_bytes
from storage.manifest import FORMAT, checked_body, digest_of, with_digest
from storage.pages import HUGE_BYTES, Bytes, collapse_pages, map_file
from tests.helpers.arenas import fill, manifest_of, snapshot

SHM = Path("/dev/shm")


@pytest.fixture
def directory() -> Iterator[Path]:
    path = SHM / f"ftd-test-arena-{os.getpid()}"
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_a_snapshot_is_found_again_by_another_process_of_the_same_host(directory: Path) -> None:
    written = snapshot(Arena.open(directory), 7)
    found = Arena.open(directory)
    assert found.snapshots == (written,) and found.problems == []
    assert found.find_corrupt(written) == ()
    assert (found.view(written, written.part("p0")) == 7).all()


def test_two_slots_suffice_and_the_third_holds_a_waiting_snapshot(directory: Path) -> None:
    arena = Arena.open(directory)
    for step in range(1, 20):
        snapshot(arena, step)
        arena.release([s.step for s in arena.snapshots[1:]])
    assert sorted(p.name for p in directory.glob("slot-*")) == ["slot-0", "slot-1"]
    snapshot(arena, 20)
    snapshot(arena, 21)
    assert len(list(directory.glob("slot-*"))) == SLOTS
    with pytest.raises(ArenaFullError, match="not released"):
        arena.begin(1)
    arena.release([19])
    assert snapshot(arena, 22).slot not in {s.slot for s in arena.snapshots[1:]}
    assert all(arena.find_corrupt(s) == () for s in arena.snapshots)


def test_an_uncommitted_snapshot_does_not_exist(directory: Path) -> None:
    arena = Arena.open(directory)
    kept = snapshot(arena, 1)
    fill(arena.begin(10_000), 99)
    found = Arena.open(directory)
    assert found.snapshots == (kept,) and found.find_corrupt(kept) == ()


def test_a_repeated_step_replaces_its_snapshot(directory: Path) -> None:
    arena = Arena.open(directory)
    first, second = snapshot(arena, 5), snapshot(arena, 5)
    assert first.slot != second.slot
    assert Arena.open(directory).snapshots == (second,)


def test_a_flipped_bit_is_found_in_its_part(directory: Path) -> None:
    arena = Arena.open(directory)
    slot = arena.begin(3000)
    fill(slot, 1)
    manifest = manifest_of(slot, 1, 1000, 1000, 1000)
    arena.commit(manifest)
    slot.view[1500] ^= 4
    assert Arena.open(directory).find_corrupt(manifest) == ("p1",)


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "no_slot", "short_slot", "renamed", "other"])
def test_a_corrupt_manifest_is_removed_and_reported_and_others_stay(directory: Path, damage: str) -> None:
    arena = Arena.open(directory)
    kept, bad = snapshot(arena, 1), snapshot(arena, 2)
    path = directory / "step-000000000002.json"
    text = path.read_bytes()
    match damage:
        case "cut":
            path.write_bytes(text[:-20])
        case "changed":
            path.write_bytes(text.replace(b'"step":2', b'"step":3'))
        case "empty":
            path.write_bytes(b"")
        case "no_slot":
            (directory / f"slot-{bad.slot}").unlink()
        case "short_slot":
            os.truncate(directory / f"slot-{bad.slot}", 100)
        case "renamed":
            path.rename(directory / "step-000000000003.json")
        case "other":
            body = b'{"job_id":"x"}'
            path.write_bytes(digest_of(body).encode() + b"\n" + body)
    found = Arena.open(directory)
    assert found.snapshots == (kept,) and len(found.problems) == 1
    assert snapshot(found, 3) in found.snapshots


def test_a_snapshot_of_a_newer_version_stays_with_its_slot(directory: Path) -> None:
    arena = Arena.open(directory)
    newest = snapshot(arena, 2)
    content = (directory / f"slot-{newest.slot}").read_bytes()
    path = manifest_path(directory, 2)
    record = msgspec.json.decode(checked_body(path.read_bytes(), ""))
    path.write_bytes(with_digest(msgspec.json.encode(record | {"format": FORMAT + 1, "more": []})))
    older = Arena.open(directory)
    assert older.snapshots == () and older.problems == []
    assert f"{path} is of a newer version of ftd (format {FORMAT + 1}" in older.newer[2]
    older.reserve(len(content), SLOTS)
    for step in (3, 4):
        snapshot(older, step)
    with pytest.raises(ArenaFullError, match=r"all 3 slots hold .*; .*newer version of ftd"):
        older.begin(1)
    older.release([4])
    with pytest.raises(OSError, match=r"newer version of ftd"):
        snapshot(older, 2)
    snapshot(older, 4)
    older = Arena.open(directory)
    assert [found.step for found in older.snapshots] == [4, 3] and list(older.newer) == [2]
    assert (directory / f"slot-{newest.slot}").read_bytes()[: len(content)] == content
    older.remove_newer()
    assert older.begin(1).number == newest.slot
    assert not Arena.open(directory).newer


def test_the_limit_is_respected_and_complete_snapshots_stay(directory: Path) -> None:
    arena = Arena.open(directory, limit_bytes=3 * 4096)
    kept = snapshot(arena, 1, 8192)
    with pytest.raises(ArenaFullError, match="limit of 12288") as caught:
        arena.begin(8192)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (8192, 4096)
    assert arena.snapshots == (kept,) and arena.find_corrupt(kept) == ()
    assert arena.allocated_bytes == 8192
    snapshot(arena, 2, 4096)


def test_a_full_memory_file_system_is_reported_with_the_bytes() -> None:
    directory = SHM / f"ftd-test-{os.getpid()}"
    arena = Arena.open(directory)
    try:
        kept = snapshot(arena, 1)
        free = free_bytes(SHM)
        assert free <= os.statvfs(SHM).f_bavail * os.statvfs(SHM).f_frsize
        with pytest.raises(ArenaFullError, match=f"{directory} has"):
            arena.begin(free + (1 << 30))
        assert Arena.open(directory).snapshots == (kept,)
        assert arena.allocated_bytes < 1 << 20  # Nothing was allocated that could have got a process killed.
    finally:
        arena.remove()
    assert not directory.exists()


FILLED = """
set -e
mount -t tmpfs -o size=160k tmpfs "$1"
exec "$2" -c '
import errno, sys
from pathlib import Path
from storage.arena import Arena
from tests.helpers.arenas import fill, manifest_of, snapshot
place = Path(sys.argv[1])
arena = Arena.open(place / "device-0")
kept = snapshot(arena, 1, 40_000)
slot = arena.begin(40_000)
fill(slot, 2)
with open(place / "somebody-elses", "wb", buffering=0) as other:
    try:
        while True:
            other.write(bytes(4096))
    except OSError as error:
        assert error.errno == errno.ENOSPC
try:
    arena.commit(manifest_of(slot, 2))
except OSError as error:
    print(error)
for found in (arena, Arena.open(place / "device-0")):
    assert found.snapshots == (kept,) and found.find_corrupt(kept) == () and found.problems == []
(place / "somebody-elses").unlink()
later = snapshot(arena, 3, 40_000)
assert Arena.open(place / "device-0").snapshots == (later, kept)
' "$1"
"""


@pytest.mark.processes
def test_memory_filled_by_others_meanwhile_costs_only_that_snapshot(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace of its own can be made here")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", FILLED, "sh", str(tmp_path), sys.executable],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "No space left" in done.stdout and str(tmp_path) in done.stdout


def test_a_slot_that_cannot_grow_has_its_old_size(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena.open(directory)
    arena.begin(HUGE_BYTES)

    def no_room(descriptor: int, view: Bytes, first: int) -> None:
        os.pwrite(descriptor, b"1", first + 1000)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("storage.arena.allocate", no_room)
    for size in (3 * HUGE_BYTES, 2 * HUGE_BYTES):
        with pytest.raises(ArenaFullError, match=f"needs a slot of {size}"):
            arena.begin(size)
        assert [(p.name, p.stat().st_size) for p in directory.iterdir()] == [("slot-0", HUGE_BYTES)]
    snapshot(arena, 1, HUGE_BYTES)
    with pytest.raises(ArenaFullError):
        arena.begin(1)
    monkeypatch.undo()
    snapshot(arena, 2, HUGE_BYTES)
    assert all(arena.find_corrupt(s) == () for s in Arena.open(directory).snapshots)


def test_a_slot_whose_owner_was_killed_while_it_grew_is_made_again(directory: Path) -> None:
    kept = snapshot(Arena.open(directory), 1)
    draft = directory / "slot-1.draft"
    draft.write_bytes(b"")
    os.truncate(draft, 10_000)
    arena = Arena.open(directory)
    assert not draft.exists() and arena.snapshots == (kept,)
    assert snapshot(arena, 2).slot == 1


@pytest.mark.parametrize("size", [1, 4096, HUGE_BYTES, 3 * HUGE_BYTES + 5000])
def test_the_memory_of_a_slot_is_allocated_before_it_is_written(directory: Path, size: int) -> None:
    arena = Arena.open(directory)
    for wanted in (size, 2 * size, 2 * size + 70 * HUGE_BYTES):
        assert not arena.begin(wanted).view.any()
        status = (directory / "slot-0").stat()
        assert status.st_blocks * 512 >= status.st_size >= wanted
    arena.reserve(size, 2)
    assert (directory / "slot-1").stat().st_size >= size


WRITER = """
import sys
from pathlib import Path
from storage.arena import Arena
sys.path.insert(0, sys.argv[2])
from tests.helpers.arenas import snapshot
arena = Arena.open(Path(sys.argv[1]))
print("ready", flush=True)
for step in range(1, 100_000):
    snapshot(arena, step, 200_000)
    arena.release([s.step for s in arena.snapshots[1:]])
"""


@pytest.mark.processes
def test_the_last_complete_snapshot_survives_a_kill_at_any_moment(directory: Path) -> None:
    newest = 0
    for delay_s in np.linspace(0.001, 0.05, 8).tolist():
        command = [sys.executable, "-c", WRITER, str(directory), str(Path(__file__).parent)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(delay_s)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        arena = Arena.open(directory)
        assert arena.problems == []
        for manifest in arena.snapshots:
            assert arena.find_corrupt(manifest) == ()
            assert (arena.view(manifest, manifest.part("p0")) == manifest.step % 251).all()
        newest = max(newest, *(m.step for m in arena.snapshots), 0)
        arena.release([m.step for m in arena.snapshots])
    assert newest > 10


def test_memory_is_mapped_where_huge_pages_may_be_and_unmapped_with_its_last_view(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(256)) * 64)
    with path.open("r+b") as file:
        view = map_file(file.fileno(), 256 * 64)
    assert view.tobytes() == path.read_bytes()
    view[:4] = 7
    assert path.read_bytes()[:5] == b"\7\7\7\7\4"
    part = view[100:200]
    del view
    assert part.tobytes() == bytes(range(100, 200))

    def lines() -> int:
        return Path("/proc/self/maps").read_text().count(str(path))

    assert part.ctypes.data % HUGE_BYTES == 100
    assert lines() == 1
    del part
    assert lines() == 0
    with pytest.raises(OSError):
        map_file(-1, 4096)


def test_collapsed_pages_keep_their_bytes() -> None:
    values = np.random.default_rng(1).integers(0, 256, 5 * HUGE_BYTES, dtype=np.uint8)
    before = values.copy()
    ranges = [(values.ctypes.data + start, HUGE_BYTES) for start in range(0, 5 * HUGE_BYTES, HUGE_BYTES)]
    assert collapse_pages(ranges) in range(0, 5 * HUGE_BYTES, HUGE_BYTES)
    assert (values == before).all()
    assert collapse_pages([(values.ctypes.data, HUGE_BYTES - 1), (1 << 40, 2 * HUGE_BYTES)]) == 0
