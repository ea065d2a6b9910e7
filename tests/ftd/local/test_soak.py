"""The pure parts of a soak: what is drawn, what is checked, what is reported."""

import math
import shlex
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.main import get_command

from ftd.cli.main import app
from ftd.errors import ConfigurationError, PeerError
from ftd.local.soak.draw import CENTRAL_FAULTS, IMPAIRING, KINDS, draw_faults
from ftd.local.soak.monitor import ObservedRecovery, SoakMonitor, Violation
from ftd.local.soak.options import SoakOptions
from ftd.local.soak.plot import _ROWS, FORMATS, plot_soak
from ftd.local.soak.report import (
    FaultRecord,
    SoakGoodput,
    SoakReport,
    count_by_kind,
    measure_goodput,
    render_lines,
    time_by_cause,
)
from ftd.local.soak.soak import require_short, rounding_tolerance
from ftd.observe.view.files import require_format
from ftd.transport.wire.public import encode_document
from runtime.wire.recipe import RECIPE
from tests.helpers.playground import tiny_job


def test_a_seed_draws_the_same_faults_and_a_longer_soak_begins_with_them() -> None:
    short, long = (draw_faults(7, rate_per_min=10, until_s=s) for s in (120.0, 600.0))
    assert short == draw_faults(7, rate_per_min=10, until_s=120.0)
    assert long[: len(short)] == short
    assert draw_faults(8, rate_per_min=10, until_s=120.0) != short
    assert [fault.number for fault in long] == list(range(1, len(long) + 1))
    assert all(a.at_s <= b.at_s < 600.0 for a, b in pairwise(long))


def test_faults_come_at_the_rate_and_within_their_bounds() -> None:
    faults = draw_faults(1, rate_per_min=10, until_s=60.0 * 100, memory=True)
    assert 800 < len(faults) < 1200
    assert {fault.do for fault in faults} == {kind.do for kind in KINDS}
    bounds = {kind.do: kind for kind in KINDS}
    for fault in faults:
        kind = bounds[fault.do]
        assert kind.for_s[0] <= fault.for_s <= kind.for_s[1]
        assert kind.factor[0] <= fault.factor <= kind.factor[1]
    close = sum(b.at_s - a.at_s < 0.6 for a, b in pairwise(faults))
    assert close > 200


def test_the_machine_s_own_memory_is_not_filled() -> None:
    drawn = {fault.do for fault in draw_faults(1, rate_per_min=10, until_s=60.0 * 100)}
    assert drawn == {kind.do for kind in KINDS} - {"fill_memory"}


def test_the_chosen_node_depends_only_on_the_available_nodes() -> None:
    faults = [s for s in draw_faults(3, rate_per_min=30, until_s=300.0) if s.do not in CENTRAL_FAULTS]
    nodes = ["node-2", "node-0", "node-1"]
    assert {fault.choose_node(nodes) for fault in faults} == set(nodes)
    assert all(fault.choose_node(nodes) == fault.choose_node(sorted(nodes)) for fault in faults)
    assert all(fault.choose_node([]) is None for fault in faults)
    assert {"slow", "flip", "fill_memory"}.isdisjoint(IMPAIRING)


def test_a_job_that_is_too_long_is_rejected_by_the_pace_of_its_first_steps() -> None:
    commits = [(10.0 + step, 1) for step in range(7)]  # One step in a second.
    require_short(10_000, commits[:5], 300.0)  # Too few steps to tell.
    require_short(10_000, [], 300.0)
    require_short(400, commits, 300.0)  # Later steps may be quicker.
    with pytest.raises(PeerError, match=r"2000 steps of 1 s take about 33.3 minutes.*and 5 are.*--steps 75,"):
        require_short(2000, commits, 300.0)


@pytest.mark.parametrize("tolerance", [None, 0.0])
def test_the_command_of_a_soak_gives_all_options_again(tolerance: float | None) -> None:
    options = SoakOptions(
        job=Path("my jobs/job.toml"), minutes=0.5, seed=3, rate_per_min=20.0, nodes=5, coordinators=3, steps=40,
        limit_s=30.0, relative=tolerance, beyond=True, memory_mib=64, broker="embedded", logs=None,
    )  # fmt: skip
    command: Any = get_command(app)
    words = shlex.split(options.command)[1:]
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    given = command.make_context("soak", words).params
    assert (
        given | {"minutes": 0.5, "seed": 3, "rate": 20.0, "nodes": 5, "coordinators": 3, "steps": 40} == given
    )
    assert given | {"limit": 30.0, "tolerance": tolerance, "beyond": True, "memory_mib": 64} == given
    assert given | {"broker": "embedded", "job": options.job} == given


def test_the_command_of_a_soak_gives_all_digits_of_its_numbers() -> None:
    options = SoakOptions(
        job=Path("job.toml"), minutes=1.2345678, seed=3, rate_per_min=7.1234567, nodes=4, coordinators=1,
        steps=None, limit_s=1234567.5, relative=1.2345678e-9, beyond=False, memory_mib=None, broker="embedded",
        logs=None,
    )  # fmt: skip
    assert "--minutes 1.2345678 --seed 3 --rate 7.1234567 --nodes 4 " in options.command
    assert "--limit 1234567.5 --tolerance 1.2345678e-09 " in options.command


@pytest.mark.parametrize(
    ("function", "precision", "expected"),
    [
        ("mlp.py:build", "float64", 1e-9),
        ("mlp.py:build", "bfloat16", 1e-2),
        (RECIPE, "float64", 1e-6),
        (RECIPE, "float32", 1e-2),
    ],
)
def test_losses_may_differ_by_what_rounding_explains(
    function: str, precision: str, expected: float, tmp_path: Path
) -> None:
    job = tiny_job(tmp_path)
    training = job.training | {"function": function, "precision": precision}
    assert rounding_tolerance(msgspec.structs.replace(job, training=training)) == expected


# --- the monitor -------------------------------------------------------------------------------------


def make_monitor() -> SoakMonitor:
    seen = SoakMonitor(limit_s=10.0, relative=1e-6)
    seen.losses.update({step: 1.0 / step for step in range(1, 100)})
    seen.begin_round("job-1", 0.0)
    return seen


def commit(step: int, loss: float | None = None, **more: Any) -> dict[str, Any]:
    details = {"loss": 1.0 / step if loss is None else loss}
    return {"event": "StepCommitted", "step": step, "details": details, **more}


def event(name: str, generation: int = 1, node: str | None = None, **details: Any) -> dict[str, Any]:
    return {"event": name, "generation": generation, "node": node, "reason": "why", "details": details}


def state(step: int, generation: int = 1, phase: str = "RUNNING", job: str = "job-1") -> dict[str, Any]:
    known = {"phase": phase, "generation": generation, "step": step, "job": {"id": job}}
    return {**known, "coordinator": 1, "waiting_for": "", "outcome": ""}


def rules(seen: SoakMonitor) -> list[str]:
    return [violation.rule for violation in seen.violations]


def test_a_correct_run_violates_no_rule() -> None:
    seen = make_monitor()
    for step in range(1, 6):
        seen.on_event(commit(step, id=f"e-{step}"), float(step))
        seen.on_event(commit(step, id=f"e-{step}"), float(step))
        seen.on_state(state(step), step + 0.1)
        seen.on_time(step + 0.2)
    seen.on_event(event("JobFinished"), 6.0)
    seen.check_journal([commit(step) for step in range(1, 6)], 7.0)
    assert not seen.on_time(100.0)
    assert rules(seen) == []
    assert sum(new for _, new in seen.commits) == 5


def test_a_committed_step_goes_back_only_with_a_published_rollback() -> None:
    seen = make_monitor()
    for step in (1, 2, 3):
        seen.on_event(commit(step), 1.0)
    seen.on_event(commit(2), 2.0)
    assert rules(seen) == ["step"]
    seen = make_monitor()
    for step in (1, 2, 3):
        seen.on_event(commit(step), 1.0)
    seen.on_event(event("RolledBack", from_step=3, to_step=1, undone_steps=2), 2.0)
    for step in (2, 3, 4):
        seen.on_event(commit(step), 3.0)
    assert rules(seen) == []
    assert (sum(new for _, new in seen.commits), seen.repeated_steps, seen.rollbacks) == (4, 2, 1)


def test_a_state_that_goes_back_needs_a_rollback_nearby() -> None:
    for published, expected in ((False, ["step"]), (True, [])):
        seen = make_monitor()
        seen.on_state(state(9), 1.0)
        seen.on_state(state(4), 2.0)
        if published:
            seen.on_event(event("RolledBack", from_step=9, to_step=4, undone_steps=5), 2.5)
        seen.on_time(3.0)
        seen.on_time(6.0)
        assert rules(seen) == expected


def test_a_restarted_coordinator_may_publish_a_step_again_with_the_same_loss() -> None:
    seen = make_monitor()
    seen.on_event(commit(3), 1.0)
    seen.on_event(event("CoordinatorStarted"), 2.0)
    seen.on_event(commit(3), 3.0)
    assert rules(seen) == []
    seen.on_event(commit(3, loss=0.5), 4.0)
    assert rules(seen) == ["loss"]


def test_losses_are_compared_with_the_first_value() -> None:
    seen = make_monitor()
    seen.on_event(commit(5, loss=0.2 * (1 + 1e-7)), 1.0)
    assert rules(seen) == []
    seen.on_event(commit(6, loss=0.2), 2.0)
    seen.on_event(commit(150, loss=0.125), 3.0)
    seen.on_event(event("JobStopped"), 3.5)
    seen.begin_round("job-2", 4.0)
    seen.on_event(commit(150, loss=0.25), 5.0)
    seen.check_journal([commit(1, loss=3.0)], 6.0)
    assert rules(seen) == ["loss", "loss", "gap", "loss"]


def test_rounding_may_grow_but_not_jump() -> None:
    seen = make_monitor()
    apart = 1e-16
    for step in range(1, 90):
        seen.on_event(commit(step, loss=(1 + apart) / step), float(step))
        apart *= 1.3
    assert apart > 1e-6
    assert rules(seen) == []
    seen.on_event(commit(90, loss=(1 + 1000 * apart) / 90), 90.0)
    assert rules(seen) == ["loss"]
    seen.begin_round("job-2", 91.0)
    seen.on_event(commit(1, loss=1 + apart), 92.0)
    assert rules(seen) == ["loss", "loss"]


def test_a_standby_s_journal_may_lack_what_was_published_while_it_was_away() -> None:
    rows = [commit(1), commit(4)]
    for standbys, wrong in ((True, []), (False, ["gap"])):
        seen = make_monitor()
        seen.standbys = standbys
        for step in (1, 2, 3, 4):
            seen.on_event(commit(step), float(step))
        seen.check_journal(rows, 5.0)
        assert rules(seen) == wrong
    seen.check_journal([*rows, commit(6)], 5.0)
    assert rules(seen)[-1] == "gap"


def test_generations_never_decrease() -> None:
    seen = make_monitor()
    seen.on_event(event("GenerationStarted", 4), 1.0)
    seen.on_state(state(1, generation=3), 1.1)
    seen.on_event(event("GenerationStarted", 5), 2.0)
    assert rules(seen) == []
    seen.on_event(event("GenerationStarted", 4), 3.0)
    seen.on_state(state(1, generation=2), 3.1)
    assert rules(seen) == ["generation", "generation"]


def test_stuck_training_is_reported_once_and_a_fault_extends_the_limit() -> None:
    seen = make_monitor()
    seen.on_event(commit(1), 1.0)
    seen.on_injected("node-1", "stop", 9.0)
    assert not seen.on_time(18.9)
    assert seen.on_time(19.1)
    assert seen.on_time(30.0)
    assert rules(seen) == ["stuck"]
    seen.on_event(commit(2), 31.0)
    assert not seen.on_time(32.0)


def test_faults_may_not_stop_training_for_ever() -> None:
    seen = make_monitor()
    seen.on_event(commit(1), 1.0)
    for second in range(2, 41):
        seen.on_injected("node-1", "slow", second + 5.0)
        assert not seen.on_time(float(second))
    seen.on_injected("node-1", "slow", 47.0)
    assert seen.on_time(42.0)
    assert rules(seen) == ["stuck"]


def test_the_end_of_a_job_is_detected_from_the_state_if_the_event_is_lost() -> None:
    seen = make_monitor()
    seen.on_state(state(9, phase="FINISHED"), 1.0)
    seen.on_time(1.5)
    assert seen.ended is None
    seen.on_time(4.0)
    assert seen.ended == "JobFinished"


def test_a_failed_job_is_a_violation_unless_more_was_lost_than_it_tolerates() -> None:
    for excused, expected in ((False, ["failed"]), (True, [])):
        seen = make_monitor()
        seen.excused = excused
        seen.on_event(event("JobFailed"), 1.0)
        assert rules(seen) == expected


@pytest.mark.parametrize(
    ("name", "rule"),
    [("MessageRejected", "rejected"), ("ReplicasDiverged", "diverged"), ("ShardCorrupted", "damage")],
)
def test_events_that_no_fault_may_cause_are_violations(name: str, rule: str) -> None:
    seen = make_monitor()
    seen.on_event(event(name, node="node-1"), 1.0)
    assert rules(seen) == [rule]


def test_corruption_is_allowed_after_a_flipped_bit() -> None:
    seen = make_monitor()
    seen.on_injected("node-1", "flip", 0.5)
    seen.on_event(event("ShardCorrupted", node="node-2"), 1.0)
    assert rules(seen) == []


def test_a_trainer_that_fails_without_a_fault_is_a_violation_and_a_hung_one_is_noted() -> None:
    seen = make_monitor()
    seen.on_injected("node-1", "kill_trainer", 1.0)
    seen.on_event(event("TrainerLost", node="node-1", cause="exited"), 2.0)
    assert rules(seen) == []
    seen.on_event(event("TrainerLost", node="node-2", cause="hung"), 3.0)
    seen.on_event(event("NodeLost", node="node-2", how="silence"), 3.0)
    assert (rules(seen), len(seen.unprovoked)) == ([], 2)
    seen.on_event(event("TrainerLost", node="node-2", cause="raised"), 4.0)
    assert rules(seen) == ["unprovoked"]


def test_a_journal_with_a_gap_or_a_missing_end_is_a_violation() -> None:
    seen = make_monitor()
    seen.on_event(commit(4), 1.0)
    seen.check_journal([commit(1), commit(3)], 2.0)
    assert rules(seen) == ["gap", "gap"]


# --- the report ------------------------------------------------------------------------------------


def found(passed: bool = True) -> SoakReport:
    recoveries = tuple(
        ObservedRecovery(at_s=at, cause=cause, tier="none", total_ms=ms, generation=g, rolled_back_steps=0)
        for g, (at, cause, ms) in enumerate(
            [(1.0, "start", 9.0), (12.0, "node_lost", 300.0), (30.0, "node_lost", 500.0)]
        )
    )
    faults = tuple(
        FaultRecord(number=n, at_s=at, fault=fault, node="node-1", for_s=2.0, factor=1.0, problem=refused)
        for n, (at, fault, refused) in enumerate(
            [(11.0, "kill", ""), (20.0, "flip", "nothing is held there"), (29.0, "kill_broker", "")], 1
        )
    )
    commits = [(t / 10, 1) for t in range(600) if not 11.0 <= t / 10 < 12.0]
    measured = measure_goodput(commits, until_s=60.0, step_s=0.1, gaps=[(40.0, 50.0)], repeated_steps=3)
    broken = (Violation(at_s=13.0, rule="loss", detail="step 5"),)
    return SoakReport(
        job="tiny",
        seed=4,
        rate_per_min=8.0,
        nodes=4,
        steps=300,
        rounds=2,
        duration_s=60.0,
        complete=True,
        passed=passed,
        violations=() if passed else broken,
        faults=faults,
        by_kind=count_by_kind(faults),
        not_injected=2,
        recoveries=recoveries,
        by_cause=time_by_cause(recoveries),
        rollbacks=0,
        unprovoked=(),
        goodput=measured,
        repeat_command="ftd chaos soak --seed 4 job.toml",
        logs=None if passed else "/tmp/somewhere",
    )


def test_goodput_compares_new_steps_with_the_undisturbed_pace() -> None:
    commits = [(-1.0, 5), (1.0, 30), (5.0, 10), (11.0, 4)]
    measured = measure_goodput(commits, until_s=10.0, step_s=0.1, gaps=[(6.0, 8.0)], repeated_steps=0)
    assert (measured.new_steps, measured.ratio, measured.between_jobs_s) == (40, 0.5, 2.0)
    assert all(ratio is None for at_s, ratio in measured.series if 6.2 < at_s < 7.9)
    assert sum(ratio or 0.0 for _, ratio in measured.series) * 10.0 / 60 == pytest.approx(4.0, rel=0.01)


def test_goodput_counts_a_commit_in_the_last_instant() -> None:
    until_s = 421 / 7
    last_s = math.nextafter(until_s, 0.0)
    assert int(last_s / (until_s / 60)) == 60
    measured = measure_goodput([(last_s, 4)], until_s=until_s, step_s=0.1, gaps=[], repeated_steps=0)
    assert measured.new_steps == 4 and measured.series[-1][1] is not None and measured.series[-1][1] > 0


def test_goodput_is_unknown_where_almost_no_time_was_trained() -> None:
    measured = measure_goodput([(5.95, 20)], until_s=6.0, step_s=0.1, gaps=[(0.0, 5.94)], repeated_steps=0)
    assert measured.ratio is None
    assert "goodput: unknown" in "\n".join(render_lines(replace(found(), goodput=measured)))


def test_the_report_lists_faults_recoveries_and_the_command_to_repeat() -> None:
    text = "\n".join(render_lines(found()))
    assert (
        "faults: kill 1, kill_broker 1 (1 could not be injected, 2 waited too long for nodes to recover)"
        in text
    )
    assert "recovered from node_lost: 2 times, median 400 ms, worst 500 ms" in text
    assert "every rule held" in text
    text = "\n".join(render_lines(found(passed=False)))
    assert "VIOLATION at 13.0 s (loss): step 5" in text
    assert "ftd chaos soak --seed 4 job.toml" in text
    assert "/tmp/somewhere" in text
    text = "\n".join(render_lines(replace(found(), complete=False, passed=False)))
    assert text.endswith("the soak ended early\nevery rule held so far")


def test_the_written_report_contains_goodput() -> None:
    import msgspec

    read = msgspec.json.decode(encode_document(found()))
    assert read["schema"] == 1
    assert msgspec.convert(read["goodput"], SoakGoodput).ratio == found().goodput.ratio


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_plot_is_drawn(tmp_path: Path, suffix: str) -> None:
    place = tmp_path / f"soak.{suffix}"
    plot_soak(found(passed=False), place)
    assert place.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


@pytest.mark.parametrize("ratio", [None, 1.6, 1e10])
def test_an_unknown_or_very_high_goodput_is_drawn(tmp_path: Path, ratio: float | None) -> None:
    place = tmp_path / "soak.png"
    plot_soak(replace(found(), goodput=replace(found().goodput, ratio=ratio)), place)
    assert place.read_bytes()[:4] == b"\x89PNG"


def test_every_fault_has_a_row_in_the_plot(tmp_path: Path) -> None:
    faults = [replace(found().faults[0], fault=kind.do) for kind in KINDS]
    plot_soak(replace(found(), faults=tuple(faults)), tmp_path / "soak.svg")
    assert {fault for _, _, kinds in _ROWS for fault in kinds} == {kind.do for kind in KINDS}


def test_a_plot_that_cannot_be_written_is_rejected_beforehand(tmp_path: Path) -> None:
    for place in (tmp_path / "soak.gif", tmp_path / "nowhere" / "soak.png"):
        with pytest.raises(ConfigurationError, match="--plot"):
            require_format(place, FORMATS, "--plot")
