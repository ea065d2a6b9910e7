"""What the package says of itself as a library is so."""

import doctest

import planner


def test_the_example_of_the_package_runs_as_it_says() -> None:
    found = doctest.testmod(planner)
    assert (found.failed, found.attempted) == (0, 13)
