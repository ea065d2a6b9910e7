"""The availability trace: its nodes over time, and what it refuses."""

import math
from pathlib import Path
from typing import Any

import pytest

from ftd.errors import ConfigurationError
from ftd.replay.traces.reading import read_trace
from ftd.replay.traces.trace import Trace, TraceChange, TraceError, TraceEvent


def add(at_s: float, node: str) -> TraceEvent:
    return TraceEvent(at_s=at_s, kind="add", node=node)


def remove(at_s: float, node: str, notice_s: float = 0.0) -> TraceEvent:
    return TraceEvent(at_s=at_s, kind="remove", node=node, notice_s=notice_s)


def trace_of(*events: TraceEvent, end_s: float = 100.0) -> Trace:
    return Trace(name="t", source="test", events=events, end_s=end_s)


def test_events_of_one_instant_are_one_change() -> None:
    trace = trace_of(
        add(0, "a"),
        add(0, "b"),
        add(10, "c"),
        remove(10, "a", notice_s=120.0),
        remove(10, "b", notice_s=30.0),
        remove(40, "c"),
        add(40, "c"),
    )
    assert trace.initial_nodes == ("a", "b")
    assert trace.changes == (
        TraceChange(at_s=10, removed=("a", "b"), added=("c",), notice_s=30.0),
        TraceChange(at_s=40, removed=("c",), added=("c",), notice_s=0.0),
    ), "a node that restarts is both removed and added"
    assert trace.node_counts() == [(0.0, 2), (10, 1), (40, 1)]
    assert (trace.fewest_nodes, trace.most_nodes, trace.removals) == (1, 2, 3)
    assert trace.mean_nodes == pytest.approx((2 * 10 + 1 * 90) / 100)


def test_a_node_that_comes_and_goes_in_one_instant_changes_nothing() -> None:
    trace = trace_of(add(0, "a"), add(10, "b"), remove(10, "b"))
    assert trace.changes == ()
    assert trace.removals == 1, "it is counted as the file records it"


def test_a_trace_is_cut_and_extended() -> None:
    trace = trace_of(add(0, "a"), add(10, "b"), remove(40, "b"))
    assert [event.at_s for event in trace.until(10).events] == [0, 10]
    assert trace.until(10).end_s == 10
    assert trace.until(1000).events == trace.events
    assert trace.until(1000).mean_nodes == pytest.approx((10 + 2 * 30 + 960) / 1000)
    with pytest.raises(TraceError, match="cannot end at 0"):
        trace.until(0)


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ([], "no events"),
        ([add(0, "a"), remove(0, "a")], "no node is there at the start"),
        ([add(5, "a")], "no node is there at the start"),
        ([add(0, "a"), add(math.nan, "b")], "nan is not a time"),
        ([add(-1, "a")], "-1 is not a time"),
        ([add(0, "a"), add(9, "b"), add(8, "c")], "not sorted: this one is 1 s before"),
        ([add(0, "a"), remove(1, "b")], "b is removed but is not there"),
        ([add(0, "a"), add(1, "a")], "a is added but is there already"),
        ([add(0, "a"), add(1, "")], "no name"),
        ([add(0, "a"), remove(1, "a", notice_s=-1)], "-1 is not a notice"),
        ([TraceEvent(at_s=0, kind="add", node="a", notice_s=3)], "an addition has no notice"),
    ],
)
def test_a_wrong_trace_is_refused(events: list[Any], problem: str) -> None:
    with pytest.raises(TraceError, match=problem):
        trace_of(*events)


def test_a_trace_ends_after_its_last_event_and_within_100_years() -> None:
    with pytest.raises(TraceError, match="before the last event at 40 s"):
        trace_of(add(0, "a"), add(40, "b"), end_s=39)
    with pytest.raises(TraceError, match="the trace has 317 years, more than 100"):
        trace_of(add(0, "a"), end_s=1e10)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def test_a_csv_is_read_from_its_first_record_on(tmp_path: Path) -> None:
    text = "time_s,event,node,notice_s\n480,add,a,\n480,add,b,\n600.5,remove,a,120\n"
    trace = read_trace(written(tmp_path, text))
    assert trace.name == "trace"
    assert trace.source == "trace.csv, csv"
    assert trace.initial_nodes == ("a", "b")
    assert trace.changes == (TraceChange(at_s=120.5, removed=("a",), added=(), notice_s=120.0),)
    assert trace.end_s == 120.5


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the file is empty"),
        ("time_s,event,node\n", "no records"),
        ("time_s,event,node,colour\n", "line 1: unknown columns colour"),
        ("event,time_s,node\n", "line 1: the columns are event,time_s,node"),
        ("time_s,event,node\n0,add,a\n\n5,add,b\n", "line 3: the line has 0 fields"),
        ("time_s,event,node\n0,add,a\n5,add\n", "line 3: the line has 2 fields"),
        ("time_s,event,node\n0,add,a\n,add,b\n", "line 3: '' is not a time"),
        ("time_s,event,node\n0,add,a\nnan,add,b\n", "line 3: 'nan' is not a time"),
        ("time_s,event,node\n-1,add,a\n", "line 2: '-1' is not a time"),
        ("time_s,event,node\n0,add,a\n1,fail,a\n", "line 3: 'fail' is not an event"),
        ("time_s,event,node\n0,add,a\n9,add,b\n8,add,c\n", "line 4: the times are not sorted"),
        ("time_s,event,node\n0,add,a\n9,remove,b\n", "line 3: b is removed but is not there"),
        ("time_s,event,node\n0,remove,a\n", "line 2: a is removed but is not there"),
        ("time_s,event,node\n0,add,a\n9,add,a\n", "line 3: a is added but is there already"),
        ("time_s,event,node\n0,add,a\n9,add, \n", "line 3: the node has no name"),
        (
            'time_s,event,node\n0,add,a\n1,add,"b\n' + "2,add,c\n" * 20_000,
            "line 3: no CSV from here on: field larger than field limit",
        ),
        ("a trace\n", "the format is not recognised"),
    ],
)
def test_a_wrong_csv_is_refused_with_its_line(text: str, problem: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigurationError) as caught:
        read_trace(path)
    assert problem in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_a_missing_file_and_an_unknown_format_are_errors(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="does not exist"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(TraceError, match="this is a directory"):
        read_trace(tmp_path)
    with pytest.raises(TraceError, match="the format 'json' is unknown"):
        read_trace(written(tmp_path, "time_s,event,node\n0,add,a\n"), "json")
