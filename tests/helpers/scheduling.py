"""Distribution of the files of tests to the workers of pytest-xdist."""

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling


class FileScheduling(LoadFileScheduling):
    """Gives each worker whole files, also after a worker has crashed.

    pytest-xdist 3.8 then gives out all files of that worker again, also those that it had finished. A worker whose next
    file has no test left would wait without end, because it runs its last test only when it knows the next one.
    """

    def _reschedule(self, node: Any) -> None:
        super()._reschedule(node)
        while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._assign_work_unit(node)

    def mark_test_pending(self, item: str) -> None:
        """Run a test again that ended its worker, if it may run again: it is still among the tests of its file."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling | None:
    """Return the scheduling of ``--dist loadfile``, and None for others."""
    return FileScheduling(config, log) if config.getoption("dist") == "loadfile" else None
