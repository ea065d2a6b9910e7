"""The lines that trainers print, as a local run shows them."""

import json
from pathlib import Path

import pytest

from ftd.local import trainer_output
from ftd.local.trainer_output import TrainerOutput


def logged(node: str, line: str, device: int = 0) -> str:
    return json.dumps({"node": node, "device": device, "line": line, "event": "trainer_output"}) + "\n"


def append(logs: Path, node: str, text: str) -> None:
    with (logs / f"{node}.log").open("a") as log:
        log.write(text)


def test_each_line_is_shown_once_although_all_trainers_print_it(tmp_path: Path) -> None:
    shown: list[str] = []
    output = TrainerOutput(tmp_path, shown.append)
    output.read()
    append(tmp_path, "a", logged("a", "building") + logged("a", "building") + logged("a", "step 1"))
    append(tmp_path, "b", logged("b", "building", device=1) + json.dumps({"event": "connected"}) + "\n")
    output.read()
    assert shown == ["a/0  building", "a/0  building", "a/0  step 1"]
    shown.clear()
    append(tmp_path, "b", logged("b", "building", device=1) + logged("b", "building", device=1))
    append(tmp_path, "c", logged("c", "step 2") + logged("c", " "))
    output.read()
    output.read()
    assert shown == ["b/1  building", "c/0  step 2"], "b has printed it three times, a twice"


def test_a_line_that_is_still_written_is_shown_when_it_is_whole(tmp_path: Path) -> None:
    shown: list[str] = []
    output = TrainerOutput(tmp_path, shown.append)
    line = logged("a", " 10%\r 50%\r100% [=====]")
    append(tmp_path, "a", 'text with "trainer_output" that is no record\n' + line[:20])
    output.read()
    assert not shown
    append(tmp_path, "a", line[20:])
    output.read()
    assert shown == ["a/0  100% [=====]"], "only the end of a progress bar"


def test_the_memory_of_lines_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_output, "MAX_TEXTS", 3)
    shown: list[str] = []
    output = TrainerOutput(tmp_path, shown.append)
    append(tmp_path, "a", "".join(logged("a", f"step {step}") for step in range(10)))
    output.read()
    assert len(shown) == 10 and len(output._shown) <= 3
