"""``ftd report``: what became of a job, as a summary, a page to send, a picture, or JSON."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftd.cli.options import BrokerOption, ClusterOption, ConfigOption, print_rich, resolve_cluster, run_async
from ftd.errors import ConfigurationError

if TYPE_CHECKING:
    from ftd.observe.view.document import Report


def register(app: typer.Typer) -> None:
    app.command("report")(report)


def report(
    job: Annotated[
        str,
        typer.Argument(
            help="Id or name of a job of the cluster, or a report's file.", metavar="JOB|FILE.json"
        ),
    ],
    html: Annotated[Path | None, typer.Option(help="Write one page that needs nothing else.")] = None,
    plot: Annotated[
        list[Path] | None,
        typer.Option(help="Draw loss, throughput, goodput: .png or .svg; may be given several times."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--json", help="Write the report itself (docs/reference/report.md).")
    ] = None,
    broker: BrokerOption = None,
    cluster: ClusterOption = None,
    config: ConfigOption = None,
) -> None:
    """Tell what became of a job, as text, a page or pictures.

    With its steps, each recovery by phase, and what snapshots cost.

    It is made from the coordinator's journal, at any time, or from a file that ftd local --report wrote.
    Without --html, --plot or --json a summary is printed.

    Example: ftd report gpt --html gpt.html
    """
    from ftd.observe.view.files import require_format, write_file
    from ftd.observe.view.pages.report_page import render_report_page
    from ftd.observe.view.plots.report_plot import FORMATS, plot_report
    from ftd.observe.view.summary import render_summary

    for path in plot or ():
        require_format(path, FORMATS, "--plot")
    found = _from_file(Path(job)) if job.endswith(".json") else _from_cluster(job, broker, cluster, config)
    if html is not None:
        write_file(html, render_report_page(found).encode(), "--html")
    for path in plot or ():
        plot_report(found, path)
    if out is not None:
        write_file(out, found.to_bytes(), "--json")
    if html is None and out is None and not plot:
        print_rich(render_summary(found))


def _from_file(path: Path) -> "Report":
    from ftd.observe.view.document import Report, ReportError

    try:
        return Report.from_json(json.loads(path.read_bytes()))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}", field="JOB") from None
    except (ValueError, ReportError) as error:
        raise ConfigurationError(
            f"{path} is no report: {error}",
            field="JOB",
            remedy="ftd local --report and ftd report --json write one",
        ) from None


def _from_cluster(job: str, broker: str | None, cluster: str | None, config: Path | None) -> "Report":
    from ftd.observe.view.history import build_job_report
    from ftd.transport.client import ClusterClient

    address = resolve_cluster(broker, cluster, config)

    async def ask() -> "Report":
        async with ClusterClient(address) as client:
            return build_job_report(job, await client.history(), await client.history(what="steps"))

    return run_async(ask())
