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
from ftd.transport.mqtt.session import ignore
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Observer:
    """Callbacks for metrics, dashboard and tracking, which observe a coordinator and decide nothing."""

    on_own_event: Callable[[EmitEvent], None] = ignore
    """Callback for an event of this coordinator, before the rate limiter may drop it."""
    on_node_event: Callable[[EventMessage], None] = ignore
    """Callback for an event of a node."""
    on_published: Callable[[EventMessage, bool], None] = ignore
    """Callback for an event that is published; ``True``: by a coordinator."""
    on_broker_alive: Callable[[], None] = ignore
    """Callback for anything that the broker delivers."""
    on_state: Callable[[dict[str, Any]], None] = ignore
    """Callback for the cluster's state, this coordinator's or the present leader's."""
    on_acknowledged: Callable[[float], None] = ignore
    """Callback for the seconds that the broker took for a message."""
    track_job: Callable[[Job | None, int, str | None], None] = ignore
    """Function that has this job's steps logged; see
    ``ftd.observe.tracking.writer_process.TrackingWriterProcess.set_job``.
    """
    on_status: Callable[[str], object] = ignore
    """Callback for a description of what this coordinator does."""
    on_stopping: Callable[[], object] = ignore
    """Callback for when this coordinator is about to leave."""


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
