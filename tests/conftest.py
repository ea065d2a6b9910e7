"""What ftd publishes and its models do not allow is an error in every test of this process."""

import pytest

from ftd.wire import checking


@pytest.fixture(autouse=True)
def contract_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(problem: str) -> None:
        raise AssertionError(problem)

    monkeypatch.setattr(checking, "on_mismatch", fail)
