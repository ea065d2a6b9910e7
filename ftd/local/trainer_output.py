"""The lines that trainers print, read from the logs of their nodes while these run."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

_MARK = b'"trainer_output"'
MAX_TEXTS = 10_000
"""Different lines that are remembered, in order not to print them once for each trainer."""


class TrainerOutput:
    """Shows each line once: all trainers build the same model and print the same lines meanwhile, and those that
    replace others after a failure do so again.

    :param logs: directory with the logs of all processes.
    :param show: called with each line, which begins with the name of the first device that printed it.
    """

    def __init__(self, logs: Path, show: Callable[[str], None]) -> None:
        self._logs, self._show = logs, show
        self._offsets: dict[Path, int] = {}
        self._printed: Counter[tuple[str, str]] = Counter()
        """Number of times that a device printed a line."""
        self._shown: Counter[str] = Counter()

    def read(self) -> None:
        """Show what was printed since the last call."""
        for path in sorted(self._logs.glob("*.log")):
            with path.open("rb") as log:
                log.seek(self._offsets.get(path, 0))
                for line in log:
                    if not line.endswith(b"\n"):
                        break  # The rest is still being written.
                    self._offsets[path] = self._offsets.get(path, 0) + len(line)
                    if _MARK in line:
                        self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            event, device, text = record["event"], f"{record['node']}/{record['device']}", str(record["line"])
        except (ValueError, KeyError, TypeError):
            return
        text = text.rstrip().rpartition("\r")[2]  # what a progress bar shows in the end
        if event != "trainer_output" or not text:
            return
        self._printed[device, text] += 1
        if self._printed[device, text] <= self._shown[text]:
            return
        self._shown[text] += 1
        self._show(f"{device}  {text}")
        if len(self._shown) > MAX_TEXTS:
            self._shown.clear()
            self._printed.clear()
