"""The reference of availability traces: its examples are read, and it names every format and key."""

import re
from pathlib import Path

import msgspec
import pytest

from ftd.replay.traces.generate import (
    AbsenceLaw,
    FailureModel,
    Preemptions,
    RackFailures,
    generate,
    read_failure_model,
)
from ftd.replay.traces.reading import FORMATS, read_trace

PAGE = (Path(__file__).parents[4] / "docs" / "reference" / "traces.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^### ([a-z, ]+)\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL)
BLOCKS = [
    (title.split(",")[0], text)
    for title, section in EXAMPLES
    for text in re.findall(r"^```[a-z]+\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
]


@pytest.mark.parametrize(("name", "text"), BLOCKS)
def test_an_example_is_recognised_as_the_format_of_its_section(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    path.write_text(text)
    trace = read_trace(path)
    assert trace.source.startswith(f"trace.txt, {name}")
    assert trace.removals > 0


def test_every_format_has_an_example() -> None:
    assert {name.strip() for title, _ in EXAMPLES for name in title.split(",")} == set(FORMATS)
    assert {name for name, _ in BLOCKS} == set(FORMATS) - {"oobleck"}, "oobleck has bamboo's"


def test_the_failure_model_of_the_page_is_one_and_all_keys_are_documented(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    path = tmp_path / "model.toml"
    path.write_text(example)
    assert generate(read_failure_model(path), 0).removals > 0
    documented = set(re.findall(r"`([a-z_]+)`", " ".join(re.findall(r"^\|([^|]+)\|", PAGE, re.MULTILINE))))
    keys = {
        field.name
        for table in (FailureModel, RackFailures, Preemptions, AbsenceLaw)
        for field in msgspec.structs.fields(table)
    }
    assert keys - documented == set()
