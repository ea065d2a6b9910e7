"""``ftd bridge``: sends events to a webhook."""

from pathlib import Path
from typing import Annotated

import typer

from ftd.cli.options import ClusterOptions, with_cluster_options


@with_cluster_options
def bridge(
    webhook: Annotated[
        str, typer.Option(help="http(s) URL that receives alerts by POST, as Alertmanager's JSON.")
    ],
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--filter",
            help="Events to send, such as 'severity>=warning and node=node-*'; may be repeated.",
        ),
    ] = None,
    dead_letters: Annotated[Path, typer.Option(help="File for alerts that cannot be delivered.")] = Path(
        "ftd-dead-letters.jsonl"
    ),
    token_file: Annotated[
        Path | None, typer.Option(help="File with one line, which is sent as the bearer token.")
    ] = None,
    queue: Annotated[int, typer.Option(min=1, max=1_000_000, help="Most alerts that may wait.")] = 1000,
    timeout_s: Annotated[
        float, typer.Option(min=0.1, max=600, help="Timeout of one attempt, in seconds.")
    ] = 10.0,
    retry_for_s: Annotated[
        float, typer.Option(min=0, help="Retry an alert for at most this many seconds.")
    ] = 300.0,
    finish_s: Annotated[
        float, typer.Option(min=0, help="At the end, deliver waiting alerts for at most this many seconds.")
    ] = 5.0,
    *,
    where: ClusterOptions,
) -> None:
    """Post events to a webhook until SIGTERM.

    The exit code is 1 if some alerts ended in the dead-letter file.

    Example: ftd bridge --webhook https://alerts.example.com/ftd --filter 'severity>=warning'
    """
    import asyncio
    from urllib.parse import urlsplit

    from ftd.config.secrets import read_secret
    from ftd.errors import ConfigurationError
    from ftd.logs import configure_logs
    from ftd.observe.bridge.daemon import Bridge
    from ftd.observe.bridge.filters import parse_filter
    from ftd.observe.bridge.webhook import WebhookOptions

    try:
        url = urlsplit(webhook)
        usable = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        usable = usable and not any(map(str.isspace, webhook))
    except ValueError:
        usable = False
    if not usable:
        raise ConfigurationError(
            f"{webhook!r} is not a valid URL", field="--webhook", remedy="write http(s)://host/path"
        )
    filters = [parse_filter(text) for text in only or []]
    address = where.resolve()
    options = WebhookOptions(
        url=webhook,
        dead_letters=dead_letters,
        token=read_secret(token_file, "--token-file") if token_file is not None else None,
        queue=queue,
        timeout_s=timeout_s,
        retry_for_s=retry_for_s,
    )
    configure_logs(daemon="bridge")

    async def run() -> int:
        return await Bridge(address, filters, options, finish_s).run()

    raise typer.Exit(1 if asyncio.run(run()) else 0)
