"""The page of a replay in a real browser without a network."""

import asyncio
import os
from pathlib import Path

import pytest

from ftd.replay.comparison import compare
from ftd.replay.parameters import read_parameters
from ftd.replay.plot import plot_replay
from ftd.replay.report import build_report
from tests.helpers.browser import chromium, find_chromium
from tests.helpers.replay_jobs import make_job, make_trace

pytestmark = pytest.mark.skipif(
    find_chromium() is None, reason="chromium is not installed: tools/install-chromium"
)
TRACE = make_trace(6, (300.0, "remove", "n5"), (600.0, "add", "n5"), end_s=1000.0)
POLICIES = ("ideal", "ftd", "oobleck", "varuna")
BOTTOM = """[...document.querySelectorAll('svg text')].filter((t) => t.textContent.trim() === '{}')
    .map((t) => t.getBoundingClientRect().bottom).find((y) => y > 0)"""
"""Lower edge of the first such text in the chart, in pixels."""
NO_NETWORK = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}


@pytest.mark.processes
def test_the_page_shows_the_chart_with_the_nodes_beneath_the_throughput(tmp_path: Path) -> None:
    """``FTD_SCREENSHOTS`` names a directory for pictures to look at."""
    found = compare(make_job(), lambda _: TRACE, read_parameters(), most_traces=1, policies=POLICIES)
    report = build_report(found, generated=False, parameters="shipped")
    plot_replay(report, tmp_path / "replay.html")
    folder = Path(os.environ.get("FTD_SCREENSHOTS", tmp_path))

    async def scene() -> None:
        async with chromium() as browser:
            page = await browser.page()
            await page.call("Network.emulateNetworkConditions", **NO_NETWORK)
            await page.open((tmp_path / "replay.html").as_uri())
            for width, phone, dark in ((1280, False, False), (1280, False, True), (390, True, False)):
                await page.look(width, 900, dark=dark, phone=phone)
                await page.until(f"document.documentElement.scrollWidth <= {width}", f"fits into {width} px")
                await page.shoot(folder / f"replay-{width}-{'dark' if dark else 'light'}.png", whole=True)
            await page.look(1280, 900, dark=False)
            panels = [await page.value(BOTTOM.format(policy)) for policy in POLICIES]
            nodes, bars = (
                await page.value(BOTTOM.format("nodes")),
                await page.value(BOTTOM.format("computing")),
            )
            assert [*panels, nodes, bars] == sorted([*panels, nodes, bars]), "from the top to the bottom"
            assert await page.value("performance.getEntriesByType('resource').length") == 0
            assert page.problems == []

    asyncio.run(scene())
