"""Tests of the options of ``ftd chaos`` that are rejected before anything is sent."""

import pytest

from tests.helpers.commands import ftd_here


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["kill", "node-2", "--device", "0"], "--device: it has no effect on kill of a whole node"),
        (
            ["stop", "node-2", "--target", "node", "--device", "1"],
            "--device: it has no effect on stop of a whole node (add --target trainer)",
        ),
        (["disconnect", "node-2", "--for", "inf"], "--for: inf is not allowed (write seconds above 0)"),
        (["stop", "node-2", "--for", "nan"], "--for: nan is not allowed"),
        (["hang", "node-2", "--for", "0"], "--for: 0 is not allowed"),
        (["slow", "node-2", "--factor", "inf"], "--factor: inf is not allowed (write 1 or more)"),
    ],
)
def test_options_without_effect_are_rejected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    code, _, err = ftd_here(
        "chaos", *arguments, patch=monkeypatch, said=capsys, FTD_BROKER="mqtt://127.0.0.1:9"
    )
    assert code == 2
    assert says in err
