"""``ftd doctor``: before a host joins."""

from pathlib import Path
from typing import Annotated

import typer

from ftd.cli.options import JsonOption, print_json, run_async

_MARKS = {"ok": "ok     ", "warning": "warning", "failed": "FAILED "}


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    config: Annotated[
        Path | None, typer.Option(help="ftd.toml of this host; without it, the defaults and the environment.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check whether this host is ready to run a node.

    Its configuration, memory, ports, torch, names, broker, credentials, rights.

    A line for each check: ok, or what is wrong and the remedy. Exit code 1 when something failed. It does
    not disturb a node that is running here.

    Example: ftd doctor --config /etc/ftd/ftd.toml
    """
    from ftd.cli.checks.check_result import CheckResult, warning
    from ftd.cli.checks.cluster import check_cluster
    from ftd.cli.checks.configuration import check_configuration, is_broker_known
    from ftd.cli.checks.host import check_host, check_names
    from ftd.config.daemon import examine_daemon_config

    findings: list[CheckResult] = []

    def note(finding: CheckResult) -> None:
        findings.append(finding)
        if not as_json:
            remedy = f"\n{'':9}→ {finding.remedy}" if finding.remedy else ""
            typer.echo(f"{_MARKS[finding.verdict]}  {finding.check}: {finding.detail}{remedy}")

    loaded, mistakes = examine_daemon_config(config)
    for finding in check_configuration(loaded, mistakes):
        note(finding)
    for finding in check_host(loaded):
        note(finding)

    async def ask() -> None:
        async for finding in check_cluster(loaded):
            note(finding)

    if is_broker_known(mistakes):
        note(check_names(loaded))
        run_async(ask())
    else:
        note(warning("broker", "not asked: the configuration is wrong about it", "mend that first"))
    if as_json:
        fields = ("check", "verdict", "detail", "remedy")
        print_json([{name: getattr(finding, name) for name in fields} for finding in findings])
    if any(finding.verdict == "failed" for finding in findings):
        raise typer.Exit(1)
