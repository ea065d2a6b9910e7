"""Test of the length of the path from a node's last will to the next commit, counted in functions of the
project.

To understand a recovery, read these functions. The real coordinator runs on an event loop, with a broker
and nodes in memory; its planner answers at once. Every named function of the project that the coordinator
enters counts once, from the arrival of the last will at the leader's session to the publication of the
first commit after it. The publication of the cluster's state does not count: it waits until all of this is
over. Two thirds of these functions run in every step, with or without a failure: to receive, decode and send
messages, to keep the journal, and to commit. What a recovery adds to them is counted by itself.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import Mock

from ftd.coordinator.coordinator import Coordinator
from ftd.coordinator.journal import LocalDisk
from ftd.coordinator.ports import CheckpointOperations, Observer, Ports, Program
from ftd.driver import SystemClock
from ftd.transport.mqtt.session import PendingMessage
from ftd.transport.wire.codec import encode_from_node
from ftd.transport.wire.public import EventMessage, NodeStateMessage, decode_json, encode_json, timestamp
from ftd.transport.wire.topics import Topics
from planner.planner import Planner
from statemachine.cluster.durable import durable
from statemachine.effects import BuildTemplates, CancelTemplates, ComparePlan, ComputePlan, PlanAhead
from statemachine.election.leadership import Peer
from statemachine.events import Event, PlanReady, SubmitRequested, TemplatesReady
from statemachine.messages.cluster import FromNode, Hello, Quiesced, Signal, Stepped
from statemachine.messages.common import Prepared, Resumed
from statemachine.messages.values import ClusterPhase, DeviceReport, NodeState
from statemachine.timing import Timing
from tests.helpers.transcripts import POLICY, PROFILE, committed, facts, job, report
from tests.helpers.waiting import PATIENCE_S

MOST_FUNCTIONS, MOST_FILES = 173, 40
MOST_ADDED, MOST_ADDED_FILES = 60, 20
TOPICS = Topics(cluster="t")
ROOT = Path(__file__).parents[2]
PACKAGES = tuple(
    f"{ROOT / name}{os.sep}" for name in ("ftd", "planner", "runtime", "statemachine", "storage")
)
NAMES = ("node-0", "node-1", "node-2", "node-3")
LATER_S = 1e6
"""The cluster's state is not published within the test, and no heartbeat or tick is due, however slow the host is."""


class RecoveryPath:
    """Recorder of the project's functions that are entered."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()
        self._noting = False

    def begin(self) -> None:
        self._noting = True
        sys.setprofile(self._note)

    def end(self) -> None:
        self._noting = False
        sys.setprofile(None)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Record nothing in this context."""
        sys.setprofile(None)
        yield
        if self._noting:
            sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name[0] != "<" and code.co_filename.startswith(PACKAGES):
            self.functions.add((os.path.relpath(code.co_filename, ROOT), code.co_qualname))

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.functions}


class Broker:
    """Broker with the sessions of one coordinator and what it publishes."""

    leader_client_id = "leader"

    def __init__(self, path: RecoveryPath) -> None:
        self.path = path
        self.sessions: list[Session] = []
        self.echoes = True
        """Whether the broker delivers what the coordinator publishes back to the coordinator, if that
        subscribed to it.
        """
        self.events: list[EventMessage] = []
        self.after_commit: Callable[[], None] = lambda: None

    def session(self, **parameters: Any) -> "Session":
        session = Session(self, **parameters)
        self.sessions.append(session)
        return session

    def has(self, name: str, generation: int) -> bool:
        """Return whether an event of this generation was published."""
        return any(one.event == name and one.generation == generation for one in self.events)

    def published(self, topic: str, payload: bytes) -> None:
        if topic == TOPICS.events:
            with self.path.left_out():
                self.events.append(decode_json(payload, EventMessage))
            if self.events[-1].event == "StepCommitted":
                self.after_commit()
        if self.echoes:
            for session in self.sessions:
                session.deliver(topic, payload)


def matches(wanted: str, topic: str) -> bool:
    """Return whether a topic matches a filter, in which ``+`` stands for any one level."""
    levels, given = wanted.split("/"), topic.split("/")
    return len(levels) == len(given) and all(
        one in ("+", other) for one, other in zip(levels, given, strict=True)
    )


class Session:
    """A connection that is never lost."""

    def __init__(
        self,
        broker: Broker,
        *,
        client_id: str,
        subscriptions: Sequence[str] = (),
        unacknowledged: Sequence[str] = (),
        will: Any = None,
        on_message: Callable[[str, bytes, bool], None],
        on_connected: Callable[[], None] = lambda: None,
        on_lost: Callable[[], None] = lambda: None,
        on_acknowledged: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.client_id, self.problem, self.connected = client_id, "", False
        self._broker, self._filters = broker, (*subscriptions, *unacknowledged)
        self._on_message, self._on_connected = on_message, on_connected

    async def run(self) -> None:
        await self.run_once()

    async def run_once(self) -> None:
        self.connected = True
        self._on_connected()
        await asyncio.Event().wait()

    def publish(
        self,
        topic: str,
        payload: bytes,
        *,
        retain: bool = False,
        qos: int = 1,
        queue_offline: bool = False,
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        self._broker.published(topic, payload)

    def deliver(self, topic: str, payload: bytes) -> None:
        if self.connected and any(matches(one, topic) for one in self._filters):
            asyncio.get_running_loop().call_soon(self._on_message, topic, payload, False)

    def receive(self, topic: str, payload: bytes) -> None:
        """Receive a message of a node."""
        self._on_message(topic, payload, False)

    def refuses(self, size: int) -> bool:
        return False

    def take_pending(self) -> list[PendingMessage]:
        return []

    async def flush(self, timeout_s: float = 1.0) -> None:
        return


class ImmediatePlanning:
    """Planner that answers as soon as it is asked."""

    progress = None

    def __init__(self, feed: Callable[[Event], None], path: RecoveryPath) -> None:
        self._feed, self._path = feed, path
        self._planner = Planner(PROFILE, POLICY)

    def prepare(self) -> None:
        return

    def build(self, effect: BuildTemplates) -> None:
        self._feed(TemplatesReady(at=0.0, cause=effect.cause, job_id=effect.profiled.job.job_id))

    def cancel(self, effect: CancelTemplates) -> None:
        return

    def compute(self, effect: PlanAhead | ComputePlan | ComparePlan) -> None:
        if isinstance(effect, ComputePlan):
            with self._path.left_out():
                plan = self._planner.plan(effect.situation)
                event = PlanReady(
                    at=SystemClock.monotonic_s(), cause=effect.cause, generation=effect.generation, plan=plan
                )
            self._feed(event)

    def check_solver(self, answer: Callable[[str], None]) -> None:
        answer("")


class Cluster:
    """A coordinator that leads, and four nodes."""

    def __init__(self, directory: Path) -> None:
        self.path = RecoveryPath()
        self.broker = Broker(self.path)
        self.coordinator = Coordinator(
            Ports(
                program=Program(version="1", schema=durable.SCHEMA),
                clock=SystemClock(),
                transport=self.broker,
                disk=LocalDisk(),
                planning=lambda feed, driver, changed: ImmediatePlanning(feed, self.path),
                checkpoints=lambda feed, driver: Mock(spec=CheckpointOperations),
                observer=Mock(spec=Observer),
            ),
            Peer(name="a", incarnation=1),
            cluster=TOPICS.cluster,
            directory=directory,
            timing=Timing(
                election_s=0.01,
                leader_heartbeat_s=LATER_S,
                leader_silence_s=3 * LATER_S,
                lost_record_timeout_s=4 * LATER_S,
                heartbeat_s=LATER_S,
                silence_s=3 * LATER_S,
            ),
            state_period_s=LATER_S,
        )

    @property
    def phase(self) -> ClusterPhase:
        return self.coordinator.machine.phase

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with self.path.left_out():
                if holds():
                    return
            assert time.monotonic() < deadline, what
            await asyncio.sleep(0.001)

    def _session(self) -> Session:
        return next(one for one in self.broker.sessions if one.client_id == Broker.leader_client_id)

    def say(self, node: str, signal: Signal) -> None:
        with self.path.left_out():
            payload = encode_from_node(FromNode(node=node, incarnation=NAMES.index(node) + 1, signal=signal))
            session, topic = self._session(), TOPICS.node_signal(node)
        session.receive(topic, payload)

    def last_will(self, node: str) -> None:
        will = NodeStateMessage(
            node=node,
            incarnation=NAMES.index(node) + 1,
            state=NodeState.OFFLINE,
            generation=1,
            step=1,
            reason="",
            at=timestamp(),
            devices=1,
            host="10.0.0.1",
        )
        session, topic, payload = self._session(), TOPICS.node_state(node), encode_json(will)
        self.path.begin()
        session.receive(topic, payload)

    async def train(self) -> None:
        """Bring the job to its first step."""
        c = self.coordinator
        await self.until(lambda: c.leadership.leading, "it leads")
        for name in NAMES:
            self.say(name, Hello(facts=facts(), job_id=None, prepared=False, generation=0, training=False))
        c.feed(SubmitRequested(at=c.driver.now(), cause="test", request="r", job=job()))
        await self.until(lambda: c.machine.job is not None, "a job")
        for number, name in enumerate(NAMES):
            self.say(name, Prepared(job_id="job-1", profile=None if number else PROFILE))
        await self.until(lambda: self.phase is ClusterPhase.QUIESCING, "the first generation")
        await self.resume(1, {name: report() for name in NAMES})

    async def resume(self, generation: int, reports: dict[str, DeviceReport]) -> None:
        """Let these nodes report, resume and commit a step."""
        step = max(one.committed_step for one in reports.values()) + 1
        for name, held in reports.items():
            self.say(name, Quiesced(generation=generation, reports=(held,)))
        await self.until(lambda: self.broker.has("PlanChosen", generation), "a plan")
        for name in reports:
            self.say(name, Resumed(generation=generation, bytes_moved=0, rendezvous_s=0.0, state_s=0.0))
        self.say("node-0", Stepped(generation=generation, steps=(committed(step),), step_s=0.1))
        await self.until(lambda: self.broker.has("StepCommitted", generation), "a commit")

    async def step(self) -> set[tuple[str, str]]:
        """Return the functions that an undisturbed step enters, until everything about it is done."""
        self.broker.echoes = False
        self.path.begin()
        self.say("node-0", Stepped(generation=1, steps=(committed(2),), step_s=0.1))
        await self.until(
            lambda: sum(one.event == "StepCommitted" for one in self.broker.events) == 2, "a step"
        )
        await asyncio.sleep(0.01)
        self.path.end()
        found = set(self.path.functions)
        self.path.functions.clear()
        return found

    async def lose_a_node(self) -> None:
        """Record the path."""
        self.broker.after_commit = self.path.end
        self.last_will("node-3")
        await self.until(lambda: self.phase is ClusterPhase.QUIESCING, "the loss")
        held = {"node-0": (0, 1), "node-1": (2, 3), "node-2": (0, 1)}
        await self.resume(2, {name: report(2, held=layers) for name, layers in held.items()})


async def _recover(directory: Path) -> tuple[RecoveryPath, set[tuple[str, str]]]:
    """Return the path, and the functions that every step enters."""
    cluster = Cluster(directory)
    running = asyncio.ensure_future(cluster.coordinator.run(asyncio.Event()))
    try:
        await cluster.train()
        usual = await cluster.step()
        await cluster.lose_a_node()
    finally:
        cluster.path.end()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        cluster.coordinator.journal.close()
    return cluster.path, usual


def test_the_path_from_a_last_will_to_the_next_commit_can_be_read(tmp_path: Path) -> None:
    path, usual = asyncio.run(_recover(tmp_path))
    listed = "\n".join(f"{file} {name}" for file, name in sorted(path.functions))
    added = path.functions - usual
    for name in ("LeaderSession._receive", "reconfigure", "take_quiesced", "take_plan", "take_stepped"):
        assert name in listed
    assert len(path.functions) <= MOST_FUNCTIONS, f"{len(path.functions)} functions:\n{listed}"
    assert len(path.files) <= MOST_FILES, f"{len(path.files)} files:\n{listed}"
    listed = "\n".join(f"{file} {name}" for file, name in sorted(added))
    assert len(added) <= MOST_ADDED, f"{len(added)} functions that a step does not enter:\n{listed}"
    files = {file for file, _ in added}
    assert len(files) <= MOST_ADDED_FILES, f"{len(files)} files that a step does not enter:\n{listed}"
