"""The progress of a start in words and as one share of the whole, as the cluster's state contains it."""

from typing import Any

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
