"""The page of supported models says what the tests check."""

from benchmarks.generated_tables import with_tables
from tests.helpers.models_page import PAGE, tables


def test_the_page_has_the_tables_that_the_tests_give() -> None:
    """``make docs`` writes the page again when this test fails."""
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_tables(page, tables())


def test_every_check_runs_over_some_architecture() -> None:
    rows = tables()["checks"].splitlines()[2:]
    assert len(rows) > 5 and all(row.count("`") >= 2 and not row.endswith("|  |") for row in rows)
