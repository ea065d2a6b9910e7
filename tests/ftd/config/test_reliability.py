"""Tests of ``ftd reliability``, from the file to the answer."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ftd.cli.main import app
from ftd.config.reliability_file import load_reliability
from ftd.errors import ConfigurationError
from ftd.observe.view.plots.survival_plot import plot_survival

EXAMPLE = Path(__file__).parents[3] / "examples" / "reliability.toml"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["reliability", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_example_reproduces_figure_8() -> None:
    answer = json.loads(run(str(EXAMPLE), "--json"))
    assert answer["with_protection"]["safe_days"] == pytest.approx(16.178, abs=1e-3)
    assert answer["without_protection"]["safe_days"] == pytest.approx(0.408, abs=1e-3)
    assert answer["with_protection_as_printed"]["safe_days"] == pytest.approx(2.564, abs=1e-3)
    assert answer["smallest_f"] == 3


def test_the_printed_answer() -> None:
    page = " ".join(run(str(EXAMPLE)).split())
    assert "16.18 days" in page and "9.79 h" in page and "tolerance.failures = 3" in page


def test_a_group_of_the_nodes_left_over_can_lose_fewer(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"

    def repaired(nodes: int) -> dict[str, float]:
        file.write_text(f"nodes = {nodes}\ngroup = 6\n[hardware]\nmean_days = 1000\n")
        found: dict[str, float] = json.loads(run(str(file), "--json"))["with_repair"]
        return found

    whole, more = repaired(12), repaired(13)
    added = more["losses_per_day"] - whole["losses_per_day"]
    assert added == pytest.approx(1 / 1000), "the node that is alone loses its state whenever it fails"
    assert more["horizon_survival"] == pytest.approx(0.97, abs=0.001)
    assert repaired(14)["losses_per_day"] - whole["losses_per_day"] == pytest.approx(
        2 / 1000 / 24_000, rel=0.01
    )


def test_a_threshold_near_1_is_not_printed_as_certainty(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("nodes = 4\ngroup = 2\nthreshold = 0.9999999\n[hardware]\nrate = 1e-4\n")
    page = " ".join(run(str(file)).split())
    assert page.count("with probability 0.9999999") == 2 and "probability 1" not in page


def test_a_survival_near_1_is_not_printed_as_certainty(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("nodes = 16\ngroup = 4\n[hardware]\nrate = 1e-4\nshape = 1.3\n")
    lines = run(str(file)).splitlines()
    assert next(line for line in lines if "as Figure 8" in line).split(")")[1].split()[0] == ">0.9999"
    assert "does not happen in 30 days is >0.9999." in " ".join(" ".join(lines).split())
    file.write_text("nodes = 16\ngroup = 4\n[hardware]\nrate = 0\n")
    assert "does not happen in 30 days is 1." in " ".join(run(str(file)).split()), "nothing ever fails"


def test_a_time_of_less_than_a_minute_is_printed_in_seconds(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("nodes = 100000\ngroup = 2\n[hardware]\nmean_days = 1\n")
    line = next(line for line in run(str(file)).splitlines() if line.startswith("without protection"))
    assert line.split(")")[1].split() == ["0", "0.091", "s", "0.864", "s", "0.864", "s"]


def test_a_cluster_that_never_fails(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("nodes = 4\ngroup = 2\n[hardware]\nrate = 0\n")
    assert json.loads(run(str(file), "--json"))["with_protection"]["safe_days"] is None
    assert "without end" in run(str(file))


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_plot_is_written(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"curve.{suffix}"
    run(str(EXAMPLE), "--plot", str(file))
    assert file.read_bytes()[:5] in (b"<?xml", b"\x89PNG\r")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("group = 2\n[hardware]\nrate = 1", "nodes"),
        ("nodes = 4\ngroup = 9\n[hardware]\nrate = 1", "group is 9"),
        ("nodes = 4\ngroup = 2\nlosses = 2\n[hardware]\nrate = 1", "losses is 2"),
        ("nodes = 4\ngroup = 2\n[hardware]", "either rate or mean_days"),
        ("nodes = 4\ngroup = 2\n[hardware]\nrate = 1\nmean_days = 2", "either rate or mean_days"),
        ("nodes = 4\ngroup = 2\n[hardware]\nrate = nan", "hardware.rate"),
        ("nodes = 4\ngroup = 2\n[hardware]\nmean_days = 0", "hardware.mean_days"),
        ("nodes = 4\ngroup = 2\n[hardware]\nrate = 1\nshape = -1", "hardware.shape"),
        (
            "nodes = 4\ngroup = 2\n[hardware]\nmean_days = 365\nshape = 200",
            "hardware.shape: 200.0 is not allowed",
        ),
        ("nodes = 4\ngroup = 2\n[hardwear]\nrate = 1", "hardware"),
        ("nodes = 4\ngroup = 2\nthreshold = 2\n[hardware]\nrate = 1", "threshold"),
        ("nodes = 4\ngroup = 2\n[hardware]\nrate = 1\n[repair]\nhours = 0", "repair.hours"),
    ],
)
def test_errors_name_the_wrong_key(tmp_path: Path, text: str, names: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=names):
        load_reliability(file)


@pytest.mark.parametrize(
    ("rates", "labels"),
    [
        ((1e-2, 1e-5), ["protected: 0.9 until 11.24 h", "not protected: 0.9 until 18.3 min"]),
        ((0.0, 0.0), ["protected: 0.9 without end", "not protected: 0.9 until 2.58 days"]),
    ],
)
def test_the_curves_are_labelled_in_units_that_read_well(
    tmp_path: Path, rates: tuple[float, float], labels: list[str]
) -> None:
    hardware, snapshots = rates
    file, image = tmp_path / "c.toml", tmp_path / "c.svg"
    text = EXAMPLE.read_text().replace("rate = 1e-4 ", f"rate = {hardware} ")
    head, table, tail = text.partition("[snapshots]")
    file.write_text(head + table + tail.replace("rate = 1e-5", f"rate = {snapshots}", 1))
    plot_survival(load_reliability(file), image)
    assert re.findall(r"(?:not )?protected: [^<]*", image.read_text()) == labels


def test_an_unknown_plot_format_is_rejected() -> None:
    result = CliRunner().invoke(app, ["reliability", str(EXAMPLE), "--plot", "curve.gif"])
    assert isinstance(result.exception, ConfigurationError) and ".svg or .png" in str(result.exception)
