"""The retained cluster state for outside tools, as plain JSON-compatible data."""

from collections.abc import Sequence
from typing import Any

from msgspec import structs

from planner.reasons import join_names
from planner.values import PipelinePlacement, Plan
from statemachine.cluster.drains import describe_released, drain_waits
from statemachine.cluster.node import NodeMachine
from statemachine.cluster.phases import Ended, Paused, Planning, Quiescing, Resuming, TrainingGroup, Waiting
from statemachine.cluster.quarantine import describe_aside, readmit_command
from statemachine.cluster.snapshots.snapshots import holders
from statemachine.cluster.startup import describe_startup
from statemachine.cluster.state import Cluster


def pipelines(placed: Sequence[PipelinePlacement]) -> list[dict[str, Any]]:
    """Return pipelines for people and scripts: stages with their layers and devices, and the share of the
    batch.
    """
    return [
        {
            "stages": [
                {
                    "first_layer": stage.first_layer,
                    "end_layer": stage.end_layer,
                    "devices": [f"{device.node}/{device.index}" for device in stage.devices],
                    "recompute": stage.recompute,
                    "within": stage.within,
                    "replicas": stage.replicas,
                }
                for stage in pipeline.stages
            ],
            "microbatches": pipeline.microbatches,
        }
        for pipeline in placed
    ]


def waiting_for(c: Cluster) -> str:
    """Return one line for people about what has to happen next; empty while training runs or the job is over."""
    match c.state:
        case Waiting():
            return _before_the_start(c)
        case Quiescing(expected=expected, reports=reports):
            missing = [name for name in expected if name not in reports]
            return f"reports of {join_names(missing)}" if missing else "the decision"
        case Planning():
            return "a plan" if c.templates_ready else "templates"
        case Resuming() as group:
            return f"{join_names([name for name in group.planned if name not in group.resumed])} to resume"
        case Paused(reason=reason):
            return _and_aside(c, reason)
        case _:
            return ""


def _before_the_start(c: Cluster) -> str:
    if c.job is None:
        return "a job"
    alive = c.alive()
    if not alive:
        return _and_aside(c, "nodes")
    if c.profiled is None:
        if not c.profiler:
            return _and_aside(c, "a node that can build the model")
        return f"{c.profiler} to build and measure the model"
    if not c.templates_ready:
        return "pipeline templates"
    building = [node.name for node in alive if node.prepare_sent and node.quarantine is None]
    return f"{', '.join(building)} to build the model" if building else _and_aside(c, "nodes")


def _and_aside(c: Cluster, what: str) -> str:
    """Return what the job waits for, with the nodes that are there and must not take part."""
    return "; ".join(filter(None, [what, describe_aside(c), describe_released(c)]))


def _snapshot(c: Cluster) -> dict[str, Any] | None:
    """Return the newest snapshot that is complete everywhere. ``at`` is on the machine's clock."""
    record = c.snapshots.newest
    if record is None:
        return None
    present = holders(c, record)
    return {
        "step": record.step,
        "generation": record.generation,
        "at": record.at,
        "size_bytes": record.size_bytes,
        "protection": record.groups[0].protection,
        "owners": len(record.owners),
        "present": len(present),
        "missing": sorted({*record.owners}.difference(present)),
    }


def _snapshot_policy(c: Cluster) -> dict[str, Any] | None:
    """Return the current snapshot policy; ``None`` if the job takes no snapshots at all."""
    if c.job is None or not c.active or c.job.snapshot.every_steps < 1:
        return None
    policy = c.job.snapshot
    return {
        "every_steps": 0 if policy.paused else policy.every_steps,
        "auto_interval": policy.auto_interval,
        "protection": c.resumption.protection if c.resumption is not None else policy.protection,
        "auto_protection": policy.auto_protection,
    }


def _checkpoint(c: Cluster) -> dict[str, Any] | None:
    """Return the newest persistent checkpoint; ``None`` if the job writes none."""
    job, checkpoints = c.job, c.checkpoints
    if job is None or not job.checkpoint.url:
        return None
    newest, writing = checkpoints.newest, checkpoints.writing
    return {
        "url": job.checkpoint.url,
        "step": newest.step if newest is not None else None,
        "size_bytes": newest.size_bytes if newest is not None else 0,
        "writing_step": writing.record.step if writing is not None else None,
        "every_steps": job.checkpoint.every_steps,
        "auto_interval": job.checkpoint.auto_interval,
    }


def _quarantine(node: NodeMachine) -> dict[str, Any] | None:
    """Return why a node is set aside; ``None`` if it is not. ``at`` is on the machine's clock."""
    quarantine = node.quarantine
    if quarantine is None:
        return None
    return {
        "cause": quarantine.cause,
        "at": quarantine.at,
        "reason": quarantine.reason,
        "readmit": readmit_command(node),
    }


def _health(node: NodeMachine) -> dict[str, Any] | None:
    """Return the last health check of a node; ``None`` if there is none. ``at`` is on the machine's clock."""
    report = node.health
    if report is None:
        return None
    computed = [device.compute_gflops for device in report.devices if device.compute_gflops > 0]
    copied = [device.memory_gb_s for device in report.devices if device.memory_gb_s > 0]
    return {
        "at": node.health_at,
        "problem": node.health_problem,
        "kind": report.devices[0].kind if report.devices else "",
        "compute_gflops": min(computed, default=None),
        "memory_gb_s": min(copied, default=None),
        "link_mb_s": max((link.mb_s for link in report.links), default=None),
    }


def plan_details(plan: Plan) -> dict[str, Any]:
    """Return the details of a plan. They are long for a thousand nodes, and the durable state has the plan
    anyway.
    """
    return {
        "pipelines": pipelines(plan.pipelines),
        "considered": [structs.asdict(layout) for layout in plan.considered],
    }


def public_state(c: Cluster) -> dict[str, Any]:
    """Return the cluster, its job and its nodes as one JSON-compatible object, except for ``startup``."""
    progress, job = c.progress, c.job
    group = c.state if isinstance(c.state, TrainingGroup) else None
    in_plan = set(group.planned) if group is not None else set()
    running = job is not None and progress.step_s > 0
    return {
        "phase": str(c.phase),
        "generation": c.generation,
        "step": progress.known_step,
        "loss": progress.loss,
        "step_s": progress.step_s if running else None,
        "samples_per_s": job.policy.global_batch / progress.step_s if job is not None and running else None,
        "waiting_for": waiting_for(c),
        "startup": describe_startup(c),
        "pause_limited": isinstance(c.state, Paused) and c.state.pause_limited,
        "outcome": c.state.outcome if isinstance(c.state, Ended) else "",
        "snapshot": _snapshot(c),
        "snapshot_policy": _snapshot_policy(c),
        "checkpoint": _checkpoint(c),
        "job": None
        if job is None
        else {
            "id": job.job_id,
            "name": job.name,
            "steps": job.steps,
            "global_batch": job.policy.global_batch,
        },
        "pipelines": pipelines(group.resumption.plan.pipelines) if group is not None else [],
        "nodes": {
            name: {
                "state": str(node.state),
                "incarnation": node.incarnation,
                "devices": node.facts.devices,
                "host": node.facts.host,
                "in_plan": name in in_plan,
                "draining": node.draining is not None,
                "drain_waits": drain_waits(node),
                "step": node.step,
                "speed": node.speed,
                "quarantine": _quarantine(node),
                "health": _health(node),
            }
            for name, node in sorted(c.nodes.items())
        },
    }
