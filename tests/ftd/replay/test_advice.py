"""Advice for small jobs: each question has the answer that the replay and the models give."""

import io
from functools import cache
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from ftd.errors import ConfigurationError
from ftd.replay.advice import Advice, Question, _Adviser, advise
from ftd.replay.advice_table import render_advice
from ftd.replay.parameters import read_parameters
from ftd.replay.traces.trace import Trace
from ftd.transport.wire.public import encode_document
from planner.intervals import IntervalCost, checkpoint_cost_share, choose_checkpoint_interval
from tests.helpers.replay_jobs import MB, make_job, make_trace

DAY_S = 86_400.0


def losing(*lost: tuple[float, str], nodes: int = 6, back_after_s: float = 3600.0) -> Trace:
    """Return a trace of a day in which these nodes are lost at these times, and come back later."""
    events = [(at_s, "remove", node) for at_s, node in lost]
    events += [(at_s + back_after_s, "add", node) for at_s, node in lost]
    return make_trace(nodes, *sorted(events), end_s=DAY_S)


@cache
def few_failures() -> Advice:
    return advise(make_job(), [losing((10_000.0, "n5"), (40_000.0, "n4"))], read_parameters())


def asked(advice: Advice, subject: str) -> Question:
    """Return the question about a subject."""
    [question] = [each for each in advice.questions if each.subject == subject]
    return question


def test_every_question_has_an_answer_and_a_runner_up() -> None:
    advice = few_failures()
    assert [question.subject for question in advice.questions] == [
        "tolerate",
        "protection",
        "snapshots",
        "checkpoints",
        "spares",
    ]
    for question in advice.questions:
        goodputs = [choice.goodput for choice in question.choices if choice.goodput is not None]
        assert question.runner_up is not None and question.reason
        assert all(0 < goodput <= 1.0 + 1e-9 for goodput in goodputs)
        if question.subject != "spares":
            assert question.chosen.goodput == pytest.approx(max(goodputs), abs=1e-3)
    assert advice.failures_per_day == pytest.approx(2.0)


def test_failures_that_replicas_survive_need_no_more_of_them() -> None:
    """Six nodes hold three replicas, of which two stay if four nodes are left."""
    advice = few_failures()
    question = asked(advice, "tolerate")
    assert question.chosen.value == "0"
    impossible = [choice for choice in question.choices if choice.goodput is None]
    assert [choice.value for choice in impossible] == ["3"], "four replicas need eight nodes"
    assert "failures = 0" in advice.job_file and "[snapshot]\nevery_steps" in advice.job_file


def test_the_loss_of_all_nodes_makes_checkpoints_matter() -> None:
    """All nodes are lost at once. A checkpoint of 160 GB takes 218 s at 735 MB/s, ten times which two are apart."""
    trace = losing((10_000.0, "n5"), *((30_000.0, f"n{index}") for index in range(6)), back_after_s=600.0)
    job = make_job(state_bytes=20_000 * MB)
    question = asked(advise(job, [trace], read_parameters()), "checkpoints")
    often, seldom = question.choices[0], question.choices[-1]
    assert often.remark.startswith("every 36:") and int(seldom.value) == 16 * int(often.value)
    assert often.goodput is not None and seldom.goodput is not None
    assert often.goodput > seldom.goodput + 0.01


@pytest.mark.long
def test_checkpoints_that_delay_training_are_as_seldom_as_in_a_running_job(tmp_path: Path) -> None:
    """Two thirds of each write of 2.2 s delay training. A running job that measured the same would choose the same."""
    trace, job = losing((10_000.0, "n5"), (40_000.0, "n4")), make_job(state_bytes=200 * MB)
    measured = tmp_path / "measured.toml"
    measured.write_text(f"[ftd]\ncheckpoint_cost_share = {checkpoint_cost_share(1.0, 3.0)}\n")
    advice = advise(job, [trace], read_parameters(measured))
    question = asked(advice, "checkpoints")
    assert question.reason.startswith(
        "a checkpoint costs 1.45 s of training and takes 2.18 s to write, and memory"
    )
    step_s = job.iteration_s(6)
    assert step_s is not None
    write_s = job.state_bytes / 0.735e9
    chosen = choose_checkpoint_interval(
        IntervalCost(step_s=step_s, cost_s=2 / 3 * write_s, horizon_s=DAY_S * advice.loss_days),
        present=1,
        least=int(asked(advice, "snapshots").chosen.value),
        most=10**6,
        write_s=write_s,
        settled=False,
    )
    assert question.chosen.value == str(chosen.every_steps)
    assert chosen.every_steps * step_s > 100 * write_s, "the cost sets the interval and not the storage"
    free = asked(advise(job, [trace], read_parameters()), "checkpoints").chosen
    assert int(free.value) * step_s < 11 * write_s
    # A replay counts the delays too, so that choices are compared with them.
    seldom = question.choices[-1]
    assert question.chosen.goodput is not None and seldom.goodput is not None
    assert question.chosen.goodput < seldom.goodput


def test_spares_replace_the_nodes_that_are_missing() -> None:
    """One of six nodes is away for half of the day: one spare, there for 11 of 12 hours, does not suffice."""
    trace = make_trace(6, (0.5 * DAY_S, "remove", "n5"), end_s=DAY_S)
    question = asked(advise(make_job(), [trace], read_parameters()), "spares")
    shares = {choice.value: choice.remark for choice in question.choices}
    assert "for 50.0% of the time" in shares["0"]
    assert "for 95.8% of the time" in shares["1"] and question.chosen.value == "1"


def test_few_numbers_of_spares_are_tried_when_nodes_are_hardly_ever_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[int] = []
    compute = _Adviser._available_with

    def counted(adviser: _Adviser, spares: int, shares: dict[int, float]) -> float:
        tried.append(spares)
        return compute(adviser, spares, shares)

    monkeypatch.setattr(_Adviser, "_available_with", counted)
    trace = make_trace(2, (100.0, "remove", "n0"), (100.0, "remove", "n1"), end_s=100_000.0)
    question = asked(advise(make_job(fewest=1), [trace], read_parameters()), "spares")
    assert [choice.value for choice in question.choices] == ["4741", "4740", "2370", "0"]
    assert len(tried) < 50


def test_without_failures_there_is_no_advice() -> None:
    with pytest.raises(ConfigurationError, match="no node is ever removed"):
        advise(make_job(), [make_trace(4, end_s=DAY_S)], read_parameters())


def test_the_advice_is_rendered_and_can_be_read_by_programs() -> None:
    advice = few_failures()
    again = msgspec.json.decode(encode_document(advice), type=Advice)
    assert again == advice and again.simulated
    assert advice.common_cause_share == pytest.approx(1 / 12), "one in ten, and two failures that left a copy"
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_advice(advice))
    text = console.export_text()
    for words in ("Which protection", "best", "next", "Simulated", "[tolerance]", "8.3% of the failures"):
        assert words in text
