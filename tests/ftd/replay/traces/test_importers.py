"""Importers of public trace formats, each on a sample in its format; and what they refuse."""

import json
from pathlib import Path
from typing import Any

import pytest

from ftd.replay.traces.reading import FORMATS, read_trace
from ftd.replay.traces.trace import TraceChange, TraceError

SAMPLES = Path(__file__).parent / "samples"
EVALUATED = Path(__file__).parents[4] / "benchmarks" / "traces"
LANL_HEADER = (SAMPLES / "failures.csv").read_text().splitlines()[0]


def lanl_line(**given: str) -> str:
    """Return a line of LANL's format with the given columns and made-up others."""
    columns = {"System": "91", "nodes": "4", "nodenumz": "1", "Prob Started": "6/21/2005 10:00"}
    columns |= {"Prob Fixed": "6/21/2005 11:00"} | given
    return ",".join(columns.get(name, "") for name in LANL_HEADER.split(","))


@pytest.mark.parametrize("name", ["auto", "bamboo", "oobleck"])
def test_events_of_bamboo_and_oobleck_are_read(name: str) -> None:
    trace = read_trace(SAMPLES / "events.csv", name)
    assert trace.source == f"events.csv, {'bamboo' if name == 'auto' else name}"
    assert trace.initial_nodes == ("node1", "node2", "node3")
    assert trace.changes == (
        TraceChange(at_s=60, removed=("node2",), added=("node4",), notice_s=0),
        TraceChange(at_s=180.5, removed=("node3",), added=(), notice_s=0),
    )


def test_a_log_of_bamboo_s_monitor_is_read() -> None:
    trace = read_trace(SAMPLES / "monitor.txt")
    assert trace.source == "monitor.txt, bamboo"
    assert trace.initial_nodes == ("n0", "n1", "n2"), "the minute without a node is left out"
    assert trace.node_counts() == [(0, 3), (120, 1), (270, 4)]
    assert trace.changes[1].added == ("n3", "n4", "n5"), "nodes that come have new names"
    assert set(trace.changes[0].removed) < {"n0", "n1", "n2"}
    assert trace.end_s == 360, "the trace ends with the last sample"
    assert trace.notes[0].startswith("The file")
    assert trace.notes[1] == "The first 60 s without a node are left out."
    assert read_trace(SAMPLES / "monitor.txt") == trace, "the drawing of nodes is seeded"


def test_a_zone_of_skypilot_is_read() -> None:
    trace = read_trace(SAMPLES / "zone.json")
    assert trace.source == "zone.json, skypilot"
    assert trace.node_counts() == [(0, 2), (600, 4), (900, 1)]
    assert trace.end_s == 5 * 300, "the last sample holds as long as the others"
    assert any("prices" in note for note in trace.notes)


def test_missing_samples_of_skypilot_are_accepted_up_to_a_length(tmp_path: Path) -> None:
    path = tmp_path / "zone.json"
    path.write_text('{"metadata": {"gap_seconds": 300}, "data": [2, null, null, 3, null]}')
    with pytest.raises(TraceError, match=r"data\[1\]: the sample is missing"):
        read_trace(path)
    with pytest.raises(TraceError, match=r"data\[3\]: there is no record for the 900 s before this one"):
        read_trace(path, max_gap_s=600)
    trace = read_trace(path, max_gap_s=900)
    assert trace.node_counts() == [(0, 2), (900, 3)]
    assert trace.end_s == 1500, "the number before the last sample holds there, too"
    assert any("3 of 5 samples are missing" in note for note in trace.notes)


def test_missing_samples_of_skypilot_at_both_ends(tmp_path: Path) -> None:
    path = tmp_path / "zone.json"
    path.write_text('{"metadata": {"gap_seconds": 300}, "data": [null, null, 2, 3, null, null]}')
    with pytest.raises(TraceError, match="the end of data: there is no record for the 900 s before this one"):
        read_trace(path, max_gap_s=600)
    trace = read_trace(path, max_gap_s=900)
    assert trace.node_counts() == [(0, 2), (300, 3)] and trace.end_s == 1200
    assert trace.notes[1:] == (
        "The first 2 of 6 samples are missing and left out.",
        "2 of 6 samples are missing; the number before them holds.",
    )


def test_faults_of_infinitehbd_are_read() -> None:
    first, second = (f"11111111-aaaa-4aaa-8aaa-00000000000{n}" for n in (1, 2))
    trace = read_trace(SAMPLES / "faults.json", nodes=4)
    assert trace.source == "faults.json, infinitehbd"
    assert trace.initial_nodes == (first, second, "unfailing-1", "unfailing-2")
    assert trace.changes == (
        TraceChange(at_s=43_200, removed=(first,), added=(), notice_s=0),
        TraceChange(at_s=69_120, removed=(second,), added=(second,), notice_s=0),
        TraceChange(at_s=108_000, removed=(), added=(first,), notice_s=0),
    ), "overlapping faults are one absence, and a fault of length 0 is a restart"
    assert trace.notes == ()
    only_named = read_trace(SAMPLES / "faults.json")
    assert only_named.most_nodes == 2
    assert "Only the 2 nodes that failed" in only_named.notes[0]


def test_failures_of_one_system_of_lanl_are_read() -> None:
    trace = read_trace(SAMPLES / "failures.csv", system="91")
    assert trace.source == "failures.csv, lanl, system 91"
    assert trace.initial_nodes == tuple(f"system91-node{number}" for number in range(4))
    assert trace.changes == (
        TraceChange(at_s=80_100, removed=("system91-node3",), added=("system91-node3",), notice_s=0),
        TraceChange(at_s=122_400, removed=("system91-node1",), added=(), notice_s=0),
        TraceChange(at_s=129_600, removed=(), added=("system91-node1",), notice_s=0),
    ), "times count from the midnight before the first failure"


def test_nodes_of_lanl_may_have_numbers_above_their_count(tmp_path: Path) -> None:
    path = tmp_path / "failures.csv"
    path.write_text("\n".join([LANL_HEADER, lanl_line(nodes="3", nodenumz="7")]))
    assert read_trace(path).initial_nodes == tuple(f"system91-node{number}" for number in (0, 1, 7))


def test_a_gap_is_noted_and_is_an_error_where_it_is_limited(tmp_path: Path) -> None:
    records = [f"{time_s},add,n{time_s}" for time_s in (*range(0, 2000, 100), 9000)]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["time_s,event,node", *records]))
    assert read_trace(path).notes == (
        "There is no record for 2.0 h from hour 0.5 on, 71 times the mean of the others; the replay takes it that no "
        "node came or went.",
    )
    assert read_trace(path, max_gap_s=7100).most_nodes == 21
    with pytest.raises(TraceError, match="line 22: there is no record for the 7100 s before this one"):
        read_trace(path, max_gap_s=7000)
    path.write_text("\n".join(["time_s,event,node", records[0], records[1], records[-1]]))
    assert "89 times the mean of the others" in read_trace(path).notes[0], "also among few records"
    path.write_text("\n".join(["time_s,event,node", records[0], records[-1]]))
    assert read_trace(path).notes == (), "one span has nothing to be compared with"


def test_the_hour_of_a_gap_counts_from_the_start_of_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    counts = ("11, 00:00:00, 0", "11, 05:00:00, 4", "11, 06:00:00, 3", "13, 12:00:00, 4")
    path.write_text("\n".join(f"2021-12-{line}" for line in counts))
    assert "no record for 54.0 h from hour 1.0 on, 54 times" in read_trace(path).notes[-1]
    times = [
        (f"6/{day}/2005 {hour}:00", f"6/{day}/2005 {hour}:30") for day, hour in ((21, 20), (21, 21), (25, 22))
    ]
    path.write_text(
        "\n".join([LANL_HEADER, *(lanl_line(**{"Prob Started": a, "Prob Fixed": b}) for a, b in times)])
    )
    assert "from hour 21.5 on" in read_trace(path).notes[-1], "the trace begins at midnight"
    days = (100.0, 100.1, 100.2, 150.0)
    path.write_text(
        json.dumps([{"node_id": f"a{at}", "event_time": at, "event_type": "fault_start"} for at in days])
    )
    assert "from hour 2,404.8 on" in read_trace(path).notes[0], "the trace begins at day 0"


@pytest.mark.parametrize(
    ("name", "options", "remedy"),
    [
        ("failures.csv", {}, "with --system"),
        ("failures.csv", {"system": "1"}, "with --system: 91 "),
        ("failures.csv", {"system": "91", "nodes": 1}, "with --nodes"),
        ("faults.json", {"nodes": 1}, "with --nodes"),
    ],
)
def test_the_remedy_names_the_option_of_the_command(name: str, options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(SAMPLES / name, **options)
    assert remedy in (caught.value.remedy or "")


QUOTED = '"2'

WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "events: too few fields": ("0,add,a\n5,add\n", {}, "line 2: the line has 2 fields"),
    "events: unknown event": ("0,add,a\n5,fail,b\n", {}, "line 2: 'fail' is not an event"),
    "events: unsorted": ("9000,add,a\n5000,add,b\n", {}, "line 2: the times are not sorted"),
    "events: no such node": ("0,add,a\n5000,remove,b\n", {}, "line 2: b is removed but is not there"),
    "log: broken line": (
        "2025-03-01, 10:00:00, 3\n2025-03-01, 10:01:00\n",
        {},
        "line 2: '2025-03-01, 10:01:00'",
    ),
    "log: no date": ("2025-03-01, 10:00:00, 3\n2025-13-01, 10:01:00, 3\n", {}, "is not a sample"),
    "log: unsorted": (
        "2025-03-01, 10:00:00, 3\n2025-03-01, 09:00:00, 3\n",
        {},
        "line 2: the times are not sorted",
    ),
    "log: never a node": ("2025-03-01, 10:00:00, 0\n2025-03-01, 10:01:00, 0\n", {}, "no sample has a node"),
    "log: too many nodes": (
        "2025-03-01, 10:00:00, 3\n2025-03-01, 10:01:00, 9999999999\n",
        {},
        "line 2: 9999999999 nodes are more than 100000",
    ),
    "zone: too many nodes": (
        '{"metadata": {"gap_seconds": 300}, "data": [4, 4000000000]}',
        {},
        "data[1]: 4000000000 nodes are more than 100000",
    ),
    "zone: no interval": (
        '{"metadata": {"gap_seconds": 0}, "data": [1]}',
        {},
        "time between two samples is 0",
    ),
    "zone: unknown key": ('{"metadata": {"gap_seconds": 9}, "values": [1]}', {}, "unknown field `values`"),
    "zone: negative": (
        '{"metadata": {"gap_seconds": 9}, "data": [1, -1]}',
        {},
        "data[1]: -1 is not a number",
    ),
    "zone: empty": ('{"metadata": {"gap_seconds": 9}, "data": []}', {}, "there is no sample"),
    "zone: no JSON": ('{"metadata": {"gap_seconds": 9}, "data": [1}', {}, "JSON is malformed"),
    "faults: unknown type": (
        '[{"node_id": "a", "event_time": 0, "event_type": "fault_start"}, '
        '{"node_id": "a", "event_time": 1, "event_type": "reboot"}]',
        {},
        "Invalid enum value 'reboot' - at `$[1].event_type`",
    ),
    "faults: end without begin": (
        '[{"node_id": "a", "event_time": 0.5, "event_type": "fault_end"}, '
        '{"node_id": "a", "event_time": 1, "event_type": "fault_start"}]',
        {},
        "entry 0: a failure of a ends that did not begin",
    ),
    "faults: unsorted": (
        '[{"node_id": "a", "event_time": 2, "event_type": "fault_start"}, '
        '{"node_id": "b", "event_time": 1, "event_type": "fault_start"}]',
        {},
        "entry 1: the times are not sorted",
    ),
    "faults: too few nodes": (
        '[{"node_id": "a", "event_time": 2, "event_type": "fault_start"}, '
        '{"node_id": "b", "event_time": 3, "event_type": "fault_start"}]',
        {"nodes": 1},
        "the file names 2 nodes, more than 1",
    ),
    "lanl: which system": (
        f"{LANL_HEADER}\n{lanl_line()}\n{lanl_line(System='92')}\n",
        {},
        "the file has the systems 91 (1 failures), 92 (1 failures)",
    ),
    "lanl: no such system": (f"{LANL_HEADER}\n{lanl_line()}\n", {"system": "9"}, "the file has no system 9"),
    "lanl: missing columns": (
        "System,Prob Started,Prob Fixed\n1,2,3\n",
        {},
        "line 1: the columns nodes, nodenumz are missing",
    ),
    "lanl: no node": (
        f"{LANL_HEADER}\n{lanl_line(nodenumz='')}\n",
        {},
        "line 2: system 91 does not say which node",
    ),
    "lanl: too many nodes": (
        f"{LANL_HEADER}\n{lanl_line(nodes='1e12')}\n",
        {},
        "line 2: 1e+12 nodes are more than 100000",
    ),
    "lanl: no time": (
        f"{LANL_HEADER}\n{lanl_line(**{'Prob Fixed': ''})}\n",
        {},
        "line 2: '' is not a time",
    ),
    "lanl: fixed before": (
        f"{LANL_HEADER}\n{lanl_line(**{'Prob Fixed': '6/21/2005 9:00'})}\n",
        {},
        "line 2: the failure was fixed at 6/21/2005 9:00, before it started",
    ),
    "lanl: a quotation mark": (
        f"{LANL_HEADER}\n{lanl_line()}\n{lanl_line(nodenumz=QUOTED)}\n" + f"{lanl_line()}\n" * 6000,
        {},
        "line 3: no CSV from here on: field larger than field limit",
    ),
    "lanl: too few nodes": (
        f"{LANL_HEADER}\n{lanl_line()}\n{lanl_line(nodenumz='2')}\n",
        {"nodes": 1},
        "2 nodes failed, more than 1",
    ),
}


@pytest.mark.parametrize("case", sorted(WRONG))
def test_a_wrong_file_is_refused_with_its_place(case: str, tmp_path: Path) -> None:
    text, options, problem = WRONG[case]
    path = tmp_path / "trace.txt"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read_trace(path, **options)
    assert problem in str(caught.value)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("sample", "options", "problem"),
    [
        ("events.csv", {"nodes": 5}, "the format bamboo has no option nodes"),
        ("faults.json", {"system": "2"}, "the format infinitehbd has no option system"),
        ("faults.json", {"nodes": 0}, "0 is not a number of nodes"),
        ("events.csv", {"max_gap_s": 0.0}, "0.0 s is not a gap"),
    ],
)
def test_an_option_that_means_nothing_is_refused(sample: str, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(TraceError, match=problem):
        read_trace(SAMPLES / sample, **options)


def test_an_unknown_content_names_the_formats(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"events": []}))
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert ", ".join(FORMATS) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "removals", "hours", "gap_minutes", "nodes"),
    [
        ("bamboo_ec2_p3", 167, 11.4, 8.31, (10, 24.0, 32)),
        ("bamboo_gcp_a2highgpu1g_east1b", 154, 26.6, 36.75, (17, 57.2, 64)),
        ("oobleck_ec2_p3_scaled", 142, 11.4, 7.71, (15, 24.1, 30)),
        ("oobleck_gcp_scaled", 72, 10.6, 10.27, (15, 22.2, 30)),
        ("oobleck_fail_6h", 15, 90.0, 360.0, (15, 23.0, 30)),
        ("oobleck_fail_1h", 15, 15.0, 60.0, (15, 23.0, 30)),
        ("oobleck_fail_10m", 15, 2.5, 10.0, (15, 23.0, 30)),
    ],
)
def test_the_evaluated_traces_are_those_that_their_table_describes(
    name: str, removals: int, hours: float, gap_minutes: float, nodes: tuple[int, float, int]
) -> None:
    trace = read_trace(EVALUATED / f"{name}.csv")
    assert trace.removals == removals
    assert trace.end_s / 3600 == pytest.approx(hours, abs=0.051)
    removed_s = sorted({event.at_s for event in trace.events if event.kind == "remove" and event.at_s > 0})
    mean_gap_s = (removed_s[-1] - removed_s[0]) / (len(removed_s) - 1)
    assert mean_gap_s / 60 == pytest.approx(gap_minutes, abs=0.021)
    assert (trace.fewest_nodes, round(trace.mean_nodes, 1), trace.most_nodes) == nodes
