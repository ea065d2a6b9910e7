"""Renders a replay as a self-contained HTML page with its image and tables."""

from html import escape

from ftd.observe.view.pages.page import apply_theme, render_figures, render_page, render_table
from ftd.observe.view.text import format_duration
from ftd.replay.comparison import REFERENCE
from ftd.replay.report import ReplayReport
from ftd.replay.tables import Rows, recovery_rows, remarks, result_rows, shape_line, time_rows, trace_line


def render_replay_page(report: ReplayReport, svg: str) -> str:
    """Return the page for a replay and the image that ``plot`` drew."""
    drawing = apply_theme(svg).replace(
        "<svg", f'<svg role="img" aria-label="{escape(_description(report))}"', 1
    )
    parts = [
        f'<h1>{escape(report.job.name)}</h1>\n<p class="faint">Simulated. {escape(shape_line(report))}</p>\n'
        f'<p class="faint">{escape(trace_line(report))}</p>',
        render_figures(_glance(report)),
        f'<div class="scroll">{drawing}</div>',
        "<h2>What each policy committed</h2>",
        _table(result_rows(report)),
        "<h2>Where the time went</h2>",
        _table(time_rows(report)),
        *_recoveries(report),
        *_excluded(report),
        "<h2>What these numbers are</h2>",
        "\n".join(f"<p>{escape(line)}</p>" for line in remarks(report)),
    ]
    return render_page(f"{report.job.name}: what failures cost, simulated", parts)


def _description(report: ReplayReport) -> str:
    names = ", ".join(policy.policy for policy in report.policies)
    return f"Throughput over time under {names}, the number of nodes, and where the time went; tables follow."


def _glance(report: ReplayReport) -> list[tuple[str, str]]:
    shown = [
        ("of the trace", format_duration(report.trace.duration_s)),
        ("nodes on average", f"{report.trace.mean_nodes:.1f}"),
        ("removals", str(report.trace.removals)),
    ]
    known = [
        (policy.goodput.mean, policy.policy)
        for policy in report.policies
        if policy.goodput is not None and policy.policy != REFERENCE
    ]
    return shown + [(f"goodput of {name}", f"{mean:.1%}") for mean, name in sorted(known, reverse=True)[:2]]


def _recoveries(report: ReplayReport) -> list[str]:
    content = recovery_rows(report)
    return ["<h2>Recoveries</h2>", _table(content, left={0, 1})] if content[1] else []


def _excluded(report: ReplayReport) -> list[str]:
    rows = [(each.policy, each.reason) for each in report.excluded]
    return ["<h2>Not replayed</h2>", _table((("policy", "reason"), rows), left={0, 1})] if rows else []


def _table(content: Rows, left: set[int] | None = None) -> str:
    header, rows = content
    return render_table(header, rows, left={0} if left is None else left)
