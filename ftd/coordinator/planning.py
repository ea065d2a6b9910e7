"""Planning for the coordinator, outside its event loop: carries out ``BuildTemplates``, ``ComputePlan`` and
their relatives.

What can be precomputed is made in a process of its own (``plan_process``), or was made by an earlier one
(``plan_cache``). A plan is then a look-up and an assignment, in one worker thread. What it lacks, because
the process has not got that far or the cluster has grown, is computed there for this one plan. The planner
is imported at the start, so that the path of a failure imports nothing.
"""

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import structlog

from ftd.coordinator.plan_answer import PlanAnswer, PlanQuestion, answer_question, answer_without_plan
from ftd.coordinator.plan_cache import PlanCache
from ftd.coordinator.plan_process import COMMAND, PlanProcess
from ftd.coordinator.plan_worker import (
    PartialResult,
    PrecomputeFinished,
    PrecomputeProgress,
    PrecomputeRejected,
    PrecomputeRequest,
    explain,
)
from ftd.coordinator.speculative_planning import SpeculativePlan, make_plan, plan_likely_losses
from ftd.driver import Driver
from ftd.errors import PeerError
from ftd.tasks import start_task
from planner.errors import PlanningError, RestoreError, SolverError
from planner.values import Plan, Situation
from statemachine.effects import (
    BuildTemplates,
    CancelTemplates,
    CheckDrain,
    ComparePlan,
    ComputePlan,
    PlanAhead,
)
from statemachine.events import Event, PlanReady, TemplatesFailed, TemplatesReady

if TYPE_CHECKING:
    from planner.planner import Planner

_log = structlog.get_logger("ftd.planning")

T = TypeVar("T")

PROGRESS_AFTER_S = 1.0
"""Planning that takes no longer is not worth a progress bar."""
PLAN_LOSSES_AFTER_S = 1.0
"""Delay before likely losses are planned for: what follows a plan is more urgent than what may be asked next."""

_OBJECTS_BEFORE_COLLECTION = 20_000
"""Objects that Python allocates before it collects garbage: more than a recovery of a thousand nodes leaves.
The default is 700.
"""
_FAILED: dict[type[PlanQuestion], str] = {
    ComputePlan: "plan_failed",
    CheckDrain: "drain_check_failed",
    ComparePlan: "comparison_failed",
}
"""Log events for bugs of the planner."""
SPECULATE_AFTER_S = 0.001
"""Delay of a speculative plan, which comes after the command to stop, and after other losses of the same
moment.
"""


class PlanningService:
    """The runner of the planner. Results are fed to the driver as events, with the cause of the effect that
    requested them.
    """

    def __init__(
        self,
        feed: Callable[[Event], None],
        driver: Driver,
        cache: PlanCache,
        *,
        on_progress: Callable[[], None] = lambda: None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """Begin with nothing planned. ``on_progress`` is called when ``progress`` has changed."""
        self._feed = feed
        self._driver = driver
        self._cache = cache
        self._on_progress = on_progress
        self._command = command
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="planning")
        self._planner: Planner | None = None
        self._planned_job = ""
        self._next_process_task: asyncio.Task[PlanProcess] | None = None
        """Task that starts the process for the next build in advance."""
        self._building: asyncio.Task[None] | None = None
        self._loss_planning: asyncio.Task[None] | None = None
        self._speculative_plan = SpeculativePlan()
        self._next_loss: PlanAhead | None = None
        """The newest loss that has not been planned for yet."""
        self._work: set[asyncio.Task[None]] = set()
        self.progress: tuple[int, int] | None = None
        """Instantiations made, and of all; ``None`` while none are made, or during the first second."""

    @property
    def building(self) -> bool:
        """Whether something is still being precomputed, read or written."""
        return self._building is not None and not self._building.done()

    def warm_up(self) -> None:
        """Import the planner now, in the worker thread, and not on the path of a failure."""
        self._start(self._in_thread(_warm_up))

    def prepare(self) -> None:
        """Start the process in advance: it can import the planner while a model is measured."""
        if self._next_process_task is None and not self.building:
            self._next_process_task = asyncio.ensure_future(_started(PlanProcess(self._command)))

    async def _end_expected_process(self) -> None:
        """End the process that was started in advance."""
        expecting, self._next_process_task = self._next_process_task, None
        if expecting is not None:
            await (await expecting).dismiss()

    async def _next_process(self) -> PlanProcess:
        if (expecting := self._next_process_task) is None:
            return PlanProcess(self._command)
        # If this is cancelled, the process remains for the next build.
        process = await asyncio.shield(expecting)
        if self._next_process_task is not expecting:  # It was dismissed meanwhile.
            return PlanProcess(self._command)
        self._next_process_task = None
        return process

    def build(self, effect: BuildTemplates) -> None:
        """Precompute for a job. A build in progress is abandoned: the new one is for more nodes, or for
        another job.
        """
        self._stop_building()
        self._building = self._start(self._build(effect))

    def cancel(self, effect: CancelTemplates) -> None:
        """Stop the job's build, since the job is over. Without one, nothing happens."""
        self._start(self._end_expected_process())
        if effect.job_id == self._planned_job:
            self._stop_building()

    def compute(self, effect: PlanAhead | PlanQuestion) -> None:
        # While the group trains (ComparePlan, CheckDrain), what is planned for losses stays useful.
        if isinstance(effect, PlanAhead | ComputePlan) and self._loss_planning is not None:
            self._loss_planning.cancel()
        if isinstance(effect, PlanAhead):
            waiting, self._next_loss = self._next_loss is not None, effect
            if not waiting:
                self._start(self._plan_ahead())
            return
        if isinstance(effect, ComputePlan):
            self._next_loss = None
        self._start(self._answer_question(effect))

    def check_solver(self, answer: Callable[[str], None]) -> None:
        """Call ``answer`` with the reason why jobs cannot use the Pyomo models here, or with ``""``."""
        self._start(self._check_solver(answer))

    async def _check_solver(self, answer: Callable[[str], None]) -> None:
        answer(await self._in_thread(_solver_problem))

    async def close(self) -> None:
        """Drop what is waiting, and end the process. The thread finishes what it computes, and the result is
        dropped.
        """
        self._stop_building()
        await self._end_expected_process()
        for work in self._work:
            if not work.cancelling():  # A second cancellation would interrupt the clean-up of the first one.
                work.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return start_task(work, self._work)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _stop_building(self) -> None:
        if self._building is not None:
            self._building.cancel()  # This also kills the process.
        self._building = None
        self._report_progress(None)

    def _report_progress(self, progress: tuple[int, int] | None) -> None:
        if progress != self.progress:
            self.progress = progress
            self._on_progress()

    # --- precomputing ------------------------------------------------------------------------------

    async def _build(self, effect: BuildTemplates) -> None:
        job_id = self._planned_job = effect.profiled.job.job_id
        try:
            await self._build_or_read(effect)
        except PlanningError as error:
            self._fail(effect, explain(error))
        except PeerError as error:
            _log.error("build_failed", job=job_id, cause=effect.cause, error=str(error))
            self._fail(effect, str(error))
        except Exception as error:
            _log.exception("build_failed", job=job_id, cause=effect.cause)
            self._fail(effect, f"the planner has a bug: {error!r}")
        finally:
            if self._building is asyncio.current_task():
                self._report_progress(None)

    def _fail(self, effect: BuildTemplates, reason: str) -> None:
        job_id, at = effect.profiled.job.job_id, self._driver.now()
        self._feed(TemplatesFailed(at=at, cause=effect.cause, job_id=job_id, reason=reason))

    def _ready(self, effect: BuildTemplates) -> None:
        self._feed(
            TemplatesReady(at=self._driver.now(), cause=effect.cause, job_id=effect.profiled.job.job_id)
        )

    async def _build_or_read(self, effect: BuildTemplates) -> None:
        """Take the results from the cache, or precompute them and add them to the cache.

        :raises PlanningError: the job cannot run.
        :raises PeerError: the process failed.
        """
        profiled = effect.profiled
        planner = await self._in_thread(lambda: self._planner_for(effect))
        work = PrecomputeRequest(
            profile=profiled.profile,
            policy=profiled.job.policy,
            max_nodes=max(effect.max_nodes, planner.n0),
            present=effect.present,
        )
        key = await self._in_thread(lambda: self._cache.key(work))
        if await self._in_thread(lambda: self._read(planner, key)):
            _log.info("cache_read", job=profiled.job.job_id, nodes=work.max_nodes)
            await self._end_expected_process()
            self._ready(effect)
            return
        try:
            result = await self._precompute(effect, planner, work)
        except PeerError as error:
            # What ended it (a lack of memory, somebody's kill) may not end another process.
            _log.warning("precompute_failed", job=profiled.job.job_id, cause=effect.cause, error=str(error))
            result = await self._precompute(effect, planner, work)
        if result:
            await self._in_thread(lambda: self._cache.write(key, result))

    def _planner_for(self, effect: BuildTemplates) -> "Planner":
        """Return the planner of this job, which keeps what it has, or a new one. It runs in the worker
        thread.

        :raises PlanningError: the job cannot run.
        """
        from planner.planner import Planner

        profile, policy = effect.profiled.profile, effect.profiled.job.policy
        if policy.batch_solver == "pyomo":
            from planner.pipelines.programs import check_solver

            check_solver()  # This also imports Pyomo, so that a recovery need not wait for it.
        planner = self._planner
        if planner is None or (planner.profile, planner.policy) != (profile, policy):
            planner = Planner(profile, policy)
            # Check whether there are microbatches for f+1 pipelines. Whether there are enough nodes is
            # checked later, since more may join: too few nodes pause a job and do not fail it.
            planner.check_tolerance((policy.tolerate + 1) * planner.n0)
            self._planner = planner
        return planner

    def _read(self, planner: "Planner", key: str) -> bool:
        """Restore what an earlier process precomputed, and return whether it was found. It runs in the worker
        thread.
        """
        found = self._cache.read(key)
        if found is None:
            return False
        try:
            _restore(planner, found)
        except (msgspec.DecodeError, RestoreError) as error:
            self._cache.discard(key, str(error))
            return False
        return True

    async def _precompute(self, effect: BuildTemplates, planner: "Planner", work: PrecomputeRequest) -> bytes:
        """Precompute in a process, and give the planner each partial result. Return the complete result, or
        ``b""`` if the job was rejected.

        :raises PeerError: the process failed.
        """
        began_at, result = time.monotonic(), b""
        process = await self._next_process()
        async with aclosing(process.run(work)) as answers:
            async for answer in answers:
                match answer:
                    case PrecomputeProgress(done=done, total=total):
                        if time.monotonic() - began_at >= PROGRESS_AFTER_S:
                            self._report_progress((done, total))
                    case PartialResult(precomputed=part):
                        ready, result = bool(result), bytes(part)
                        await self._in_thread(partial(_take_part, planner, result))
                        if not ready:
                            self._ready(effect)
                    case PrecomputeRejected(reason=reason):
                        self._fail(effect, reason)
                    case PrecomputeFinished():
                        took_s = round(time.monotonic() - began_at, 3)
                        _log.info("precomputed", nodes=work.max_nodes, seconds=took_s, size_bytes=len(result))
        return result

    # --- planning ----------------------------------------------------------------------------------

    async def _answer_question(self, effect: PlanQuestion) -> None:
        answer = await self._in_thread(lambda: self._answer(effect))
        self._feed(answer)
        if isinstance(answer, PlanReady):
            self._loss_planning = self._start(self._plan_likely_losses(effect.situation, answer.plan))

    async def _plan_ahead(self) -> None:
        """Plan for the newest loss only: nodes that are lost together are reported one after another."""
        while (effect := self._next_loss) is not None:
            await asyncio.sleep(SPECULATE_AFTER_S)
            if self._next_loss is effect:
                self._next_loss = None
                if (planner := self._planner) is not None:
                    await self._in_thread(partial(self._speculative_plan.compute, planner, effect))

    async def _plan_likely_losses(self, situation: Situation, plan: Plan) -> None:
        """Plan for the losses that are likely next, after all precomputing: what is missing would otherwise be
        computed here.
        """
        await asyncio.sleep(PLAN_LOSSES_AFTER_S)
        if self._building is not None:
            await asyncio.wait([self._building])
        planner = self._planner
        if planner is not None:
            await self._in_thread(lambda: plan_likely_losses(planner, situation, plan))

    def _answer(self, effect: PlanQuestion) -> PlanAnswer:
        """Return the event that answers ``effect``. It runs in the worker thread."""
        reason = "no templates were built for this job; this is a bug"
        make = self._take_or_make_plan if isinstance(effect, ComputePlan) else make_plan
        try:
            if self._planner is not None:
                return answer_question(effect, self._planner, make, self._driver.now)
        except Exception as error:
            _log.exception(_FAILED[type(effect)], generation=effect.generation, cause=effect.cause)
            reason = f"the planner has a bug: {error!r}"
        return answer_without_plan(effect, reason, self._driver.now())

    def _take_or_make_plan(self, planner: "Planner", situation: Situation) -> Plan:
        return self._speculative_plan.take(situation) or make_plan(planner, situation)


def _take_part(planner: "Planner", part: bytes) -> None:
    """Give the planner a partial result. It runs in the worker thread.

    :raises PeerError: the process made something that does not fit the job.
    """
    try:
        _restore(planner, part)
    except (msgspec.DecodeError, RestoreError) as error:
        raise PeerError(f"the planning process sent an unusable result: {error}") from None


def _restore(planner: "Planner", precomputed: bytes) -> None:
    """Give the planner what was precomputed.

    :raises msgspec.DecodeError, RestoreError: it was not precomputed for this job.
    """
    from planner.precomputed import Precomputed

    planner.restore(msgspec.msgpack.decode(precomputed, type=Precomputed))


def _solver_problem() -> str:
    """Return why the Pyomo models cannot be used here; empty: they can. It runs in the worker thread."""
    from planner.pipelines.programs import check_solver

    try:
        check_solver()
    except SolverError as error:
        return explain(error)
    return ""


async def _started(process: PlanProcess) -> PlanProcess:
    with contextlib.suppress(PeerError):  # The next build tries again, and reports the error.
        await process.start()
    return process


def _warm_up() -> None:
    """Import the planner and what it imports late, and keep the garbage collector from scanning what stays in
    memory, and from running at every thousand objects. It takes tens of milliseconds each time, possibly on
    the path of a failure.
    """
    import scipy.optimize  # noqa: F401

    import planner.planner
    import planner.precomputed  # noqa: F401

    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_BEFORE_COLLECTION)
