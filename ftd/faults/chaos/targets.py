"""Whom a fault strikes: roles and random choices become names at the moment when the fault is due."""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, assert_never

from ftd.errors import PeerError
from ftd.faults.chaos.values import Central, Fault, Nodes, RandomNodes, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
    """One stage: layers ``[first_layer, end_layer)`` and the nodes of its devices, in their order."""

    first_layer: int
    end_layer: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Who computes what at this moment."""

    pipelines: tuple[tuple[StagePlace, ...], ...]
    alive: tuple[str, ...]
    """Every node that is not OFFLINE, sorted."""
    leader: str = ""
    """The coordinator that leads, or led last."""


def layout_of(state: Mapping[str, Any]) -> Layout:
    """From the cluster's public state."""
    return Layout(
        pipelines=tuple(
            tuple(
                StagePlace(
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


def nodes_struck(fault: Fault, layout: Layout, seed: int) -> tuple[str, ...]:
    """Names of the nodes, the same for the same seed, fault and layout; of the coordinator or broker none.

    :raises PeerError: nobody has this role now, or too few nodes are up.
    """
    target = fault.target
    match target:
        case Nodes():
            return target.names
        case Central():
            return ()
        case RandomNodes():
            if target.count > len(layout.alive):
                raise PeerError(f"{target}: {len(layout.alive)} are up")
            drawn = Random(f"{seed}/{fault.id}").sample(layout.alive, target.count)
            return tuple(sorted(drawn))
        case Role():
            found = _holders(target, layout)
            if not found:
                raise PeerError(f"nobody is {target} now")
            return found
        case _:
            assert_never(target)


def _holders(role: Role, layout: Layout) -> tuple[str, ...]:
    if role.place == "owners":
        return _distinct(n for pipeline in layout.pipelines for n in _owners(pipeline, role.layer))
    if role.place == "spare":
        planned = {name for stages in layout.pipelines for stage in stages for name in stage.nodes}
        return tuple(name for name in layout.alive if name not in planned)
    if role.pipeline >= len(layout.pipelines):
        return ()
    pipeline = layout.pipelines[role.pipeline]
    match role.place:
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
            assert_never(role.place)


def _owners(pipeline: tuple[StagePlace, ...], layer: int | None) -> tuple[str, ...]:
    if layer is None:
        return ()
    return _distinct(n for s in pipeline if s.first_layer <= layer < s.end_layer for n in s.nodes)


def _distinct(names: Any) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
