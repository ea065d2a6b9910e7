"""The cluster's public state as gauges."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from statemachine.messages.values import ClusterPhase, NodeState


def _gauge(name: str, text: str, value: float | None) -> Iterator[Metric]:
    """Yield a gauge, or nothing without a value: an absent series is more truthful than a zero."""
    if value is not None:
        yield GaugeMetricFamily(name, text, value=value)


def _by(name: str, text: str, label: str, values: dict[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family


def collect_state_metrics(
    state: dict[str, Any], *, now: float, goodput: float | None, checkpoint_at: float | None
) -> Iterator[Metric]:
    """Yield the gauges of a state from ``statemachine.cluster.public.public_state``.

    ``now`` and ``checkpoint_at`` are times on the machine's clock.
    """
    job = state["job"]
    yield _by(
        "ftd_cluster_phase",
        "1 for the phase that the cluster is in, 0 for the others.",
        "phase",
        {str(phase): float(state["phase"] == phase) for phase in ClusterPhase},
    )
    yield from _gauge(
        "ftd_generation", "Generation of the plan; it rises with each reconfiguration.", state["generation"]
    )
    yield from _gauge("ftd_step", "The last committed step.", state["step"])
    yield from _gauge("ftd_job_steps", "Number of steps of the job.", job and job["steps"])
    if job is not None:
        info = GaugeMetricFamily("ftd_job_info", "Always 1; the labels name the job.", labels=("id", "name"))
        info.add_metric((job["id"], job["name"]), 1)
        yield info
    yield from _gauge("ftd_loss", "Loss of the last committed step.", state["loss"])
    yield from _gauge(
        "ftd_samples_per_second", "Samples per second in the last step.", state["samples_per_s"]
    )
    yield from _gauge(
        "ftd_goodput_ratio",
        "Share of the time since the job's first step that went into steps which still count.",
        goodput,
    )
    yield from _gauge("ftd_pipelines", "Pipelines of the plan.", len(state["pipelines"]))
    yield from _nodes(state["nodes"])
    yield from _snapshots(state, now)
    yield from _checkpoints(state["checkpoint"], now, checkpoint_at)


def _nodes(nodes: dict[str, dict[str, Any]]) -> Iterator[Metric]:
    counts = Counter(node["state"] for node in nodes.values())
    yield _by(
        "ftd_nodes", "Nodes by state.", "state", {str(state): counts[str(state)] for state in NodeState}
    )
    planned = sum(node["in_plan"] for node in nodes.values())
    yield from _gauge("ftd_nodes_in_plan", "Nodes that the plan uses.", planned)
    draining = sum(node["draining"] for node in nodes.values())
    yield from _gauge("ftd_nodes_draining", "Nodes that are to leave, or have left.", draining)
    aside = sum(node["quarantine"] is not None for node in nodes.values())
    yield from _gauge("ftd_nodes_quarantined", "Nodes that are set aside.", aside)
    yield _by(
        "ftd_node_speed_ratio",
        "Speed of a node relative to the others; below 1 while it is a straggler.",
        "node",
        {name: node["speed"] for name, node in nodes.items()},
    )


def _snapshots(state: dict[str, Any], now: float) -> Iterator[Metric]:
    policy, newest = state["snapshot_policy"], state["snapshot"]
    yield from _gauge(
        "ftd_snapshot_interval_steps",
        "Steps between snapshots; 0 if none are taken.",
        policy["every_steps"] if policy is not None else 0,
    )
    if newest is None:
        return
    yield from _gauge("ftd_snapshot_step", "Step of the newest complete snapshot.", newest["step"])
    yield from _gauge(
        "ftd_snapshot_age_seconds",
        "Time since the newest snapshot was completed.",
        max(0.0, now - newest["at"]),
    )
    yield from _gauge(
        "ftd_snapshot_size_bytes",
        "Size of the newest snapshot on all nodes, including its protection.",
        newest["size_bytes"],
    )
    yield from _gauge(
        "ftd_snapshot_owners", "Nodes that stored a part of the newest snapshot.", newest["owners"]
    )
    yield from _gauge(
        "ftd_snapshot_owners_present",
        "Nodes that still hold their part of the newest snapshot.",
        newest["present"],
    )


def _checkpoints(
    checkpoint: dict[str, Any] | None, now: float, checkpoint_at: float | None
) -> Iterator[Metric]:
    on = checkpoint is not None
    yield from _gauge("ftd_checkpoints_enabled", "1 if the job writes persistent checkpoints.", float(on))
    if checkpoint is None or checkpoint["step"] is None:
        return
    yield from _gauge("ftd_checkpoint_step", "Step of the newest persistent checkpoint.", checkpoint["step"])
    yield from _gauge(
        "ftd_checkpoint_size_bytes", "Size of the newest persistent checkpoint.", checkpoint["size_bytes"]
    )
    yield from _gauge(
        "ftd_checkpoint_age_seconds",
        "Time since the newest persistent checkpoint was written; absent if this process did not see it, or took "
        "over since.",
        None if checkpoint_at is None else now - checkpoint_at,
    )
