"""The journal: what was saved survives a kill, and one coordinator at a time has it open."""

import asyncio
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ftd.coordinator.journal as module
from ftd.coordinator.events import MAX_UNWRITTEN, EventStream
from ftd.coordinator.journal import MAX_PAGE, Journal
from ftd.coordinator.leadership import InitialLead, Takeover
from ftd.coordinator.ports import Observer, Program
from ftd.driver import SystemClock
from ftd.errors import JournalError, WireError
from ftd.transport.address import BrokerAddress, ClusterAddress
from ftd.transport.client import ClusterClient
from ftd.transport.wire.codec import MAX_PAYLOAD_BYTES
from ftd.transport.wire.compression import IncrementalCompressor
from ftd.transport.wire.coordinator_messages import (
    MAX_COPY_BYTES,
    MAX_STATE_BYTES,
    JournalCopy,
    decode_copy,
    decompress_state,
    encode_copy,
    is_compressed,
    state_compressor,
)
from ftd.transport.wire.event_details import Evaluated
from ftd.transport.wire.public import Answer, EventMessage, HistoryRequest, encode_json
from ftd.transport.wire.topics import Topics
from statemachine.cluster.durable import durable
from statemachine.cluster.durable.durable import RESERVED
from statemachine.cluster.durable.outbox import OUTBOX
from statemachine.cluster.node import NodeMachine
from statemachine.cluster.state import Cluster, Exposure
from statemachine.messages.values import PROTOCOL, NodeFacts
from statemachine.timing import Timing

CLOCK = SystemClock()
PROGRAM = Program(version="1.0", schema=durable.SCHEMA)


def event(name: str, step: int | None = None, **details: object) -> EventMessage:
    return EventMessage(
        event=name,
        node=None,
        generation=1,
        step=step,
        reason="r",
        at="2026-01-01T00:00:00.000Z",
        monotonic=1.0,
        cause="c",
        details=details,
    )


def follower_stream(journal: Journal) -> EventStream:
    return EventStream(
        Topics(cluster="ftd"),
        journal,
        cast(Any, None),
        now=CLOCK.monotonic_s,
        observer=Observer(),
        on_node_event=lambda _: None,
    )


def restored(journal: Journal, copy: JournalCopy | None, incarnation: int) -> InitialLead:
    return Takeover(Timing(), journal, CLOCK, PROGRAM, reset=True).restore_newest(copy, incarnation)


def test_an_event_without_the_step_that_it_needs_does_not_block_a_standbys_journal(tmp_path: Path) -> None:
    """Any client that may write the topic of events can publish one."""
    journal = Journal(tmp_path)
    stream = follower_stream(journal)
    details = Evaluated(loss=1.0, weight=8.0, metrics={}, took_s=1.0)
    for step in (None, 7):
        message = event("Evaluated", step, **msgspec.to_builtins(details))
        if step is None:
            with pytest.raises(WireError, match="Evaluated without a step"):
                stream.receive_as_follower(encode_json(message))
        else:
            stream.receive_as_follower(encode_json(message))
    journal.save(b"state", forced=False)
    journal.close()
    with sqlite3.connect(journal.path) as stored:
        assert stored.execute("SELECT step FROM evaluations").fetchall() == [(7,)]
    stored.close()


def test_a_standby_writes_events_that_no_journal_of_the_leader_accompanies(tmp_path: Path) -> None:
    """One that cannot read the leader's journal saves no copy of it, for as long as it stays."""
    journal = Journal(tmp_path)
    stream = follower_stream(journal)
    for number in range(2 * MAX_UNWRITTEN + 7):
        message = msgspec.structs.replace(event("BrokerLost"), id=f"e-{number}")
        stream.receive_as_follower(encode_json(message))
        assert journal.unwritten < MAX_UNWRITTEN
    with sqlite3.connect(journal.path) as stored:
        assert stored.execute("SELECT COUNT(*) FROM events").fetchall() == [(2 * MAX_UNWRITTEN,)]
    stored.close()
    journal.close()


def test_a_standby_whose_disk_is_full_forgets_events_and_writes_later_ones(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    stream = follower_stream(journal)

    def receive(first: int, end: int) -> list[str]:
        problems = []
        for number in range(first, end):
            message = msgspec.structs.replace(event("BrokerLost"), id=f"e-{number}")
            try:
                stream.receive_as_follower(encode_json(message))
            except JournalError as error:
                problems.append(str(error))
            assert journal.unwritten < MAX_UNWRITTEN
        return problems

    [pages] = journal._db.execute("PRAGMA page_count").fetchone()
    journal._db.execute(f"PRAGMA max_page_count = {pages}")
    problems = receive(0, 2 * MAX_UNWRITTEN)
    assert len(problems) == 2
    assert "is full" in problems[0] and f"{MAX_UNWRITTEN} events are missing in it" in problems[0]
    journal._db.execute("PRAGMA max_page_count = 100000")
    assert not receive(2 * MAX_UNWRITTEN, 3 * MAX_UNWRITTEN)
    assert journal.events(after=0, limit=1, newest=False)[0][0]["id"] == f"e-{2 * MAX_UNWRITTEN}"
    journal.close()


def test_a_new_journal_is_empty(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "deep" / "down")
    assert journal.load() is None
    assert journal.events(after=0, limit=10, newest=False) == ([], 0)
    journal.close()


def test_others_cannot_enter_the_directory_of_a_journal(tmp_path: Path) -> None:
    Journal(tmp_path / "deep" / "down").close()
    assert stat.S_IMODE((tmp_path / "deep" / "down").stat().st_mode) == 0o700


@pytest.mark.parametrize("forced", [True, False])
def test_the_last_saved_state_is_loaded(tmp_path: Path, forced: bool) -> None:
    journal = Journal(tmp_path)
    for value in (b"one", b"two", b"three"):
        journal.save(value, forced=forced)
    journal.close()
    reopened = Journal(tmp_path)
    assert reopened.load() == b"three"
    reopened.close()


@pytest.mark.processes
def test_what_was_saved_survives_sigkill(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from ftd.coordinator.journal import Journal\n"
        "journal = Journal(Path(sys.argv[1]))\n"
        "for index in range(10_000_000):\n"
        "    journal.save(str(index).encode(), forced=False)\n"
        "    os.write(1, b'%d\\n' % index)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    for _ in range(300):
        process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    said = process.stdout.read().split(b"\n")
    process.wait()
    last = int([line for line in said if line][-1]) if any(said) else 299
    journal = Journal(tmp_path)
    saved = journal.load()
    assert saved is not None and int(saved) in (last, last + 1)
    journal.close()


def test_events_and_steps_come_back_in_pages(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.record(event("JobSubmitted", job="gpt-1"))
    for step in range(1, 31):
        journal.record(event("StepCommitted", step, loss=step / 2))
        journal.record(event("NodeJoined", step))
    journal.flush()
    journal.close()

    journal = Journal(tmp_path)
    first, last = journal.events(after=0, limit=20, newest=False)
    rest, _ = journal.events(after=last, limit=20, newest=False)
    assert [e["event"] for e in first] == ["JobSubmitted"] + ["NodeJoined"] * 19
    assert [e["step"] for e in first + rest][1:] == list(range(1, 31))[:39]
    newest, _ = journal.events(after=0, limit=3, newest=True)
    assert [e["step"] for e in newest] == [28, 29, 30]
    steps, last = journal.steps(after=0, limit=MAX_PAGE * 5, newest=False)
    assert [(s["job"], s["step"], s["details"]["loss"]) for s in steps[:2]] == [
        ("gpt-1", 1, 0.5),
        ("gpt-1", 2, 1.0),
    ]
    assert len(steps) == 30
    assert journal.steps(after=last, limit=5, newest=False)[0] == []
    journal.close()


def test_a_step_that_is_reported_again_after_a_restart_is_recorded_once(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.record(event("JobSubmitted", job="gpt-1"))
    journal.record(event("StepCommitted", 1, loss=1.0))
    journal.close()
    journal = Journal(tmp_path)
    journal.record(event("StepCommitted", 1, loss=1.0))
    journal.record(event("StepCommitted", 2, loss=0.5))
    steps, _ = journal.steps(after=0, limit=10, newest=False)
    assert [(s["job"], s["step"]) for s in steps] == [("gpt-1", 1), ("gpt-1", 2)]
    journal.close()


def test_steps_belong_to_the_current_job_even_if_its_submission_was_not_recorded(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path)
    journal.record(event("JobSubmitted", job="old"))
    journal.record(event("StepCommitted", 1, loss=1.0))
    journal.close()
    for _ in range(2):
        journal = Journal(tmp_path)
        journal.set_job("new")
        journal.record(event("StepCommitted", 1, loss=0.9))
        journal.close()
    journal = Journal(tmp_path)
    journal.record(event("StepCommitted", 2, loss=0.8))
    steps, _ = journal.steps(after=0, limit=10, newest=False)
    assert [(s["job"], s["step"]) for s in steps] == [("old", 1), ("new", 1), ("new", 2)]
    journal.close()


def test_a_rebooted_host_skips_generations_that_it_may_have_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure may take the end of the journal: generations that began there were never forced to the
    disk.
    """
    boot = tmp_path / "boot_id"
    monkeypatch.setattr(module, "_BOOT_ID", boot)
    boot.write_text("one\n")
    timing = Timing()

    def begun() -> int:
        journal = Journal(tmp_path / "state")
        try:
            return restored(journal, None, 0).machine.generation
        finally:
            journal.close()

    journal = Journal(tmp_path / "state")
    assert (journal.reserved, journal.floor) == (0, 0), "the first generation is forced"
    journal.save(msgspec.msgpack.encode(durable.write(Cluster(timing=timing, generation=3))), forced=True)
    journal.maintain(generation=3)
    assert journal.reserved == 3 + RESERVED
    journal.close()
    assert begun() == 3, "only the process was restarted"
    boot.write_text("two\n")
    assert begun() == 3 + RESERVED
    assert begun() == 3 + RESERVED, "nor is it forgotten by who starts again before it writes"
    boot.unlink()
    assert begun() == 3 + RESERVED
    journal = Journal(tmp_path / "state")
    journal.save(msgspec.msgpack.encode(durable.write(Cluster(timing=timing, generation=80))), forced=True)
    journal.close()
    assert begun() == 80


def test_the_log_is_moved_into_the_file_at_quiet_moments(tmp_path: Path) -> None:
    """A recovery need not wait for it then; saved records are there before and after."""
    journal = Journal(tmp_path)
    grown = (tmp_path / "journal.sqlite").stat().st_size
    for number in range(module._CHECKPOINT_COMMITS):
        journal.save(number.to_bytes(2, "big") * 50_000, forced=False)
    assert (tmp_path / "journal.sqlite").stat().st_size == grown
    journal.maintain(generation=1)
    assert (tmp_path / "journal.sqlite").stat().st_size > grown
    other = sqlite3.connect(tmp_path / "journal.sqlite")
    assert other.execute("SELECT value FROM state").fetchone()[0] == journal.load()
    log = tmp_path / "journal.sqlite-wal"
    long = log.stat().st_size
    other.close()
    for _ in range(20):  # The log is reused and does not grow.
        journal.save(b"x" * 100_000, forced=False)
    assert log.stat().st_size == long
    journal.close()
    assert Journal(tmp_path).load() == b"x" * 100_000


@pytest.mark.parametrize("letter", ["x", "語"])
def test_a_page_fits_into_one_message(tmp_path: Path, letter: str) -> None:
    journal = Journal(tmp_path)
    for _ in range(20):
        journal.record(event("TrainerLost", detail=letter * 100_000))
    page, last = journal.events(after=0, limit=1000, newest=False)
    assert 1 <= len(page) < 10 and len(encode_json(page)) < MAX_PAYLOAD_BYTES
    assert len(journal.events(after=last, limit=1000, newest=False)[0]) >= 1
    journal.close()


@pytest.mark.parametrize("wanted", [3, 100, 1500, 5000])
def test_a_client_reads_as_many_events_as_it_needs_and_not_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: int
) -> None:
    journal, answered = Journal(tmp_path), 0
    for step in range(1600):
        journal.record(event("TrainerLost", step, detail="x" * 10_000))

    async def request(_: ClusterClient, asked: HistoryRequest) -> Answer:
        nonlocal answered
        rows, last = journal.events(after=asked.after, limit=asked.limit, newest=asked.newest)
        answered += len(rows)
        return Answer(request="1", accepted=True, detail="", data={"events": rows, "last": last})

    async def read() -> list[Any]:
        client = ClusterClient(ClusterAddress(broker=BrokerAddress(host="h")))
        return await client.history(newest=wanted)

    monkeypatch.setattr(ClusterClient, "request", request)
    found = asyncio.run(read())
    assert [one["step"] for one in found] == list(range(1600))[-wanted:]
    assert answered < min(wanted, 1600) + 100, "the first answer has less than 100 of these"
    journal.close()


def test_a_second_coordinator_cannot_open_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with pytest.raises(JournalError, match=r"another coordinator.*coordinator\.state_dir"):
        Journal(tmp_path)
    journal.close()
    Journal(tmp_path).close()


def test_a_corrupt_journal_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"this is no database" * 100)
    with pytest.raises(JournalError, match=r"journal\.sqlite.*move the file away"):
        Journal(tmp_path)


def test_a_journal_of_a_newer_version_is_rejected(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    with sqlite3.connect(tmp_path / "journal.sqlite") as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(JournalError, match="version 99"):
        Journal(tmp_path)


def test_a_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(tmp_path / "file" / "state")


def test_a_write_that_fails_is_an_error_and_leaves_the_old_state(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.save(b"good", forced=True)
    journal._db.execute("PRAGMA query_only = ON")
    with pytest.raises(JournalError, match="cannot be written"):
        journal.save(b"bad", forced=True)
    journal._db.execute("PRAGMA query_only = OFF")
    assert journal.load() == b"good"
    journal.close()


class FailsToCommit:
    """A connection whose disk is full when the transaction ends."""

    def __init__(self, inner: sqlite3.Connection) -> None:
        self.inner = inner

    def execute(self, statement: str, *values: Any) -> Any:
        if statement == "COMMIT":
            raise sqlite3.OperationalError("database or disk is full")
        return self.inner.execute(statement, *values)


def test_a_failed_commit_is_not_treated_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of the saved times, the job and the recorded events stay as they were."""
    journal = Journal(tmp_path)
    journal.save(b"ours", forced=True, position=(1, 1))
    journal.record(event("JobSubmitted", job="job-1"))
    with monkeypatch.context() as full:
        full.setattr(journal, "_db", FailsToCommit(journal._db))
        with pytest.raises(JournalError, match="disk is full"):
            journal.save(b"theirs", forced=True, position=(2, 1), writer_offset_s=12_345.0)
        with pytest.raises(JournalError, match="disk is full"):
            journal.flush()
    assert (journal.load(), journal.position, journal.clock_ahead_s) == (b"ours", (1, 1), 0.0)
    journal.record(event("StepCommitted", 1))
    for _ in range(2):  # Once as the journal goes on, and once as it is read again.
        assert [e["event"] for e in journal.events(after=0, limit=9, newest=False)[0]] == ["JobSubmitted"]
        assert [s["job"] for s in journal.steps(after=0, limit=9, newest=False)[0]] == ["job-1"]
        journal.save(b"theirs", forced=True, position=(2, 1), writer_offset_s=12_345.0)
        assert journal.clock_ahead_s != 0.0
        journal.close()
        journal = Journal(tmp_path)
        assert journal.clock_ahead_s != 0.0
    journal.close()


def test_steps_that_a_rollback_undid_are_deleted(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.record(event("JobSubmitted", job="job-1"))
    for step in range(1, 6):
        journal.record(event("StepCommitted", step))
    journal.record(event("RolledBack", 3))
    journal.record(event("StepCommitted", 4))
    rows, _ = journal.steps(after=0, limit=100, newest=False)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    journal.close()


def test_a_large_state_is_compressed_and_restored() -> None:
    pack = state_compressor()
    state = {"phase": "RUNNING", "nodes": {f"node-{index}": "HEALTHY" for index in range(10_000)}}
    kept = pack.compress(state)
    assert is_compressed(kept)
    assert len(kept) < len(decompress_state(kept)) / 5
    assert msgspec.msgpack.decode(decompress_state(kept)) == state
    small = pack.compress({"phase": "RUNNING"})
    assert decompress_state(small) == small and msgspec.msgpack.decode(small) == {"phase": "RUNNING"}
    for damaged in (kept[:-1], kept[:2] + b"\xff" * 50):
        with pytest.raises(WireError):
            decompress_state(damaged)
    with pytest.raises(WireError, match="larger than"):
        decompress_state(pack.compress({"nodes": bytes(MAX_STATE_BYTES + 1)}))
    large = pack.compress({"nodes": bytes(MAX_COPY_BYTES)})
    assert len(decompress_state(large)) > MAX_COPY_BYTES > len(large)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from("abcdefgh"),
            st.integers(0, 3) | st.tuples(st.integers(0, 9), st.integers(0, 3000)),
        ),
        max_size=8,
    )
)
def test_states_compressed_in_chunks_decode_as_one(states: list[dict[str, Any]]) -> None:
    """The test draws which values are the same objects as before, and which are large."""
    compressor, known = IncrementalCompressor(20_000), dict[Any, Any]()
    for drawn in states:
        state = {}
        for name, value in drawn.items():
            kept = (
                known.setdefault((name, value), [value[0]] * value[1]) if isinstance(value, tuple) else value
            )
            state[name] = kept
        plain, compressed = msgspec.msgpack.encode(state), compressor.compress(state)
        if is_compressed(compressed):
            compressed = zlib.decompress(compressed)  # This verifies the checksum.
            assert len(compressed) > 20_000
        assert msgspec.msgpack.decode(compressed) == state
        assert len(compressed) <= len(plain) + 2


def test_a_coordinator_restores_states_of_any_size_and_names_a_corrupt_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    timing = Timing()
    for nodes in (1, 3000):
        cluster = Cluster(timing=timing, generation=nodes)
        for index in range(nodes):
            facts = NodeFacts(devices=1, host="h", rendezvous_port=1)
            cluster.nodes[f"n{index}"] = NodeMachine(name=f"n{index}", incarnation=1, facts=facts)
        state = state_compressor().compress(durable.write(cluster))
        assert is_compressed(state) == (nodes > 1)
        journal.save(state, forced=False, position=(1, nodes))
        unseen = durable.UNSEEN if journal.shared else 0
        assert restored(journal, None, 0).machine.generation == nodes + unseen
        copy = JournalCopy(
            term=2, serial=nodes, wall_s=0.0, monotonic_s=0.0, version="", schema=durable.SCHEMA,
            state=state, protocol=PROTOCOL,
        )  # fmt: skip
        assert (
            Takeover(timing, journal, CLOCK, PROGRAM, reset=True).save_copy(decode_copy(encode_copy(copy)))
            == ""
        )
        assert journal.position == (2, nodes)
        assert restored(journal, None, 0).machine.generation == nodes + durable.UNSEEN
        assert restored(journal, copy, 0).machine.generation == nodes + durable.UNSEEN
        other = restored(journal, copy, 1).machine.generation
        assert other == nodes + 2 * durable.UNSEEN, "another coordinator leaves out other generations"
    journal.save(state[:-9], forced=False)
    with pytest.raises(JournalError, match=r"truncated.*--reset"):
        restored(journal, None, 0)
    with pytest.raises(WireError):
        Takeover(timing, journal, CLOCK, PROGRAM, reset=True).save_copy(
            msgspec.structs.replace(copy, term=3, state=state[:-9])
        )
    assert journal.position == (2, 3000)
    journal.close()


def test_times_of_the_journal_are_shifted_to_this_hosts_current_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A standby has saved everything that the leader wrote, so it usually begins from its own journal."""
    timing, policy = Timing(), {"forced": False}
    now = time.monotonic()

    def state(since: float) -> bytes:
        exposure = Exposure(nodes=2, since=since)
        return msgspec.msgpack.encode(durable.write(Cluster(timing=timing, exposure=exposure)))

    def waited_s(copy: JournalCopy | None) -> float:
        since = restored(journal, copy, 0).machine.durable_state()["exposure"]["since"]
        return now - float(since)

    journal = Journal(tmp_path)
    journal.save(state(now - 30.0), position=(1, 1), **policy)
    assert waited_s(None) == pytest.approx(30.0)
    for term, theirs in ((2, now - 50_000.0), (3, now + 50_000.0)):
        copy = JournalCopy(
            term=term, serial=1, wall_s=time.time(), monotonic_s=theirs, version="", schema=durable.SCHEMA,
            state=state(theirs - 30.0), protocol=PROTOCOL,
        )  # fmt: skip
        assert waited_s(copy) == pytest.approx(30.0, abs=5.0)
        assert Takeover(timing, journal, CLOCK, PROGRAM, reset=False).save_copy(copy) == ""
        for left in (copy, None):
            assert waited_s(left) == pytest.approx(30.0, abs=5.0)
        journal.close()
        journal = Journal(tmp_path)
        assert waited_s(None) == pytest.approx(30.0, abs=5.0)
    # A journal of this host, from an earlier start that lasted longer than this one has so far.
    with monkeypatch.context() as before:
        wall = time.time()
        before.setattr(SystemClock, "wall_s", lambda self: wall - 70_000.0)
        journal.save(state(now + 70_000.0 - 30.0), position=(4, 1), **policy)
    journal.close()
    (tmp_path / "boot").write_text("another start\n")
    monkeypatch.setattr(module, "_BOOT_ID", tmp_path / "boot")
    journal = Journal(tmp_path)
    assert journal.clock_ahead_s == pytest.approx(-70_000.0, abs=5.0)
    assert waited_s(None) == pytest.approx(30.0, abs=5.0)
    journal.close()


def test_unacknowledged_events_come_with_the_newest_state(tmp_path: Path) -> None:
    """This holds whether the newest state is in this journal or at the broker; old programs have no outbox."""
    journal, timing = Journal(tmp_path), Timing()

    def state(*waiting: tuple[str, str], **others: Any) -> bytes:
        return msgspec.msgpack.encode(durable.write(Cluster(timing=timing)) | {OUTBOX: waiting} | others)

    def left(term: int, kept: bytes) -> JournalCopy:
        return JournalCopy(
            term=term, serial=1, wall_s=0.0, monotonic_s=0.0, version="", schema=durable.SCHEMA,
            state=kept, protocol=PROTOCOL,
        )  # fmt: skip

    journal.save(state(("e-1", "{}")), forced=False, position=(2, 5))
    assert restored(journal, None, 0).outbox == (("e-1", "{}"),)
    assert restored(journal, left(1, state(("e-2", "{}"))), 0).outbox == (("e-1", "{}"),)
    assert restored(journal, left(3, state(("e-2", "{}"))), 0).outbox == (("e-2", "{}"),)
    old = durable.write(Cluster(timing=timing)) | {"another": {"name": "RolledBack"}}
    assert restored(journal, left(3, msgspec.msgpack.encode(old)), 0).outbox == ()
    with pytest.raises(JournalError, match="the journal at the broker"):
        restored(journal, left(3, state(("e-2",))), 0)  # type: ignore[arg-type]
    journal.close()


def test_a_repeated_event_is_recorded_once(tmp_path: Path) -> None:
    """From this process or the one before; its effects on the steps are applied again, in order."""
    first = msgspec.structs.replace(event("RolledBack", 2), id="e-1")
    journal = Journal(tmp_path)
    assert journal.record(first) and not journal.record(first)
    journal.record(event("StepCommitted", 3, loss=1.0))
    journal.close()
    journal = Journal(tmp_path)
    assert not journal.record(first)
    journal.record(event("StepCommitted", 4, loss=1.0))
    assert [e["id"] for e in journal.events(after=0, limit=9, newest=False)[0]] == ["e-1"]
    assert [s["step"] for s in journal.steps(after=0, limit=9, newest=False)[0]] == [4]
    assert journal.record(msgspec.structs.replace(first, id="e-2"))
    journal.close()


def test_a_coordinator_with_peers_skips_generations(tmp_path: Path) -> None:
    """The last leader may have started generations that this coordinator never received, and the broker may
    have lost them.
    """
    journal, timing = Journal(tmp_path), Timing()

    def state(generation: int) -> bytes:
        return msgspec.msgpack.encode(durable.write(Cluster(timing=timing, generation=generation)))

    def begins_at(position: tuple[int, int], generation: int) -> int:
        copy = JournalCopy(
            term=position[0], serial=position[1], wall_s=0.0, monotonic_s=0.0, version="",
            schema=durable.SCHEMA, state=state(generation), protocol=PROTOCOL,
        )  # fmt: skip
        return restored(journal, copy, 0).machine.generation

    journal.save(state(7), forced=False, position=(1, 5))
    assert begins_at((1, 3), 5) == 7  # It led alone, so nobody else can have started any.
    journal.mark_shared()
    assert begins_at((1, 3), 5) == 7 + durable.UNSEEN
    assert begins_at((1, 5), 7) == 7 + durable.UNSEEN
    assert begins_at((1, 6), 8) == 8 + durable.UNSEEN
    journal.close()


def test_the_names_of_other_coordinators_outlast_a_restart(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert not journal.shared and not journal.peers
    for name in ("b", "c", "b"):
        journal.note_peer(name)
    journal.close()
    again = Journal(tmp_path)
    assert again.shared and again.peers == {"b", "c"}
    for number in range(2 * module.MAX_PEERS):
        again.note_peer(f"claimed-{number}")
    assert len(again.peers) == module.MAX_PEERS
    again.close()


def test_the_oldest_steps_and_events_are_deleted_gradually(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PRUNE_EVERY", 10)
    monkeypatch.setattr(module, "_PRUNE_MAX_ROWS", 40)
    journal = Journal(tmp_path)
    for job, count in (("old", 100), ("new", 60)):
        journal.record(event("JobSubmitted", job=job))
        for step in range(1, count + 1):
            journal.record(event("StepCommitted", step, loss=1.0))
    journal.flush()  # So far there are not too many.
    monkeypatch.setattr(module, "_MAX_ROWS", {"events": 5, "steps": 50})

    def left() -> list[tuple[str, int]]:
        return [(s["job"], s["step"]) for s in journal.steps(after=0, limit=MAX_PAGE, newest=False)[0]]

    sizes = []
    for step in range(61, 161):
        journal.record(event("StepCommitted", step, loss=1.0))
        journal.record(event("NodeJoined", step))
        journal.flush()
        sizes.append(len(left()))
    assert max(b - a for a, b in pairwise(sizes)) == 1
    assert min(b - a for a, b in pairwise(sizes)) >= -40
    # The limit, plus the rows since the last check.
    assert len(left()) <= 50 + 10
    assert left()[-50:] == [("new", step) for step in range(111, 161)]
    assert len(journal.events(after=0, limit=MAX_PAGE, newest=False)[0]) <= 5 + 10
    journal.close()
