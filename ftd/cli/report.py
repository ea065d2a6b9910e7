"""``ftd report``: summarises a job as text, a web page, pictures, or JSON."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftd.cli.options import ClusterOptions, print_rich, run_async, with_cluster_options

if TYPE_CHECKING:
    from ftd.observe.view.document import Report
    from ftd.transport.address import ClusterAddress


@with_cluster_options
def report(
    job: Annotated[
        str,
        typer.Argument(
            help="Id or name of a job of the cluster, or the file of a report.", metavar="JOB|FILE.json"
        ),
    ],
    html: Annotated[Path | None, typer.Option(help="Write a self-contained web page.")] = None,
    plot: Annotated[
        list[Path] | None,
        typer.Option(help="Draw loss, throughput and goodput to a .png or .svg file; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--json", help="Write the report as JSON (docs/reference/report.md).")
    ] = None,
    *,
    where: ClusterOptions,
) -> None:
    """Summarise a job as text, a web page or pictures.

    The report covers its steps, each recovery by phase, and the costs of snapshots.

    It is made from the coordinator's journal, during and after the job, or from a file that ftd local
    --report wrote. Without --html, --plot and --json, a summary is printed.

    Example: ftd report gpt --html gpt.html
    """
    from ftd.observe.view.files import (
        read_report,
        require_distinct,
        require_format,
        require_writable,
        write_file,
    )
    from ftd.observe.view.pages.report_page import render_report_page
    from ftd.observe.view.plots.report_plot import FORMATS, plot_report
    from ftd.observe.view.summary import render_summary
    from ftd.transport.wire.public import encode_document

    for path in plot or ():
        require_format(path, FORMATS, "--plot")
    for file, option in ((html, "--html"), (out, "--json")):
        require_writable(file, option)
    from_file = job.endswith(".json")
    require_distinct(
        *(("--plot", path) for path in plot or ()),
        ("--html", html),
        ("--json", out),
        read=[("JOB", Path(job) if from_file else None)],
    )
    found = read_report(Path(job), "JOB") if from_file else _from_cluster(job, where.resolve())
    if html is not None:
        write_file(html, render_report_page(found).encode(), "--html")
    for path in plot or ():
        plot_report(found, path)
    if out is not None:
        write_file(out, encode_document(found), "--json")
    if html is None and out is None and not plot:
        print_rich(render_summary(found))


def _from_cluster(job: str, address: "ClusterAddress") -> "Report":
    from ftd.observe.view.history import build_job_report
    from ftd.transport.client import ClusterClient

    async def ask() -> "Report":
        async with ClusterClient(address) as client:
            return build_job_report(job, await client.history(), await client.history(what="steps"))

    return run_async(ask())
