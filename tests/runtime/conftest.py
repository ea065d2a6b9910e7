"""One process imports torch for the zygotes of all tests."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _served(zygote_server: None) -> None:
    """Let the zygotes of all tests come from one process that has imported torch."""
