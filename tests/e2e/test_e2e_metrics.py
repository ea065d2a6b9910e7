"""Metrics that coordinator and nodes serve while nodes are killed, compared with docs/reference/metrics.md."""

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from ftd.config.job import load_job_data
from ftd.transport.mqtt.mosquitto import find_mosquitto, free_port
from tests.helpers.playground import Playground, playground, write_job
from tests.helpers.waiting import PATIENCE_S, until

TABLE = re.compile(r"^\| `(ftd_\w+)` \| (\w+) \| ([^|]*) \|", re.MULTILINE)
PORTS: dict[str, int] = {}
"""Ports of the daemons that serve metrics."""


@pytest.fixture
def ground() -> Iterator[Playground]:
    """Yield a cluster of its own whose coordinator and first node serve metrics."""
    if find_mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    with playground(nodes=0) as made:
        PORTS.update({name: free_port() for name in ("coordinator", "node-0")})
        environment = made.cluster.processes.environment
        made.on_loop(made.cluster.kill("coordinator"))
        environment["FTD_COORDINATOR_METRICS_PORT"] = str(PORTS["coordinator"])
        made.on_loop(made.cluster.start_coordinator())
        environment["FTD_NODE_METRICS_PORT"] = str(PORTS["node-0"])
        made.on_loop(made.cluster.start_node("node-0"))
        del environment["FTD_NODE_METRICS_PORT"]
        for name in ("node-1", "node-2"):
            made.on_loop(made.cluster.start_node(name))
        yield made


def scrape(daemon: str, openmetrics: bool = False) -> dict[str, Metric]:
    """Return the metric families by the names of their samples."""
    request = urllib.request.Request(f"http://127.0.0.1:{PORTS[daemon]}/metrics")
    if openmetrics:
        request.add_header("Accept", "application/openmetrics-text; version=1.0.0")
    with urllib.request.urlopen(request, timeout=240) as answer:
        text = answer.read().decode()
    families = (parse_openmetrics if openmetrics else parse_text)(text)
    return {f.name + ("_total" if f.type == "counter" else ""): f for f in families}


def value(daemon: str, sample: str, **labels: str) -> float:
    """Return the value of a sample, or 0 if there is none."""
    found = [
        s.value for f in scrape(daemon).values() for s in f.samples if (s.name, s.labels) == (sample, labels)
    ]
    return found[0] if found else 0.0


def documented() -> dict[str, tuple[str, frozenset[str]]]:
    page = (Path(__file__).parents[2] / "docs/reference/metrics.md").read_text()
    return {
        name: (kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in TABLE.findall(page)
    }


def of(families: dict[str, Metric]) -> dict[str, tuple[str, frozenset[str]]]:
    return {
        name: (family.type, frozenset({k for s in family.samples for k in s.labels} - {"le"}))
        for name, family in families.items()
        if name.startswith("ftd_")
    }


def test_a_killed_node_moves_the_metrics_and_all_of_them_are_documented(
    ground: Playground, tmp_path: Path
) -> None:
    path = write_job(tmp_path, failures=1)
    kept = f'[snapshot]\nevery_steps = 5\n[checkpoint]\nurl = "{tmp_path}/kept"\nevery_steps = 5\n'
    path.write_text(path.read_text() + kept)
    ground.until(lambda: len(ground.state.get("nodes", {})) == 3, "three nodes")
    ground.submit(load_job_data(path))
    ground.until_event("CheckpointCompleted")
    ground.until(lambda: all(n["in_plan"] for n in ground.state["nodes"].values()), "all in the plan")
    ground.further()
    before = value("coordinator", "ftd_committed_steps_total")
    assert before > 0 and value("coordinator", "ftd_snapshots_completed_total") > 0
    assert value("coordinator", "ftd_recovery_seconds_count", cause="node_lost") == 0
    assert 0 <= value("coordinator", "ftd_snapshot_age_seconds") < PATIENCE_S
    assert 0 < value("coordinator", "ftd_goodput_ratio") <= 1

    ground.inject(do="kill", nodes=["node-2"])
    recovery = ground.until_recovery("node_lost")
    ground.further()
    tier = recovery["tier"]
    assert value("coordinator", "ftd_recoveries_total", cause="node_lost", tier=tier) == 1
    assert value("coordinator", "ftd_recovery_seconds_count", cause="node_lost") == 1
    took_s = value("coordinator", "ftd_recovery_seconds_sum", cause="node_lost")
    assert took_s == pytest.approx(recovery["total_ms"] / 1e3)
    assert value("coordinator", "ftd_nodes_lost_total", how="last_will") == 1
    assert value("coordinator", "ftd_nodes", state="OFFLINE") == 1
    assert value("coordinator", "ftd_committed_steps_total") > before
    assert value("coordinator", "ftd_broker_round_trip_seconds_count") > 0

    ground.inject(do="kill", nodes=["node-0"], target="trainer")
    until(
        lambda: value("node-0", "ftd_trainer_restarts_total", device="0") == 1,
        "a restart is counted",
        every_s=0.1,
    )
    until(
        lambda: value("node-0", "ftd_trainer_failures_total", cause="exited") == 1,
        "and the failure",
        every_s=0.1,
    )
    ground.until_recovery("trainer_lost")
    ground.until_event("NodeRecovered", "node-0")
    ground.further()
    assert value("node-0", "ftd_trainer_snapshot_bytes_total") > 0
    assert value("node-0", "ftd_broker_connected", component="node") == 1

    served = {**of(scrape("coordinator")), **of(scrape("node-0"))}
    assert served == documented()
    for daemon in PORTS:
        assert of(scrape(daemon, openmetrics=True)) == of(scrape(daemon))
    ground.stop_job()
