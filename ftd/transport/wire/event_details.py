"""What ``details`` holds, event by event: job, nodes, reconfiguration, chaos, service.

One Struct for each event, of its name. They check what we publish (``ftd.transport.wire.checking``) and make the
contract (``ftd.transport.wire.contract``); docs/reference/events.md
tells the same to people. The rest: ``snapshot_details``.
"""

from typing import Literal

import msgspec

from planner.values import Recompute, Within
from statemachine.messages.values import FailureCause, QuiesceMode


class Details(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nothing but what the envelope says."""


class RateLimited(Details, frozen=True, kw_only=True):
    """Told at most once a second for each node and reason."""

    suppressed: int = 0
    """How many like it were left out since the one before."""


class StageData(Details, frozen=True, kw_only=True):
    """A stage of a pipeline."""

    first_layer: int
    end_layer: int
    """One behind the last."""
    devices: list[str]
    """``node/index``."""
    recompute: Recompute = "none"
    """Which activations are computed again in the backward pass: none, all but matrix products, or all."""
    within: Within = "replicate"
    """What each device of the stage holds: all of its parameters and state, or a shard of them."""


class PipelineData(Details, frozen=True, kw_only=True):
    """A pipeline: all layers, cut into stages."""

    stages: list[StageData]
    microbatches: int
    """Its share of a step."""


# --- job -----------------------------------------------------------------------------------------


class JobSubmitted(Details, frozen=True, kw_only=True):
    """A job was accepted."""

    name: str
    steps: int
    job: str
    """Its id."""
    global_batch: int
    """Samples of one step, over all nodes."""


class JobPrepared(Details, frozen=True, kw_only=True):
    """What the layers cost is known, templates are ready."""


class StepCommitted(Details, frozen=True, kw_only=True):
    """A step is committed; in order, without gaps."""

    loss: float | None
    """Mean over the global batch; null where it was no finite number."""
    gradient_norm: float | None
    """Before clipping; null where it was no finite number."""
    skipped: bool
    """Committed without an update, because a gradient was not finite."""
    step_s: float
    samples_per_s: float | None
    learning_rate: float
    """Used for this step, of the optimizer's first parameter group; 0 where it is unknown."""
    weight: float | None
    """Total weight of the global batch's loss: rows, or the tokens that count; null where it was no finite
    number."""
    tokens_per_s: float | None
    """``weight`` per second; null where the loss has at most one term per sample."""
    loss_scale: float
    """float16: the factor by which the loss was multiplied; 1 otherwise."""
    metrics: dict[str, float | None]
    """Own metrics of the training function, averaged over the global batch; null: no finite number."""
    mfu: float | None = None
    """Model FLOPs utilisation of all planned devices, from 0 to 1; null where their peak is unknown."""


class Evaluated(Details, frozen=True, kw_only=True):
    """The model behind a committed step was evaluated on the held-out data set."""

    loss: float | None
    """Mean over the held-out samples; null where it was no finite number."""
    weight: float
    """Total weight of the loss: rows, or the tokens that count."""
    metrics: dict[str, float | None]
    """Own metrics of the training function, averaged over the held-out samples."""
    took_s: float


class JobFinished(Details, frozen=True, kw_only=True):
    """All steps are done."""

    checksum: str
    """SHA-256 over the digests of all layers' parameters."""


class JobFailed(Details, frozen=True, kw_only=True):
    """The job cannot go on; the reason says why and what would help."""


class JobStopped(Details, frozen=True, kw_only=True):
    """A user stopped the job."""


class UpdateSkipped(Details, frozen=True, kw_only=True):
    """The gradients of a committed step were not finite, so nothing was updated. Told of the first in a row,
    the tenth, the hundredth …"""

    loss: float | None
    steps: int
    """In a row, this one included."""


class ReplicasDiverged(Details, frozen=True, kw_only=True):
    """Owners of a layer ended with different parameters."""

    layer: int
    digests: list[str]


# --- nodes ---------------------------------------------------------------------------------------


class NodeJoined(Details, frozen=True, kw_only=True):
    """A node said Hello and was taken in."""

    devices: int
    host: str
    incarnation: int


class NodeLost(Details, frozen=True, kw_only=True):
    """A node is OFFLINE."""

    how: Literal["last_will", "silence", "goodbye", "no_answer"]
    detected_at: float
    """On the coordinator's CLOCK_MONOTONIC, in seconds."""
    incarnation: int


class TrainerLost(Details, frozen=True, kw_only=True):
    """A trainer failed; its node is UNHEALTHY."""

    device: int
    cause: FailureCause
    detail: str
    """Exit status, traceback, the end of its stderr."""


class TrainerStarted(Details, frozen=True, kw_only=True):
    """A trainer's process is up."""

    device: int
    pid: int
    daemon_pid: int


class NodeRecovered(Details, frozen=True, kw_only=True):
    """All trainers of an UNHEALTHY node are back."""


class StragglerDetected(Details, frozen=True, kw_only=True):
    """A node has computed slowly for a while."""

    speed: float
    """0.25: at a quarter of the others' speed."""
    previous_speed: float
    microbatch_ms: list[float]
    """Computing one microbatch, of each device."""


class StragglerRecovered(StragglerDetected, frozen=True, kw_only=True):
    """A straggler is as quick as the others again."""


class NodeDraining(Details, frozen=True, kw_only=True):
    """A node is to leave, or cannot be released yet."""

    nodes: list[str] = []
    """Where several wait."""


class NodeReleased(Details, frozen=True, kw_only=True):
    """A draining node holds nothing that the job needs and may go."""


class NodeRemoved(Details, frozen=True, kw_only=True):
    """A node that is OFFLINE is listed no longer; should it come back, it joins as a new one."""

    incarnation: int


class NodeRejected(RateLimited, frozen=True, kw_only=True):
    """A node may not join: its name is taken, or it has the wrong number of devices."""

    incarnation: int


class NodeFenced(Details, frozen=True, kw_only=True):
    """A stale incarnation was told to end its trainers and come back as a new one."""

    incarnation: int


class PeerSuspected(RateLimited, frozen=True, kw_only=True):
    """A hint: a trainer saw a connection break."""


# --- reconfiguration -----------------------------------------------------------------------------


class GenerationStarted(Details, frozen=True, kw_only=True):
    """Everybody is told to stop."""

    mode: QuiesceMode
    why: str


class Quiesced(Details, frozen=True, kw_only=True):
    """All reports are in; the step to go on from is decided."""

    decision: Literal["start", "boundary", "redo", "roll_forward"]
    in_flight: bool
    """A step was being computed."""


class ConsideredPlanData(Details, frozen=True, kw_only=True):
    """A layout that was weighed against others."""

    method: str
    sizes: list[int]
    """Nodes of each pipeline."""
    iteration_s: float
    transfer_bytes: int | None
    transfer_s: float | None
    expected_iteration_s: float
    """Of a step, if the transfer is paid back until the next failure."""


class PlanChosen(Details, frozen=True, kw_only=True):
    """Who computes what."""

    method: str
    reason: str
    pipelines: list[PipelineData]
    transfers: int
    transfer_bytes: int
    from_replicas: list[int]
    """ZeRO-1: layers of whose optimizer state a part is left as a replica only."""
    estimated_iteration_s: float
    idle_nodes: list[str]
    considered: list[ConsideredPlanData]
    """The layouts that were weighed, the plan's own first."""


class ReplanSkipped(Details, frozen=True, kw_only=True):
    """A plan for other speeds of nodes was weighed and would not save enough."""

    nodes: list[str]
    saved_s: float
    step_s: float


class ClusterPaused(Details, frozen=True, kw_only=True):
    """Too few nodes are left."""

    needed: int | None
    present: int


class TrainingResumed(Details, frozen=True, kw_only=True):
    """All planned nodes met under the new generation."""

    bytes_moved: int
    rendezvous_s: float
    state_s: float


class RecoveryData(Details, frozen=True, kw_only=True):
    """One way from a failure, a join or a drain to the next committed step (docs/reference/report.md)."""

    cause: str
    nodes: list[str]
    detected_how: str | None
    detected_at: float
    quiesce_ms: float
    plan_ms: float
    state_ms: float
    resume_ms: float
    total_ms: float
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
    """The first step of the new generation is committed."""

    recovery: RecoveryData


# --- chaos ---------------------------------------------------------------------------------------


class ChaosInjected(Details, frozen=True, kw_only=True):
    """A fault was ordered and will strike."""

    fault: str
    at: float
    """When, on CLOCK_MONOTONIC of the publishing host, in seconds."""
    target: str
    """``node``, ``trainer``, ``coordinator`` or ``broker``."""
    device: int | None = None
    """Of a trainer; null: all of the node."""
    for_s: float | None = None
    factor: float | None = None
    """Of ``slow``: computing takes so many times as long."""
    size_mib: int | None = None
    """Of ``fill_memory`` and ``fill_disk``: what is taken, at most."""
    drop: float | None = None
    duplicate: float | None = None
    late_s: float | None = None
    """Of ``lossy``, as asked for."""


class ChaosRejected(Details, frozen=True, kw_only=True):
    """A fault was asked of a node that does not allow chaos, or that cannot do it."""

    fault: str


# --- service -------------------------------------------------------------------------------------


class CoordinatorStarted(Details, frozen=True, kw_only=True):
    """For the first time, or restored from its journal."""


class LeaderLost(Details, frozen=True, kw_only=True):
    """The coordinator that led is gone; told by the one that leads in its place."""

    leader: str
    """Its name."""
    term: int
    how: Literal["last_will", "goodbye", "silence"]
    detected_at: float
    """``monotonic`` of who noticed."""


class LeaderElected(Details, frozen=True, kw_only=True):
    """A standby took over; what the last leader knew, it knows."""

    leader: str
    term: int
    """One more with each taking over."""
    took_s: float
    """Since the loss was noticed."""


class StandbyIneligible(Details, frozen=True, kw_only=True):
    """A coordinator stands by and would not take over: it cannot go on from the leader's journal."""

    coordinator: str
    """Its name."""
    why: str


class TakeoverRejected(Details, frozen=True, kw_only=True):
    """Nobody leads, and the coordinator that is left must not: told by itself. Training goes on."""

    coordinator: str
    why: str


class LoggingFailed(RateLimited, frozen=True, kw_only=True):
    """Steps are not logged for now, or some are left out; said once for each outage. Training goes on, and
    what the journal has is logged later."""

    sink: str
    """``record``, ``tensorboard``, ``mlflow``, ``wandb``, or ``writer``: the process."""
    detail: str


class BrokerLost(Details, frozen=True, kw_only=True):
    """The coordinator lost the broker (told when it is back)."""


class BrokerRestored(Details, frozen=True, kw_only=True):
    """The broker is back; nobody was declared dead meanwhile."""


class MessageIgnored(RateLimited, frozen=True, kw_only=True):
    """A stale message: of an older generation or incarnation."""

    why: str
    count: int
    """Of this kind, so far."""


class MessageRejected(RateLimited, frozen=True, kw_only=True):
    """A malformed, oversized or misaddressed payload."""

    topic: str
    why: str
