"""The dashboard without a cluster: its data, its stream, its access control, and its chart in a browser."""

import asyncio
import base64
import contextlib
import json
import math
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from ftd.config.daemon import parse_daemon_config
from ftd.config.dashboard import DashboardAddress
from ftd.coordinator.journal import Journal
from ftd.errors import ConfigurationError
from ftd.observe.dashboard import feed as feeds
from ftd.observe.dashboard import server as servers
from ftd.observe.dashboard.assets import PAGE as PAGE_FILES
from ftd.observe.dashboard.assets import PLOTLY
from ftd.observe.dashboard.buckets import describe_share, describe_tolerance, list_buckets
from ftd.observe.dashboard.dashboard import Dashboard
from ftd.observe.dashboard.feed import DeltaFeed, PositionExpiredError
from ftd.observe.dashboard.model import FIRST_EVENTS, MAX_EVALUATIONS, MAX_EVENTS, PAGE, DashboardModel
from ftd.observe.dashboard.server import DashboardServer
from ftd.observe.dashboard.trend import Point, Trend
from ftd.observe.view.text import format_size
from ftd.transport.wire.public import EventMessage
from tests.helpers.browser import chromium, find_chromium
from tests.helpers.crowd_of_nodes import Json, committed, event, pipelines_of, recovery, snapshot_of, state_of

NAMES = ["node-0", "node-1", "node-2", "node-3"]
TOKEN = "a-token-of-some-length"


# --- data ----------------------------------------------------------------------------------------


def patched(document: Json, delta: Json) -> Json:
    """Apply a delta as the page does (``store.js``)."""
    made = {**document, "nodes": dict(document["nodes"]), "state": document["state"] | delta.get("state", {})}
    for name, node in delta.get("nodes", {}).items():
        made["nodes"].pop(name, None)
        if node is not None:
            made["nodes"][name] = node
    first, points = delta.get("trend", (len(document["trend"][1]), []))
    made["trend"] = [0, [*document["trend"][1][:first], *points]]
    for part in ("events", "marks", "recoveries"):
        made[part] = [*document[part], *delta.get(part, [])]
    for part in ("recovery", "snapshot_layout", "evaluations"):
        made[part] = delta.get(part, document[part])
    return made


def copied(value: Any) -> Any:
    return json.loads(json.dumps(value))


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.floats(0.1, 3.0)),
        st.tuples(st.just("evaluate"), st.none()),
        st.tuples(st.just("lose"), st.sampled_from(NAMES)),
        st.tuples(st.just("state"), st.sets(st.sampled_from(NAMES))),
        st.tuples(st.just("back"), st.integers(1, 5)),
        st.tuples(st.just("snapshot"), st.sampled_from(NAMES)),
        st.tuples(st.just("take"), st.none()),
    ),
    max_size=30,
)


@given(happened=STEPS)
def test_a_document_plus_all_deltas_equals_the_current_document(
    happened: list[tuple[str, Any]],
) -> None:
    model = DashboardModel()
    model.trend = Trend(8)
    model.on_state(state_of(NAMES))
    model.take_delta()
    page = copied(model.document())
    step, at_s, generation = 0, 0.0, 1
    for what, value in [*happened, ("take", None)]:
        at_s += 1.0
        match what:
            case "commit":
                step, at_s = step + 1, at_s + value
                model.on_event(committed(step, at_s, step_s=value), own=True)
            case "evaluate":
                model.on_event(event("Evaluated", at_s, step=step, loss=0.5, metrics={}), own=True)
            case "lose":
                generation += 1
                for messages in recovery(generation, [value], at_s, step):
                    model.on_event(messages, own=True)
            case "state":
                model.on_state(state_of(NAMES, lost=tuple(value)))
            case "snapshot":
                model.on_state({**state_of(NAMES), "snapshot": snapshot_of(2, (value,))})
            case "back":
                undone = min(step, value)
                step -= undone
                model.on_event(
                    event("RolledBack", at_s, step=step, from_step=step + undone, to_step=step, undone_steps=undone,
                          tier="memory", sources=[]),
                    own=True,
                )  # fmt: skip
            case "take":
                page = patched(page, copied(model.take_delta() or {}))
    now = copied(model.document())
    assert page == {**now, "oldest": page["oldest"]}
    assert model.take_delta() is None


def test_evaluations_stay_until_a_rollback_or_another_job() -> None:
    model = DashboardModel()

    def evaluate(step: int) -> None:
        messages = event("Evaluated", float(step), step=step, loss=1 / step, metrics={"accuracy": 0.5})
        model.on_event(messages, own=True)

    def steps() -> list[int]:
        return [one["step"] for one in model.document()["evaluations"]]

    for step in (10, 20, 30):
        evaluate(step)
    first = model.document()["evaluations"][0]
    assert (first["step"], first["loss"], first["metrics"]) == (10, 0.1, {"accuracy": 0.5})
    model.on_event(event("RolledBack", 31.0, step=20, to_step=20), own=True)
    assert steps() == [10, 20]
    for step in range(30, 3000, 10):
        evaluate(step)
    assert len(steps()) <= MAX_EVALUATIONS and steps()[-1] == 2990 and steps() == sorted(steps())
    assert steps()[0] < 500, "thinned out, and not cut off"
    model.on_event(event("JobSubmitted", 3000.0), own=True)
    assert steps() == []


def test_the_trend_has_tokens_and_the_learning_rate() -> None:
    trend = Trend(4)
    for number in range(1, 6):
        trend.commit(number, float(number), 1.0, 0.5, 32.0, tokens_per_s=1000.0, learning_rate=1 / number)
    assert sum(point[7] or 0.0 for point in trend.points) == 5 * 500.0
    assert trend.points[-1][8] == 1 / 5 and len(trend.points) < 5


def test_a_recovery_is_shown_phase_by_phase_with_its_reasons() -> None:
    model = DashboardModel()
    model.on_state(state_of(NAMES))
    messages = recovery(2, ["node-2"], 10.0)
    shown = []
    for message in messages:
        model.on_event(message, own=True)
        running = model.current_recovery
        shown.append(None if running is None else [name for name, _, _ in running["phases"]])
    quiesced = ["detect", "quiesce", "plan"]
    assert shown == [
        None,
        ["detect", "quiesce"],
        quiesced,
        [*quiesced, "state"],
        [*quiesced, "state", "resume"],
        None,
    ]
    (over,) = model.recoveries.newest
    assert over["phases"] == [("detect", 3), ("quiesce", 40), ("plan", 20), ("state", 50), ("resume", 250)]
    assert over["total_ms"] == sum(took_ms for _, took_ms in over["phases"])
    assert over["losses"][0]["reason"] == "the broker lost the session of node-2"
    assert over["decision"] == "because of Quiesced"
    assert over["failure"] and over["change"] == "lost"


def test_a_failure_during_a_recovery_keeps_its_begin_and_counts_attempts() -> None:
    model = DashboardModel()
    for message in recovery(2, ["node-1"], 10.0)[:3]:
        model.on_event(message, own=True)
    for message in recovery(3, ["node-2"], 11.0)[:2]:
        model.on_event(message, own=True)
    running = model.current_recovery
    assert running is not None and running["attempts"] == 2
    assert [loss["node"] for loss in running["losses"]] == ["node-1", "node-2"]
    assert running["phases"][0][1] == pytest.approx(model.document()["events"][0]["at"] - 0.003)
    stale = recovery(2, ["node-1"], 12.0)[3]
    model.on_event(stale, own=True)
    assert [name for name, _, _ in running["phases"]] == ["detect", "quiesce"]


def test_the_events_of_a_recovery_are_one_chapter() -> None:
    model = DashboardModel()
    messages = recovery(2, ["node-2"], 10.0)
    later = [
        EventMessage(**{f: getattr(m, f) for f in m.__struct_fields__} | {"cause": f"c-other-{i}"})
        for i, m in enumerate(messages[2:])
    ]
    for message in [*messages[:2], *later]:
        model.on_event(message, own=True)
    assert {e["chapter"] for e in model.document()["events"]} == {"c-2"}


def test_events_of_nodes_are_listed_in_brief_and_change_nothing_else() -> None:
    model = DashboardModel()
    model.on_state(state_of(NAMES))
    lie = recovery(2, ["node-2"], 1.0)[-1]
    broken = event("RecoveryCompleted", 1.0, source="node/x", recovery={"nodes": 7}, reason="x" * 100_000)
    flood = event("TrainerStarted", 1.0, source="node/x", device=0, junk="y" * 100_000)
    for message in (lie, broken, flood):
        model.on_event(message, own=False)
    document = model.document()
    assert document["recoveries"] == [] and document["marks"] == []
    assert len(document["events"]) == 3
    assert len(json.dumps(document["events"])) < 10_000


def test_memory_is_bounded_and_older_events_are_paged() -> None:
    model = DashboardModel()
    for number in range(MAX_EVENTS + 50):
        model.on_event(event("NodeDraining", number, node="node-1", cause=f"c-{number}"), own=True)
    document = model.document()
    assert document["oldest"] == 51
    numbers = [e["n"] for e in document["events"]]
    assert numbers == list(range(MAX_EVENTS + 51 - FIRST_EVENTS, MAX_EVENTS + 51))
    page = model.events_before(numbers[0])
    assert [e["n"] for e in page] == list(range(numbers[0] - PAGE, numbers[0]))
    assert model.events_before(51) == [] and model.events_before(0) == []
    assert [e["n"] for e in model.events_before(53)] == [51, 52]


@given(
    steps=st.lists(st.tuples(st.floats(0.01, 10), st.floats(0, 5)), min_size=1, max_size=60),
    back=st.integers(0, 70),
)
def test_merging_and_rollbacks_keep_sums(steps: list[tuple[float, float]], back: int) -> None:
    trend, at_s = Trend(8), 1000.0
    for number, (step_s, pause_s) in enumerate(steps, 1):
        at_s += step_s + pause_s
        trend.commit(number, at_s, float(number), step_s, 32 / step_s)
    assert len(trend.points) <= 8
    whole = sum(p[4] or 0.0 for p in trend.points)
    assert whole == pytest.approx(sum(s for s, _ in steps))
    assert sum(p[6] or 0.0 for p in trend.points) == len(steps)
    assert sum(p[3] or 0.0 for p in trend.points) == pytest.approx(32 * len(steps))
    trend.roll_back(back)
    left = sum(p[4] or 0.0 for p in trend.points)
    assert left <= whole + 1e-9
    assert back < len(steps) or left == pytest.approx(whole)
    assert back > 0 or left == pytest.approx(0)
    assert 0 <= goodput(trend.points) <= 1 + 1e-9


def test_steps_that_arrive_all_at_once_share_the_time_since_the_previous_one() -> None:
    trend = Trend()
    for number in range(1, 11):
        trend.commit(number, 1000.0 + number, 1.0, 1.0, 32.0)
    for number in range(11, 31):  # The broker was unreachable for 20 s.
        trend.commit(number, 1030.5 + number / 1000, 1.0, 1.0, 32.0)
    trend.commit(31, 1031.5, 1.0, 1.0, 32.0)
    assert len(trend.points) == 12
    step, _, _, samples, productive_s, elapsed_s, steps, _, _ = trend.points[10]
    assert (step, samples, steps) == (30, 640, 20)
    assert elapsed_s == pytest.approx(20.5, abs=0.1) and productive_s == pytest.approx(20)
    assert goodput(trend.points) > 0.95


def goodput(points: list[Point]) -> float:
    """Return the goodput that the page computes from these points (``figures.js``)."""
    return sum(p[4] or 0.0 for p in points) / sum(p[5] or 0.0 for p in points)


def test_a_loss_that_is_not_finite_is_a_gap() -> None:
    trend = Trend()
    trend.commit(1, 1.0, math.nan, 1.0, 32.0)
    trend.commit(2, 2.0, None, 1.0, None)
    assert [p[2] for p in trend.points] == [None, None]


def test_buckets_name_their_owners_shares_and_tolerance() -> None:
    pipelines = [*pipelines_of(["a", "b"], 2, 8), *pipelines_of(["c", "d", "e", "f"], 4, 8)]
    found = list_buckets(pipelines, "aec", {})
    assert [(b["first_layer"], b["end_layer"], b["owners"]) for b in found] == [
        (0, 2, ["a", "c"]),
        (2, 4, ["a", "d"]),
        (4, 6, ["b", "e"]),
        (6, 8, ["b", "f"]),
    ]
    assert found[0]["tolerance"] == "the loss of any one owner"
    assert describe_share("arc:2", 4) == "1/4 of it, copies of the next 2 owners' parts"
    assert (
        describe_share("aec2+arc:1", 4)
        == "1/4 of it, a copy of the next owner's part, two parities of the other parts"
    )
    assert describe_tolerance("none", 4, replica_peer=None) == "no loss"
    assert describe_tolerance("aec+buddy", 1, replica_peer="b") == "its loss: b holds a copy"
    assert describe_tolerance("no such thing", 4, replica_peer=None) == "no loss"


def test_the_owners_of_a_snapshot_stay_known_after_its_plan_ended() -> None:
    model = DashboardModel()
    model.on_state({**state_of(NAMES), "snapshot": snapshot_of(4)})
    before = model.document()["snapshot_layout"]["buckets"]
    model.on_state({**state_of(NAMES, lost=("node-3",)), "snapshot": snapshot_of(4, ("node-3",))})
    layout = model.document()["snapshot_layout"]
    assert layout["missing"] == ["node-3"] and layout["buckets"] == before
    assert any("node-3" in b["owners"] for b in layout["buckets"])


def test_a_restarted_coordinator_loads_its_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.record(event("JobSubmitted", 0.0, name="gpt", steps=9, job="gpt-1"))
    for step in range(1, 1201):
        journal.record(committed(step, float(step)))
    for message in recovery(2, ["node-2"], 1300.0):
        journal.record(message)
    rows, stride = journal.sampled_steps(500)
    assert stride == 3 and [row["step"] for row in rows] == list(range(3, 1201, 3))

    async def scene() -> Json:
        place = DashboardAddress(host="127.0.0.1", port=0, token=None, configured=True)
        dashboard = Dashboard(place, cluster="t")
        await dashboard.start(journal, state_of(NAMES))
        document = dashboard._model.document()
        await dashboard.close()
        return document

    document = asyncio.run(scene())
    journal.close()
    assert [e["event"] for e in document["events"]][:2] == ["JobSubmitted", "NodeLost"]
    assert len(document["recoveries"]) == 1 and document["recovery"] is None
    points = document["trend"][1]
    assert points[-1][0] == 1200 and sum(p[6] for p in points) == 1200
    assert goodput(points) == pytest.approx(1.0)


# --- stream --------------------------------------------------------------------------------------


def test_all_pages_read_one_ring_and_a_slow_page_must_reload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeds, "MAX_FRAMES", 4)
    monkeypatch.setattr(feeds, "PERIOD_S", 0.0)
    messages: list[int] = []

    def take() -> Json | None:
        return {"n": len(messages)} if messages else None

    async def scene() -> None:
        feed = DeltaFeed(take, "run", quiet_s=lambda: 0.04)
        assert feed.flush() == "run-0"
        quick, slow = feed.stream_from("run-0"), feed.stream_from("run-0")

        async def begin(page: AsyncIterator[bytes]) -> bytes:
            return await anext(page)

        first = [asyncio.ensure_future(begin(page)) for page in (quick, slow)]
        await asyncio.sleep(0)
        messages.append(1)
        feed.changed()
        assert await first[0] == await first[1] == b'id: run-1\ndata: {"n":1,"quiet_s":0.0}\n\n'
        for _ in range(6):
            messages.append(1)
            feed.flush()
            assert b"data:" in await anext(quick)
        with pytest.raises(PositionExpiredError):
            await anext(slow)
        for position in ("run-0", "other-7", "run-99", "", "run-x", "run-" + 5000 * "1"):
            with pytest.raises(PositionExpiredError):
                await anext(feed.stream_from(position))
        resumed = feed.stream_from("run-5")
        assert (await anext(resumed)).count(b"id: ") == 2
        feed.close()
        with pytest.raises(StopAsyncIteration):
            await anext(quick)

    asyncio.run(scene())


# --- access --------------------------------------------------------------------------------------


@pytest.mark.parametrize("listen", ["0.0.0.0:9650", "10.0.0.1:1", "[::]:9650", "host.example:9650"])
def test_beyond_loopback_only_with_a_token(tmp_path: Path, listen: str) -> None:
    with pytest.raises(ConfigurationError, match="everybody on the network") as error:
        parse_daemon_config({"dashboard": {"listen": listen}}, directory=tmp_path)
    assert error.value.field == "ftd.toml: dashboard.token_file" and error.value.remedy
    place = parse_daemon_config(
        {"dashboard": {"listen": listen, "token": TOKEN}}, directory=tmp_path
    ).dashboard
    assert place is not None and place.token == TOKEN


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"listen": "9650"}, "is not of the form host:port"),
        ({"listen": "127.0.0.1:70000"}, "is not of the form host:port"),
        ({"listen": "a b:1"}, "is not of the form host:port"),
        ({"token": "short"}, "at least 16"),
        ({"token": "with spaces in it, and long"}, "at least 16"),
        ({"token": TOKEN, "token_file": "t"}, "both"),
        ({"token_file": "none"}, "cannot be read"),
    ],
)
def test_a_configuration_that_cannot_work_names_the_field(tmp_path: Path, table: Json, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words) as error:
        parse_daemon_config({"dashboard": table}, directory=tmp_path)
    assert str(error.value.field).startswith("ftd.toml: dashboard.")


def test_it_is_enabled_on_loopback_and_can_be_disabled(tmp_path: Path) -> None:
    place = parse_daemon_config({}, directory=tmp_path).dashboard
    assert place is not None and (place.host, place.port, place.configured) == ("127.0.0.1", 9650, False)
    assert parse_daemon_config({"dashboard": {"listen": ""}}, directory=tmp_path).dashboard is None


def served(
    work: Callable[[aiohttp.ClientSession, str], Coroutine[Any, Any, None]],
    *,
    token: str | None = TOKEN,
    past: Iterable[EventMessage] = (),
) -> None:
    """Run ``work`` with a client and the address of a dashboard that has data to show."""

    async def scene() -> None:
        model = DashboardModel()
        model.on_state(state_of(NAMES))
        for each in past:
            model.on_event(each, own=True)
        place = DashboardAddress(host="127.0.0.1", port=0, token=token, configured=True)
        feed = DeltaFeed(model.take_delta, "run")
        server = DashboardServer(place, model, feed, cluster="t")
        await server.start()
        jar = aiohttp.CookieJar(unsafe=True)
        try:
            timeout = aiohttp.ClientTimeout(total=60)
            async with aiohttp.ClientSession(timeout=timeout, cookie_jar=jar) as client:
                await work(client, f"http://127.0.0.1:{server.port}")
        finally:
            await server.close()

    asyncio.run(scene())


PATHS = ("/", "/now", "/stream", "/events?before=1", "/page/main.js", f"/{PLOTLY}", "/nothing")


def test_nothing_is_shown_without_the_token() -> None:
    async def work(client: aiohttp.ClientSession, url: str) -> None:
        for headers in (
            {},
            {"Authorization": TOKEN},
            {"Authorization": f"Bearer {TOKEN}x"},
            {"Cookie": f"ftd_0_0={TOKEN}"},
            {"Authorization": "Bearer \udcff"},
        ):
            for path in PATHS:
                async with client.get(url + path, headers=headers) as answer:
                    assert answer.status == 401, path
                    assert answer.headers["X-Content-Type-Options"] == "nosniff"
                    assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
                    body = await answer.text()
                    assert "node-0" not in body and ("password" in body) == (path == "/")
        right = {"Authorization": f"Bearer {TOKEN}"}
        async with client.get(url + "/now", headers=right) as answer:
            assert answer.status == 200 and "node-0" in await answer.text()
        for method in ("POST", "PUT", "DELETE", "HEAD"):
            async with client.request(method, url + "/now", headers=right) as answer:
                assert answer.status == 405

    served(work)


def test_the_forms_token_becomes_a_cookie_that_is_not_the_token() -> None:
    async def work(client: aiohttp.ClientSession, url: str) -> None:
        for form in ({"token": "wrong"}, {"other": TOKEN}):
            async with client.post(url + "/login", data=form, allow_redirects=False) as answer:
                assert answer.status == 303, await answer.text()
                assert answer.headers["Location"] == "./#wrong" and "Set-Cookie" not in answer.headers
        async with client.post(url + "/login", json={"token": TOKEN}) as answer:
            assert answer.status == 415
        async with client.post(url + "/login", data={"token": "x" * 10_000}) as answer:
            assert answer.status == 413
        async with client.post(url + "/login", data={"token": f" {TOKEN}\n"}) as answer:
            assert answer.status == 200 and "node-tiles" in await answer.text()
            cookie = answer.history[0].headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and TOKEN not in cookie
        async with client.get(url + "/now") as answer:
            assert answer.status == 200

    served(work)


def test_on_loopback_only_requests_to_this_host_are_answered() -> None:
    async def work(client: aiohttp.ClientSession, url: str) -> None:
        port = url.rpartition(":")[2]
        for host, status in (
            (f"127.0.0.1:{port}", 200),
            ("localhost", 200),
            (f"[::1]:{port}", 200),
            ("evil.example", 403),
            (f"127.0.0.1.evil.example:{port}", 403),
            ("", 403),
        ):
            async with client.get(url + "/now", headers={"Host": host}) as answer:
                assert answer.status == status, host

    served(work, token=None)


def test_files_are_compressed_and_cached_by_browsers() -> None:
    async def work(client: aiohttp.ClientSession, url: str) -> None:
        async with client.get(url + "/page/main.js") as answer:
            assert answer.headers["Content-Encoding"] == "gzip"
            tag = answer.headers["ETag"]
            assert answer.content_type == "text/javascript"
        async with client.get(url + "/page/main.js", headers={"If-None-Match": tag}) as answer:
            assert answer.status == 304
        async with client.get(url + f"/{PLOTLY}") as answer:
            assert "immutable" in answer.headers["Cache-Control"]
            assert int(answer.headers["Content-Length"]) < 2_000_000
            assert b"plotly.js" in await answer.read()
        for path in (
            "/page/../server.py",
            "/page/%2e%2e%2fserver.py",
            "/page/",
            "/events",
            "/events?before=x",
        ):
            async with client.get(url + path) as answer:
                assert answer.status in (400, 404), path

    served(work, token=None)


def test_silent_connections_are_closed_and_surplus_ones_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 16  # The clients that wait before the first one is cut off.
    monkeypatch.setattr(servers, "MAX_CONNECTIONS", most)
    monkeypatch.setattr(servers, "SILENCE_S", 2.0)

    async def work(client: aiohttp.ClientSession, url: str) -> None:
        port = int(url.rpartition(":")[2])
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(most)]
        with pytest.raises(aiohttp.ClientError):
            await client.get(url + "/now")
        for reader, writer in idle:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
        async with client.get(url + "/now", headers={"Authorization": f"Bearer {TOKEN}"}) as answer:
            assert answer.status == 200

    served(work)


def test_a_page_too_slow_for_the_order_to_reload_is_dropped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    send = servers._sent

    async def stuck(answer: web.StreamResponse, frame: bytes) -> None:
        if b"reload" in frame:
            raise TimeoutError
        await send(answer, frame)

    monkeypatch.setattr(servers, "_sent", stuck)

    async def work(client: aiohttp.ClientSession, url: str) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with client.get(url + "/stream?after=other-1", headers=headers) as answer:
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()

    served(work)
    assert "request_failed" not in capsys.readouterr().out


def in_node(script: str, page: str) -> Any:
    """Return what a script prints as JSON, to which a file of the page is imported as ``page``."""
    file = base64.b64encode((PAGE_FILES / page).read_bytes()).decode()
    script = f"import('data:text/javascript;base64,{file}').then((page) => {{ {script} }})"
    done = subprocess.run(["node", "-e", script], check=True, capture_output=True, text=True, timeout=60)
    return json.loads(done.stdout)


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_page_and_the_terminal_print_the_same_sizes() -> None:
    units = (1, 1024, 1024**2, 1024**3, 1024**4)
    sizes = [int(unit * count) for unit in units for count in (0, 1, 99.9, 99.96, 100, 1023.4, 1023.6, 1024)]
    assert in_node(f"console.log(JSON.stringify({sizes}.map(page.size)))", "words.js") == [
        format_size(size) for size in sizes
    ]


@pytest.mark.processes
@pytest.mark.skipif(find_chromium() is None, reason="chromium is not installed: tools/install-chromium")
def test_the_chart_shows_the_throughput_of_steps_that_take_minutes() -> None:
    async def work(_: aiohttp.ClientSession, url: str) -> None:
        async with chromium() as browser:
            page = await browser.page()
            await page.open(url)
            await page.until("document.querySelector('#chart')?.data?.length > 2", "the chart")
            rates = "document.querySelector('#chart').data.find((line) => line.name === 'samples/s')"
            assert await page.value(f"{rates}.y") == [pytest.approx(0.016)] * 4
            assert await page.value(f"{rates}.text") == ["0.016"] * 4

    steps = [committed(step, 2000.0 * step, step_s=2000.0) for step in range(1, 5)]
    served(work, token=None, past=steps)


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_page_prints_few_digits_of_small_and_of_huge_losses() -> None:
    numbers = "[1.234e30, 12345.6, 2.5, 0, 0.00004, -0.000123456].map((value) => page.number(value))"
    assert in_node(f"console.log(JSON.stringify({numbers}))", "words.js") == [
        "1.23e+30", "12,346", "2.5000", "0.0000", "4e-5", "-1.23e-4",
    ]  # fmt: skip


REJECTED_STREAM = """
  const waits = [];
  globalThis.document = { addEventListener() {} };
  globalThis.setInterval = () => {};
  const end = () => console.log(JSON.stringify(waits));
  globalThis.setTimeout = (retry, ms) => (waits.push(ms) < 5 ? queueMicrotask(retry) : end());
  const now = { at: "2026-01-01T00:00:00Z", quiet_s: 0, events: [], position: "run-1" };
  globalThis.fetch = async () => ({ ok: true, status: 200, json: async () => now });
  globalThis.EventSource = class {
    static CLOSED = 2;
    readyState = 2;
    constructor() { queueMicrotask(() => this.onerror()); }
    addEventListener() {}
    close() {}
  };
  new page.Store(() => {}).load();
"""


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_a_page_whose_stream_is_rejected_asks_less_and_less_often() -> None:
    assert in_node(REJECTED_STREAM, "store.js") == [500, 1000, 2000, 5000, 5000]


def test_a_port_in_use_is_an_error_only_if_it_was_configured(tmp_path: Path) -> None:
    async def scene(named: bool) -> int:
        blocker = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
        port = blocker.sockets[0].getsockname()[1]
        place = DashboardAddress(host="127.0.0.1", port=port, token=None, configured=named)
        model = DashboardModel()
        server = DashboardServer(place, model, DeltaFeed(model.take_delta, "run"), cluster="t")
        try:
            await server.start()
            return server.port
        finally:
            await server.close()
            blocker.close()

    assert asyncio.run(scene(named=False)) == 0
    with pytest.raises(ConfigurationError, match="cannot be served") as error:
        asyncio.run(scene(named=True))
    assert error.value.field == "dashboard.listen"
