"""The event stream: every ``EmitEvent`` becomes a log line, a journal row and an MQTT message.

What was decided is in the durable state, with its events, before anybody hears of it (``add_to_outbox``,
``statemachine.cluster.durable.outbox``); whoever leads next tells what the broker never acknowledged
(``publish_unacknowledged``).

Nodes publish events, too (a trainer started, chaos struck); those are heard and put into the journal, so that
it tells the whole story.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec
import structlog

from ftd.coordinator.journal import Journal
from ftd.coordinator.leadership import Leadership
from ftd.driver import EventRateLimiter
from ftd.errors import WireError
from ftd.transport.wire.catalogue import EVENTS_OF_OTHERS
from ftd.transport.wire.checking import encode_event, problem_of_details
from ftd.transport.wire.codec import MAX_COUNTER, check_size
from ftd.transport.wire.public import EventMessage, decode_json, encode_json, event_message, timestamp
from ftd.transport.wire.topics import Topics
from statemachine.cluster.durable.outbox import EventOutbox, is_journaled
from statemachine.effects import Effect, EmitEvent

_log = structlog.get_logger("ftd.events")

SOURCE = "coordinator"
PLAN_IN_WORDS = frozenset({"pipelines", "considered"})
"""Of ``PlanChosen``: what ``ClusterMachine.plan_in_words`` gives."""
MAX_EVENT_BYTES = 16 * 1024
"""Of what others tell: the journal keeps it."""


class EventStream:
    """Emits our own events to all three places; the events of nodes, which it hears, go into the journal."""

    def __init__(
        self,
        topics: Topics,
        journal: Journal,
        *,
        emitted: Callable[[EmitEvent], None],
        heard: Callable[[EventMessage], None],
        shown: Callable[[EventMessage, bool], None],
    ) -> None:
        """:param emitted: sees each of our own, before one is held back. :param heard: those of nodes.
        :param shown: all that are published; ``True``: our own."""
        self._topic = topics.events
        self._journal = journal
        self._gate = EventRateLimiter()
        self._emitted, self._heard, self._shown = emitted, heard, shown
        self.outbox: EventOutbox[str] = EventOutbox()
        self._decided: dict[int, tuple[EmitEvent, EventMessage]] = {}
        """Of the step under way: each event by its identity."""

    def add_to_outbox(self, effects: Iterable[Effect], now: float) -> None:
        """What a step tells, before any of its effects is carried out."""
        self._decided = {}
        for effect in effects:
            if isinstance(effect, EmitEvent) and is_journaled(effect.name):
                message = event_message(effect, monotonic=now, source=SOURCE)
                self._decided[id(effect)] = effect, message
                self.outbox.add(message.id, encode_json(_without_plan(message)).decode())

    def publish_unacknowledged(
        self, session: Leadership, untold: Iterable[Any], plan_in_words: Callable[[int], dict[str, Any]]
    ) -> None:
        """Tell what the last leader decided and may not have told, each as it was.

        :param untold: of the durable state.
        """
        self.outbox.clear()
        for number, text in untold:
            try:
                message: EventMessage = decode_json(text.encode(), EventMessage)
            except WireError as error:
                _log.error("untold", id=number, problem=str(error), remedy="going on without it")
                continue
            self.outbox.add(number, text)
            if message.event == "PlanChosen":
                details = message.details | plan_in_words(message.generation or 0)
                message = msgspec.structs.replace(message, details=details)
            is_new = self._journal.record(message)
            self._publish(session, message)
            _log.info("told_again", event_name=message.event, id=number)
            if is_new:
                self._shown(message, True)

    def emit(self, session: Leadership, event: EmitEvent, now: float) -> None:
        """Tell the world; an outage of the broker delays it (kept), the gate may thin it out."""
        self._emitted(event)
        suppressed = self._gate.admit(event, now)
        if suppressed is None:
            return
        if (decided := self._decided.pop(id(event), None)) is not None:
            message = msgspec.structs.replace(decided[1], at=timestamp(), monotonic=now)
        else:
            message = event_message(event, monotonic=now, suppressed=suppressed, source=SOURCE)
        self._journal.record(message)
        self._publish(session, message)
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
        self._shown(message, True)

    def record_steps(self, steps: Iterable[EmitEvent], now: float) -> None:
        """Remember what another coordinator reported while this one was away."""
        for event in steps:
            self._journal.record(event_message(event, monotonic=now, source=SOURCE))

    def _publish(self, session: Leadership, message: EventMessage) -> None:
        there = partial(self.outbox.acknowledge, message.id)
        session.publish(self._topic, encode_event(message), queue_offline=True, on_done=there)

    def receive_as_follower(self, payload: bytes) -> None:
        """While another coordinator leads: what it tells is for our journal's history, too. Nothing is
        decided by that, so whoever may write the topic can forge no more than history.

        :raises WireError: it is no event.
        """
        message = _checked(decode_json(payload, EventMessage))
        if self._journal.record(message):
            self._shown(message, message.source == SOURCE)

    def receive_as_leader(self, payload: bytes) -> None:
        """A message on the event topic; our own were recorded when they were emitted.

        The topic is shared: whoever may write it could claim anything, so only what nodes tell counts.

        :raises WireError: it is no event, or not one that is told by nodes.
        """
        message: EventMessage = decode_json(payload, EventMessage)
        if message.source == SOURCE:
            return
        if message.event not in EVENTS_OF_OTHERS:
            raise WireError(
                f"only the coordinator tells {message.event[:80]!r}, and not {message.source[:80]!r}"
            )
        if message.source.startswith("node/") and message.source != f"node/{message.node}":
            raise WireError(f"an event of {str(message.node)[:80]!r} that {message.source[:80]!r} tells")
        check_size(payload, MAX_EVENT_BYTES)
        if self._journal.record(_checked(message)):
            self._heard(message)
            self._shown(message, False)


def _without_plan(message: EventMessage) -> EventMessage:
    """As it is kept beside the plan itself."""
    if message.event != "PlanChosen":
        return message
    details = {name: value for name, value in message.details.items() if name not in PLAN_IN_WORDS}
    return msgspec.structs.replace(message, details=details)


def _checked(message: EventMessage) -> EventMessage:
    """:raises WireError: it is not as the contract has it."""
    if (problem := problem_of_details(message.event, encode_json(message.details))) is not None:
        raise WireError(problem[:500])
    for name in ("generation", "step"):
        if not 0 <= (getattr(message, name) or 0) <= MAX_COUNTER:
            raise WireError(f"{name} is {getattr(message, name)}")
    return message
