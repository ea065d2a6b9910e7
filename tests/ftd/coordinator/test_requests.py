"""Requests of clients to a coordinator whose broker, planner and checkpoints the test plays."""

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from ftd.coordinator.coordinator import Coordinator
from ftd.coordinator.journal import LocalDisk
from ftd.coordinator.ports import Observer, Ports, Program
from ftd.driver import SystemClock
from ftd.errors import RequestRejected
from ftd.transport.address import BrokerAddress, ClusterAddress
from ftd.transport.client import ClusterClient
from ftd.transport.wire.codec import MAX_PAYLOAD_BYTES
from ftd.transport.wire.public import (
    Answer,
    HistoryRequest,
    SnapshotRequest,
    SubmitRequest,
    decode_json,
    encode_json,
)
from statemachine.cluster.durable import durable
from statemachine.election.leadership import Leader, Peer
from statemachine.messages.values import CheckpointRecord, Job
from statemachine.timing import Timing
from tests.helpers.coordinator_process import job_data
from tests.helpers.crowd_of_nodes import state_of

Then = Callable[[CheckpointRecord | None, str], None]


class PlayedSession:
    """A session without a connection."""

    connected = False

    def publish(self, *_: Any, **__: Any) -> None:
        """Drop the message."""


class PlayedTransport:
    """A broker that nobody reaches."""

    leader_client_id = "leader"

    def session(self, **_: Any) -> Any:
        return PlayedSession()


class PlayedCheckpoints:
    """A location of checkpoints that the test answers for."""

    def __init__(self) -> None:
        self.asked: list[Then] = []

    def find_initial(self, job: Job, then: Then) -> None:
        self.asked.append(then)


class PlayedPlanning:
    """A planner that does nothing."""

    progress = None

    def cancel(self, effect: Any) -> None: ...

    def check_solver(self, answer: Callable[[str], None]) -> None: ...


def new_coordinator(directory: Path, checkpoints: PlayedCheckpoints) -> Coordinator:
    return Coordinator(
        Ports(
            program=Program(version="1.0", schema=durable.SCHEMA),
            clock=SystemClock(),
            transport=cast(Any, PlayedTransport()),
            disk=LocalDisk(),
            planning=lambda *_: cast(Any, PlayedPlanning()),
            checkpoints=lambda *_: cast(Any, checkpoints),
            observer=Observer(),
        ),
        Peer(name="one", incarnation=1),
        cluster="test",
        directory=directory,
        timing=Timing(),
    )


def test_a_coordinator_that_leads_no_more_takes_no_job_and_takes_it_when_it_leads_again(
    tmp_path: Path,
) -> None:
    """The location of checkpoints may answer when another coordinator leads, and the client asks that one."""
    tables = f'[snapshot]\nevery_steps = 1\n[checkpoint]\nurl = "{tmp_path}"\nevery_steps = 10\n'
    request = SubmitRequest(request="r1", reply="client", job=job_data(tmp_path, tables=tables))

    async def scene() -> None:
        checkpoints = PlayedCheckpoints()
        coordinator = new_coordinator(tmp_path / "state", checkpoints)
        driving = asyncio.ensure_future(coordinator.driver.run())
        other = Leader(term=2, name="two", incarnation=2)
        topic, payload = coordinator.topics.request, encode_json(request)

        coordinator._begin(Leader(term=1, name="one", incarnation=1), None)
        coordinator._on_message(topic, payload, False)
        coordinator._end_lead(other)
        checkpoints.asked[0](None, "")
        await asyncio.sleep(0.01)
        assert coordinator.machine.job is None

        coordinator._begin(Leader(term=3, name="one", incarnation=1), None)
        coordinator._on_message(topic, payload, False)
        assert len(checkpoints.asked) == 2, "the client asks again"
        checkpoints.asked[1](None, "")
        await asyncio.sleep(0.01)
        assert coordinator.machine.job is not None and coordinator.machine.job.name == "gpt"
        driving.cancel()
        coordinator.journal.close()

    asyncio.run(scene())


def answers_of(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> list[Answer]:
    """Return a list to which each answer to the client is added when it is published."""
    answers: list[Answer] = []

    def publish(topic: str, payload: bytes, **_: Any) -> None:
        if topic == coordinator.topics.reply("client"):
            answers.append(decode_json(payload, Answer))

    monkeypatch.setattr(coordinator.leadership, "publish", publish)
    return answers


def test_a_number_that_the_journal_cannot_hold_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nothing of the cluster's state could be written any more."""
    job = job_data(tmp_path, tables="[snapshot]\nevery_steps = 1\n")
    submit = SubmitRequest(request="r1", reply="client", job=job)
    huge = encode_json(submit).replace(b'"steps":100', b'"steps":%d' % 10**20).replace(b'"r1"', b'"r0"')
    every = SnapshotRequest(request="r2", reply="client", every_steps=2**64)

    async def scene() -> list[Answer]:
        coordinator = new_coordinator(tmp_path / "state", PlayedCheckpoints())
        answers = answers_of(coordinator, monkeypatch)
        driving = asyncio.ensure_future(coordinator.driver.run())
        coordinator._begin(Leader(term=1, name="one", incarnation=1), None)
        for payload in (huge, encode_json(submit), encode_json(every)):
            coordinator._on_message(coordinator.topics.request, payload, False)
            await asyncio.sleep(0.01)
        assert coordinator.driver.bugs == 0, "the state was written"
        driving.cancel()
        coordinator.journal.close()
        return answers

    too_large = "the number has more than 64 bits (write a smaller one)"
    assert [(answer.accepted, answer.detail.partition("-")[0]) for answer in asyncio.run(scene())] == [
        (False, f"job.steps: {too_large}"),
        (True, "gpt"),
        (False, f"every_steps: {too_large}"),
    ]


def test_a_client_learns_that_the_journal_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an answer it would take the coordinator for busy or gone."""

    async def scene() -> list[Answer]:
        coordinator = new_coordinator(tmp_path / "state", PlayedCheckpoints())
        answers = answers_of(coordinator, monkeypatch)
        with sqlite3.connect(coordinator.journal.path) as other:
            other.execute("DROP TABLE events")
        other.close()
        request = HistoryRequest(request="r1", reply="client")
        coordinator._on_message(coordinator.topics.request, encode_json(request), False)
        coordinator.journal.close()
        return answers

    [answer] = asyncio.run(scene())
    assert not answer.accepted
    assert "journal.sqlite cannot be read: no such table: events" in answer.detail


def test_a_request_that_nobody_would_read_is_rejected_at_once(tmp_path: Path) -> None:
    data = job_data(tmp_path)
    job = msgspec.structs.replace(data, training={**data.training, "arguments": {"text": "x" * 2**20}})

    async def scene() -> None:
        client = ClusterClient(ClusterAddress(broker=BrokerAddress(host="127.0.0.1", port=1)))
        with pytest.raises(RequestRejected, match=r"too large: payload of .* bytes; at most 1048576"):
            await client.request(SubmitRequest(**client.envelope(), job=job), timeout_s=0.1)

    asyncio.run(scene())


@pytest.mark.parametrize(("nodes", "published"), [(4_000, True), (30_000, False)])
def test_the_state_of_many_nodes_is_read_or_the_log_says_that_it_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, published: bool
) -> None:
    names = [f"ip-10-12-34-{number}.eu-central-1.compute.internal" for number in range(nodes)]
    sent: list[bytes] = []
    oversized = 0

    async def scene() -> None:
        nonlocal oversized
        coordinator = new_coordinator(tmp_path / "state", PlayedCheckpoints())
        monkeypatch.setattr(coordinator, "public_state", lambda: state_of(names))
        monkeypatch.setattr(coordinator.leadership, "publish", lambda _, state, **__: sent.append(state))
        coordinator._publish_state()
        for state in sent:
            assert len(state) > MAX_PAYLOAD_BYTES
            client = ClusterClient(ClusterAddress(broker=BrokerAddress(host="h")))
            client._on_message(client.topics.cluster_state, state, True)
            assert len((await client.state())["nodes"]) == nodes
            coordinator._handle_cluster_state(state, False)
            coordinator.leadership._follower_session._handle_state(state)
        oversized = coordinator._oversized_states.count
        coordinator.journal.close()

    asyncio.run(scene())
    assert (len(sent), oversized) == ((1, 0) if published else (0, 1))
