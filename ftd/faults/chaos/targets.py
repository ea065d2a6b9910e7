"""The targets of faults: roles and random choices become node names when the fault is due."""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, assert_never

from ftd.errors import PeerError
from ftd.faults.chaos.values import CentralService, Fault, NamedNodes, PlanRole, RandomNodes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNodes:
    """One stage: layers ``[first_layer, end_layer)`` and the nodes of its devices, in order."""

    first_layer: int
    end_layer: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLayout:
    """The assignment of layers to nodes at one moment."""

    pipelines: tuple[tuple[StageNodes, ...], ...]
    alive: tuple[str, ...]
    """Names of all nodes that are not OFFLINE, sorted."""
    leader: str = ""
    """The coordinator that leads, or that led last."""


def read_layout(state: Mapping[str, Any]) -> ClusterLayout:
    """Return the layout that the cluster's public state describes."""
    return ClusterLayout(
        pipelines=tuple(
            tuple(
                StageNodes(
                    first_layer=stage["first_layer"],
                    end_layer=stage["end_layer"],
                    nodes=_distinct(device.rpartition("/")[0] for device in stage["devices"]),
                )
                for stage in pipeline["stages"]
            )
            for pipeline in state.get("pipelines") or ()
        ),
        alive=tuple(
            sorted(name for name, node in (state.get("nodes") or {}).items() if node["state"] != "OFFLINE")
        ),
        leader=str(state.get("leader") or ""),
    )


def resolve_targets(fault: Fault, layout: ClusterLayout, seed: int) -> tuple[str, ...]:
    """Return the names of the targeted nodes; empty if the target is the coordinator or the broker.

    The same seed, fault and layout give the same names.

    :raises PeerError: no node has the role now, or too few nodes are up.
    """
    target = fault.target
    match target:
        case NamedNodes():
            return target.names
        case CentralService():
            return ()
        case RandomNodes():
            if target.count > len(layout.alive):
                raise PeerError(f"{target}: only {len(layout.alive)} are up")
            drawn = Random(f"{seed}/{fault.id}").sample(layout.alive, target.count)
            return tuple(sorted(drawn))
        case PlanRole():
            found = _holders(target, layout)
            if not found:
                raise PeerError(f"no node is {target} now")
            return found
        case _:
            assert_never(target)


def _holders(role: PlanRole, layout: ClusterLayout) -> tuple[str, ...]:
    if role.position == "owners":
        return _distinct(n for pipeline in layout.pipelines for n in _owners(pipeline, role.layer))
    if role.position == "spare":
        planned = {name for stages in layout.pipelines for stage in stages for name in stage.nodes}
        return tuple(name for name in layout.alive if name not in planned)
    if role.pipeline >= len(layout.pipelines):
        return ()
    pipeline = layout.pipelines[role.pipeline]
    match role.position:
        case "rank 0":
            return pipeline[0].nodes[:1]
        case "first stage":
            return pipeline[0].nodes
        case "last stage":
            return pipeline[-1].nodes
        case "owner":
            return _owners(pipeline, role.layer)
        case "pipeline":
            return _distinct(name for stage in pipeline for name in stage.nodes)
        case _:
            assert_never(role.position)


def _owners(pipeline: tuple[StageNodes, ...], layer: int | None) -> tuple[str, ...]:
    if layer is None:
        return ()
    return _distinct(n for s in pipeline if s.first_layer <= layer < s.end_layer for n in s.nodes)


def _distinct(names: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
