"""``ftd doctor``: checks a host before it joins a cluster."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ftd.cli.options import JsonOption, print_json, run_async

_MARKS = {"ok": "ok     ", "warning": "warning", "failed": "FAILED "}


def doctor(
    config: Annotated[
        Path | None,
        typer.Option(help="Path of this host's ftd.toml.", show_default="defaults and environment"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check whether this host is ready to run a node.

    The checks cover its configuration, memory, ports, torch, devices, host names, broker, credentials and
    rights.

    Each check prints one line: ok, or the problem and its remedy. The exit code is 1 if a check failed. A
    node that is running on this host is not disturbed.

    Example: ftd doctor --config /etc/ftd/ftd.toml
    """
    from ftd.cli.checks.check_result import CheckResult, warning
    from ftd.cli.checks.cluster import check_cluster
    from ftd.cli.checks.configuration import check_configuration, is_broker_known
    from ftd.cli.checks.host import check_host, check_names
    from ftd.config.daemon import examine_daemon_config

    results: list[CheckResult] = []

    def note(result: CheckResult) -> None:
        results.append(result)
        if not as_json:
            remedy = f"\n{'':9}→ {result.remedy}" if result.remedy else ""
            typer.echo(f"{_MARKS[result.verdict]}  {result.check}: {result.detail}{remedy}")

    loaded, collector = examine_daemon_config(config)
    for result in check_configuration(loaded, collector, given=config is not None):
        note(result)
    for result in check_host(loaded):
        note(result)

    async def ask() -> None:
        async for result in check_cluster(loaded):
            note(result)

    if is_broker_known(collector):
        note(check_names(loaded))
        run_async(ask())
    else:
        note(warning("broker", "not checked: its configuration is wrong", "correct the configuration first"))
    if as_json:
        print_json([asdict(result) for result in results])
    if any(result.verdict == "failed" for result in results):
        raise typer.Exit(1)
