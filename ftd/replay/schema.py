"""Prints the JSON Schema of a replay or of advice: ``python -m ftd.replay.schema replay`` or ``advice``."""

import sys

import msgspec

from ftd.observe.view.schema import print_schema
from ftd.replay.advice import Advice
from ftd.replay.report import ReplayReport

DOCUMENTS: dict[str, type[msgspec.Struct]] = {"replay": ReplayReport, "advice": Advice}

if __name__ == "__main__":
    sys.exit(print_schema("ftd.replay.schema", DOCUMENTS))
