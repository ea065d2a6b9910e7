"""The schedule of pipelines whose dead workers' microbatches go to peers."""

import re
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftd.errors import ConfigurationError
from ftd.replay.rerouting import (
    MemoryCap,
    Pipeline,
    Schedule,
    Worker,
    busiest_s,
    estimate_iteration_s,
    lost_stages,
    reroute,
    schedule,
)

PAGE = Path(__file__).parents[3] / "docs" / "explanation" / "rerouting.md"


def uniform(stages: int, microbatches: int, slot_s: float = 1.0) -> Pipeline:
    times_s = (slot_s,) * stages
    return Pipeline(
        forward_s=times_s, backward_input_s=times_s, backward_weight_s=times_s, microbatches=microbatches
    )


SMALL = [uniform(4, 6)] * 3
"""Three pipelines of 4 stages and 6 microbatches, in which all operations take one slot."""
DEAD = [(1, 2)]
"""Stage 2, from 0, of the pipeline in the middle."""


@st.composite
def cases(draw: st.DrawFn, most: int = 10, fewest: int = 1) -> tuple[list[Pipeline], set[Worker]]:
    """Draw pipelines of one layout, some of them slower than others, and dead workers that leave every stage one."""
    pipelines, stages = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    times = st.tuples(*[st.sampled_from([0.1, 0.25, 1.0, 1.7])] * stages)
    forward_s, backward_s, weight_s = draw(times), draw(times), draw(times)
    paces = draw(st.lists(st.sampled_from([1.0, 1.3]), min_size=pipelines, max_size=pipelines))
    dead: set[Worker] = set()
    for worker in draw(
        st.lists(st.tuples(st.integers(0, pipelines - 1), st.integers(0, stages - 1)), max_size=4)
    ):
        if not lost_stages(pipelines, stages, {*dead, worker}):
            dead.add(worker)
    made = [
        Pipeline(
            forward_s=tuple(pace * each for each in forward_s),
            backward_input_s=tuple(pace * each for each in backward_s),
            backward_weight_s=tuple(pace * each for each in weight_s),
            microbatches=draw(st.integers(fewest, most)),
        )
        for pace in paces
    ]
    return made, dead


def expected_s(pipeline: Pipeline, kind: str, stage: int, decoupled: bool) -> float:
    if kind == "B" and not decoupled:
        return pipeline.backward_input_s[stage] + pipeline.backward_weight_s[stage]
    return {"F": pipeline.forward_s, "B": pipeline.backward_input_s, "W": pipeline.backward_weight_s}[kind][
        stage
    ]


def check_valid(made: Schedule, pipelines: list[Pipeline], decoupled: bool, cap: MemoryCap) -> None:
    """Check what every schedule must satisfy, from the list of its operations alone."""
    stages = pipelines[0].stages
    kinds = "FBW" if decoupled else "FB"
    iterations = range(len(made.ends_s))
    begins: dict[tuple[int, str, int, int, int], float] = {}
    ends: dict[tuple[int, str, int, int, int], float] = {}
    for (pipeline, stage), operations in made.operations.items():
        assert all(one.end_s <= other.begin_s for one, other in pairwise(operations))
        for each in operations:
            lasted_s = expected_s(pipelines[pipeline], each.kind, stage, decoupled)
            assert each.end_s - each.begin_s == pytest.approx(lasted_s)
            key = (each.iteration, each.kind, each.pipeline, stage, each.microbatch)
            assert key not in begins
            begins[key], ends[key] = each.begin_s, each.end_s
        kept, most = 0, 0
        for each in operations:
            kept += (each.kind == "F") - (each.kind == kinds[-1])
            most = max(most, kept)
        assert cap == "none" or most <= stages - stage
    assert set(begins) == {
        (i, kind, p, s, m)
        for i in iterations
        for kind in kinds
        for p, pipeline in enumerate(pipelines)
        for s in range(stages)
        for m in range(pipeline.microbatches)
    }
    applied = Counter({(i, s): 0.0 for i in iterations for s in range(stages)})
    for (i, _, _, s, _), end_s in ends.items():
        applied[i, s] = max(applied[i, s], end_s)
    for (i, kind, p, s, m), begin_s in begins.items():
        if kind == "F":
            assert i == 0 or begin_s >= applied[i - 1, s]
            assert s == 0 or begin_s >= ends[i, "F", p, s - 1, m]
        elif kind == "B":
            assert begin_s >= ends[i, "F", p, s, m]
            assert s == stages - 1 or begin_s >= ends[i, "B", p, s + 1, m]
        else:
            assert begin_s >= ends[i, "B", p, s, m]
    assert made.ends_s == tuple(max(applied[i, s] for s in range(stages)) for i in iterations)


@given(cases(), st.booleans(), st.booleans(), st.sampled_from(["none", "1f1b"]))
def test_every_schedule_is_valid_and_keeps_the_lower_bounds(
    case: tuple[list[Pipeline], set[Worker]], decoupled: bool, staggered: bool, cap: MemoryCap
) -> None:
    pipelines, dead = case
    made = schedule(pipelines, dead, decoupled=decoupled, staggered=staggered, memory_cap=cap)
    check_valid(made, pipelines, decoupled, cap)
    assert set(made.operations) | dead == {
        (p, s) for p, each in enumerate(pipelines) for s in range(each.stages)
    }
    assert all(
        end_s >= (index + 1) * busiest_s(pipelines, dead) * (1 - 1e-9)
        for index, end_s in enumerate(made.ends_s)
    )
    fastest = [min(pipelines, key=lambda each: each.microbatch_s(s)) for s in range(pipelines[0].stages)]
    path_s = sum(each.forward_s[s] + each.backward_input_s[s] for s, each in enumerate(fastest))
    assert made.ends_s[0] >= path_s + fastest[0].backward_weight_s[0] * (1 - 1e-9)


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 3), st.sampled_from([1.0, 0.1, 3e-4]))
def test_without_failures_the_time_is_that_of_1f1b(
    stages: int, microbatches: int, count: int, slot_s: float
) -> None:
    pipelines = [uniform(stages, microbatches, slot_s)] * count
    for cap in ("none", "1f1b"):
        made = schedule(pipelines, decoupled=False, staggered=False, memory_cap=cap)
        assert made.iteration_s == pytest.approx((microbatches + stages - 1) * 3 * slot_s)


@given(cases())
def test_a_pipeline_without_dead_workers_runs_as_if_it_were_alone(
    case: tuple[list[Pipeline], set[Worker]],
) -> None:
    pipelines, _ = case
    alone = [schedule([each], decoupled=True, staggered=False).ends_s[0] for each in pipelines]
    assert schedule(pipelines, decoupled=True, staggered=False).ends_s[0] == pytest.approx(max(alone))


@given(cases())
def test_rerouted_microbatches_are_spread_evenly(case: tuple[list[Pipeline], set[Worker]]) -> None:
    """No worker could hand a rerouted microbatch to a peer and the later one of the two be done earlier."""
    pipelines, dead = case
    given_to = Counter((peer, stage) for (_, stage, _), peer in reroute(pipelines, dead).items())
    assert sum(given_to.values()) == sum(pipelines[p].microbatches for p, _ in dead)
    for (peer, stage), count in given_to.items():
        work = count + pipelines[peer].microbatches
        for other, each in enumerate(pipelines):
            if (other, stage) not in dead:
                one_more = each.microbatches + given_to[other, stage] + 1
                assert (
                    work * pipelines[peer].microbatch_s(stage) <= one_more * each.microbatch_s(stage) + 1e-9
                )


def test_the_small_case_takes_27_36_29_and_27_slots() -> None:
    found = [
        schedule(SMALL, dead, decoupled=decoupled, staggered=staggered).iteration_s
        for dead, decoupled, staggered in [
            ([], False, False),
            (DEAD, False, False),
            (DEAD, True, False),
            (DEAD, True, True),
        ]
    ]
    assert found == [27, 36, 29, 27]
    assert busiest_s(SMALL, DEAD) == 27


@pytest.mark.parametrize(
    ("stage", "coupled", "decoupled", "coupled_1f1b", "decoupled_1f1b"),
    [(1, 36, 28, 43, 32), (2, 36, 29, 44, 33)],
)
def test_the_small_case_depends_on_the_dead_stage_and_on_memory(
    stage: int, coupled: int, decoupled: int, coupled_1f1b: int, decoupled_1f1b: int
) -> None:
    """Memory decides: a worker that keeps a rerouted microbatch cannot begin one of its own."""

    def slots(is_decoupled: bool, cap: MemoryCap) -> float:
        return schedule(
            SMALL, [(1, stage)], decoupled=is_decoupled, staggered=False, memory_cap=cap
        ).iteration_s

    assert (slots(False, "none"), slots(True, "none")) == (coupled, decoupled)
    assert (slots(False, "1f1b"), slots(True, "1f1b")) == (coupled_1f1b, decoupled_1f1b)
    # The first microbatch's way to the stage, the work of a peer, and the last backward's way back.
    assert coupled >= stage + 27 + 2 * stage
    assert decoupled == stage + 27


def render(made: Schedule, slot_s: float, begin_s: float = 0.0, end_s: float | None = None) -> str:
    """Return the schedule as text: one line for each worker, one cell for each slot of ``slot_s``.

    A cell has the operation's letter and the microbatch's number; an operation of two slots fills two cells.
    The letter is lower case if the microbatch was rerouted from another pipeline. A dot is an idle slot.

    :param begin_s: the first slot's begin.
    :param end_s: the last slot's end; ``None``: the end of the last iteration.
    """
    slots = round(((made.ends_s[-1] if end_s is None else end_s) - begin_s) / slot_s)
    rows: dict[Worker, list[str]] = {}
    for worker, operations in made.operations.items():
        cells = rows[worker] = ["."] * slots
        for each in operations:
            letter = each.kind if each.pipeline == worker[0] else each.kind.lower()
            first, end = (round((at_s - begin_s) / slot_s) for at_s in (each.begin_s, each.end_s))
            for slot in range(max(first, 0), min(end, slots)):
                cells[slot] = f"{letter}{each.microbatch}"
    width = max(len(cell) for cells in rows.values() for cell in cells)
    lines = []
    for pipeline, stage in sorted({*rows, *made.dead}):
        cells = rows.get((pipeline, stage), ["dead"])
        shown = " ".join(cell.ljust(width) for cell in cells).rstrip()
        lines.append(f"pipeline {pipeline} stage {stage} | {shown}\n")
    return "".join(lines)


def test_the_small_case_is_rendered_slot_by_slot() -> None:
    """The page about rerouting shows the four schedules."""
    coupled = schedule(SMALL, DEAD, decoupled=False, staggered=False)
    decoupled = schedule(SMALL, DEAD, decoupled=True, staggered=False)
    steady = schedule(SMALL, DEAD, decoupled=True, staggered=True)
    shown = [
        render(schedule(SMALL, decoupled=False, staggered=False), 1.0),
        render(coupled, 1.0),
        render(decoupled, 1.0),
        render(steady, 1.0, begin_s=steady.ends_s[-2]),
    ]
    blocks = re.findall(r"^```text\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert shown == blocks


@pytest.mark.parametrize("decoupled", [False, True])
def test_all_dead_workers_of_a_pipeline_are_replaced(decoupled: bool) -> None:
    """Two pipelines then do the work of three: each of their workers has 9 microbatches."""
    dead = [(1, stage) for stage in range(4)]
    made = schedule(SMALL, dead, decoupled=decoupled, staggered=False)
    assert {len(operations) for operations in made.operations.values()} == {27 if decoupled else 18}
    assert made.iteration_s >= 27


@pytest.mark.parametrize(
    ("decoupled", "staggered", "cap", "error"),
    [
        (True, True, "none", 0.01),
        (True, False, "none", 0.02),
        (True, True, "1f1b", 0.05),
        (False, False, "none", 0.06),
        (False, False, "1f1b", 0.2),
    ],
)
def test_the_estimate_is_close_to_the_full_schedule(
    decoupled: bool, staggered: bool, cap: MemoryCap, error: float
) -> None:
    uneven = Pipeline(
        forward_s=(1.0, 2.0, 1.0),
        backward_input_s=(1.0, 1.5, 2.0),
        backward_weight_s=(1.0, 0.5, 1.0),
        microbatches=90,
    )
    for pipelines, dead in [
        ([uniform(5, 48)] * 6, []),
        ([uniform(5, 80)] * 6, [(0, 2), (3, 3)]),
        ([uniform(4, 50)] * 3, [(1, 2)]),
        ([uniform(4, 64)] * 4, [(0, 1), (1, 1), (2, 1)]),
        ([uneven] * 3, [(2, 1)]),
        ([uneven] * 5, [(2, 0), (1, 2)]),
    ]:
        full_s = schedule(
            pipelines, dead, decoupled=decoupled, staggered=staggered, memory_cap=cap
        ).iteration_s
        estimate_s = estimate_iteration_s(
            pipelines, dead, decoupled=decoupled, staggered=staggered, memory_cap=cap
        )
        assert estimate_s == pytest.approx(full_s, rel=error)


@given(cases())
def test_the_estimate_of_a_short_iteration_is_exact(case: tuple[list[Pipeline], set[Worker]]) -> None:
    pipelines, dead = case
    full_s = schedule(pipelines, dead, decoupled=True, staggered=False).iteration_s
    assert estimate_iteration_s(pipelines, dead, decoupled=True, staggered=False) == pytest.approx(full_s)


def test_a_new_set_of_dead_workers_costs_little_time() -> None:
    """The replay asks once for each set. 3600 operations take 7 ms on the machine of the other benchmarks."""
    pipelines = [uniform(5, 40)] * 6
    took_s = []
    for _ in range(3):
        begin_s = time.process_time()
        schedule(pipelines, [(1, 2), (3, 3)], decoupled=True, staggered=False)
        took_s.append(time.process_time() - begin_s)
    assert min(took_s) < 0.05


def test_bad_input_is_named() -> None:
    with pytest.raises(ConfigurationError, match="all workers of stage 2 are dead"):
        schedule(SMALL, [(0, 2), (1, 2), (2, 2)], decoupled=True, staggered=True)
    with pytest.raises(ConfigurationError, match=r"no worker \(3, 0\)"):
        estimate_iteration_s(SMALL, [(3, 0)], decoupled=True, staggered=True)
    with pytest.raises(ConfigurationError, match="pipeline 1 has 6 microbatches and times of 3, 3, 3 stages"):
        schedule([uniform(4, 6), uniform(3, 6)], decoupled=True, staggered=True)
    with pytest.raises(ConfigurationError, match="pipeline 0 has 0 microbatches"):
        schedule([uniform(4, 0)], decoupled=True, staggered=True)
