"""Renders the document of a replay for the terminal; the page takes the same rows."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from ftd.observe.view.blocks import plain_table
from ftd.observe.view.text import format_duration, format_size, plural
from ftd.replay.comparison import CONFIDENCE, PRECISION, Estimate
from ftd.replay.report import ReplayReport

Rows = tuple[Sequence[str], Sequence[Sequence[str]]]
"""A table: its header and its rows. The first column has names, the others numbers."""
GAP = 2
"""Blanks between two columns."""


def render_replay(report: ReplayReport) -> RenderableType:
    """Return the tables, the excluded policies, and what the numbers are worth."""
    parts: list[RenderableType] = [
        Text.assemble((report.job.name, "bold"), (f"  {shape_line(report)}", "dim")),
        Text(trace_line(report), style="dim"),
        "",
        _Table(result_rows(report)),
        "",
        Text("where the time went", style="bold"),
        _Table(time_rows(report)),
    ]
    recoveries = recovery_rows(report)
    if recoveries[1]:
        parts += ["", Text("recoveries", style="bold"), _Table(recoveries)]
    if report.excluded:
        parts += ["", *(Text(f"not replayed: {each.policy}: {each.reason}") for each in report.excluded)]
    parts += ["", *(Text(line, style="dim") for line in remarks(report))]
    return Group(*parts)


def shape_line(report: ReplayReport) -> str:
    """Return the size of the job in one line."""
    job = report.job
    return (
        f"{plural(job.layers, 'layer')}, {format_size(job.state_bytes)} of state, {job.global_batch} samples a step, "
        f"{plural(job.fewest_nodes, 'node')} at least"
    )


def trace_line(report: ReplayReport) -> str:
    """Return the trace in one line."""
    trace = report.trace
    name = (
        trace.name
        if report.traces == 1
        else f"{plural(report.traces, 'trace')} of {trace.name}; the first one"
    )
    return (
        f"{name}: {format_duration(trace.duration_s)}, {trace.fewest_nodes} to {trace.most_nodes} nodes, "
        f"{trace.mean_nodes:.1f} on average, {plural(trace.removals, 'removal')}"
    )


def result_rows(report: ReplayReport) -> Rows:
    """Return what each policy committed, and what a sample costs."""
    priced = report.price_per_node_hour is not None
    header = ("policy", "samples/s", "committed samples", "goodput", *(("cost of 1,000",) if priced else ()))
    return header, [
        (
            policy.policy,
            _estimated(policy.samples_per_s, ",.2f"),
            _estimated(policy.samples, ",.0f"),
            _estimated(policy.goodput, ".1%"),
            *((_estimated(policy.cost_per_sample, ".3g", ".1g", factor=1000),) if priced else ()),
        )
        for policy in report.policies
    ]


def time_rows(report: ReplayReport) -> Rows:
    """Return the share of the time in each category; those that are 0 everywhere are left out."""
    shown = report.used_categories
    duration_s = report.trace.duration_s
    rows = []
    for policy in report.policies:
        shares = (policy.seconds[category] / duration_s for category in shown)
        rows.append((policy.policy, *(_share(share) for share in shares)))
    return ("policy", *shown), rows


def recovery_rows(report: ReplayReport) -> Rows:
    """Return the recoveries of each policy by kind."""
    rows = [
        (
            policy.policy,
            each.kind,
            str(each.count),
            format_duration(each.median_s),
            format_duration(each.median_redone_s) if each.median_redone_s else "–",
        )
        for policy in report.policies
        for each in policy.recoveries
    ]
    return ("policy", "kind", "number", "median pause", "median redone"), rows


def remarks(report: ReplayReport) -> Iterator[str]:
    """Yield what a reader must know to use the numbers."""
    yield (
        "Simulated: a replay in virtual time, not a measurement. Goodput is relative to the policy ideal, which "
        "recovers at no cost."
    )
    if report.traces > 1:
        narrow = "every" if report.precise else "not every"
        yield (
            f"± is half of the {CONFIDENCE:.0%} confidence interval over {report.traces} traces; for {narrow} policy's "
            f"samples/s it is below {PRECISION:.0%} of the mean."
        )
    elif report.precise is not None:
        yield "One generated trace says little about the next one: allow more with --repeat."
    yield f"Job: {report.job.source}."
    yield f"Trace: {report.trace.source}."
    yield from report.trace.notes
    yield f"Throughput without failures: {report.throughput}. Parameters: {report.parameters}."


@dataclass(frozen=True)
class _Table:
    """A table that is as wide as the terminal at most: columns that do not fit stand in another one below."""

    content: Rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        header, rows = self.content
        widths = [max(map(len, column)) + GAP for column in zip(header, *rows, strict=True)]
        begin = 1
        while begin < len(header):
            end, width = begin, widths[0] - GAP
            while end < len(header) and (end == begin or width + widths[end] <= options.max_width):
                width += widths[end]
                end += 1
            if begin > 1:
                yield ""
            yield _columns(header, rows, begin, end)
            begin = end


def _columns(header: Sequence[str], rows: Sequence[Sequence[str]], begin: int, end: int) -> RenderableType:
    """Return the table with the first column and those from ``begin`` to ``end``."""
    table = plain_table(GAP)
    for index, name in enumerate((header[0], *header[begin:end])):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(row[0], *row[begin:end])
    return table


def _estimated(
    estimate: Estimate | None, style: str, style_of_half_width: str | None = None, *, factor: int = 1
) -> str:
    """Return a figure with half of its confidence interval, if it has one.

    :param factor: number by which both are multiplied.
    """
    if estimate is None:
        return "–"
    text = _without_exponent(factor * estimate.mean, style)
    if estimate.half_width is None:
        return text
    return f"{text} ± {_without_exponent(factor * estimate.half_width, style_of_half_width or style)}"


def _without_exponent(value: float, style: str) -> str:
    """Return a number in a style, but a large one, which would have an exponent, with all its digits."""
    text = format(value, style)
    return f"{float(text):,.0f}" if "e+" in text else text


def _share(share: float) -> str:
    if share <= 0:
        return "–"
    return f"{share:.1%}" if share >= 0.0005 else "<0.1%"
