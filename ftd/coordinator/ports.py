"""The interfaces between a coordinator and its environment, as small protocols.

The daemon (``ftd.coordinator.daemon``) implements them with the system's clocks, MQTT, SQLite, a planning
process and threads; the simulator (``ftd.faults.sim``) with virtual time and memory. Everything else runs
on the current asyncio event loop.
"""

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ftd.driver import Clock, Driver
from ftd.transport.ports import OpenSession
from ftd.transport.wire.public import EventMessage
from statemachine.effects import (
    AbandonCheckpoint,
    BuildTemplates,
    CancelTemplates,
    CheckDrain,
    CommitCheckpoint,
    ComparePlan,
    ComputePlan,
    EmitEvent,
    ExportCheckpoint,
    FindCheckpoint,
    PlanAhead,
)
from statemachine.events import Event
from statemachine.messages.values import CheckpointRecord, Job

Feed = Callable[[Event], None]
"""Function that takes an event for the cluster machine."""


class Transport(Protocol):
    """The broker of the cluster."""

    @property
    def leader_client_id(self) -> str:
        """The client id of the cluster's leader."""

    @property
    def session(self) -> OpenSession:
        """Function that opens a session."""


class Disk(Protocol):
    """The disk that holds a coordinator's journal."""

    @property
    def boot_id(self) -> str:
        """Identifier of the host's last start. While it stays the same, everything that was written is there."""

    def open(self, directory: Path) -> sqlite3.Connection:
        """Open the database in ``directory``, in autocommit mode.

        :raises JournalError, OSError, sqlite3.Error: it cannot be opened, or another coordinator has it open.
        """
        ...

    def close(self) -> None:
        """Let another coordinator open the database."""


class PlanningOperations(Protocol):
    """Operations of the planner. They feed their results as events."""

    @property
    def progress(self) -> tuple[int, int] | None:
        """Number of instantiations that are precomputed, and of all; ``None`` while none are computed."""

    def prepare(self) -> None:
        """Prepare for ``build``, while a model is being measured."""

    def build(self, effect: BuildTemplates) -> None:
        """Feed TemplatesReady or TemplatesFailed."""

    def cancel(self, effect: CancelTemplates) -> None:
        """Stop precomputing: the job is over."""

    def compute(self, effect: PlanAhead | ComputePlan | ComparePlan | CheckDrain) -> None:
        """Feed PlanReady, PlanImpossible, PlanCompared or DrainChecked; nothing for PlanAhead."""

    def check_solver(self, answer: Callable[[str], None]) -> None:
        """Call ``answer`` with the reason why jobs cannot use the Pyomo models here, or with ``""``."""


class CheckpointOperations(Protocol):
    """Operations on the locations of persistent checkpoints. They feed their results as events."""

    def commit(self, effect: CommitCheckpoint) -> None:
        """Feed CheckpointCommitted or CheckpointCommitFailed."""

    def abandon(self, effect: AbandonCheckpoint) -> None:
        """Remove the files of an attempt."""

    def export(self, effect: ExportCheckpoint) -> None:
        """Feed ExportCompleted or ExportFailed."""

    def find(self, effect: FindCheckpoint) -> None:
        """Feed CheckpointFound."""

    def find_initial(self, job: Job, then: Callable[[CheckpointRecord | None, str], None]) -> None:
        """Call ``then`` with the checkpoint that the job begins from, and with the reason why it may not
        begin, or ``""``.
        """


class Observer(Protocol):
    """Metrics, dashboard and tracking: they observe a coordinator and decide nothing."""

    def on_own_event(self, event: EmitEvent) -> None:
        """Take an event of this coordinator, before the rate limiter may drop it."""

    def on_node_event(self, message: EventMessage) -> None:
        """Take an event of a node."""

    def on_published(self, message: EventMessage, own: bool) -> None:
        """Take an event that is published; ``own``: by a coordinator."""

    def on_broker_alive(self) -> None:
        """Note that the broker delivered something."""

    def on_state(self, state: dict[str, Any]) -> None:
        """Take the cluster's state, this coordinator's or the present leader's."""

    def on_acknowledged(self, seconds: float) -> None:
        """Note how long the broker took for a message."""

    def track_job(self, job: Job | None, term: int, outcome: str | None) -> None:
        """Log this job's steps; see ``ftd.observe.tracking.writer_process.TrackingWriterProcess.set_job``."""

    def on_status(self, text: str) -> None:
        """Take a description of what this coordinator does."""

    def on_stopping(self) -> None:
        """Note that this coordinator is about to leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The program that runs. Coordinators of several versions may be in one cluster."""

    version: str
    schema: int
    """Schema of the journals that it writes; see ``statemachine.cluster.durable.durable``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """All ports of one coordinator process."""

    program: Program
    clock: Clock
    transport: Transport
    disk: Disk
    planning: Callable[[Feed, Driver, Callable[[], None]], PlanningOperations]
    """Factory of the planner; the last argument is called when its progress has changed."""
    checkpoints: Callable[[Feed, Driver], CheckpointOperations]
    observer: Observer
