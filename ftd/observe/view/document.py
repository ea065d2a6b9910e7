"""The document of a run's report (``ftd report JOB --json FILE``, ``ftd local JOB --report FILE``).

``docs/reference/report.md`` explains every field. ``docs/reference/report.schema.json`` is generated from
these classes (``python -m ftd.observe.view.schema report``), and a test keeps the two equal. Times that end
in ``_ms`` are milliseconds, in ``_s`` seconds; ``at_s`` counts seconds from the first event of the run, on
the monotonic clock.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from ftd.observe.run_model import is_failure

SCHEMA_VERSION = 1

Outcome = Literal["finished", "failed", "stopped", "unfinished"]
UNDER_WAY = "it is still running"
"""``outcome_reason`` of a job that is still running."""


class ReportError(ValueError):
    """The JSON is not a report of a version that this program knows; the message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedJob:
    """The job of the run; ``None`` for what no state or event contained."""

    name: str | None
    job_id: str | None
    steps: int | None
    global_batch: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedStep:
    """One committed step."""

    step: int
    loss: float | None
    """``None`` if the loss was not a finite number, which JSON cannot express."""
    gradient_norm: float | None
    skipped: bool
    """Steps that committed without an update, because a gradient was not finite."""
    step_s: float | None
    generation: int | None
    at_s: float
    learning_rate: float | None = None
    """Learning rate of the optimizer's first parameter group; ``None`` if unknown."""
    weight: float | None = None
    """Rows of the global batch, or its tokens that count; ``None`` if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedEvaluation:
    """One evaluation of the state after ``step`` on the held-out data set."""

    step: int
    loss: float | None
    """``None`` if the loss was not a finite number."""
    weight: float | None
    """Rows, or the tokens that count."""
    metrics: dict[str, float | None]
    """The training function's own metrics."""
    took_s: float | None
    generation: int | None
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedStage:
    """The layers ``[first_layer, end_layer)`` of a pipeline and the devices (``node/index``) that compute
    them.
    """

    first_layer: int
    end_layer: int
    devices: tuple[str, ...]
    within: Literal["replicate", "shard", "tensor"] = "replicate"
    """Way in which the devices share the stage's work: each holds all of its parameters and state, a shard of
    them, or the part that it computes with.
    """
    replicas: int = 1
    """Number of groups of consecutive devices, each of which has all state of a tensor-parallel stage in parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedPipeline:
    stages: tuple[ReportedStage, ...]
    microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedFault:
    """A fault that was injected on purpose, and its consequences."""

    fault: str
    """``kill``, ``stop``, ``hang``, …"""
    target: str | None
    """``node`` (the daemon and its trainers), ``trainer``, ``coordinator`` or ``broker``."""
    device: int | None
    """The device of a trainer; ``None`` for the whole node."""
    node: str | None
    at_s: float
    detected_how: str | None
    detected_ms: float | None
    """Time from the fault until the coordinator knew about *this* node; ``None`` if it never had to."""
    total_ms: float | None
    """Time from *this* fault to the next committed step."""
    generations: tuple[int, ...]
    """Generations of the recoveries that it led to: the first one dealt with the loss, later ones took the
    node back.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRecovery:
    """A recovery from a failure, a join or a drain, up to the next committed step."""

    cause: str
    """``start``, ``node_lost``, ``trainer_lost``, ``connection_lost``, ``node_joined``, ``node_returned``,
    ``node_drained``, ``speed_changed``, ``protection_changed``, ``resumed`` (a pause ended), or ``loss_spike``."""
    node: str | None
    """The first of ``nodes``."""
    nodes: tuple[str, ...]
    detected_how: str | None
    measured_from: Literal["fault", "estimate", "detection"]
    """Begin of ``total_ms``: the injected fault, the last sign of life of what failed, or the moment when the
    coordinator first knew.
    """
    at_s: float
    """Time of the detection."""
    detected_ms: float | None
    """Time from the fault to its detection; ``None`` if measured from the detection. The phases, from this one
    to ``resume_ms``, add up to ``total_ms``.
    """
    waited_ms: float = 0.0
    """Time in which training was paused."""
    quiesce_ms: float
    plan_ms: float
    state_ms: float
    resume_ms: float
    total_ms: float
    """Time to the next committed step, as ``RecoveryCompleted`` has it."""
    commit_gap_ms: float | None
    """Time between the last commit before and the first commit after, as the coordinator saw them."""
    rolled_back_steps: int
    """Number of committed steps that were lost; always 0 while a live replica has the state."""
    recomputed_steps: int
    """1 if the step in flight had to be computed again."""
    tier: str
    """Source of the state: ``live_replica``; ``none`` if nothing had to move; ``replica`` if the owner of
    some optimizer state was lost; after a rollback ``memory``, ``decoded``, ``buddy`` or ``persistent``.
    """
    bytes_moved: int
    method: str
    reason: str
    decision: str | None
    """Outcome of the step in flight: ``roll_forward``, ``redo``, ``boundary`` or ``start``."""
    generation: int
    generations_tried: int
    """More than 1 if something else changed before the first step was committed."""
    step: int
    """The committed step from which training continued."""
    pipelines_before: tuple[ReportedPipeline, ...]
    pipelines_after: tuple[ReportedPipeline, ...]

    @property
    def failure(self) -> bool:
        """Whether the recovery began with a failure."""
        return is_failure(self.cause, self.rolled_back_steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedFailure:
    """A failure with its reason. Those of a node that differ in numbers at most are one entry, and the last one
    is shown.
    """

    event: str
    """``TrainerLost``, ``CheckpointAbandoned``, …"""
    node: str | None
    cause: str
    """For a trainer ``raised``, ``exited``, ``hung``, …; else empty."""
    error: str
    """The reason in a line; for a trainer the exception, or how the process ended."""
    times: int
    injected: bool
    """Whether faults that were injected on purpose caused all of them."""
    first_at_s: float
    last_at_s: float
    detail: str
    """Traceback or output of the last one; empty if there is none."""
    host: str
    log: str
    """Command or file on the host with the full traceback; empty: there is none that lasts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedPause:
    """A time in which training was paused, with the reason; it ends with the next recovery."""

    at_s: float
    needed: int | None
    present: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedQuarantine:
    """A node that failed repeatedly and was set aside, and was not readmitted during the run."""

    node: str
    at_s: float
    cause: str
    """Category of its failures, as in ``NodeQuarantined``."""
    reason: str
    """Text with the number of failures, the last error, and the command that readmits the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedProcesses:
    """Process ids of one node, oldest first; a second entry is a restart."""

    daemon: tuple[int, ...] = ()
    trainers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Process ids by device index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalState:
    step: int
    loss: float | None
    checksum: str | None
    """sha256 over the digests of all layers' parameters; ``None`` if the job did not finish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSummary:
    """The snapshots in the nodes' memory, or the persistent checkpoints."""

    completed: int = 0
    abandoned: int = 0
    newest_step: int | None = None
    """Step of the last save that was completed in this run."""
    size_bytes: int | None = None
    """Size of that save."""
    protection_or_location: str | None = None
    """For snapshots, the protection of the newest one; for checkpoints, their directory or URL."""
    last_abandon_reason: str | None = None
    """Reason for which the last abandoned save was abandoned."""
    median_s: float | None = None
    """Median time from the order to completion."""
    total_stall_s: float | None = None
    """Time that training waited for all snapshots together; ``None`` for checkpoints."""
    longest_stall_s: float | None = None
    """Longest time that training waited for one snapshot; ``None`` for checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The report of one run."""

    schema: int = SCHEMA_VERSION
    job: ReportedJob
    outcome: Outcome
    outcome_reason: str
    started_at: str | None
    """ISO-8601, UTC."""
    duration_s: float
    steps: tuple[ReportedStep, ...]
    start: ReportedRecovery | None
    """The first plan: it takes the same path as a recovery but is no failure."""
    recoveries: tuple[ReportedRecovery, ...]
    faults: tuple[ReportedFault, ...]
    pauses: tuple[ReportedPause, ...]
    processes: dict[str, ReportedProcesses]
    final: FinalState
    snapshots: SaveSummary = SaveSummary()
    checkpoints: SaveSummary = SaveSummary()
    evaluations: tuple[ReportedEvaluation, ...] = ()
    quarantined: tuple[ReportedQuarantine, ...] = ()
    failures: tuple[ReportedFailure, ...] = ()
    """Failures with their reasons, in order of the first time."""
    events: tuple[dict[str, Any], ...] = ()
    """Newest events of the run but ``StepCommitted``, from which ``ftd story`` tells what happened."""

    @property
    def under_way(self) -> bool:
        """Whether the job is still running."""
        return self.outcome == "unfinished" and self.outcome_reason == UNDER_WAY

    @classmethod
    def from_json(cls, document: object) -> "Report":
        """Convert and check a report that was read from a file.

        :raises ReportError: the document has another schema version, or a field is missing or of the wrong
            type.
        """
        version = document.get("schema") if isinstance(document, dict) else None
        if version != SCHEMA_VERSION:
            raise ReportError(f"schema is {version!r}; this program reads version {SCHEMA_VERSION}")
        try:
            return msgspec.convert(document, cls)
        except msgspec.ValidationError as error:
            raise ReportError(str(error)) from error
