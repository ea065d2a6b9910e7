"""Tests of the roll-forward rule, case by case and as properties."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from planner.values import Device, PipelinePlacement, Plan, ReleasedLayers, StagePlacement, StatePart
from statemachine.cluster.rules import Resumption, decide, is_trusted, owned_layers
from statemachine.cluster.sharding import held_parts, only_replicas
from statemachine.messages.values import CommittedStep, DeviceReport, Vote


def device(node: str) -> Device:
    return Device(node=node, index=0)


def plan(*pipelines: tuple[str, ...]) -> Plan:
    """Return a plan in which the nodes of each pipeline own two layers each."""
    placements = tuple(
        PipelinePlacement(
            stages=tuple(
                StagePlacement(first_layer=2 * n, end_layer=2 * n + 2, devices=(device(node),))
                for n, node in enumerate(nodes)
            ),
            first_microbatch=4 * number,
            microbatches=4,
            estimated_s=1.0,
        )
        for number, nodes in enumerate(pipelines)
    )
    return Plan(pipelines=placements, transfers=(), method="initial", reason="", estimated_iteration_s=1.0)


PLAN = plan(("a", "b"), ("c", "d"))
RUNNING = Resumption(generation=3, step=5, vote=None, plan=PLAN)


def at(step: int, *held: int, ready: bool = False) -> tuple[DeviceReport, ...]:
    vote = Vote(loss=float(step), gradient_norm=1.0) if step else None
    return (
        DeviceReport(
            device=0, committed_step=step, ready_step=step + 1 if ready else None, vote=vote, held=held
        ),
    )


def known(step: int) -> CommittedStep:
    return CommittedStep(step=step, vote=Vote(loss=float(step), gradient_norm=1.0))


def test_no_rank_committed_so_all_redo() -> None:
    reports = {"a": at(7, 0, 1, ready=True), "b": at(7, 2, 3), "c": at(7, 0, 1, ready=True)}
    decision = decide(reports, known(7), RUNNING, "abort")
    assert (decision.step, decision.outcome, decision.in_flight) == (7, "redo", True)
    assert decision.holdings[device("b")] == {2, 3}
    assert decision.ready == {}


def test_one_committed_so_all_roll_forward() -> None:
    reports = {"a": at(8, 0, 1), "b": at(7, 2, 3, ready=True), "c": at(7, 0, 1, ready=True)}
    decision = decide(reports, known(7), RUNNING, "abort")
    assert (decision.step, decision.outcome) == (8, "roll_forward")
    assert decision.vote == Vote(loss=8.0, gradient_norm=1.0)
    assert decision.holdings == {
        device("a"): {0, 1},
        device("b"): {2, 3},
        device("c"): {0, 1},
    }


def test_commits_reported_by_dead_nodes_count() -> None:
    reports = {"a": at(7, 0, 1, ready=True), "b": at(7, 2, 3, ready=True)}
    decision = decide(reports, known(8), RUNNING, "abort")
    assert (decision.step, decision.outcome) == (8, "roll_forward")
    assert decision.vote == known(8).vote


def test_layers_kept_from_before_are_not_rolled_forward() -> None:
    """``a`` owns 0 and 1 and still has 2 and 3 of the resume step; gradients exist for 0 and 1 only."""
    reports = {"a": at(5, 0, 1, 2, 3, ready=True), "b": at(6, 2, 3)}
    decision = decide(reports, None, RUNNING, "abort")
    assert decision.holdings[device("a")] == {0, 1}
    same_step = {"a": at(5, 0, 1, 2, 3), "b": at(5, 2, 3)}
    assert decide(same_step, None, RUNNING, "abort").holdings[device("a")] == {0, 1, 2, 3}


def test_gradients_of_an_idle_node_belong_to_an_older_group() -> None:
    """``e`` missed the Resume that listed it to drop its gradients of step 6; generation 3 computed step 6
    again.
    """
    reports = {"a": at(6, 0, 1), "b": at(6, 2, 3), "e": at(5, 0, 1, ready=True)}
    decision = decide(reports, None, RUNNING, "abort")
    assert decision.holdings[device("e")] == frozenset()


def test_gradients_of_a_generation_that_the_journal_lacks_do_not_count() -> None:
    """``a`` owns 2 and 3 in the plan of generation 4. It still has 0 and 1, which it owned before, of step 5."""
    [report] = at(5, 0, 1, 2, 3, ready=True)
    reports = {"a": (structs.replace(report, resumed=4),), "b": at(6, 0, 1)}
    assert decide(reports, None, RUNNING, "abort").holdings[device("a")] == frozenset()
    reports["a"] = (structs.replace(report, resumed=3),)
    assert decide(reports, None, RUNNING, "abort").holdings[device("a")] == {0, 1}


def test_gradients_that_counted_count_again_when_the_resume_did_not_arrive() -> None:
    resumption = Resumption(
        generation=3, step=6, vote=None, plan=plan(("a", "b")), ready={device("c"): frozenset({0, 1})}
    )
    reports = {"a": at(6, 0, 1), "c": at(5, 0, 1, 2, ready=True), "d": at(5, 2, 3, ready=True)}
    decision = decide(reports, known(6), resumption, "abort")
    assert decision.holdings == {device("a"): {0, 1}, device("c"): {0, 1}, device("d"): frozenset()}


def test_gradients_of_a_step_that_was_redone_are_void() -> None:
    """Generation 3 resumed at step 7; gradients of an older step cannot help anybody."""
    late = Resumption(generation=3, step=7, vote=None, plan=PLAN)
    reports = {"a": at(5, 0, 1, ready=True)}
    assert decide(reports, known(6), late, "abort").holdings[device("a")] == frozenset()


def test_a_start_needs_no_roll_forward() -> None:
    decision = decide({"a": at(0, 0, 1, 2, 3), "b": at(0, 0, 1, 2, 3)}, None, None, "abort")
    assert (decision.step, decision.vote, decision.outcome) == (0, None, "start")


def test_without_any_report_the_job_is_at_its_start() -> None:
    decision = decide({}, None, None, "abort")
    assert (decision.step, decision.vote, decision.outcome) == (0, None, "start")


def test_the_vote_of_the_newest_step_comes_from_any_report_that_has_it() -> None:
    without = tuple(structs.replace(report, vote=None) for report in at(8, 0, 1))
    decision = decide({"a": at(7, 0, 1), "b": without, "c": at(8, 2, 3)}, known(7), RUNNING, "abort")
    assert (decision.step, decision.vote) == (8, known(8).vote)
    assert decide({"b": without}, known(8), RUNNING, "abort").vote == known(8).vote, (
        "or from a node that is dead now"
    )


def test_all_nodes_at_the_boundary() -> None:
    decision = decide({"a": at(7, 0, 1), "b": at(7, 2, 3)}, known(7), RUNNING, "boundary")
    assert (decision.outcome, decision.in_flight) == ("boundary", False)


def test_a_node_that_missed_a_decision_is_trusted_only_when_new() -> None:
    assert is_trusted(at(7, 0, 1), 3, RUNNING)
    assert not is_trusted(at(7, 0, 1), 2, RUNNING)
    assert not is_trusted(at(0, 0, 1, ready=True), 0, RUNNING)
    assert is_trusted(at(0, 0, 1), 0, RUNNING)
    assert is_trusted(at(7, 0, 1), 0, None)


def test_owned_layers_of_a_device_in_two_stages_add_up() -> None:
    twice = Plan(
        pipelines=(
            PipelinePlacement(
                stages=(
                    StagePlacement(first_layer=0, end_layer=1, devices=(device("a"),)),
                    StagePlacement(first_layer=1, end_layer=3, devices=(device("a"),)),
                ),
                first_microbatch=0,
                microbatches=1,
                estimated_s=1.0,
            ),
        ),
        transfers=(),
        method="initial",
        reason="",
        estimated_iteration_s=1.0,
    )
    assert owned_layers(twice) == {device("a"): {0, 1, 2}}


@st.composite
def interrupted_steps(draw: st.DrawFn) -> tuple[dict[str, tuple[DeviceReport, ...]], CommittedStep, bool]:
    """Draw the survivors of a group that failed in step t+1: if one committed it, every survivor was at least
    at the VOTE.
    """
    step = draw(st.integers(5, 20))
    passed = draw(st.booleans())
    reports: dict[str, tuple[DeviceReport, ...]] = {}
    for node, held in {"a": (0, 1), "b": (2, 3), "c": (0, 1), "d": (2, 3)}.items():
        if draw(st.booleans()):
            continue
        if passed and draw(st.booleans()):
            reports[node] = at(step + 1, *held)
        else:
            reports[node] = at(step, *held, ready=passed or draw(st.booleans()))
    heard = passed and draw(st.booleans())
    return reports, known(step + 1 if heard else step), passed


@given(interrupted_steps())
def test_no_committed_step_is_lost_and_all_survivors_count(
    drawn: tuple[dict[str, tuple[DeviceReport, ...]], CommittedStep, bool],
) -> None:
    reports, heard, _ = drawn
    decision = decide(reports, heard, RUNNING, "abort")
    steps = [r.committed_step for rs in reports.values() for r in rs]
    assert decision.step == max([heard.step, *steps])
    # Whatever was decided, each survivor holds all the layers that it owned.
    owned = owned_layers(PLAN)
    for node in reports:
        assert decision.holdings[device(node)] == owned[device(node)]
    for report in (r for rs in reports.values() for r in rs):
        assert report.committed_step <= decision.step <= report.committed_step + 1


# --- ZeRO-1 --------------------------------------------------------------------------------------


def sharded(
    step: int, parts: tuple[StatePart, ...], *held: int, ready: bool = False
) -> tuple[DeviceReport, ...]:
    return (structs.replace(at(step, *held, ready=ready)[0], parts=parts),)


def half(number: int, *layers: int, replica: bool = False) -> tuple[StatePart, ...]:
    return tuple(
        StatePart(layer=layer, start=number, end=number + 1, of=2, replica=replica) for layer in layers
    )


def test_an_apply_that_was_stopped_while_gathering_counts_by_its_parts() -> None:
    """``a`` committed step 8 and has its part of it; ``c``, with gradients, will have its own."""
    own, other = half(0, 0, 1) + half(1, 0, 1, replica=True), half(1, 0, 1) + half(0, 0, 1, replica=True)
    reports = {"a": sharded(8, own), "c": sharded(7, other, 0, 1, ready=True)}
    decision = decide(reports, known(7), replace(RUNNING, protection="arc:1+aor"), "abort", zero1=True)
    assert (decision.step, decision.outcome) == (8, "roll_forward")
    assert decision.holdings == {device("a"): frozenset(), device("c"): frozenset()}
    assert decision.parts == {device("a"): own, device("c"): other}
    assert decision.ready == {device("c"): {0, 1}}


def test_replicas_of_the_previous_group_do_not_follow_the_steps_of_one_without() -> None:
    """The protection was switched off: ``c`` has yet to drop its replica, which is not updated any more."""
    other = half(1, 0, 1) + half(0, 0, 1, replica=True)
    reports = {"a": sharded(8, half(0, 0, 1)), "c": sharded(7, other, 0, 1, ready=True)}
    decision = decide(reports, known(7), RUNNING, "abort", zero1=True)
    assert decision.parts == {device("a"): half(0, 0, 1), device("c"): half(1, 0, 1)}


def test_parts_kept_from_another_layout_are_not_rolled_forward() -> None:
    """``a`` still holds all of layer 0 from before, and layer 2, which it does not own any more."""
    old = tuple(StatePart(layer=layer, start=0, end=1, of=1) for layer in (0, 2))
    reports = {
        "a": sharded(5, (*old, *half(0, 0, 1), *half(0, 0, 1, replica=True)), 0, 1, 2, ready=True),
        "c": sharded(6, half(1, 0, 1)),
    }
    decision = decide(reports, None, RUNNING, "abort", zero1=True)
    assert decision.parts[device("a")] == half(0, 0, 1)
    same_step = {
        name: (structs.replace(listed[0], ready_step=None, committed_step=6),)
        for name, listed in reports.items()
    }
    assert decide(same_step, None, RUNNING, "abort", zero1=True).parts[device("a")][:2] == old


def test_parts_that_counted_count_again_when_the_resume_did_not_arrive() -> None:
    counted = half(0, 0)
    resumption = Resumption(
        generation=3,
        step=6,
        vote=None,
        plan=plan(("a", "b"), ("d", "e")),
        ready={device("c"): frozenset({0})},
        ready_parts={device("c"): counted},
    )
    reports = {"c": sharded(5, (*counted, *half(0, 1), *half(1, 0, replica=True)), 0, 1, ready=True)}
    decision = decide(reports, known(6), resumption, "abort", zero1=True)
    assert decision.parts[device("c")] == counted
    assert decision.holdings[device("c")] == frozenset()


def test_the_only_owner_has_whole_layers_once_it_rolls_forward() -> None:
    alone = Resumption(generation=3, step=5, vote=None, plan=plan(("a", "b")))
    parts = tuple(StatePart(layer=layer, start=0, end=1, of=1) for layer in (0, 1))
    decision = decide({"a": sharded(5, parts, 0, 1, ready=True)}, known(6), alone, "abort", zero1=True)
    assert decision.holdings[device("a")] == {0, 1}
    assert decision.parts[device("a")] == parts


def test_the_parts_of_a_plan_s_devices_are_listed_in_runs() -> None:
    parts = {
        device("a"): (*half(1, 0, 1, replica=True), *half(0, 0, 1, 3)),
        device("b"): half(0, 2),
        device("idle"): half(0, 0),
    }
    listed = held_parts(PLAN, {device("a"): frozenset({0, 1})}, parts)
    assert [
        (h.device.node, h.first_layer, h.end_layer, h.start, h.end, h.of, h.replica, h.whole) for h in listed
    ] == [
        ("a", 0, 2, 0, 1, 2, False, True),
        ("a", 3, 4, 0, 1, 2, False, False),
        ("a", 0, 2, 1, 2, 2, True, True),
        ("b", 2, 3, 0, 1, 2, False, False),
    ]
    gone = ReleasedLayers(device=device("a"), parked=(3,), dropped=(0, 1))
    left = held_parts(structs.replace(PLAN, released_layers=(gone,)), {}, parts)
    assert [(h.device.node, h.first_layer, h.end_layer) for h in left] == [("a", 3, 4), ("b", 2, 3)]


def test_layers_of_which_only_replicas_are_left_are_named() -> None:
    parts = {
        device("a"): half(0, 0, 1) + half(1, 0, 1, replica=True),
        device("b"): half(0, 2, 3),
        device("d"): half(1, 2, 3),
    }
    assert only_replicas(PLAN, parts) == [0, 1]
