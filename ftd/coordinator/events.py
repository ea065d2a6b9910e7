"""The event stream: every ``EmitEvent`` becomes a log line, a journal row and an MQTT message.

A decision and its events are in the durable state before anybody receives them (``add_to_outbox``,
``statemachine.cluster.durable.outbox``). The next leader publishes the events that the broker has not
acknowledged (``publish_unacknowledged``).

Nodes publish events, too (a trainer started, a fault was injected); these are received and put into the
journal, so that it holds the complete history.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec
import structlog

from ftd.coordinator.journal import ONE_PER_STEP, Journal
from ftd.coordinator.leadership import Leadership
from ftd.coordinator.ports import Observer
from ftd.driver import EventRateLimiter
from ftd.errors import WireError
from ftd.transport.wire.catalogue import EVENTS_OF_OTHERS
from ftd.transport.wire.checking import encode_event, problem_of_details
from ftd.transport.wire.codec import check_size
from ftd.transport.wire.public import EventMessage, decode_json, encode_json, event_message, timestamp
from ftd.transport.wire.topics import Topics
from statemachine.cluster.durable.outbox import EventOutbox, is_journaled
from statemachine.effects import Effect, EmitEvent
from statemachine.messages.values import MAX_COUNTER

_log = structlog.get_logger("ftd.events")

SOURCE = "coordinator"
PLAN_IN_WORDS = frozenset({"pipelines", "considered"})
"""Details of ``PlanChosen`` that ``ClusterMachine.plan_details`` can make again."""
MAX_EVENT_BYTES = 16 * 1024
"""Largest event from another process that is accepted, since the journal keeps it."""
MAX_UNWRITTEN = 1000
"""Events of the leader after which a follower writes them to its journal, or forgets them if its disk is full. Mostly
they are written earlier, with the next copy of the leader's journal; a follower that cannot read that saves none.
"""


class EventStream:
    """The stream of events: it logs, journals and publishes those of this coordinator, and journals those of
    nodes.
    """

    def __init__(
        self,
        topics: Topics,
        journal: Journal,
        session: Leadership,
        *,
        now: Callable[[], float],
        observer: Observer,
        on_node_event: Callable[[EventMessage], None],
    ) -> None:
        """Begin with an empty outbox.

        :param now: returns the time on the machine's clock.
        :param on_node_event: receives each event of a node.
        """
        self._topic = topics.events
        self._journal, self._session, self._now = journal, session, now
        self._gate = EventRateLimiter()
        self._observer, self._on_node_event = observer, on_node_event
        self.outbox: EventOutbox[str] = EventOutbox()
        self._pending: dict[int, tuple[EmitEvent, EventMessage]] = {}
        """Events of the step in progress, by the identity of their effects."""

    def add_to_outbox(self, effects: Iterable[Effect]) -> None:
        """Add the events of a step to the outbox, before any of its effects is carried out."""
        self._pending = {}
        for effect in effects:
            if isinstance(effect, EmitEvent) and is_journaled(effect.name):
                message = event_message(effect, monotonic=self._now(), source=SOURCE)
                self._pending[id(effect)] = effect, message
                self.outbox.add(message.id, encode_json(_without_plan(message)).decode())

    def publish_unacknowledged(
        self, unacknowledged: Iterable[Any], plan_details: Callable[[int], dict[str, Any]]
    ) -> None:
        """Publish the events that the last leader decided and that the broker has not acknowledged, unchanged.

        :param unacknowledged: their identifiers and their encoded messages, from the durable state.
        """
        self.outbox.clear()
        for number, text in unacknowledged:
            try:
                message: EventMessage = decode_json(text.encode(), EventMessage)
            except WireError as error:
                _log.error("event_unreadable", id=number, problem=str(error), remedy="continuing without it")
                continue
            self.outbox.add(number, text)
            if message.event == "PlanChosen":
                details = message.details | plan_details(message.generation or 0)
                message = msgspec.structs.replace(message, details=details)
            is_new = self._journal.record(message)
            self._publish(message)
            _log.info("event_republished", event_name=message.event, id=number)
            if is_new:
                self._observer.on_published(message, True)

    def emit(self, event: EmitEvent) -> None:
        """Log, journal and publish an event. An outage of the broker delays it; the rate limiter may drop it."""
        self._observer.on_own_event(event)
        now = self._now()
        suppressed = self._gate.admit(event, now)
        if suppressed is None:
            return
        if (pending := self._pending.pop(id(event), None)) is not None:
            message = msgspec.structs.replace(pending[1], at=timestamp(), monotonic=now)
        else:
            message = event_message(event, monotonic=now, suppressed=suppressed, source=SOURCE)
        self._journal.record(message)
        self._publish(message)
        log = _log.debug if event.name == "StepCommitted" else _log.info
        log(
            event.name,
            reason=event.reason,
            node=event.node,
            generation=event.generation,
            step=event.step,
            cause=event.cause,
            **({"details": event.details} if event.details else {}),
        )
        self._observer.on_published(message, True)

    def record_steps(self, steps: Iterable[EmitEvent]) -> None:
        """Journal steps that another coordinator committed while this one was away."""
        for event in steps:
            self._journal.record(event_message(event, monotonic=self._now(), source=SOURCE))

    def _publish(self, message: EventMessage) -> None:
        on_done = partial(self.outbox.acknowledge, message.id)
        self._session.publish(self._topic, encode_event(message), queue_offline=True, on_done=on_done)

    def receive_as_follower(self, payload: bytes) -> None:
        """Journal an event that the leader published. Nothing is decided by it, so a client that may write the
        topic can forge no more than history.

        :raises WireError: the payload is not an event.
        :raises JournalError: the events that wait cannot be written, and are forgotten.
        """
        message = _checked(decode_json(payload, EventMessage))
        if self._journal.record(message):
            self._observer.on_published(message, message.source == SOURCE)
        if self._journal.unwritten >= MAX_UNWRITTEN:
            self._journal.flush_or_forget()

    def receive_as_leader(self, payload: bytes) -> None:
        """Journal a node's event. This coordinator's own were journaled when they were emitted.

        The topic is shared, and a client that may write it could claim anything, so only the events that
        nodes publish are accepted.

        :raises WireError: the payload is not an event, or not one that nodes publish.
        """
        message: EventMessage = decode_json(payload, EventMessage)
        if message.source == SOURCE:
            return
        if message.event not in EVENTS_OF_OTHERS:
            raise WireError(
                f"only the coordinator publishes {message.event[:80]!r}, not {message.source[:80]!r}"
            )
        if message.source.startswith("node/") and message.source != f"node/{message.node}":
            raise WireError(f"an event of {str(message.node)[:80]!r} from {message.source[:80]!r}")
        check_size(payload, MAX_EVENT_BYTES)
        if self._journal.record(_checked(message)):
            self._on_node_event(message)
            self._observer.on_published(message, False)


def _without_plan(message: EventMessage) -> EventMessage:
    """Return the message without the plan, which the durable state holds already."""
    if message.event != "PlanChosen":
        return message
    details = {name: value for name, value in message.details.items() if name not in PLAN_IN_WORDS}
    return msgspec.structs.replace(message, details=details)


def _checked(message: EventMessage) -> EventMessage:
    """Return the message.

    :raises WireError: it does not follow the contract.
    """
    if (problem := problem_of_details(message.event, encode_json(message.details))) is not None:
        raise WireError(problem[:500])
    for name in ("generation", "step"):
        if not 0 <= (getattr(message, name) or 0) <= MAX_COUNTER:
            raise WireError(f"{name} is {getattr(message, name)}")
    if message.step is None and message.event in ONE_PER_STEP:
        raise WireError(f"{message.event} without a step")
    return message
