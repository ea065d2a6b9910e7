"""One coordinator: it connects the cluster machine to the broker, the journal and the planner.

On a failure, one event loop does this in order: the last will arrives, the machine answers with effects,
the state is journaled, the commands are sent. Everything slow happens elsewhere (planning has a process and
a thread of its own) or is limited (the public state is published at most ten times a second).

``Coordinator`` makes all of a coordinator's decisions, on any event loop and with any ``Ports``. The daemon
(``ftd.coordinator.daemon``) and the simulator both run it.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import structlog
from msgspec.structs import replace

from ftd.config.validation import NAME_PATTERN
from ftd.coordinator.commands import CommandSender
from ftd.coordinator.events import EventStream
from ftd.coordinator.journal import Journal
from ftd.coordinator.leadership import Leadership, LeadershipCallbacks, Takeover, cause_suffix
from ftd.coordinator.ports import Ports
from ftd.coordinator.public_state import public_state
from ftd.coordinator.requests import RequestHandler
from ftd.coordinator.restore_check import check_restore
from ftd.driver import Driver
from ftd.errors import WireError
from ftd.tasks import cancel_all
from ftd.transport.rate_limited_log import RateLimitedLog
from ftd.transport.wire.checking import encode_state
from ftd.transport.wire.codec import MAX_COMMAND_BYTES, decode_from_node
from ftd.transport.wire.coordinator_messages import JournalCopy, encode_unreachable, state_compressor
from ftd.transport.wire.public import ClusterStateHeader, EventMessage, NodeStateMessage, decode_json
from ftd.transport.wire.topics import Topics
from statemachine.cluster.durable.durable import durability_key
from statemachine.cluster.durable.outbox import OUTBOX
from statemachine.cluster.machine import ClusterMachine
from statemachine.effects import (
    AbandonCheckpoint,
    AnswerRequest,
    BroadcastCommand,
    BuildTemplates,
    CancelTemplates,
    CheckDrain,
    CheckRestore,
    CommitCheckpoint,
    ComparePlan,
    ComputePlan,
    Effect,
    EmitEvent,
    ExportCheckpoint,
    FindCheckpoint,
    PersistState,
    PlanAhead,
    PublishCluster,
    RecordSteps,
    RemoveNode,
    SendCommand,
)
from statemachine.election.leadership import Leader, Peer
from statemachine.events import (
    BrokerConnected,
    BrokerDisconnected,
    Event,
    FaultAnnounced,
    NodeVanished,
    SignalArrived,
    StepsMissed,
)
from statemachine.hardware import DEFAULT_LIMITS, HardwareLimits
from statemachine.messages.cluster import Prepare
from statemachine.messages.values import ClusterPhase, NodeState
from statemachine.timing import Timing

STATE_PERIOD_S = 0.1
STATE_SHARE = 0.05
"""Largest share of the time that may be spent on the public state, which takes milliseconds for a thousand
nodes.
"""
STATE_WAIT_FACTOR = 25
"""Least wait before the public state is published, in multiples of the time that publishing takes: decisions
among a thousand nodes come first.
"""
LEAVE_TIMEOUT_S = 1.0
_MAX_HANDLERS = 10_000
"""Topics whose handlers are remembered. The number is limited because clients may make up names of nodes."""
_Handler = Callable[[bytes, bool], None]
"""A handler: takes a payload and whether it was retained; raises WireError for what is no message of its
topic.
"""


class Coordinator:
    """One coordinator process. ``run`` drives it; see the module."""

    def __init__(
        self,
        ports: Ports,
        me: Peer,
        *,
        cluster: str,
        directory: Path,
        timing: Timing,
        hardware: HardwareLimits = DEFAULT_LIMITS,
        reset: bool = False,
        state_period_s: float = STATE_PERIOD_S,
        expected_nodes: int = 0,
        watch: Callable[[Event | Effect], None] | None = None,
    ) -> None:
        """Open the journal.

        :param directory: directory of the journal.
        :param hardware: limits from which on a node's hardware counts as bad.
        :param reset: discard the job, here and at the broker, once this coordinator leads.
        :param state_period_s: least time between two publications of the cluster's state.
        :param expected_nodes: see ``startup_state``.
        :param watch: the ``observe`` of the ``Driver``.
        :raises JournalError: there is no usable journal.
        """
        self.topics = Topics(cluster=cluster)
        self._clock, self._observer = ports.clock, ports.observer
        self._incarnation = me.incarnation
        self._state_period_s = state_period_s
        self._expected_nodes = expected_nodes
        self.journal = Journal(directory, disk=ports.disk, clock=ports.clock)
        self._encode = state_compressor().compress
        self._stopping = False
        self._forced_key: tuple[Any, ...] = ()
        self._published_at, self._publish_took_s = -state_period_s, 0.0
        self._publish_timer: asyncio.TimerHandle | None = None
        self._oversized_states = RateLimitedLog(structlog.get_logger("ftd.coordinator"), "state_too_large")
        self._timing = timing
        self._leading = False
        self._hardware = hardware
        self._takeover = Takeover(
            timing, self.journal, ports.clock, ports.program, reset=reset, hardware=hardware
        )
        self.machine = ClusterMachine(timing, hardware)
        self.driver = Driver(
            self.machine,
            self._perform,
            watch,
            step_batch=self._steps,
            on_effects_done=self._carried_out,
            clock=ports.clock,
            suffix=cause_suffix(me),
        )
        self.planning = ports.planning(self.feed, self.driver, self._publish_state_soon)
        self._checkpoints = ports.checkpoints(self.feed, self.driver)
        self.leadership = self._new_leadership(ports, replace(me, ineligible=self._takeover.ineligible))
        self._events = EventStream(
            self.topics,
            self.journal,
            self.leadership,
            now=self.driver.now,
            observer=ports.observer,
            on_node_event=self._on_node_event,
        )
        self._commands = CommandSender(self.topics, self.leadership)
        self._requests = RequestHandler(
            topics=self.topics,
            session=self.leadership,
            driver=self.driver,
            journal=self.journal,
            checkpoints=self._checkpoints,
            check_solver=self.planning.check_solver,
            public_state=self.public_state,
            job=lambda: self.machine.job,
        )
        self._handlers = self._handlers_of_cluster()
        """Handlers by topic, with those of nodes that have sent something."""

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set. Trainers continue: they need no coordinator to train.

        :raises JournalError: the journal can no longer be written.
        """
        driving, leading = (
            asyncio.ensure_future(self.driver.run()),
            asyncio.ensure_future(self.leadership.run()),
        )
        stopping = asyncio.ensure_future(stop.wait())
        problem: Exception | None = None
        try:
            await asyncio.wait([driving, leading, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in (driving, leading):
                if task.done():
                    task.result()  # These tasks end only with an error: raise it here.
        except Exception as error:
            problem = error
            raise
        finally:
            await self._end([driving, stopping], leading, problem)

    async def _end(
        self, first: Sequence[asyncio.Future[Any]], leading: asyncio.Future[Any], problem: Exception | None
    ) -> None:
        """Stop deciding, publish that nobody coordinates any more and why, then leave."""
        self._stopping = True
        self._observer.on_stopping()
        await cancel_all(first)
        self.driver.stop_timers()
        if self._publish_timer is not None:
            self._publish_timer.cancel()
        why = "was stopped" if problem is None else f"ended: {str(problem) or type(problem).__name__}"
        last_state = encode_unreachable(
            f"the coordinator {why}", incarnation=self._incarnation, graceful=problem is None
        )
        await self.leadership.leave(last_state, LEAVE_TIMEOUT_S)
        await cancel_all([leading])

    def _new_leadership(self, ports: Ports, me: Peer) -> Leadership:
        return Leadership(
            ports,
            self.topics,
            me,
            self._timing,
            takeover=self._takeover,
            callbacks=LeadershipCallbacks(
                begin=self._begin,
                state=lambda: self._encode(self._durable()),
                end=self._end_lead,
                emit=lambda event: self._events.emit(event),  # noqa: PLW0108  # the stream is made later
                publish_state=self._publish_state_soon,
                on_message=self._on_message,
                on_connected=self._on_connected,
                on_lost=self._on_lost,
                on_event=lambda payload: self._events.receive_as_follower(payload),  # noqa: PLW0108  # as above
                on_state=self._on_leader_state,
            ),
        )

    # --- received messages -------------------------------------------------------------------------

    def _on_message(self, topic: str, payload: bytes, retained: bool) -> None:
        """Handle a message that arrives while this coordinator leads, and report what is wrong with it.

        A thousand nodes send a heartbeat each second, and all of them answer at once when one is lost. So a
        node's topic is parsed once, and its handler is remembered.
        """
        handler = self._handlers.get(topic)
        if handler is None:
            if len(self._handlers) >= _MAX_HANDLERS:
                self._handlers = self._handlers_of_cluster()
            handler = self._handlers[topic] = self._handler_of_node(topic)
        try:
            handler(payload, retained)
        except WireError as error:
            self._reject(topic, str(error))

    def _handlers_of_cluster(self) -> dict[str, _Handler]:
        return {
            self.topics.request: self._handle_request,
            self.topics.events: lambda payload, _: self._events.receive_as_leader(payload),
            self.topics.cluster_state: self._handle_cluster_state,
            self.topics.command: self._commands.receive_broadcast,
        }

    def _handler_of_node(self, topic: str) -> _Handler:
        match self.topics.parse_node(topic):
            case node, "signal":
                return partial(self._handle_signal, node)
            case node, "state":
                return partial(self._handle_node_state, node)
            case _:
                return lambda payload, retained: None

    def _handle_signal(self, node: str, payload: bytes, _: bool) -> None:
        message = decode_from_node(payload, node)
        self.driver.feed(SignalArrived(**self.driver.stamp(), message=message))

    def _handle_request(self, payload: bytes, retained: bool) -> None:
        if not retained:  # A retained request would be served again at every connection.
            self._requests.handle(payload)

    def _handle_node_state(self, node: str, payload: bytes, _: bool) -> None:
        if not payload:  # An empty payload deletes the retained message.
            return
        state = decode_json(payload, NodeStateMessage)
        if state.node != node:
            raise WireError(f"a message on {node!r}'s topic claims to be {state.node[:64]!r}'s")
        if state.state is NodeState.OFFLINE:
            self.driver.feed(
                NodeVanished(
                    **self.driver.stamp(), node=node, incarnation=state.incarnation, graceful=state.graceful
                )
            )

    def _handle_cluster_state(self, payload: bytes, _: bool) -> None:
        """Publish our own state over the predecessor's last will, which may arrive after our first state."""
        if decode_json(payload, ClusterStateHeader, MAX_COMMAND_BYTES).phase == "UNREACHABLE":
            self._publish_state_soon()

    def _reject(self, topic: str, why: str) -> None:
        node = self.topics.node_of(topic)
        self._emit("MessageRejected", f"{topic}: {why}", {"topic": topic, "why": why}, node)

    def _emit(self, name: str, reason: str, details: dict[str, Any], node: str | None = None) -> None:
        """Publish an event that the machine did not decide on."""
        cause = self.driver.new_cause()
        self._events.emit(EmitEvent(cause=cause, name=name, reason=reason, node=node, details=details))
        self.journal.flush()

    # --- who leads ---------------------------------------------------------------------------------

    def status(self) -> str:
        """Return a description of what this coordinator does."""
        return f"{self.leadership.describe_role()}, cluster {self.topics.cluster}"

    def _begin(self, leader: Leader, copy: JournalCopy | None) -> None:
        """Begin to lead, from the newer of the last leader's journal at the broker and this host's."""
        initial = self._takeover.begin(copy, leader.incarnation)
        self.machine = initial.machine
        if self.machine.job_id is not None:
            self.journal.set_job(self.machine.job_id)
        self.driver.replace_machine(self.machine)
        self._leading = True
        self._forced_key = ()
        self._events.publish_unacknowledged(initial.outbox, self.machine.plan_details)
        for effect in initial.effects:
            self._perform(effect)

    def _end_lead(self, leader: Leader) -> None:
        """Drop the machine's state, which is out of date: another coordinator decides now."""
        self._leading = False
        if self.machine.job_id is not None:
            self.planning.cancel(CancelTemplates(cause="deposed", job_id=self.machine.job_id))
        self.machine = ClusterMachine(self._timing, self._hardware)
        self._observer.track_job(None, 0, None)
        self._events.outbox.clear()
        self._requests.forget_waiting()
        self.driver.replace_machine(self.machine)
        if self._publish_timer is not None:
            self._publish_timer.cancel()
            self._publish_timer = None
        self._observer.on_status(self.status())

    def feed(self, event: Event) -> None:
        """Feed the machine if this coordinator leads. Answers to what it asked for as the leader are dropped
        afterwards.
        """
        if self._leading:
            self.driver.feed(event)

    def _on_connected(self) -> None:
        self._commands.on_connected()
        self._observer.on_status(self.status())
        self.driver.feed(BrokerConnected(**self.driver.stamp()))

    def _on_lost(self) -> None:
        self._observer.on_status("waiting for the broker")
        self.driver.feed(BrokerDisconnected(**self.driver.stamp()))

    # --- effects of the machine ---------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        match effect:
            case EmitEvent():
                self._events.emit(effect)
            case RecordSteps():
                self._events.record_steps(effect.steps)
            case SendCommand(command=Prepare(profile=True)):
                self.planning.prepare()
                self._commands.send(effect)
            case SendCommand() | BroadcastCommand() | RemoveNode():
                self._commands.send(effect)
            case PersistState():
                self._persist()
            case PublishCluster():
                self._publish_state_soon()
            case BuildTemplates():
                self.planning.build(effect)
            case CancelTemplates():
                self.planning.cancel(effect)
            case PlanAhead() | ComputePlan() | ComparePlan() | CheckDrain():
                self.planning.compute(effect)
            case CheckRestore():
                self.driver.feed(check_restore(effect, self.driver.now()))
            case CommitCheckpoint():
                self._checkpoints.commit(effect)
            case AbandonCheckpoint():
                self._checkpoints.abandon(effect)
            case ExportCheckpoint():
                self._checkpoints.export(effect)
            case FindCheckpoint():
                self._checkpoints.find(effect)
            case AnswerRequest():
                self._publish_waiting_state()
                self._requests.answer(
                    effect.request, accepted=effect.accepted, detail=effect.detail, outcome=effect.outcome
                )
            case _:  # The driver handles timers, and the other effects belong to nodes.
                raise AssertionError(f"no effect of a coordinator: {effect!r}")

    def _carried_out(self) -> None:
        """Write the events of a step to the journal, after its effects."""
        self.journal.flush()

    def _durable(self) -> dict[str, Any]:
        """Return the durable state of the machine with the events that are not acknowledged yet."""
        return {**self.machine.durable_parts(), OUTBOX: self._events.outbox.entries}

    def _persist(self) -> None:
        """Write the state to the journal, and force it to the disk if a loss of power must not take it back."""
        state = self._durable()
        encoded = self._encode(state)
        position = self.leadership.replicate(encoded, self.driver.now())
        key = durability_key(state)
        forced = key != self._forced_key or state["generation"] > self.journal.reserved
        self.journal.save(encoded, forced=forced, position=position)
        self._forced_key = key

    def _steps(self, events: Sequence[Event], bug: Callable[[Event], None]) -> list[Effect]:
        effects = self.machine.steps(cast(Any, events), bug)
        self._events.add_to_outbox(effects)
        return effects

    def _on_node_event(self, message: EventMessage) -> None:
        """Take the event of a node, which was journaled."""
        self._observer.on_node_event(message)
        if message.event == "ChaosInjected" and message.node is not None:
            self.feed(
                FaultAnnounced(
                    **self.driver.stamp(),
                    node=message.node,
                    fault_at=float(message.details["at"]),
                    announced_at=message.monotonic,
                )
            )

    def public_state(self) -> dict[str, Any]:
        """Return the cluster's state, as it is published."""
        coordinator = {"coordinator": self._incarnation, **self.leadership.public_state()}
        return public_state(
            self.machine.public_state(),
            coordinator,
            self.planning.progress,
            self.driver.now(),
            expected_nodes=self._expected_nodes,
        )

    def _track(self) -> None:
        """Have the job's steps logged while this coordinator leads."""
        if self._leading:
            phase = self.machine.phase
            outcome = str(phase) if phase in (ClusterPhase.FINISHED, ClusterPhase.FAILED) else None
            self._observer.track_job(self.machine.job, self.leadership.machine.term, outcome)

    def fetch_missed(self, first: int, last: int) -> None:
        """Ask the nodes for steps whose events this coordinator's journal lacks."""
        self.feed(StepsMissed(**self.driver.stamp(), first=first, last=last))

    def report_logging_failure(self, sink: str, detail: str) -> None:
        """Report that the job's steps cannot be logged to ``sink``."""
        if self._leading:
            self._emit("LoggingFailed", f"{sink}: {detail}", {"sink": sink, "detail": detail})

    def _on_leader_state(self, state: dict[str, Any]) -> None:
        """Take the state that another coordinator publishes: the steps that follow belong to its job."""
        self._observer.on_state(state)
        job = state.get("job")
        if isinstance(job, dict) and isinstance(name := job.get("id"), str) and NAME_PATTERN.fullmatch(name):
            self.journal.set_job(name)

    def _publish_state_soon(self) -> None:
        """Publish the cluster's state after more urgent work, and at least ``state_period_s`` after the last
        time.
        """
        if self._stopping or self._publish_timer is not None:
            return
        loop = asyncio.get_running_loop()
        due = self._published_at + max(self._state_period_s, self._publish_took_s / STATE_SHARE)
        wait_s = max(due - loop.time(), STATE_WAIT_FACTOR * self._publish_took_s)
        self._publish_timer = loop.call_later(wait_s, self._publish_state)

    def _publish_waiting_state(self) -> None:
        """Publish the state at once if it is to be published: a client that has its answer finds in the state
        what the answer says.
        """
        if self._publish_timer is not None and not self._stopping:
            self._publish_timer.cancel()
            self._publish_state()

    def _publish_state(self) -> None:
        self._publish_timer = None
        began_s, self._published_at = self._clock.cpu_s(), asyncio.get_running_loop().time()
        state = self.public_state()
        payload = encode_state(state)
        if len(payload) <= MAX_COMMAND_BYTES:
            self.leadership.publish(self.topics.cluster_state, payload, retain=True)
        else:
            self._oversized_states.warn(
                size_bytes=len(payload),
                reason=f"the state is not published, since nobody reads more than {MAX_COMMAND_BYTES} bytes; "
                "use fewer nodes, or shorter names of nodes",
            )
        self._observer.on_state(state)
        self._track()
        self._publish_took_s = self._clock.cpu_s() - began_s
        if self.machine.phase is ClusterPhase.RUNNING:
            self.journal.maintain(generation=self.machine.generation)
