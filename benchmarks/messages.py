"""Cost of a message for the coordinator when it is received and sent, by part: CPU time of its only thread.

    python -m benchmarks.messages

Parts that need a session use a real one through mosquitto. A thousand nodes' messages arrive at once, as
they do when one of the nodes is lost. The figure is the minimum of several rounds, since other processes
can only add to it.
"""

import asyncio
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import uvloop

from benchmarks.common import Result, command_line, main
from benchmarks.packets import connect_packet, publish_packet
from ftd.driver import Driver
from ftd.transport.address import BrokerAddress
from ftd.transport.mqtt.mosquitto import await_listening, free_port, mosquitto_command
from ftd.transport.mqtt.session import MqttSession
from ftd.transport.wire.checking import encode_event
from ftd.transport.wire.codec import decode_from_node, encode_from_node
from ftd.transport.wire.public import event_message
from ftd.transport.wire.topics import Topics
from planner.values import LayerProfile, ModelProfile, Policy
from statemachine.cluster.machine import ClusterMachine
from statemachine.effects import Effect, EmitEvent
from statemachine.events import BrokerConnected, SignalArrived, SubmitRequested, TemplatesReady
from statemachine.messages import cluster as m
from statemachine.messages.cluster import FromNode
from statemachine.messages.common import Prepared
from statemachine.messages.values import CommittedStep, DeviceReport, Job, NodeFacts, Vote
from statemachine.timing import Timing

NODES = [f"node-{number:04d}" for number in range(1000)]
ROUNDS = 9
PATIENCE_S = 60.0
TOPICS = Topics(cluster="crowd")
VOTE = Vote(loss=0.123456789, gradient_norm=1.0)
INCARNATION = 1_795_315_395_579_213
HELLO = m.Hello(
    facts=NodeFacts(
        devices=1, host="127.0.0.1", rendezvous_port=29500, snapshot_port=29501, snapshot_bytes=2**34
    ),
    job_id=None,
    prepared=False,
    generation=0,
    training=False,
)
HEARTBEAT = m.Heartbeat(
    generation=3, committed=CommittedStep(step=1234, vote=VOTE), lineage=0, microbatch_ms=(12.345,)
)
LAYER = LayerProfile(
    forward_ms=5.0,
    backward_ms=10.0,
    parameter_bytes=10**8,
    gradient_bytes=10**8,
    optimizer_bytes=2 * 10**8,
    activation_bytes=10**7,
    output_bytes=10**6,
)
LOST = EmitEvent(
    cause="c-00042-a1b2",
    name="NodeLost",
    reason="the broker lost the session of node-0001",
    node="node-0001",
    generation=3,
    step=1234,
    details={"how": "last_will", "detected_at": 1.5, "incarnation": INCARNATION},
)


def quiesced(generation: int) -> m.Quiesced:
    report = DeviceReport(
        device=0, committed_step=1234, ready_step=None, vote=VOTE, held=(3, 4, 5, 6), lineage=0
    )
    return m.Quiesced(generation=generation, reports=(report,))


def encode_from_all(signal: m.Signal) -> list[tuple[str, bytes]]:
    """Return topic and payload of ``signal`` from every node."""
    return [
        (
            TOPICS.node_signal(node),
            encode_from_node(FromNode(node=node, incarnation=INCARNATION, signal=signal)),
        )
        for node in NODES
    ]


def received_events(signal: m.Signal) -> list[SignalArrived]:
    return [
        SignalArrived(
            at=1.0,
            cause="c-00042-a1b2",
            message=FromNode(node=node, incarnation=INCARNATION, signal=signal),
        )
        for node in NODES
    ]


def decode_all(pairs: Sequence[tuple[bytes, str]]) -> None:
    for payload, node in pairs:
        decode_from_node(payload, node)


def least_us(work: Callable[[], object], count: int = len(NODES)) -> float:
    """Return the CPU microseconds of this thread for each of the ``count`` items that ``work`` handles."""
    spent = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        work()
        spent.append(time.thread_time() - began)
    return 1e6 * min(spent) / count


class Sessions:
    """Measurements of a session against a broker that serves nothing else."""

    def __init__(self, port: int) -> None:
        self.broker = BrokerAddress(host="127.0.0.1", port=port)

    async def measure_receiving(self, messages: Sequence[tuple[str, bytes]], *, acknowledged: bool) -> float:
        """Return the CPU microseconds of each message from the socket until ``on_message`` was called."""
        received, expected, all_received = 0, 0, asyncio.Event()

        def on_message(_topic: str, _payload: bytes, _retained: bool) -> None:
            nonlocal received
            received += 1
            if received >= expected:
                all_received.set()

        topic, level = TOPICS.node_signal(), int(acknowledged)
        session = MqttSession(
            self.broker,
            client_id="receiver",
            subscriptions=(topic,) if acknowledged else (),
            unacknowledged=() if acknowledged else (topic,),
            on_message=on_message,
        )
        running = asyncio.create_task(session.run())
        await session.wait_connected(PATIENCE_S)
        crowd = socket.create_connection((self.broker.host, self.broker.port))
        crowd.sendall(connect_packet("crowd", keep_alive_s=0))
        crowd.recv(64)
        stream = b"".join(
            publish_packet(topic.encode(), payload, level * (number + 1))
            for number, (topic, payload) in enumerate(messages)
        )
        spent = []
        for _ in range(ROUNDS):
            expected += len(messages)
            all_received.clear()
            began = time.thread_time()
            sending = asyncio.get_running_loop().run_in_executor(None, crowd.sendall, stream)
            await asyncio.wait_for(all_received.wait(), PATIENCE_S)
            spent.append(time.thread_time() - began)
            await sending
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        crowd.close()
        return 1e6 * min(spent) / len(messages)

    async def measure_sending(self, payload: bytes, count: int) -> float:
        """Return the CPU microseconds of each message until it was acknowledged."""
        session = MqttSession(self.broker, client_id="sender", on_message=lambda *_: None)
        running = asyncio.create_task(session.run())
        await session.wait_connected(PATIENCE_S)
        spent = []
        for _ in range(ROUNDS):
            began = time.thread_time()
            for _ in range(count):
                session.publish(TOPICS.events, payload, queue_offline=True)
            await session.flush(PATIENCE_S)
            spent.append(time.thread_time() - began)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return 1e6 * min(spent) / count


def quiescing_machine() -> ClusterMachine:
    """Return the machine of a cluster that has asked all nodes for their reports."""
    machine = ClusterMachine(Timing())
    policy = Policy(global_batch=4096, microbatch_rows=1, devices_per_node=1)
    job = Job(job_id="j", name="j", steps=1_000_000, policy=policy)
    profile = ModelProfile(layers=(LAYER,) * 24, microbatch_rows=1)
    machine.step(BrokerConnected(at=1.0, cause="c-00041-a1b2"))
    machine.steps(received_events(HELLO))
    machine.step(SubmitRequested(at=1.0, cause="c-00043-a1b2", request="r", job=job, profile=profile))
    machine.step(TemplatesReady(at=1.0, cause="c-00044-a1b2", job_id="j"))
    machine.steps(received_events(Prepared(job_id="j", profile=None)))
    return machine


async def measure_driver(machine: ClusterMachine, events: Sequence[SignalArrived]) -> float:
    """Return the CPU microseconds of each event through the driver's queue and the machine."""

    def perform(effect: Effect) -> None:
        raise RuntimeError(f"{effect} must not come from reports alone")

    done = asyncio.Event()
    driver = Driver(machine, perform, step_batch=machine.steps, on_effects_done=done.set)
    spent = []
    running = asyncio.create_task(driver.run())
    for _ in range(ROUNDS):
        began = time.thread_time()
        for event in events:
            driver.feed(event)
        await done.wait()
        spent.append(time.thread_time() - began)
        done.clear()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    if driver.bugs:
        raise RuntimeError("the machine has a bug")
    return 1e6 * min(spent) / len(events)


def measure() -> Result:
    result = Result(
        name="messages",
        what=f"Cost of each of {len(NODES)} messages for the coordinator, CPU microseconds",
        columns=("what", "µs"),
    )

    def add_row(what: str, cost_us: float) -> None:
        result.rows.append((what, f"{cost_us:.1f}"))
        result.data[what] = cost_us

    answers, heartbeats = encode_from_all(quiesced(1)), encode_from_all(HEARTBEAT)
    with tempfile.TemporaryDirectory() as directory:
        port = free_port()
        broker = subprocess.Popen(mosquitto_command(Path(directory), port), stderr=subprocess.DEVNULL)
        try:
            await_listening("127.0.0.1", port, PATIENCE_S)
            sessions = Sessions(port)
            add_row(
                "heard: out of the session, QoS 0",
                uvloop.run(sessions.measure_receiving(answers, acknowledged=False)),
            )
            add_row(
                "heard: out of the session, QoS 1",
                uvloop.run(sessions.measure_receiving(answers, acknowledged=True)),
            )
            event = encode_event(event_message(LOST, monotonic=1.5, source="coordinator"))
            add_row("said: through the session, QoS 1", uvloop.run(sessions.measure_sending(event, 100)))
        finally:
            broker.kill()
            broker.wait()
    for what, messages in (("Quiesced", answers), ("Heartbeat", heartbeats)):
        pairs = [(payload, node) for node, (_, payload) in zip(NODES, messages, strict=True)]
        add_row(f"{what}: decoded", least_us(partial(decode_all, pairs)))
    machine = quiescing_machine()
    add_row(
        "Quiesced: queue and state machine",
        uvloop.run(measure_driver(machine, received_events(quiesced(1))[:-1])),
    )
    add_row(
        "Heartbeat: queue and state machine", uvloop.run(measure_driver(machine, received_events(HEARTBEAT)))
    )
    add_row(
        "NodeLost: made and encoded",
        least_us(
            lambda: [
                encode_event(event_message(LOST, monotonic=1.5, source="coordinator")) for _ in range(1000)
            ]
        ),
    )
    return result


if __name__ == "__main__":
    parsed = command_line(__doc__).parse_args()
    main(measure(), parsed.out)
