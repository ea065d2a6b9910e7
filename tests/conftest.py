"""What ftd publishes and its models do not allow is an error in every test of this process."""

from typing import Any

import pytest

from ftd.wire import checking

SERVICE = ("tests/e2e/", "tests/ftd/", "tests/security/")
"""Tests of running daemons."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n 2`` one worker takes all tests of running daemons, one by one, the others take the rest."""
    from xdist.scheduler import LoadScopeScheduling

    class OneServiceAtATime(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "service" if nodeid.startswith(SERVICE) else nodeid.partition("::")[0]

    return OneServiceAtATime(config, log)


@pytest.fixture(autouse=True)
def contract_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(problem: str) -> None:
        raise AssertionError(problem)

    monkeypatch.setattr(checking, "on_mismatch", fail)
