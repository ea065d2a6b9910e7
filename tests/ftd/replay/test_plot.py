"""The images and the page of a replay."""

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from ftd.observe.view.plots.image import render_image
from ftd.replay.comparison import compare
from ftd.replay.parameters import read_parameters
from ftd.replay.plot import draw_replay, plot_replay
from ftd.replay.policy import CATEGORIES
from ftd.replay.report import ReplayReport, build_report
from tests.helpers.replay_jobs import make_job, make_trace

TRACE = make_trace(6, (300.0, "remove", "n5"), (600.0, "add", "n5"), end_s=1000.0)
POLICIES = ["ideal", "oobleck", "varuna"]


@pytest.fixture(scope="module")
def report() -> ReplayReport:
    found = compare(make_job(), lambda _: TRACE, read_parameters(), most_traces=1, policies=POLICIES)
    return build_report(found, generated=False, parameters="shipped")


def test_there_is_a_panel_for_each_policy_then_nodes_then_bars_of_the_whole_time(
    report: ReplayReport,
) -> None:
    *panels, nodes, bars = draw_replay(report).axes
    assert len(panels) == len(POLICIES)
    for panel, policy in zip(panels, report.policies, strict=True):
        drawn = panel.patches[-1].get_data()  # type: ignore[attr-defined]
        assert tuple(drawn.values) == policy.throughput
        [mean] = panel.get_lines()
        assert mean.get_linestyle() == ":"
        assert np.asarray(mean.get_ydata()) == pytest.approx([policy.samples_per_s.mean] * 2)
    assert list(nodes.patches[0].get_data().values) == [6, 5, 6]  # type: ignore[attr-defined]
    widths = dict.fromkeys(range(len(POLICIES)), 0.0)
    for bar in bars.patches:
        widths[round(bar.get_y() + bar.get_height() / 2)] += bar.get_width()  # type: ignore[attr-defined]
    assert list(widths.values()) == pytest.approx([100.0] * len(POLICIES))
    legend = bars.get_legend()
    assert legend is not None
    shown = [text.get_text() for text in legend.get_texts()]
    assert set(shown) == set(report.used_categories) and set(shown) < set(CATEGORIES)


@pytest.mark.long
def test_images_are_of_their_format_and_the_same_each_time(report: ReplayReport, tmp_path: Path) -> None:
    plot_replay(report, tmp_path / "a.svg")
    plot_replay(report, tmp_path / "a.png")
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    texts = "".join(root.itertext())
    assert "varuna" in texts and "simulated" in texts and "nodes" in texts
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert render_image(lambda: draw_replay(report), ".svg") == (tmp_path / "a.svg").read_bytes()


def test_the_page_needs_no_network_and_says_what_the_image_shows(
    report: ReplayReport, tmp_path: Path
) -> None:
    plot_replay(report, tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    tags: list[tuple[str, dict[str, str | None]]] = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.append((tag, dict(attrs)))

    Tags().feed(page)
    names = [tag for tag, _ in tags]
    assert names.count("table") == 3 and not {"script", "link", "img", "iframe"} & set(names)
    assert not re.search(r"(src|href)=\"(?!#)", page) and "@import" not in page
    [drawing] = [attributes for tag, attributes in tags if tag == "svg"]
    assert drawing["role"] == "img" and "varuna" in (drawing["aria-label"] or "")
    assert "prefers-color-scheme: dark" in page and "Simulated" in page
