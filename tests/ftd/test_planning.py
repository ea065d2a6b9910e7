"""Planning beside the event loop: answers, in order, and the planner's errors in the user's words."""

import asyncio
from dataclasses import replace
from typing import Any

from ftd.coordinator.planning import PlanningService
from ftd.driver import Driver
from planner.values import Device, LayerProfile, ModelProfile, Policy, Situation
from statemachine.effects import BuildTemplates, ComputePlan
from statemachine.events import Event, PlanImpossible, PlanReady, TemplatesFailed, TemplatesReady
from statemachine.values import Job, Profiled

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


def build(policy: Policy = POLICY, profile: ModelProfile = PROFILE, max_nodes: int = 6) -> BuildTemplates:
    job = Job(job_id="gpt-1", name="gpt", steps=1, policy=policy)
    return BuildTemplates(cause="c-b", profiled=Profiled(job=job, profile=profile), max_nodes=max_nodes)


def situation(nodes: int, layers: int = 4) -> Situation:
    names = tuple(f"node-{index}" for index in range(nodes))
    held = frozenset(range(layers))
    return Situation(nodes=names, holdings={Device(node=name, index=0): held for name in names})


def answers(*effects: Any) -> list[Event]:
    """What the service feeds for these effects."""

    class Idle:
        def step(self, event: Event) -> list[Any]:
            return []

    async def scene() -> list[Event]:
        fed: asyncio.Queue[Event] = asyncio.Queue()
        service = PlanningService(fed.put_nowait, Driver(Idle(), lambda _: None))
        service.warm_up()
        for effect in effects:
            if isinstance(effect, BuildTemplates):
                service.build(effect)
            else:
                service.plan(effect)
        got = [await asyncio.wait_for(fed.get(), 60) for _ in effects]
        service.close()
        return got

    return asyncio.run(scene())


def test_a_plan_asked_for_at_once_finds_its_templates() -> None:
    ready, plan = answers(build(), ComputePlan(cause="c-p", generation=3, situation=situation(4)))
    assert isinstance(ready, TemplatesReady) and (ready.job_id, ready.cause) == ("gpt-1", "c-b")
    assert isinstance(plan, PlanReady) and (plan.generation, plan.cause) == (3, "c-p")
    assert set(plan.plan.nodes) | set(plan.plan.idle_nodes) == {f"node-{i}" for i in range(4)}
    assert sum(pipeline.microbatches for pipeline in plan.plan.pipelines) == 8


def test_too_few_nodes_to_start_with_the_wanted_tolerance_is_a_pause() -> None:
    _, answer = answers(
        build(replace(POLICY, tolerate=3)), ComputePlan(cause="c", generation=1, situation=situation(3))
    )
    assert isinstance(answer, PlanImpossible) and answer.too_few and answer.needed == 4
    assert "tolerance.failures = 3" in answer.reason and "at most 2" in answer.reason


def test_later_a_job_goes_on_with_less_than_its_tolerance() -> None:
    first = ComputePlan(cause="c", generation=1, situation=situation(2))
    _, plan = answers(build(), first)
    assert isinstance(plan, PlanReady)
    alone = replace(situation(1), previous=plan.plan)
    _, again = answers(build(), ComputePlan(cause="c", generation=2, situation=alone))
    assert isinstance(again, PlanReady) and again.plan.nodes == ("node-0",)


def test_a_model_that_needs_more_nodes_than_there_are_waits_for_them() -> None:
    policy = replace(POLICY, tolerate=0, device_memory_bytes=8_000)
    ready, answer = answers(
        build(policy, max_nodes=2), ComputePlan(cause="c", generation=1, situation=situation(1))
    )
    assert isinstance(ready, TemplatesReady)
    assert isinstance(answer, PlanImpossible) and answer.too_few and (answer.needed or 0) > 1


def test_lost_state_is_not_a_pause() -> None:
    _, plan = answers(build(), ComputePlan(cause="c", generation=1, situation=situation(2)))
    assert isinstance(plan, PlanReady)
    lost = replace(situation(2, layers=3), previous=plan.plan)
    _, answer = answers(build(), ComputePlan(cause="c", generation=2, situation=lost))
    assert isinstance(answer, PlanImpossible) and not answer.too_few


def test_a_model_that_fits_nowhere_fails_with_the_reason() -> None:
    (answer,) = answers(build(replace(POLICY, device_memory_bytes=10)))
    assert isinstance(answer, TemplatesFailed) and answer.job_id == "gpt-1"
    assert "memory" in answer.reason or "device has" in answer.reason


def test_a_batch_with_too_few_microbatches_recommends_one() -> None:
    (answer,) = answers(build(replace(POLICY, global_batch=8, tolerate=3)))
    assert isinstance(answer, TemplatesFailed)
    assert "16" in answer.reason and "global_batch" in answer.reason


def test_a_plan_without_templates_is_our_bug_and_is_said() -> None:
    (answer,) = answers(ComputePlan(cause="c", generation=1, situation=situation(1)))
    assert isinstance(answer, PlanImpossible) and "bug" in answer.reason
