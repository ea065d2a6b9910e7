"""The pages of the evaluation and of rerouting have the tables of the stored results."""

from pathlib import Path

import pytest

from benchmarks.common import EVALUATION
from benchmarks.evaluation import PARTS
from benchmarks.evaluation_page import PAGES, signed, tables_of
from benchmarks.generated_tables import with_tables


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_has_the_stored_results(page: Path) -> None:
    """``make docs`` writes the page again when this test fails."""
    text = page.read_text(encoding="utf-8")
    assert text == with_tables(text, tables_of(page))


def test_every_part_of_the_evaluation_is_stored() -> None:
    others = {"validation", "rerouting", "rerouting-alone"}
    assert {path.stem for path in EVALUATION.glob("*.json")} == {*PARTS, *others}


def test_a_difference_that_is_rounded_to_zero_has_no_sign() -> None:
    assert [signed(value, ".1%") for value in (-0.0004, 0.0, -0.012, 0.1)] == [
        "0.0%",
        "0.0%",
        "-1.2%",
        "+10.0%",
    ]
