"""Leadership of one coordinator: its two sessions at the broker, and the state with which it begins to lead.

``Leadership`` drives ``statemachine.election``, which decides who leads. As long as the process lives it
holds a ``FollowerSession``, under a client id of its own, which receives who leads and who is there. While
this coordinator leads or tries to, it also holds a ``LeaderSession`` under the one client id of the
cluster's leader. The broker ends the session of the previous holder, so only one coordinator can publish as
the leader. ``Takeover`` decides from which journal a new leader begins, and whether this program can read
it.

The rest of the coordinator uses ``Leadership`` as one session: ``publish`` while it leads, and the
callbacks ``on_connected`` and ``on_lost``.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
from msgspec.structs import replace

from ftd.coordinator.journal import SAME_CLOCK_S, Journal
from ftd.coordinator.ports import Ports, Program
from ftd.driver import Clock, Driver
from ftd.errors import JournalError, WireError
from ftd.tasks import cancel_all
from ftd.transport.mqtt.session import MAX_PENDING, PendingMessage, Will
from ftd.transport.wire.checking import encode_event
from ftd.transport.wire.codec import MAX_COMMAND_BYTES
from ftd.transport.wire.coordinator_messages import (
    JournalCopy,
    PeerMessage,
    decode_copy,
    decode_leader,
    decompress_state,
    encode_copy,
    encode_leader,
    encode_peer,
    encode_unreachable,
    is_compressed,
)
from ftd.transport.wire.public import ClusterStateHeader, decode_json, event_message
from ftd.transport.wire.topics import Topics
from statemachine.cluster.durable import durable
from statemachine.cluster.durable.durable import raise_generation
from statemachine.cluster.durable.outbox import OUTBOX
from statemachine.cluster.machine import ClusterMachine
from statemachine.effects import Effect, EmitEvent, PublishCluster
from statemachine.election.leadership import (
    AcquireLeadership,
    AnnouncePeer,
    ClaimTerm,
    FollowerSessionLost,
    FollowerSessionOpened,
    JournalChecked,
    Lead,
    Leader,
    LeaderHeartbeatSeen,
    LeaderSeen,
    LeaderSessionLost,
    LeaderSessionOpened,
    LeaderVanished,
    Peer,
    PeerSeen,
    PeerVanished,
    RejectTakeover,
    ReleaseLeadership,
    Role,
    SendLeaderHeartbeat,
    StepDown,
    Suspend,
)
from statemachine.election.machine import ElectionMachine
from statemachine.hardware import DEFAULT_LIMITS, HardwareLimits
from statemachine.messages.values import PROTOCOL
from statemachine.timing import Timing

_log = structlog.get_logger("ftd.leadership")


# --- what a leader begins with ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialLead:
    """The state with which a coordinator begins to lead."""

    machine: ClusterMachine
    effects: list[Effect]
    outbox: tuple[tuple[str, str], ...] = ()
    """Events that the last leader decided and may not have published: identifiers and encoded events."""


class Takeover:
    """The journals from which this coordinator could begin to lead."""

    def __init__(
        self,
        timing: Timing,
        journal: Journal,
        clock: Clock,
        program: Program,
        *,
        reset: bool,
        hardware: HardwareLimits = DEFAULT_LIMITS,
    ) -> None:
        """Check this host's journal.

        :param reset: begin the first lead with an empty state, whatever the journals hold.
        :raises JournalError: this host's journal cannot be read.
        """
        self._timing, self.journal, self._clock, self._program = timing, journal, clock, program
        self._reset, self._hardware = reset, hardware
        if not reset:
            self.restore_newest(None, 0)

    @property
    def ineligible(self) -> str:
        """Reason why this coordinator must not lead, as far as its journal remembers; empty: it may."""
        known = self.journal.foreign_journal
        return "" if self._reset or known is None else self._unreadable(*known)

    def save_copy(self, copy: JournalCopy) -> str:
        """Save the leader's journal on this standby, so that it is not lost with the broker's memory.

        If this program cannot read the journal, only its position is remembered: a coordinator that began
        from an older journal would lose what came after it.

        :returns: the reason why this coordinator could not begin from it, or an empty string if it could.
        :raises JournalError: it cannot be written.
        :raises WireError: it cannot be decompressed.
        """
        if copy.position <= self.journal.position:
            return ""
        if problem := self._unreadable(copy.schema, copy.protocol, copy.version):
            self.journal.remember_foreign_journal(copy.position, copy.schema, copy.protocol, copy.version)
            return "" if self._reset else problem
        decompress_state(copy.state)
        self.journal.save_copy(copy.state, copy.position, copy.wall_s - copy.monotonic_s)
        return ""

    def check(self, copy: JournalCopy | None) -> str:
        """Return why this coordinator could not begin from the journal at the broker; empty: it could."""
        if self._reset or copy is None or copy.position <= self.journal.position:
            return ""
        if problem := self._unreadable(copy.schema, copy.protocol, copy.version):
            return problem
        try:
            self.restore_newest(copy, 0)
        except JournalError as error:
            return str(error)
        return ""

    def begin(self, copy: JournalCopy | None, incarnation: int) -> InitialLead:
        """Return the state to lead with. The parameters are those of ``restore_newest``.

        :raises JournalError: see ``restore_newest``; or the copy cannot be written.
        """
        reset, self._reset = self._reset, False
        if reset:
            return InitialLead(machine=ClusterMachine(self._timing, self._hardware), effects=[])
        if copy is not None:
            # Events that it holds are published next. The broker could lose it before this host writes anything.
            self.save_copy(copy)
        return self.restore_newest(copy, incarnation)

    def restore_newest(self, copy: JournalCopy | None, incarnation: int) -> InitialLead:
        """Restore the newer one of this host's journal and the copy at the broker.

        If there has been another coordinator, some generations are skipped: the broker may have lost the newest
        journal, or have restarted with an older one, and nothing shows that.

        :param incarnation: incarnation of the coordinator that is about to lead.
        :raises JournalError: the journal is corrupt or of another version.
        """
        journal, clock = self.journal, self._clock
        now, where = clock.monotonic_s(), str(journal.path)
        saved, shift_s = journal.load(), journal.clock_ahead_s
        if copy is not None and copy.position > journal.position:
            saved, where = copy.state, f"the journal at the broker, of ftd {copy.version}"
            ahead_s = (now - clock.wall_s()) + (copy.wall_s - copy.monotonic_s)
            shift_s = ahead_s if abs(ahead_s) > SAME_CLOCK_S else 0.0
        if saved is None:
            return InitialLead(machine=ClusterMachine(self._timing, self._hardware), effects=[])
        try:
            state = durable.shift_clock(msgspec.msgpack.decode(decompress_state(saved)), shift_s)
            if journal.shared:
                state = durable.skip_unseen_generations(state, incarnation)
            state = raise_generation(state, journal.floor)
            machine, effects = ClusterMachine.restore(self._timing, state, now, "restored", self._hardware)
            unacknowledged = msgspec.convert(state.get(OUTBOX, ()), tuple[tuple[str, str], ...])
            return InitialLead(machine=machine, effects=effects, outbox=unacknowledged)
        except (ValueError, RecursionError, WireError) as error:  # It is not msgpack, or not a state of ftd.
            raise JournalError(
                f"{where}: {error} (use the version of ftd that wrote it; or discard the job: "
                "ftd coordinator --reset)"
            ) from None

    def _unreadable(self, schema: int, protocol: int, writer_version: str) -> str:
        """Return why this program cannot read a journal, with the remedy; empty: it can.

        :param writer_version: version of ftd that wrote it.
        """
        mine = self._program.version
        why = durable.incompatibility(schema, protocol, self._program.schema)
        if not why:
            return ""
        there = (
            f"ftd {writer_version}" if writer_version != mine else f"another build of ftd {writer_version}"
        )
        return f"{there} wrote the newest journal, this is ftd {mine}: {why}; install the same version on this host"


# --- the sessions ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LeadershipCallbacks:
    """Callbacks of one coordinator for who leads and for what arrives; called on the event loop."""

    begin: Callable[[Leader, JournalCopy | None], None]
    """Function that begins to lead, from what the last leader left at the broker or from this host's journal."""
    state: Callable[[], bytes]
    """Function that returns the encoded durable state."""
    end: Callable[[Leader], None]
    """Function that drops the cluster's state, because another coordinator leads."""
    emit: Callable[[EmitEvent], None]
    publish_state: Callable[[], None]
    """Function that publishes the cluster's state, because the coordinators in it have changed."""
    on_message: Callable[[str, bytes, bool], None]
    """Callback of the ``MqttSession`` while this coordinator leads, as the next two."""
    on_connected: Callable[[], None]
    on_lost: Callable[[], None]
    on_event: Callable[[bytes], None]
    """Callback for an event while this coordinator follows."""
    on_state: Callable[[dict[str, Any]], None]
    """Callback for the cluster's state while this coordinator follows."""


class LeaderSession:
    """A session under the client id of the cluster's leader. It does not reconnect.

    It first reads what the last leader left at the broker. Other messages wait until this coordinator
    leads.
    """

    def __init__(
        self,
        ports: Ports,
        topics: Topics,
        me: Peer,
        *,
        on_read: Callable[["LeaderSession"], None],
        on_message: Callable[[str, bytes, bool], None],
        on_over: Callable[["LeaderSession"], None],
    ) -> None:
        """Connect.

        :param on_read: called when all retained messages have been read.
        :param on_message: called for messages once ``leads`` is set.
        :param on_over: called when the session ended without a call of ``leave``.
        """
        self.last_leader: Leader | None = None
        """The last leader's record, as it is retained."""
        self.last_journal: JournalCopy | None = None
        """The last leader's journal, as it is retained."""
        self.leads = False
        """Whether the record and the journal of this coordinator have been sent, so that everything else may
        follow.
        """
        self._read = False
        self._left = False
        self._early: list[tuple[str, bytes, bool]] = []
        self._topics, self._own = topics, topics.coordinator_peer(me.incarnation)
        self._last_leader_topics = (topics.leader, topics.journal)
        self._on_read, self._on_message, self._on_over = on_read, on_message, on_over
        last_will = encode_unreachable("the coordinator vanished", incarnation=me.incarnation, graceful=False)
        presence = encode_peer(me, ports.program.version)
        self.session = ports.transport.session(
            client_id=ports.transport.leader_client_id,
            subscriptions=(topics.request, topics.cluster_state, topics.leader, topics.journal, self._own),
            # Messages that many nodes send at the same time, and copies of this coordinator's own messages.
            unacknowledged=(topics.node_signal(), topics.node_state(), topics.events, topics.command),
            will=Will(topic=topics.cluster_state, payload=last_will),
            on_message=self._receive,
            on_connected=lambda: self.session.publish(self._own, presence, retain=True),
            on_acknowledged=ports.observer.on_acknowledged,
        )
        self._task = asyncio.ensure_future(self._hold())

    async def _hold(self) -> None:
        await self.session.run_once()
        if not self._left:
            self._on_over(self)

    def leave(self) -> "asyncio.Task[None]":
        """End the session without waiting: the next holder ends it anyway."""
        self._left = True
        self._task.cancel()
        return self._task

    def deliver_early(self) -> None:
        """Deliver the messages that came before this coordinator led."""
        early, self._early = self._early, []
        for message in early:
            self._on_message(*message)

    def _receive(self, topic: str, payload: bytes, retained: bool) -> None:
        if self._left:
            return
        if topic == self._own:
            if not retained and not self._read:
                self._read = True
                self._on_read(self)
        elif topic in self._last_leader_topics:
            if payload and not self._read:
                self._read_retained(topic, payload)
        elif self.leads:
            self._on_message(topic, payload, retained)
        else:
            self._early.append((topic, payload, retained))

    def _read_retained(self, topic: str, payload: bytes) -> None:
        try:
            if topic == self._topics.leader:
                self.last_leader = decode_leader(payload)
            else:
                copy = decode_copy(payload)
                decompress_state(copy.state)
                self.last_journal = copy
        except WireError as error:
            _log.error("message_rejected", topic=topic, problem=str(error), remedy="continuing without it")


class FollowerSession:
    """The session that receives the coordinators' topics and feeds the election."""

    def __init__(
        self,
        ports: Ports,
        topics: Topics,
        me: Peer,
        *,
        driver: Driver,
        leading: Callable[[], bool],
        takeover: Takeover,
        callbacks: LeadershipCallbacks,
        remove_peer: Callable[[str], None],
    ) -> None:
        """Prepare the session; ``session.run`` connects it.

        :param remove_peer: deletes what is retained on the topic of a peer that is gone; called while this
            coordinator leads.
        """
        self._topics, self._me = topics, me
        self._feed, self._stamp, self._leading = driver.feed, driver.stamp, leading
        self._takeover, self._callbacks = takeover, callbacks
        self._remove_peer = remove_peer
        self._on_broker_alive, self._version = ports.observer.on_broker_alive, ports.program.version
        self._began = False
        self._retained: dict[str, bytes] = {}
        """The newest message of each topic, until all retained ones have been read: if the broker does not send this
        coordinator's own announcement back, that takes for as long as this process lives.
        """
        self._own = topics.coordinator_peer(me.incarnation)
        self._handlers: dict[str, Callable[[bytes], None]] = {
            topics.events: self._handle_event,
            topics.cluster_state: self._handle_state,
            topics.journal: self._handle_journal,
            topics.leader: self._handle_leader,
            topics.leader_heartbeat: self._handle_heartbeat,
        }
        """Handlers by topic; messages on any other topic are about a peer."""
        self.session = ports.transport.session(
            client_id=f"ftd-{topics.cluster}-coordinator-{me.incarnation}",
            subscriptions=(
                topics.leader,
                topics.leader_heartbeat,
                topics.journal,
                topics.coordinator_peer(),
                topics.cluster_state,
            ),
            unacknowledged=(topics.events,),
            will=Will(topic=self._own, payload=encode_peer(me, self._version, departed=True)),
            on_message=self._receive,
            on_connected=self._connected,
            on_lost=self._lost,
        )

    async def leave(self, timeout_s: float) -> None:
        """Publish that this coordinator leaves."""
        self.session.publish(self._own, b"", retain=True)
        await self.session.flush(timeout_s)

    def announce(self, me: Peer) -> None:
        """Publish that this coordinator became ineligible, or is eligible again."""
        self._me = me
        if me.ineligible:
            _log.warning("ineligible", why=me.ineligible)
        if self._began:
            self.session.publish(self._own, encode_peer(me, self._version), retain=True)

    def publish_rejection(self, event: EmitEvent, state: bytes) -> None:
        """Publish that nobody leads and that this coordinator must not. A leader that comes later publishes
        its own state over this one.
        """
        _log.error(event.name, reason=event.reason)
        message = event_message(event, monotonic=self._stamp()["at"], source="coordinator")
        self.session.publish(self._topics.cluster_state, state, retain=True)
        self.session.publish(self._topics.events, encode_event(message))

    def _connected(self) -> None:
        """Publish that this coordinator is there. When the message comes back, all retained ones have been
        read.
        """
        self._began = False
        self._retained.clear()
        me = replace(self._me, position=self._takeover.journal.position)
        self._feed(PeerSeen(**self._stamp(), peer=me))
        self.session.publish(self._own, encode_peer(me, self._version), retain=True)

    def _lost(self) -> None:
        self._began = False
        self._feed(FollowerSessionLost(**self._stamp()))

    def _receive(self, topic: str, payload: bytes, retained: bool) -> None:
        self._on_broker_alive()
        if not self._began and topic == self._own and not retained:
            self._began = True
            # The record of who leads comes before the last will of that leader.
            if (state := self._retained.pop(self._topics.cluster_state, None)) is not None:
                self._retained[self._topics.cluster_state] = state
            for message in self._retained.items():
                self._handle(*message)
            self._feed(FollowerSessionOpened(**self._stamp()))
        elif not self._began and topic != self._topics.events:
            self._retained[topic] = payload
        else:
            self._handle(topic, payload)

    def _handle(self, topic: str, payload: bytes) -> None:
        """Handle one message. A standby whose disk is full remains a standby: its published position shows
        that it saved less.
        """
        try:
            self._route(topic, payload)
        except WireError as error:
            _log.warning("message_rejected", topic=topic, problem=str(error))
        except JournalError as error:
            _log.error("journal_not_saved", topic=topic, problem=str(error))

    def _route(self, topic: str, payload: bytes) -> None:
        """Pass a message to its handler.

        :raises WireError: the message does not belong on this topic.
        :raises JournalError: it cannot be saved.
        """
        handler = self._handlers.get(topic)
        if handler is not None:
            handler(payload)
        elif payload:
            self._handle_peer(topic, decode_json(payload, PeerMessage))
        elif (last := topic.rpartition("/")[2]).isdecimal():
            self._feed(PeerVanished(**self._stamp(), incarnation=int(last)))

    def _handle_event(self, payload: bytes) -> None:
        if not self._leading():
            self._callbacks.on_event(payload)

    def _handle_state(self, payload: bytes) -> None:
        state = decode_json(payload, ClusterStateHeader, MAX_COMMAND_BYTES)
        if state.phase == "UNREACHABLE" and isinstance(state.coordinator, int):
            graceful = state.graceful is True
            self._feed(LeaderVanished(**self._stamp(), incarnation=state.coordinator, graceful=graceful))
        if not self._leading():
            self._callbacks.on_state(decode_json(payload, dict[str, Any], MAX_COMMAND_BYTES))

    def _handle_journal(self, payload: bytes) -> None:
        if payload and not self._leading():
            problem = self._takeover.save_copy(decode_copy(payload))
            if problem != self._me.ineligible:
                self._feed(JournalChecked(**self._stamp(), problem=problem))

    def _handle_leader(self, payload: bytes) -> None:
        if payload:
            self._feed(LeaderSeen(**self._stamp(), leader=decode_leader(payload)))

    def _handle_heartbeat(self, payload: bytes) -> None:
        self._feed(LeaderHeartbeatSeen(**self._stamp(), leader=decode_leader(payload)))

    def _handle_peer(self, topic: str, seen: PeerMessage) -> None:
        if topic != self._topics.coordinator_peer(seen.incarnation):
            raise WireError(f"it claims to be of {seen.incarnation}")
        self._feed_peer(topic, seen)
        if seen.name != self._me.name:  # Otherwise an earlier process of this coordinator left it.
            self._takeover.journal.note_peer(seen.name)

    def _feed_peer(self, topic: str, seen: PeerMessage) -> None:
        if seen.departed:
            self._feed(PeerVanished(**self._stamp(), incarnation=seen.incarnation, name=seen.name))
            if self._leading():
                self._remove_peer(topic)
            return
        if seen.version != self._version:
            remedy = "the same version of ftd on all coordinators' hosts"
            _log.warning(
                "version_differs", peer=seen.name, here=self._version, there=seen.version, remedy=remedy
            )
        self._feed(PeerSeen(**self._stamp(), peer=msgspec.convert(seen, Peer, from_attributes=True)))


# --- both of them, driven by the election ------------------------------------------------------------


def cause_suffix(me: Peer) -> str:
    """Return a suffix that makes the causes of this process unique among those of other coordinators."""
    return f"{me.incarnation % 65536:04x}"


class Leadership:
    """The leadership of one coordinator. See the module."""

    def __init__(
        self,
        ports: Ports,
        topics: Topics,
        me: Peer,
        timing: Timing,
        *,
        takeover: Takeover,
        callbacks: LeadershipCallbacks,
    ) -> None:
        """Prepare both sessions."""
        journal = takeover.journal
        self.machine = ElectionMachine(me, timing, shared=journal.shared, known_peers=journal.peers)
        self.serial = 0
        """Number of states written under the present term."""
        self._ports, self._topics, self._me, self._program = ports, topics, me, ports.program
        self._takeover, self._callbacks = takeover, callbacks
        self._driver = Driver(self.machine, self._perform, clock=ports.clock, suffix=f"{cause_suffix(me)}-e")
        self._leader_session: LeaderSession | None = None
        self._leading = False
        self._pending: deque[PendingMessage] = deque(maxlen=MAX_PENDING)
        self._leaving: set[asyncio.Task[Any]] = set()
        self._follower_session = FollowerSession(
            ports,
            topics,
            me,
            driver=self._driver,
            leading=lambda: self._leading,
            takeover=takeover,
            callbacks=callbacks,
            remove_peer=lambda topic: self.publish(topic, b"", retain=True),
        )

    # --- as one session ------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether this coordinator leads and has a connection."""
        session = self._leader_session
        return self._leading and session is not None and session.leads and session.session.connected

    @property
    def online(self) -> bool:
        """Whether this coordinator is connected to the broker, leading or not."""
        return self._follower_session.session.connected

    @property
    def leading(self) -> bool:
        """Whether this coordinator leads, as far as it knows."""
        return self._leading

    async def run(self) -> None:
        """Follow, and lead when the election says so, until cancelled."""
        tasks = [
            asyncio.ensure_future(self._follower_session.session.run()),
            asyncio.ensure_future(self._driver.run()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._driver.stop_timers()
            self._release()
            await cancel_all(tasks)
            await asyncio.gather(*self._leaving, return_exceptions=True)

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
        """Publish as the leader, in the order of the calls.

        :param queue_offline: send it after the next connection if there is none now.
        :param on_done: called once the broker has acknowledged it.
        """
        if self.connected and self._leader_session is not None:
            self._leader_session.session.publish(
                topic, payload, retain=retain, qos=qos, queue_offline=queue_offline, on_done=on_done
            )
        elif queue_offline:
            self._pending.append((topic, payload, retain, on_done))

    async def leave(self, state: bytes, timeout_s: float) -> None:
        """Leave on purpose, so that the next leader need not wait.

        :param state: the cluster's state to publish, if this coordinator leads.
        """
        leader = self._leader_session
        if self.connected and leader is not None:
            leader.session.publish(self._topics.cluster_state, state, retain=True)
            leader.leads = False  # A heartbeat or a state after this one would say that somebody leads.
            await leader.session.flush(timeout_s)
        await self._follower_session.leave(timeout_s)

    def replicate(self, state: bytes, at: float) -> tuple[int, int]:
        """Publish the durable state before anything that follows from it, and return its position.

        A leader that was cut off publishes only the position, if the broker forgot the leader meanwhile: the
        coordinators then compare what each of them knows.
        """
        self.serial += 1
        copy = JournalCopy(
            term=self.machine.term,
            serial=self.serial,
            wall_s=self._driver.clock.wall_s(),
            monotonic_s=at,
            version=self._program.version,
            schema=self._program.schema,
            protocol=PROTOCOL,
            state=state,
            compressed=is_compressed(state),
        )
        session = self._leader_session
        if self.connected and session is not None:
            try:
                payload = encode_copy(copy)
            except WireError as error:
                _log.error("replication_failed", problem=str(error), remedy="no standby can take over now")
                payload = b""
            if session.session.refuses(len(payload)):
                payload = b""  # No standby must begin from an older one. The journal on this host has the new state.
            self.publish(self._topics.journal, payload, retain=True)
        elif self.machine.record_lost:
            self._follower_session.announce(replace(self.machine.me, position=copy.position))
        return copy.position

    def public_state(self) -> dict[str, Any]:
        """Return who leads, who would lead next, and who is there and must not lead."""
        machine = self.machine
        others = sorted(
            (peer for peer in machine.peers.values() if peer.incarnation != self._me.incarnation),
            key=lambda peer: peer.order,
        )
        return {
            "leader": self._me.name,
            "term": machine.term,
            "standbys": [peer.name for peer in others if not peer.ineligible],
            "ineligible": {peer.name: peer.ineligible for peer in others if peer.ineligible},
        }

    def describe_role(self) -> str:
        """Return what this coordinator does, for systemd's status line."""
        machine = self.machine
        if self._leading:
            return "coordinating"
        if machine.me.ineligible:
            return f"ineligible: {machine.me.ineligible}"
        if machine.leader is not None and machine.role is Role.FOLLOWER:
            return f"standby of {machine.leader.name}"
        return "waiting for the broker"

    # --- effects of the election -----------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        match effect:
            case AcquireLeadership():
                self._acquire()
            case ReleaseLeadership():
                self._release()
            case ClaimTerm():
                self._claim(effect.leader)
            case Lead():
                self._lead(effect)
            case Suspend():
                if self._leading:
                    self._callbacks.on_lost()
            case StepDown():
                self._step_down(effect.leader)
            case SendLeaderHeartbeat():
                heartbeat = encode_leader(effect.leader, self._program.version)
                self.publish(self._topics.leader_heartbeat, heartbeat, qos=0)
            case EmitEvent():
                self._callbacks.emit(effect)
            case PublishCluster():
                self._callbacks.publish_state()
            case AnnouncePeer():
                self._follower_session.announce(self._with_position(effect.peer))
            case RejectTakeover():
                event, before = effect.event, self.machine.leader
                last = (
                    before.incarnation if before is not None else self._me.incarnation
                )  # As in its last will.
                state = encode_unreachable(event.reason, incarnation=last, graceful=False)
                self._follower_session.publish_rejection(event, state)
            case _:  # The driver handles timers.
                raise AssertionError(f"no effect of an election: {effect!r}")

    def _with_position(self, me: Peer) -> Peer:
        """Return this coordinator as others must see it: they wait for a peer with a newer journal than
        theirs.
        """
        return replace(me, position=self._takeover.journal.position)

    def _acquire(self) -> None:
        self._release()
        self._leader_session = LeaderSession(
            self._ports,
            self._topics,
            self._with_position(self.machine.me),
            on_read=self._on_session_read,
            on_message=self._callbacks.on_message,
            on_over=self._lost,
        )

    def _on_session_read(self, session: LeaderSession) -> None:
        copy = session.last_journal
        newest = max(self._takeover.journal.position, copy.position if copy is not None else (0, 0))
        problem = self._takeover.check(copy)
        self._driver.feed(
            LeaderSessionOpened(
                **self._driver.stamp(),
                found=session.last_leader,
                newest=newest,
                has_journal=copy is not None,
                problem=problem,
            )
        )

    def _claim(self, leader: Leader) -> None:
        if self._leader_session is not None:  # Otherwise the session was lost, and the election knows that.
            record = encode_leader(leader, self._program.version)
            self._leader_session.session.publish(self._topics.leader, record, retain=True)

    def _lost(self, session: LeaderSession) -> None:
        self._pending.extend(session.session.take_pending())
        self._leader_session = None
        self._driver.feed(LeaderSessionLost(**self._driver.stamp(), why=session.session.problem))

    def _release(self) -> None:
        session, self._leader_session = self._leader_session, None
        if session is not None:
            task = session.leave()
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    def _lead(self, order: Lead) -> None:
        """Send the journal, then everything else: they reach the broker in this order."""
        session = self._leader_session
        if session is None:
            return  # The session was lost, and the election knows that.
        if not order.resumed or not self._leading:
            self._pending.clear()
            self.serial = 0
            self._callbacks.begin(order.leader, session.last_journal)
        _log.info("leading", cluster=self._topics.cluster, term=order.leader.term, again=order.resumed)
        self._leading = session.leads = True
        self.replicate(self._callbacks.state(), self._driver.now())
        pending, self._pending = self._pending, deque(maxlen=MAX_PENDING)
        for (
            topic,
            payload,
            retain,
            there,
        ) in pending:  # They are queued again if the connection has just been lost.
            self.publish(topic, payload, retain=retain, queue_offline=True, on_done=there)
        self._callbacks.on_connected()
        session.deliver_early()

    def _step_down(self, leader: Leader) -> None:
        self._pending.clear()
        if self._leading:
            self._leading = False
            _log.warning("stepped_down", leader=leader.name, term=leader.term)
            self._callbacks.end(leader)
