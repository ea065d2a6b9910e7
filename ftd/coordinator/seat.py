"""A coordinator's place at the broker: it watches who leads, and leads where ``statemachine.election`` says.

To the coordinator it looks like one session: ``publish`` while it leads, ``on_connected`` and ``on_lost``
around it. Below are two: the *watch*, under a client id of its own, which is always there, and the *seat*,
under the one client id of the cluster's leader, which never comes back by itself.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, assert_never, cast

import structlog

from ftd.config.address import BrokerAddress
from ftd.coordinator.chair import Chair, Presence
from ftd.coordinator.watch import Following, Watch
from ftd.driver import Driver
from ftd.errors import WireError
from ftd.mqtt.session import MAX_KEPT, Kept
from ftd.wire.coordinators import (
    JournalCopy,
    encode_copy,
    encode_leader,
    encode_peer,
    encode_unreachable,
    is_packed,
)
from ftd.wire.topics import Topics
from statemachine.cluster.durable import durable
from statemachine.effects import Effect, EmitEvent, PublishCluster
from statemachine.election.leadership import (
    Abdicate,
    Announce,
    Claim,
    Leader,
    LeaveSeat,
    Peer,
    Refuse,
    Reign,
    Role,
    SeatLost,
    SeatTaken,
    SendBeat,
    Suspend,
    TakeSeat,
)
from statemachine.election.machine import ElectionMachine
from statemachine.timing import Timing
from statemachine.values import PROTOCOL

_log = structlog.get_logger("ftd.seat")

LEAVE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Throne:
    """What the coordinator does when its place changes; called in this order, on the event loop."""

    begin: Callable[[Leader, JournalCopy | None], None]
    """Lead from now on, from what the last leader left at the broker, or from one's own journal."""
    judge: Callable[[JournalCopy | None], str]
    """Why we could not begin from what is at the broker; empty: we could."""
    state: Callable[[], bytes]
    """The durable state, as it is kept."""
    end: Callable[[Leader], None]
    """Another one leads: forget the cluster."""
    emit: Callable[[EmitEvent], None]
    show: Callable[[], None]
    """Publish the cluster's state: what is in it of the coordinators has changed."""


class Seat:
    """See the module."""

    def __init__(
        self,
        broker: BrokerAddress,
        topics: Topics,
        me: Peer,
        timing: Timing,
        *,
        subscriptions: Sequence[str],
        unacknowledged: Sequence[str],
        throne: Throne,
        following: Following,
        shared: bool,
        on_message: Callable[[str, bytes, bool], None],
        on_connected: Callable[[], None],
        on_lost: Callable[[], None],
        on_acknowledged: Callable[[float], None],
    ) -> None:
        """``subscriptions``, ``unacknowledged``, ``on_…``: as of a ``MqttSession``, while we lead.
        ``shared``: it has had others beside it."""
        self.machine = ElectionMachine(me, timing, shared=shared)
        self.serial = 0
        self._broker, self._topics, self._me = broker, topics, me
        self._position = following.position
        self._subscriptions, self._unacknowledged, self._throne = tuple(subscriptions), unacknowledged, throne
        self._on_message, self._on_connected = on_message, on_connected
        self._on_lost, self._on_acknowledged = on_lost, on_acknowledged
        self._version = version("ftd")
        self._driver = Driver(self.machine, self._perform)
        self._chair: Chair | None = None
        self._reigning = False
        self._kept: deque[Kept] = deque(maxlen=MAX_KEPT)
        self._leaving: set[asyncio.Task[Any]] = set()
        self._own = topics.coordinator_peer(me.incarnation)
        self._watch = Watch(
            broker,
            topics,
            me,
            feed=self._driver.feed,
            stamp=self._stamp,
            leading=lambda: self._reigning,
            following=following,
            bury=lambda topic: self.publish(topic, b"", retain=True),
        )

    # --- as a session --------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """It leads, and is heard."""
        chair = self._chair
        return self._reigning and chair is not None and chair.reigns and chair.session.connected

    @property
    def online(self) -> bool:
        """It has a session with the broker, leading or not."""
        return self._watch.session.connected

    @property
    def leading(self) -> bool:
        """It leads, as far as it knows."""
        return self._reigning

    async def run(self) -> None:
        """Watch, and lead where it is our turn, until cancelled."""
        tasks = [asyncio.ensure_future(self._watch.session.run()), asyncio.ensure_future(self._driver.run())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._driver.stop_timers()
            self._leave()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, *self._leaving, return_exceptions=True)

    def publish(
        self,
        topic: str,
        payload: bytes,
        *,
        retain: bool = False,
        qos: int = 1,
        keep: bool = False,
        there: Callable[[], None] = lambda: None,
    ) -> None:
        """From the seat, in the order of the calls; ``keep``: later, where there is no seat now. ``there`` is
        called once the broker has it."""
        if self.connected and self._chair is not None:
            self._chair.session.publish(topic, payload, retain=retain, qos=qos, keep=keep, there=there)
        elif keep:
            self._kept.append((topic, payload, retain, there))

    async def say_goodbye(self, state: bytes, timeout_s: float) -> None:
        """Leave on purpose: the next one need not wait for anything. ``state``: of the cluster, if we led."""
        chair = self._chair
        if self.connected and chair is not None:
            chair.session.publish(self._topics.cluster_state, state, retain=True)
            chair.reigns = False  # A beat or a state behind it would say that somebody leads.
            await chair.session.flush(timeout_s)
        await self._watch.leave(timeout_s)

    def replicate(self, state: bytes, at: float) -> tuple[int, int]:
        """Leave the durable state at the broker, before what follows from it; its position."""
        self.serial += 1
        copy = JournalCopy(
            term=self.machine.term,
            serial=self.serial,
            wall_s=time.time(),
            monotonic_s=at,
            version=self._version,
            schema=durable.SCHEMA,
            protocol=PROTOCOL,
            state=state,
            packed=is_packed(state),
        )
        if self.connected:
            try:
                self.publish(self._topics.journal, encode_copy(copy), retain=True)
            except WireError as error:
                # Nobody is to begin from an older one. The journal on this host has it.
                _log.error("replicate", problem=str(error), remedy="no standby can take over now")
                self.publish(self._topics.journal, b"", retain=True)
        return copy.position

    def public_state(self) -> dict[str, Any]:
        """Who leads, who would next, and who would not although it is there."""
        machine = self.machine
        others = sorted(
            (peer for peer in machine.peers.values() if peer.incarnation != self._me.incarnation),
            key=lambda peer: peer.order,
        )
        return {
            "leader": self._me.name,
            "term": machine.term,
            "standbys": [peer.name for peer in others if not peer.barred],
            "barred": {peer.name: peer.barred for peer in others if peer.barred},
        }

    def unreachable(self, reason: str, *, graceful: bool, whose: int | None = None) -> bytes:
        """The cluster's state while we do not lead it, and nobody else does.

        :param whose: incarnation of who led, where it was not us.
        """
        incarnation = self._me.incarnation if whose is None else whose
        return encode_unreachable(reason, incarnation=incarnation, graceful=graceful)

    def _stamp(self) -> dict[str, Any]:
        return {"at": self._driver.now(), "cause": self._driver.cause()}

    # --- the seat ------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        wanted = cast(
            EmitEvent
            | PublishCluster
            | TakeSeat
            | LeaveSeat
            | Claim
            | Reign
            | Suspend
            | Abdicate
            | SendBeat
            | Announce
            | Refuse,
            effect,
        )  # Timers are the driver's.
        match wanted:
            case TakeSeat():
                self._sit()
            case LeaveSeat():
                self._leave()
            case Claim():
                self._claim(wanted.leader)
            case Reign():
                self._reign(wanted)
            case Suspend():
                if self._reigning:
                    self._on_lost()
            case Abdicate():
                self._abdicate(wanted.leader)
            case SendBeat():
                beat = encode_leader(wanted.leader, self._version)
                self.publish(self._topics.leader_beat, beat, qos=0)
            case EmitEvent():
                self._throne.emit(wanted)
            case PublishCluster():
                self._throne.show()
            case Announce():
                self._watch.show(wanted.peer)
            case Refuse():
                event, before = wanted.event, self.machine.leader
                whose = before.incarnation if before is not None else None  # As its last will says.
                self._watch.refuse(event, self.unreachable(event.reason, graceful=False, whose=whose))
            case _:
                assert_never(wanted)

    def _sit(self) -> None:
        self._leave()
        presence = Presence(
            topic=self._own,
            payload=encode_peer(self._me, self._version),
            incarnation=self._me.incarnation,
            subscriptions=self._subscriptions,
            unacknowledged=self._unacknowledged,
        )
        self._chair = Chair(
            self._broker,
            self._topics,
            presence,
            on_read=self._taken,
            on_message=self._on_message,
            on_acknowledged=self._on_acknowledged,
            on_over=self._lost,
        )

    def _taken(self, chair: Chair) -> None:
        newest = max(self._position(), chair.copy.position if chair.copy is not None else (0, 0))
        problem = self._throne.judge(chair.copy)
        kept = chair.copy is not None
        self._driver.feed(
            SeatTaken(**self._stamp(), found=chair.found, newest=newest, kept=kept, problem=problem)
        )

    def _claim(self, leader: Leader) -> None:
        if self._chair is not None:  # Else it is lost again, and said so.
            record = encode_leader(leader, self._version)
            self._chair.session.publish(self._topics.leader, record, retain=True)

    def _lost(self, chair: Chair) -> None:
        self._kept.extend(chair.session.take_kept())
        self._chair = None
        self._driver.feed(SeatLost(**self._stamp(), why=chair.session.problem))

    def _leave(self) -> None:
        chair, self._chair = self._chair, None
        if chair is not None:
            task = chair.leave()
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    def _reign(self, order: Reign) -> None:
        """The journal, then everything else: in this order they reach the broker."""
        chair = self._chair
        if chair is None:
            return  # Lost again, and said so.
        topics = self._topics
        if not order.again or not self._reigning:
            self._kept.clear()
            self.serial = 0
            self._throne.begin(order.leader, chair.copy)
        _log.info("reign", cluster=topics.cluster, term=order.leader.term, again=order.again)
        self._reigning = chair.reigns = True
        self.replicate(self._throne.state(), self._driver.now())
        while self._kept:
            topic, payload, retain, there = self._kept.popleft()
            self.publish(topic, payload, retain=retain, keep=True, there=there)
        self._on_connected()
        chair.hear_early()

    def _abdicate(self, leader: Leader) -> None:
        self._kept.clear()
        if self._reigning:
            self._reigning = False
            _log.warning("abdicate", leader=leader.name, term=leader.term)
            self._throne.end(leader)


def role_in_words(seat: Seat) -> str:
    """For systemd's status line."""
    machine = seat.machine
    if seat.leading:
        return "coordinating"
    if machine.me.barred:
        return f"standing aside: {machine.me.barred}"
    if machine.leader is not None and machine.role is Role.FOLLOWER:
        return f"standing by for {machine.leader.name}"
    return "waiting for the broker"
