"""Number formats and the loss chart."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from ftd.observe.view.blocks import PipelineBars, pipeline_lines
from ftd.observe.view.live.chart import FAILURE_STYLE, LossHistory, column_of, loss_chart, resample
from ftd.observe.view.text import (
    NodeColours,
    device_names,
    event_words,
    format_duration,
    format_number,
    format_size,
    how_words,
    layer_range,
    pipeline_name,
)
from planner.reasons import natural_key


def drawn(thing: RenderableType, width: int) -> str:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(thing)
    return capture.get()


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_size(0), "0 B"),
        (format_size(1023), "1023 B"),
        (format_size(1536), "1.5 KiB"),
        (format_size(102_400 - 20), "100 KiB"),
        (format_size((1 << 20) - 400), "1.0 MiB"),
        (format_size((1 << 40) - 1), "1.0 TiB"),
        (format_size(300 << 20), "300 MiB"),
        (format_size(5 << 40), "5.0 TiB"),
        (format_duration(0.0984), "98 ms"),
        (format_duration(1.239), "1.24 s"),
        (format_duration(0.9996), "1.00 s"),
        (format_duration(9.999), "10.0 s"),
        (format_duration(59.94), "59.9 s"),
        (format_duration(59.96), "1:00"),
        (format_duration(125), "2:05"),
        (format_duration(3 * 3600 + 65), "3:01:05"),
        (format_number(None), "–"),
        (format_number(math.nan), "nan"),
        (format_number(2.5), "2.5000"),
        (format_number(0.0), "0.0000"),
        (format_number(0.00004), "4e-05"),
        (format_number(-0.000123456), "-0.000123"),
        (format_number(0.034, 2), "0.03"),
        (format_number(999_999_999.0), "999999999.0000"),
        (format_number(-1.234e30), "-1.23e+30"),
        (format_number(math.inf), "inf"),
        (layer_range(0, 4), "0–3"),
        (layer_range(7, 8), "7"),
        (event_words("RecoveryCompleted"), "recovery completed"),
        (how_words("last_will"), "last will"),
        (how_words(None), "–"),
        (device_names(["node-0/0", "node-0/1"], short=False), "node-0/0,1"),
        (device_names(["node-0/0"], short=True), "node-0"),
        (pipeline_name(0), "A"),
        (pipeline_name(27), "B1"),
    ],
)
def test_numbers_and_names(shown: str, expected: str) -> None:
    assert shown == expected


def test_stages_of_several_devices_show_that_they_are_sharded() -> None:
    stage = {
        "first_layer": 0,
        "end_layer": 4,
        "devices": ["a/0", "a/1"],
        "recompute": "full",
        "within": "shard",
    }
    other = stage | {"first_layer": 4, "end_layer": 8, "recompute": "none", "within": "replicate"}
    pipelines = [{"stages": [stage, other], "microbatches": 4}]
    line = pipeline_lines(pipelines, NodeColours()).plain
    assert line == "A  a/0,1 0–3 sharded recomputing │ a/0,1 4–7  × 4"
    bars = drawn(PipelineBars(pipelines, NodeColours(), most=4), 120)
    assert "a/0,1 · layers 0–3 · sharded" in bars and "a/0,1 · layers 4–7 " in bars
    assert "sharded" not in drawn(PipelineBars(pipelines, NodeColours(), most=4), 50)


def test_names_sort_naturally() -> None:
    names = ["node-10", "node-9", "a", "node-1", "node-1b"]
    assert sorted(names, key=natural_key) == ["a", "node-1", "node-1b", "node-9", "node-10"]


def test_a_node_keeps_its_colour() -> None:
    colours = NodeColours()
    first = colours.of("a")
    assert colours.of("b") != first
    assert colours.of("a") == first


@given(st.lists(st.floats(0, 10), min_size=1, max_size=400), st.integers(1, 60))
def test_resampling_keeps_the_mean_of_equal_runs_and_the_range(values: list[float], width: int) -> None:
    sampled = resample(values, width)
    assert len(sampled) == min(width, len(values))
    assert min(values) - 1e-9 <= min(sampled) and max(sampled) <= max(values) + 1e-9


def test_a_long_history_stays_small_and_keeps_its_shape() -> None:
    history = LossHistory(capacity=64)
    for step in range(1, 10_001):
        history.add(step, float(step))
    assert len(history.values) <= 65
    assert history.values == sorted(history.values)
    assert history.values[-1] > 9_000
    assert column_of(5_000, history, 20) == pytest.approx(10, abs=1)


def test_the_chart_falls_and_marks_the_failure() -> None:
    history = LossHistory()
    for step in range(1, 41):
        history.add(step, 41.0 - step)
    chart = loss_chart(history, width=40, height=4, failures=[20])
    rows = chart.plain.split("\n")
    assert len(rows) == 4 and all(len(row) == 40 for row in rows)
    assert rows[0][0] == "█" and rows[0][-1] == " "
    heights = [sum(row[c] not in " ╎╵" for row in rows) for c in range(40)]
    assert heights == sorted(heights, reverse=True)
    assert {chart.plain.index("╵") % 41} == {19}
    assert any(FAILURE_STYLE in str(span.style) for span in chart.spans)


def test_evaluations_are_marked_at_their_steps_and_widen_the_scale() -> None:
    history = LossHistory()
    for step in range(11, 21):
        history.add(step, 2.0)
    evaluations = [(5, 9.0), (12, 4.0), (15, math.nan), (17, None), (20, 2.0)]
    chart = loss_chart(history, width=40, height=4, evaluations=evaluations)
    rows = chart.plain.split("\n")
    assert [row.count("◆") for row in rows] == [1, 0, 0, 1]
    assert rows[0].index("◆") == 1 and rows[-1].index("◆") == 9


def test_the_chart_survives_losses_that_are_not_finite() -> None:
    history = LossHistory()
    for step, loss in enumerate([3.0, math.nan, math.inf, 1.0], start=1):
        history.add(step, loss)
    rows = loss_chart(history, width=10, height=2).plain.split("\n")
    assert [row[1:3] for row in rows] == ["  ", "  "]
    assert rows[0][0] == "█" and rows[1][3] != " "
    assert loss_chart(LossHistory(), width=10, height=2).plain == "waiting for the first step"


@pytest.mark.parametrize("step", [0, 1, 5, 37, 63, 99, 100])
def test_a_truncated_history_continues_after_the_cut(step: int) -> None:
    history = LossHistory(capacity=64)
    for done in range(1, 101):
        history.add(done, 1.0)
    history.truncate(step)
    assert step <= len(history.values) * history.steps_per_value < step + history.steps_per_value
    for again in range(step + 1, 101):
        history.add(again, 2.0)
    assert len(history.values) == 100 // history.steps_per_value
    assert column_of(100, history, 200) == len(history.values) - 1


def test_steps_that_a_history_lacks_shift_none_of_the_others() -> None:
    history = LossHistory()
    for step in (1, 2, 3, 7, 8):
        history.add(step, float(step))
    assert history.values[6:] == [7.0, 8.0] and all(map(math.isnan, history.values[3:6]))
    history.truncate(7)
    assert history.values[-1] == 7.0


def test_a_history_may_go_back_before_its_beginning() -> None:
    history = LossHistory()
    for step in (100, 101):
        history.add(step, 2.0)
    history.truncate(50)
    for step in (51, 52, 53):
        history.add(step, 1.0)
    assert history.first_step == 51 and column_of(53, history, 40) == 2
