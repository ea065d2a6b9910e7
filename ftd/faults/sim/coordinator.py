"""A simulated coordinator: a host on which processes of the real ``Coordinator`` run, one after the other."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftd.coordinator.coordinator import Coordinator
from ftd.coordinator.ports import Observer, Ports, Program
from ftd.errors import JournalError
from ftd.faults.sim.checkpoints import SimCheckpoints
from ftd.faults.sim.disk import SimDisk
from ftd.faults.sim.invariants import Invariants
from ftd.faults.sim.journals import decode_outbox
from ftd.faults.sim.network import JOURNAL, TOPICS, SimNetwork
from ftd.faults.sim.oracle import JournalView
from ftd.faults.sim.planning import SimPlanning
from ftd.faults.sim.process import ProcessHost, ProcessLoop, SimClock
from ftd.faults.sim.session import SimTransport
from ftd.faults.sim.world import World
from ftd.transport.wire.coordinator_messages import JournalCopy, decode_copy
from ftd.transport.wire.public import EventMessage, decode_json
from statemachine.cluster.durable import durable
from statemachine.cluster.machine import ClusterMachine
from statemachine.effects import Effect, EmitEvent, RecordSteps
from statemachine.election.leadership import Leader, Peer
from statemachine.events import (
    DrainRequested,
    Event,
    ReadmitRequested,
    SnapshotRequested,
    StopRequested,
    SubmitRequested,
)
from statemachine.messages.values import CheckpointRecord, Job

STATE_PERIOD_S = 1.0
"""The shortest time between two publications of the cluster's state, which only standbys read here."""


class SimCoordinator(ProcessHost):
    """The host of one coordinator. When its process is killed, everything but the journal is lost."""

    def __init__(
        self,
        world: World,
        network: SimNetwork,
        invariants: Invariants,
        name: str,
        *,
        state_period_s: float = STATE_PERIOD_S,
    ) -> None:
        self.world, self.network, self.invariants, self.name = world, network, invariants, name
        self.state_period_s = state_period_s
        self.incarnation = 0
        self.started_at = 0.0
        self.program_version = 0
        """The version of its program, which reads journals of its own and of earlier versions."""
        self.disk = SimDisk(world, name)
        self.clock = SimClock(world)
        self.loop = ProcessLoop(world)
        self.loop.alive = False
        self.process: _Process | None = None
        """The newest process, alive or not."""
        self.unreadable: JournalCopy | None = None
        """The newest journal that was at the broker while this coordinator was connected, and that it could
        not read.
        """
        self.crash_after: int | None = None
        """The number of effects after which the process is killed in the middle of carrying them out."""
        self.max_planning_s = 0.0
        """The longest extra time that a plan takes."""
        self.on_lead: Callable[[tuple[int, int], JournalView], None] = lambda position, view: None
        """Callback for the moment when it begins to lead, with the position and a view of the journal that it
        starts from.
        """
        self.on_lead_again: Callable[[JournalView], None] = lambda view: None
        """Callback before its first journal in a term in which it leads again with the state that it had."""
        self.known_term = 0
        """The newest term for which one of both was called."""
        self.on_event: Callable[[EmitEvent], None] | None = None
        """Callback for each new public event."""
        self.on_state: Callable[[dict[str, Any]], None] | None = None
        """Callback for each state of the cluster that it publishes."""

    # --- the process -------------------------------------------------------------------------------

    @property
    def leading(self) -> bool:
        """Whether the coordinator leads as far as it knows."""
        return self.up and self.process is not None and self.process.leadership.leading

    @property
    def reaches_broker(self) -> bool:
        """Whether what the coordinator publishes as the leader reaches the broker at once."""
        connection = self.network.leader
        at_broker = connection is not None and connection.host == self.name
        process = self.process
        return (
            at_broker
            and process is not None
            and process.leadership.connected
            and self.network.reaches(self.name)
        )

    @property
    def machine(self) -> ClusterMachine:
        """The cluster machine of the newest process."""
        return self.process.machine if self.process is not None else ClusterMachine(self.world.timing)

    @property
    def following_since(self) -> float | None:
        """Time at which the coordinator's follower session connected; ``None`` if it has none."""
        connection = self.network.connections.get(f"ftd-{TOPICS.cluster}-coordinator-{self.incarnation}")
        return connection.since if self.up and connection is not None else None

    @property
    def ineligible(self) -> str:
        """Reason why the coordinator must not lead, as far as it knows; empty if it may."""
        return self.process.leadership.machine.me.ineligible if self.up and self.process is not None else ""

    def reads(self, copy: JournalCopy) -> bool:
        """Return whether its program can read this journal."""
        return copy.schema <= durable.SCHEMA + self.program_version

    def decided_generations(self) -> set[int | None]:
        """Return the generations of the events in its journal's outbox."""
        stored_state = self.process.journal.load() if self.process is not None else None
        outbox = decode_outbox(stored_state) if stored_state is not None else ()
        return {decode_json(event.encode(), EventMessage).generation for _, event in outbox}

    @property
    def position(self) -> tuple[int, int]:
        """The position of its journal."""
        return self.process.journal.position if self.up and self.process is not None else self.disk.position

    def start(self) -> None:
        self.crash_after = None
        self.incarnation, self.started_at = self.world.next_serial(), self.world.now
        loop = self.loop = ProcessLoop(self.world)
        if self.world.seed % 4 == 3:
            loop.enable_busy_periods(self.name)
        self.disk.writer = lambda: loop.alive
        loop.enter(self._begin, loop)

    def _begin(self, loop: ProcessLoop) -> None:
        try:
            self.process = _Process(self, loop)
        except JournalError:
            loop.alive = False
            self._restart_soon()
            return
        task = loop.create_task(self.process.run(asyncio.Event()))  # Only SIGKILL stops it.
        task.add_done_callback(lambda done: self._ended(loop, done))

    def _ended(self, loop: ProcessLoop, done: "asyncio.Task[None]") -> None:
        """Restart the host's process after it ended by itself, which it does if it cannot write its journal."""
        if not loop.alive or done.cancelled():
            return
        error = done.exception()
        if error is not None and not isinstance(error, JournalError):
            self.world.fail(error if isinstance(error, Exception) else RuntimeError(str(error)))
        self.crash()
        self._restart_soon()

    def _restart_soon(self) -> None:
        self.world.call_later(self.world.between(0.1, 2.0), self.restart)

    def restart(self) -> None:
        if not self.up:
            self.start()

    def crash(self) -> None:
        """SIGKILL the process: only the journal is left."""
        if self.up:
            self.loop.kill()
            self.network.drop(self.name)

    def lose_power(self) -> None:
        """Restart the host without the end of what was not forced to the disk."""
        self.disk.lose_power(self.world.rng)
        self.clock.since_boot_s /= 2  # The clock never shows less than zero, like real clocks.

    # --- what users want ---------------------------------------------------------------------------

    def _ask(self, make: Callable[..., Event], **fields: Any) -> None:
        """Feed a request as ``Requests`` does. A request to a process that dies first is lost."""
        process = self.process
        if process is not None and self.leading:
            self.loop.enter(lambda: process.feed(make(at=process.driver.now(), cause="user", **fields)))

    def submit(self, job: Job, begin: CheckpointRecord | None) -> None:
        self._ask(SubmitRequested, request=job.job_id, job=job, start_checkpoint=begin)

    def drain(self, node: str, **fields: Any) -> None:
        self._ask(DrainRequested, request="drain", node=node, **fields)

    def readmit(self, node: str) -> None:
        self._ask(ReadmitRequested, request="readmit", node=node)

    def request_snapshots(self, **fields: Any) -> None:
        self._ask(SnapshotRequested, request="ask", **fields)

    def stop(self, job: str) -> None:
        self._ask(StopRequested, request="stop", job=job)

    def saw(self, payload: bytes) -> None:
        """Note a journal that arrives at its follower session."""
        if payload and not self.leading:
            copy = decode_copy(payload)
            if not self.reads(copy):
                self.unreadable = copy

    # --- what the simulator looks at -----------------------------------------------------------------

    def watch(self, loop: ProcessLoop, it: Event | Effect) -> None:
        """Observe every event before it is handled, and every effect before it is carried out."""
        if not loop.alive:
            return
        if self.world.tracing:
            self.world.note("coord", f"  → {it}" if isinstance(it, Effect) else it)
        if not isinstance(it, Effect):
            return
        if self.crash_after is not None:
            self.crash_after -= 1
            if self.crash_after < 0:
                self.crash()
                self.world.call_later(self.world.between(0.1, 6.0), self.restart)
                return
        if isinstance(it, RecordSteps):
            self.check(lambda: self.invariants.check_recalled(it))

    def published_state(self, state: dict[str, Any]) -> None:
        """Observe a state of the cluster that it published."""
        if self.on_state is not None and self.reaches_broker:
            self.on_state(state)

    def check(self, look: Callable[[], None]) -> None:
        """Check an invariant inside the process, whose code handles exceptions."""
        try:
            look()
        except Exception as error:
            self.world.fail(error)
            raise

    def note(self, topic: str, payload: bytes) -> Any:
        """Return a view of a journal that is being published, as its machine is now."""
        if topic != JOURNAL or not payload or self.process is None:
            return None
        term = self.process.leadership.machine.term
        leader = Leader(term=term, name=self.name, incarnation=self.incarnation)
        self.check(lambda: self.invariants.check_leader(leader, self.network.lost_state_at))
        view = JournalView(self.process.machine)
        if term != self.known_term:
            self.known_term = term
            self.check(lambda: self.on_lead_again(view))
        return view


class _Process(Coordinator):
    """The real coordinator with hooks that observe it and change nothing."""

    def __init__(self, of: SimCoordinator, loop: ProcessLoop) -> None:
        self._of, self._loop = of, loop
        edition = of.program_version
        ports = Ports(
            program=Program(version=f"{edition}.0", schema=durable.SCHEMA + edition),
            clock=of.clock,
            transport=SimTransport(loop, of.network, of.name, note=of.note, saw=of.saw),
            disk=of.disk,
            planning=lambda feed, driver, _: SimPlanning(
                of.world, lambda: of.max_planning_s, loop, feed, driver
            ),
            checkpoints=lambda feed, driver: SimCheckpoints(
                of.world, of.invariants.checkpoint_store, loop, feed, driver
            ),
            observer=Observer(on_state=of.published_state),
        )
        super().__init__(
            ports,
            Peer(name=of.name, incarnation=of.incarnation),
            cluster=TOPICS.cluster,
            directory=Path("/simulated"),
            timing=of.world.timing,
            state_period_s=of.state_period_s,
            watch=lambda it: of.watch(loop, it),
        )

    def _begin(self, leader: Leader, copy: JournalCopy | None) -> None:
        self._of.known_term = leader.term
        position = max(self.journal.position, copy.position if copy is not None else (0, 0))
        super()._begin(leader, copy)
        of = self._of
        connection = of.network.leader
        holds_session = connection is not None and connection.host == of.name and self._loop.alive
        if holds_session or position >= of.invariants.replicated:
            of.invariants.led_last = of.name  # Also if it is deposed already: nobody has written since.
        if holds_session:
            of.check(lambda: of.on_lead(position, JournalView(self.machine)))
            of.check(lambda: of.invariants.check_progress(self.machine))

    def _carried_out(self) -> None:
        super()._carried_out()
        of = self._of
        if self._loop.alive and of.reaches_broker:
            # If a coordinator dies before it journals an event, or is deposed, nobody learns of the event.
            of.check(lambda: of.invariants.check_progress(self.machine))
