"""The cluster's state as the coordinator publishes it."""

from typing import Any

import ftd
from ftd.coordinator.startup import startup_state
from ftd.transport.wire.public import SCHEMA, timestamp


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
    if state["snapshot"] is not None:
        state["snapshot"]["at"] = timestamp(ago_s=max(0.0, now - state["snapshot"]["at"]))
    for node in state["nodes"].values():
        if (quarantine := node["quarantine"]) is not None:
            quarantine["at"] = timestamp(ago_s=max(0.0, now - quarantine["at"]))
        if (health := node["health"]) is not None:
            health["at"] = timestamp(ago_s=max(0.0, now - health["at"]))
    return {
        **state,
        "startup": startup_state(state["startup"], progress, expected_nodes),
        "planning": progress and {"done": progress[0], "total": progress[1]},
        "schema": SCHEMA,
        "version": ftd.__version__,
        **coordinator,
        "at": timestamp(),
    }
