"""The broker and the sessions on it.

What MQTT with QoS 1 and clean sessions really does: messages of one sender to one receiver keep their
order, different senders' do not, nor do the coordinator's to one node and those to all; a message may come
twice (at any later time, which is harsher than real); what is under way when a session breaks may be lost;
an abnormal end publishes the last will; a restarted broker has forgotten everything and publishes no wills.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ftd.faults.sim.disk import Copy
from ftd.faults.sim.retained import Retained
from ftd.faults.sim.sessions import COORDINATOR, Client, Line, Session, Vacant
from ftd.faults.sim.world import World
from statemachine.election.leadership import Leader, LeaderSeen, LeaderVanished, PeerSeen, PeerVanished
from statemachine.messages.cluster import FromNode, ToNode, ToNodes

if TYPE_CHECKING:
    from ftd.faults.sim.seat import SimSeat

KEEP_ALIVE_S = 4.0
"""A session over a cut link breaks after this long; a shorter cut only delays its messages."""

TO_ALL = "coordinator to all"
"""The sender of broadcasts, for ``Network._last``: MQTT keeps the order of messages on one topic alone."""

_NOTICE_S = 0.25
"""Who was cut off when its session ended finds out so long after the link is back, at most."""


class Network:
    """All sessions, the broker's state, and the coordinator's end of them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.up = True
        self.sessions: dict[str, Session] = {COORDINATOR: Session(Vacant())}
        self.seat: SimSeat | None = None
        """Who has the session under the leader's client id."""
        self.watches: dict[str, SimSeat] = {}
        """By name: whose presence is retained."""
        self.retained = Retained()
        self.forgot_at = 0.0  # Everything, last; or all since it was saved.
        self.aged = False
        """It came back with less than it had, and who comes then cannot know."""
        self.fences = True
        """Off only for a planted bug: an old seat's messages go through."""
        self.duplicates = 0.0
        """Probability that a message comes again."""
        self.slow = 0.0
        """Probability that a message takes long."""
        self.lines: dict[str, Line] = {}
        """Nodes whose line to the coordinator is bad."""
        self.apart: set[frozenset[str]] = set()
        """Pairs of nodes that do not reach each other."""
        self.take_command: Callable[[str, ToNode | ToNodes], None] = lambda name, message: None
        """By the node of that name."""
        self._last: dict[tuple[str, str], float] = {}

    # --- messages ------------------------------------------------------------------------------

    def signal(self, message: FromNode) -> None:
        self._send(message.node, COORDINATOR, self._to_seat, ("signal", message))

    def command(self, message: ToNode) -> None:
        """At the broker, from the seat."""
        target = self.sessions.get(message.node)
        if target is not None and target.open:
            self._pass(COORDINATOR, target, self.take_command, (message.node, message))

    def broadcast(self, message: ToNodes) -> None:
        """At the broker, from the seat: all nodes hear it, each at its own time."""
        for name, target in sorted(self.sessions.items()):
            if target.open and name != COORDINATOR and name not in self.watches:
                self._pass(TO_ALL, target, self.take_command, (name, message))

    def _to_seat(self, what: str, *arguments: Any) -> None:
        seat = self.seat
        if seat is None:
            return
        if seat.speaks:
            getattr(seat.coordinator, what)(*arguments)
        else:
            seat.early.append((getattr(seat.coordinator, what), arguments))

    def retain(self, node: str, offline: bool, incarnation: int) -> None:
        """A node publishes its own state."""
        session = self.sessions[node]
        if self.up and session.open and not session.cut:
            self.tell_state(node, offline, incarnation, False)

    def tell_state(self, node: str, offline: bool, incarnation: int, graceful: bool) -> None:
        self.retained.nodes[node] = (offline, incarnation)
        there = self.sessions[COORDINATOR]
        if offline and there.open:
            self._pass("broker", there, self._to_seat, ("will", node, incarnation, graceful))

    def _send(
        self, sender: str, receiver: str, action: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        source, target = self.sessions[sender], self.sessions.get(receiver)
        if not source.open or not self.up or target is None:
            return
        if source.cut:
            source.held.append((self._send, (sender, receiver, action, arguments)))
        elif target.open:
            self._pass(sender, target, action, arguments)

    def _pass(
        self,
        sender: str,
        target: Session,
        action: Callable[..., None],
        arguments: tuple[Any, ...],
        *,
        flown: bool = False,
    ) -> None:
        """:param flown: it arrives although the broker ended the session after it was sent."""
        world, epoch = self.world, None if flown else target.epoch
        random = world.rng.random()
        delay = 0.001 + 0.012 * random
        if self.slow and random < self.slow:
            delay += world.between(0.0, 1.0)
        line = self.lines.get(sender) or self.lines.get(target.client.name)
        if line is not None and world.chance(line.drop):
            return
        delay += world.between(0.0, line.late_s) if line is not None else 0.0
        key = (sender, target.client.name)
        due = max(world.now + delay, self._last.get(key, 0.0))
        self._last[key] = due
        world.at(due - world.now, self._arrive, target, epoch, action, arguments)
        duplicates = self.duplicates if line is None else line.duplicate
        if duplicates and world.chance(duplicates):
            again = due - world.now + world.between(0.0, 2.0)
            world.at(again, self._arrive, target, epoch, action, arguments)

    def _arrive(
        self, target: Session, epoch: int | None, action: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        if not self.up or (epoch is not None and (not target.open or target.epoch != epoch)):
            return
        if target.cut:
            target.held.append((self._arrive, (target, epoch, action, arguments)))
            return
        action(*arguments)

    # --- sessions ------------------------------------------------------------------------------

    def register(self, client: Client) -> None:
        """A process starts: it will connect as soon as it can."""
        session = self.sessions.get(client.name)
        if session is None:
            session = self.sessions[client.name] = Session(client)
        session.client = client
        session.epoch += 1
        session.open = False
        self.world.at(self.world.between(0.005, 0.05), self._connect, session, session.epoch)

    def _connect(self, session: Session, epoch: int) -> None:
        if session.epoch != epoch or session.open:
            return
        if not self.up or session.cut:
            self.world.at(self.world.between(0.2, 1.0), self._connect, session, epoch)
            return
        session.open = True
        if (watch := self.watches.get(session.client.name)) is not None:
            self._tell_watches("met", watch.peer)
        session.client.connected()

    def drop(self, name: str, *, process_died: bool = False, graceful: bool = False) -> None:
        """A session ends: by its process's death, by a reset, or (``graceful``) by a goodbye."""
        session = self.sessions[name]
        was_open, session.open = session.open, False
        session.epoch += 1
        self._lose(session)
        if was_open and self.up:
            if (watch := self.watches.get(name)) is not None:
                self.retained.remains.append(watch.peer)
                self._tell_watches("parted", session.client.incarnation)
            else:
                self.tell_state(name, True, session.client.incarnation, graceful)
        if self.seat is not None and self.seat.name == name and process_died:
            self.end_seat(tell=False)
        if not process_died:
            session.client.disconnected()
            self.world.at(self.world.between(0.05, 1.0), self._connect, session, session.epoch)

    def _lose(self, session: Session) -> None:
        """What was under way is gone; that its seat is gone, who was cut off is yet to find out."""
        session.held = [held for held in session.held if held[0] == self._notice]

    def cut(self, name: str, for_s: float) -> None:
        """The link is dead for a while; nobody notices at once."""
        session = self.sessions[name]
        if session.cut:
            return
        session.cut = True
        if self.seat is not None and self.seat.name == name:
            self.sessions[COORDINATOR].cut = True
        if for_s > KEEP_ALIVE_S:
            self.world.at(KEEP_ALIVE_S, self._keep_alive, session, session.epoch)
        self.world.at(for_s, self.heal, name)

    def _keep_alive(self, session: Session, epoch: int) -> None:
        if session.cut and session.open and session.epoch == epoch:
            self.drop(session.client.name)
            if self.seat is not None and self.seat.name == session.client.name:
                self.end_seat()

    def heal(self, name: str) -> None:
        session = self.sessions[name]
        session.cut = False
        held, session.held = session.held, []
        if self.seat is not None and self.seat.name == name:
            seat = self.sessions[COORDINATOR]
            seat.cut = False
            held, seat.held = [*seat.held, *held], []
        for action, arguments in sorted(held, key=lambda one: one[0] != self.from_seat):
            action(*arguments)  # What it sent, it sent before it hears.

    def stop_broker(self, for_s: float, left: Retained | None = None) -> None:
        """:param left: what it finds of all that it retained; nothing, where that is not said."""
        if not self.up:
            return
        for session in self.sessions.values():
            if session.client.name == COORDINATOR:
                continue
            was_open, session.open = session.open, False
            session.epoch += 1
            self._lose(session)
            if was_open:
                session.client.disconnected()
            self.world.at(self.world.between(0.05, 1.0), self._connect, session, session.epoch)
        self.up = False
        self.end_seat()
        before, self.retained = self.retained.journal, left or Retained()
        self.aged = left is not None and left.journal != before
        self.forgot_at = self.world.now
        self.world.at(for_s, self.start_broker)

    def start_broker(self) -> None:
        self.up = True

    # --- the seat ------------------------------------------------------------------------------

    def take_seat(self, seat: "SimSeat", attempt: int) -> None:
        """Connect under the leader's client id: who had it is thrown out, and what is retained is read."""
        if seat.attempt != attempt or not seat.alive:
            return
        link = self.sessions[seat.name]
        if not self.up or link.cut:
            self.world.at(self.world.between(0.05, 1.0), seat.unseated, attempt)
            return
        self.end_seat()
        session = self.sessions[COORDINATOR]
        session.epoch += 1
        session.open, session.cut = True, False
        session.held.clear()
        self.seat = seat
        found = attempt, self.retained.leader, self.retained.journal
        self._pass("broker", session, seat.seated, found, flown=True)
        for node, (offline, incarnation) in sorted(self.retained.nodes.items()):
            if offline:
                self._pass("broker", session, self._to_seat, ("will", node, incarnation, False))

    def leave_seat(self, seat: "SimSeat") -> None:
        if self.seat is seat:
            self.sessions[COORDINATOR].open = False
            self.seat = None

    def has_seat(self, seat: "SimSeat") -> bool:
        return self.seat is seat

    def hears(self, seat: "SimSeat") -> bool:
        """What it sends is at the broker at once."""
        return self.seat is seat and seat.speaks and not self.sessions[COORDINATOR].cut

    def end_seat(self, *, tell: bool = True) -> None:
        """The session is over: its last will goes out; who had it notices when it can."""
        seat, session = self.seat, self.sessions[COORDINATOR]
        if seat is None:
            return
        self.seat = None
        seat.coordinator.voice.unsent([sent for action, sent in session.held if action == self.from_seat])
        session.open = session.cut = False
        session.epoch += 1
        session.held.clear()
        if self.up and (seat.reigning or seat.claims):
            self.retained.gone = seat.incarnation
            self._tell_watches("missed", seat.incarnation)
        if tell:
            self._notice(seat, seat.attempt)

    def _notice(self, seat: "SimSeat", attempt: int) -> None:
        if self.sessions[seat.name].cut:  # Not among what is held: that is lost with the broker.
            self.world.at(_NOTICE_S, self._notice, seat, attempt)
        else:
            self.world.at(self.world.between(0.001, 0.05), seat.unseated, attempt)

    def from_seat(self, seat: "SimSeat", action: Callable[..., None], *arguments: Any) -> None:
        """What its holder sends, in order; of anybody else nothing gets through."""
        if self.seat is not seat or not (seat.speaks or (seat.claims and action == self.record)):
            if not self.fences and self.up:
                action(*arguments)
            return
        session = self.sessions[COORDINATOR]
        if session.cut:
            session.held.append((self.from_seat, (seat, action, *arguments)))
        else:
            action(*arguments)

    def record(self, leader: Leader) -> None:
        self.retained.leader, self.retained.gone = leader, 0
        self.retained.remains.clear()
        self._tell_watches("saw", leader)

    def beat(self, leader: Leader) -> None:
        self._tell_watches("heard", leader)

    def replicate(self, copy: Copy) -> None:
        self.retained.journal = copy
        self._tell_watches("kept", copy)

    def watch(self, seat: "SimSeat") -> None:
        """A coordinator's process starts."""
        self.watches[seat.name] = seat
        self.register(seat)

    def announce(self, watch: "SimSeat") -> None:
        """A coordinator tells the others what is other of it."""
        if self.up and self.sessions[watch.name].open:
            self._tell_watches("met", watch.peer)

    def retained_for_watch(self, watch: "SimSeat") -> list[tuple[type[Any], dict[str, Any]]]:
        found: list[tuple[type[Any], dict[str, Any]]] = []
        for name, other in sorted(self.watches.items()):
            if other is not watch and self.sessions[name].open:
                found.append((PeerSeen, {"peer": other.peer}))
        found += [(PeerSeen, {"peer": peer}) for peer in self.retained.remains]
        found += [(PeerVanished, {"incarnation": peer.incarnation}) for peer in self.retained.remains]
        if self.retained.leader is not None:
            found.append((LeaderSeen, {"leader": self.retained.leader}))
        if self.retained.gone:
            found.append((LeaderVanished, {"incarnation": self.retained.gone, "graceful": False}))
        if self.retained.journal is not None:
            watch.kept(self.retained.journal)
        return found

    def _tell_watches(self, what: str, *arguments: Any) -> None:
        for name, watch in sorted(self.watches.items()):
            session = self.sessions[name]
            if session.open and self.up:
                self._pass("broker", session, getattr(watch, what), arguments)
