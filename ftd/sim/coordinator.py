"""A simulated coordinator: the real cluster machine, its journal, and the real planner."""

import json
from dataclasses import replace
from functools import lru_cache
from random import Random
from typing import TYPE_CHECKING, Any, assert_never, cast

from ftd.coordinator.restoring import check_restore
from ftd.protection_choice import protect
from ftd.sim.network import COORDINATOR, Network
from ftd.sim.world import World
from planner.errors import PlanningError, StateLostError, TooFewNodesError
from planner.planner import Planner
from planner.values import ModelProfile, Plan, Policy, Situation
from statemachine.cluster import ClusterEvent, ClusterMachine
from statemachine.effects import (
    AbandonCheckpoint,
    AnswerRequest,
    BuildTemplates,
    CancelTemplates,
    CancelTimer,
    CheckRestore,
    CommitCheckpoint,
    ComputePlan,
    Effect,
    EmitEvent,
    FindCheckpoint,
    PersistState,
    PublishCluster,
    SendCommand,
    SetTimer,
    WeighPlan,
)
from statemachine.events import (
    BrokerConnected,
    BrokerLost,
    CheckpointFailed,
    CheckpointWritten,
    DrainRequested,
    JobSubmitted,
    NodeVanished,
    PlanImpossible,
    PlanReady,
    PlanWeighed,
    SignalArrived,
    SnapshotRequested,
    StopRequested,
    TemplatesReady,
    TimerFired,
)
from statemachine.messages import FromNode, ToNode
from statemachine.values import Checkpoint, Job

if TYPE_CHECKING:
    from ftd.sim.invariants import Invariants

MOST_NODES = 7

ClusterEffect = (
    SetTimer | CancelTimer | EmitEvent | SendCommand | PersistState | PublishCluster | BuildTemplates
    | CancelTemplates | ComputePlan | WeighPlan | CheckRestore | CommitCheckpoint | AbandonCheckpoint
    | FindCheckpoint | AnswerRequest
)  # fmt: skip


@lru_cache(maxsize=64)
def planner_for(profile: ModelProfile, policy: Policy) -> Planner:
    """One planner per shape of job: its templates serve every seed, whatever ran before."""
    planner = Planner(profile, policy)
    planner.precompute(MOST_NODES)
    return planner


_PLANS: dict[Any, Plan | PlanningError] = {}
"""Plans by situation; the planner is deterministic, so a seed's run does not depend on earlier seeds."""


def plan_for(planner: Planner, situation: Situation) -> Plan:
    """:raises PlanningError: as the planner does."""
    holdings, speeds = frozenset(situation.holdings.items()), frozenset(situation.speeds.items())
    parts = None if situation.parts is None else frozenset(situation.parts.items())
    key = (id(planner), situation.nodes, holdings, situation.previous, speeds, situation.horizon_s, parts)
    answer = _PLANS.get(key)
    if answer is None:
        if len(_PLANS) > 20_000:
            _PLANS.clear()
        try:
            answer = planner.plan(situation)
        except PlanningError as error:
            answer = error
        _PLANS[key] = answer
    if isinstance(answer, PlanningError):
        raise answer
    return answer


class SimCoordinator:
    """The coordinator's process: what it knows is lost when it is killed, except for its journal."""

    name = COORDINATOR

    def __init__(self, world: World, network: Network, invariants: "Invariants") -> None:
        self.world, self.network, self.invariants = world, network, invariants
        self.incarnation = 0
        self.up = False
        self.frozen = False
        self.machine = ClusterMachine(world.timing)
        self.journal: dict[str, Any] | None = None
        self.crash_after: int | None = None
        """Effects until it is killed in the middle of carrying them out."""
        self.on_event: Any = None
        """Called with each public event's name."""
        self.planner: Planner | None = None
        self._life = 0
        self._timers: dict[str, int] = {}
        self._backlog: list[ClusterEvent] = []
        self._haste = Random(f"{world.seed} together")
        """Of its own: in a quarter of all seeds it is busy at times, and takes what came together."""
        self._busy = world.seed % 4 == 3

    # --- the process -------------------------------------------------------------------------------

    def start(self) -> None:
        self.up, self.frozen = True, False
        self._life += 1
        self._timers.clear()
        self._backlog.clear()
        self.crash_after = None
        self.planner = None
        self.incarnation = self.world.serial()
        effects: list[Effect] = []
        if self.journal is None:
            self.machine = ClusterMachine(self.world.timing)
        else:
            journal = json.loads(json.dumps(self.journal))
            timing, now = self.world.timing, self.world.now
            self.machine, effects = ClusterMachine.restore(timing, journal, now, "restart")
        self.invariants.coordinator_starts(self.machine)
        self._perform_all(effects)
        self.network.register(self)

    def crash(self) -> None:
        """SIGKILL: only the journal is left."""
        if not self.up:
            return
        self.up = self.frozen = False
        self._life += 1
        self._backlog.clear()
        self.network.drop(self.name, process_died=True)

    def freeze(self, for_s: float) -> None:
        if self.up and not self.frozen:
            self.frozen = True
            self.world.at(for_s, self.thaw, self._life)

    def thaw(self, life: int | None = None) -> None:
        if not self.frozen or (life is not None and life != self._life):
            return
        self.frozen = False
        self._take_backlog()

    def feed(self, event: ClusterEvent) -> None:
        if not self.up:
            return
        if self.frozen:
            self._backlog.append(event)
        elif isinstance(event, TimerFired) or not self._busy or self._haste.random() < 0.7:
            self._take([*self._backlog, event])
        else:
            if not self._backlog:
                self.world.at(self._haste.uniform(0.0, 0.05), self._take_backlog, self._life)
            self._backlog.append(event)

    def _take_backlog(self, life: int | None = None) -> None:
        if not self.frozen and life in (None, self._life):
            self._take(self._backlog)

    def _take(self, events: list[ClusterEvent]) -> None:
        """As the driver does: together, but a timer alone, since what came before it may cancel it."""
        self._backlog = []
        alone: list[ClusterEvent] = []
        for event in events:
            if isinstance(event, TimerFired):
                self._step(alone)
                self._step([event])
                alone = []
            else:
                alone.append(event)
        self._step(alone)

    def _step(self, events: list[ClusterEvent]) -> None:
        if not events or not self.up:
            return
        if self.world.tracing:
            for event in events:
                self.world.note("coord", event)
        effects = self.machine.steps([replace(event, at=self.world.now) for event in events])
        self._perform_all(effects)
        if self.up:  # what a coordinator knew that died before it journaled it was never known
            self.invariants.coordinator_stepped(self.machine)

    def connected(self) -> None:
        self.feed(BrokerConnected(at=self.world.now, cause="broker"))

    def disconnected(self) -> None:
        self.feed(BrokerLost(at=self.world.now, cause="broker"))

    def signal(self, message: FromNode) -> None:
        cause = f"{message.node}@{self.world.events}"
        self.feed(SignalArrived(at=self.world.now, cause=cause, message=message))

    def will(self, node: str, incarnation: int, graceful: bool) -> None:
        event = NodeVanished(
            at=self.world.now, cause=f"will-{node}", node=node, incarnation=incarnation, graceful=graceful
        )
        self.feed(event)

    def submit(self, job: Job, begin: Checkpoint | None) -> None:
        self.feed(JobSubmitted(at=self.world.now, cause="submit", request=job.job_id, job=job, begin=begin))

    def drain(self, node: str) -> None:
        self.feed(DrainRequested(at=self.world.now, cause="drain", request="drain", node=node))

    def ask_snapshots(self, **wants: Any) -> None:
        self.feed(SnapshotRequested(at=self.world.now, cause="ask", request="ask", **wants))

    def stop(self, job: str) -> None:
        self.feed(StopRequested(at=self.world.now, cause="stop", request="stop", job=job))

    # --- effects -----------------------------------------------------------------------------------

    def _perform_all(self, effects: list[Effect]) -> None:
        world = self.world
        for effect in effects:
            if self.crash_after is not None:
                self.crash_after -= 1
                if self.crash_after < 0:
                    self.crash()
                    world.at(world.between(0.1, 6.0), self.restart)
                    return
            if world.tracing:
                world.note("coord", f"  → {effect}")
            self._perform(cast(ClusterEffect, effect))

    def restart(self) -> None:
        if not self.up:
            self.start()

    def _perform(self, effect: ClusterEffect) -> None:
        world = self.world
        match effect:
            case SendCommand():
                self.invariants.commands(effect, self.journal)
                message = ToNode(
                    node=effect.node,
                    incarnation=effect.incarnation,
                    command=effect.command,
                    cause=effect.cause,
                )
                self.network.command(message)
            case PersistState():
                self.journal = self.machine.durable_state()
                self.invariants.persisted(self.machine)
            case EmitEvent():
                self.invariants.public_event(effect)
                if self.on_event is not None:
                    self.on_event(effect)
            case SetTimer():
                token = self._timers.get(effect.name, 0) + 1
                self._timers[effect.name] = token
                world.at(effect.delay_s, self._fire, effect.name, token, effect.cause, self._life)
            case CancelTimer():
                self._timers[effect.name] = self._timers.get(effect.name, 0) + 1
            case BuildTemplates():
                world.at(world.between(0.01, 0.5), self._built, effect, self._life)
            case ComputePlan():
                world.at(world.between(0.001, 0.1), self._planned, effect, self._life)
            case WeighPlan():
                world.at(world.between(0.001, 0.1), self._weighed, effect, self._life)
            case CheckRestore():
                world.at(world.between(0.001, 0.1), self._checked, effect, self._life)
            case CommitCheckpoint():
                world.at(world.between(0.001, 0.2), self._commit, effect, self._life)
            case AbandonCheckpoint():
                world.at(world.between(0.2, 0.3), self._abandon, effect, self._life)
            case FindCheckpoint():
                world.at(world.between(0.001, 0.2), self._find, effect, self._life)
            case PublishCluster() | AnswerRequest() | CancelTemplates():
                pass
            case _:
                assert_never(effect)

    def _fire(self, name: str, token: int, cause: str, life: int) -> None:
        if life == self._life and self._timers.get(name) == token:
            self.feed(TimerFired(at=self.world.now, cause=cause, name=name))

    def _built(self, effect: BuildTemplates, life: int) -> None:
        if life != self._life:
            return
        job = effect.profiled.job
        self.planner = planner_for(effect.profiled.profile, job.policy)
        self.feed(TemplatesReady(at=self.world.now, cause=effect.cause, job_id=job.job_id))

    def _checked(self, effect: CheckRestore, life: int) -> None:
        if life == self._life:
            self.feed(check_restore(effect, self.world.now))

    def _commit(self, effect: CommitCheckpoint, life: int) -> None:
        """A coordinator that dies has committed or has not, and mostly does not hear of it."""
        if life != self._life:
            return
        world, place = self.world, self.invariants.place
        if place.hangs_s:
            world.at(place.hangs_s, self._commit, effect, life)
            return
        if place.closed or world.chance(place.full):
            failed = CheckpointFailed(
                at=world.now, cause=effect.cause, attempt=effect.attempt, step=effect.step, detail="full"
            )
            self.feed(failed)
            return
        pruned = place.commit(effect)
        world.at(world.between(0.0, 0.2), self._committed, effect, pruned, life)

    def _committed(self, effect: CommitCheckpoint, pruned: tuple[int, ...], life: int) -> None:
        if life == self._life:
            written = CheckpointWritten(
                at=self.world.now,
                cause=effect.cause,
                attempt=effect.attempt,
                step=effect.step,
                pruned=pruned,
            )
            self.feed(written)

    def _abandon(self, effect: AbandonCheckpoint, life: int) -> None:
        place = self.invariants.place
        if life == self._life and place.hangs_s:
            self.world.at(place.hangs_s + 0.1, self._abandon, effect, life)  # Behind the commit that hangs.
        elif life == self._life:
            place.abandon(effect)

    def _find(self, effect: FindCheckpoint, life: int) -> None:
        place, now = self.invariants.place, self.world.now
        if life == self._life and place.hangs_s:
            self.world.at(place.hangs_s, self._find, effect, life)
        elif life == self._life:
            self.feed(place.refuses(effect, now) if place.closed else place.find(effect, now))

    def _weighed(self, effect: WeighPlan, life: int) -> None:
        if life != self._life:
            return
        assert self.planner is not None, "there is a plan to compare with"
        try:
            present_s, possible_s = self.planner.weigh(effect.situation)
        except PlanningError:
            present_s = possible_s = 0.0
        self.feed(
            PlanWeighed(
                at=self.world.now,
                cause=effect.cause,
                generation=effect.generation,
                present_s=present_s,
                possible_s=possible_s,
            )
        )

    def _planned(self, effect: ComputePlan, life: int) -> None:
        if life != self._life:
            return
        assert self.planner is not None, "a plan is asked for after TemplatesReady"
        now, generation = self.world.now, effect.generation
        try:
            plan = plan_for(self.planner, effect.situation)
        except PlanningError as error:
            self.feed(
                PlanImpossible(
                    at=now,
                    cause=effect.cause,
                    generation=generation,
                    too_few=isinstance(error, TooFewNodesError),
                    reason=str(error),
                    lost_layers=error.layers if isinstance(error, StateLostError) else (),
                )
            )
        else:
            wish, layers = effect.protection, self.planner.profile.layers
            choice = None if wish is None else protect(plan, layers, wish)
            self.feed(
                PlanReady(at=now, cause=effect.cause, generation=generation, plan=plan, protection=choice)
            )
