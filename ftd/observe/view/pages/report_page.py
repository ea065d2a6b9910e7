"""Renders a run's report as a self-contained HTML page."""

from datetime import datetime, timedelta
from html import escape

from ftd.observe.run_model import phases_ms
from ftd.observe.view.document import Report, ReportedRecovery, SaveSummary
from ftd.observe.view.pages.page import apply_theme, render_figures, render_page, render_table
from ftd.observe.view.phases import phase_cells, shown_phases, shown_phases_ms
from ftd.observe.view.plots.palette import BLUE, FAINT, GREEN, ORANGE, PURPLE, RED
from ftd.observe.view.plots.report_plot import render_plot
from ftd.observe.view.rates import goodput_series, median_throughput
from ftd.observe.view.sentences import (
    describe_change,
    describe_failing_nodes,
    describe_failure,
    describe_log,
    describe_recovery,
    describe_uneventful_run,
    step_of,
)
from ftd.observe.view.text import (
    format_duration,
    format_number,
    format_size,
    how_words,
    learning_rate_words,
    plural,
)
from planner.reasons import natural_key

COLOURS = {
    "detect": FAINT,
    "wait": PURPLE,
    "quiesce": RED,
    "plan": ORANGE,
    "state": BLUE,
    "resume": GREEN,
}
"""Colour of each phase of a recovery."""
_MOMENT = "%Y-%m-%d %H:%M:%S UTC"
MAX_DESCRIBED = 200
"""Largest number of recoveries that are described in sentences."""
_STYLE = """
.phases { display: flex; height: 1.1rem; min-width: 2px; border-radius: 3px; overflow: hidden; }
.phases i { display: block; height: 100%; }
.scale { max-width: 46rem; } .key i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px;
  vertical-align: -.1rem; margin-right: .3rem; } .key span { margin-right: .7rem; white-space: nowrap; }
article { margin: 1.25rem 0; } article h3 { font-size: 1rem; margin: 0 0 .35rem; }
.failure h3 { color: #d55e00; }
"""


def render_report_page(report: Report) -> str:
    """Return the page; a report without steps has no image."""
    name = report.job.name or "run"
    parts = [
        f"<h1>{escape(name)}</h1>",
        f'<p class="faint">{escape(_outcome(report))}</p>',
        render_figures(_glance(report)),
    ]
    if report.steps:
        svg = render_plot(report, ".svg").decode()
        parts += ["<h2>Over time</h2>", f'<div class="scroll">{apply_theme(svg)}</div>']
    parts += _recoveries(report)
    parts += _failures(report)
    parts += _saves(report)
    parts += _processes(report)
    return render_page(f"{name}: report", parts, style=_STYLE)


def _outcome(report: Report) -> str:
    began = ""
    if report.started_at is not None:
        first = datetime.fromisoformat(report.started_at)
        began = f", started {first:{_MOMENT}}"
        if report.under_way:
            began += f"; as of {first + timedelta(seconds=report.duration_s):{_MOMENT}}"
    if report.under_way:
        return f"running{began}"
    if report.outcome_reason.startswith(report.outcome):
        return report.outcome_reason + began
    return report.outcome + (f": {report.outcome_reason}" if report.outcome_reason else "") + began


def _glance(report: Report) -> list[tuple[str, str]]:
    changes = report.recoveries
    failures = [r for r in changes if r.failure]
    total = report.job.steps
    shown = [
        ("steps committed", f"{report.final.step}{f' of {total}' if total else ''}"),
        ("steps lost", str(sum(r.rolled_back_steps for r in changes))),
        ("failures", str(len(failures))),
        ("other changes", str(len(changes) - len(failures))),
        ("so far" if report.under_way else "duration", format_duration(report.duration_s)),
    ]
    if failures:
        shown.append(
            ("longest from failure to commit", format_duration(max(r.total_ms for r in failures) / 1000))
        )
    if rates := goodput_series(report):
        shown.append(("goodput", f"{rates[-1][1]:.1%}"))
    if report.final.loss is not None:
        shown.append(("loss so far" if report.under_way else "final loss", format_number(report.final.loss)))
    if report.evaluations:
        last = report.evaluations[-1]
        shown.append((f"held-out loss after step {last.step}", format_number(last.loss)))
        shown += [
            (f"held-out {name.replace('_', ' ')}", format_number(value))
            for name, value in last.metrics.items()
        ]
    if speed := median_throughput(report):
        value, unit = speed.split()
        shown.append((unit, value))
    if report.steps and (learning_rate := learning_rate_words(report.steps[-1].learning_rate)):
        shown.append(("learning rate", learning_rate))
    return shown


def _recoveries(report: Report) -> list[str]:
    if not report.recoveries:
        return ["<h2>Recoveries</h2>", f"<p>{escape(describe_uneventful_run(report))}</p>"]
    key = "".join(
        f'<span><i style="background:{colour}"></i>{name}</span> '
        for name, colour in COLOURS.items()
        if name in shown_phases(report)
    )
    longest = max(r.total_ms for r in report.recoveries)
    parts = ["<h2>Recoveries, phase by phase</h2>", f'<p class="faint key">{key}</p>']
    left_out = max(0, len(report.recoveries) - MAX_DESCRIBED)
    if left_out:
        parts.append(
            f'<p class="faint">The newest {MAX_DESCRIBED}; the {left_out} before are in the table below.</p>'
        )
    for number_, recovery in list(enumerate(report.recoveries, start=1))[left_out:]:
        kind = "failure" if recovery.failure else "change"
        title = f"{number_}. {''.join(describe_change(recovery, report))}"
        sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in describe_recovery(recovery, report))
        parts.append(
            f'<article class="{kind}"><h3>{escape(title)}</h3>{_bar(recovery, longest)}{sentences}</article>'
        )
    parts.append(_times(report))
    return parts


def _bar(recovery: ReportedRecovery, longest_ms: float) -> str:
    """Return the bar of one recovery; all bars have one scale."""
    times = phases_ms(recovery)
    total = recovery.total_ms or 1.0
    words = shown_phases_ms(recovery)
    segments = "".join(
        f'<i style="width:{100 * time / total:.2f}%;background:{COLOURS[name]}" '
        f'title="{name}: {format_duration(words[name] / 1000)}"></i>'
        for name, time in times.items()
        if time > 0
    )
    width = 100 * total / max(longest_ms, 1e-9)
    return f'<div class="scale"><div class="phases" style="width:{width:.2f}%">{segments}</div></div>'


def _times(report: Report) -> str:
    phases = shown_phases(report)
    rows = (
        (
            str(index),
            str(step_of(r)),
            "".join(describe_change(r, report)),
            how_words(r.detected_how),
            *phase_cells(r, phases),
            format_size(r.bytes_moved),
            str(r.rolled_back_steps),
            str(r.recomputed_steps),
            r.tier.replace("_", " "),
        )
        for index, r in enumerate(report.recoveries, start=1)
    )
    columns = ("", "step", "what happened", "noticed by", *phases, "total", "moved")
    shown = render_table((*columns, "lost", "redone", "state from"), rows, left={2, 3})
    return f'<h2>Recoveries in numbers</h2>\n<p class="faint">times in milliseconds</p>\n{shown}'


def _failures(report: Report) -> list[str]:
    """Return what failed and why, each with its traceback to unfold."""
    if not report.failures:
        return []
    parts = ["<h2>Failures and their reasons</h2>"]
    if failing := describe_failing_nodes(report):
        parts.append(f"<p>{escape(failing)}</p>")
    for failure in report.failures[:MAX_DESCRIBED]:
        where = describe_log(failure)
        log = f'<p class="faint">full output: {escape(where)}</p>' if where else ""
        title = escape(describe_failure(failure))
        if failure.detail:
            parts.append(
                f"<details><summary>{title}</summary>{log}<pre>{escape(failure.detail)}</pre></details>"
            )
        else:
            parts.append(f"<p>{title}</p>")
    return parts


def _saves(report: Report) -> list[str]:
    rows = [
        _saves_row(title, saves)
        for title, saves in (("snapshots", report.snapshots), ("checkpoints", report.checkpoints))
        if saves.completed or saves.abandoned
    ]
    if not rows:
        return []
    columns = (
        "",
        "completed",
        "abandoned",
        "newest step",
        "size",
        "protection or location",
        "median time",
        "total wait",
        "longest wait",
    )
    parts = ["<h2>Cost of snapshots and checkpoints</h2>", render_table(columns, rows, left={0, 5})]
    parts += [
        f'<p class="faint">Reason of the last abandoned one: {escape(saves.last_abandon_reason)}</p>'
        for saves in (report.snapshots, report.checkpoints)
        if saves.last_abandon_reason
    ]
    return parts


def _saves_row(title: str, saves: SaveSummary) -> tuple[str, ...]:
    def seconds(value: float | None) -> str:
        return "–" if value is None else format_duration(value)

    return (
        title,
        str(saves.completed),
        str(saves.abandoned),
        "–" if saves.newest_step is None else str(saves.newest_step),
        "–" if saves.size_bytes is None else format_size(saves.size_bytes),
        saves.protection_or_location or "–",
        seconds(saves.median_s),
        seconds(saves.total_stall_s),
        seconds(saves.longest_stall_s),
    )


def _processes(report: Report) -> list[str]:
    """Return a table of the processes that each node had; more than one of a kind means a restart."""
    rows = [
        (
            node,
            str(len(processes.daemon)),
            str(sum(len(pids) for pids in processes.trainers.values())),
            plural(len(processes.trainers), "device"),
        )
        for node, processes in sorted(report.processes.items(), key=lambda item: natural_key(item[0]))
    ]
    if not rows:
        return []
    explanation = "All processes of each node, one after another; more than one means a restart."
    heading = f'<h2>Processes</h2>\n<p class="faint">{explanation}</p>'
    return [heading, render_table(("node", "daemons", "trainers", "on"), rows, left={0})]
