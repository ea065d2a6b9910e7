"""A daemon's stderr: JSON line by line, whoever speaks."""

import json
import subprocess
import sys

SCRIPT = """
import contextvars
import logging
from ftd.logs import configure_logs

configure_logs(daemon="node", node="host-a", verbose={verbose})
contextvars.Context().run(logging.getLogger("aiohttp").warning, "strange %s", "header")
logging.getLogger("aiohttp").info("not asked for")
logging.getLogger("mqtt").error("failed to receive on socket: [Errno 104] Connection reset by peer")
for problem in ("disk on fire", "unable to perform operation; the handler is closed"):
    try:
        raise RuntimeError(problem)
    except RuntimeError:
        logging.getLogger("asyncio").exception("Exception in callback")
"""


def lines(*, verbose: bool) -> list[dict[str, str]]:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(verbose=verbose)], capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in ran.stderr.splitlines()]


def test_what_libraries_log_is_a_line_like_any_other() -> None:
    warning, error = lines(verbose=False)
    assert (warning["level"], warning["logger"], warning["said"], warning["node"]) == (
        "warning",
        "aiohttp",
        "strange header",
        "host-a",
    )
    assert (error["level"], error["said"]) == ("error", "Exception in callback")
    assert "disk on fire" in error["exception"]


def test_a_connection_that_broke_is_told_once_and_not_by_the_libraries() -> None:
    assert [line["level"] for line in lines(verbose=True)] == ["warning", "debug", "error", "debug"]
