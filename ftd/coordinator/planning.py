"""Carries out ``BuildTemplates`` and ``ComputePlan`` beside the event loop, never in it.

What can be precomputed is made in a process of its own (``plan_process``), or was made by an earlier one
(``plan_cache``). A plan is a look-up and an assignment, in one worker thread; what it lacks, because the
process is not that far yet or the cluster has outgrown it, is made there for this one plan. The planner is
imported at start, so that the path of a failure imports nothing.
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
from ftd.coordinator.protection_choice import choose_protection
from ftd.coordinator.speculative_planning import SpeculativePlan, make_plan, plan_likely_losses
from ftd.driver import Driver
from ftd.errors import PeerError
from planner.errors import (
    PlanningError,
    RestoreError,
    SolverError,
    StateLostError,
    TooFewNodesError,
)
from planner.values import Plan, Situation
from statemachine.effects import BuildTemplates, CancelTemplates, ComparePlan, ComputePlan, PlanAhead
from statemachine.events import (
    Event,
    PlanCompared,
    PlanImpossible,
    PlanReady,
    TemplatesFailed,
    TemplatesReady,
)

if TYPE_CHECKING:
    from planner.planner import Planner

_log = structlog.get_logger("ftd.planning")

T = TypeVar("T")

PROGRESS_AFTER_S = 1.0
"""Planning that takes no longer is not worth a progress bar."""
PLAN_LOSSES_AFTER_S = 1.0
"""What follows a plan is more urgent than what may be asked next."""

_OBJECTS_BEFORE_COLLECTION = 20_000
"""More than one recovery of a thousand nodes leaves; Python's own is 700."""
SPECULATE_AFTER_S = 0.001
"""Behind the command to stop, which is more urgent, and behind other losses of the same moment."""


class PlanningService:
    """Answers land as events in the driver's queue, with the cause of the effect that asked."""

    def __init__(
        self,
        feed: Callable[[Event], None],
        driver: Driver,
        cache: PlanCache,
        *,
        on_progress: Callable[[], None] = lambda: None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """``on_progress`` is called when ``progress`` has changed."""
        self._feed = feed
        self._driver = driver
        self._cache = cache
        self._on_progress = on_progress
        self._command = command
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="planning")
        self._planner: Planner | None = None
        self._planned_job = ""
        self._process: PlanProcess | None = None
        self._expecting: asyncio.Task[PlanProcess] | None = None
        """Starts the process for the next build in advance."""
        self._building: asyncio.Task[None] | None = None
        self._rehearsal: asyncio.Task[None] | None = None
        self._foresight = SpeculativePlan()
        self._expected: PlanAhead | None = None
        """Still to be looked at."""
        self._work: set[asyncio.Task[None]] = set()
        self.progress: tuple[int, int] | None = None
        """Instantiations made, of all; ``None`` while none are made, or for less than a second."""

    @property
    def pid(self) -> int | None:
        """The process that precomputes, while there is one."""
        return self._process.pid if self._process is not None else None

    @property
    def building(self) -> bool:
        """Something is still being precomputed, read or written."""
        return self._building is not None and not self._building.done()

    def warm_up(self) -> None:
        """Now, in the worker thread, and not on the path of a failure."""
        self._start(self._in_thread(_warm_up))

    def prepare(self) -> None:
        """A model is being measured: the process can import the planner meanwhile."""
        if self._expecting is None and not self.building:
            self._expecting = asyncio.ensure_future(_started(PlanProcess(self._command)))

    async def _dismiss(self) -> None:
        """Do without the process that was started in advance."""
        expecting, self._expecting = self._expecting, None
        if expecting is not None:
            await (await expecting).dismiss()

    async def _next_process(self) -> PlanProcess:
        if self._expecting is None:
            return PlanProcess(self._command)
        process = await asyncio.shield(self._expecting)  # Who is cancelled here leaves it to the next build.
        self._expecting = None
        return process

    def build(self, effect: BuildTemplates) -> None:
        """A build that is under way is given up: the new one is for more nodes, or for another job."""
        self._stop_building()
        self._building = self._start(self._build(effect))

    def cancel(self, effect: CancelTemplates) -> None:
        """The job is over. Without a build under way, nothing happens."""
        self._start(self._dismiss())
        if effect.job_id == self._planned_job:
            self._stop_building()

    def compute(self, effect: PlanAhead | ComputePlan | ComparePlan) -> None:
        if isinstance(effect, ComparePlan):
            self._start(self._weigh(effect))
            return
        if self._rehearsal is not None:
            self._rehearsal.cancel()
        if isinstance(effect, ComputePlan):
            self._expected = None
            self._start(self._plan(effect))
        else:
            waiting, self._expected = self._expected is not None, effect
            if not waiting:
                self._start(self._foresee())

    def check_solver(self, answer: Callable[[str], None]) -> None:
        """Call ``answer`` with the reason why jobs cannot use the Pyomo models here, or with ``""``."""
        self._start(self._check_solver(answer))

    async def _check_solver(self, answer: Callable[[str], None]) -> None:
        answer(await self._in_thread(_solver_problem))

    async def close(self) -> None:
        """Forget what is waiting and leave no process; what the thread computes runs to its end, unheard."""
        self._stop_building()
        await self._dismiss()
        for work in self._work:
            if not work.cancelling():  # A second cancellation would interrupt what the first one tidies up.
                work.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _stop_building(self) -> None:
        if self._building is not None:
            self._building.cancel()  # This kills the process, too.
        self._building = self._process = None
        self._tell(None)

    def _tell(self, progress: tuple[int, int] | None) -> None:
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
            _log.error("build", job=job_id, cause=effect.cause, error=str(error))
            self._fail(effect, str(error))
        except Exception as error:
            _log.exception("build", job=job_id, cause=effect.cause)
            self._fail(effect, f"the planner has a bug: {error!r}")
        finally:
            if self._building is asyncio.current_task():
                self._tell(None)

    def _fail(self, effect: BuildTemplates, reason: str) -> None:
        job_id, at = effect.profiled.job.job_id, self._driver.now()
        self._feed(TemplatesFailed(at=at, cause=effect.cause, job_id=job_id, reason=reason))

    def _ready(self, effect: BuildTemplates) -> None:
        self._feed(
            TemplatesReady(at=self._driver.now(), cause=effect.cause, job_id=effect.profiled.job.job_id)
        )

    async def _build_or_read(self, effect: BuildTemplates) -> None:
        """:raises PlanningError: the job cannot run. :raises PeerError: the process failed."""
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
            _log.info("read", job=profiled.job.job_id, nodes=work.max_nodes)
            await self._dismiss()
            self._ready(effect)
            return
        try:
            made = await self._precompute(effect, planner, work)
        except PeerError as error:
            # Whatever ended it (a lack of memory, somebody's kill) may not end another one.
            _log.warning("precompute", job=profiled.job.job_id, cause=effect.cause, error=str(error))
            made = await self._precompute(effect, planner, work)
        if made:
            await self._in_thread(lambda: self._cache.write(key, made))

    def _planner_for(self, effect: BuildTemplates) -> "Planner":
        """In the worker thread. The planner of this job, which goes on with what it has; or a new one.

        :raises PlanningError: the job cannot run.
        """
        from planner.planner import Planner

        profile, policy = effect.profiled.profile, effect.profiled.job.policy
        if policy.batch_solver == "pyomo":
            from planner.pipelines.programs import check_solver

            check_solver()  # This also imports Pyomo, so that a recovery need not wait for that.
        planner = self._planner
        if planner is None or (planner.profile, planner.policy) != (profile, policy):
            planner = Planner(profile, policy)
            # Whether there are microbatches for f+1 pipelines; that enough nodes are there is asked later,
            # since more may come: too few of them is a pause, not a failure.
            planner.check_tolerance((policy.tolerate + 1) * planner.n0)
            self._planner = planner
        return planner

    def _read(self, planner: "Planner", key: str) -> bool:
        """In the worker thread. Whether an earlier process's work was found and taken over."""
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
        """In a process; its parts go into the planner as they come. What it made in the end, or nothing where
        the job was refused.

        :raises PeerError: the process failed.
        """
        began_at, made = time.monotonic(), b""
        process = self._process = await self._next_process()
        async with aclosing(process.run(work)) as answers:
            async for answer in answers:
                match answer:
                    case PrecomputeProgress(done=done, total=total):
                        if time.monotonic() - began_at >= PROGRESS_AFTER_S:
                            self._tell((done, total))
                    case PartialResult(precomputed=part):
                        ready, made = bool(made), bytes(part)
                        await self._in_thread(partial(_take_part, planner, made))
                        if not ready:
                            self._ready(effect)
                    case PrecomputeRejected(reason=reason):
                        self._fail(effect, reason)
                    case PrecomputeFinished():
                        took_s = round(time.monotonic() - began_at, 3)
                        _log.info("precompute", nodes=work.max_nodes, seconds=took_s, size_bytes=len(made))
        return made

    # --- planning ----------------------------------------------------------------------------------

    async def _plan(self, effect: ComputePlan) -> None:
        answer = await self._in_thread(lambda: self._answer(effect))
        self._feed(answer)
        if isinstance(answer, PlanReady):
            self._rehearsal = self._start(self._rehearse(effect.situation, answer.plan))

    async def _foresee(self) -> None:
        """The newest only: nodes that are lost together are lost one behind the other."""
        while (effect := self._expected) is not None:
            await asyncio.sleep(SPECULATE_AFTER_S)
            if self._expected is effect:
                self._expected = None
                if (planner := self._planner) is not None:
                    await self._in_thread(partial(self._foresight.compute, planner, effect))

    async def _rehearse(self, situation: Situation, plan: Plan) -> None:
        """Once nothing is precomputed: what is not yet would be made here."""
        await asyncio.sleep(PLAN_LOSSES_AFTER_S)
        if self._building is not None:
            await asyncio.wait([self._building])
        planner = self._planner
        if planner is not None:
            await self._in_thread(lambda: plan_likely_losses(planner, situation, plan))

    def _answer(self, effect: ComputePlan) -> Event:
        """In the worker thread."""
        too_few, needed = False, None
        lost_layers: tuple[int, ...] = ()
        reason = "no templates were built for this job; this is a bug"
        try:
            if self._planner is not None:
                plan = self._foresight.take(effect.situation)
                plan = plan or make_plan(self._planner, effect.situation)
                wish, layers = effect.protection, self._planner.profile.layers
                return PlanReady(
                    at=self._driver.now(),
                    cause=effect.cause,
                    generation=effect.generation,
                    plan=plan,
                    protection=None if wish is None else choose_protection(plan, layers, wish),
                )
        except PlanningError as error:
            reason = explain(error)
            if isinstance(error, TooFewNodesError):
                too_few, needed = True, error.needed
            elif isinstance(error, StateLostError):
                lost_layers = error.layers
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
            lost_layers=lost_layers,
        )

    async def _weigh(self, effect: ComparePlan) -> None:
        """Where there is no better plan, whatever the reason, nothing is to be gained."""
        present_s, possible_s = await self._in_thread(lambda: self._weighed(effect))
        self._feed(
            PlanCompared(
                at=self._driver.now(),
                cause=effect.cause,
                generation=effect.generation,
                current_s=present_s,
                best_s=possible_s,
            )
        )

    def _weighed(self, effect: ComparePlan) -> tuple[float, float]:
        """In the worker thread."""
        try:
            if self._planner is not None:
                return self._planner.compare_iteration_s(effect.situation)
        except PlanningError as error:
            _log.warning("weigh", generation=effect.generation, cause=effect.cause, error=explain(error))
        except Exception:
            _log.exception("weigh", generation=effect.generation, cause=effect.cause)
        return 0.0, 0.0


def _take_part(planner: "Planner", part: bytes) -> None:
    """In the worker thread.

    :raises PeerError: the process made something that does not fit the job.
    """
    try:
        _restore(planner, part)
    except (msgspec.DecodeError, RestoreError) as error:
        raise PeerError(f"the planning process made something unusable: {error}") from None


def _restore(planner: "Planner", precomputed: bytes) -> None:
    """:raises msgspec.DecodeError, RestoreError: it is nothing that was precomputed for this job."""
    from planner.precomputed import Precomputed

    planner.restore(msgspec.msgpack.decode(precomputed, type=Precomputed))


def _solver_problem() -> str:
    """In the worker thread."""
    from planner.pipelines.programs import check_solver

    try:
        check_solver()
    except SolverError as error:
        return explain(error)
    return ""


async def _started(process: PlanProcess) -> PlanProcess:
    with contextlib.suppress(PeerError):  # It is tried again when there is work, and told then.
        await process.start()
    return process


def _warm_up() -> None:
    """Import the planner; and let the garbage collector no more look through all that stays, nor begin at
    every thousand objects: it takes tens of milliseconds each time, maybe on the path of a failure."""
    import planner.planner
    import planner.precomputed  # noqa: F401

    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_BEFORE_COLLECTION)
