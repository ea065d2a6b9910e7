"""Metrics: what is counted, who may read it, and that dashboard and alerts use existing metrics."""

import asyncio
import json
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from ftd.config.daemon import parse_daemon_config
from ftd.config.metrics import MetricsAddress
from ftd.errors import ConfigurationError
from ftd.observe.goodput import GoodputMeter
from ftd.observe.metrics.cluster import ClusterMetrics
from ftd.observe.metrics.common import MAX_EVENT_NAMES
from ftd.observe.metrics.node import NodeMetrics, NodeSample
from ftd.observe.metrics.server import MAX_CONNECTIONS, MetricsServer
from ftd.observe.metrics.state import collect_state_metrics
from ftd.transport.mqtt.mosquitto import free_port
from ftd.transport.wire.public import EventMessage
from statemachine.agent.events import TrainerConnected, TrainerReported
from statemachine.cluster.machine import ClusterMachine
from statemachine.effects import EmitEvent, PublishNode, SendSignal
from statemachine.events import BrokerDisconnected
from statemachine.messages.cluster import TrainerLost
from statemachine.messages.trainer import ShardWritten, TrainerStepped
from statemachine.messages.values import NodeState, Vote
from statemachine.timing import Timing

ROOT = Path(__file__).resolve().parents[3]
MONITORING = ROOT / "examples" / "monitoring"
STAMP: dict[str, Any] = {"at": 1.0, "cause": "c"}
RECOVERY = {
    "cause": "node_lost",
    "tier": "live_replica",
    "total_ms": 250.0,
    "quiesce_ms": 25.0,
    "plan_ms": 4.0,
    "state_ms": 31.0,
    "resume_ms": 190.0,
    "recomputed_steps": 1,
    "bytes_moved": 300,
}


# --- counting ------------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cluster(clock: Clock) -> ClusterMetrics:
    """Metrics of a coordinator that has just started."""
    machine = ClusterMachine(Timing())
    return ClusterMetrics(
        state=machine.public_state,
        clock=clock,
        connected=lambda: True,
        leading=lambda: False,
        internal_errors=lambda: 2,
    )


def emit(metrics: ClusterMetrics, name: str, step: int | None = None, /, **details: Any) -> None:
    metrics.on_event(EmitEvent(cause="c", name=name, reason="", step=step, details=details))


def commit(metrics: ClusterMetrics, step: int, step_s: float | None = 1.0) -> None:
    emit(metrics, "StepCommitted", step, skipped=False, step_s=step_s)


def value(metrics: ClusterMetrics | NodeMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_the_metrics_of_a_coordinator_that_has_just_started(cluster: ClusterMetrics) -> None:
    assert value(cluster, "ftd_cluster_phase", phase="WAITING") == 1
    assert value(cluster, "ftd_cluster_phase", phase="RUNNING") == 0
    assert value(cluster, "ftd_nodes", state="HEALTHY") == 0
    assert value(cluster, "ftd_broker_connected", component="coordinator") == 1
    assert value(cluster, "ftd_leading") == 0 and value(cluster, "ftd_takeovers_total") == 0
    emit(cluster, "LeaderElected", leader="b", term=2, took_s=0.1)
    assert value(cluster, "ftd_takeovers_total") == 1
    assert value(cluster, "ftd_internal_errors_total") == 2
    assert value(cluster, "ftd_snapshot_interval_steps") == 0
    for absent in ("ftd_loss", "ftd_goodput_ratio", "ftd_snapshot_age_seconds", "ftd_job_steps"):
        assert value(cluster, absent) is None


def test_steps_recoveries_and_rollbacks_are_counted(cluster: ClusterMetrics, clock: Clock) -> None:
    for step in range(1, 11):
        clock.now = 100.0 + step
        commit(cluster, step)
    assert value(cluster, "ftd_goodput_ratio") == pytest.approx(1.0)
    assert value(cluster, "ftd_step_seconds_sum") == pytest.approx(10.0)
    clock.now = 120.0
    emit(cluster, "NodeLost", how="last_will", detected_at=1.0, incarnation=1)
    emit(cluster, "RolledBack", 6, from_step=10, to_step=6, undone_steps=4, tier="decoded", sources=[])
    emit(cluster, "RecoveryCompleted", recovery={**RECOVERY, "tier": "decoded"})
    assert value(cluster, "ftd_goodput_ratio") == pytest.approx(6 / 20)
    assert value(cluster, "ftd_rolled_back_steps_total") == 4
    assert value(cluster, "ftd_rolled_back_seconds_total") == pytest.approx(4.0)
    assert value(cluster, "ftd_recomputed_steps_total") == 1
    assert value(cluster, "ftd_nodes_lost_total", how="last_will") == 1
    assert value(cluster, "ftd_recoveries_total", cause="node_lost", tier="decoded") == 1
    assert value(cluster, "ftd_recovery_seconds_sum", cause="node_lost") == pytest.approx(0.25)
    assert value(cluster, "ftd_recovery_seconds_bucket", cause="node_lost", le="0.1") == 0
    assert value(cluster, "ftd_recovery_seconds_bucket", cause="node_lost", le="0.25") == 1
    phases = ("quiesce", "plan", "state", "resume")
    counted = sum(value(cluster, "ftd_recovery_phase_seconds_sum", phase=phase) or 0.0 for phase in phases)
    assert counted == pytest.approx(0.25)
    assert value(cluster, "ftd_recovery_moved_bytes_total") == 300


def test_snapshots_checkpoints_and_failures_are_counted(cluster: ClusterMetrics, clock: Clock) -> None:
    emit(cluster, "SnapshotCompleted", 5, copy_s=0.2, stall_s=0.003, took_s=0.5)
    emit(cluster, "SnapshotAbandoned", 6, last_complete_step=5)
    emit(cluster, "CheckpointCompleted", 5, took_s=2.0, size_bytes=1, pruned=[])
    emit(cluster, "CheckpointAbandoned", 5, last_complete_step=None)
    emit(cluster, "TrainerLost", device=0, cause="hung", detail="")
    emit(cluster, "MessageIgnored", why="w", count=1)
    emit(cluster, "MessageRejected", topic="t", why="w")
    emit(cluster, "BrokerLost")
    for name in (
        "ftd_snapshots_completed_total",
        "ftd_snapshots_abandoned_total",
        "ftd_checkpoints_written_total",
        "ftd_checkpoints_abandoned_total",
        "ftd_messages_ignored_total",
        "ftd_messages_rejected_total",
        "ftd_broker_disconnects_total",
        "ftd_snapshot_seconds_count",
        "ftd_checkpoint_seconds_count",
    ):
        assert value(cluster, name) == 1, name
    assert value(cluster, "ftd_snapshot_stall_seconds_sum") == pytest.approx(0.003)
    assert value(cluster, "ftd_trainers_lost_total", cause="hung") == 1
    assert value(cluster, "ftd_events_total", event="BrokerLost") == 1


def test_a_finished_job_keeps_its_goodput_and_the_next_starts_over(
    cluster: ClusterMetrics, clock: Clock
) -> None:
    for step in (1, 2):
        clock.now += 2.0
        commit(cluster, step)
    emit(cluster, "JobFinished", checksum="")
    clock.now += 100.0
    assert value(cluster, "ftd_goodput_ratio") == pytest.approx(2 / 3)
    emit(cluster, "JobSubmitted", name="next", steps=3, job="next-1")
    assert value(cluster, "ftd_goodput_ratio") is None
    commit(cluster, 1, None)
    assert value(cluster, "ftd_goodput_ratio") == 1.0
    assert value(cluster, "ftd_step_seconds_count") == 2, "a step whose time is not known is not timed"


def test_a_coordinator_that_leads_again_forgets_what_it_saw_before(
    cluster: ClusterMetrics, clock: Clock
) -> None:
    """Meanwhile another coordinator led, under which steps were committed and checkpoints written."""
    machine = {
        **ClusterMachine(Timing()).public_state(),
        "checkpoint": {"url": "/c", "step": 400, "size_bytes": 1},
    }

    def age() -> float | None:
        metrics = collect_state_metrics(
            machine, now=clock.now, goodput=None, checkpoint_at=cluster._checkpoint_at
        )
        return {one.name: one.samples[0].value for one in metrics if one.samples}.get(
            "ftd_checkpoint_age_seconds"
        )

    for step in range(1, 11):
        clock.now += 1.0
        commit(cluster, step)
    emit(cluster, "CheckpointCompleted", 10, took_s=2.0, size_bytes=1, pruned=[])
    assert value(cluster, "ftd_goodput_ratio") == pytest.approx(1.0) and age() == 0.0
    clock.now += 10_000.0
    emit(cluster, "LeaderElected", leader="a", term=3, took_s=0.1)
    assert value(cluster, "ftd_goodput_ratio") is None and age() is None
    for step in (9_001, 9_002):
        clock.now += 1.0
        commit(cluster, step)
    assert value(cluster, "ftd_goodput_ratio") == pytest.approx(1.0)
    assert value(cluster, "ftd_committed_steps_total") == 12


def node_event(name: str, **details: Any) -> EventMessage:
    return EventMessage(
        event=name,
        node="n",
        generation=None,
        step=None,
        reason="",
        at="",
        monotonic=0.0,
        cause="",
        details=details,
        source="node/n",
    )


def test_events_of_nodes_cannot_exhaust_the_coordinators_memory(cluster: ClusterMetrics) -> None:
    cluster.on_node_event(node_event("TrainerStarted"))
    cluster.on_node_event(node_event("MessageRejected", suppressed=4))
    for nonsense in (10**30, -1, "7", None, [1]):
        cluster.on_node_event(node_event("ChaosInjected", suppressed=nonsense))
    cluster.on_node_event(node_event('Evil"} 1\nftd_step 7'))
    for number in range(3 * MAX_EVENT_NAMES):
        cluster.on_node_event(node_event("Made" + "".join("abcdefghij"[int(digit)] for digit in str(number))))
    assert value(cluster, "ftd_events_total", event="TrainerStarted") == 1
    assert value(cluster, "ftd_events_total", event="MessageRejected") == 5
    assert value(cluster, "ftd_events_total", event="ChaosInjected") == 5
    (family,) = (f for f in cluster.registry.collect() if f.name == "ftd_events")
    assert len(family.samples) <= MAX_EVENT_NAMES + 1
    assert (value(cluster, "ftd_events_total", event="other") or 0) > MAX_EVENT_NAMES
    assert value(cluster, "ftd_messages_rejected_total") == 0, "that is for the node to tell"


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("commit"), st.floats(0.0, 10.0), st.floats(0.0, 10.0)),
            st.tuples(st.just("back"), st.integers(0, 5), st.floats(0.0, 10.0)),
        ),
        max_size=40,
    )
)
def test_goodput_counts_the_time_of_steps_that_were_not_undone(
    happened: list[tuple[str, Any, float]],
) -> None:
    """Compare with a list of the steps that count."""
    goodput, left, now, began = GoodputMeter(), [], 0.0, None
    for what, number, passed_s in happened:
        now += passed_s
        if what == "commit":
            began = now - number if began is None else began
            left.append(number)
            goodput.commit(len(left), number, now)
        else:
            undone_s = sum(left[len(left) - number :]) if 0 < number <= len(left) else 0.0
            if number <= len(left):
                del left[len(left) - number :]
                assert goodput.roll_back(len(left)) == pytest.approx(undone_s, abs=1e-9)
    ratio = goodput.ratio(now)
    assert (ratio is None) == (began is None)
    if began is not None and ratio is not None:
        assert 0.0 <= ratio <= 1.0
        if now - began > 1e-6 and sum(left) <= now - began:
            assert ratio == pytest.approx(sum(left) / (now - began), abs=1e-6)


def test_a_node_counts_the_events_and_effects_of_its_machine() -> None:
    now = NodeSample(
        connected=False,
        internal_errors=1,
        trainers=2,
        sent_bytes=7,
        unauthorised=3,
        rendezvous_rejected=4,
        snapshot_limit_bytes=99,
    )
    node = NodeMetrics(2, lambda: now)
    lost = TrainerLost(generation=1, device=1, cause="exited", detail="")
    for it in (
        TrainerConnected(**STAMP, device=0, pid=1),
        TrainerConnected(**STAMP, device=1, pid=2),
        TrainerReported(
            **STAMP,
            device=1,
            report=TrainerStepped(
                generation=1,
                step=3,
                vote=Vote(loss=1.0, gradient_norm=1.0, skipped=False),
                step_s=0.2,
                bubble_s=0.0,
                microbatch_ms=50.0,
            ),
        ),
        TrainerReported(
            **STAMP,
            device=0,
            report=ShardWritten(generation=1, step=3, size_bytes=10, copy_s=0.1, stall_s=0.01, idle_bytes=4),
        ),
        SendSignal(cause="c", signal=lost),
        SendSignal(cause="c", signal=lost),  # Repeated for a coordinator that was away.
        TrainerConnected(**STAMP, device=1, pid=3),
        BrokerDisconnected(**STAMP),
        PublishNode(cause="c", state=NodeState.UNHEALTHY, generation=4, step=3, reason=""),
    ):
        node.observe(it)
    node.count_own_event(EmitEvent(cause="c", name="MessageRejected", reason=""))
    assert value(node, "ftd_trainer_restarts_total", device="0") == 0
    assert value(node, "ftd_trainer_restarts_total", device="1") == 1
    assert value(node, "ftd_trainer_failures_total", cause="exited") == 1
    assert value(node, "ftd_trainer_step_seconds_sum", device="1") == pytest.approx(0.2)
    assert value(node, "ftd_trainer_microbatch_seconds", device="1") == pytest.approx(0.05)
    assert value(node, "ftd_trainer_snapshot_bytes_total") == 10
    assert value(node, "ftd_node_state", state="UNHEALTHY") == 1
    assert value(node, "ftd_node_generation") == 4
    assert value(node, "ftd_node_snapshot_sent_bytes_total") == 7
    assert value(node, "ftd_node_unauthorised_total") == 3
    assert value(node, "ftd_broker_connected", component="node") == 0
    assert value(node, "ftd_broker_disconnects_total") == 1
    assert value(node, "ftd_messages_rejected_total") == 1


# --- access --------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["node", "coordinator"])
def test_nothing_is_served_without_a_configured_port(tmp_path: Path, table: str) -> None:
    config = parse_daemon_config({table: {"metrics_host": "0.0.0.0"}}, directory=tmp_path)
    assert config.node_metrics is None and config.coordinator_metrics is None
    config = parse_daemon_config({table: {"metrics_port": 9640, "metrics_host": "::1"}}, directory=tmp_path)
    places = [p for p in (config.node_metrics, config.coordinator_metrics) if p is not None]
    assert [(p.host, p.port, p.token) for p in places] == [("::1", 9640, None)]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "host.example", "", "127.0.0.1.example"])
def test_beyond_loopback_only_with_a_token(tmp_path: Path, host: str) -> None:
    table = {"metrics_port": 9640, "metrics_host": host}
    with pytest.raises(ConfigurationError, match="bearer token") as error:
        parse_daemon_config({"node": table}, directory=tmp_path)
    assert error.value.field == "ftd.toml: node.metrics_token_file"
    token = tmp_path / "token"
    token.write_text("s3cret-token==\n")
    token.chmod(0o600)
    place = parse_daemon_config(
        {"node": {**table, "metrics_token_file": "token"}}, directory=tmp_path
    ).node_metrics
    assert place is not None and place.token == "s3cret-token=="


@pytest.mark.parametrize(
    ("table", "content", "mode", "words"),
    [
        ({"metrics_port": 70000}, "t", 0o600, "is not a valid port"),
        ({"metrics_port": -1}, "t", 0o600, "is not a valid port"),
        ({"metrics_port": 9640, "metrics_token_file": "none"}, "t", 0o600, "cannot be read"),
        ({"metrics_port": 9640, "metrics_token_file": "token"}, "t", 0o644, "everybody on this host"),
        ({"metrics_port": 9640, "metrics_token_file": "token"}, "", 0o600, "is empty"),
        ({"metrics_port": 9640, "metrics_token_file": "token"}, "two words", 0o600, "characters"),
        ({"metrics_port": 9640, "metrics_token_file": "token"}, "schlüssel", 0o600, "characters"),
    ],
)
def test_a_configuration_that_cannot_work_names_the_field(
    tmp_path: Path, table: dict[str, Any], content: str, mode: int, words: str
) -> None:
    (tmp_path / "token").write_text(content)
    (tmp_path / "token").chmod(mode)
    with pytest.raises(ConfigurationError, match=words) as error:
        parse_daemon_config({"coordinator": table}, directory=tmp_path)
    assert str(error.value.field).startswith("ftd.toml: coordinator.metrics_")


def served(
    work: Callable[[aiohttp.ClientSession, str, MetricsServer], Coroutine[Any, Any, None]],
    token: str | None = "sesame",
) -> None:
    """Run ``work`` with a client, the address, and a server that has one metric."""
    registry = CollectorRegistry()
    Gauge("ftd_one", "One.", registry=registry).set(1)
    place = MetricsAddress(host="127.0.0.1", port=free_port(), token=token, field="node.metrics_port")

    async def scene() -> None:
        server = MetricsServer(place, registry)
        await server.start()
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as client:
                await work(client, f"http://127.0.0.1:{place.port}", server)
        finally:
            await server.close()

    asyncio.run(scene())


def test_a_request_needs_the_token_and_must_be_get() -> None:
    async def work(client: aiohttp.ClientSession, url: str, _: MetricsServer) -> None:
        right = {"Authorization": "Bearer sesame"}
        for headers in ({}, {"Authorization": "sesame"}, {"Authorization": "Bearer sesam"}, {"X": "y"}):
            for path in ("/metrics", "/", "/nothing"):
                async with client.get(url + path, headers=headers) as answer:
                    assert answer.status == 401, path
                    assert answer.headers["WWW-Authenticate"] == "Bearer"
        for method, path, status in (
            ("GET", "/metrics", 200),
            ("GET", "/", 404),
            ("POST", "/metrics", 405),
            ("HEAD", "/metrics", 405),
            ("DELETE", "/metrics", 405),
        ):
            async with client.request(method, url + path, headers=right) as answer:
                assert answer.status == status, (method, path)
                assert answer.headers["Connection"] == "close"
        await asyncio.sleep(0.11)  # An answer is reused for this long.
        async with client.get(url + "/metrics", headers=right) as answer:
            counted = {s.name: s.value for f in parse_text(await answer.text()) for s in f.samples}
        assert counted["ftd_one"] == 1 and counted["ftd_metrics_unauthorised_total"] == 12

    served(work)


def test_both_formats_have_their_content_types() -> None:
    async def work(client: aiohttp.ClientSession, url: str, _: MetricsServer) -> None:
        for accept, parse, kind in (
            ("*/*", parse_text, "text/plain"),
            ("application/openmetrics-text;version=1.0.0,text/plain;q=0.5", parse_openmetrics, "openmetrics"),
            ("application/openmetrics-text;version=nonsense", parse_openmetrics, "openmetrics"),
        ):
            async with client.get(url + "/metrics", headers={"Accept": accept}) as answer:
                assert answer.status == 200 and kind in answer.headers["Content-Type"]
                names = {family.name for family in parse(await answer.text())}
                assert {"ftd_one"} <= names

    served(work, token=None)


@pytest.mark.long
def test_bad_clients_cannot_block_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad clients take all connections and send nothing, or too much: they are cut off, and the server answers
    again.
    """
    monkeypatch.setattr("ftd.observe.metrics.server.LIFETIME_S", 2.5)

    async def work(client: aiohttp.ClientSession, url: str, _: MetricsServer) -> None:
        port = int(url.rpartition(":")[2])
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MAX_CONNECTIONS)]
        with pytest.raises(aiohttp.ClientError):
            await client.get(url + "/metrics")
        for reader, writer in idle:
            assert await asyncio.wait_for(reader.read(), 60) == b""
            writer.close()
        async with client.get(url + "/metrics", headers={"Authorization": "Bearer sesame"}) as answer:
            assert answer.status == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n")
        assert b" 400 " in await asyncio.wait_for(reader.readline(), 60)
        writer.close()

    served(work)


def test_a_port_in_use_is_a_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = MetricsAddress(
            host="127.0.0.1", port=taken.getsockname()[1], token=None, field="node.metrics_port"
        )
        with pytest.raises(ConfigurationError, match="metrics cannot be served") as error:
            asyncio.run(MetricsServer(place, CollectorRegistry()).start())
    assert error.value.field == "node.metrics_port"


def test_the_configuration_in_the_documentation_is_accepted(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/reference/metrics.md").read_text(), re.DOTALL)
    config = parse_daemon_config(tomllib.loads(block), directory=tmp_path)
    places = (config.coordinator_metrics, config.node_metrics)
    assert [place and place.port for place in places] == [9640, 9641]


# --- dashboard and alerts ------------------------------------------------------------------------


def documented() -> dict[str, tuple[str, str]]:
    """Return type and labels of each metric as documented in docs/reference/metrics.md."""
    rows = re.findall(
        r"^\| `(ftd_\w+)` \| (\w+) \| ([^|]*) \|",
        (ROOT / "docs/reference/metrics.md").read_text(),
        re.MULTILINE,
    )
    return {name: (kind, labels.strip()) for name, kind, labels in rows}


def expressions(of: Any) -> list[str]:
    if isinstance(of, dict):
        own = [of["expr"]] if "expr" in of else []
        return own + [e for inner in of.values() for e in expressions(inner)]
    return [e for inner in of for e in expressions(inner)] if isinstance(of, list) else []


def test_dashboard_and_alerts_use_existing_metrics() -> None:
    known = documented()
    series = set(known)
    for name, (kind, _) in known.items():
        if kind == "histogram":
            series |= {f"{name}_{part}" for part in ("bucket", "sum", "count")}
    dashboard = expressions(json.loads((MONITORING / "grafana.json").read_text()))
    alerts = re.findall(r"expr: (.*)", (MONITORING / "alerts.yml").read_text())
    assert len(dashboard) > 30 and len(alerts) > 10
    for expression in (*dashboard, *alerts):
        used = set(re.findall(r"\bftd_\w+", expression))
        assert used - series == set(), expression
        labels = set(re.findall(r"(\w+)=~?\"|(\w+)!=\"", expression))
        allowed = {"instance", "job"} | {
            label for name in used for label in re.findall(r"`(\w+)`", known.get(name, ("", ""))[1])
        }
        assert {a or b for a, b in labels} <= allowed, expression


def test_every_alert_is_documented() -> None:
    rules = re.findall(r"alert: (\w+)", (MONITORING / "alerts.yml").read_text())
    rows = re.findall(r"^\| `(Ftd\w+)` \|", (ROOT / "docs/reference/metrics.md").read_text(), re.MULTILINE)
    assert rules == rows


def promtool(*arguments: str) -> None:
    found = shutil.which("promtool") or shutil.which("promtool", path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip("promtool is not installed (tools/install-promtool brings it where apt has it)")
    done = subprocess.run([found, *arguments], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.processes
def test_promtool_accepts_the_rules() -> None:
    promtool("check", "rules", str(MONITORING / "alerts.yml"))
    promtool("check", "config", "--syntax-only", str(MONITORING / "prometheus.yml"))


@pytest.mark.processes
def test_the_alerts_fire_exactly_when_they_should() -> None:
    promtool("test", "rules", str(Path(__file__).with_name("alerts_test.yml")))
