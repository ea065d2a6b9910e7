"""Tests of the mutation run (``tools/mutants.py``): which changes it makes, and that a change reaches every
module that imported the code.
"""

import textwrap

import pytest

from statemachine.cluster import rules
from statemachine.messages.values import DeviceReport
from tools import mutants


def changed(function: str) -> list[str]:
    """Return the body of each mutant of a function ``f(c, a, b)``."""
    source = "def f(c, a, b):\n" + textwrap.indent(textwrap.dedent(function).strip(), "    ")
    head = "def f(c, a, b):\n"
    return [textwrap.dedent(one.removeprefix(head)) for one in mutants.changed_source(source)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return a and b and c", ["return b and c", "return a and c", "return a and b"]),
        ("return a == b", ["return a != b"]),
        ("return a < b", ["return a >= b", "return a <= b"]),
        ("return a in b", ["return a not in b"]),
        ("return not a", ["return a"]),
        ("return a if b else c", ["return a if not b else c"]),
        ("return [one for one in a if one]", ["return [one for one in a if not one]"]),
        ("c.persist()", ["pass"]),
        ("c.step = a", ["pass"]),
        ("c.steps += a", ["pass"]),
        ("if a:\n    return\nc = b", ["if not a:\n    return\nc = b", "if a:\n    pass\nc = b"]),
        ("return a[0]", ["return a[1]"]),
        ("return c.go(a, True)", ["return c.go(a, False)"]),
        ("return c.go(a, mode='abort')", ["return c.go(a, mode='boundary')"]),
        ("return zip(a, b, strict=True)", []),
        ("'A docstring.'\nassert a > 1\ntext = f'{a > 1} of 2'\nreturn text", []),
    ],
)
def test_each_place_is_changed_once(body: str, expected: list[str]) -> None:
    assert changed(body) == expected


def test_a_mutant_changes_the_code_of_whoever_imported_the_function() -> None:
    imported, original = rules.is_new, rules.is_new.__code__
    fresh = DeviceReport(device=0, committed_step=0, ready_step=None, vote=None, held=(0,))
    [mutant] = [
        one
        for one in mutants.mutants_of("statemachine/cluster/rules.py")
        if one.function == "is_new" and one.after == "report.ready_step is not None"
    ]
    try:
        mutants.become(mutant)
        assert not imported(fresh)
    finally:
        rules.is_new.__code__ = original
    assert imported(fresh)


def test_a_mutant_keeps_its_name_when_lines_move() -> None:
    source = "def f(c, a):\n    c.go(a)\n"
    keys = [[mutant.key for mutant, _ in mutants._found("", text)[1]] for text in (source, f"\n\n{source}")]
    assert keys[0] == keys[1] != []
