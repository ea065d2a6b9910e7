"""The cluster's state as the coordinator publishes it, with the progress of a start in words and as one share of
the whole.
"""

from typing import Any

import ftd
from ftd.transport.wire.public import SCHEMA, timestamp
from statemachine.cluster.startup import Startup
from statemachine.messages.values import BuildStage, StartupStage

_STAGES = tuple(StartupStage)
_DOING = {
    None: "building the model",
    BuildStage.STARTING: "starting its trainers",
    BuildStage.FUNCTION: "running the training function",
    BuildStage.CUTTING: "cutting the model into layers",
    BuildStage.CHECKING: "cutting the model into layers and verifying it",
    BuildStage.MEASURING: "measuring the layers",
}


def public_state(
    state: dict[str, Any],
    coordinator: dict[str, Any],
    progress: tuple[int, int] | None,
    now: float,
    *,
    expected_nodes: int = 0,
) -> dict[str, Any]:
    """Return the machine's public state with the fields of the coordinator that publishes it, and the progress
    of planning.

    :param now: time on the machine's clock.
    :param expected_nodes: see ``startup_state``.
    """
    of_nodes = (part for node in state["nodes"].values() for part in (node["quarantine"], node["health"]))
    for part in (state["snapshot"], *of_nodes):
        if part is not None:
            part["at"] = timestamp(ago_s=max(0.0, now - part["at"]))
    return {
        **state,
        "startup": startup_state(state["startup"], progress, expected_nodes),
        "planning": progress and {"done": progress[0], "total": progress[1]},
        "schema": SCHEMA,
        "version": ftd.__version__,
        **coordinator,
        "at": timestamp(),
    }


def startup_state(
    startup: Startup | None, planning: tuple[int, int] | None, expected_nodes: int
) -> dict[str, Any] | None:
    """Return the progress of the start; ``None`` if nothing is starting.

    :param planning: number of nodes for which plans are made, and for how many in total.
    :param expected_nodes: number of nodes that the cluster is to have; 0: unknown.
    """
    if startup is None:
        return None
    done, total = max(0, startup.done), max(0, startup.total)
    if startup.stage is StartupStage.NODES:
        total = max(total, expected_nodes)
        if done >= total:
            return None
    elif startup.stage is StartupStage.PLANNING and planning is not None:
        done, total = planning
    done = min(done, total)
    number = _STAGES.index(startup.stage) + 1
    return {
        "stage": str(startup.stage),
        "number": number,
        "stages": len(_STAGES),
        "done": done,
        "total": total,
        "node": startup.node,
        "share": (number - 1 + (done / total if total else 0.0)) / len(_STAGES),
        "text": _text(startup, done, total),
    }


def _text(startup: Startup, done: int, total: int) -> str:
    match startup.stage:
        case StartupStage.NODES:
            return f"{done} of {total} nodes are ready"
        case StartupStage.BUILDING:
            return f"{startup.node} is {_DOING[startup.doing]}"
        case StartupStage.MEASURING:
            layer = f"layer {min(done + 1, total)} of {total}" if total else "the layers"
            return f"{startup.node} is measuring {layer}"
        case StartupStage.PLANNING:
            return "making plans" + (f" for {done} of {total} numbers of nodes" if total else "")
        case StartupStage.PREPARING:
            return f"{done} of {total} nodes have built the model"
        case StartupStage.FORMING:
            return f"{done} of {total} nodes have joined their groups"
        case StartupStage.FIRST_STEP:
            return "computing the first step"
