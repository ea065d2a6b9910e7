"""The example in the package's documentation works as described."""

import doctest

import planner


def test_the_example_of_the_package_runs_as_documented() -> None:
    found = doctest.testmod(planner)
    assert (found.failed, found.attempted) == (0, 13)
