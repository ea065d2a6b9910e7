"""A cluster that tests use one after the other."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.playground import Playground, playground

FAILED = pytest.StashKey[bool]()
"""The key of a test's result: true if the function of the test raised."""


class SharedCluster:
    """One cluster at a time, which stays up while tests want the same one."""

    def __init__(self) -> None:
        self._open = contextlib.ExitStack()
        self._ground: Playground | None = None
        self._options: dict[str, Any] = {}

    @contextlib.contextmanager
    def lent(self, item: pytest.Item, **options: Any) -> Iterator[Playground]:
        """Lend a test a cluster with idle home nodes; afterwards, check what it published against the contract.

        After a failure the next test, or the same one that is repeated, gets another cluster, so that it does not
        fail for the same reason.

        :param options: those of ``playground``.
        """
        if self._ground is None or self._options != options:
            self.close()
            self._ground, self._options = self._open.enter_context(playground(**options)), options
        try:
            self._ground.tidy()
            yield self._ground
            if item.stash.get(FAILED, True):
                self.close()
            else:
                self._ground.contract_is_kept()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._ground = None
        self._open.close()
