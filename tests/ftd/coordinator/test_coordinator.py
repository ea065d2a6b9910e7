"""The coordinator as a real process with a real broker, and a node that the test plays."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftd.config.job import load_job_data
from ftd.config.profile_file import save_profile
from ftd.coordinator import commands
from ftd.errors import RequestRejected, UnreachableError
from ftd.transport.client import ClusterClient
from ftd.transport.mqtt.mosquitto import free_port
from ftd.transport.mqtt.session import KEEP_ALIVE_S, MqttSession
from ftd.transport.wire.codec import MAX_PAYLOAD_BYTES
from ftd.transport.wire.public import (
    DrainRequest,
    StatusRequest,
    StopRequest,
    SubmitRequest,
    encode_json,
)
from ftd.transport.wire.topics import Topics
from statemachine.effects import BroadcastCommand
from statemachine.messages.cluster import (
    Prepare,
    RequestHello,
    RequestSteps,
    Stop,
)
from statemachine.messages.common import Prepared, Quiesce
from tests.helpers.brokers import RunningBroker
from tests.helpers.coordinator_process import (
    PROFILE,
    ROOT,
    Daemon,
    PlayedNode,
    job_data,
    state_when,
)
from tests.helpers.profile_files import profile_document
from tests.helpers.waiting import PATIENCE_S, until, until_async


@pytest.fixture
def daemon(tmp_path: Path, mosquitto: RunningBroker) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path, mosquitto.port)
    daemon.start()
    yield daemon
    if daemon.process is not None:
        daemon.end()
    assert "Traceback" not in daemon.said(), daemon.said()


async def submitted(client: ClusterClient, data: Any) -> str:
    """Submit a job; wait for a coordinator that has yet to start, however busy the machine is."""
    request = SubmitRequest(**client.envelope(), job=data)
    return (await client.request(request, timeout_s=PATIENCE_S)).detail


async def events_of(client: ClusterClient) -> list[str]:
    return [event["event"] for event in await client.history()]


def test_a_job_starts_on_a_node_and_its_history_is_recorded(daemon: Daemon, tmp_path: Path) -> None:
    async def scene() -> None:
        async with ClusterClient(daemon.address) as client, PlayedNode(daemon, "node-0") as node:
            job_id = await submitted(client, job_data(tmp_path))
            generation = await node.start_training(job_id)
            state = await state_when(client, lambda s: s["phase"] == "RUNNING" and s["step"] == 3)
            assert state["generation"] == generation
            assert state["job"] == {"id": job_id, "name": "gpt", "steps": 100, "global_batch": 16}
            assert state["nodes"]["node-0"]["in_plan"]
            retained = await client.state()
            assert retained["schema"] == 2 and retained["coordinator"] > 0
            names = await events_of(client)
            assert {"CoordinatorStarted", "NodeJoined", "JobSubmitted"} <= set(names)
            wanted = ["GenerationStarted", "PlanChosen", "TrainingResumed", "RecoveryCompleted"]
            assert [name for name in names if name in wanted] == wanted
            steps = await client.history(what="steps")
            assert [(s["step"], s["details"]["loss"]) for s in steps] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]

    asyncio.run(scene())


def test_a_command_to_several_nodes_is_one_message(daemon: Daemon, tmp_path: Path) -> None:
    """A command for one node goes to its own topic; a node that is not named ignores the broadcast."""

    async def scene() -> None:
        async with (
            ClusterClient(daemon.address) as client,
            PlayedNode(daemon, "node-0") as first,
            PlayedNode(daemon, "node-1") as second,
            PlayedNode(daemon, "node-2", incarnation=7) as stranger,
        ):
            await state_when(client, lambda s: len(s["nodes"]) == 3)
            stranger.incarnation = 8  # So it ignores commands to the incarnation that the coordinator knows.
            job_id = await submitted(client, job_data(tmp_path))
            asked = [(await node.expect(Prepare)).profile for node in (first, second)]
            assert sorted(asked) == [False, True] and asked[0], "the first one measures"
            assert (first.broadcasts, second.broadcasts, stranger.broadcasts) == (0, 1, 0)
            stop = StopRequest(**client.envelope(), job=job_id)
            await client.request(stop, timeout_s=PATIENCE_S)
            for node in (first, second):
                assert (await node.expect(Stop)).job_id == job_id
            assert (first.broadcasts, second.broadcasts, stranger.broadcasts) == (1, 2, 0)
            # The coordinator receives its own broadcast, too.
            assert "MessageRejected" not in await events_of(client)

    asyncio.run(scene())


def test_training_continues_while_a_killed_coordinator_restarts(daemon: Daemon, tmp_path: Path) -> None:
    async def scene() -> None:
        async with PlayedNode(daemon, "node-0") as node:
            async with ClusterClient(daemon.address) as client:
                job_id = await submitted(client, job_data(tmp_path))
                generation = await node.start_training(job_id)
                await state_when(client, lambda s: s["phase"] == "RUNNING" and s["step"] == 3)
            await asyncio.to_thread(daemon.end)
            async with ClusterClient(daemon.address) as client:
                assert (await client.state())["phase"] == "UNREACHABLE"
            node.step(generation, 4, 6)  # Nobody receives this.
            await asyncio.to_thread(daemon.start)
            await node.expect(RequestHello)
            node.step(generation, 7, 8)
            # The journal may lag by one message: then a step is published twice, and recorded once.
            wanted = await node.expect(RequestSteps)
            assert wanted.first <= 4 and wanted.last == 6
            node.step(generation, wanted.first, wanted.last)
            async with ClusterClient(daemon.address) as client:
                state = await state_when(client, lambda s: s["phase"] == "RUNNING" and s["step"] == 8)
                assert state["generation"] == generation
                async with asyncio.timeout(PATIENCE_S):
                    while len(steps := await client.history(what="steps")) < 8:  # noqa: ASYNC110  # no event
                        await asyncio.sleep(0.02)
                assert [s["step"] for s in steps] == list(range(1, 9))
                assert "GenerationStarted" in await events_of(client)

    asyncio.run(scene())


def test_a_saved_profile_is_not_measured_and_its_plans_are_cached(daemon: Daemon, tmp_path: Path) -> None:
    """A second job with the same profile and a restart of the coordinator use the same templates; a job with
    another batch is new.
    """
    save_profile(tmp_path / "saved.json", profile_document(PROFILE))
    path = daemon.config.with_name("job.toml")

    plans = daemon.directory / "state" / "plans"

    def read_from_disk() -> int:
        return daemon.said().count('"event": "cache_read"')

    async def scene() -> None:
        async with ClusterClient(daemon.address) as client, PlayedNode(daemon, "node-0") as node:
            # Templates are made for a few nodes more than are known: the first job must know as many.
            await until_async(lambda: "NodeJoined" in daemon.said())
            for read, batch in enumerate((16, 16, 20)):
                job_data(tmp_path)
                text = path.read_text().replace("global_batch = 16", f"global_batch = {batch}")
                path.write_text(f'{text}[planner]\nprofile = "saved.json"\n')
                job_id = await submitted(client, load_job_data(path))
                prepare = await node.expect(Prepare)
                assert not prepare.profile, "nobody is asked to measure"
                node.job_id = job_id
                node.say(Prepared(job_id=job_id, profile=None))
                await node.expect(Quiesce)
                assert read_from_disk() == min(read, 1)
                await until_async(lambda: len(list(plans.glob("*.plan"))) == (2 if batch == 20 else 1))  # noqa: B023
                if batch == 16:
                    await client.request(StopRequest(**client.envelope(), job=job_id))
                    node.job_id = None
            await asyncio.to_thread(daemon.end)
            await asyncio.to_thread(daemon.start)
            await node.expect(RequestHello)
            await until_async(lambda: read_from_disk() == 2)

    asyncio.run(scene())


def test_a_node_whose_connection_breaks_is_lost_at_once(daemon: Daemon, tmp_path: Path) -> None:
    async def scene() -> None:
        async with ClusterClient(daemon.address, listen=True) as client, PlayedNode(daemon, "node-0") as node:
            job_id = await submitted(client, job_data(tmp_path))
            await node.start_training(job_id)
            await state_when(client, lambda s: s["phase"] == "RUNNING")
            node.session.interrupt(60)
            async with asyncio.timeout(PATIENCE_S):
                async for event in client.events():
                    if event["event"] == "NodeLost":
                        break
            assert event["node"] == "node-0" and event["details"]["how"] == "last_will"
            state = await state_when(client, lambda s: s["phase"] == "PAUSED")
            assert state["nodes"]["node-0"]["state"] == "OFFLINE"
            assert state["waiting_for"]

    asyncio.run(scene())


def test_nodes_that_never_return_are_removed_at_the_broker_too(
    tmp_path: Path, mosquitto: RunningBroker
) -> None:
    daemon = Daemon(tmp_path, mosquitto.port)
    daemon.config.write_text(daemon.config.read_text() + "remove_offline_s = 0.5\n")
    topics, retained = Topics(cluster="t"), dict[str, bytes]()
    gone = {topics.node_state(name): b"" for name in ("a-pod-before-us", "pod-1")}

    async def scene() -> None:
        deleted = asyncio.Event()

        def on_message(topic: str, payload: bytes, _retained: bool) -> None:
            retained[topic] = payload
            if retained == gone:
                deleted.set()

        looking = MqttSession(
            daemon.address.broker,
            client_id="looking",
            subscriptions=[topics.node_state()],
            on_message=on_message,
        )
        watching = asyncio.create_task(looking.run())
        await looking.wait_connected(PATIENCE_S)
        async with PlayedNode(daemon, "a-pod-before-us") as before:  # It was never accepted.
            before.session.interrupt(60)
        daemon.start()
        async with ClusterClient(daemon.address, listen=True) as client:
            async with PlayedNode(daemon, "pod-1") as pod:
                await state_when(client, lambda s: "pod-1" in s["nodes"])
                pod.session.interrupt(60)
            async with asyncio.timeout(PATIENCE_S):
                async for event in client.events():
                    if event["event"] == "NodeRemoved":
                        break
            assert event["node"] == "pod-1" and event["details"] == {"incarnation": 1}
            await state_when(client, lambda s: s["nodes"] == {})
            await asyncio.wait_for(deleted.wait(), PATIENCE_S)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    try:
        asyncio.run(scene())
    finally:
        if daemon.process is not None:
            daemon.end()


def test_garbage_is_rejected_with_an_event_and_nothing_else_happens(daemon: Daemon) -> None:
    async def scene() -> None:
        async with ClusterClient(daemon.address, listen=True) as client:
            await state_when(client, lambda _: True)
            topics = client.topics
            for topic, payload in [
                (topics.node_signal("node-0"), b"\xc1garbage"),
                (topics.node_signal("node-1"), b"x" * (MAX_PAYLOAD_BYTES + 1)),
                (topics.node_state("node-2"), b'{"state": "HEALTHY"}'),
                (topics.request, b"not json"),
                (topics.request, b'{"do": "explode"}'),
                (topics.events, b"[1]"),
                (topics.cluster_state, b"[]"),
                (topics.command, b"\xc1garbage"),
                (f"{topics.root}/node/a/b/c/state", b"x"),
            ]:
                client._session.publish(topic, payload)
            rejected: dict[str, str] = {}
            async with asyncio.timeout(PATIENCE_S):
                while len(rejected) < 7:  # One per topic and second, whatever is wrong.
                    event = await anext(client.events())
                    if event["event"] == "MessageRejected":
                        rejected[event["details"]["topic"]] = event["reason"]
            assert any("at most" in reason for reason in rejected.values())
            assert any("node-0/signal" in reason and "malformed" in reason for reason in rejected.values())
            assert (await state_when(client, lambda _: True))["nodes"] == {}

    asyncio.run(scene())


def test_requests_that_cannot_be_served_are_answered_with_the_reason(daemon: Daemon, tmp_path: Path) -> None:
    async def scene() -> None:
        async with ClusterClient(daemon.address) as client:
            await state_when(client, lambda _: True)
            data = job_data(tmp_path)
            raw = json.loads(encode_json(SubmitRequest(**client.envelope(), job=data)))
            for change, says in [
                ({"steps": 0}, "steps"),
                ({"policy": raw["job"]["policy"] | {"global_batch": 30}}, "28 or 32"),
                ({"training": raw["job"]["training"] | {"extra": 1}}, "extra"),
                ({"surprise": 1}, "surprise"),
            ]:
                payload = {**raw, **client.envelope(), "job": raw["job"] | change}
                answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                client._answers[payload["request"]] = answer
                client._session.publish(client.topics.request, json.dumps(payload).encode())
                found = await asyncio.wait_for(answer, PATIENCE_S)
                assert not found.accepted and says in found.detail, found
            with pytest.raises(RequestRejected, match="no job"):
                await client.request(StopRequest(**client.envelope(), job="gpt"))
            with pytest.raises(RequestRejected, match="node-7"):
                await client.request(DrainRequest(**client.envelope(), node="node-7"))

    asyncio.run(scene())


def test_a_request_that_arrives_twice_is_served_once(daemon: Daemon, tmp_path: Path) -> None:
    async def scene() -> None:
        async with ClusterClient(daemon.address) as client:
            request = SubmitRequest(**client.envelope(), job=job_data(tmp_path))
            first = await client.request(request, timeout_s=PATIENCE_S)
            again = await client.request(request, timeout_s=PATIENCE_S)
            assert first.detail == again.detail
            assert (await events_of(client)).count("JobSubmitted") == 1
            with pytest.raises(RequestRejected, match="under way"):
                await submitted(client, job_data(tmp_path))
            await client.request(StopRequest(**client.envelope(), job="gpt"))
            await state_when(client, lambda s: s["phase"] in ("FAILED", "FINISHED", "WAITING"))

    asyncio.run(scene())


def test_who_has_an_answer_finds_in_the_state_what_it_says(daemon: Daemon, tmp_path: Path) -> None:
    async def scene() -> None:
        async with ClusterClient(daemon.address) as client:
            for _ in range(5):
                job_id = await submitted(client, job_data(tmp_path))
                assert (await client.state())["job"]["id"] == job_id
                await client.request(StopRequest(**client.envelope(), job=job_id), timeout_s=PATIENCE_S)
                assert (await client.state())["phase"] == "FINISHED"

    asyncio.run(scene())


def test_a_job_is_rejected_if_its_solver_is_broken(
    mosquitto: RunningBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "highspy.py").write_text("raise ImportError('not here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    daemon = Daemon(tmp_path, mosquitto.port)
    wanted = job_data(tmp_path, tables='[planner]\nbatch_solver = "pyomo"\n')

    async def scene() -> None:
        async with ClusterClient(daemon.address) as client:
            with pytest.raises(RequestRejected) as rejected:
                await submitted(client, wanted)
            assert "HiGHS cannot be used: the package highspy is missing or broken" in str(rejected.value)
            assert 'planner.batch_solver = "exact"' in str(rejected.value)
            assert "JobSubmitted" not in await events_of(client)
            await submitted(client, job_data(tmp_path))

    daemon.start()
    try:
        asyncio.run(scene())
    finally:
        daemon.end()


def test_sigterm_leaves_cleanly_and_a_restart_knows_the_job(daemon: Daemon, tmp_path: Path) -> None:
    async def scene() -> None:
        async with ClusterClient(daemon.address) as client:
            job_id = await submitted(client, job_data(tmp_path))
        assert await asyncio.to_thread(daemon.end, signal.SIGTERM) == 0
        async with ClusterClient(daemon.address) as client:
            state = await client.state()
            assert (state["phase"], state["reason"]) == ("UNREACHABLE", "the coordinator was stopped")
            with pytest.raises(UnreachableError, match="no coordinator answers"):
                await client.request(StatusRequest(**client.envelope()), timeout_s=0.3)
        daemon.start()
        phases: asyncio.Queue[str] = asyncio.Queue()
        async with ClusterClient(
            daemon.address, on_state=lambda state: phases.put_nowait(state["phase"])
        ) as client:
            state = await state_when(client, lambda s: s["job"] is not None)
            assert state["job"]["id"] == job_id
            # A request that waited for the start is answered before the state is published.
            assert await asyncio.wait_for(phases.get(), PATIENCE_S) == "UNREACHABLE"
            assert await asyncio.wait_for(phases.get(), PATIENCE_S) == "WAITING"

    asyncio.run(scene())


def test_the_broker_may_be_away_for_a_while(daemon: Daemon, mosquitto: RunningBroker, tmp_path: Path) -> None:
    async def scene() -> None:
        async with ClusterClient(daemon.address) as client, PlayedNode(daemon, "node-0") as node:
            job_id = await submitted(client, job_data(tmp_path))
            generation = await node.start_training(job_id)
            await state_when(client, lambda s: s["phase"] == "RUNNING" and s["step"] == 3)
            await asyncio.to_thread(mosquitto.kill)
            await asyncio.sleep(0.3)
            await asyncio.to_thread(mosquitto.start)
            # Either the node says Hello first, or it is asked to.
            await state_when(client, lambda _: True)
            await node.session.wait_connected(PATIENCE_S)
            node.step(generation, 4, 5)
            state = await state_when(client, lambda s: s["step"] == 5)
            assert (state["phase"], state["generation"]) == ("RUNNING", generation)
            names = await events_of(client)
            assert names.count("BrokerLost") == names.count("BrokerRestored") == 1
            assert "NodeLost" not in names

    asyncio.run(scene())


def test_a_broker_that_freezes_for_longer_than_keep_alive_loses_no_node(
    daemon: Daemon, mosquitto: RunningBroker, tmp_path: Path
) -> None:
    """The broker, when it continues, ends the sessions that were silent for 1.5 keep-alives, and publishes
    their wills.
    """

    async def scene() -> None:
        async with (
            ClusterClient(daemon.address) as client,
            PlayedNode(daemon, "node-0") as node,
            PlayedNode(daemon, "node-1") as other,
        ):
            job_id = await submitted(client, job_data(tmp_path))
            generation = await node.start_training(job_id)
            await state_when(client, lambda s: s["phase"] == "RUNNING" and s["step"] == 3)
            assert mosquitto.process is not None
            mosquitto.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(1.5 * KEEP_ALIVE_S + 2.0)
            mosquitto.process.send_signal(signal.SIGCONT)
            await asyncio.sleep(4.0)
            for each in (node, other):
                await each.session.wait_connected(PATIENCE_S)
            node.step(generation, 4, 5)
            state = await state_when(client, lambda s: s["step"] == 5)
            assert (state["phase"], state["generation"]) == ("RUNNING", generation)
            assert {name: each["state"] for name, each in state["nodes"].items()} == {
                "node-0": "HEALTHY",
                "node-1": "HEALTHY",
            }
            names = await events_of(client)
            assert "BrokerRestored" in names and "NodeLost" not in names

    asyncio.run(scene())


@pytest.mark.processes
def test_without_a_broker_it_logs_that_and_waits(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, free_port())
    daemon.start()
    until(lambda: "not_connected" in daemon.said())
    assert daemon.process is not None and daemon.process.poll() is None
    assert "refused" in daemon.said()
    assert daemon.end(signal.SIGTERM) == 0


def test_a_second_coordinator_with_the_same_journal_is_rejected(daemon: Daemon) -> None:
    asyncio.run(_answering(daemon))
    second = subprocess.run(
        [sys.executable, "-m", "ftd.cli.main", "coordinator", "--config", str(daemon.config)],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=ROOT,
    )
    assert second.returncode == 1
    assert "another coordinator" in second.stderr and "Traceback" not in second.stderr


async def _answering(daemon: Daemon) -> None:
    async with ClusterClient(daemon.address) as client:
        await state_when(client, lambda _: True)


@pytest.mark.processes
def test_a_corrupt_journal_is_a_clear_error(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, free_port())
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "journal.sqlite").write_bytes(b"junk" * 1000)
    daemon.start()
    assert daemon.process is not None
    assert daemon.process.wait(PATIENCE_S) == 1
    assert "move the file away" in daemon.said() and "Traceback" not in daemon.said()


def test_a_broker_that_forbids_broadcasts_is_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This happens with the ACL of a version without the topic; mosquitto reports nothing."""
    logged: list[str] = []
    log = SimpleNamespace(error=lambda event, **fields: logged.append(f"{event}: {fields['remedy']}"))
    monkeypatch.setattr(commands, "_log", log)
    monkeypatch.setattr(commands, "ECHO_S", 0.01)
    stop = BroadcastCommand(cause="c", receivers={"a": 1, "b": 2}, command=Stop(job_id="j", reason="over"))

    async def scene() -> None:
        published: list[bytes] = []
        session = SimpleNamespace(connected=True, publish=lambda topic, payload: published.append(payload))
        saying = commands.CommandSender(Topics(cluster="t"), session)
        saying.send(stop)
        saying.receive_broadcast(published[0], False)
        saying.send(stop)
        saying.on_connected()  # Messages in flight are lost with the session.
        await asyncio.sleep(0.1)
        session.connected = False
        saying.send(stop)
        await asyncio.sleep(0.1)
        saying.on_connected()
        session.connected = True
        assert logged == []
        saying.send(stop)
        await asyncio.sleep(0.1)

    asyncio.run(scene())
    assert [line for line in logged if "ftd acl" in line] == logged and len(logged) == 1
