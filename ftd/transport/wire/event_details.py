"""The ``details`` of events about the job, nodes, reconfigurations, chaos and the service.

Each event has a struct of its name. A message between processes may have that name too (``Quiesced``): the
catalogue, the only user of these structs, refers to them by their module. The structs check what we publish
(``ftd.transport.wire.checking``) and make the contract (``ftd.transport.wire.contract``);
docs/reference/events.md describes them for people. The other events are in ``snapshot_details``.
"""

from typing import Literal

import msgspec

from planner.values import Recompute, Within
from statemachine.messages.values import (
    FailureCause,
    MeasuredFrom,
    NotFiniteValue,
    QuarantineCause,
    QuiesceMode,
)


class Details(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all details; by itself, those of an event that needs only the envelope."""


class RateLimited(Details, frozen=True, kw_only=True):
    """Details of events that are published at most once a second for each node and reason."""

    suppressed: int = 0
    """Similar events that were not published since the previous one."""


class StageData(Details, frozen=True, kw_only=True):
    """A stage of a pipeline."""

    first_layer: int
    end_layer: int
    """Number of the layer after the last one."""
    devices: list[str]
    """``node/index``."""
    recompute: Recompute = "none"
    """The activations that are computed again in the backward pass: none, all but matrix products, or all."""
    within: Within = "replicate"
    """State that each device of the stage holds: all parameters and state of the stage, or a shard of them."""
    replicas: int = 1
    """Number of groups of consecutive devices, each of which holds all state of a tensor-parallel stage in parts."""


class PipelineData(Details, frozen=True, kw_only=True):
    """A pipeline: all layers, divided into stages."""

    stages: list[StageData]
    microbatches: int
    """Number of microbatches that it computes in a step."""


# --- job -----------------------------------------------------------------------------------------


class JobSubmitted(Details, frozen=True, kw_only=True):
    """A job was accepted."""

    name: str
    steps: int
    job: str
    """Id of the job."""
    global_batch: int
    """Samples of one step, over all pipelines."""


class JobPrepared(Details, frozen=True, kw_only=True):
    """The cost of the layers is known, and templates are ready."""


class StepCommitted(Details, frozen=True, kw_only=True):
    """A step was committed; events come in order, without gaps."""

    loss: float | None
    """Mean over the global batch; null if it was not finite."""
    gradient_norm: float | None
    """Norm before clipping; null if it was not finite."""
    skipped: bool
    """Whether the step was committed without an update, because a gradient was not finite."""
    step_s: float
    samples_per_s: float | None
    learning_rate: float
    """Learning rate of this step, for the optimizer's first parameter group; 0 if it is unknown."""
    weight: float | None
    """Total weight of the global batch's loss: rows, or the tokens that count; null if it was not finite."""
    tokens_per_s: float | None
    """``weight`` per second; null if the loss has at most one term per sample."""
    loss_scale: float
    """Factor by which the loss was multiplied; 1 except with float16."""
    metrics: dict[str, float | None]
    """Metrics of the training function, averaged over the global batch; null if not finite."""
    mfu: float | None = None
    """Model FLOPs utilisation of all planned devices, from 0 to 1; null if their peak is unknown."""


class Evaluated(Details, frozen=True, kw_only=True):
    """The model after a committed step was evaluated on the held-out data set."""

    loss: float | None
    """Mean over the held-out samples; null if it was not finite."""
    weight: float
    """Total weight of the loss: rows, or the tokens that count."""
    metrics: dict[str, float | None]
    """Metrics of the training function, averaged over the held-out samples."""
    took_s: float


class JobFinished(Details, frozen=True, kw_only=True):
    """All steps are committed."""

    checksum: str
    """SHA-256 over the digests of all layers' parameters."""


class JobFailed(Details, frozen=True, kw_only=True):
    """The job failed; the reason says why and what would help."""


class JobStopped(Details, frozen=True, kw_only=True):
    """A user stopped the job."""


class UpdateSkipped(Details, frozen=True, kw_only=True):
    """A value of a committed step was not finite, or no term of its loss counted, so nothing was updated. The
    event is published for the first such step in a row, the tenth, the hundredth … Steps that only lower the
    loss scale of float16 are left out.
    """

    loss: float | None
    steps: int
    """Number of such steps in a row, including this one."""
    value: NotFiniteValue | None = None
    """First value that was not finite: the output of ``layer``, the loss, the gradient that the layer's backward
    pass computed, or the gradient of one of its parameters; null if none was found.
    """
    layer: int | None = None
    layer_name: str | None = None
    """Name of the layer for messages, as the model has it, with its class."""
    nodes: list[str] = []
    """Nodes that computed this value."""


class LossSpiked(Details, frozen=True, kw_only=True):
    """The loss of a step was far above the last ones."""

    loss: float | None
    """Loss of the step; null if it was not finite."""
    threshold: float
    """Loss above which it counts as a spike."""
    batch: int
    """Batch on which the step trained."""
    skipped: bool
    """Whether the step is undone and the batch left out; otherwise the loss was accepted, as the reason says."""


class ReplicasDiverged(Details, frozen=True, kw_only=True):
    """Copies of layers that must be equal differ: the state of some device is corrupt. Where the job compares
    them as it trains, it returns to a snapshot of a step after which they agreed.
    """

    layer: int
    """The first layer whose copies differ."""
    digests: list[str]
    """Different digests of its copies."""
    layers: list[int] = []
    """All layers whose copies differ."""
    nodes: list[str] = []
    """Nodes that hold copies of these layers."""
    minority: list[str] = []
    """Nodes whose copies differ from those of the majority; empty: no majority proves it."""
    agreed_step: int = 0
    """The newest step before, after which all copies were compared and agreed; 0: none."""


# --- nodes ---------------------------------------------------------------------------------------


class NodeJoined(Details, frozen=True, kw_only=True):
    """A node said Hello and was accepted."""

    devices: int
    host: str
    incarnation: int


class NodeLost(Details, frozen=True, kw_only=True):
    """A node is OFFLINE."""

    how: Literal["last_will", "silence", "goodbye", "no_answer", "quarantine"]
    detected_at: float
    """Seconds on the coordinator's CLOCK_MONOTONIC."""
    fault_at: float | None = None
    """Time of the injected fault, or of the node's last message if it is silent, on the same clock; null if
    nothing is known before the detection.
    """
    incarnation: int
    host: str = ""
    log: str = ""
    """Command or file on that host with the node's log, which says why it ended; empty: nowhere that lasts."""


class TrainerLost(Details, frozen=True, kw_only=True):
    """A trainer failed; its node is UNHEALTHY."""

    device: int
    cause: FailureCause
    fault_at: float | None = None
    """Time of the injected fault, or of the trainer's last progress if it hung, in seconds on the coordinator's
    CLOCK_MONOTONIC; null if nothing is known before the detection.
    """
    error: str = ""
    """The failure in a line: the exception, or how the process ended."""
    host: str = ""
    log: str = ""
    """Command or file on that host with the node's log, which has the full traceback; empty: nowhere that lasts."""
    detail: str
    """Exit status, traceback, or the end of its stderr."""


class TrainerStarted(Details, frozen=True, kw_only=True):
    """A trainer's process started."""

    device: int
    pid: int
    daemon_pid: int


class NodeRecovered(Details, frozen=True, kw_only=True):
    """All trainers of an UNHEALTHY node are running again."""


class StragglerDetected(Details, frozen=True, kw_only=True):
    """A node has been computing slowly for some time."""

    speed: float
    """Speed relative to the other nodes: 0.25 is a quarter of their speed."""
    previous_speed: float
    microbatch_ms: list[float]
    """Time to compute one microbatch, in milliseconds, of each device."""


class StragglerRecovered(StragglerDetected, frozen=True, kw_only=True):
    """A straggler is as fast as the other nodes again."""


class FailureData(Details, frozen=True, kw_only=True):
    """A failure of a node, as evidence for its quarantine."""

    cause: QuarantineCause
    ago_s: float
    """Seconds from the failure to this event."""
    step: int
    """The step that was being computed."""
    generation: int
    detail: str
    """Last line of the exception, or a sentence."""


class NodeQuarantined(Details, frozen=True, kw_only=True):
    """A node failed repeatedly for the same reason, or its health check failed, and it was set aside: it gets no
    work until it is readmitted.
    """

    cause: QuarantineCause
    evidence: list[FailureData]
    """The failures that led to it, oldest first."""
    readmit: str
    """Command that readmits the node."""


class QuarantineSkipped(Details, frozen=True, kw_only=True):
    """A node that should be set aside stays, because training needs it or too many nodes are set aside."""

    cause: QuarantineCause
    evidence: list[FailureData]


class NodeReadmitted(Details, frozen=True, kw_only=True):
    """A node that was set aside may take part in training again."""

    by: Literal["user", "need", "job", "health"]
    """A user's request; the other nodes cannot train without it; its failures turned out to be the job's; it
    passed two health checks in a row.
    """
    cause: QuarantineCause
    """Category of the failures for which it was set aside."""


class HealthCheckPassed(Details, frozen=True, kw_only=True):
    """A node that a health check had set aside passed one: the problem is not there now."""

    cause: QuarantineCause
    """Category of the failures for which it was set aside."""


class NodeDraining(Details, frozen=True, kw_only=True):
    """A node leaves at the next step boundary: the other nodes have a plan without it."""

    nodes: list[str] = []
    """The nodes that leave together, if there are several."""


class NodeDrainWaiting(Details, frozen=True, kw_only=True):
    """A node that is to leave stays for now, because there is no plan without it; the reason says why."""


class NodeDrainRefused(Details, frozen=True, kw_only=True):
    """A request to drain a node was refused and changed nothing, because there is no plan without the node."""


class NodeDrainCancelled(Details, frozen=True, kw_only=True):
    """A node stays after all: a user cancelled its drain, or its daemon was restarted before it could leave."""


class NodeReleased(Details, frozen=True, kw_only=True):
    """A draining node was released: it holds nothing that the job needs."""


class NodeRemoved(Details, frozen=True, kw_only=True):
    """A node that was OFFLINE was removed from the list of nodes. If it returns, it joins as a new node."""

    incarnation: int


class NodeRejected(RateLimited, frozen=True, kw_only=True):
    """A node was not accepted: its name is in use, or it has the wrong number of devices."""

    incarnation: int


class NodeFenced(Details, frozen=True, kw_only=True):
    """A stale incarnation was ordered to end its trainers and to return as a new one."""

    incarnation: int


class PeerSuspected(RateLimited, frozen=True, kw_only=True):
    """A trainer saw a connection break, which is only a hint."""


# --- reconfiguration -----------------------------------------------------------------------------


class GenerationStarted(Details, frozen=True, kw_only=True):
    """A new generation started: all nodes are ordered to stop."""

    mode: QuiesceMode
    why: str
    recovery_cause: str = ""
    """``cause`` of the recovery that it belongs to; ``start`` for the first plan, which is no recovery."""


class Quiesced(Details, frozen=True, kw_only=True):
    """All nodes have reported; the step from which to continue is decided."""

    decision: Literal["start", "boundary", "redo", "roll_forward"]
    in_flight: bool
    """Whether a step was being computed."""


class ConsideredPlanData(Details, frozen=True, kw_only=True):
    """A layout that the planner compared."""

    method: str
    sizes: list[int]
    """Number of nodes of each pipeline."""
    iteration_s: float
    transfer_bytes: int | None
    transfer_s: float | None
    expected_iteration_s: float
    """Expected time of a step, if the time of the transfer is spread over the steps until the next failure."""


class PlanChosen(Details, frozen=True, kw_only=True):
    """A plan was chosen: which device computes what."""

    method: str
    reason: str
    pipelines: list[PipelineData]
    transfers: int
    transfer_bytes: int
    from_replicas: list[int]
    """Layers of whose optimizer state some part exists only as a replica (ZeRO-1)."""
    estimated_iteration_s: float
    idle_nodes: list[str]
    considered: list[ConsideredPlanData]
    """The layouts that were compared, the chosen one first."""


class ReplanSkipped(Details, frozen=True, kw_only=True):
    """A plan for changed speeds of nodes was considered, and would not save enough."""

    nodes: list[str]
    saved_s: float
    step_s: float


class ClusterPaused(Details, frozen=True, kw_only=True):
    """Training stopped: too few nodes are left, or only absent nodes or checkpoints may have the state."""

    needed: int | None
    present: int


class TrainingResumed(Details, frozen=True, kw_only=True):
    """All planned nodes met in the rendezvous of the new generation."""

    bytes_moved: int
    rendezvous_s: float
    state_s: float


class RecoveryData(Details, frozen=True, kw_only=True):
    """A recovery, from a failure, a join or a drain to the next committed step (docs/reference/report.md)."""

    cause: str
    nodes: list[str]
    detected_how: str | None
    detected_at: float
    """Time at which the coordinator knew, in seconds on its CLOCK_MONOTONIC."""
    began_at: float
    """Time of the fault or its best estimate, on the same clock."""
    measured_from: MeasuredFrom
    """Meaning of ``began_at``: the injected fault, the last sign of life, or the detection."""
    detected_ms: float | None
    """First phase, from ``began_at``; null if that is the detection. All phases add up to ``total_ms``."""
    waited_ms: float
    quiesce_ms: float
    plan_ms: float
    state_ms: float
    resume_ms: float
    total_ms: float
    """Time from ``began_at`` to the next committed step."""
    rolled_back_steps: int
    recomputed_steps: int
    tier: str
    bytes_moved: int
    method: str
    reason: str
    generation: int
    generations_tried: int
    step: int
    pipelines_before: list[PipelineData]
    pipelines_after: list[PipelineData]


class RecoveryCompleted(Details, frozen=True, kw_only=True):
    """The first step of the new generation was committed."""

    recovery: RecoveryData


# --- chaos ---------------------------------------------------------------------------------------


class ChaosInjected(Details, frozen=True, kw_only=True):
    """A fault was ordered and is about to be injected."""

    fault: str
    at: float
    """Time of the fault, in seconds on CLOCK_MONOTONIC of the publishing host."""
    target: str
    """``node``, ``trainer``, ``coordinator`` or ``broker``."""
    device: int | None = None
    """Index of the trainer's device; null: all trainers of the node."""
    for_s: float | None = None
    factor: float | None = None
    """Factor by which computing takes longer (``slow``)."""
    size_mib: int | None = None
    """Maximum to fill (``fill_memory`` and ``fill_disk``)."""
    drop: float | None = None
    duplicate: float | None = None
    late_s: float | None = None
    """Longest delay of a message; with ``drop`` and ``duplicate``, the requested parameters of ``lossy``."""
    how: str | None = None
    """Behaviour of the device in health checks (``bad_device``)."""


class ChaosRejected(Details, frozen=True, kw_only=True):
    """A fault was requested of a node that does not allow chaos, or that cannot inject it."""

    fault: str


# --- service -------------------------------------------------------------------------------------


class CoordinatorStarted(Details, frozen=True, kw_only=True):
    """A coordinator started, for the first time or from its journal."""


class LeaderLost(Details, frozen=True, kw_only=True):
    """The coordinator that led is gone; the one that leads in its place publishes this."""

    leader: str
    """Name of the lost leader."""
    term: int
    how: Literal["last_will", "goodbye", "silence"]
    detected_at: float
    """Seconds on CLOCK_MONOTONIC of the coordinator that noticed."""


class LeaderElected(Details, frozen=True, kw_only=True):
    """A standby took over, with everything that the last leader knew."""

    leader: str
    term: int
    """Number of the leader's claim; it rises by one with each takeover."""
    took_s: float
    """Seconds since the loss was noticed."""


class StandbyIneligible(Details, frozen=True, kw_only=True):
    """A standby would not take over: it cannot continue from the leader's journal."""

    coordinator: str
    """Name of the standby."""
    why: str


class TakeoverRejected(Details, frozen=True, kw_only=True):
    """Nobody leads, and the remaining coordinator must not; it publishes this itself. Training continues."""

    coordinator: str
    why: str


class LoggingFailed(RateLimited, frozen=True, kw_only=True):
    """Steps are not logged at present, or some are left out; this is published once for each outage. Training
    continues, and the steps in the journal are logged later.
    """

    sink: str
    """``record``, ``tensorboard``, ``mlflow``, ``wandb``, or ``writer``, the process that writes to them."""
    detail: str


class BrokerLost(Details, frozen=True, kw_only=True):
    """The coordinator lost the broker; it publishes this when the broker is back."""


class BrokerRestored(Details, frozen=True, kw_only=True):
    """The broker is back; no node was declared dead meanwhile."""


class MessageIgnored(RateLimited, frozen=True, kw_only=True):
    """A stale message was ignored: it was of an older generation or incarnation."""

    why: str
    count: int
    """Number of such messages so far."""


class MessageRejected(RateLimited, frozen=True, kw_only=True):
    """A malformed, oversized or misaddressed payload was rejected."""

    topic: str
    why: str
