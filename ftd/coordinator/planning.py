"""Carries out ``BuildTemplates`` and ``ComputePlan`` beside the event loop, never in it.

One worker thread, so that work is done in the order of the effects: a plan is asked for after its templates
and finds them. The planner is imported at start, so that the path of a failure imports nothing.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import structlog

from ftd.driver import Driver
from planner.errors import BatchError, InfeasibleError, PlanningError, TooFewNodesError
from planner.values import Plan, Situation
from statemachine.effects import BuildTemplates, ComputePlan
from statemachine.events import Event, PlanImpossible, PlanReady, TemplatesFailed, TemplatesReady

if TYPE_CHECKING:
    from planner.planner import Planner

_log = structlog.get_logger("ftd.planning")


class PlanningService:
    """Answers land as events in the driver's queue, with the cause of the effect that asked."""

    def __init__(self, feed: Callable[[Event], None], driver: Driver) -> None:
        self._feed = feed
        self._driver = driver
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="planning")
        self._planner: Planner | None = None
        self._work: set[asyncio.Future[None]] = set()

    def warm_up(self) -> None:
        """Import the planner and its solvers now, in the worker."""
        self._submit(_import_planner)

    def build(self, effect: BuildTemplates) -> None:
        self._submit(lambda: self._answer(self._build(effect)))

    def plan(self, effect: ComputePlan) -> None:
        self._submit(lambda: self._answer(self._plan(effect)))

    def close(self) -> None:
        """Forget what is waiting; what is being computed runs to its end and is not heard."""
        for work in self._work:
            work.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, work: Callable[[], None]) -> None:
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        self._work.add(future)
        future.add_done_callback(self._work.discard)
        self._loop = asyncio.get_running_loop()

    def _answer(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._feed, event)

    def _build(self, effect: BuildTemplates) -> Event:
        """In the worker thread."""
        from planner.planner import Planner

        profiled = effect.profiled
        job_id = profiled.job.job_id
        try:
            planner = Planner(profiled.profile, profiled.job.policy)
            # Whether there are microbatches for f+1 pipelines; that enough nodes are there is asked later,
            # since more may come: too few of them is a pause, not a failure.
            planner.check_tolerance((planner.policy.tolerate + 1) * planner.n0)
            planner.precompute(max(effect.max_nodes, planner.n0))
        except PlanningError as error:
            return self._templates_failed(effect, job_id, explain(error))
        except Exception as error:
            _log.exception("build", job=job_id, cause=effect.cause)
            return self._templates_failed(effect, job_id, f"the planner has a bug: {error!r}")
        self._planner = planner
        return TemplatesReady(at=self._driver.now(), cause=effect.cause, job_id=job_id)

    def _templates_failed(self, effect: BuildTemplates, job_id: str, reason: str) -> TemplatesFailed:
        return TemplatesFailed(at=self._driver.now(), cause=effect.cause, job_id=job_id, reason=reason)

    def _plan(self, effect: ComputePlan) -> Event:
        """In the worker thread."""
        too_few, needed = False, None
        reason = "no templates were built for this job; this is a bug"
        try:
            if self._planner is not None:
                plan = first_or_next_plan(self._planner, effect.situation)
                now = self._driver.now()
                return PlanReady(at=now, cause=effect.cause, generation=effect.generation, plan=plan)
        except PlanningError as error:
            reason = explain(error)
            if isinstance(error, TooFewNodesError):
                too_few, needed = True, error.needed
        except Exception as error:
            _log.exception("plan", generation=effect.generation, cause=effect.cause)
            reason = f"the planner has a bug: {error!r}"
        return PlanImpossible(
            at=self._driver.now(),
            cause=effect.cause,
            generation=effect.generation,
            too_few=too_few,
            needed=needed,
            reason=reason,
        )


def first_or_next_plan(planner: "Planner", situation: Situation) -> Plan:
    """A plan; a job must start with its ``tolerance.failures`` to spare, later it may go on with less.

    :raises TooFewNodesError: too few nodes to start or to go on.
    :raises StateLostError: no usable device holds some layer.
    """
    if situation.previous is None:
        present = len(situation.nodes)
        try:
            planner.check_tolerance(present)
        except InfeasibleError as error:
            needed = (planner.policy.tolerate + 1) * planner.n0
            raise TooFewNodesError(str(error), needed=needed, present=present) from None
    return planner.plan(situation)


def explain(error: PlanningError) -> str:
    """The planner's error for a user, with the remedy where the error carries one."""
    if isinstance(error, BatchError) and error.nearest and str(error.nearest[0]) not in str(error):
        near = " or ".join(str(batch) for batch in error.nearest)
        return f"{error} (training.global_batch: the nearest that can: {near})"
    return str(error)


def _import_planner() -> None:
    import planner.planner  # noqa: F401
