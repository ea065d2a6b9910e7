"""The vocabulary of a scenario: when, what, whom, and what must follow. Plain values, no I/O.

They come from a file (``ftd.faults.chaos.scenario``) or are made directly; the real service and the simulator take
the same ones.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

NodeFault = Literal[
    "kill", "term", "stop", "hang", "raise", "slow", "flip", "disconnect", "lossy", "fill_memory", "fill_disk"
]
"""Faults that a node does to itself when it is asked over MQTT."""
LocalFault = Literal["start", "cut"]
"""Faults that need the processes and the network in hand: a cluster that was started for the scenario."""
Process = Literal["node", "trainer"]
Service = Literal["coordinator", "broker"]
Place = Literal["rank 0", "first stage", "last stage", "owner", "owners", "pipeline", "spare"]
Phase = Literal["quiescing", "planning", "recovering", "resumed", "snapshotting", "persisting"]

NODE_FAULTS: tuple[str, ...] = get_args(NodeFault)
LOCAL_FAULTS: tuple[str, ...] = get_args(LocalFault)
FAULTS = (*NODE_FAULTS, *LOCAL_FAULTS)
SERVICES: tuple[str, ...] = get_args(Service)
SERVICE_FAULTS = ("kill", "stop")
"""What can be done to the coordinator or the broker."""
PHASES: tuple[str, ...] = get_args(Phase)
PHASE_EVENTS: dict[str, str] = {
    "quiescing": "GenerationStarted",
    "planning": "Quiesced",
    "recovering": "PlanChosen",
    "resumed": "TrainingResumed",
    "persisting": "CheckpointStarted",
}
"""The event that begins a phase. ``snapshotting`` has none: a node's state is SNAP while it lasts."""
DEFAULT_FOR_S: dict[str, float] = {
    "disconnect": 5.0, "cut": 5.0, "lossy": 10.0, "fill_memory": 10.0, "fill_disk": 10.0,
}  # fmt: skip
"""Of faults that end by themselves even if nobody says when."""


# --- when ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AtStep:
    """Fires when ``step`` or a later one is committed."""

    step: int

    def __str__(self) -> str:
        return f"at step {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterTime:
    """Fires ``delay_s`` after the scenario began."""

    delay_s: float

    def __str__(self) -> str:
        return f"after {self.delay_s:g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnEvent:
    """Fires at the ``occurrence``-th event of this name since the scenario began."""

    event: str
    occurrence: int = 1

    def __str__(self) -> str:
        return f"on {self.event}{_number(self.occurrence)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class InPhase:
    """Fires when this phase begins for the ``occurrence``-th time since the scenario began."""

    phase: Phase
    occurrence: int = 1

    def __str__(self) -> str:
        return f"while {self.phase}{_number(self.occurrence)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterFault:
    """Fires when the fault of this id has struck."""

    fault: str

    def __str__(self) -> str:
        return f"after fault {self.fault!r}"


Trigger = AtStep | AfterTime | OnEvent | InPhase | AfterFault


def _number(occurrence: int) -> str:
    return f" number {occurrence}" if occurrence > 1 else ""


# --- whom ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedNodes:
    names: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRole:
    """Whoever has this place in the plan at that moment.

    ``rank 0``; ``first stage`` and ``last stage`` of a pipeline; ``owner`` of a layer in a pipeline, or all
    of its ``owners``; a whole ``pipeline``; ``spare``, the nodes that are healthy and in no pipeline.
    """

    position: Place
    pipeline: int = 0
    layer: int | None = None

    def __str__(self) -> str:
        match self.position:
            case "owner" | "owners":
                where = f" in pipeline {self.pipeline}" if self.position == "owner" and self.pipeline else ""
                return f"{self.position} of layer {self.layer}{where}"
            case "first stage" | "last stage":
                return self.position + (f" of pipeline {self.pipeline}" if self.pipeline else "")
            case "pipeline":
                return f"pipeline {self.pipeline}"
            case "rank 0" | "spare":
                return self.position


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomNodes:
    """So many of the nodes that are up at that moment, drawn by the scenario's seed."""

    count: int

    def __str__(self) -> str:
        return f"{self.count} random node{'s' if self.count > 1 else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CentralService:
    """The coordinator that leads, or the broker."""

    service: Service

    def __str__(self) -> str:
        return f"the {self.service}"


Target = NamedNodes | PlanRole | RandomNodes | CentralService


# --- what must follow ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedWithin:
    """From the fault (of a scenario: its last) to the first step that is committed after a recovery."""

    limit_s: float

    def __str__(self) -> str:
        return f"resumed within {self.limit_s:g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsLost:
    """Committed steps that were undone, at most."""

    most: int

    def __str__(self) -> str:
        return f"at most {_counted(self.most, 'committed step')} lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsRecomputed:
    """Steps under way, not committed yet, that were computed again, at most."""

    most: int

    def __str__(self) -> str:
        return f"at most {_counted(self.most, 'step')} computed again"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryTier:
    """Where the state that training went on with came from: ``recovery.tier`` is one of these."""

    allowed: tuple[str, ...]

    def __str__(self) -> str:
        return f"state from {' or '.join(self.allowed)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryCause:
    """A recovery names one of these as its ``cause``."""

    allowed: tuple[str, ...]

    def __str__(self) -> str:
        return f"a recovery from {' or '.join(self.allowed)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryCount:
    """So many recoveries at most; 0: training goes on as if nothing were."""

    most: int

    def __str__(self) -> str:
        return f"at most {_counted(self.most, 'recovery', 'recoveries')}" if self.most else "no recovery"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSeen:
    event: str

    def __str__(self) -> str:
        return f"{self.event} seen"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventNotSeen:
    event: str

    def __str__(self) -> str:
        return f"no {self.event}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStates:
    """Each of these nodes comes to its state (``HEALTHY``, ``OFFLINE``, …) and has it at the end."""

    states: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return ", ".join(f"{node} {state}" for node, state in self.states)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPhaseReached:
    """The cluster's phase at the end (``RUNNING``, ``PAUSED``, ``FINISHED``, …)."""

    phase: str

    def __str__(self) -> str:
        return f"the cluster is {self.phase}"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFinishes:
    """The job comes to its last step."""

    def __str__(self) -> str:
        return "the job finishes"


@dataclass(frozen=True, slots=True, kw_only=True)
class SameLosses:
    """Every step has the loss that it has without any fault (the same job is run undisturbed beforehand)."""

    relative: float

    def __str__(self) -> str:
        return f"losses as without faults (relative {self.relative:g})"


Expectation = (
    ResumedWithin
    | StepsLost
    | StepsRecomputed
    | RecoveryTier
    | RecoveryCause
    | RecoveryCount
    | EventSeen
    | EventNotSeen
    | NodeStates
    | ClusterPhaseReached
    | JobFinishes
    | SameLosses
)


# --- the scenario ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One ``[[fault]]``; with several nodes as its target it strikes them at the same moment."""

    id: str
    trigger: Trigger
    do: NodeFault | LocalFault
    target: Target
    delay_s: float = 0.0
    """So much later than its trigger."""
    process: Process = "node"
    device: int | None = None
    """``None``: every trainer of the node."""
    for_s: float | None = None
    """``None``: for ever (stop, slow), or the fault's own default."""
    factor: float | None = None
    size_mib: int | None = None
    """fill_memory, fill_disk: never take more than this."""
    drop: float = 0.0
    duplicate: float = 0.0
    """lossy: probabilities, message by message."""
    late_s: float = 0.0
    """lossy: each message comes up to so much later; the order of one sender's stays."""
    restart_after_s: float = 0.0
    expect: tuple[Expectation, ...] = ()
    """Of what follows this fault, until the next one strikes or the scenario ends."""

    @property
    def lasts_s(self) -> float:
        """Until nothing of it is to come any more; 0: it is done at once, or stays."""
        return self.for_s or self.restart_after_s or DEFAULT_FOR_S.get(self.do, 0.0)

    def __str__(self) -> str:
        what = f"{self.do} {self.target}"
        if self.process == "trainer":
            what += " (trainers)" if self.device is None else f" (trainer {self.device})"
        later = f" + {self.delay_s:g} s" if self.delay_s else ""
        return f"{self.trigger}{later}: {what}"

    @property
    def needs_hands(self) -> bool:
        """It takes a cluster that was started for the scenario."""
        return self.do in LOCAL_FAULTS or isinstance(self.target, CentralService)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSetup:
    """``[cluster]``: what the scenario runs on by itself, all on one machine."""

    job: Path
    nodes: int
    devices_per_node: int = 1
    steps: int | None = None
    """Instead of the job file's."""
    broker: Literal["embedded", "mosquitto"] = "mosquitto"
    coordinators: int = 1
    """One leads, the others stand by; ``role = "coordinator"`` is the one that leads."""
    network: bool = False
    """Each node on a network of its own (namespaces), so that it can be cut off."""
    memory_mib: int | None = None
    """Snapshots of all nodes live in a memory file system of this size; ``None``: the machine's own."""
    disk_mib: int | None = None
    """``{disk}`` in ``override`` is a file system of this size; ``None``: a directory."""
    timing: tuple[tuple[str, float], ...] = ()
    """Overrides of ``[timing]``."""
    override: dict[str, Any]
    """Laid over the job file's tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    name: str = "scenario"
    purpose: str = ""
    seed: int = 0
    """Random targets and lossy sessions are drawn from it."""
    faults: tuple[Fault, ...] = ()
    expect: tuple[Expectation, ...] = ()
    steps_after: int = 3
    """So many steps must follow when all faults are over and what is expected has come."""
    limit_s: float = 300.0
    """What has not come by then is not met."""
    cluster: ClusterSetup | None = None

    @property
    def hands_on(self) -> tuple[Fault, ...]:
        """The faults that only a cluster of one's own can have."""
        return tuple(fault for fault in self.faults if fault.needs_hands)


def _counted(count: int, noun: str, nouns: str | None = None) -> str:
    return f"{count} {noun if count == 1 else nouns or noun + 's'}"
