"""Precomputation before the first failure: its progress, its export and its restoration."""

from dataclasses import replace

import msgspec
import pytest
from msgspec import structs

from planner.errors import InfeasibleError, RestoreError
from planner.pipelines.instantiation import Instantiator
from planner.planner import Planner
from planner.precomputed import Precomputed
from planner.stages.costs import StageCosts
from planner.templates import Templates
from planner.values import Policy
from tests.helpers.oracles import profile_of


def planner_of(layers: int = 8, **changes: int) -> Planner:
    settings = {"global_batch": 64, "microbatch_rows": 4, **changes}
    return Planner(profile_of([1.0] * layers, memory_bytes=120), Policy(**settings))  # type: ignore[arg-type]


def made(planner: Planner, nodes: int = 7) -> Precomputed:
    planner.precompute(nodes)
    return planner.precomputed()


def test_progress_is_reported_and_likely_sizes_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    best = Instantiator.best

    def noted(self: Instantiator, nodes: int) -> object:
        asked.append(nodes)
        return best(self, nodes)

    monkeypatch.setattr(Instantiator, "best", noted)
    reported: list[tuple[int, int]] = []
    planner_of().precompute(7, lambda done, of: reported.append((done, of)), present=5)
    assert asked == [5, 4, 3, 2, 6, 7]
    assert reported == [(done, 6) for done in range(7)]
    asked.clear()
    planner_of().precompute(4)
    assert asked == [4, 3, 2]


def test_a_planner_restored_from_bytes_plans_alike_and_maps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = planner_of()
    payload = msgspec.msgpack.encode(made(first))
    second = planner_of()
    second.restore(msgspec.msgpack.decode(payload, type=Precomputed))
    assert second.precomputed() == first.precomputed()

    def never(*_: object) -> None:
        raise AssertionError("compute it again")

    monkeypatch.setattr("planner.templates.best_templates", never)
    monkeypatch.setattr("planner.pipelines.search.Search.quickest", never)
    for count in range(2, 8):
        situation = first.initial_situation([f"node-{number}" for number in range(count)])
        assert second.plan(situation) == first.plan(situation)


def test_nothing_precomputed_is_an_error() -> None:
    with pytest.raises(InfeasibleError, match="precompute first"):
        planner_of().precomputed()


def test_a_cluster_that_outgrew_what_was_restored_gets_new_templates() -> None:
    first, second = planner_of(), planner_of()
    second.restore(made(first, 4))
    situation = first.initial_situation([f"node-{number}" for number in range(6)])
    assert second.plan(situation) == planner_of().plan(situation)


def test_the_precomputation_of_another_job_is_rejected() -> None:
    for other in (planner_of(layers=9), planner_of(global_batch=60), planner_of(devices_per_node=2)):
        target = planner_of()
        with pytest.raises(RestoreError, match="belong to this job"):
            target.restore(made(other))
        with pytest.raises(InfeasibleError):
            target.precomputed()


def test_invalid_precomputations_are_rejected() -> None:
    planner = planner_of()
    good = made(planner)
    template, best = good.templates[0], good.instantiations[4]
    stages = template.stages
    backwards = structs.replace(template, stages=tuple(reversed(stages)))
    large = structs.replace(
        template,
        stages=(
            structs.replace(stages[0], end_layer=7),
            structs.replace(stages[1], first_layer=7),
        ),
    )
    wrong = [
        replace(good, nodes=1),
        replace(good, templates=()),
        replace(good, templates=good.templates[1:]),
        replace(good, templates=tuple(reversed(good.templates))),
        replace(good, templates=(backwards, *good.templates[1:])),
        replace(good, templates=(large, *good.templates[1:])),
        replace(good, instantiations={9: best}),
        replace(good, instantiations={3: best}),
        replace(good, instantiations={4: replace(best, sizes=(9, 2))}),
        replace(good, instantiations={4: replace(best, sizes=())}),
        replace(good, instantiations={4: replace(best, microbatches=(1, 1))}),
        replace(good, instantiations={4: replace(best, microbatches=(16, 0))}),
        replace(good, instantiations={4: replace(best, pipeline_ms=())}),
    ]
    for broken in wrong:
        with pytest.raises(RestoreError):
            planner.restore(broken)
    planner.restore(good)


def test_templates_made_before_are_taken_as_they_are() -> None:
    costs = StageCosts(profile_of([1.0] * 4), Policy(global_batch=16, microbatch_rows=4))
    first = Templates(costs, 4)
    assert Templates(costs, 4, first.by_nodes).by_nodes == first.by_nodes
