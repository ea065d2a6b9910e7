"""Renders the summary of a run: what failed, what was decided and why, and what it cost."""

from collections.abc import Sequence

import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ftd.observe.view.blocks import add_numbers, pipeline_lines, plain_table
from ftd.observe.view.document import (
    Report,
    ReportedFailure,
    ReportedPipeline,
    ReportedRecovery,
    SaveSummary,
)
from ftd.observe.view.live.chart import LossHistory, loss_chart
from ftd.observe.view.phases import phase_cells, shown_phases
from ftd.observe.view.rates import median_throughput
from ftd.observe.view.sentences import (
    describe_attempts,
    describe_change,
    describe_decision,
    describe_failing_nodes,
    describe_failure,
    describe_log,
    describe_losses,
    describe_uneventful_run,
    step_of,
)
from ftd.observe.view.text import (
    NodeColours,
    format_duration,
    format_number,
    format_size,
    how_words,
    learning_rate_words,
    metrics_words,
    notice_words,
    plural,
)
from planner.reasons import natural_key

_OUTCOME_STYLES = {
    "finished": "bold green",
    "failed": "bold red",
    "stopped": "yellow",
    "unfinished": "yellow",
}
CHART_HEIGHT = 5
MAX_FAILURES = 10
"""Largest number of different failures that are listed."""
TRACEBACK_LINES = 12
"""Lines of a traceback that are printed, the last ones."""
_WIDE = 97
"""Columns that the table needs to show all of its columns."""


def render_summary(report: Report) -> RenderableType:
    """Return the whole summary; readable from 80 columns on, better with 100."""
    parts: list[RenderableType] = [_headline(report)]
    if report.recoveries:
        parts += [
            "",
            Text.assemble(("Failures and changes", "bold"), ("  times in milliseconds", "dim")),
            _RecoveryTable(report),
        ]
        parts += ["", Text("Decisions and their reasons", style="bold"), _decisions(report)]
    else:
        parts += ["", Text(describe_uneventful_run(report))]
    if report.failures:
        parts += ["", Text("Failures and their reasons", style="bold"), _failures(report.failures)]
    unmatched = [f for f in report.faults if not f.generations]
    if unmatched:
        parts += ["", Text("Injected faults without a recovery", style="bold")]
        parts += [Text(f"{f.fault} {f.node or ''} after {format_duration(f.at_s)}") for f in unmatched]
    for aside in report.quarantined:
        parts.append(Text(aside.reason, style="red"))
    for pause in report.pauses:
        parts.append(Text(f"Paused after {format_duration(pause.at_s)}: {pause.reason}", style="yellow"))
    return Group(*parts)


def _headline(report: Report) -> RenderableType:
    style = _OUTCOME_STYLES[report.outcome]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    total = report.job.steps
    failures = [r for r in report.recoveries if r.failure]
    lost = sum(r.rolled_back_steps for r in report.recoveries)
    redone = sum(r.recomputed_steps for r in report.recoveries)
    why = report.outcome_reason if report.outcome != "finished" else ""
    if report.under_way:
        grid.add_row(
            "outcome",
            Text.assemble(
                ("running", style), f" for {format_duration(report.duration_s)} when the report was made"
            ),
        )
    else:
        took = f" after {format_duration(report.duration_s)}  "
        grid.add_row("outcome", Text.assemble((report.outcome, style), took, (why, "dim")))
    if failing := describe_failing_nodes(report):
        grid.add_row(
            "", Text(f"but {failing}" if report.outcome == "finished" else failing, style="bold yellow")
        )
    grid.add_row(
        "steps",
        f"{report.final.step}{f' of {total}' if total else ''} committed, {lost} lost, {redone} recomputed",
    )
    if report.steps:
        first, last = report.steps[0], report.steps[-1]
        grid.add_row("loss", f"{format_number(first.loss)} → {format_number(last.loss)}{_speed(report)}")
    _add_evaluations(grid, report)
    _add_skipped(grid, report)
    others = plural(len(report.recoveries) - len(failures), "other change")
    grid.add_row("changes", f"{plural(len(failures), 'failure')}, {others}{_worst(failures)}")
    _add_saves(grid, "snapshots", report.snapshots, "in the nodes' memory")
    _add_saves(grid, "checkpoints", report.checkpoints, f"in {report.checkpoints.protection_or_location}")
    none = (
        "none: the job was running when the report was made"
        if report.under_way
        else "none: the job did not finish"
    )
    grid.add_row("checksum", Text(report.final.checksum or none, overflow="fold"))
    parts: list[RenderableType] = [grid]
    if report.steps:
        parts += ["", _Chart(report)]
    title = f"[bold]ftd[/] · {report.job.name or 'run'}"
    return Panel(Group(*parts), title=title, title_align="left", border_style=style)


def _add_evaluations(grid: Table, report: Report) -> None:
    """Add a row if the job was evaluated on held-out data."""
    if not report.evaluations:
        return
    first, last = report.evaluations[0], report.evaluations[-1]
    trend = (
        f"{format_number(first.loss)} → {format_number(last.loss)}"
        if first is not last
        else format_number(last.loss)
    )
    times = plural(len(report.evaluations), "evaluation")
    text_of = ", ".join(
        filter(None, [f"{times}, the last after step {last.step}", metrics_words(last.metrics)])
    )
    grid.add_row("held out", f"{trend}   ({text_of})")


def _add_skipped(grid: Table, report: Report) -> None:
    """Add a row if some step updated nothing."""
    skipped = [s.step for s in report.steps if s.skipped]
    if skipped:
        where = f"step {skipped[0]}" if len(skipped) == 1 else f"steps {skipped[0]} to {skipped[-1]}"
        text_of = f"{len(skipped)} of {len(report.steps)} skipped, which trained nothing ({where})"
        grid.add_row("updates", Text(text_of, style="yellow"))


def _add_saves(grid: Table, title: str, saves: SaveSummary, where: str) -> None:
    """Add a row if there were any, with the reason if one was abandoned."""
    if not saves.completed and not saves.abandoned:
        return
    text = Text("none")
    if saves.completed:
        text_of = f"{saves.completed} {where}, the newest of step {saves.newest_step}"
        facts = (
            [saves.protection_or_location] if title == "snapshots" and saves.protection_or_location else []
        )
        facts += [format_size(saves.size_bytes)] if saves.size_bytes else []
        text = Text(f"{text_of} ({', '.join(facts)})" if facts else text_of)
    if saves.abandoned:
        text.append(
            f"; {saves.abandoned} abandoned, the last one because: {saves.last_abandon_reason}",
            style="yellow",
        )
    grid.add_row(title, text)


def _speed(report: Report) -> str:
    times = sorted(s.step_s for s in report.steps if s.step_s)
    if not times:
        return ""
    text_of = [f"median step {format_duration(times[len(times) // 2])}", median_throughput(report)]
    if learning_rate := learning_rate_words(report.steps[-1].learning_rate):
        text_of.append(f"learning rate {learning_rate}")
    return f"   ({', '.join(filter(None, text_of))})"


def _worst(failures: Sequence[ReportedRecovery]) -> str:
    if not failures:
        return ""
    worst = max(failures, key=lambda r: r.total_ms)
    return f"; at most {format_duration(worst.total_ms / 1000)} from a failure to the next committed step"


class _Chart:
    """The loss over the whole width, with marks where the plan changed."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        history = LossHistory()
        for step in self._report.steps:
            history.add(step.step, step.loss if step.loss is not None else float("nan"))
        changes = self._report.recoveries
        yield loss_chart(
            history,
            width=options.max_width,
            height=CHART_HEIGHT,
            failures=[r.step for r in changes if r.failure],
            changes=[r.step for r in changes if not r.failure],
            evaluations=[(one.step, one.loss) for one in self._report.evaluations],
        )


class _RecoveryTable:
    """One row for each change. A narrow table leaves node and detection to the part below it."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= _WIDE
        table = plain_table(gap=1)
        table.add_column("", no_wrap=True)
        add_numbers(table, "step")
        if wide:
            table.add_column("what happened", min_width=18)
            table.add_column("noticed by", min_width=8)
        phases = shown_phases(self._report)
        for phase in phases:
            table.add_column(phase, justify="right", no_wrap=True, min_width=5)
        table.add_column("total", justify="right", no_wrap=True, min_width=6, style="bold")
        table.add_column("moved", justify="right", no_wrap=True, min_width=8)
        add_numbers(table, "lost", "redone")
        for index, recovery in enumerate(self._report.recoveries, start=1):
            who: list[RenderableType] = [_what(recovery, self._report), how_words(recovery.detected_how)]
            table.add_row(
                _number(index, recovery),
                str(step_of(recovery)),
                *(who if wide else []),
                *_cells(recovery, phases),
            )
        yield table


def _number(index: int, recovery: ReportedRecovery) -> Text:
    return Text(str(index), style="red" if recovery.failure else "green")


def _cells(recovery: ReportedRecovery, phases: Sequence[str]) -> list[RenderableType]:
    return [
        *phase_cells(recovery, phases),
        format_size(recovery.bytes_moved),
        Text(str(recovery.rolled_back_steps), style="bold red" if recovery.rolled_back_steps else ""),
        str(recovery.recomputed_steps),
    ]


def _what(recovery: ReportedRecovery, report: Report) -> Text:
    who, became, injected = describe_change(recovery, report)
    return Text.assemble((who, "bold"), became, (injected, "dim"))


def _decisions(report: Report) -> RenderableType:
    parts: list[RenderableType] = []
    colours = NodeColours()
    for node in sorted(report.processes, key=natural_key):
        colours.of(node)
    for index, recovery in enumerate(report.recoveries, start=1):
        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(width=2)
        grid.add_column(width=7, style="dim", no_wrap=True)
        grid.add_column(ratio=1, overflow="fold")
        method = f"{recovery.method}: " if recovery.method else ""
        noticed = notice_words(recovery.detected_how)
        happened = Text.assemble(_what(recovery, report), (f" at step {step_of(recovery)}{noticed}", "dim"))
        grid.add_row(_number(index, recovery), "what", happened)
        for loss in describe_losses(recovery, report):
            grid.add_row("", "why", Text(loss))
        grid.add_row("", "plan", Text(f"{method}{recovery.reason}"))
        if (sentence := describe_decision(recovery)) is not None:
            grid.add_row("", "state" if recovery.rolled_back_steps else "step", sentence)
        if (more := describe_attempts(recovery)) is not None:
            grid.add_row("", "tries", more)
        before = _pipelines(recovery.pipelines_before, colours)
        grid.add_row("", "layout", _Change(before, _pipelines(recovery.pipelines_after, colours)))
        parts.append(Padding(grid, (0, 0, 0 if index == len(report.recoveries) else 1, 0)))
    return Group(*parts)


class _Change:
    """Pipelines before and after: next to each other if there is room, else one below the other."""

    def __init__(self, before: Text, after: Text) -> None:
        self._before = before
        self._after = after

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        arrow = Text("→", style="dim")
        texts = (self._before, self._after)
        needed = sum(console.measure(t, options=options.update(width=10_000)).maximum for t in texts) + 7
        if needed > options.max_width:
            yield from (self._before, arrow, self._after)
            return
        grid = Table.grid(padding=(0, 3))
        grid.add_row(self._before, arrow, self._after)
        yield grid


def _pipelines(pipelines: Sequence[ReportedPipeline], colours: NodeColours) -> Text:
    if not pipelines:
        return Text("nothing ran", style="dim")
    return pipeline_lines(msgspec.to_builtins(pipelines), colours)


def _failures(failures: Sequence[ReportedFailure]) -> RenderableType:
    """Return a paragraph for each failure. A traceback that no log keeps is printed, since it is nowhere else."""
    parts: list[RenderableType] = []
    for failure in failures[:MAX_FAILURES]:
        parts.append(Text(describe_failure(failure), style="" if failure.injected else "yellow"))
        if where := describe_log(failure):
            parts.append(Text(f"  full output: {where}", style="dim"))
        elif not failure.injected:
            lines = failure.detail.strip().splitlines()[-TRACEBACK_LINES:]
            parts += [Text(f"  {line}", style="dim") for line in lines if line.strip() != failure.error]
    if (more := len(failures) - MAX_FAILURES) > 0:
        parts.append(Text(f"and {more} more, in ftd report --json", style="dim"))
    return Group(*parts)
