"""State of the cluster machine, and operations that all of its parts use.

``Cluster`` is the one mutable object of a ``ClusterMachine``; the modules ``membership``, ``recovery``,
``jobs``, ``progress`` and ``signals`` are functions over it. This module decides nothing.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from planner.values import Device, PipelinePlacement, Plan
from statemachine.cluster.horizon import Exposure
from statemachine.cluster.loss_spikes import LossSpikes
from statemachine.cluster.node import ALIVE, NodeMachine
from statemachine.cluster.phases import (
    TABLE,
    ActiveRecovery,
    Ended,
    MachineError,
    Paused,
    PhaseEvent,
    Planning,
    Quiescing,
    Resuming,
    Running,
    State,
    TrainingGroup,
    Waiting,
)
from statemachine.cluster.rules import Resumption
from statemachine.cluster.skipped_updates import SkippedUpdates
from statemachine.cluster.snapshots.snapshot_state import JobCheckpoints, JobSnapshots
from statemachine.effects import (
    AnswerRequest,
    BroadcastCommand,
    CancelTimer,
    CheckDrain,
    ComparePlan,
    Effect,
    EmitEvent,
    PersistState,
    PublishCluster,
    SendCommand,
    SetTimer,
)
from statemachine.events import DrainRequested
from statemachine.hardware import HardwareLimits
from statemachine.messages.cluster import Command
from statemachine.messages.common import ReplicaDigests
from statemachine.messages.values import (
    ClusterPhase,
    CommittedStep,
    Divergence,
    Evaluation,
    Job,
    NodeErrors,
    ProfiledJob,
    RepeatedError,
    Vote,
)
from statemachine.timing import Timing

TICK = "tick"
QUIESCE = "quiesce"
RESUME = "resume"
SETTLE = "settle"
JOIN = "join"
STEPS = "steps"
PAUSE_LIMIT = "pause_limit"
SUSPICION = "suspicion"
SNAPSHOT = "snapshot"
PERSIST = "persist"
FINISH = "finish"
FIND = "find"
DRAIN = "drain"
SNAPSHOT_ANSWER = "snapshot_answer"

LOSSES = frozenset({"node_lost", "trainer_lost", "connection_lost", "corruption"})
"""Causes of a recovery that outrank a join, a drain or a start that they interrupt."""


@dataclass(slots=True, kw_only=True)
class TrainingProgress:
    """The steps that are known to be committed, and those of them that were published."""

    known: CommittedStep | None = None
    """The newest committed step that any node reported, also nodes that are dead now."""
    published_step: int = 0
    """``StepCommitted`` was published for every step up to this one."""
    pending: dict[int, Vote] = field(default_factory=dict)
    """Votes of steps above ``published_step`` that wait for an earlier one."""
    asked_node: str | None = None
    """Node that was last asked for missing steps."""
    lacking: set[str] = field(default_factory=set)
    """Nodes that answered and do not have the missing steps."""
    missed: tuple[int, int] | None = None
    """First and last step that the coordinator's own history lacks, and that a node was asked for."""
    missed_asked_node: str = ""
    """Node that was asked for them."""
    missed_lacking: set[str] = field(default_factory=set)
    """Nodes that have none of them, or did not answer."""
    gap_since: float | None = None
    loss: float | None = None
    skipped: SkippedUpdates = field(default_factory=SkippedUpdates)
    """Steps up to the last published one that updated nothing."""
    step_s: float = 0.0
    evaluated: int = 0
    """The newest step whose ``Evaluated`` was published."""
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    """Evaluations by step that wait for the ``StepCommitted`` of their step. They are not durable: what was
    not published when a group resumes is evaluated again.
    """

    @property
    def known_step(self) -> int:
        return self.known.step if self.known is not None else 0

    def roll_back(self, step: int, vote: Vote) -> None:
        """Discard every commit after ``step``."""
        self.known, self.published_step = CommittedStep(step=step, vote=vote), min(self.published_step, step)
        self.pending = {number: known for number, known in self.pending.items() if number <= step}
        self.asked_node = self.gap_since = self.missed = None
        self.lacking.clear()
        self.skipped = self.skipped.rolled_back(step)
        self.loss = vote.loss
        self.evaluated = min(self.evaluated, step)
        self.evaluations = {number: found for number, found in self.evaluations.items() if number <= step}


@dataclass(slots=True, kw_only=True)
class AnnouncedFault:
    """A fault that was injected into a node."""

    at: float
    outlived: bool = False
    """True once no recovery begins with it: the node took part in a step that was committed since, or a job
    was submitted since.
    """


@dataclass(slots=True, kw_only=True)
class StragglerState:
    """Facts about the current plan and the nodes' speeds, for ``stragglers``."""

    speeds: dict[str, float] = field(default_factory=dict)
    """The slow nodes' speeds for which the plan was made, or last compared."""
    pending_comparison: ComparePlan | None = None
    """A comparison that was requested and is not answered."""
    compared_at: float | None = None
    profile_error: float = 1.0
    """The cluster's median of measured over expected time, which is the profile's own error."""
    expected_for: Plan | None = None
    expected_ms: dict[Device, float] = field(default_factory=dict)
    """Expected computing time of each device of ``expected_for`` on a microbatch, by the profile."""


@dataclass(slots=True, kw_only=True)
class ReplicaComparisons:
    """Digests that the current group reported of its copies of layers, and what followed, for ``replicas``."""

    generation: int = 0
    """Generation of the group; 0: none has reported."""
    copies: dict[int, list[tuple[str, tuple[Device, ...]]]] = field(default_factory=dict)
    """Copies of each layer in its plan (``replicas.copies_of``)."""
    devices: int = 0
    """Number of devices that hold them, and report."""
    reported: dict[int, dict[Device, ReplicaDigests]] = field(default_factory=dict)
    """Digests by step, of steps after which no comparison is complete."""
    agreed_step: int = 0
    """The newest step after which all copies were compared and agreed; 0: none."""
    copied: bool = False
    """Whether a layer was copied from one device to another since then, so that a majority proves nothing."""
    diverged: Divergence | None = None
    """Copies that differ, until the rollback that undoes it."""
    diverged_step: int = 0
    """The newest step after which copies differed."""
    tries: int = 0
    """Rollbacks for this reason since a comparison after a later step than that agreed."""

    def roll_back(self, step: int) -> None:
        """Discard all comparisons after ``step``; the state of that step was compared, and all devices get it."""
        self.reported.clear()
        self.tries += self.diverged is not None
        self.agreed_step, self.copied, self.diverged = min(step, self.agreed_step), False, None


@dataclass(slots=True, kw_only=True)
class DrainState:
    """Requests to drain nodes, and what the planner answered, for ``drains``. It is not durable: a client
    repeats a request that was not answered, and the planner is asked again.
    """

    requests: dict[str, list[DrainRequested]] = field(default_factory=dict)
    """Requests that are not answered yet, by node."""
    checking: CheckDrain | None = None
    """The question that the planner was last asked and has not answered."""
    impossible: dict[str, str] = field(default_factory=dict)
    """Nodes that there is no plan without, each with the reason, among ``usable`` nodes under ``pipelines``."""
    one_by_one: bool = False
    """Whether there is no plan without all of the nodes that are to leave, so that each is asked about alone."""
    usable: frozenset[str] = frozenset()
    pipelines: tuple[PipelinePlacement, ...] = ()


@dataclass(slots=True, kw_only=True)
class Cluster:
    timing: Timing
    hardware: HardwareLimits = field(default_factory=HardwareLimits)
    nodes: dict[str, NodeMachine] = field(default_factory=dict)
    state: State = field(default_factory=Waiting)
    generation: int = 0
    """The highest generation ever persisted; the next one is one more."""
    job: Job | None = None
    profiled: ProfiledJob | None = None
    profiler: str | None = None
    """Node that was asked for the profile."""
    templates_ready: bool = False
    templates_for: int = 0
    """Number of nodes for which templates were requested; 0: not yet, by this process."""
    templates_before: int = 0
    """Number of nodes for which an earlier coordinator had templates of this job."""
    exposure: Exposure = field(default_factory=Exposure)
    straggler_state: StragglerState = field(default_factory=StragglerState)
    drains: DrainState = field(default_factory=DrainState)
    snapshots: JobSnapshots = field(default_factory=JobSnapshots)
    replicas: ReplicaComparisons = field(default_factory=ReplicaComparisons)
    spikes: LossSpikes = field(default_factory=LossSpikes)
    checkpoints: JobCheckpoints = field(default_factory=JobCheckpoints)
    lineage: int = 0
    """Generation of the job's last rollback; 0: none."""
    resumption: Resumption | None = None
    """The last generation whose Resume was sent."""
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    failed_to_resume: set[str] = field(default_factory=set)
    """Nodes that could not resume the last time although others could."""
    unreached: set[str] = field(default_factory=set)
    """Nodes that were heard from but that a Quiesce did not reach in time, since a group last trained."""
    raised: int = 0
    """Times that the job's code raised since the last committed step."""
    repeated_error: RepeatedError | None = None
    last_failure: str = ""
    failing: dict[str, NodeErrors] = field(default_factory=dict)
    """Failures of trainers during the job that nobody injected, by node in the order of the first one."""
    rejected: dict[tuple[str, int], str] = field(default_factory=dict)
    inquired: dict[tuple[str, int], float] = field(default_factory=dict)
    """Time at which each incarnation was last sent a RequestHello."""
    unacknowledged: dict[str, list[str]] = field(default_factory=dict)
    """Nodes that an order did not reach, by the order (``acknowledgement``); it is sent again at the next
    tick.
    """
    unjudged_health: set[str] = field(default_factory=set)
    """Nodes whose last health check could not be compared with others so far (``health``)."""
    faults: dict[str, AnnouncedFault] = field(default_factory=dict)
    """Each node's newest injected fault that no loss has followed yet."""
    ignored: Counter[str] = field(default_factory=Counter)
    started: bool = False
    from_journal: bool = False
    """Whether this state was made from a journal and has not been connected to the broker yet."""
    connected: bool = False
    grace_until: float = 0.0
    wills_unreliable_until: float = 0.0
    """Time until which a last will proves nothing: a broker that stood still ends the sessions of nodes that
    are alive.
    """
    others_heard_at: float = 0.0
    """Time of the last message from a non-member, such as a node that returned; it shows that this coordinator
    is not cut off.
    """
    silence_floor_at: float = 0.0
    """Time at which the broker or this coordinator was last back; no node's silence began before that."""

    # --- current step ---------
    at: float = 0.0
    cause: str = ""
    dirty: bool = False
    """Whether something changed that ``reconcile`` should look at."""
    due: dict[str, float] = field(default_factory=dict)
    out: list[Effect] = field(default_factory=list)
    node_order: list[str] = field(default_factory=list)
    sorted_names: list[str] = field(default_factory=list)
    """Names of ``nodes`` in their own order and sorted."""
    cached_parts: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Large parts of the durable state by name, with the values that they were made from."""

    # --- derived state ---

    @property
    def phase(self) -> ClusterPhase:
        return self.state.phase

    @property
    def active(self) -> bool:
        """Return whether a job is under way."""
        return self.job is not None and not isinstance(self.state, Ended)

    @property
    def current_job(self) -> Job:
        """Return the job under way, or the last one. There is one after the first submission."""
        assert self.job is not None, "no job was submitted yet"
        return self.job

    @property
    def resumed_generation(self) -> int:
        return self.resumption.generation if self.resumption is not None else 0

    @property
    def recovery(self) -> ActiveRecovery | None:
        """Return the recovery under way, from the loss to the first commit, or ``None``."""
        state = self.state
        return None if isinstance(state, Waiting | Paused | Ended) else state.recovery

    @property
    def planned(self) -> tuple[str, ...]:
        """Return the nodes of the plan that runs or is being resumed."""
        return self.state.planned if isinstance(self.state, TrainingGroup) else ()

    @property
    def required_nodes(self) -> Collection[str]:
        """Return the nodes whose loss interrupts the current generation."""
        match self.state:
            case Quiescing() | Planning() as state:
                return state.expected
            case Resuming() | Running() as group:
                return group.planned
            case _:
                return ()

    @property
    def members(self) -> set[str]:
        """Return the nodes whose reports counted in the current generation."""
        state = self.state
        return state.members if isinstance(state, Planning | TrainingGroup | Paused) else set()

    @property
    def ended(self) -> bool:
        """Return whether every planned node has reported that all steps are done."""
        return isinstance(self.state, TrainingGroup) and self.state.all_finished

    @property
    def speeds(self) -> dict[str, float]:
        """Return the speeds of the stragglers, for ``Situation.speeds``."""
        slow = sorted(name for name, node in self.nodes.items() if node.speed != 1.0)
        return {name: self.nodes[name].speed for name in slow}

    def alive(self) -> list[NodeMachine]:
        """Return the nodes that are alive, by name. The step that decides calls this a dozen times."""
        entered = list(self.nodes)
        if entered != self.node_order:
            self.node_order, self.sorted_names = entered, sorted(entered)
        nodes = self.nodes
        return [node for name in self.sorted_names if (node := nodes[name]).state in ALIVE]

    def horizon_s(self, nodes: int) -> float | None:
        """Return the time until the next failure among so many nodes that plans assume."""
        if self.job is None or nodes < 1:
            return None
        given_s = self.job.horizon_s
        return given_s if given_s is not None else self.exposure.horizon_s(nodes, self.at)

    def heard_at(self, node: NodeMachine) -> float:
        """Return the time from which the silence of this node counts."""
        return max(node.heard_at, self.silence_floor_at)

    # --- operations ---

    def transition(self, event: PhaseEvent, state: State) -> None:
        """Enter the state that follows from an event.

        :raises MachineError: this event cannot happen in this phase.
        """
        phase = TABLE.get((self.phase, event))
        if phase is None:
            raise MachineError(f"{event} cannot happen in phase {self.phase}")
        assert state.phase is phase, f"{event} leads to {phase}, not to {state.phase}"
        self.state, self.dirty = state, True

    def send(self, node: NodeMachine, command: Command) -> None:
        self.send_to(node.name, node.incarnation, command)

    def send_to(self, name: str, incarnation: int, command: Command) -> None:
        self.out.append(SendCommand(cause=self.cause, node=name, incarnation=incarnation, command=command))

    def send_all(self, nodes: Iterable[NodeMachine], command: Command) -> None:
        """Send a command to several nodes as one message."""
        receivers = {node.name: node.incarnation for node in nodes}
        if len(receivers) > 1:
            self.out.append(BroadcastCommand(cause=self.cause, receivers=receivers, command=command))
        else:
            for name, incarnation in receivers.items():
                self.send_to(name, incarnation, command)

    def emit(
        self,
        name: str,
        reason: str,
        /,
        *,
        node: str | None = None,
        generation: int | None = None,
        step: int | None = None,
        **details: Any,
    ) -> None:
        """Publish an event; generation and step default to the newest known."""
        self.out.append(
            EmitEvent(
                cause=self.cause,
                name=name,
                reason=reason,
                node=node,
                generation=self.generation if generation is None else generation,
                step=self.progress.known_step if step is None else step,
                details=details,
            )
        )

    def ignore(self, why: str, node: str | None = None) -> None:
        """Count a stale message, and publish an event that the driver may rate-limit."""
        self.ignored[why] += 1
        self.emit("MessageIgnored", why, node=node, why=why, count=self.ignored[why])

    def answer(self, request: str, accepted: bool, detail: str, *, outcome: str = "") -> None:
        """Answer a client's request."""
        self.out.append(
            AnswerRequest(
                cause=self.cause, request=request, accepted=accepted, detail=detail, outcome=outcome
            )
        )

    def persist(self) -> None:
        self.out.append(PersistState(cause=self.cause))

    def publish(self) -> None:
        self.out.append(PublishCluster(cause=self.cause))

    def set_timer(self, name: str, delay_s: float) -> None:
        self.due[name] = self.at + delay_s
        self.out.append(SetTimer(cause="clock" if name == TICK else self.cause, name=name, delay_s=delay_s))

    def cancel_timer(self, name: str) -> None:
        if self.due.pop(name, None) is not None:
            self.out.append(CancelTimer(cause=self.cause, name=name))
