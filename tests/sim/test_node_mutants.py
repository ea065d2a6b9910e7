"""Planted bugs in the node's own code: its effects, trainers, messages and snapshots. Each must be found."""

from typing import Any

import pytest

from ftd.faults.sim import faults
from ftd.faults.sim.simulation import SeedOverrides, Simulation
from ftd.node import instructions
from ftd.node.health import HealthChecker
from ftd.node.node import Node
from ftd.node.ports import TrainerProcess
from ftd.node.publisher import NodePublisher
from ftd.node.supervisor import TrainerSupervisor
from ftd.snapshots.persist import Persister
from ftd.snapshots.service import SnapshotService
from ftd.snapshots.trainer_staging import TrainerStaging
from ftd.transport.wire.codec import decode_to_nodes
from statemachine import effects
from statemachine.agent.events import AgentStarted, SnapshotCopyCommitted
from statemachine.effects import SendSnapshotCopy
from statemachine.messages.cluster import ToNode
from statemachine.messages.values import Restore
from tests.helpers.seeds import found

EVENTS = ("GenerationStarted", "Quiesced", "PlanChosen", "StepCommitted")
CUTS = SeedOverrides(
    triggered_faults=tuple((name, faults.cut_node, passed) for name in EVENTS for passed in (1, 3))
)
RESTARTS = SeedOverrides(
    triggered_faults=tuple((name, faults.restart_broker, passed) for name in EVENTS[:3] for passed in (0, 2))
)
ROLLBACKS = SeedOverrides(
    protection="aec",
    zero1=False,
    triggered_faults=tuple(("SnapshotCompleted", faults.fail_all_trainers, passed) for passed in (0, 1, 3)),
)


def restart_all_daemons(sim: Simulation) -> None:
    """SIGKILL all daemons, whose hosts keep the snapshots in memory."""
    for node in sim.nodes.values():
        node.crash()
        sim.world.call_later(sim.world.between(0.1, 1.0), sim.start_if_down, node)


# --- the daemon --------------------------------------------------------------------------------------


def test_a_fenced_node_that_keeps_its_incarnation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def perform(self: Node, effect: effects.Effect) -> None:
        if not isinstance(effect, effects.RenewIncarnation):
            await real(self, effect)
            return
        started = AgentStarted(**self.driver.stamp(), incarnation=self.incarnation, facts=self._ports.facts())
        self.driver.feed(started)

    real = Node._perform
    monkeypatch.setattr(Node, "_perform", perform)
    found("after it was fenced", overrides=CUTS)


def test_a_daemon_that_does_not_report_what_is_in_its_memory_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scan(self: SnapshotService) -> None:
        return

    monkeypatch.setattr(SnapshotService, "scan", scan)
    restarts = tuple(("SnapshotCompleted", restart_all_daemons, passed) for passed in (0, 2))
    found(
        "hold the snapshot of",
        overrides=SeedOverrides(protection="aec", zero1=False, checkpoints=False, triggered_faults=restarts),
    )


def test_ranks_in_another_order_than_the_plan_s_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank_of(plan: Any, device: Any) -> int:
        devices = sorted(plan.devices)
        return devices.index(device) if device in devices else -1

    monkeypatch.setattr(instructions, "rank_of", rank_of)
    found("is instructed to resume")


# --- trainers ----------------------------------------------------------------------------------------


def test_a_trainer_that_is_ended_before_it_is_forked_and_lives_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def spawned(self: TrainerSupervisor, notice: Any) -> None:
        trainer = self._unforked[notice.device].pop(0)
        trainer.pid = notice.pid
        self._by_pid[notice.pid] = trainer

    monkeypatch.setattr(TrainerSupervisor, "_spawned", spawned)
    found("has two trainers", overrides=CUTS)


def test_a_trainer_that_is_not_ended_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(self: TrainerSupervisor, trainer: TrainerProcess, grace_s: float) -> None:
        trainer.retired = True

    monkeypatch.setattr(TrainerSupervisor, "_end", end)
    found("", overrides=CUTS)


def test_the_test_of_a_device_that_hangs_and_is_not_ended_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HealthChecker, "_overdue", lambda self, check, pid: None)
    found("no progress after the healing", overrides=SeedOverrides(bad_devices=True))


# --- messages ----------------------------------------------------------------------------------------


def test_a_command_to_another_incarnation_that_is_obeyed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(self: Node, payload: bytes, retained: bool) -> None:
        several, incarnation = decode_to_nodes(payload), self.incarnation
        message = ToNode(
            node=self._node, incarnation=incarnation, command=several.command, cause=several.cause
        )
        self.on_command(message)

    monkeypatch.setattr(Node, "_on_command_to_several", command)
    found("handles a command")


def test_a_state_that_is_not_published_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker has forgotten it, or it is the last will of an older incarnation."""
    with monkeypatch.context() as patch:
        patch.setattr(NodePublisher, "observe_state", lambda self, seen: None)
        found("but the broker retains", overrides=SeedOverrides(power_losses=True, rare_faults=False))

    def publish(self: NodePublisher, effect: effects.PublishNode) -> None:
        if self._state is None or self._state.state is not effect.state:
            real(self, effect)

    real = NodePublisher.publish_state
    monkeypatch.setattr(NodePublisher, "publish_state", publish)
    found("but the broker retains", overrides=RESTARTS)


def test_a_connection_whose_loss_is_not_reported_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent machine introduces the node again only after it has learned that a connection was made."""
    monkeypatch.setattr(NodePublisher, "_note_connected", lambda self: None)
    found("no progress after the healing", range(3))


# --- snapshots ---------------------------------------------------------------------------------------


def test_a_trainer_that_resumes_before_its_layers_are_staged_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def inform(self: TrainerStaging) -> None:
        for trainer in self._trainers.values():
            if not trainer.informed and self._staged_layers:
                trainer.informed = True
                trainer.send(str(self._directory))

    monkeypatch.setattr(TrainerStaging, "_inform_trainers", inform)
    found("before its layers are staged", overrides=ROLLBACKS)


def test_staged_layers_that_serve_a_second_generation_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainerStaging, "clear", lambda self: None)
    monkeypatch.setattr(TrainerStaging, "abandon", lambda self: None)
    found("", overrides=ROLLBACKS)


def test_a_copy_that_counts_although_it_was_not_sent_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def send(self: SnapshotService, order: SendSnapshotCopy) -> None:
        ids: dict[str, Any] = {"generation": order.generation, "step": order.step}
        self._driver.feed(SnapshotCopyCommitted(**self._driver.stamp(), **ids, size_bytes=0))

    monkeypatch.setattr(SnapshotService, "_send_copy", send)
    found("has no copy of", overrides=SeedOverrides(protection="aec+buddy", zero1=False))


def test_copies_that_are_released_too_early_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def retain(self: SnapshotService, job_id: str, step: int, retained: Restore | None = None) -> None:
        real(self, job_id, step + 1, retained)

    real = SnapshotService.retain_copies
    monkeypatch.setattr(SnapshotService, "retain_copies", retain)
    found("overwrites its copy of", overrides=SeedOverrides(protection="aec+buddy", zero1=False))


def test_a_description_that_does_not_reach_the_checkpoint_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    set_description = Persister.set_description
    monkeypatch.setattr(
        Persister, "set_description", lambda self, job_id, _: set_description(self, job_id, b"")
    )
    found("without the description", overrides=SeedOverrides(checkpoints=True))
