"""Many nodes in one process, for ``benchmarks.thousand_nodes``: real sessions without trainers.

    python -m benchmarks.crowd PORT CLUSTER

Each node has an MQTT 3.1.1 session on a raw socket, with a last will. It publishes the same messages as
``ftd node`` in the same order: state, Hello, a Heartbeat every second, Prepared, Quiesced, Resumed,
Stepped, snapshots. It publishes its state at once when the state changes, and changes of only the reason a
tenth of a second later. Its trainers are simulated: they stop and resume at once, and commit a step each
second while every planned node has resumed and is alive. A node is killed by closing its socket; the broker
then publishes its will.

Orders are lines of JSON on stdin, answers are lines of JSON on stdout. Times are those of CLOCK_MONOTONIC,
which all processes of a host share.
"""

import json
import math
import os
import resource
import select
import socket
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from benchmarks.packets import (
    PUBLISH,
    SUBACK,
    Splitter,
    connect_packet,
    puback_packet,
    publish_packet,
    published,
    subscribe_packet,
)
from ftd.transport.wire.codec import decode_to_node, decode_to_nodes
from ftd.transport.wire.public import NodeStateMessage, encode_json, timestamp
from ftd.transport.wire.topics import Topics
from planner.values import Device
from statemachine.cluster.rules import owned_layers
from statemachine.messages import cluster as m
from statemachine.messages.cluster import ToNodes
from statemachine.messages.common import Prepared, Quiesce, Resumed, SnapshotStarted
from statemachine.messages.values import CommittedStep, DeviceReport, NodeFacts, NodeState, Vote

MOST_BODIES = 1000
HEARTBEAT_S = 1.0
STEP_S = 1.0
MS_OF_A_LAYER = 15.3
"""Time of a layer of the job of ``benchmarks.thousand_nodes``, in ms."""
KEEP_ALIVE_S = 60
STATE_PERIOD_S = 0.1
TICK_S = 0.005


class Envelope(msgspec.Struct, frozen=True):
    """Envelope of a command; see ``ftd.transport.wire.codec``."""

    incarnation: int
    type: str
    body: msgspec.Raw


def pairs(**fields: Any) -> bytes:
    """Return keys and values of a msgpack map, without its header."""
    return msgspec.msgpack.encode(fields)[1:]


@dataclass(slots=True, kw_only=True)
class Node:
    """Session of one node, and the state that its simulated trainers hold."""

    name: str
    sock: socket.socket
    incarnation: int
    splitter: Splitter = field(default_factory=Splitter)
    number: int = 0
    job_id: str | None = None
    layers: int = 0
    prepared: bool = False
    generation: int = 0
    held: tuple[int, ...] = ()
    lineage: int = 0
    retained_step: int = 0
    heartbeat_at: float = 0.0
    state_at: float = math.inf
    """Time at which its state is published again."""
    state: NodeState = NodeState.HEALTHY
    reason: str = ""
    envelope: bytes = b""
    """Beginning of each of its signals, as msgpack."""
    out: bytearray = field(default_factory=bytearray)
    signal_topic: bytes = b""
    state_topic: bytes = b""


@dataclass(slots=True, kw_only=True)
class Group:
    """Trainers of the current generation."""

    generation: int = 0
    planned: frozenset[str] = frozenset()
    waited: set[str] = field(default_factory=set)
    first: str = ""
    step_at: float | None = None
    snap_at: float | None = None


class Crowd:
    """Nodes, the steps that they commit together, and the loop that serves them."""

    def __init__(self, port: int, cluster: str) -> None:
        self.port, self.topics = port, Topics(cluster=cluster)
        self.nodes: dict[str, Node] = {}
        self.by_handle: dict[int, Node] = {}
        self.poll = select.epoll()
        self.poll.register(0, select.EPOLLIN)
        self.group = Group()
        self.committed: CommittedStep | None = None
        self.plans: dict[int, tuple[dict[str, tuple[int, ...]], frozenset[str], str]] = {}
        self.commands: dict[str, int] = {}
        self.command_bytes = 0
        self.last_command: tuple[bytes, m.Command] | None = None
        self.last_broadcast: tuple[bytes, ToNodes] | None = None
        self.quiesced: dict[tuple[Any, ...], m.Quiesced] = {}
        self.resumed_at: dict[int, float] = {}
        self.lines = b""

    # --- sessions ----------------------------------------------------------------------------------

    def connect(self, name: str, number: int) -> None:
        incarnation = time.time_ns() // 1000
        sock = socket.create_connection(("127.0.0.1", self.port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        node = Node(name=name, sock=sock, incarnation=incarnation)
        node.signal_topic = self.topics.node_signal(name).encode()
        node.state_topic = self.topics.node_state(name).encode()
        node.envelope = b"\x84" + pairs(node=name, incarnation=incarnation)
        self.nodes[name] = self.by_handle[sock.fileno()] = node
        self.poll.register(sock.fileno(), select.EPOLLIN)
        node.heartbeat_at = time.monotonic() + HEARTBEAT_S * (number % 997) / 997
        will = self._state(node, NodeState.OFFLINE, "the broker lost this node")
        sock.sendall(
            connect_packet(
                f"{name}-{incarnation}", keep_alive_s=KEEP_ALIVE_S, will=(self.topics.node_state(name), will)
            )
            + subscribe_packet(
                1, [self.topics.node_command(name), self.topics.node_state(name)], [self.topics.command]
            )
        )

    def kill(self, names: list[str]) -> dict[str, float]:
        """Close the sockets of the nodes and return the time at which each was closed."""
        closed = {}
        for name in names:
            node = self.nodes.pop(name)
            del self.by_handle[node.sock.fileno()]
            self.poll.unregister(node.sock.fileno())
            node.sock.close()
            closed[name] = time.monotonic()
        self.group.step_at = None if self.group.planned & set(names) else self.group.step_at
        return closed

    def _state(self, node: Node, state: NodeState, reason: str) -> bytes:
        return encode_json(
            NodeStateMessage(
                node=node.name, incarnation=node.incarnation, state=state, generation=node.generation,
                step=self._step(node), reason=reason, at=timestamp(), devices=1, host="127.0.0.1",
            )
        )  # fmt: skip

    def _step(self, node: Node) -> int:
        return self.committed.step if self.committed is not None and node.held else 0

    def send(self, node: Node, *signals: m.Signal, reason: str = "") -> None:
        """Queue signals and, with a reason, the node's state; ``flush`` sends them.

        The state is queued at once if it changes; a new reason alone follows after ``STATE_PERIOD_S``.
        """
        if reason and node.state is not NodeState.HEALTHY:
            self.send_state(node, NodeState.HEALTHY, reason)
        elif reason:
            node.reason, node.state_at = reason, min(node.state_at, time.monotonic() + STATE_PERIOD_S)
        for signal in signals:
            payload = node.envelope + self.body_of(signal)
            node.out += publish_packet(node.signal_topic, payload, 0)

    def body_of(self, signal: m.Signal) -> bytes:
        """Return the part of a message that follows the node's envelope."""
        return pairs(type=type(signal).__name__, body=msgspec.Raw(msgspec.msgpack.encode(signal)))

    def send_state(self, node: Node, state: NodeState, reason: str) -> None:
        node.state, node.reason, node.state_at = state, reason, math.inf
        node.number = node.number % 65535 + 1
        payload = self._state(node, state, reason)
        node.out += publish_packet(node.state_topic, payload, node.number, retain=True)

    def flush(self, node: Node) -> None:
        if node.out:
            node.sock.sendall(node.out)
            node.out.clear()

    # --- the protocol ------------------------------------------------------------------------------

    def hello(self, node: Node) -> m.Hello:
        return m.Hello(
            facts=NodeFacts(devices=1, host="127.0.0.1", rendezvous_port=29500, snapshot_port=29501,
                            snapshot_bytes=2**34),
            job_id=node.job_id, prepared=node.prepared, generation=node.generation,
            training=bool(node.held) and node.generation == self.group.generation,
        )  # fmt: skip

    def heartbeat(self, node: Node) -> m.Heartbeat:
        known = self.committed if node.held else None
        return m.Heartbeat(
            generation=node.generation, committed=known, lineage=node.lineage, retained_step=node.retained_step,
            # Nodes whose time were not that of their layers would count as slow, and plans would balance them.
            microbatch_ms=(MS_OF_A_LAYER * len(node.held),) if node.held else None,
        )  # fmt: skip

    def handle(self, node: Node, topic: str, payload: bytes) -> None:
        if topic == self.topics.command:
            to_all = self.broadcast_of(payload)
            command, is_receiver = to_all.command, to_all.receivers.get(node.name) == node.incarnation
        else:
            to_one = msgspec.msgpack.decode(payload, type=Envelope)
            command = self.command_of(bytes(to_one.body), payload)
            is_receiver = to_one.incarnation == node.incarnation
        self.command_bytes += len(payload)
        if is_receiver:
            kind = type(command).__name__
            self.commands[kind] = self.commands.get(kind, 0) + 1
            self.execute(node, command)

    def execute(self, node: Node, command: m.Command) -> None:
        match command:
            case m.RequestHello():
                self.send(node, self.hello(node))
            case m.Prepare(job=job):
                node.job_id, node.prepared, node.held = job.job_id, True, ()
                node.layers = int(job.training["arguments"]["layers"])
                prepared = Prepared(job_id=job.job_id, profile=None)
                self.send(node, prepared, reason=f"preparing job {job.name!r}")
            case Quiesce():
                self.quiesce(node, command)
            case m.Resume():
                self.resume(node, command)
            case m.TakeSnapshot():
                self.group.snap_at = time.monotonic()
            case m.RetainSnapshot(step=step):
                node.retained_step = step
                self.send_state(
                    node, NodeState.HEALTHY, f"the snapshot of step {step} is complete everywhere"
                )
            case m.Stop():
                node.job_id, node.prepared, node.held = None, False, ()
            case m.Fence():
                raise SystemExit(f"{node.name} was fenced: {command.reason}")
            case _:
                pass

    def command_of(self, body: bytes, payload: bytes) -> m.Command:
        """Return the decoded command, from a cache of one: all nodes receive the same command in this process."""
        if self.last_command is None or self.last_command[0] != body:
            self.last_command = body, decode_to_node(payload).command
        return self.last_command[1]

    def broadcast_of(self, payload: bytes) -> ToNodes:
        if self.last_broadcast is None or self.last_broadcast[0] != payload:
            self.last_broadcast = payload, decode_to_nodes(payload)
        return self.last_broadcast[1]

    def quiesce(self, node: Node, command: Quiesce) -> None:
        if command.generation < node.generation:
            return
        node.generation = command.generation
        self.group.step_at = self.group.snap_at = None
        known = self.committed
        fresh = known is None or not self.group.planned
        held = tuple(range(node.layers)) if fresh else node.held
        committed = known if node.held and not fresh else None
        key = (command.generation, held, node.lineage, committed is None)
        quiesced = self.quiesced.get(key)
        if quiesced is None:
            if len(self.quiesced) > MOST_BODIES:
                self.quiesced.clear()
            report = DeviceReport(
                device=0,
                committed_step=committed.step if committed is not None else 0,
                ready_step=None,
                vote=committed.vote if committed is not None else None,
                held=held,
                lineage=node.lineage,
            )
            quiesced = m.Quiesced(generation=command.generation, reports=(report,))
            self.quiesced[key] = quiesced
        self.send(node, quiesced, reason=f"quiescing for generation {command.generation}")

    def resume(self, node: Node, command: m.Resume) -> None:
        found = self.plans.get(command.generation)
        if found is None:
            owned = owned_layers(command.plan)
            layers = {device.node: tuple(sorted(held)) for device, held in owned.items()}
            first: Device = command.plan.devices[0]
            found = self.plans[command.generation] = (layers, frozenset(layers), first.node)
            self.plans.pop(command.generation - 2, None)
            self.group = Group(
                generation=command.generation, planned=found[1], waited=set(found[1]), first=found[2]
            )
        node.held = found[0].get(node.name, ())
        node.lineage = command.lineage
        resumed = Resumed(generation=command.generation, bytes_moved=0, rendezvous_s=0.1, state_s=0.1)
        self.resumed_at[command.generation] = time.monotonic()
        if node.name not in found[1]:
            self.send(node, reason="idle: the plan has no rank for it")
            return
        self.send(node, resumed, reason=f"resuming at step {command.step}")
        self.group.waited.discard(node.name)
        if not self.group.waited and self.group.generation == command.generation:
            self.group.step_at = time.monotonic() + STEP_S

    def commit(self) -> None:
        """Commit one more step, now that every planned node has resumed."""
        group = self.group
        before = self.committed.step if self.committed is not None else 0
        vote = Vote(loss=1.0 / (before + 1), gradient_norm=1.0)
        self.committed = CommittedStep(step=before + 1, vote=vote)
        first = self.nodes[group.first]
        self.send(first, m.Stepped(generation=group.generation, steps=(self.committed,), step_s=STEP_S))
        self.flush(first)
        if group.snap_at is not None:
            group.snap_at = None
            step = before + 1
            for name in sorted(group.planned):
                self.snapshot(self.nodes[name], group.generation, step, vote)

    def snapshot(self, node: Node, generation: int, step: int, vote: Vote) -> None:
        """Publish all messages of one node's snapshot, which takes no time."""
        completed = m.SnapshotCompleted(
            generation=generation, step=step, vote=vote, size_bytes=2**30, copy_s=0.1, stall_s=0.0
        )
        self.send_state(node, NodeState.SNAP, f"a snapshot of step {step}")
        self.send(node, SnapshotStarted(generation=generation, step=step))
        self.send_state(node, NodeState.COMPLETED, f"the snapshot of step {step} is complete here")
        self.send(node, completed)
        self.flush(node)

    # --- the loop ----------------------------------------------------------------------------------

    def serve(self) -> None:
        due = 0.0
        while True:
            for handle, _ in self.poll.poll(max(0.0, due - time.monotonic())):
                if handle == 0:
                    if not self.order():
                        return
                elif (node := self.by_handle.get(handle)) is not None:
                    self.receive(node)
            now = time.monotonic()
            if now >= due:
                due = now + TICK_S
                self.tick(now)

    def tick(self, now: float) -> None:
        if self.group.step_at is not None and now >= self.group.step_at:
            self.group.step_at = now + STEP_S
            self.commit()
        for node in self.nodes.values():
            if now >= node.heartbeat_at:
                node.heartbeat_at += HEARTBEAT_S
                self.send(node, self.heartbeat(node))
            if now >= node.state_at:
                self.send_state(node, node.state, node.reason)
            if node.out:
                self.flush(node)

    def receive(self, node: Node) -> None:
        data = node.sock.recv(1 << 16)  # A larger buffer would be allocated at each call.
        if not data:
            raise SystemExit(f"the broker closed the session of {node.name}")
        acknowledged = bytearray()
        for first, body in node.splitter.feed(data):
            if first & 0xF0 == PUBLISH:
                topic, payload, _, number = published(first, body)
                if number:
                    acknowledged += puback_packet(number)
                if topic.endswith("/command"):
                    self.handle(node, topic, payload)
            elif first == SUBACK:  # The subscription is active, so commands can arrive now.
                self.send_state(node, NodeState.HEALTHY, "started")
                self.send(node, self.hello(node))
        node.out += acknowledged  # Acknowledgements come last; the other messages are more urgent.
        self.flush(node)

    def order(self) -> bool:
        data = os.read(0, 65536)
        if not data:
            return False
        self.lines += data
        *whole, self.lines = self.lines.split(b"\n")
        for line in whole:
            self.do(json.loads(line))
        return True

    def do(self, order: dict[str, Any]) -> None:
        answer: dict[str, Any] = {}
        match order["do"]:
            case "come":
                for number, name in enumerate(order["names"]):
                    self.connect(name, number)
            case "kill":
                answer["closed"] = self.kill(order["names"])
            case "look":
                answer = {
                    "step": self.committed.step if self.committed else 0,
                    "generation": self.group.generation,
                    "training": self.group.step_at is not None,
                    "commands": self.commands,
                    "command_bytes": self.command_bytes,
                    "resumed_at": self.resumed_at,
                }
        print(msgspec.json.encode(answer).decode(), flush=True)


def main() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    Crowd(int(sys.argv[1]), sys.argv[2]).serve()


if __name__ == "__main__":
    main()
