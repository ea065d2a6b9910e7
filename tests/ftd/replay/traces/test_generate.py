"""Traces from a failure model: their statistics, their seeds, and what a model may not say."""

import math
import statistics
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ftd.errors import ConfigurationError
from ftd.replay.traces.generate import (
    AbsenceLaw,
    FailureLaw,
    FailureModel,
    Preemptions,
    RackFailures,
    generate,
    read_failure_model,
)
from ftd.replay.traces.trace import Trace, TraceEvent

MODEL = FailureModel(
    nodes=11,
    duration_h=2000,
    failures=FailureLaw(law="weibull", mean_h=100, shape=0.7),
    racks=RackFailures(size=4, mean_h=400),
    preemptions=Preemptions(mean_h=150, notice_s=120, replacement=AbsenceLaw(law="constant", mean_h=0.5)),
    repair=AbsenceLaw(law="lognormal", mean_h=3, sigma=1.0),
)
"""A model with all causes; its last rack is not full."""


def events_of(trace: Trace, node: str) -> list[TraceEvent]:
    return [event for event in trace.events if event.node == node]


def stays_h(trace: Trace) -> list[float]:
    """Return how long nodes stayed, in hours."""
    found = []
    for node in trace.initial_nodes:
        times = [event.at_s for event in events_of(trace, node)]
        found += [(gone - came) / 3600 for came, gone in zip(times[::2], times[1::2], strict=False)]
    return found


def absences_h(trace: Trace) -> list[float]:
    """Return how long nodes were away, in hours."""
    found = []
    for node in trace.initial_nodes:
        times = [event.at_s for event in events_of(trace, node)]
        found += [(back - gone) / 3600 for gone, back in zip(times[1::2], times[2::2], strict=False)]
    return found


def test_a_seed_gives_one_trace() -> None:
    trace = generate(MODEL, 3)
    assert generate(MODEL, 3) == trace
    assert generate(MODEL, 4).events != trace.events
    assert trace.end_s == 2000 * 3600
    assert trace.initial_nodes == tuple(f"n{number}" for number in range(11))
    assert "seed 3" in trace.source
    assert "not observed" in trace.notes[0]


def test_more_nodes_leave_the_others_as_they_were() -> None:
    few, many = generate(MODEL, 3), generate(msgspec.structs.replace(MODEL, nodes=30), 3)
    for node in few.initial_nodes:
        assert events_of(many, node) == events_of(few, node)
    assert len({events_of(many, node)[1].at_s for node in many.initial_nodes}) > 20, "streams are different"


def test_nodes_are_there_as_often_as_failures_and_repairs_say() -> None:
    model = FailureModel(
        nodes=50, duration_h=5000, failures=FailureLaw(mean_h=90), repair=AbsenceLaw(mean_h=10)
    )
    trace = generate(model, 0)
    assert trace.removals == pytest.approx(50 * 5000 / (90 + 10), rel=0.1)
    assert trace.mean_nodes == pytest.approx(50 * 0.9, rel=0.03)
    stays = stays_h(trace)
    assert statistics.mean(stays) == pytest.approx(90, rel=0.1)
    assert statistics.stdev(stays) == pytest.approx(90, rel=0.15), (
        "an exponential law has its mean as deviation"
    )
    assert statistics.mean(absences_h(trace)) == pytest.approx(10, rel=0.1)


def test_a_weibull_shape_below_1_makes_young_nodes_fail_more_often() -> None:
    model = FailureModel(
        nodes=50,
        duration_h=5000,
        failures=FailureLaw(law="weibull", mean_h=50, shape=0.6),
        repair=AbsenceLaw(law="constant", mean_h=1),
    )
    stays = stays_h(generate(model, 1))
    assert statistics.mean(stays) == pytest.approx(50, rel=0.1)
    early = 1 - math.exp(-((0.1 * math.gamma(1 + 1 / 0.6)) ** 0.6))
    assert early > 0.27, "an exponential law has 0.095"
    assert sum(stay < 5 for stay in stays) / len(stays) == pytest.approx(early, rel=0.1)


def test_lognormal_repairs_have_their_mean_and_median() -> None:
    model = FailureModel(
        nodes=50,
        duration_h=5000,
        failures=FailureLaw(mean_h=50),
        repair=AbsenceLaw(law="lognormal", mean_h=6, sigma=1.0),
    )
    absences = absences_h(generate(model, 2))
    assert statistics.mean(absences) == pytest.approx(6, rel=0.1)
    assert statistics.median(absences) == pytest.approx(6 * math.exp(-0.5), rel=0.1)


def test_a_rack_fails_and_returns_with_all_its_nodes() -> None:
    model = FailureModel(
        nodes=11, duration_h=5000, racks=RackFailures(size=4, mean_h=300), repair=AbsenceLaw(mean_h=5)
    )
    trace = generate(model, 5)
    racks = [("n0", "n1", "n2", "n3"), ("n4", "n5", "n6", "n7"), ("n8", "n9", "n10")]
    assert {change.removed for change in trace.changes} == {*racks, ()}
    assert {change.added for change in trace.changes} == {*racks, ()}
    failures = sum(bool(change.removed) for change in trace.changes)
    assert failures == pytest.approx(3 * 5000 / 305, rel=0.3)


def test_no_node_is_back_before_its_rack() -> None:
    trace = generate(MODEL, 6)
    racks = generate(msgspec.structs.replace(MODEL, failures=None, preemptions=None), 6)
    for rack in (0, 1, 2):
        nodes = [node for node in trace.initial_nodes if int(node[1:]) // 4 == rack]
        times = [event.at_s for event in events_of(racks, nodes[0])]
        for gone_s, back_s in zip(times[1::2], times[2::2], strict=False):
            for node in nodes:
                assert not [event for event in events_of(trace, node) if gone_s < event.at_s < back_s]


def test_preemptions_give_notice_and_failures_do_not() -> None:
    spot = msgspec.structs.replace(MODEL, failures=None, racks=None, repair=None)
    trace = generate(spot, 7)
    notices = [event.notice_s for event in trace.events if event.kind == "remove"]
    assert (statistics.median(notices), max(notices)) == (120.0, 120.0)
    assert min(notices) > 0
    assert absences_h(trace) == pytest.approx([0.5] * len(absences_h(trace)))
    failing = generate(msgspec.structs.replace(MODEL, preemptions=None), 7)
    assert {event.notice_s for event in failing.events} == {0.0}


def test_a_notice_is_not_longer_than_the_instance_lived() -> None:
    hasty = Preemptions(mean_h=0.02, notice_s=120, replacement=AbsenceLaw(mean_h=1))
    trace = generate(FailureModel(nodes=5, duration_h=50, preemptions=hasty), 0)
    came_s: dict[str, float] = {}
    for event in trace.events:
        if event.kind == "add":
            came_s[event.node] = event.at_s
        else:
            assert event.notice_s <= event.at_s - came_s[event.node] + 1e-6
    assert any(0 < event.notice_s < 120 for event in trace.events)


def test_nodes_without_repair_do_not_return() -> None:
    trace = generate(FailureModel(nodes=40, duration_h=100, failures=FailureLaw(mean_h=50)), 8)
    assert {event.at_s for event in trace.events if event.kind == "add"} == {0.0}
    assert trace.removals == 40 - trace.fewest_nodes
    assert trace.fewest_nodes == pytest.approx(40 * math.exp(-2), abs=6)


WRONG_FILES = {
    "nodes = 4\n": ("duration_h", "missing"),
    "nodes = 4\nduration_h = 5\n": ("", "the model has no failures"),
    "nodes = 0\nduration_h = 5\nfailures = {mean_h = 1}\n": ("nodes", "0 is not allowed"),
    "nodes = 1_000_000_000\nduration_h = 5\nfailures = {mean_h = 1e9}\n": (
        "nodes",
        "1000000000 is not allowed",
    ),
    "nodes = 4\nduration_h = -5\nfailures = {mean_h = 1}\n": ("duration_h", "-5.0 is not allowed"),
    "nodes = 4\nduration_h = 5\nfailures = {mean_h = 0}\n": ("failures.mean_h", "0.0 is not allowed"),
    "nodes = 4\nduration_h = 5\nfailures = {mean = 1}\n": ("failures.mean", "unknown"),
    "nodes = 4\nduration_h = 5\nfailures = {mean_h = 1, law = 'gamma'}\n": (
        "failures.law",
        "'gamma' is not known",
    ),
    "nodes = 4\nduration_h = 5\nfailures = {mean_h = 1, law = 'weibull'}\n": (
        "failures.shape",
        "has a shape",
    ),
    "nodes = 4\nduration_h = 5\nfailures = {mean_h = 1, shape = 0.7}\n": ("failures.shape", "has no shape"),
    "nodes = 4\nduration_h = 5\nfailures = {mean_h = 1, law = 'weibull', shape = 0.01}\n": (
        "failures.shape",
        "0.01 is not allowed",
    ),
    "nodes = 4\nduration_h = 5\nracks = {mean_h = 1, size = 0}\n": ("racks.size", "0 is not allowed"),
    "nodes = 4\nduration_h = 5\npreemptions = {mean_h = 1, notice_s = -1}\n": (
        "preemptions.notice_s",
        "-1.0",
    ),
    "nodes = 4\nduration_h = 5\nfailures = {mean_h = 1}\nrepair = {mean_h = 1, sigma = 1}\n": (
        "repair.sigma",
        "the law exponential has no sigma",
    ),
    "nodes = 4\nduration_h = 5\nfailures = {mean_h = 1}\n"
    "repair = {mean_h = 1, law = 'lognormal', sigma = 1e200}\n": (
        "repair.sigma",
        "1e+200 is not allowed",
    ),
    "nodes = 1000\nduration_h = 9e6\nfailures = {mean_h = 1}\n": (
        "duration_h",
        "would have about 1.8e+10 events",
    ),
}


@pytest.mark.parametrize("text", WRONG_FILES)
def test_a_wrong_model_is_refused_with_its_file_and_key(text: str, tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text(text)
    key, problem = WRONG_FILES[text]
    with pytest.raises(ConfigurationError) as caught:
        read_failure_model(path)
    assert problem in str(caught.value)
    assert str(caught.value).startswith(f"model.toml: {key}" if key else problem)


def test_a_model_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "spot.toml"
    path.write_text("nodes = 4\nduration_h = 5\n[failures]\nmean_h = 2\n")
    expected: dict[str, Any] = {"nodes": 4, "duration_h": 5.0, "failures": FailureLaw(mean_h=2.0)}
    assert read_failure_model(path) == FailureModel(name="spot", **expected)
    with pytest.raises(ConfigurationError, match="the seed -1 is negative"):
        generate(read_failure_model(path), -1)
