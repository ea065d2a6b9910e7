"""The JSON Schema of the report: ``python -m ftd.view.schema > docs/report.schema.json``."""

import sys

import msgspec

from ftd.view.document import Report


def report_schema() -> bytes:
    """The schema as indented JSON with a newline at its end."""
    return msgspec.json.format(msgspec.json.encode(msgspec.json.schema(Report)), indent=2) + b"\n"


if __name__ == "__main__":
    sys.stdout.buffer.write(report_schema())
