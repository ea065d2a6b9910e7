"""The way from a failure back to training, phase by phase, while it happens; and those that are over.

A phase begins with the event that ends the one before. So does ``RecoveryCompleted`` count them, which
replaces what was seen on the way::

    detect    the fault (where it was injected, so that its moment is known) … NodeLost, TrainerLost
    quiesce   … Quiesced          every survivor has stopped and reported
    plan      … PlanChosen
    state     … TrainingResumed   all have met and hold their layers
    resume    … RecoveryCompleted the next step is committed
"""

from collections import deque
from typing import Any

from ftd.dashboard.entries import MOST_NODES, MOST_REASON, seconds
from ftd.view.text import CAUSE_WORDS, is_failure
from ftd.wire.public import EventMessage

Json = dict[str, Any]

PHASES = ("detect", "quiesce", "plan", "state", "resume")
MOST_DONE = 50
_ENDS_OF_JOBS = frozenset({"JobFinished", "JobFailed", "JobStopped"})
_NEXT = {"Quiesced": "plan", "PlanChosen": "state", "TrainingResumed": "resume"}
_LOSSES = frozenset({"NodeLost", "TrainerLost"})
_FAULT_COUNTS_S = 60.0
"""A fault that was injected longer ago is not what was noticed now."""
_DROPPED = ("pipelines_before", "pipelines_after")


class Recoveries:
    """``on_event`` sees every event of the coordinator, and the ``ChaosInjected`` of nodes."""

    def __init__(self) -> None:
        self.running: Json | None = None
        """As the page shows it; ``phases``: ``[name, began_s, ended_s or None]``, in seconds since 1970."""
        self.done: deque[Json] = deque(maxlen=MOST_DONE)
        self.count = 0
        """Of all that ever were in ``done``."""
        self._faults: dict[str, float] = {}
        self._losses: list[Json] = []

    def on_event(self, message: EventMessage) -> None:
        at_s = seconds(message.at)
        match message.event:
            case "ChaosInjected":
                self._fault(message.node or "", at_s)
            case name if name in _LOSSES:
                self._lost(message, at_s)
            case "GenerationStarted":
                self._begin(message, at_s)
            case name if name in _NEXT:
                self._enter(_NEXT[name], message, at_s)
            case "ClusterPaused":
                if self.running is not None:
                    self.running["paused"] = message.reason[:MOST_REASON]
            case "RecoveryCompleted":
                self._complete(message, at_s)
            case name if name in _ENDS_OF_JOBS:
                self.running = None
                self._losses.clear()

    def _fault(self, node: str, at_s: float) -> None:
        while len(self._faults) >= MOST_NODES:
            del self._faults[next(iter(self._faults))]
        self._faults[node] = at_s

    def _lost(self, message: EventMessage, at_s: float) -> None:
        details, node = message.details, message.node or ""
        began_s = self._faults.pop(node, None)
        if began_s is not None and not 0 <= at_s - began_s <= _FAULT_COUNTS_S:
            began_s = None
        loss = {
            "node": node,
            "what": message.event,
            "how": details.get("how") or details.get("cause"),
            "at": at_s,
            "fault_at": began_s,
            "said": message.reason[:MOST_REASON],
        }
        del self._losses[: max(0, len(self._losses) + 1 - MOST_NODES)]
        self._losses.append(loss)

    def _begin(self, message: EventMessage, at_s: float) -> None:
        """Of the first generation, or of one more because something failed on the way."""
        before = self.running
        losses = [*(before["losses"] if before else ()), *self._losses][-MOST_NODES:]
        self._losses.clear()
        detected_s = min((x["at"] for x in losses), default=at_s)
        faults = [x["fault_at"] for x in losses if x["fault_at"] is not None]
        began_s = min(faults, default=detected_s)
        phases: list[list[Any]] = [["detect", began_s, detected_s]] if faults else []
        self.running = {
            "generation": message.generation,
            "tries": before["tries"] + 1 if before else 1,
            "step": message.step,
            "mode": message.details.get("mode"),
            "why": message.reason[:MOST_REASON],
            "losses": losses,
            "phases": [*phases, ["quiesce", detected_s, None]],
            "decision": None,
            "plan": None,
            "paused": None,
        }

    def _enter(self, phase: str, message: EventMessage, at_s: float) -> None:
        running = self.running
        if running is None or message.generation != running["generation"]:
            return
        running["phases"][-1][2] = at_s
        running["phases"].append([phase, at_s, None])
        if message.event == "Quiesced":
            running["decision"] = message.reason[:MOST_REASON]
        elif message.event == "PlanChosen":
            running["plan"], running["paused"] = message.reason[:MOST_REASON], None

    def _complete(self, message: EventMessage, at_s: float) -> None:
        recovery = {k: v for k, v in message.details["recovery"].items() if k not in _DROPPED}
        running, self.running = self.running, None
        losses = running["losses"] if running is not None else []
        faults = [x for x in losses if x["fault_at"] is not None]
        self.count += 1
        self.done.append(
            {
                **recovery,
                "nodes": list(recovery["nodes"])[:MOST_NODES],
                "n": self.count,
                "at": at_s,
                "detect_ms": min((1e3 * (x["at"] - x["fault_at"]) for x in faults), default=None),
                "what": CAUSE_WORDS.get(recovery["cause"], recovery["cause"]),
                "failure": is_failure(recovery["cause"], recovery["rolled_back_steps"]),
                "decision": running["decision"] if running is not None else None,
                "losses": losses,
            }
        )
