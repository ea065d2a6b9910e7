"""The cluster's phases: the state of each, and one declared table that names every phase and event.

The state of a phase holds only what exists in that phase, so no code can ask for anything else.
``ClusterPhase`` is what outside tools see; RECOVERING is two states, ``Planning`` before the Resume and
``Resuming`` after it.
"""

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import ClassVar, Self

from planner.values import Device, PipelinePlacement, Situation
from statemachine.cluster.rules import Decision, Resumption
from statemachine.events import RestoreChecked
from statemachine.messages.common import Finished, Resumed
from statemachine.messages.values import (
    CheckpointRecord,
    ClusterPhase,
    DeviceReport,
    MeasuredFrom,
    QuiesceMode,
)


@dataclass(slots=True, kw_only=True)
class ActiveRecovery:
    """The purpose of one reconfiguration and the times at which its phases ended, for its
    ``RecoveryCompleted``.
    """

    cause: str
    nodes: list[str]
    detected_how: str | None
    detected_at: float
    began_at: float
    """Time of the fault, or its best estimate; ``detected_at`` if neither is known."""
    measured_from: MeasuredFrom = "detection"
    """Meaning of ``began_at``."""
    waited_until: float | None = None
    """End of the last pause in which training waited for nodes; ``None`` if it did not pause."""
    tried: int = 0
    recomputed_steps: int = 0
    rolled_back_steps: int = 0
    tier: str | None = None
    """Source of the state, if it is not live replicas."""
    before: tuple[PipelinePlacement, ...] = ()
    """Pipelines before the recovery; empty if an older program began it."""
    quiesced_at: float | None = None
    planned_at: float | None = None
    resumed_at: float | None = None
    committed_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """No generation has been started yet: there is no job, or it is being built and measured."""

    phase: ClassVar = ClusterPhase.WAITING


@dataclass(slots=True, kw_only=True)
class Quiescing:
    """A generation from its Quiesce until all reports are there."""

    phase: ClassVar = ClusterPhase.QUIESCING
    generation: int
    recovery: ActiveRecovery
    mode: QuiesceMode
    began_at: float
    expected: dict[str, None]
    """Nodes that were sent the Quiesce and are waited for; nodes that were lost since are removed."""
    reports: dict[str, tuple[DeviceReport, ...]] = field(default_factory=dict)
    """Reports of these nodes alone."""
    planned_ahead_for: int = 0
    """Number of expected nodes when the planner was last ordered to plan ahead."""

    @property
    def reported(self) -> bool:
        """Return whether all expected nodes have reported."""
        return len(self.reports) == len(self.expected)


@dataclass(slots=True, kw_only=True)
class Planning:
    """A generation from the decision until its Resume."""

    phase: ClassVar = ClusterPhase.RECOVERING
    generation: int
    recovery: ActiveRecovery
    mode: QuiesceMode
    """Mode of its Quiesce, for a coordinator that restarts now and has to repeat it."""
    began_at: float
    expected: dict[str, None]
    """Nodes that answered the Quiesce."""
    members: set[str]
    """Nodes whose reports counted. The plan uses some or all of them."""
    decision: Decision
    situation: Situation | None = None
    """The situation for which a plan is requested; ``None`` before ``ask_plan``."""
    requested_protection: str = ""
    """The protection that is requested with the plan: a scheme, or ``auto``."""
    left_out: frozenset[str] = frozenset()
    """Nodes that are to leave and that the plan is requested without (``drains``)."""
    drain_problems: dict[frozenset[str], str] = field(default_factory=dict)
    """Sets of such nodes that there is no plan without, each with the reason, in the order of the requests."""
    loss_reason: str = ""
    """Reason why live replicas are not enough, in the planner's words."""
    sources: tuple[str, ...] = ()
    """Nodes whose parts of the snapshot the restore counts on."""
    restore_check: RestoreChecked | None = None
    """Result of the check that the snapshot can be restored; the plan is then for its step."""
    checkpoint: CheckpointRecord | None = None
    """The checkpoint from which the plan continues instead of a snapshot."""


@dataclass(slots=True, kw_only=True)
class TrainingGroup:
    """The training group of a generation, from its Resume on."""

    generation: int
    began_at: float
    members: set[str]
    """Nodes whose reports counted in the decision."""
    resumption: Resumption
    planned: tuple[str, ...]
    """Nodes of its plan."""
    sources: tuple[str, ...] = ()
    """Nodes whose parts of the snapshot are restored."""
    holdings: dict[Device, frozenset[int]] = field(default_factory=dict)
    """Layers that devices held at the decision; empty after a restart of the coordinator."""
    resumed: dict[str, Resumed] = field(default_factory=dict)
    finished: dict[str, Finished] = field(default_factory=dict)
    suspected_at_step: int = 0
    """The committed step when a trainer first saw a connection break, or when the suspicion was last checked."""
    seen_committing: bool = False
    """Whether one check has found new commits although a connection was reported broken."""

    @property
    def needed(self) -> set[str]:
        """Return the nodes of its plan and those that hold copies of its snapshots."""
        return {*self.planned, *self.resumption.replica_peers.values()}

    @property
    def all_resumed(self) -> bool:
        """Return whether every planned node has resumed."""
        return all(name in self.resumed for name in self.planned)

    @property
    def all_finished(self) -> bool:
        """Return whether every planned node has reported that all steps are done."""
        return all(name in self.finished for name in self.planned)


@dataclass(slots=True, kw_only=True)
class Resuming(TrainingGroup):
    """A group that is forming."""

    phase: ClassVar = ClusterPhase.RECOVERING
    recovery: ActiveRecovery


@dataclass(slots=True, kw_only=True)
class Running(TrainingGroup):
    """A group that trains."""

    phase: ClassVar = ClusterPhase.RUNNING
    recovery: ActiveRecovery | None = None
    """The recovery under way; ``None`` once the group has committed its first step."""

    @classmethod
    def of(cls, group: Resuming) -> Self:
        """Return the group as one that trains."""
        return cls(**{one.name: getattr(group, one.name) for one in fields(group)})


@dataclass(slots=True, kw_only=True)
class Paused:
    """A generation that could not be resumed and waits for something."""

    phase: ClassVar = ClusterPhase.PAUSED
    generation: int
    expected: dict[str, None]
    members: set[str]
    """Members as in ``Planning``; empty if no node was left to report."""
    sources: tuple[str, ...] = ()
    decided: bool = False
    """Whether the generation ended after the decision."""
    reason: str
    """Condition for which the generation waits."""
    pause_limited: bool = False
    """Whether only absent nodes hold some state, so that the pause ends after a time limit."""
    interrupted: ActiveRecovery | None = None
    """The recovery that could not go on, without the nodes that it names, which may be removed; the one that ends
    the pause continues its times and recomputes the steps that it discarded.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The job has ended."""

    phase: ClusterPhase
    """FINISHED or FAILED."""
    outcome: str
    """Outcome of the job, in words."""


State = Waiting | Quiescing | Planning | Resuming | Running | Paused | Ended


class PhaseEvent(StrEnum):
    JOB_ACCEPTED = "JOB_ACCEPTED"
    GENERATION_STARTED = "GENERATION_STARTED"
    REPORTS_COMPLETED = "REPORTS_COMPLETED"
    GROUP_RESUMED = "GROUP_RESUMED"
    NODES_MISSING = "NODES_MISSING"
    JOB_ENDED = "JOB_ENDED"
    """The job finished, or a user stopped it."""
    JOB_FAILED = "JOB_FAILED"


_P = ClusterPhase

_ROWS: dict[ClusterPhase, tuple[ClusterPhase | None, ...]] = {
    # JOB_ACCEPTED, GENERATION_STARTED, REPORTS_COMPLETED, GROUP_RESUMED, NODES_MISSING, JOB_ENDED, JOB_FAILED
    _P.WAITING: (_P.WAITING, _P.QUIESCING, None, None, None, _P.FINISHED, _P.FAILED),
    _P.RUNNING: (None, _P.QUIESCING, None, None, None, _P.FINISHED, _P.FAILED),
    _P.QUIESCING: (None, _P.QUIESCING, _P.RECOVERING, None, _P.PAUSED, _P.FINISHED, _P.FAILED),
    _P.RECOVERING: (None, _P.QUIESCING, None, _P.RUNNING, _P.PAUSED, _P.FINISHED, _P.FAILED),
    _P.PAUSED: (None, _P.QUIESCING, None, None, None, _P.FINISHED, _P.FAILED),
    _P.FINISHED: (_P.WAITING, None, None, None, None, None, None),
    _P.FAILED: (_P.WAITING, None, None, None, None, None, None),
}
"""Phase that follows each event, in the order of ``PhaseEvent``; ``None``: the event is impossible.

A job is accepted only when none is under way. Reports belong to QUIESCING, and forming a group belongs to
RECOVERING. Missing nodes are noticed only while a generation is made. Nothing can happen to a job that has ended.
"""

TABLE: dict[tuple[ClusterPhase, PhaseEvent], ClusterPhase] = {
    (phase, event): after
    for phase, row in _ROWS.items()
    for event, after in zip(PhaseEvent, row, strict=True)
    if after is not None
}

OVER = frozenset({_P.FINISHED, _P.FAILED})


class MachineError(RuntimeError):
    """A bug in the machine itself: a pair happened that the table calls impossible."""
