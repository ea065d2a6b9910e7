"""Traces: clocks aligned by votes, copied bytes by what they overlapped, Chrome's format, the image."""

import json
from pathlib import Path
from typing import Any

import pytest

from ftd.cli.trace import trace
from ftd.errors import ConfigurationError
from ftd.observe.view.plots.trace_plot import copied_line, draw_trace, plot_trace
from ftd.observe.view.trace import CopiedBytes, align_traces, chrome_trace, sum_copied_bytes
from ftd.transport.client import ClusterClient
from ftd.transport.wire.public import TraceData
from runtime.monitoring.tracing import MAX_SPANS, TraceRecorder
from statemachine.messages.trace import Trace
from tests.helpers.commands import ftd_here

FAST = 1_000_000_000_000_000


def data(rank: int, clock_us: int, spans: list[tuple[str, int, int, int, int]]) -> TraceData:
    shifted = [(kind, FAST + clock_us + began, took, n, size) for kind, began, took, n, size in spans]
    return TraceData(node=f"node-{rank}", device=0, rank=rank, generation=1, dropped=rank, spans=shifted)


SPANS = [
    ("step", 0, 1000, 7, 0),
    ("forward", 0, 300, 0, 0),
    ("bubble", 300, 200, 0, 0),
    ("copy", 400, 200, 6, 4096),
    ("vote", 900, 50, 0, 0),
    ("help", 960, 10, 6, 1024),
]


def test_the_clocks_of_hosts_are_aligned_at_votes() -> None:
    rows = align_traces([data(1, 5_000_000, SPANS), data(0, 0, SPANS)], {"node-0/0": "pipeline A, stage 1"})
    assert [row.rank for row in rows] == [0, 1]
    assert [row.position for row in rows] == ["pipeline A, stage 1", ""]
    for row in rows:
        (vote,) = row.spans_of("vote")
        assert (vote.began_us, vote.ended_us) == (900, 950)


def test_copied_bytes_are_summed_by_what_they_overlapped() -> None:
    (row,) = align_traces([data(0, 0, SPANS)], {})
    assert sum_copied_bytes([row]) == CopiedBytes(
        waiting_bytes=2048, overlapped_bytes=2048, stalled_bytes=1024
    )
    assert "40% while waiting" in copied_line([row]) and "20% while training was stalled" in copied_line(
        [row]
    )
    assert copied_line([]) == "no snapshot was copied during the trace"


def test_the_trace_is_in_chromes_format() -> None:
    document = json.loads(chrome_trace(align_traces([data(0, 0, SPANS), data(1, 9, SPANS)], {}), name="gpt"))
    spans = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 2 * len(SPANS)
    assert {event["tid"] for event in spans if event["cat"] == "copy"} == {1}
    assert {event["pid"] for event in spans} == {0, 1}
    copy = next(event for event in spans if event["cat"] == "copy")
    assert copy["ts"] == 400 and copy["dur"] == 200 and copy["args"]["bytes"] == 4096
    names = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"]
    assert names == ["rank 0 · node-0/0", "rank 1 · node-1/0"]


def test_the_image_names_every_rank_and_step() -> None:
    figure = draw_trace(align_traces([data(0, 0, SPANS), data(1, 9, SPANS)], {}), name="gpt")
    (axes,) = figure.axes
    texts = [text.get_text() for text in axes.texts]
    assert {"rank 0  node-0/0", "rank 1  node-1/0", "step 7"} <= set(texts)
    draw_trace([], name="nothing")


def test_a_recorder_records_the_requested_steps_within_its_capacity() -> None:
    recorder = TraceRecorder()

    def step(number: int, spans: int = 1) -> object:
        recorder.begin_step(number)
        for _ in range(spans):
            with recorder.span("forward"):
                pass
        return recorder.end_step(1, 0, number)

    assert step(1) is None and not recorder.on
    recorder.request(Trace(request="r", first_step=3, steps=2))
    assert [step(2), step(3)] == [None, None]
    traced = recorder.end_step(1, 0, 3, over=True)
    assert traced is not None and len(traced.spans) == 1, "the generation ended"
    assert recorder.end_step(1, 0, 3, over=True) is None
    recorder.request(Trace(request="s", first_step=0, steps=1))
    recorder.begin_step(9)
    for _ in range(MAX_SPANS + 5):
        recorder.add("copy", 1.0, 2.0)
    full = recorder.end_step(1, 0, 9)
    assert full is not None and (full.request, len(full.spans), full.dropped) == ("s", MAX_SPANS, 5)


def test_an_unwritable_path_is_rejected_before_the_trace_is_requested(tmp_path: Path) -> None:
    for place, words in (("trace.pdf", ".svg"), ("nowhere/trace.json", "does not exist")):
        with pytest.raises(ConfigurationError, match=words):
            trace(out=[tmp_path / place])


def test_the_image_is_written_in_both_formats(tmp_path: Path) -> None:
    rows = align_traces([data(0, 0, SPANS)], {})
    for kind, begin in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        plot_trace(rows, tmp_path / f"trace.{kind}", name="gpt")
        assert (tmp_path / f"trace.{kind}").read_bytes().startswith(begin)
    with pytest.raises(ConfigurationError, match="cannot be written"):
        plot_trace(rows, tmp_path / "no" / "trace.png", name="gpt")


@pytest.mark.parametrize(
    ("state", "code", "says"),
    [
        ({"phase": "UNREACHABLE", "reason": "its connection broke"}, 3, "no coordinator says"),
        ({"phase": "WAITING"}, 1, "no job is training (the cluster is WAITING)"),
    ],
)
def test_the_exit_code_says_whether_anybody_answers(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    state: dict[str, Any],
    code: int,
    says: str,
) -> None:
    async def connect(self: ClusterClient) -> ClusterClient:
        return self

    async def close(_: ClusterClient, *__: object) -> None: ...
    async def published(_: ClusterClient) -> dict[str, Any]:
        return state

    monkeypatch.setattr(ClusterClient, "__aenter__", connect)
    monkeypatch.setattr(ClusterClient, "__aexit__", close)
    monkeypatch.setattr(ClusterClient, "state", published)
    command = ["trace", "--out", str(tmp_path / "t.json"), "--broker", "mqtt://h"]
    ended, _, err = ftd_here(*command, patch=monkeypatch, said=capsys)
    assert ended == code and says in err
