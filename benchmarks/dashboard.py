"""The dashboard of a large cluster in a real browser: time until it appears, and the cost of an update.

``python -m benchmarks.dashboard [--nodes 1000] [--events 10000] [--updates 60]`` serves the page from a
coordinator's model of a simulated cluster, opens it in headless Chromium and sends it updates. Then it
kills a node of a real cluster on this machine and measures how long it takes until the page shows the loss.
It needs chromium and mosquitto, and no other work on the machine, as loads and kills are measured by the
wall clock. The cost of an update is CPU time of the page's main thread: script, style, layout and paint of
all its tasks until it is idle again.
"""

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from benchmarks.common import Limit, Result, Summary, command_line, main, milliseconds
from ftd.config.dashboard import DashboardAddress
from ftd.observe.dashboard.feed import PERIOD_S, DeltaFeed
from ftd.observe.dashboard.model import DashboardModel
from ftd.observe.dashboard.server import DashboardServer
from tests.helpers.browser import Browser, Page, chromium, find_chromium
from tests.helpers.crowd_of_nodes import BEGAN, committed, event, recovery, snapshot_of, state_of

PAINT_S, UPDATE_MS, SHOWN_S = 2.0, 100.0, 1.0
LOADS, KILLS = 5, 5
STAGES, LAYERS = 8, 96
KINDS = {"a step": 0, "a node lost": 1, "100 nodes lost": 100}
"""Kinds of updates → number of nodes that are lost in one."""
LONG_TASKS = """
globalThis.long = [];
new PerformanceObserver((all) => long.push(...all.getEntries().map((e) => e.duration)))
  .observe({ type: 'longtask', buffered: true });
"""


class Crowd:
    """Model of a cluster with a history, and the server of its page."""

    def __init__(self, nodes: int, events: int) -> None:
        self.names = [f"node-{i}" for i in range(nodes)]
        self.model = DashboardModel()
        self.feed = DeltaFeed(self.model.take_delta, "benchmark")
        place = DashboardAddress(host="127.0.0.1", port=0, token=None, configured=True)
        self.server = DashboardServer(place, self.model, self.feed, cluster="benchmark")
        self.at_s = time.time() - BEGAN.timestamp() - 3000.0
        self.step, self.generation = 0, 1
        self.show()
        for number in range(events // 10):
            self.lose(self.names[number % nodes])
            self.model.on_event(
                event("TrainerStarted", self.at_s, node=self.names[0], device=0, pid=1, daemon_pid=1),
                own=False,
            )
            for _ in range(3):
                self.model.on_event(event("NodeDraining", self.at_s, node=self.names[1]), own=True)
            self.commit(3)

    def commit(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.step += 1
            self.at_s += 0.9
            loss = 5 / (1 + self.step / 500)
            self.model.on_event(committed(self.step, self.at_s, loss, 0.85), own=True)

    def lose(self, *names: str) -> None:
        self.generation += 1
        for item in recovery(self.generation, list(names), self.at_s, self.step):
            self.model.on_event(item, own=True)

    def show(self, *lost: str) -> None:
        state = state_of(self.names, stages=STAGES, layers=LAYERS, lost=lost)
        owners = len(self.names) // STAGES
        self.model.on_state(state | {"step": self.step, "snapshot": snapshot_of(owners)})
        self.feed.changed()


async def cold_load(page: Page, url: str) -> dict[str, float]:
    """Return the milliseconds from the navigation to the first paint and to the first content from the coordinator."""
    await page.call("Page.addScriptToEvaluateOnNewDocument", source=LONG_TASKS)
    await page.open(url)
    await page.until("performance.getEntriesByName('ftd-update').length", "the data")
    await page.until("performance.getEntriesByName('ftd-chart', 'measure').length", "the chart")
    await asyncio.sleep(1.0)
    paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    data = "(m => m.startTime + m.duration)(performance.getEntriesByName('ftd-update', 'measure')[0])"
    chart = "(m => m.startTime + m.duration)(performance.getEntriesByName('ftd-chart', 'measure')[0])"
    return {
        "paint_ms": await page.value(paint),
        "data_ms": await page.value(data),
        "chart_ms": await page.value(chart),
        "longest_ms": await page.value("Math.max(0, ...long)"),
    }


def main_thread(events: list[dict[str, Any]]) -> tuple[list[float], float]:
    """Return the CPU ms of each task of the page's main thread, and the CPU ms that drew the chart.

    CPU time is independent of other processes on the machine.
    """
    named = [e for e in events if e.get("name") == "thread_name" and e["args"]["name"] == "CrRendererMain"]
    threads = {(e["pid"], e["tid"]) for e in named}
    mine = [e for e in events if e.get("ph") == "X" and (e["pid"], e["tid"]) in threads and "tdur" in e]
    tasks = [e["tdur"] / 1e3 for e in mine if e["name"] == "RunTask"]
    chart = sum(e["tdur"] / 1e3 for e in mine if e["name"] == "FireIdleCallback")
    return tasks, chart


async def updates(browser: Browser, page: Page, crowd: Crowd, count: int) -> dict[str, list[float]]:
    """Measure deltas of each kind one by one; the chart, drawn at most once a second, counts separately."""
    found: dict[str, list[float]] = {kind: [] for kind in (*KINDS, "the chart", "longest task of any")}
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        lost = crowd.names[number : number + KINDS[kind]]
        await page.value("performance.clearMeasures()")
        async with browser.traced() as events:
            crowd.commit()
            if lost:
                crowd.lose(*lost)
            crowd.show(*lost)
            await page.until("performance.getEntriesByName('ftd-update').length", "an update")
            await asyncio.sleep(PERIOD_S + 1.2)
        tasks, chart = main_thread(events)
        found[kind].append(sum(tasks) - chart)
        found["the chart"].append(chart)
        found["longest task of any"].append(max(tasks))
        if lost:  # The nodes return, unmeasured, so that each update begins with the same state.
            crowd.show()
            await asyncio.sleep(2 * PERIOD_S + 1.2)
    return found


async def large(nodes: int, events: int, count: int) -> dict[str, Any]:
    """Measure loads and updates of a page with ``nodes`` nodes that has read ``events`` events."""
    crowd = Crowd(nodes, events)
    await crowd.server.start()
    url = f"http://127.0.0.1:{crowd.server.port}/"
    try:
        async with chromium() as browser:
            loads = []
            for _ in range(LOADS):
                page = await browser.page()  # Each page has its own cache, which is empty.
                await page.look(1920, 1080, dark=False)
                loads.append(await cold_load(page, url))
                await page.call("Page.close")
            page = await browser.page()
            await page.look(1920, 1080, dark=True)
            await cold_load(page, url)
            older = "import('/page/main.js').then(async ({ store }) => { while (await store.older()); })"
            await page.value(older)
            known = await page.value(
                "import('/page/main.js').then(({ store }) => store.document.events.length)"
            )
            await asyncio.sleep(3.0)
            spent = await updates(browser, page, crowd, count)
            return {"loads": loads, "updates": spent, "events": known, "problems": page.problems}
    finally:
        await crowd.server.close()


@contextlib.asynccontextmanager
async def watched(url: str) -> AsyncIterator[Page]:
    """Open a page that records when a node's chip goes offline, by this host's clock."""
    async with chromium() as browser:
        page = await browser.page()
        await page.look(1280, 900, dark=False)
        await page.open(url)
        await page.until("document.querySelector('.chip')", "nodes")
        await page.value(
            "new MutationObserver(() => { const node = document.querySelector('.chip[data-state=OFFLINE]'); "
            "if (node) globalThis.seen ??= (performance.timeOrigin + performance.now()) / 1000; "
            "else globalThis.seen = undefined; })"
            ".observe(document.body, { subtree: true, attributes: true, childList: true })"
        )
        yield page


def kills(count: int) -> list[float]:
    """Return the seconds from each SIGKILL of a node's daemon until the page shows it."""
    from tests.helpers.playground import playground, tiny_job

    took: list[float] = []
    with tempfile.TemporaryDirectory() as directory, playground(dashboard=True) as ground:
        ground.until(lambda: len(ground.state.get("nodes", {})) == 4, "four nodes")
        ground.submit(tiny_job(Path(directory), delay_s=0.02))

        async def watch() -> None:
            async with watched(ground.cluster.dashboards["coordinator"]) as page:
                for number in range(count):
                    name = f"node-{number % 3 + 1}"
                    await page.until(
                        "!document.querySelector('.chip[data-state=OFFLINE]')", "all nodes there"
                    )
                    began = time.time()
                    await asyncio.to_thread(ground.on_loop, ground.cluster.kill(name))
                    await page.until("globalThis.seen", "the loss on the page")
                    took.append(await page.value("globalThis.seen") - began)
                    await asyncio.to_thread(ground.further, 10)
                    await asyncio.to_thread(ground.on_loop, ground.cluster.start_node(name))

        asyncio.run(watch())
        ground.stop_job()
    return took


def report(arguments: Any) -> Result:
    result = Result(
        name="dashboard",
        what=f"The dashboard with {arguments.nodes} nodes and {arguments.events} events in headless Chromium",
        columns=("what", "ms (min / median / max)"),
    )
    found = asyncio.run(large(arguments.nodes, arguments.events, arguments.updates))
    loads = {key: [load[key] for load in found["loads"]] for key in found["loads"][0]}
    words = {
        "paint_ms": "cold load: first paint",
        "data_ms": "cold load: the cluster is drawn",
        "chart_ms": "cold load: the chart is drawn",
        "longest_ms": "cold load: longest task (parsing plotly)",
    }
    for key, title in words.items():
        result.rows.append((title, str(Summary(values=tuple(loads[key])))))
    for kind, values in found["updates"].items():
        title = f"update, main thread's CPU time: {kind}"
        result.rows.append((title, str(Summary(values=tuple(values)))))
    result.limits.append(Limit(name="first paint, s", measured=max(loads["paint_ms"]) / 1e3, limit=PAINT_S))
    result.limits.append(
        Limit(name="the cluster is drawn, s", measured=max(loads["data_ms"]) / 1e3, limit=PAINT_S)
    )
    for kind in (*KINDS, "the chart"):
        measured = statistics.median(found["updates"][kind])
        result.limits.append(Limit(name=f"main thread, ms: {kind}", measured=measured, limit=UPDATE_MS))
    result.data |= {"loads": found["loads"], "updates": found["updates"], "events": found["events"]}
    result.notes += [f"{found['events']} events in the page", *found["problems"][:5]]
    if arguments.kills:
        took = kills(arguments.kills)
        result.rows.append(("SIGKILL of a node to the page", milliseconds(took)))
        result.limits.append(Limit(name="SIGKILL to the page, s", measured=max(took), limit=SHOWN_S))
        result.data["kills_s"] = took
    return result


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--events", type=int, default=10_000)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--kills", type=int, default=KILLS)
    given = parser.parse_args()
    if find_chromium() is None:
        parser.error("chromium is not installed: tools/install-chromium")
    main(report(given), given.out)
