"""The broker and the sessions on it.

What MQTT with QoS 1 and clean sessions really does: messages of one sender to one receiver keep their
order, different senders' do not; a message may come twice (at any later time, which is harsher than real);
what is under way when a session breaks may be lost; an abnormal end publishes the last will; a restarted
broker has forgotten everything and publishes no wills.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ftd.sim.world import World
from statemachine.messages import FromNode, ToNode

KEEP_ALIVE_S = 4.0
"""A session over a cut link breaks after this long; a shorter cut only delays its messages."""

COORDINATOR = "coordinator"


class Client(Protocol):
    """Who has a session: the coordinator or a node's daemon."""

    name: str
    incarnation: int

    def connected(self) -> None: ...

    def disconnected(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """What becomes of messages between a node and the coordinator."""

    drop: float = 0.0
    duplicate: float = 0.0
    late_s: float = 0.0
    """At most so much later."""


class Session:
    """One client's connection to the broker, over all of its reconnections."""

    __slots__ = ("client", "cut", "epoch", "held", "open")

    def __init__(self, client: Client) -> None:
        self.client = client
        self.open = False
        self.epoch = 0
        """Counts connections: a message belongs to the connection it was sent on."""
        self.cut = False
        self.held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        """What waits for a cut link to heal, in order."""


class Network:
    """All sessions, the broker's state, and the coordinator's end of them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.up = True
        self.sessions: dict[str, Session] = {}
        self.retained: dict[str, tuple[bool, int]] = {}
        """Per node: (OFFLINE, incarnation) of its retained state."""
        self.duplicates = 0.0
        """Probability that a message comes again."""
        self.slow = 0.0
        """Probability that a message takes long."""
        self.lines: dict[str, Line] = {}
        """Nodes whose line to the coordinator is bad."""
        self.take_signal: Callable[[FromNode], None] = lambda message: None
        self.take_will: Callable[[str, int, bool], None] = lambda node, incarnation, graceful: None
        self.take_command: Callable[[ToNode], None] = lambda message: None
        self._last: dict[tuple[str, str], float] = {}

    # --- messages ------------------------------------------------------------------------------

    def signal(self, message: FromNode) -> None:
        self._send(message.node, COORDINATOR, self.take_signal, (message,))

    def command(self, message: ToNode) -> None:
        self._send(COORDINATOR, message.node, self.take_command, (message,))

    def retain(self, node: str, offline: bool, incarnation: int) -> None:
        """A node publishes its own state."""
        session = self.sessions[node]
        if self.up and session.open and not session.cut:
            self._retain(node, offline, incarnation, False)

    def _retain(self, node: str, offline: bool, incarnation: int, graceful: bool) -> None:
        self.retained[node] = (offline, incarnation)
        there = self.sessions[COORDINATOR]
        if offline and there.open:
            self._pass("broker", there, self.take_will, (node, incarnation, graceful))

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
        self, sender: str, target: Session, action: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        world = self.world
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
        world.at(due - world.now, self._arrive, target, target.epoch, action, arguments)
        duplicates = self.duplicates if line is None else line.duplicate
        if duplicates and world.chance(duplicates):
            again = due - world.now + world.between(0.0, 2.0)
            world.at(again, self._arrive, target, target.epoch, action, arguments)

    def _arrive(
        self, target: Session, epoch: int, action: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        if not target.open or target.epoch != epoch or not self.up:
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
        session.client.connected()
        if session.client.name == COORDINATOR:
            for node, (offline, incarnation) in sorted(self.retained.items()):
                if offline:
                    self._pass("broker", session, self.take_will, (node, incarnation, False))

    def drop(self, name: str, *, process_died: bool = False, graceful: bool = False) -> None:
        """A session ends: by its process's death, by a reset, or (``graceful``) by a goodbye."""
        session = self.sessions[name]
        was_open, session.open = session.open, False
        session.epoch += 1
        session.held.clear()
        if was_open and self.up and name != COORDINATOR:
            self._retain(name, True, session.client.incarnation, graceful)
        if not process_died:
            session.client.disconnected()
            self.world.at(self.world.between(0.05, 1.0), self._connect, session, session.epoch)

    def cut(self, name: str, for_s: float) -> None:
        """The link is dead for a while; nobody notices at once."""
        session = self.sessions[name]
        if session.cut:
            return
        session.cut = True
        if for_s > KEEP_ALIVE_S:
            self.world.at(KEEP_ALIVE_S, self._keep_alive, session, session.epoch)
        self.world.at(for_s, self.heal, name)

    def _keep_alive(self, session: Session, epoch: int) -> None:
        if session.cut and session.open and session.epoch == epoch:
            self.drop(session.client.name)

    def heal(self, name: str) -> None:
        session = self.sessions[name]
        session.cut = False
        held, session.held = session.held, []
        for action, arguments in held:
            action(*arguments)

    def stop_broker(self, for_s: float) -> None:
        if not self.up:
            return
        for session in self.sessions.values():
            was_open, session.open = session.open, False
            session.epoch += 1
            session.held.clear()
            if was_open:
                session.client.disconnected()
            self.world.at(self.world.between(0.05, 1.0), self._connect, session, session.epoch)
        self.up = False
        self.retained.clear()
        self.world.at(for_s, self.start_broker)

    def start_broker(self) -> None:
        self.up = True
