"""A job file with every key in it: chosen values as they are, all others as comments with their defaults."""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from ftd.config.job_reference import JobKey, JobTable, job_tables, toml_of

_WIDTH = 100
_HOW_TO_READ = """\
Every key of a job file. A key that begins with # and no space has the value shown, its default, unless its
comment calls it an example; remove the # and change the value. A table that begins with # is not there."""


def render_job(chosen: Mapping[str, Any]) -> str:
    """Return the text of a job file.

    :param chosen: the tables with the values that are not left at their defaults.
    """
    lines = [*_comment(_HOW_TO_READ)]
    for table in job_tables():
        values = chosen
        for step in filter(None, table.name.split(".")):
            values = values.get(step, {})
        lines += _table(table, values)
    return "\n".join(lines) + "\n"


def _table(table: JobTable, values: Mapping[str, Any]) -> Iterator[str]:
    if table.name:
        yield ""
        yield from _comment(table.meaning)
        yield f"{'#' if table.optional and not values else ''}[{table.name}]"
    for key in table.keys:
        yield ""
        yield from _comment(_explained(key))
        if key.name in values:
            yield f"{key.name} = {toml_of(values[key.name])}"
        else:
            shown = key.example if key.default is None else key.default
            yield f"#{key.name} = {toml_of({} if shown is None else shown)}"


def _explained(key: JobKey) -> str:
    """Return the meaning, the values that are allowed, and the default."""
    if key.required:
        default = "required"
    elif key.default is None:
        default = "example"
    else:
        default = f"default {toml_of(key.default)}"
    return f"{key.meaning} ({key.kind}; {default})"


def _comment(text: str) -> Iterator[str]:
    plain = " ".join(text.replace("`", "").split())
    return (f"# {line}" for line in textwrap.wrap(plain, _WIDTH - 2))
