"""A coordinator's watch: who leads, who is there, and what is told, under a client id of its own."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import structlog

from ftd.config.address import BrokerAddress
from ftd.errors import WireError
from ftd.mqtt.session import MqttSession, Will
from ftd.wire.checking import encode_event
from ftd.wire.coordinators import JournalCopy, PeerMessage, decode_copy, decode_leader, encode_peer
from ftd.wire.public import CoordinatorSaid, decode_json, event_message
from ftd.wire.topics import Topics
from statemachine.effects import EmitEvent
from statemachine.election.leadership import (
    BeatHeard,
    JournalJudged,
    LeaderSeen,
    LeaderVanished,
    Peer,
    PeerSeen,
    PeerVanished,
    WatchBegan,
    WatchBroke,
)
from statemachine.events import Event

_log = structlog.get_logger("ftd.seat")


@dataclass(frozen=True, slots=True, kw_only=True)
class Following:
    """What a coordinator does with what it hears; not called while it leads itself."""

    position: Callable[[], tuple[int, int]]
    """Of the newest state in its journal."""
    met: Callable[[], None]
    """There is another coordinator, whoever leads."""
    alive: Callable[[], None]
    """The broker brought something, whoever leads: of a leader that is well, twice in a second."""
    keep: Callable[[JournalCopy], str]
    """The leader's journal says this now; the answer: why we could not go on from it, or nothing."""
    heard: Callable[[bytes], None]
    """An event of somebody's."""
    seen: Callable[[dict[str, Any]], None]
    """The cluster's state."""


class Watch:
    """Hears the coordinators' topics and tells the election of it."""

    def __init__(
        self,
        broker: BrokerAddress,
        topics: Topics,
        me: Peer,
        *,
        feed: Callable[[Event], None],
        stamp: Callable[[], dict[str, Any]],
        leading: Callable[[], bool],
        following: Following,
        bury: Callable[[str], None],
    ) -> None:
        """:param bury: delete what is retained of a peer that is gone; called while this one leads."""
        self._topics, self._me = topics, me
        self._feed, self._stamp, self._leading = feed, stamp, leading
        self._following, self._bury = following, bury
        self._version = version("ftd")
        self._began = False
        self._retained: list[tuple[str, bytes]] = []
        self._own = topics.coordinator_peer(me.incarnation)
        self.session = MqttSession(
            broker,
            client_id=f"ftd-{topics.cluster}-coordinator-{me.incarnation}",
            subscriptions=(
                topics.leader,
                topics.leader_beat,
                topics.journal,
                topics.coordinator_peer(),
                topics.cluster_state,
            ),
            unacknowledged=(topics.events,),
            will=Will(topic=self._own, payload=encode_peer(me, self._version, gone=True)),
            on_message=self._heard,
            on_connected=self._announce,
            on_lost=self._lost,
        )

    async def leave(self, timeout_s: float) -> None:
        """Say that we are not there any more."""
        self.session.publish(self._own, b"", retain=True)
        await self.session.flush(timeout_s)

    def show(self, me: Peer) -> None:
        """This coordinator is another one than it said: it must not lead, or may again."""
        self._me = me
        if me.barred:
            _log.warning("barred", why=me.barred)
        if self._began:
            self.session.publish(self._own, encode_peer(me, self._version), retain=True)

    def refuse(self, event: EmitEvent, state: bytes) -> None:
        """Nobody leads, and we must not: tell it where whoever looks will see it. Whoever comes to lead after
        all says its own state over this one."""
        _log.error(event.name, reason=event.reason)
        message = event_message(event, monotonic=self._stamp()["at"], source="coordinator")
        self.session.publish(self._topics.cluster_state, state, retain=True)
        self.session.publish(self._topics.events, encode_event(message))

    def _announce(self) -> None:
        """Say that we are there; once we hear it, all that was retained has been heard, too."""
        self._began = False
        self._retained.clear()
        me = dataclasses.replace(self._me, position=self._following.position())
        self._feed(PeerSeen(**self._stamp(), peer=me))
        self.session.publish(self._own, encode_peer(me, self._version), retain=True)

    def _lost(self) -> None:
        self._began = False
        self._feed(WatchBroke(**self._stamp()))

    def _heard(self, topic: str, payload: bytes, retained: bool) -> None:
        self._following.alive()
        if not self._began and topic == self._own and not retained:
            self._began = True
            # Who leads before what became of it.
            self._retained.sort(key=lambda message: message[0] == self._topics.cluster_state)
            for message in self._retained:
                self._take(*message)
            self._feed(WatchBegan(**self._stamp()))
        elif not self._began:
            self._retained.append((topic, payload))
        else:
            self._take(topic, payload)

    def _take(self, topic: str, payload: bytes) -> None:
        try:
            self._route(topic, payload)
        except WireError as error:
            _log.warning("refused", topic=topic, problem=str(error))

    def _route(self, topic: str, payload: bytes) -> None:
        """:raises WireError: it is not what this topic is for."""
        topics, feed = self._topics, self._feed
        if topic == topics.events:
            if not self._leading():
                self._following.heard(payload)
        elif topic == topics.cluster_state:
            said = decode_json(payload, CoordinatorSaid)
            if said.phase == "UNREACHABLE" and isinstance(said.coordinator, int):
                graceful = said.graceful is True
                feed(LeaderVanished(**self._stamp(), incarnation=said.coordinator, graceful=graceful))
            if not self._leading():
                self._following.seen(decode_json(payload, dict[str, Any]))
        elif topic == topics.journal:
            if payload and not self._leading():
                self._judge(decode_copy(payload))
        elif topic == topics.leader:
            if payload:
                feed(LeaderSeen(**self._stamp(), leader=decode_leader(payload)))
        elif topic == topics.leader_beat:
            feed(BeatHeard(**self._stamp(), leader=decode_leader(payload)))
        elif payload:
            self._see_peer(topic, decode_json(payload, PeerMessage))
        elif (last := topic.rpartition("/")[2]).isdecimal():
            feed(PeerVanished(**self._stamp(), incarnation=int(last)))

    def _judge(self, copy: JournalCopy) -> None:
        problem = self._following.keep(copy)
        if problem != self._me.barred:
            self._feed(JournalJudged(**self._stamp(), problem=problem))

    def _see_peer(self, topic: str, seen: PeerMessage) -> None:
        if topic != self._topics.coordinator_peer(seen.incarnation):
            raise WireError(f"it claims to be of {seen.incarnation}")
        if seen.name != self._me.name:  # Otherwise it is what is left of us as we were before.
            self._following.met()
        if seen.gone:
            self._feed(PeerVanished(**self._stamp(), incarnation=seen.incarnation))
            if self._leading():
                self._bury(topic)
            return
        if seen.version != self._version:
            remedy = "the same version of ftd on all coordinators' hosts"
            _log.warning("version", peer=seen.name, here=self._version, there=seen.version, remedy=remedy)
        peer = Peer(
            name=seen.name,
            incarnation=seen.incarnation,
            priority=seen.priority,
            position=seen.position,
            barred=seen.barred,
        )
        self._feed(PeerSeen(**self._stamp(), peer=peer))
