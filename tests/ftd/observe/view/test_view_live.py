"""The live view: frames on a terminal, lines in a pipe."""

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from ftd.observe.view.live.frame import LiveFrame
from ftd.observe.view.live.view import LiveView

Json = dict[str, Any]
Make = Callable[..., Json]


def frame(live_frame: LiveFrame, width: int = 110, height: int = 40) -> list[str]:
    console = Console(width=width, height=height, force_terminal=True, color_system=None, file=io.StringIO())
    with console.capture() as captured:
        console.print(live_frame.draw(width, height))
    return captured.get().splitlines()


def at_step_90(run_events: list[Json], state: Json) -> LiveFrame:
    live_frame = LiveFrame(120)
    live_frame.on_state(state)
    for event in run_events:
        if event["event"] == "StepCommitted" and event["step"] > 90:
            break
        live_frame.on_event(event)
    return live_frame


def test_a_frame_says_100_percent_only_after_the_last_step(run_events: list[Json], state: Json) -> None:
    live_frame = at_step_90(run_events, state)
    live_frame.on_state(state | {"job": state["job"] | {"steps": 1000}, "step": 999})
    text = "\n".join(frame(live_frame, 110, 60))
    assert "step 999/1000" in text and " 99%" in text and "100%" not in text


@pytest.mark.parametrize("width", [80, 110, 140])
def test_a_frame_shows_nodes_pipelines_progress_and_events(
    run_events: list[Json], state: Json, width: int
) -> None:
    lines = frame(at_step_90(run_events, state), width, 60)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert "step 90/120" in text and "75%" in text and "320 samples/s" in text
    assert f"loss {5.5 * 0.985**90 + 1.2:.4f}" in text
    node_2 = next(line for line in lines if line.startswith("│ node-2"))
    assert "OFFLINE" in node_2 and "layers" not in node_2
    node_4 = next(line for line in lines if line.startswith("│ node-4"))
    assert "HEALTHY" in node_4 and "A  layers 6–7" in node_4
    assert "1 failure" in text and "1 other change" in text
    assert "✖ node lost  node-2  its connection to the broker broke" in text
    assert "× 5 microbatches" in text


@pytest.mark.parametrize("width", [80, 110, 140])
def test_a_frame_shows_tokens_the_learning_rate_and_evaluations(
    run_events: list[Json], state: Json, event: Make, width: int
) -> None:
    def evaluated(step: int, loss: float) -> Json:
        details = {"loss": loss, "weight": 512.0, "metrics": {"accuracy": 0.25}, "took_s": 0.1}
        return event("Evaluated", 1000.5 + step / 10, step=step, generation=1, details=details)

    live_frame = at_step_90(run_events, state)
    before = "\n".join(frame(live_frame, width, 40))
    assert "held out" not in before and "learning rate" not in before and "tokens" not in before
    newest = {**run_events[3], "event": "StepCommitted", "step": 91}
    newest["details"] = {"loss": 2.6, "tokens_per_s": 40960.0, "samples_per_s": 320.0, "learning_rate": 3e-4}
    for lines_of in (evaluated(40, 4.3), evaluated(80, 2.9), newest):
        live_frame.on_event(lines_of)
    lines = frame(live_frame, width, 40)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width and len(lines) <= 40
    assert "40,960 tokens/s, 100 ms" in text and "samples/s" not in text
    assert ("lr 0.0003" if width == 80 else "learning rate 0.0003") in text
    assert "held out 2.9000" in text and "step 80, accuracy 0.2500" in text
    assert text.count("◆") == 3, "two in the chart, and one that says what they are"
    assert "40,960 tokens/s" in live_frame.progress_line()
    live_frame.on_event(event("RolledBack", 1012.0, step=60, generation=4, details={"to_step": 60}))
    assert "held out 4.3000" in "\n".join(frame(live_frame, width, 40))
    small = "\n".join(frame(live_frame, 80, 24))
    assert "lr 0.0003" in small and "◆ held out 4.30" in small and "accuracy" not in small


def test_stages_are_as_wide_as_their_layers(run_events: list[Json], state: Json) -> None:
    lines = frame(at_step_90(run_events, state))
    bar = next(line for line in lines if line.startswith("│ A "))
    first, second, third = bar.removeprefix("│ A  ").split("×")[0].rstrip().split("▸")
    assert abs(len(first) - len(second)) <= 1
    assert len(third) < len(second)
    assert "node-4" in third


def test_a_frame_fits_the_height(run_events: list[Json], state: Json) -> None:
    live_frame = at_step_90(run_events, state)
    assert len(frame(live_frame, 110, 30)) <= 30
    newest = frame(live_frame, 110, 40)
    assert any("node joined" in line for line in newest)


@pytest.mark.parametrize("height", [10, 16, 24, 30, 50])
@pytest.mark.parametrize("width", [80, 110])
@pytest.mark.parametrize("nodes", [1, 5, 200])
def test_every_terminal_size_shows_the_newest_event(
    run_events: list[Json], state: Json, width: int, height: int, nodes: int
) -> None:
    live_frame = at_step_90(run_events, state)
    known = dict(list(state["nodes"].items())[:nodes])
    known |= {f"n-{i}": dict(state["nodes"]["node-0"]) for i in range(nodes - len(known))}
    live_frame.on_state(state | {"nodes": known, "waiting_for": "a third node"})
    lines = frame(live_frame, width, height)
    assert len(lines) <= height and max(map(len, lines)) <= width
    assert "waiting for a third node" in lines[3]
    assert lines[-1].startswith("╰") and "recovery completed" in lines[-2]
    live_frame.on_state(
        state | {"nodes": known, "phase": "PAUSED", "waiting_for": "no copy of layer 6 is left; " * 6}
    )
    lines = frame(live_frame, width, height)
    assert len(lines) <= height and "no copy of layer 6" in lines[3] and "waiting for" not in "".join(lines)
    begin = next(i for i, line in enumerate(lines) if "events ─" in line)
    assert len(lines) - begin - 2 >= (4 if height > 10 else 3)


def test_routine_events_do_not_displace_others(run_events: list[Json], state: Json, event: Make) -> None:
    live_frame = at_step_90(run_events, state)
    for step in range(91, 120):
        live_frame.on_event(event("SnapshotCompleted", float(step), step=step, reason=f"step {step}"))
        live_frame.on_event(event("CheckpointCompleted", float(step), step=step, reason=f"disk {step}"))
    text = "\n".join(frame(live_frame, 80, 24))
    assert text.count("snapshot completed") == text.count("checkpoint completed") == 1
    assert "step 119" in text and "disk 119" in text and "recovery completed" in text


def test_a_silent_cluster_is_not_shown_as_healthy(run_events: list[Json], state: Json) -> None:
    console = Console(width=80, height=24, force_terminal=True, color_system=None, file=io.StringIO())
    with console.capture() as captured:
        console.print(at_step_90(run_events, state).draw(80, 24, quiet_s=75.4))
    assert "no message for 1:15" in captured.get()


def test_the_loss_of_the_last_standby_is_shown(state: Json, event: Make) -> None:
    def shown(live_frame: LiveFrame) -> str:
        return "\n".join(frame(live_frame, 96, 24))

    alone = state | {"leader": "host-b", "standbys": [], "ineligible": {}}
    live_frame, later = LiveFrame(120), LiveFrame(120)
    live_frame.on_state(alone)
    assert "leads" not in shown(live_frame), "there never was another"
    live_frame.on_state(alone | {"leader": "host-a", "standbys": ["host-b"]})
    assert "host-a leads, standing by: host-b" in shown(live_frame)
    live_frame.on_state(alone)
    later.on_state(alone)
    later.on_event(event("LeaderElected", 3.0, leader="host-b", term=2, took_s=0.1))
    for each in (live_frame, later):
        assert "host-b leads, no standby" in shown(each)


@pytest.mark.parametrize("width", [80, 120])
def test_an_ineligible_coordinator_is_shown_with_the_reason(state: Json, width: int) -> None:
    live_frame = LiveFrame(120)
    why = "ftd 2.0 wrote the newest journal, this is ftd 1.0; install the same version on this host"
    others = {
        "leader": "a-host-with-a-name",
        "standbys": ["another-host"],
        "ineligible": {"an-old-host": why},
    }
    live_frame.on_state(state | others)
    lines = frame(live_frame, width, 24)
    text = " ".join(line.strip("│ ") for line in lines)
    assert f"an-old-host cannot take over: {why}" in re.sub(r"\s+", " ", text)
    assert f"ineligible: {'1' if width == 80 else 'an-old-host'} " in text
    assert len(lines) <= 24 and max(map(len, lines)) <= width


def test_a_lost_broker_is_shown_in_every_state(state: Json) -> None:
    live_frame = LiveFrame(120)
    live_frame.on_state(state)
    live_frame.on_state({"phase": "UNREACHABLE", "reason": "the coordinator vanished"})
    assert "no coordinator: the coordinator vanished" in "".join(frame(live_frame, 80, 24))
    live_frame.on_broker(connected=False)
    assert "the broker is unreachable: this is the state at " in "".join(frame(live_frame, 80, 24))
    live_frame.on_broker(connected=True)
    assert "the broker is unreachable" not in "".join(frame(live_frame, 80, 24))


@pytest.mark.parametrize(("width", "ends"), [(80, "at 56% speed"), (96, "…"), (120, "at 56% speed")])
def test_long_text_next_to_a_node_ends_in_an_ellipsis(state: Json, width: int, ends: str) -> None:
    live_frame = LiveFrame(120)
    slow = state["nodes"]["node-0"] | {"speed": 0.56}
    live_frame.on_state(state | {"nodes": state["nodes"] | {"node-0": slow}})
    [line] = [line for line in frame(live_frame, width, 24) if line.startswith("│ node-0")]
    assert line.split("│")[1].rstrip().endswith(ends)


def test_the_speed_stays_on_one_line_and_nodes_that_left_or_were_set_aside_are_marked(state: Json) -> None:
    live_frame = LiveFrame(120)
    left = state["nodes"]["node-0"] | {"draining": True, "in_plan": False}
    leaving = state["nodes"]["node-1"] | {"draining": True}
    aside = state["nodes"]["node-3"] | {"quarantine": {"cause": "raised"}, "in_plan": False}
    nodes = state["nodes"] | {"node-0": left, "node-1": leaving, "node-3": aside}
    live_frame.on_state(state | {"nodes": nodes, "samples_per_s": 1182.0, "step_s": 0.041})
    lines = frame(live_frame, 80, 24)
    assert any("1,182 samples/s, 41 ms" in line for line in lines)
    assert any("node-0" in line and "drained" in line for line in lines)
    assert any("node-1" in line and "draining" in line for line in lines)
    assert any("node-3" in line and "set aside" in line for line in lines)


def test_a_frame_before_the_first_message() -> None:
    text = "\n".join(frame(LiveFrame(None)))
    assert "WAITING" in text and "no plan yet" in text and "waiting for the first step" in text


def test_a_long_list_of_nodes_begins_with_those_in_trouble(state: Json) -> None:
    node = state["nodes"]["node-0"]
    nodes = {f"node-{i}": dict(node) for i in range(200)}
    nodes["node-150"] |= {"state": "UNHEALTHY", "in_plan": False}
    live_frame = LiveFrame(10)
    live_frame.on_state(state | {"nodes": nodes})
    lines = frame(live_frame)
    assert any("node-150" in line and "UNHEALTHY" in line for line in lines)
    assert any("and 189 HEALTHY" in line for line in lines)


def test_the_coordinators_last_will_keeps_the_nodes_on_the_screen(state: Json) -> None:
    live_frame = LiveFrame(120)
    live_frame.on_state(state)
    live_frame.on_state({"schema": 1, "phase": "UNREACHABLE", "reason": "the broker lost its session"})
    text = "\n".join(frame(live_frame))
    assert "no coordinator: the broker lost its session" in text
    assert "UNREACHABLE" in text and "node-3" in text and "step 90/120" in text


def test_a_pipe_gets_a_line_for_each_important_event(run_events: list[Json], state: Json) -> None:
    out = io.StringIO()
    with LiveView(Console(file=out, width=40), total_steps=120) as view:
        view.on_state(state)
        for event in run_events:
            view.on_event(event)
    lines = out.getvalue().splitlines()
    assert not any("\x1b" in line for line in lines)
    lines_of = [line for line in lines if "progress" not in line]
    important = [e for e in run_events if e["event"] != "StepCommitted"]
    assert len(lines_of) == len(important)
    lost = next(line for line in lines_of if "NodeLost" in line)
    assert lost.endswith("NodeLost node-2: its connection to the broker broke")
    progress = [line for line in lines if "progress" in line]
    assert len(progress) < 20
    assert "step 120/120" in progress[-1] and f"loss {5.5 * 0.985**120 + 1.2:.4f}" in progress[-1]
    assert progress[-1].endswith(f"FINISHED, {run_events[-1]['reason']}")


def test_reasons_of_several_lines_are_joined(event: Make) -> None:
    out = io.StringIO()
    view = LiveView(Console(file=out))
    view.on_event(event("TrainerLost", 1.0, node="a", reason="exit 1\nTraceback:\n  [bold]x[/]"))
    assert out.getvalue().splitlines()[0].endswith("TrainerLost a: exit 1 Traceback: [bold]x[/]")


def test_a_terminal_keeps_the_last_frame(run_events: list[Json], state: Json) -> None:
    out = io.StringIO()
    console = Console(file=out, width=110, height=45, force_terminal=True)
    with LiveView(console, total_steps=120) as view:
        view.on_state(state)
        for event in run_events:
            view.on_event(event)
    text = out.getvalue()
    assert "\x1b[" in text
    assert "step 120/120" in text and "job finished" in text


def test_long_planning_has_a_progress_bar(state: Json) -> None:
    """It replaces the steps before the first step; later it is not shown."""
    text = "making plans for 16 of 64 numbers of nodes"
    startup = {"number": 4, "stages": 7, "share": 3.25 / 7, "text": text}
    live_frame = LiveFrame(120)
    live_frame.on_state({**state, "phase": "WAITING", "step": 0, "startup": startup})
    lines = frame(live_frame)
    line = next(line for line in lines if "start-up 4/7" in line)
    assert "46%" in line and "━" in line and "step 0" not in "".join(lines)
    assert any(f"{text} (stage 4 of 7)" in line for line in lines)
    assert live_frame.progress_line().endswith(f"[=========-----------]  46%  {text} (stage 4 of 7)")
    live_frame.on_state({**state, "phase": "UNREACHABLE", "reason": "it is gone", "startup": startup})
    assert not any("start-up" in line for line in [*frame(live_frame), live_frame.progress_line()])


def test_a_pipe_gets_lines_about_long_planning(state: Json, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftd.observe.view.live.view.PROGRESS_EVERY_S", 0.0)
    out = io.StringIO()
    view = LiveView(Console(file=out, width=200), 120)
    waiting = {**state, "phase": "WAITING", "step": 0}
    for done in (5, 5, 37):
        view.on_state({**waiting, "planning": {"done": done, "total": 64}})
    lines_of = [line for line in out.getvalue().splitlines() if "planning" in line]
    assert [line.split("planning ")[1] for line in lines_of] == ["5 of 64", "37 of 64"]


def test_a_pipe_gets_lines_about_what_a_start_waits_for(state: Json, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftd.observe.view.live.view.PROGRESS_EVERY_S", 0.0)
    out = io.StringIO()
    view = LiveView(Console(file=out, width=200), 120)
    for layer in (2, 2, 3):
        text = f"node-0 is measuring layer {layer} of 10"
        startup = {"number": 3, "stages": 7, "share": 0.3, "text": text}
        view.on_state({**state, "phase": "WAITING", "step": 0, "startup": startup})
    lines_of = [line.split("%  ")[1] for line in out.getvalue().splitlines()]
    assert lines_of == [f"node-0 is measuring layer {layer} of 10 (stage 3 of 7)" for layer in (2, 3)]


def test_the_last_line_of_a_failed_start_says_that_it_failed(event: Make, state: Json) -> None:
    out = io.StringIO()
    startup = {"number": 2, "stages": 7, "share": 0.14, "text": "node-0 is building the model"}
    with LiveView(Console(file=out, width=200), 120) as view:
        view.on_state({**state, "phase": "WAITING", "step": 0, "startup": startup})
        view.on_event(event("JobFailed", 10, step=0, reason="no node can build the job"))
    assert out.getvalue().splitlines()[-1].endswith("FAILED, no node can build the job")


def test_a_stopped_job_is_shown_as_stopped(event: Make, state: Json) -> None:
    out = io.StringIO()
    with LiveView(Console(file=out, width=200), 120) as view:
        view.on_state({**state, "step": 40})
        view.on_event(event("JobStopped", 10, step=40, reason="stopped by a user"))
    assert out.getvalue().splitlines()[-1].endswith("FINISHED, stopped by a user")
    live_frame = LiveFrame(120)
    live_frame.on_state({**state, "step": 40, "phase": "FINISHED", "outcome": "stopped by a user"})
    assert "stopped by a user" in "\n".join(frame(live_frame))


def test_a_rollback_shortens_the_chart(event: Callable[..., Json], state: Json) -> None:
    live_frame = LiveFrame(120)
    for step in range(1, 12):
        live_frame.on_event(event("StepCommitted", 10 + step, step=step, details={"loss": 1.0}))
    live_frame.on_state({**state, "step": 11})
    live_frame.on_event(
        event("RolledBack", 22, step=7, details={"from_step": 11, "to_step": 7, "undone_steps": 4})
    )
    assert live_frame.step == 7
    assert live_frame._losses.values == [1.0] * 7
    live_frame.on_event(event("StepCommitted", 23, step=8, details={"loss": 0.5}))
    assert live_frame.step == 8 and live_frame._losses.values == [1.0] * 7 + [0.5]


def test_the_loss_shown_is_that_of_the_step_shown(event: Callable[..., Json], state: Json) -> None:
    live_frame = LiveFrame(120)
    live_frame.on_event(event("StepCommitted", 10, step=1, details={"loss": 1.5}))
    live_frame.on_state({**state, "step": 1, "loss": 1.5})
    live_frame.on_state({**state, "step": 2, "loss": 1.25})
    assert re.search(r"step 2/120 +loss 1\.2500", live_frame.progress_line())
    live_frame.on_event(event("StepCommitted", 11, step=2, details={"loss": 1.25}))
    live_frame.on_event(event("StepCommitted", 12, step=3, details={"loss": 1.125}))
    assert re.search(r"step 3/120 +loss 1\.1250", live_frame.progress_line())
    live_frame.on_event(event("StepCommitted", 13, step=4, details={"loss": None}))
    assert re.search(r"step 4/120 +loss –", live_frame.progress_line())


def test_another_job_resets_the_chart_even_if_the_state_shows_it_first(
    event: Callable[..., Json], state: Json
) -> None:
    live_frame = LiveFrame(None)
    live_frame.on_state(state)
    for step in (1, 2, 3):
        live_frame.on_event(event("StepCommitted", 10 + step, step=step, details={"loss": 2.0}))
    live_frame.on_state({**state, "step": 0, "job": {**state["job"], "id": "another-1"}})
    submitted = {"job": "another-1", "name": "gpt", "steps": 120}
    live_frame.on_event(event("JobSubmitted", 20, details=submitted))
    live_frame.on_event(event("StepCommitted", 21, step=1, generation=9, details={"loss": 1.0}))
    assert live_frame.step == 1 and live_frame._losses.values == [1.0]


def test_the_end_of_an_earlier_job_is_not_shown_for_the_job_that_runs(
    event: Callable[..., Json], state: Json
) -> None:
    live_frame = LiveFrame(None)
    live_frame.on_state(state)
    live_frame.on_event(event("JobFinished", 10, reason="job earlier-1 finished"))
    live_frame.on_event(event("JobSubmitted", 11, details={"job": state["job"]["id"], "steps": 120}))
    assert "RUNNING" in live_frame.progress_line() and "earlier-1" not in live_frame.progress_line()


def test_steps_without_a_finite_loss_keep_their_place_in_the_chart(
    event: Callable[..., Json], state: Json
) -> None:
    live_frame = LiveFrame(120)
    for step in range(1, 11):
        loss = None if step in (3, 4) else float(step)
        live_frame.on_event(event("StepCommitted", 10 + step, step=step, details={"loss": loss}))
    live_frame.on_state({**state, "step": 10})
    live_frame.on_event(event("RolledBack", 22, step=5, details={"to_step": 5, "undone_steps": 5}))
    assert [str(value) for value in live_frame._losses.values] == ["1.0", "2.0", "nan", "nan", "5.0"]


@pytest.mark.parametrize("width", range(1, 9))
def test_the_narrowest_terminals_get_a_frame(run_events: list[Json], state: Json, width: int) -> None:
    assert frame(at_step_90(run_events, state), width, 40)
