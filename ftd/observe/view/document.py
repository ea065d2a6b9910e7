"""The report of a run (``ftd local --report FILE.json``): what it contains.

``docs/reference/report.md`` explains every field; ``docs/reference/report.schema.json`` is generated from these classes
(``python -m ftd.observe.view.schema report``) and a test keeps the two equal. Times ending in ``_ms`` are
milliseconds, in ``_s`` seconds; ``at_s`` counts seconds from the first event of the run, on the monotonic
clock.
"""

from dataclasses import dataclass, field
from typing import Literal

import msgspec

SCHEMA_VERSION = 1

Outcome = Literal["finished", "failed", "stopped", "unfinished"]
UNDER_WAY = "it is under way"
"""Reason of what is unfinished while it goes on."""


class ReportError(ValueError):
    """This JSON is no report of a version that this program knows; the message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedJob:
    """What was run; ``None`` where no state or event told it."""

    name: str | None
    job_id: str | None
    steps: int | None
    global_batch: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedStep:
    """One committed step."""

    step: int
    loss: float | None
    """``None`` where the loss was not a finite number (JSON has no word for it)."""
    gradient_norm: float | None
    skipped: bool
    """Committed without an update, because a gradient was not finite."""
    step_s: float | None
    generation: int | None
    at_s: float
    learning_rate: float | None = None
    """Of the optimizer's first parameter group; ``None`` where it is unknown."""
    weight: float | None = None
    """Rows of the global batch, or its tokens that count; ``None`` where it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedEvaluation:
    """One evaluation on the held-out data set, of the state after ``step``."""

    step: int
    loss: float | None
    """``None`` where the loss was not a finite number."""
    weight: float | None
    """Rows, or the tokens that count."""
    metrics: dict[str, float | None]
    """Own metrics of the training function."""
    took_s: float | None
    generation: int | None
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedStage:
    """Layers ``[first_layer, end_layer)`` on these devices (``node/index``)."""

    first_layer: int
    end_layer: int
    devices: tuple[str, ...]
    within: Literal["replicate", "shard", "tensor"] = "replicate"
    """How the devices share the stage's work: each holds all of its parameters and state, a shard of them, or the part
    that it computes with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedPipeline:
    stages: tuple[ReportedStage, ...]
    microbatches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedFault:
    """A fault that was injected on purpose, and what came of it."""

    fault: str
    """``kill``, ``stop``, ``hang``, …"""
    target: str | None
    """``node`` (the daemon and its trainers), ``trainer``, ``coordinator`` or ``broker``."""
    device: int | None
    """Of a trainer; ``None``: all of the node."""
    node: str | None
    at_s: float
    detected_how: str | None
    detected_ms: float | None
    """From the fault until the coordinator knew of *this* node; ``None`` when it never had to."""
    total_ms: float | None
    """From *this* fault to the next committed step."""
    generations: tuple[int, ...]
    """Recoveries it led to: the first got over it, later ones brought the node back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRecovery:
    """One way from a failure, a join or a drain to the next committed step."""

    cause: str
    """``start``, ``node_lost``, ``trainer_lost``, ``connection_lost``, ``node_joined``, ``node_returned``,
    ``node_drained``, ``speed_changed``, ``protection_changed``, or ``resumed`` (enough nodes again after a
    pause)."""
    node: str | None
    """The first of ``nodes``."""
    nodes: tuple[str, ...]
    detected_how: str | None
    measured_from: Literal["fault", "detection"]
    """Where ``total_ms`` begins: the injected fault, or the coordinator's first knowledge."""
    at_s: float
    """When it was detected."""
    detected_ms: float | None
    """Fault to detection; ``None`` when measured from the detection."""
    quiesce_ms: float
    plan_ms: float
    state_ms: float
    resume_ms: float
    total_ms: float
    commit_gap_ms: float | None
    """Time between the last commit before and the first after, as the coordinator saw them."""
    rolled_back_steps: int
    """Committed steps that were lost: always 0 while a live replica has the state."""
    recomputed_steps: int
    """1 when the step in flight had to be done again."""
    tier: str
    """Where state came from: ``live_replica``, or ``none`` when nothing had to move; ``replica`` where some
    optimizer state's owner was lost; after a rollback ``memory``, ``decoded``, ``buddy``, ``persistent``."""
    bytes_moved: int
    method: str
    reason: str
    decision: str | None
    """What became of the step in flight: ``roll_forward``, ``redo``, ``boundary``, ``start``."""
    generation: int
    generations_tried: int
    """More than 1 when more changed before the first step was committed."""
    step: int
    """Training went on after this committed step."""
    pipelines_before: tuple[ReportedPipeline, ...]
    pipelines_after: tuple[ReportedPipeline, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedPause:
    """Too few nodes were left; ends with the next recovery."""

    at_s: float
    needed: int | None
    present: int | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedProcesses:
    """Process ids of one node, oldest first: a second entry is a restart."""

    daemon: tuple[int, ...] = ()
    trainers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Device index → process ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalState:
    step: int
    loss: float | None
    checksum: str | None
    """sha256 over the digests of all layers' parameters; ``None`` when the job did not finish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSummary:
    """Snapshots in the nodes' memory, or persistent checkpoints."""

    completed: int = 0
    abandoned: int = 0
    newest_step: int | None = None
    """Of the last that was completed in this run."""
    size_bytes: int | None = None
    """Of that one."""
    protection_or_location: str | None = None
    """Of snapshots, the newest one's protection; of checkpoints, their directory or URL."""
    last_abandon_reason: str | None = None
    """Why the last that was given up was."""
    median_s: float | None = None
    """Median time from the order until it was complete."""
    total_stall_s: float | None = None
    """How long training waited for all of them together; ``None`` of checkpoints."""
    longest_stall_s: float | None = None
    """For one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The whole report."""

    schema: int = SCHEMA_VERSION
    job: ReportedJob
    outcome: Outcome
    outcome_reason: str
    started_at: str | None
    """ISO-8601, UTC."""
    duration_s: float
    steps: tuple[ReportedStep, ...]
    start: ReportedRecovery | None
    """The first plan: the same path as a recovery, but no failure."""
    recoveries: tuple[ReportedRecovery, ...]
    faults: tuple[ReportedFault, ...]
    pauses: tuple[ReportedPause, ...]
    processes: dict[str, ReportedProcesses]
    final: FinalState
    snapshots: SaveSummary = SaveSummary()
    checkpoints: SaveSummary = SaveSummary()
    evaluations: tuple[ReportedEvaluation, ...] = ()

    @property
    def under_way(self) -> bool:
        """The job goes on."""
        return self.outcome == "unfinished" and self.outcome_reason == UNDER_WAY

    def to_bytes(self) -> bytes:
        """An indented JSON document, newline at its end."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    @classmethod
    def from_json(cls, document: object) -> "Report":
        """Check a report read from a file.

        :raises ReportError: another schema version, or a field that is missing or of the wrong type.
        """
        version = document.get("schema") if isinstance(document, dict) else None
        if version != SCHEMA_VERSION:
            raise ReportError(f"schema is {version!r}; this program reads version {SCHEMA_VERSION}")
        try:
            return msgspec.convert(document, cls)
        except msgspec.ValidationError as error:
            raise ReportError(str(error)) from error
