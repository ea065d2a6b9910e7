"""Planning outside the event loop: in a process, from a cache, and with errors that users understand."""

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import planner
from ftd.coordinator import planning
from ftd.coordinator.plan_cache import MAX_FILES, PlanCache, code_digest
from ftd.coordinator.plan_process import COMMAND, PlanProcess
from ftd.coordinator.plan_worker import PrecomputeRequest
from ftd.coordinator.planning import PlanningService
from ftd.coordinator.speculative_planning import expected_situation, likely_losses, plan_likely_losses
from ftd.driver import Driver
from ftd.processes import child_pids, is_alive
from planner.errors import PlanningError
from planner.pipelines import programs
from planner.planner import Planner
from planner.values import Device, LayerProfile, ModelProfile, Plan, Policy, Situation
from statemachine.effects import BuildTemplates, CancelTemplates, ComparePlan, ComputePlan, PlanAhead
from statemachine.events import (
    Event,
    PlanCompared,
    PlanImpossible,
    PlanReady,
    TemplatesFailed,
    TemplatesReady,
)
from statemachine.messages.values import Job, ProfiledJob
from tests.helpers.waiting import PATIENCE_S, until, until_async

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[3]
LAYER = LayerProfile(
    forward_ms=10.0,
    backward_ms=20.0,
    parameter_bytes=1000,
    gradient_bytes=1000,
    optimizer_bytes=2000,
    activation_bytes=100,
    output_bytes=100,
)
PROFILE = ModelProfile(layers=(LAYER,) * 4, microbatch_rows=4)
POLICY = Policy(global_batch=32, microbatch_rows=4)


def build(
    policy: Policy = POLICY, profile: ModelProfile = PROFILE, max_nodes: int = 6, job_id: str = "gpt-1"
) -> BuildTemplates:
    job = Job(job_id=job_id, name="gpt", steps=1, policy=policy)
    profiled = ProfiledJob(job=job, profile=profile)
    return BuildTemplates(cause="c-b", profiled=profiled, max_nodes=max_nodes, present=min(4, max_nodes))


def situation(nodes: int, layers: int = 4) -> Situation:
    names = tuple(f"node-{index}" for index in range(nodes))
    held = frozenset(range(layers))
    return Situation(nodes=names, holdings={Device(node=name, index=0): held for name in names})


def asking(nodes: int, generation: int = 1) -> ComputePlan:
    return ComputePlan(cause="c-p", generation=generation, situation=situation(nodes))


class Scene:
    """A service, and the events that it feeds."""

    def __init__(self, directory: Path, command: list[str] = COMMAND) -> None:
        class Idle:
            def step(self, event: Event) -> list[Any]:
                return []

        self.command = command
        self.fed: asyncio.Queue[Event] = asyncio.Queue()
        self.cache = PlanCache(directory / "plans")
        self.seen: list[tuple[int, int] | None] = []
        self.service = PlanningService(
            self.fed.put_nowait,
            Driver(Idle(), lambda _: None),
            self.cache,
            on_progress=lambda: self.seen.append(self.service.progress),
            command=command,
        )

    async def ask(self, effect: BuildTemplates | ComputePlan | ComparePlan) -> Event:
        """Return the next event of the service."""
        match effect:
            case BuildTemplates():
                self.service.build(effect)
            case ComputePlan() | ComparePlan():
                self.service.compute(effect)
        return await asyncio.wait_for(self.fed.get(), PATIENCE_S)

    def pids(self) -> set[int]:
        """Return the processes that plan now: children of this one that run the command."""
        line = "".join(f"{part}\0" for part in (*self.command, os.getpid())).encode()
        return {
            pid for pid in child_pids() if is_alive(pid) and Path(f"/proc/{pid}/cmdline").read_bytes() == line
        }

    async def settled(self) -> None:
        """Wait until nothing is being built."""
        await until_async(lambda: not self.service.building)


def play(scene: Scene, story: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        scene.service.warm_up()
        try:
            await story(scene)
        finally:
            await scene.service.close()

    asyncio.run(run())


def answers(directory: Path, *effects: BuildTemplates | ComputePlan | ComparePlan) -> list[Event]:
    """Return the events of the service for these effects, in order."""
    got: list[Event] = []

    async def story(scene: Scene) -> None:
        for effect in effects:
            got.append(await scene.ask(effect))

    play(Scene(directory), story)
    return got


def program(directory: Path, code: str) -> list[str]:
    """Return a command that runs ``code`` instead of the planning process."""
    path = directory / "instead.py"
    path.write_text(code)
    return [sys.executable, str(path)]


# --- answers -------------------------------------------------------------------------------------


def test_templates_from_another_process_make_a_plan(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        scene.service.build(build())
        await until_async(scene.pids)
        ready = await scene.fed.get()
        assert isinstance(ready, TemplatesReady) and (ready.job_id, ready.cause) == ("gpt-1", "c-b")
        plan = await scene.ask(asking(4, generation=3))
        assert isinstance(plan, PlanReady) and (plan.generation, plan.cause) == (3, "c-p")
        assert set(plan.plan.nodes) | set(plan.plan.idle_nodes) == {f"node-{i}" for i in range(4)}
        assert sum(pipeline.microbatches for pipeline in plan.plan.pipelines) == 8
        here = Planner(PROFILE, POLICY)
        here.precompute(6)
        assert plan.plan == here.plan(situation(4)), "the other process plans as this one would"

    play(Scene(tmp_path), story)


def test_shares_by_the_integer_program_are_as_good_and_need_no_import_after_a_loss(tmp_path: Path) -> None:
    asked = msgspec.structs.replace(POLICY, batch_solver="pyomo", batch_objective="variance")
    own, modelled = (
        answers(tmp_path, build(policy), asking(5))[1]
        for policy in (msgspec.structs.replace(asked, batch_solver="exact"), asked)
    )
    assert isinstance(own, PlanReady) and isinstance(modelled, PlanReady)
    assert modelled.plan.estimated_iteration_s == pytest.approx(own.plan.estimated_iteration_s)
    script = (
        "import sys; from tests.ftd.coordinator.test_planning import *\n"
        "async def story(scene):\n"
        "    scene.service._planner_for(build())\n"
        "    before = 'pyomo' in sys.modules\n"
        "    scene.service._planner_for(build(msgspec.structs.replace(POLICY, batch_solver='pyomo')))\n"
        "    print(before, 'pyomo' in sys.modules)\n"
        f"play(Scene(Path({str(tmp_path)!r})), story)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=240
    )
    assert done.stdout.split() == ["False", "True"]


def test_a_solver_that_fails_ends_no_running_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(scene: Scene) -> None:
        policy = msgspec.structs.replace(POLICY, batch_solver="pyomo")
        assert isinstance(await scene.ask(build(policy)), TemplatesReady)
        await scene.settled()
        monkeypatch.setattr(programs, "SOLVER_LIMIT_S", 0.0)
        plan = await scene.ask(asking(8))
        assert isinstance(plan, PlanReady)
        assert (
            "the shares are from the exact method, because HiGHS found no proved optimum" in plan.plan.reason
        )
        planned = Planner(PROFILE, POLICY).plan(situation(8))
        assert plan.plan.pipelines == planned.pipelines
        problems: asyncio.Queue[str] = asyncio.Queue()
        scene.service.check_solver(problems.put_nowait)
        assert 'planner.batch_solver = "exact"' in await asyncio.wait_for(problems.get(), PATIENCE_S)

    play(Scene(tmp_path), story)


def test_a_process_that_is_started_in_advance_does_the_next_build(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        scene.service.prepare()
        assert scene.service._next_process_task is not None
        await scene.service._next_process_task
        expected = scene.pids()
        scene.service.build(build())
        assert isinstance(await asyncio.wait_for(scene.fed.get(), PATIENCE_S), TemplatesReady)
        assert len(expected) == 1 and scene.pids() <= expected
        await scene.settled()

    play(Scene(tmp_path), story)


@pytest.mark.parametrize("ending", ["cancelled", "closed", "found on disk"])
def test_an_unneeded_process_that_was_started_in_advance_ends(tmp_path: Path, ending: str) -> None:
    if ending == "found on disk":
        built(tmp_path, build())

    async def story(scene: Scene) -> None:
        scene.service.prepare()
        assert scene.service._next_process_task is not None
        await scene.service._next_process_task
        [pid] = scene.pids()
        match ending:
            case "cancelled":
                scene.service.cancel(CancelTemplates(cause="c", job_id="gpt-1"))
            case "closed":
                await scene.service.close()
            case _:
                assert isinstance(await scene.ask(build()), TemplatesReady)
        await until_async(lambda: not is_alive(pid))

    play(Scene(tmp_path), story)


def test_a_build_does_not_take_a_process_that_is_dismissed_while_it_starts(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        service, begun = scene.service, asyncio.Event()
        dismissed, later = PlanProcess(COMMAND), PlanProcess(COMMAND)

        async def start(process: PlanProcess) -> PlanProcess:
            await begun.wait()
            return process

        service._next_process_task = asyncio.ensure_future(start(dismissed))
        taking = asyncio.ensure_future(service._next_process())
        await asyncio.sleep(0)
        service.cancel(CancelTemplates(cause="c", job_id="another"))
        await asyncio.sleep(0)
        service._next_process_task = expecting = asyncio.ensure_future(start(later))
        begun.set()
        assert await taking not in (dismissed, later)
        assert service._next_process_task is expecting

    play(Scene(tmp_path), story)


def test_too_few_nodes_to_start_with_the_wanted_tolerance_is_a_pause(tmp_path: Path) -> None:
    _, answer = answers(tmp_path, build(msgspec.structs.replace(POLICY, tolerate=3)), asking(3))
    assert isinstance(answer, PlanImpossible) and answer.too_few and answer.needed == 4
    assert "tolerance.failures = 3" in answer.reason and "at most 2" in answer.reason


def test_later_a_job_goes_on_with_less_than_its_tolerance(tmp_path: Path) -> None:
    _, plan = answers(tmp_path, build(), asking(2))
    assert isinstance(plan, PlanReady)
    alone = replace(situation(1), previous=plan.plan)
    _, again = answers(tmp_path, build(), ComputePlan(cause="c", generation=2, situation=alone))
    assert isinstance(again, PlanReady) and again.plan.nodes == ("node-0",)


def test_a_model_that_needs_more_nodes_than_there_are_waits_for_them(tmp_path: Path) -> None:
    policy = msgspec.structs.replace(POLICY, tolerate=0, device_memory_bytes=8_000)
    ready, answer = answers(tmp_path, build(policy, max_nodes=2), asking(1))
    assert isinstance(ready, TemplatesReady)
    assert isinstance(answer, PlanImpossible) and answer.too_few and (answer.needed or 0) > 1


def test_lost_state_is_not_a_pause(tmp_path: Path) -> None:
    _, plan = answers(tmp_path, build(), asking(2))
    assert isinstance(plan, PlanReady)
    lost = replace(situation(2, layers=3), previous=plan.plan)
    _, answer = answers(tmp_path, build(), ComputePlan(cause="c", generation=2, situation=lost))
    assert isinstance(answer, PlanImpossible) and not answer.too_few


@pytest.mark.parametrize("layers", [3, 5])
def test_a_profile_of_another_model_is_detected_at_the_start(tmp_path: Path, layers: int) -> None:
    asked = ComputePlan(cause="c", generation=1, situation=situation(4, layers=layers))
    _, answer = answers(tmp_path, build(), asked)
    assert isinstance(answer, PlanImpossible) and not answer.too_few
    assert "4 layers" in answer.reason and f"has {layers}" in answer.reason
    assert "planner.profile" in answer.reason


def test_a_speculative_plan_is_used_when_it_is_requested(tmp_path: Path) -> None:
    """It is used for exactly the expected situation; any other is planned when it is requested."""

    async def story(scene: Scene) -> None:
        await scene.ask(build())
        first = await scene.ask(asking(4))
        assert isinstance(first, PlanReady)
        planner, planned = scene.service._planner, list[Situation]()
        assert planner is not None
        plan = planner.plan

        def counted(asked: Situation) -> Plan:
            planned.append(asked)
            return plan(asked)

        planner.plan = counted  # type: ignore[method-assign]
        for lost in ("node-1", "node-2"):  # Two losses in a row: one plan, for the remaining nodes.
            left = {name: 1 for name in first.plan.nodes if name not in ("node-1", lost)}
            foreseen = PlanAhead(cause="c", devices=left, previous=first.plan, speeds={}, horizon_s=None)
            scene.service.compute(foreseen)
        await until_async(lambda: planned)
        asked = expected_situation(foreseen)
        answer = await scene.ask(ComputePlan(cause="c", generation=2, situation=asked))
        assert isinstance(answer, PlanReady) and answer.plan == plan(asked)
        assert planned == [asked]
        scene.service.compute(foreseen)
        await until_async(lambda: len(planned) == 2)
        other = replace(asked, speeds={"node-0": 0.5})
        answer = await scene.ask(ComputePlan(cause="c", generation=2, situation=other))
        assert isinstance(answer, PlanReady) and answer.plan == plan(other)
        assert planned == [asked, asked, other]

    play(Scene(tmp_path), story)


def test_comparing_a_plan_does_not_make_it_the_plan(tmp_path: Path) -> None:
    _, plan = answers(tmp_path, build(), asking(4))
    assert isinstance(plan, PlanReady)
    slow = replace(situation(4), previous=plan.plan, speeds={"node-1": 0.25})
    _, answer = answers(tmp_path, build(), ComparePlan(cause="c", generation=3, situation=slow))
    assert isinstance(answer, PlanCompared) and (answer.cause, answer.generation) == ("c", 3)
    assert 0 < answer.best_s < answer.current_s
    lost = replace(situation(4, layers=3), previous=plan.plan, speeds={"node-1": 0.25})
    _, answer = answers(tmp_path, build(), ComparePlan(cause="c", generation=3, situation=lost))
    assert isinstance(answer, PlanCompared) and answer.best_s == answer.current_s, "there is none"


def test_likely_losses_after_a_plan_are_planned_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "PLAN_LOSSES_AFTER_S", 0.0)

    async def story(scene: Scene) -> None:
        scene.service.build(build(max_nodes=22))
        await scene.fed.get()
        answer = await scene.ask(asking(22))
        assert isinstance(answer, PlanReady)
        planner = scene.service._planner
        assert planner is not None
        await until_async(lambda: not scene.service._work)
        assert scene.fed.empty(), "nothing is fed"
        made = len(planner.instantiator(22)._of)
        losses = list(likely_losses(situation(22), answer.plan))
        assert [len(loss.nodes) for loss in losses] == [21, 20]
        for loss in losses:
            assert {device.node for device in loss.holdings} == set(loss.nodes)
            assert planner.plan(loss) == Planner(PROFILE, POLICY).plan(loss)
        assert len(planner.instantiator(22)._of) == made, "there was nothing new in them"

    play(Scene(tmp_path), story)


def test_a_loss_without_a_plan_ends_planning_ahead_quietly(tmp_path: Path) -> None:
    planner = Planner(PROFILE, msgspec.structs.replace(POLICY, minimum="oobleck"))
    planner.precompute(2)
    plan = planner.plan(situation(2))
    with pytest.raises(PlanningError):
        planner.plan(next(likely_losses(situation(2), plan)))
    plan_likely_losses(planner, situation(2), plan)


def test_a_model_that_fits_nowhere_fails_with_the_reason(tmp_path: Path) -> None:
    (answer,) = answers(tmp_path, build(msgspec.structs.replace(POLICY, device_memory_bytes=10)))
    assert isinstance(answer, TemplatesFailed) and answer.job_id == "gpt-1"
    assert "memory" in answer.reason or "device has" in answer.reason


def test_a_batch_with_too_few_microbatches_recommends_one(tmp_path: Path) -> None:
    (answer,) = answers(tmp_path, build(msgspec.structs.replace(POLICY, global_batch=8, tolerate=3)))
    assert isinstance(answer, TemplatesFailed)
    assert "16" in answer.reason and "global_batch" in answer.reason


def test_a_plan_without_templates_is_reported_as_a_bug(tmp_path: Path) -> None:
    (answer,) = answers(tmp_path, asking(1))
    assert isinstance(answer, PlanImpossible) and "bug" in answer.reason


# --- while the process works ---------------------------------------------------------------------

SLOW = """
import sys, time
import planner.planner as planner
from planner.pipelines.instantiation import Instantiator
quick = Instantiator.best
made = []
def slow(self, nodes):
    if nodes not in made:
        made.append(nodes)
        time.sleep(0.0 if len(made) == 1 else {pause_s})
    return quick(self, nodes)
Instantiator.best = slow
from ftd.coordinator.plan_worker import main
main()
"""


def slow(directory: Path, pause_s: float) -> list[str]:
    """Run the real process with a pause for every number of nodes but the first."""
    return program(directory, SLOW.format(pause_s=pause_s))


def test_a_plan_needs_neither_all_templates_nor_the_event_loop(tmp_path: Path) -> None:
    """The first answer has the present number of nodes; other numbers are computed on request; the loop keeps
    running.
    """

    async def story(scene: Scene) -> None:
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.001)

        turning = asyncio.ensure_future(turn())
        assert isinstance(await scene.ask(build(max_nodes=8)), TemplatesReady)
        [pid] = scene.pids()  # The rest is still being made.
        for nodes in (4, 3, 8):
            answer = await scene.ask(asking(nodes))
            assert isinstance(answer, PlanReady) and len(answer.plan.nodes) == nodes
        assert scene.pids() == {pid} and turns > 10
        turning.cancel()
        scene.service.cancel(CancelTemplates(cause="c", job_id="another"))
        assert is_alive(pid)
        scene.service.cancel(CancelTemplates(cause="c", job_id="gpt-1"))
        await until_async(lambda: not is_alive(pid))

    play(Scene(tmp_path, slow(tmp_path, 30.0)), story)


def test_progress_is_reported_when_it_takes_over_a_second(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        await scene.ask(build(max_nodes=12))
        await scene.settled()
        numbers = [progress for progress in scene.seen if progress is not None]
        assert len(numbers) >= 2 and numbers == sorted(numbers)
        assert {total for _, total in numbers} == {12} and all(0 <= done <= 12 for done, _ in numbers)
        assert scene.seen[-1] is None, "there is nothing to show any more"

    play(Scene(tmp_path, slow(tmp_path, 0.18)), story)


def test_quick_planning_shows_no_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftd.coordinator.planning.PROGRESS_AFTER_S", PATIENCE_S)

    async def story(scene: Scene) -> None:
        await scene.ask(build())
        await scene.settled()
        assert scene.seen == []

    play(Scene(tmp_path), story)


def test_a_cluster_that_outgrows_its_templates_plans_at_once_and_extends_them(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        await scene.ask(build(max_nodes=4))
        await scene.settled()
        scene.service.build(build(max_nodes=9))
        answer = await scene.ask(asking(7))
        while not isinstance(answer, PlanReady):
            answer = await scene.fed.get()
        assert len(answer.plan.nodes) == 7
        await scene.settled()
        assert scene.cache.key(work_for(9)) in {path.stem for path in (tmp_path / "plans").iterdir()}

    play(Scene(tmp_path), story)


def test_the_process_ends_with_the_service(tmp_path: Path) -> None:
    pids: list[int] = []

    async def story(scene: Scene) -> None:
        await scene.ask(build())
        pids.extend(scene.pids())

    play(Scene(tmp_path, slow(tmp_path, 30.0)), story)
    until(lambda: not is_alive(pids[0]))


def test_the_process_ends_with_a_coordinator_that_is_killed(tmp_path: Path) -> None:
    """After a SIGKILL only the kernel can clean up."""
    code = f"""
import asyncio, sys
sys.path[:0] = {[str(Path(__file__).parent)]!r}
from pathlib import Path
from test_planning import Scene, build, slow
async def main():
    scene = Scene(Path({str(tmp_path)!r}), slow(Path({str(tmp_path)!r}), 30.0))
    await scene.ask(build())
    print(*scene.pids(), flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""

    async def story() -> int:
        parent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE
        )
        assert parent.stdout is not None
        pid = int(await asyncio.wait_for(parent.stdout.readline(), PATIENCE_S))
        assert is_alive(pid)
        parent.kill()
        await parent.communicate()
        return pid

    pid = asyncio.run(story())
    until(lambda: not is_alive(pid))


# --- a process that fails ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import sys; sys.exit('out of luck')", "ended with 1: out of luck"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            "ended with -9: it wrote nothing to stderr",
        ),
        ("print('hello, this is a text of more than four bytes')", "frame of 1751477356 bytes"),
        ("import sys; sys.stdout.buffer.write(b'\\0\\0\\0\\5hello')", "invalid answer"),
        ("import sys; sys.stdout.buffer.write(b'\\0\\0\\1\\0half of it')", "ended with 0"),
        (
            "import sys, msgspec; from ftd.coordinator.plan_worker import PartialResult, write_frame; "
            "write_frame(sys.stdout.buffer, PartialResult(precomputed=msgspec.Raw(msgspec.msgpack.encode([1, 2]))))",
            "unusable",
        ),
    ],
)
def test_a_process_that_fails_twice_is_reported_with_its_error(tmp_path: Path, code: str, says: str) -> None:
    async def story(scene: Scene) -> None:
        answer = await scene.ask(build())
        assert isinstance(answer, TemplatesFailed)
        assert says in answer.reason
        await scene.settled()

    play(Scene(tmp_path, program(tmp_path, code)), story)
    assert not list((tmp_path / "plans").glob("*"))


def test_a_process_that_cannot_be_started_is_reported_with_its_error(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        answer = await scene.ask(build())
        assert isinstance(answer, TemplatesFailed) and "cannot be started" in answer.reason

    play(Scene(tmp_path, [str(tmp_path / "nothing")]), story)


def test_a_process_that_is_killed_once_is_started_again(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
mark = Path({str(tmp_path / "mark")!r})
if not mark.exists():
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)
from ftd.coordinator.plan_worker import main
main()
"""

    async def story(scene: Scene) -> None:
        assert isinstance(await scene.ask(build()), TemplatesReady)

    play(Scene(tmp_path, program(tmp_path, code)), story)


# --- the cache -----------------------------------------------------------------------------------


def work_for(
    max_nodes: int = 6, profile: ModelProfile = PROFILE, policy: Policy = POLICY
) -> PrecomputeRequest:
    return PrecomputeRequest(profile=profile, policy=policy, max_nodes=max_nodes, present=4)


def built(directory: Path, effect: BuildTemplates, command: list[str] = COMMAND) -> Scene:
    """Return a scene in which the build has finished."""
    scene = Scene(directory, command)

    async def story(scene: Scene) -> None:
        assert isinstance(await scene.ask(effect), TemplatesReady)
        await scene.settled()
        assert isinstance(await scene.ask(asking(3)), PlanReady)

    play(scene, story)
    return scene


def test_the_same_job_is_read_from_the_disk_and_starts_no_process(tmp_path: Path) -> None:
    first = built(tmp_path, build())
    assert (first.cache.hits, first.cache.misses) == (0, 1)
    nobody = [str(tmp_path / "nothing")]
    again = built(tmp_path, build(job_id="gpt-2"), command=nobody)
    assert (again.cache.hits, again.cache.misses, again.cache.discarded) == (1, 0, 0)


def test_every_input_is_in_the_key(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    quicker = replace(PROFILE, layers=(*PROFILE.layers[1:], replace(LAYER, forward_ms=9.99)))
    works = [
        work_for(),
        work_for(7),
        work_for(profile=quicker),
        work_for(policy=msgspec.structs.replace(POLICY, tolerate=0)),
    ]
    assert len({cache.key(work) for work in works}) == len(works)
    assert cache.key(work_for()) == cache.key(msgspec.structs.replace(work_for(), present=1))


def test_a_changed_planner_does_not_find_cached_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PlanCache(tmp_path)
    before = cache.key(work_for())
    monkeypatch.setattr("ftd.coordinator.plan_cache._planner_code_digest", lambda: "changed")
    assert cache.key(work_for()) != before


@pytest.mark.parametrize("module", ["planner.py", "mapping/paths.py"])
def test_the_key_changes_with_any_module_of_the_planner(tmp_path: Path, module: str) -> None:
    package = tmp_path / "planner"
    shutil.copytree(Path(planner.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    before = code_digest(package)
    assert before == code_digest(Path(planner.__file__).parent)
    with (package / module).open("a") as written:
        written.write("# changed\n")
    assert code_digest(package) != before


@pytest.mark.parametrize(
    "damage",
    ["truncated", "flipped", "foreign", "empty", "renamed", "directory", "other layers", "no msgpack"],
)
def test_an_untrusted_file_is_computed_again(tmp_path: Path, damage: str) -> None:
    planner = Planner(PROFILE, POLICY)
    planner.precompute(6)
    precomputed = msgspec.msgpack.encode(planner.precomputed())
    cache = PlanCache(tmp_path / "plans")
    key = cache.key(work_for())
    cache.write(key, precomputed)
    assert cache.read(key) == precomputed
    (path,) = (tmp_path / "plans").iterdir()
    good = path.read_bytes()
    match damage:
        case "truncated":
            path.write_bytes(good[:-10])
        case "flipped":
            path.write_bytes(good[:-10] + bytes([good[-10] ^ 1]) + good[-9:])
        case "foreign":
            path.write_bytes(b"#!/bin/sh\n" * 100)
        case "empty":
            path.write_bytes(b"")
        case "renamed":
            path.rename(path.with_stem(cache.key(work_for(9))))
        case "directory":
            path.unlink()
            path.mkdir()
        case "other layers":
            shorter = Planner(replace(PROFILE, layers=PROFILE.layers[:3]), POLICY)
            shorter.precompute(6)
            cache.write(key, msgspec.msgpack.encode(shorter.precomputed()))
        case _:
            cache.write(key, b"\xc1 is no msgpack")
    again = built(tmp_path, build(max_nodes=9 if damage == "renamed" else 6))
    assert again.cache.discarded == 1


def test_only_the_newest_files_are_retained(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path)
    for number in range(MAX_FILES + 3):
        cache.write(f"{number:03}", b"x")
        os.utime(tmp_path / f"{number:03}.plan", (number, number))
    kept = sorted(path.stem for path in tmp_path.iterdir())
    assert kept == [f"{number:03}" for number in range(3, MAX_FILES + 3)]


def test_an_unwritable_directory_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "plans").write_text("a file is in the way")
    built(tmp_path, build())
