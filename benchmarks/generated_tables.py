"""Tables of documentation pages that are generated: Markdown, and their places in a page.

A page has ``<!-- NAME: made by make docs -->`` before a table and ``<!-- end of NAME -->`` after it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, left: int | None = None) -> str:
    """Return a table in Markdown with a newline at its end.

    :param left: number of columns that are aligned to the left, before those aligned to the right; ``None``: all.
    """
    marks = ["---" if left is None or column < left else "---:" for column in range(len(head))]
    lines = [f"| {' | '.join(cells)} |\n" for cells in (head, *rows)]
    return "".join([lines[0], f"|{'|'.join(marks)}|\n", *lines[1:]])


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """Return the page with its generated tables replaced; each stands in exactly one place."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}: made by make docs -->\n", f"<!-- end of {name} -->"
        assert page.count(begin) == page.count(end) == 1, name
        pattern = re.compile(rf"{re.escape(begin)}.*?{re.escape(end)}", re.S)
        page = pattern.sub(f"{begin}\n{table}\n{end}".replace("\\", r"\\"), page)
    return page
