"""What a simulated coordinator reckons beside its machine: templates, plans, what can be restored."""

from abc import ABC, abstractmethod
from typing import assert_never

from ftd.coordinator.restoring import check_restore
from ftd.faults.sim.plans import plan_event, planner_for
from ftd.faults.sim.world import World
from planner.errors import PlanningError
from planner.planner import Planner
from statemachine.cluster.machine import ClusterEvent
from statemachine.effects import BuildTemplates, CheckRestore, ComputePlan, WeighPlan
from statemachine.events import PlanWeighed, TemplatesReady


class PlanningWork(ABC):
    """A part of ``SimCoordinator``."""

    world: World
    _life: int
    planner: Planner | None = None
    thinks_s = 0.0
    """So much longer it may take, at most."""

    @abstractmethod
    def feed(self, event: ClusterEvent) -> None:
        """To the machine."""

    def _reckon(self, effect: BuildTemplates | ComputePlan | WeighPlan | CheckRestore) -> None:
        world, life = self.world, self._life
        if isinstance(effect, BuildTemplates):
            world.at(world.between(0.01, 0.5), self._built, effect, life)
            return
        took_s = world.between(0.001, 0.1) + world.upto(self.thinks_s)
        match effect:
            case ComputePlan():
                world.at(took_s, self._planned, effect, life)
            case WeighPlan():
                world.at(took_s, self._weighed, effect, life)
            case CheckRestore():
                world.at(took_s, self._checked, effect, life)
            case _:
                assert_never(effect)

    def _built(self, effect: BuildTemplates, life: int) -> None:
        if life != self._life:
            return
        job = effect.profiled.job
        self.planner = planner_for(effect.profiled.profile, job.policy)
        self.feed(TemplatesReady(at=self.world.now, cause=effect.cause, job_id=job.job_id))

    def _checked(self, effect: CheckRestore, life: int) -> None:
        if life == self._life:
            self.feed(check_restore(effect, self.world.now))

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
        self.feed(plan_event(self.planner, effect, self.world.now))
