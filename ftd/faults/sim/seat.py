"""A simulated coordinator's place at the broker: the real election machine, its watch and its seat.

Its watch is a session of its own; the seat is the network's one session under the leader's client id. Both
are over one link: who is cut off has neither. A frozen process answers nothing, and finds what happened to it
when it thaws.
"""

from typing import TYPE_CHECKING, Any, assert_never, cast

from ftd.faults.sim.world import World
from statemachine.effects import CancelTimer, EmitEvent, PublishCluster, SetTimer
from statemachine.election.leadership import (
    AcquireLeadership,
    AnnouncePeer,
    ClaimTerm,
    ElectionEffect,
    ElectionEvent,
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
    RefuseTakeover,
    ReleaseLeadership,
    SendLeaderHeartbeat,
    StepDown,
    Suspend,
)
from statemachine.election.machine import ElectionMachine
from statemachine.events import TimerFired

if TYPE_CHECKING:
    from ftd.faults.sim.coordinator import SimCoordinator
    from ftd.faults.sim.disk import Copy
    from ftd.faults.sim.network import Network


class SimSeat:
    """One process's; a new one is made with each start."""

    def __init__(self, coordinator: "SimCoordinator", world: World, network: "Network") -> None:
        self.coordinator, self.world, self.network = coordinator, world, network
        self.name = coordinator.name
        self.incarnation = coordinator.incarnation
        self.machine = ElectionMachine(self.peer, world.timing, shared=coordinator.disk.shared)
        self.reigning = False
        self.speaks = False
        """Under the present taking of the seat, the journal is on its way …"""
        self.claims = False
        """… or the record, at least."""
        self.attempt = 0
        """Counts takings of the seat: what is of an earlier one does not count."""
        self.copy: Copy | None = None
        """The journal as it was read from the seat."""
        self.early: list[tuple[Any, tuple[Any, ...]]] = []
        """What came before the reign began."""
        self.made_at = world.now
        self.since = 0.0
        """When its watch connected, last."""
        self._timers: dict[str, int] = {}

    @property
    def peer(self) -> Peer:
        disk = self.coordinator.disk
        return Peer(
            name=self.name, incarnation=self.incarnation, position=disk.position, ineligible=disk.ineligible
        )

    @property
    def alive(self) -> bool:
        return self.coordinator.up and self.coordinator.seat is self

    # --- the watch's session -------------------------------------------------------------------------

    def connected(self) -> None:
        """What is retained, then what comes."""
        self.since = self.world.now
        self.feed(PeerSeen, peer=self.peer)
        for kind, fields in self.network.retained_for_watch(self):
            if kind is PeerSeen:
                self.met(**fields)
            else:
                self.feed(kind, **fields)
        self.feed(FollowerSessionOpened)

    def disconnected(self) -> None:
        self.feed(FollowerSessionLost)

    def saw(self, leader: Leader) -> None:
        self.feed(LeaderSeen, leader=leader)

    def heard(self, leader: Leader) -> None:
        self.feed(LeaderHeartbeatSeen, leader=leader)

    def missed(self, incarnation: int) -> None:
        self.feed(LeaderVanished, incarnation=incarnation, graceful=False)

    def met(self, peer: Peer) -> None:
        if peer.name != self.name:
            self.coordinator.disk.shared = True
        self.feed(PeerSeen, peer=peer)

    def parted(self, incarnation: int) -> None:
        self.feed(PeerVanished, incarnation=incarnation)

    def kept(self, copy: "Copy") -> None:
        """The leader's journal, for the day that the broker forgets it."""
        if self.alive and not self.coordinator.frozen and not self.reigning:
            disk = self.coordinator.disk
            if self.coordinator.out_of_room():
                return
            if not disk.reads(copy):
                self.coordinator.unread = copy
            disk.keep(copy)
            if disk.ineligible != self.machine.me.ineligible:
                self.feed(JournalChecked, problem=disk.ineligible)

    # --- the seat's session --------------------------------------------------------------------------

    def seated(self, attempt: int, found: Leader | None, copy: "Copy | None") -> None:
        if attempt == self.attempt:
            self.copy = copy
            disk = self.coordinator.disk
            newest = max(disk.position, copy.position) if copy is not None else disk.position
            kept = copy is not None
            self.feed(LeaderSessionOpened, found=found, newest=newest, kept=kept, problem=disk.judge(copy))

    def unseated(self, attempt: int) -> None:
        if attempt == self.attempt:
            self.feed(LeaderSessionLost, why="the session is over")

    # --- the machine ---------------------------------------------------------------------------------

    def feed(self, kind: type[Any], **fields: Any) -> None:
        self.coordinator.do(self._step, kind, fields)

    def _step(self, kind: type[Any], fields: dict[str, Any]) -> None:
        if not self.alive:
            return
        event = cast(ElectionEvent, kind(at=self.world.now, cause="election", **fields))
        if self.world.tracing:
            self.world.note(self.name, event)
        for effect in self.machine.step(event):
            if self.world.tracing:
                self.world.note(self.name, f"  → {effect}")
            self._perform(cast(ElectionEffect, effect))

    def _perform(self, effect: ElectionEffect) -> None:
        match effect:
            case SetTimer():
                token = self._timers[effect.name] = self._timers.get(effect.name, 0) + 1
                self.world.at(effect.delay_s, self._fire, effect.name, token)
            case CancelTimer():
                self._timers[effect.name] = self._timers.get(effect.name, 0) + 1
            case AcquireLeadership():
                self.attempt += 1
                self.speaks = self.claims = False
                self.early.clear()
                self.world.at(self.world.between(0.002, 0.05), self.network.take_seat, self, self.attempt)
            case ReleaseLeadership():
                self.attempt += 1
                self.network.leave_seat(self)
            case ClaimTerm():
                self.claims = True
                self.network.from_seat(self, self.network.record, effect.leader)
            case Lead():
                self._reign(effect)
            case Suspend():
                if self.reigning:
                    self.coordinator.disconnected()
            case StepDown():
                if self.reigning:
                    self.reigning = False
                    self.coordinator.end_reign()
            case SendLeaderHeartbeat():
                self.network.from_seat(self, self.network.beat, effect.leader)
            case EmitEvent():
                self.coordinator.voice.tell(effect)
            case AnnouncePeer():
                self.network.announce(self)
            case RefuseTakeover():
                self.world.note(self.name, effect.event.reason)
            case PublishCluster():
                pass  # Nobody here reads who stands by.
            case _:
                assert_never(effect)

    def _reign(self, order: Lead) -> None:
        self.coordinator.invariants.reigns(order.leader, self.network.forgot_at)
        if not order.again or not self.reigning:
            self.coordinator.begin_reign(self.copy)
        if self.coordinator.out_of_room():
            return
        self.reigning = self.speaks = True
        self.coordinator.replicate()
        self.coordinator.reconnected()
        early, self.early = self.early, []
        for action, arguments in early:
            action(*arguments)

    def _fire(self, name: str, token: int) -> None:
        if self.alive and self._timers.get(name) == token:
            self.feed(TimerFired, name=name)
