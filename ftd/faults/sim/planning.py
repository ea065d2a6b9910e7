"""The planner of a simulated coordinator: the real one, whose answers take some virtual time."""

from collections.abc import Callable

from ftd.coordinator.plan_answer import PlanQuestion, answer_question
from ftd.coordinator.ports import Feed
from ftd.driver import Driver
from ftd.faults.sim.plans import plan_for, planner_for
from ftd.faults.sim.process import ProcessLoop
from ftd.faults.sim.world import World
from planner.planner import Planner
from statemachine.effects import BuildTemplates, CancelTemplates, PlanAhead
from statemachine.events import TemplatesReady


class SimPlanning:
    """The planning port of one process (``ftd.coordinator.ports.PlanningOperations``)."""

    progress: tuple[int, int] | None = None

    def __init__(
        self, world: World, max_planning_s: Callable[[], float], loop: ProcessLoop, feed: Feed, driver: Driver
    ) -> None:
        """:param max_planning_s: returns the longest extra time that a plan takes now."""
        self._world, self._max_planning_s, self._loop = world, max_planning_s, loop
        self._feed, self._now = feed, driver.now
        self._planner: Planner | None = None
        self._busy_until = 0.0
        """Time at which the only planning thread is free, so that requests are answered in order."""

    def prepare(self) -> None:
        """Do nothing: there is no process to start."""

    def cancel(self, effect: CancelTemplates) -> None:
        """Do nothing: what is precomputed serves all seeds."""

    def check_solver(self, answer: Callable[[str], None]) -> None:
        """Answer that there is no problem, since no simulated job needs a solver."""
        self._loop.call_soon(answer, "")

    def build(self, effect: BuildTemplates) -> None:
        self._later(self._world.between(0.01, 0.5), lambda: self._built(effect))

    def compute(self, effect: PlanAhead | PlanQuestion) -> None:
        world = self._world
        if isinstance(effect, PlanAhead):
            return
        took_s = world.between(0.001, 0.1) + world.up_to(self._max_planning_s())
        self._later(took_s, lambda: self._answer(effect))

    def _later(self, took_s: float, work: Callable[[], None]) -> None:
        due = max(self._busy_until, self._world.now + took_s)
        self._busy_until = due
        self._loop.call_at(due, work)

    def _built(self, effect: BuildTemplates) -> None:
        job = effect.profiled.job
        self._planner = planner_for(effect.profiled.profile, job.policy)
        self._feed(TemplatesReady(at=self._now(), cause=effect.cause, job_id=job.job_id))

    def _answer(self, effect: PlanQuestion) -> None:
        assert self._planner is not None, "the planner is asked after TemplatesReady"
        self._feed(answer_question(effect, self._planner, plan_for, self._now))
