"""The dashboard of a real cluster in a real browser, while nodes and coordinators are killed."""

import asyncio
import os
import re
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftd.config.job import load_job_data
from tests.helpers.browser import Browser, Page, chromium, find_chromium
from tests.helpers.playground import Playground, write_job
from tests.helpers.shared_cluster import SharedCluster
from tests.helpers.tiny import learning_rate

TOKEN = "open-sesame-and-more"
CHIP = "document.querySelector('.chip[data-node=\"{}\"]')?.dataset.state"
COMMITTED = (
    "import('/page/main.js').then(({ store }) => store.document.trend[1].reduce((n, p) => n + p[6], 0))"
)
"""JavaScript for the number of committed steps that the page knows."""
PILL = "document.querySelector('#phase')"
WELL = f"getComputedStyle({PILL}).color === getComputedStyle(document.querySelector('#link')).color"
"""JavaScript for whether the phase has the same green as the word "live"."""
THEMED = (
    "document.querySelector('#chart').dataset.line === "
    "getComputedStyle(document.documentElement).getPropertyValue('--line').trim()"
)
CHART_WIDTH = "document.querySelector('.js-plotly-plot .main-svg')?.getBoundingClientRect().width"
LOOKS = [("wide", 1920, 1080, False), ("narrow", 400, 3600, True)]

pytestmark = [
    pytest.mark.skipif(find_chromium() is None, reason="chromium is not installed: tools/install-chromium"),
]


@pytest.fixture
def ground(shared: SharedCluster, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Playground]:
    """Lend three nodes that train with snapshots, and a coordinator that serves its page."""
    tables = "[snapshot]\nevery_steps = 10\n[evaluation]\nevery_steps = 10\n"
    path = write_job(tmp_path, delay_s=0.02, arguments="held_out = 16", tables=tables)
    with shared.lent(request.node, nodes=3, dashboard=True) as ground:
        ground.submit(load_job_data(path))
        ground.until(lambda: all(n["in_plan"] for n in ground.state["nodes"].values()), "all in the plan")
        ground.until_event("SnapshotCompleted")
        yield ground


@pytest.fixture
def screenshots(tmp_path: Path) -> Path:
    """Return the directory for screenshots that people may want to look at."""
    folder = Path(os.environ.get("FTD_SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def browse(work: Callable[[Browser], Coroutine[Any, Any, None]]) -> None:
    async def scene() -> None:
        async with chromium() as browser:
            await work(browser)

    asyncio.run(scene())


async def opened(browser: Browser, url: str) -> Page:
    """Open a new page with the cluster on it."""
    page = await browser.page()
    await page.look(1280, 900, dark=False)
    await page.open(url)
    await page.until("document.querySelectorAll('.figure').length", "figures")
    return page


async def pictures(page: Page, folder: Path, name: str) -> None:
    """Take pictures in both themes, in the size of a wall and of a phone; check that nothing overflows at the
    side.
    """
    for look, width, height, phone in LOOKS:
        for dark in (False, True):
            await page.look(width, height, dark=dark, phone=phone)
            await page.until(f"document.documentElement.scrollWidth <= {width}", f"fits into {width} pixels")
            await page.until(f"{CHART_WIDTH} <= innerWidth && {THEMED}", "the chart fits, in these colours")
            await page.shoot(folder / f"{name}-{look}-{'dark' if dark else 'light'}.png")
    await page.look(1280, 900, dark=False)


def test_a_killed_node_is_shown_with_the_reason_on_open_and_later_pages(
    ground: Playground, screenshots: Path
) -> None:
    async def scene(browser: Browser) -> None:
        page = await opened(browser, ground.cluster.dashboards["coordinator"])
        await page.until(f"{CHIP.format('node-2')} !== 'OFFLINE'", "a node that is well")
        await page.until("document.querySelector('#phase').textContent.includes('running')", "the phase")
        await page.until("document.querySelectorAll('.stage').length >= 3", "a stage on each node")
        await page.until("document.querySelectorAll('.bucket').length", "where the snapshot is")
        await page.until("document.querySelector('.js-plotly-plot')", "the chart")
        for figure, said in (("held-out", "after step"), ("rate", "samples/s"), ("learning-rate", "at step")):
            tile = f"document.querySelector('[data-figure={figure}]')"
            await page.until(f"!{tile}.hidden && {tile}.innerText.includes('{said}')", figure)
        shown = re.search(r"([\d.e-]+)\s+at step ([\d,]+)", await page.value(f"{tile}.innerText"))
        assert shown is not None
        assert float(shown[1]) == pytest.approx(learning_rate(int(shown[2].replace(",", ""))), rel=1e-2)

        await asyncio.to_thread(ground.on_loop, ground.cluster.kill("node-2"))
        await page.until(f"{CHIP.format('node-2')} === 'OFFLINE'", "the dead node")
        await page.until("document.querySelector('#recovery-now').innerText.includes('node-2 lost')", "why")
        await page.until("!document.querySelector('.stage[data-state=OFFLINE]')", "a plan without it")
        lost = "[...document.querySelectorAll('.event')].find((e) => e.innerText.includes('node lost'))"
        await page.until(lost, "the event of its loss")
        await page.value(f"{lost}.querySelector('button').click()")
        await page.until(
            "document.querySelector('.story')?.innerText.includes('recovery completed')", "its story"
        )
        await asyncio.to_thread(ground.further, 20)
        await pictures(page, screenshots, "after a loss")

        later = await opened(browser, ground.cluster.dashboards["coordinator"])
        await later.until(f"{CHIP.format('node-2')} === 'OFFLINE'", "the loss on a page that came later")
        await later.until(f"{lost}", "its event")
        await later.until("document.querySelector('#legend').textContent.includes('failure 1')", "its mark")
        assert await later.value(COMMITTED) > 20, "the steps from before the page was opened"
        assert page.problems == [] and later.problems == []

    browse(scene)
    ground.stop_job()


def test_a_silent_broker_is_shown_instead_of_the_phase(ground: Playground, screenshots: Path) -> None:
    async def scene(browser: Browser) -> None:
        page = await opened(browser, ground.cluster.dashboards["coordinator"])
        await page.until(f"{PILL}.textContent === '▶ running' && {WELL}", "a phase that is of now")
        broker = ground.cluster.pid("broker")
        os.kill(broker, signal.SIGSTOP)
        try:
            await page.until(
                f"/^[?] no message for [0-9]+ s$/.test({PILL}.textContent)", "how long it is quiet"
            )
            await page.until(
                "/^[?] .*: no message for [0-9]+ s$/.test(document.title)", "a title that says so"
            )
            await page.until("document.querySelector('#banner').innerText.includes('broker')", "why")
            assert not await page.value(WELL) and await page.value("document.body.className") == "stale"
            await page.shoot(screenshots / "no message.png")
            later = await opened(browser, ground.cluster.dashboards["coordinator"])
            assert "no message" in await later.value(f"{PILL}.textContent"), "a page that comes later"
        finally:
            os.kill(broker, signal.SIGCONT)
        for each in (page, later):
            await each.until(f"{PILL}.textContent === '▶ running' && {WELL}", "it trains, as it did")
            assert await each.value("document.body.className") == ""
        assert page.problems == [] and later.problems == []

    browse(scene)
    ground.stop_job()


def test_a_page_survives_a_restart_of_the_coordinator_and_then_needs_its_token(ground: Playground) -> None:
    async def scene(browser: Browser) -> None:
        page = await opened(browser, ground.cluster.dashboards["coordinator"])
        await asyncio.to_thread(ground.further, 20)
        before = await page.value(COMMITTED)
        await asyncio.to_thread(ground.on_loop, ground.cluster.kill("coordinator"))
        await page.until("document.querySelector('#link').textContent.includes('lost')", "a lost connection")
        await page.until(
            "document.querySelector('#banner').innerText.includes('state of that time')", "how old it is"
        )
        assert await page.value(f"{PILL}.textContent") == "? was running"
        assert await page.value(f"{PILL}.dataset.phase") == "LOST"
        assert (await page.value("document.title")).startswith("? tiny ")
        assert (await page.value("document.title")).endswith("%: connection lost")
        await asyncio.to_thread(ground.on_loop, ground.cluster.start_coordinator())
        await page.until("document.querySelector('#link').textContent.includes('live')", "it is back")
        await page.until(f"{COMMITTED}.then((now) => now >= {before})", "the steps from before")
        await page.until("document.querySelector('#phase').textContent.includes('running')", "the phase")

        environment = ground.cluster.processes.environment
        environment["FTD_DASHBOARD_TOKEN"] = TOKEN
        try:
            await asyncio.to_thread(ground.on_loop, ground.cluster.kill("coordinator"))
            await asyncio.to_thread(ground.on_loop, ground.cluster.start_coordinator())
            await page.until("document.querySelector('input[type=password]')", "the form")
            await page.value("document.querySelector('input[type=password]').value = 'not-the-token-at-all'")
            await page.value("document.querySelector('form').submit()")
            await page.until("location.hash === '#wrong'", "a refusal")
            await page.value(f"document.querySelector('input[type=password]').value = '{TOKEN}'")
            await page.value("document.querySelector('form').submit()")
            await page.until("document.querySelectorAll('.figure').length", "the page")
            await page.until("document.querySelector('#link').textContent.includes('live')", "and its stream")
            stranger = await browser.page()
            await stranger.open(ground.cluster.dashboards["coordinator"])
            await stranger.until("document.querySelector('input[type=password]')", "a form for the others")
        finally:
            del environment["FTD_DASHBOARD_TOKEN"]

    browse(scene)
    ground.stop_job()
