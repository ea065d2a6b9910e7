"""The parts of a scenario: when a fault happens, what it does to whom, and what must follow. They are plain
values without I/O.

A file (``ftd.faults.chaos.scenario``) or a caller provides them. The real service and the
simulator use the same ones.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from ftd.observe.view.text import plural
from ftd.transport.wire.public import BadDevice, NodeFault

LocalFault = Literal["start", "cut"]
"""Faults that need control of the processes and the network: a cluster that was started for the scenario."""
Process = Literal["node", "trainer"]
Service = Literal["coordinator", "broker"]
RolePosition = Literal["rank 0", "first stage", "last stage", "owner", "owners", "pipeline", "spare"]
Phase = Literal["quiescing", "planning", "recovering", "resumed", "snapshotting", "persisting"]

NODE_FAULTS: tuple[str, ...] = get_args(NodeFault)
LOCAL_FAULTS: tuple[str, ...] = get_args(LocalFault)
FAULTS = (*NODE_FAULTS, *LOCAL_FAULTS)
SERVICE_FAULTS = ("kill", "stop")
"""The faults that can be injected into the coordinator or the broker."""
PHASES: tuple[str, ...] = get_args(Phase)
PHASE_EVENTS: dict[str, str] = {
    "quiescing": "GenerationStarted",
    "planning": "Quiesced",
    "recovering": "PlanChosen",
    "resumed": "TrainingResumed",
    "persisting": "CheckpointStarted",
}
"""The event that begins each phase. ``snapshotting`` has none: it lasts while a node's state is SNAP."""
DEFAULT_FOR_S: dict[str, float] = {
    "disconnect": 5.0, "cut": 5.0, "lossy": 10.0, "fill_memory": 10.0, "fill_disk": 10.0, "bad_device": 60.0,
}  # fmt: skip
"""The duration in seconds of faults that end by themselves even if the scenario does not say when."""


# --- triggers --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AtStep:
    """A trigger that fires when ``step`` or a later step is committed."""

    step: int

    def __str__(self) -> str:
        return f"at step {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterTime:
    """A trigger that fires ``delay_s`` after the scenario's start."""

    delay_s: float

    def __str__(self) -> str:
        return f"after {self.delay_s:g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnEvent:
    """A trigger that fires at the ``occurrence``-th event of this name since the scenario's start."""

    event: str
    occurrence: int = 1

    def __str__(self) -> str:
        return f"on {self.event}{_number(self.occurrence)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class InPhase:
    """A trigger that fires when this phase begins for the ``occurrence``-th time since the scenario's start."""

    phase: Phase
    occurrence: int = 1

    def __str__(self) -> str:
        return f"while {self.phase}{_number(self.occurrence)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterFault:
    """A trigger that fires when the fault with this id has been injected."""

    fault: str

    def __str__(self) -> str:
        return f"after fault {self.fault!r}"


Trigger = AtStep | AfterTime | OnEvent | InPhase | AfterFault


def _number(occurrence: int) -> str:
    return f" number {occurrence}" if occurrence > 1 else ""


# --- targets ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedNodes:
    names: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRole:
    """The nodes that have this position in the plan when the fault is due.

    ``rank 0``; ``first stage`` and ``last stage`` of a pipeline; ``owner`` of a layer in a pipeline, or all
    of its ``owners``; a whole ``pipeline``; ``spare``, the nodes that are up and in no pipeline.
    """

    position: RolePosition
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
    """A number of nodes that are up when the fault is due, drawn from the scenario's seed."""

    count: int

    def __str__(self) -> str:
        return plural(self.count, "random node")


@dataclass(frozen=True, slots=True, kw_only=True)
class CentralService:
    """The leading coordinator, or the broker."""

    service: Service

    def __str__(self) -> str:
        return f"the {self.service}"


Target = NamedNodes | PlanRole | RandomNodes | CentralService


# --- expectations ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedWithin:
    """A limit on the time from the fault (or from the scenario's last fault) to the first step committed after
    a recovery.
    """

    limit_s: float

    def __str__(self) -> str:
        return f"resumed within {self.limit_s:g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsAtMost:
    """The maximum of a recovery's ``rolled_back_steps``, committed steps that are undone, or of its
    ``recomputed_steps``, which are computed again although they were not committed.
    """

    field: Literal["rolled_back_steps", "recomputed_steps"]
    maximum: int

    def __str__(self) -> str:
        if self.field == "rolled_back_steps":
            return f"at most {plural(self.maximum, 'committed step')} lost"
        return f"at most {plural(self.maximum, 'step')} computed again"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryFrom:
    """The allowed values of a recovery's ``cause``, or of its ``tier``: where the state came from that training
    resumed with.
    """

    field: Literal["cause", "tier"]
    allowed: tuple[str, ...]

    def __str__(self) -> str:
        return f"{'state' if self.field == 'tier' else 'a recovery'} from {' or '.join(self.allowed)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryCount:
    """The maximum number of recoveries; 0 means that training must go on undisturbed."""

    maximum: int

    def __str__(self) -> str:
        return f"at most {plural(self.maximum, 'recovery', 'recoveries')}" if self.maximum else "no recovery"


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
    """The states (``HEALTHY``, ``OFFLINE``, …) that these nodes must reach and have at the end."""

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
    """The requirement that the job reaches its last step."""

    def __str__(self) -> str:
        return "the job finishes"


@dataclass(frozen=True, slots=True, kw_only=True)
class SameLosses:
    """The requirement that every step has the loss that it has without faults.

    The same job is run without faults beforehand.
    """

    relative: float

    def __str__(self) -> str:
        return f"losses as without faults (relative {self.relative:g})"


Expectation = (
    ResumedWithin
    | StepsAtMost
    | RecoveryFrom
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
    """One ``[[fault]]``. If its target is several nodes, it is injected into all of them at the same moment."""

    id: str
    trigger: Trigger
    do: NodeFault | LocalFault
    target: Target
    delay_s: float = 0.0
    """The delay in seconds after the trigger."""
    process: Process = "node"
    device: int | None = None
    """``None`` means every trainer of the node."""
    for_s: float | None = None
    """``None`` means without end (stop, slow), or the fault's own default."""
    factor: float | None = None
    size_mib: int | None = None
    """Maximum that fill_memory and fill_disk may take."""
    drop: float = 0.0
    duplicate: float = 0.0
    """Probabilities per message of a lossy fault."""
    late_s: float = 0.0
    """Longest delay of a message in a lossy fault; the order of one sender's messages is kept."""
    how: BadDevice = "wrong"
    """Behaviour of the device in a bad_device fault."""
    restart_after_s: float = 0.0
    expect: tuple[Expectation, ...] = ()
    """Events and states that must follow this fault before the next one is injected or the scenario ends."""

    @property
    def duration_s(self) -> float:
        """Seconds from the start of the fault until it is over; 0 if it is over at once or never."""
        return self.for_s or self.restart_after_s or DEFAULT_FOR_S.get(self.do, 0.0)

    def __str__(self) -> str:
        what = f"{self.do} {self.target}"
        if self.process == "trainer":
            what += " (trainers)" if self.device is None else f" (trainer {self.device})"
        later = f" + {self.delay_s:g} s" if self.delay_s else ""
        return f"{self.trigger}{later}: {what}"

    @property
    def needs_local_cluster(self) -> bool:
        """Whether the fault needs a cluster that was started for the scenario."""
        return self.do in LOCAL_FAULTS or isinstance(self.target, CentralService)


class ClusterSetup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The table ``[cluster]``: the local cluster on which the scenario runs."""

    job: str
    """The job file, which a scenario file names relative to its own directory."""
    nodes: int
    devices_per_node: int = 1
    steps: int | None = None
    """Number of steps to use in place of the job file's."""
    broker: Literal["embedded", "mosquitto"] = "mosquitto"
    coordinators: int = 1
    """The number of coordinators: one leads, the others are standbys. ``role = "coordinator"`` means the
    leader.
    """
    network: bool = False
    """Whether each node gets a network of its own (a namespace), so that it can be cut off."""
    memory_mib: int | None = None
    """The size of the memory file system for the snapshots of all nodes; ``None`` uses the machine's own."""
    disk_mib: int | None = None
    """The size of the file system that ``{disk}`` in ``override`` stands for; ``None`` makes it a plain
    directory.
    """
    timing: dict[str, float] = {}
    """Overrides of ``[timing]``."""
    override: dict[str, Any] = {}
    """Overrides of the job file's tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    name: str = "scenario"
    purpose: str = ""
    seed: int = 0
    """The seed of random targets and of lossy sessions."""
    faults: tuple[Fault, ...] = ()
    expect: tuple[Expectation, ...] = ()
    steps_after: int = 3
    """Number of steps that must follow after all faults are over and all expectations are met."""
    limit_s: float = 300.0
    """The time limit. An expectation that is not met by then has failed."""
    cluster: ClusterSetup | None = None

    @property
    def local_faults(self) -> tuple[Fault, ...]:
        """The faults that need a local cluster."""
        return tuple(fault for fault in self.faults if fault.needs_local_cluster)
