"""Marks the tests of seeds, planted bugs and lost messages as long: ``make quick`` runs only the scenarios and
the worst moments.
"""

import pytest

LONG = ("test_lost_messages.py", "test_mutants.py", "test_node_mutants.py", "test_sim.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in LONG:
            item.add_marker(pytest.mark.long)
