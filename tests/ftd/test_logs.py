"""Tests of the daemons' stderr: JSON lines, whatever logs them."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

SCRIPT = """
import contextvars
import errno
import logging
from ftd.logs import configure_logs

configure_logs(daemon="node", node="host-a", verbose={verbose})
contextvars.Context().run(logging.getLogger("aiohttp").warning, "strange %s", "header")
logging.getLogger("aiohttp").info("not asked for")
logging.getLogger("mqtt").error("failed to receive on socket: [Errno 104] Connection reset by peer")
closed = RuntimeError("unable to perform operation; the handler is closed")
for problem in (RuntimeError("disk on fire"), closed, OSError(errno.EBADF, "Bad file descriptor")):
    try:
        raise problem
    except (OSError, RuntimeError):
        logging.getLogger("asyncio").exception("Exception in callback <bound method Loop.add_writer>")
"""


def lines(*, verbose: bool) -> list[dict[str, str]]:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(verbose=verbose)], capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in ran.stderr.splitlines()]


def test_lines_of_libraries_have_our_format() -> None:
    warning, error = lines(verbose=False)
    assert (warning["level"], warning["logger"], warning["message"], warning["node"]) == (
        "warning",
        "aiohttp",
        "strange header",
        "host-a",
    )
    assert (error["level"], error["message"]) == (
        "error",
        "Exception in callback <bound method Loop.add_writer>",
    )
    assert "disk on fire" in error["exception"]


def test_a_line_is_json_for_any_values() -> None:
    script = (
        "from pathlib import Path\nimport structlog\nfrom ftd.logs import configure_logs\n"
        "configure_logs(daemon='node')\nlog = structlog.get_logger()\n"
        "log.info('a', path=Path('/x'), sizes=(1, 2), none=None)\n"
        "log.info('b', said='half a \\udcc3 letter')\nlog.info('c', number=2**70, path=Path('/y'))\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    first, second, third = ran.stderr.splitlines()
    assert '"path": "/x", "sizes": [1, 2]' in first
    assert json.loads(first)["none"] is None
    assert json.loads(second)["said"] == "half a \udcc3 letter"
    assert (json.loads(third)["number"], json.loads(third)["path"]) == (2**70, "/y")


def test_lines_of_libraries_about_a_broken_connection_are_debug_lines() -> None:
    assert [line["level"] for line in lines(verbose=True)] == [
        "warning",
        "debug",
        "error",
        "debug",
        "debug",
    ]
