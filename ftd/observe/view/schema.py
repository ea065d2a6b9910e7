"""Prints the JSON Schema of a profile or a report: ``python -m ftd.observe.view.schema profile`` or
``report``.
"""

import sys
from collections.abc import Mapping

import msgspec

from ftd.config.profile_document import ProfileDocument
from ftd.observe.view.document import Report
from ftd.transport.wire.public import encode_document

DOCUMENTS = {"profile": ProfileDocument, "report": Report}


def schema_of(document: type[msgspec.Struct]) -> bytes:
    """Return the schema as indented JSON with a newline at its end."""
    return encode_document(msgspec.json.schema(document))


def print_schema(module: str, documents: Mapping[str, type[msgspec.Struct]]) -> int:
    """Print the schema of the document that the command line names, and return the exit code.

    :param module: name of the module that was started, for its usage.
    """
    if len(sys.argv) != 2 or sys.argv[1] not in documents:
        sys.stderr.write(f"python -m {module} {'|'.join(documents)}\n")
        return 2
    sys.stdout.buffer.write(schema_of(documents[sys.argv[1]]))
    return 0


if __name__ == "__main__":
    sys.exit(print_schema("ftd.observe.view.schema", DOCUMENTS))
