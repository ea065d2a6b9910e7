"""The roll-forward rule, case by case and as properties."""

from hypothesis import given
from hypothesis import strategies as st

from planner.values import Device, PipelinePlacement, Plan, StagePlacement
from statemachine.rules import Resumption, decide, owned_layers, trusted
from statemachine.values import CommittedStep, DeviceReport, Vote


def device(node: str) -> Device:
    return Device(node=node, index=0)


def plan(*pipelines: tuple[str, ...]) -> Plan:
    """Each pipeline's nodes own two layers each."""
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


def test_nobody_committed_so_all_redo() -> None:
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


def test_what_the_dead_were_heard_to_commit_counts() -> None:
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
    """``e`` missed the Resume that told it to drop its gradients of step 6; generation 3 computed 6 anew."""
    reports = {"a": at(6, 0, 1), "b": at(6, 2, 3), "e": at(5, 0, 1, ready=True)}
    decision = decide(reports, None, RUNNING, "abort")
    assert decision.holdings[device("e")] == frozenset()


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


def test_everybody_at_the_boundary() -> None:
    decision = decide({"a": at(7, 0, 1), "b": at(7, 2, 3)}, known(7), RUNNING, "boundary")
    assert (decision.outcome, decision.in_flight) == ("boundary", False)


def test_who_missed_a_decision_is_trusted_only_when_fresh() -> None:
    assert trusted(at(7, 0, 1), 3, RUNNING)
    assert not trusted(at(7, 0, 1), 2, RUNNING)
    assert not trusted(at(0, 0, 1, ready=True), 0, RUNNING)
    assert trusted(at(0, 0, 1), 0, RUNNING)
    assert trusted(at(7, 0, 1), 0, None)


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
    """Survivors of a group caught in step t+1: if one committed, every survivor was at the VOTE at least."""
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
