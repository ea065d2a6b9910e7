"""Planted bugs: each must be found within some 200 seeds; otherwise the simulator does not check what it
should.

Bugs that few seeds would come across get overrides: what the bug needs then happens in every seed, so that
one seed in ten or twenty finds it, whatever else is drawn.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from msgspec import structs

from ftd.coordinator import coordinator, leadership
from ftd.coordinator.events import EventStream
from ftd.coordinator.journal import Journal
from ftd.coordinator.leadership import FollowerSession, InitialLead, Leadership, Takeover
from ftd.driver import Driver
from ftd.faults.sim import faults, plans, simulation_run
from ftd.faults.sim.coordinator import SimCoordinator
from ftd.faults.sim.faults import fill_disk, power_cut
from ftd.faults.sim.network import TOPICS, SimConnection, SimNetwork
from ftd.faults.sim.simulation import SeedOverrides, Simulation
from ftd.faults.sim.simulation_run import run_seed
from ftd.faults.sim.trainers import SimTrainer
from ftd.transport.wire.checking import encode_event
from ftd.transport.wire.coordinator_messages import JournalCopy
from planner.changes.parts import part_needs
from statemachine.agent import commands as agent_commands
from statemachine.agent import snapshots as agent_snapshots
from statemachine.cluster import (
    boundaries,
    machine,
    membership,
    progress,
    recovery,
    rollback,
    rules,
    signals,
    trainers,
)
from statemachine.cluster.durable import durable
from statemachine.cluster.durable.durable import durability_key
from statemachine.cluster.machine import ClusterMachine
from statemachine.cluster.rules import Decision, Reports, Resumption
from statemachine.cluster.snapshots import persisting, snapshots
from statemachine.cluster.state import Cluster, TrainingProgress
from statemachine.effects import Effect, PersistState
from statemachine.election import machine as election
from statemachine.election.leadership import LeaderSessionOpened, TermClaim
from statemachine.election.machine import ElectionMachine
from statemachine.messages.cluster import Prepare, ToNode, ToNodes
from statemachine.messages.trainer import ResumeRank, ShardWritten
from statemachine.messages.values import ClusterPhase, CommittedStep, Evaluation, QuiesceMode, Snapshot
from tests.helpers.seeds import RESTORED_BROKER, SEEDS, found, seeds_from

CHANGING = (ClusterPhase.QUIESCING, ClusterPhase.RECOVERING)
SHARDED = range(1, 3 * SEEDS, 3)
"""Jobs with ZeRO-1."""
EXITS = tuple((commit, faults.exit_trainer) for commit in range(3, 80, 9))
"""Moments around commits, when some trainers have the gradients and some have applied them."""
real_decide = rules.decide
real_go_on = EventStream.publish_unacknowledged


real_take_out = ClusterMachine._take_out


def without_journal(effects: list[Effect]) -> list[Effect]:
    return [effect for effect in effects if not isinstance(effect, PersistState)]


def without_roll_forward(
    reports: Reports,
    known: CommittedStep | None,
    resumption: Resumption | None,
    mode: QuiesceMode,
    *,
    zero1: bool,
) -> Decision:
    """Redo from the oldest step of any survivor, whatever was committed."""
    decision = real_decide(reports, known, resumption, mode, zero1=zero1)
    if decision.outcome != "roll_forward":
        return decision
    return replace(decision, step=decision.step - 1, vote=None, outcome="redo", ready={})


def without_gradients(
    reports: Reports,
    known: CommittedStep | None,
    resumption: Resumption | None,
    mode: QuiesceMode,
    *,
    zero1: bool,
) -> Decision:
    """Ignore that a trainer is at the VOTE with complete gradients."""
    blind: dict[str, Any] = {}
    for node, devices in reports.items():
        blind[node] = tuple(structs.replace(report, ready_step=None) for report in devices)
    return real_decide(blind, known, resumption, mode, zero1=zero1)


def without_the_dead(
    reports: Reports,
    known: CommittedStep | None,
    resumption: Resumption | None,
    mode: QuiesceMode,
    *,
    zero1: bool,
) -> Decision:
    """Use only the survivors' reports, and not what was known before."""
    return real_decide(reports, None, resumption, mode, zero1=zero1)


@pytest.mark.parametrize(
    ("mutant", "expected", "first"),
    [
        (without_roll_forward, "published as committed", 32),
        (without_gradients, "live trainers hold all", 17),
        (without_the_dead, "published as committed", 0),
    ],
)
def test_a_broken_roll_forward_rule_is_found(
    monkeypatch: pytest.MonkeyPatch, mutant: Callable[..., Decision], expected: str, first: int
) -> None:
    monkeypatch.setattr(recovery, "decide", mutant)
    found(expected, seeds_from(first), SeedOverrides(at_commits=EXITS))


def test_gradients_that_count_for_layers_without_any_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_by_gradients", lambda _, report, *others: frozenset(report.held))
    exits = tuple((commit, faults.exit_trainer) for commit in range(3, 80, 5))
    found("layer", range(2 * SEEDS), SeedOverrides(zero1=False, checkpoints=False, at_commits=exits))


def test_a_generation_used_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        recovery, "next_generation", lambda c: c.generation if c.state.phase in CHANGING else c.generation + 1
    )
    found("was used twice")


def test_a_node_failure_that_counts_as_wrong_code_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainers, "last_line", lambda detail: "the same")
    triggered = tuple(
        (name, faults.raise_in_trainer, 1) for name in ("StepCommitted", "Quiesced", "TrainerLost")
    )
    found("counts as the job's", overrides=SeedOverrides(triggered_faults=triggered))


def published_under_new_ids(stream: EventStream, outbox: Any, plan_in_words: Any) -> None:
    again = []
    for number, text in outbox:
        event = msgspec.json.decode(text)
        again.append((f"{number}-again", msgspec.json.encode({**event, "id": f"{number}-again"}).decode()))
    real_go_on(stream, again, plan_in_words)


@pytest.mark.parametrize(
    ("mutant", "expected", "first"),
    [(lambda *_: None, "but never published", 3), (published_under_new_ids, "was published", 22)],
    ids=["lost", "published twice"],
)
def test_events_that_a_killed_coordinator_loses_or_publishes_under_new_ids_are_found(
    monkeypatch: pytest.MonkeyPatch, mutant: Callable[..., None], expected: str, first: int
) -> None:
    monkeypatch.setattr(EventStream, "publish_unacknowledged", mutant)
    found(expected, seeds_from(first))


def test_events_that_leave_the_outbox_before_the_broker_has_them_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A leader that is cut off, or whose broker dies, then forgets events that nobody has received."""

    def publish(stream: EventStream, message: Any) -> None:
        stream.outbox.acknowledge(message.id)
        stream._session.publish(stream._topic, encode_event(message))

    monkeypatch.setattr(EventStream, "_publish", publish)
    found("but never published", seeds_from(13), SeedOverrides(coordinators=2))


def test_events_that_are_decided_after_the_journal_is_written_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A leader that is killed between writing the journal and publishing the events takes them with it."""
    monkeypatch.setattr(EventStream, "add_to_outbox", lambda stream, effects: None)
    crashes = tuple(
        (name, faults.kill_between_effects, passed)
        for name in ("GenerationStarted", "Quiesced")
        for passed in (0, 1, 2)
    )
    found("", overrides=SeedOverrides(coordinators=1, triggered_faults=crashes))


def test_a_journal_that_is_never_forced_to_the_disk_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def save(self: Journal, state: bytes, real: Callable[..., None] = Journal.save, **more: Any) -> None:
        real(self, state, **{**more, "forced": False})

    monkeypatch.setattr(Journal, "save", save)
    monkeypatch.setattr(Journal, "reserve", lambda self, generation: None)
    triggered = (
        ("GenerationStarted", power_cut, 1),
        ("PlanChosen", power_cut, 2),
        ("Quiesced", power_cut, 2),
    )
    found("", overrides=SeedOverrides(coordinators=1, triggered_faults=triggered))


def test_a_journal_that_forgets_its_position_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that restarts then mistakes an older journal at the broker for a newer one than its own."""

    def save(self: Journal, state: bytes, real: Callable[..., None] = Journal.save, **more: Any) -> None:
        real(self, state, **{**more, "position": None})

    monkeypatch.setattr(Journal, "save", save)
    found("", seeds_from(174), RESTORED_BROKER)


def test_a_follower_that_fails_on_a_full_disk_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads what is retained, cannot store it, and never begins to follow."""

    def handle(self: FollowerSession, topic: str, payload: bytes) -> None:
        self._route(topic, payload)

    monkeypatch.setattr(FollowerSession, "_handle", handle)
    full = tuple(("StepCommitted", fill_disk, passed) for passed in (1, 5))
    found("no progress after the healing", overrides=SeedOverrides(coordinators=1, triggered_faults=full))


def test_a_driver_that_drops_simultaneous_events_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def process(self: Driver, *events: Any) -> None:
        await real(self, *events[:1])

    real = Driver.process
    monkeypatch.setattr(Driver, "process", process)
    found("", range(23, 4 * SEEDS, 4))


def test_a_journal_that_loses_used_generations_with_its_end_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leadership, "raise_generation", lambda state, floor: state)
    triggered = (
        ("GenerationStarted", power_cut, 1),
        ("PlanChosen", power_cut, 2),
        ("Quiesced", power_cut, 2),
    )
    found("was used twice", seeds_from(18), SeedOverrides(coordinators=1, triggered_faults=triggered))


def test_a_journal_that_loses_the_resumed_plan_with_its_end_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node that the others left out is then mistaken for one of them, with gradients of another plan; or
    what the others have is considered lost or undone.
    """
    monkeypatch.setattr(coordinator, "durability_key", lambda journal: durability_key(journal)[:-1])
    cuts = tuple((commit, faults.cut_node) for commit in range(3, 80, 9))
    triggered = tuple(("PlanChosen", power_cut, passed) for passed in (1, 2, 3))
    overrides = SeedOverrides(
        coordinators=1, zero1=False, rare_faults=False, at_commits=cuts, triggered_faults=triggered
    )
    found("", seeds_from(121), overrides)


def test_a_coordinator_that_leads_before_its_claim_is_at_the_broker_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seated(machine: ElectionMachine, event: LeaderSessionOpened) -> None:
        real(machine, event)
        if machine._claimed is not None:
            machine._lead(machine._claimed)

    real = ElectionMachine._claim_term
    monkeypatch.setattr(ElectionMachine, "_claim_term", seated)
    leader_faults = (faults.reset_coordinator, faults.freeze_coordinator, faults.cut_coordinator)
    triggered = tuple(("StepCommitted", fault, 2 * passed) for passed, fault in enumerate(leader_faults))
    found(
        "in which another coordinator led",
        seeds_from(47),
        SeedOverrides(coordinators=3, triggered_faults=triggered),
    )


def test_a_deposed_leader_whose_messages_arrive_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def publish(network: SimNetwork, connection: SimConnection, *message: Any) -> None:
        was_open, connection.open = connection.open, True
        real(network, connection, *message)
        connection.open = was_open

    real = SimNetwork.publish
    monkeypatch.setattr(SimNetwork, "publish", publish)
    leader_faults = (faults.reset_coordinator, faults.freeze_coordinator, faults.cut_coordinator)
    triggered = tuple(("GenerationStarted", blow, passed) for passed, blow in enumerate(leader_faults))
    found("generation", seeds_from(44), SeedOverrides(coordinators=3, triggered_faults=triggered))


def test_a_deposed_leader_that_leads_again_with_its_state_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def lead(machine: ElectionMachine, claimed: TermClaim) -> None:
        real(machine, structs.replace(claimed, resumed=True))

    real = ElectionMachine._lead
    monkeypatch.setattr(ElectionMachine, "_lead", lead)
    monkeypatch.setattr(Leadership, "_step_down", lambda self, leader: None)
    triggered = tuple(("StepCommitted", faults.cut_coordinator, 2 * passed) for passed in range(4))
    overrides = SeedOverrides(coordinators=2, rare_faults=False, triggered_faults=triggered)
    found("led in between", overrides=overrides)


def test_a_standby_that_mistakes_a_saved_journal_for_the_newest_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It uses generations again that the leader started meanwhile, or another connected coordinator has a
    newer journal.
    """
    with monkeypatch.context() as patch:
        patch.setattr(durable, "skip_unseen_generations", lambda journal, incarnation: journal)
        found("was used twice", seeds_from(26), RESTORED_BROKER)
    monkeypatch.setattr(election, "is_outdated", lambda newest, others: False)
    found("which is connected, has", seeds_from(140), RESTORED_BROKER)


def test_a_lost_build_order_that_is_not_repeated_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "take_acknowledgement", lambda c, node, signal: None)
    lossy = tuple(("JobSubmitted", faults.lose_messages, 0) for _ in range(3))
    submitted = (("NodeJoined", faults.lose_messages, 0), ("NodeJoined", faults.lose_messages, 1))
    found("to build", seeds_from(63), SeedOverrides(rare_faults=False, triggered_faults=(*lossy, *submitted)))


def upgrade_and_lose_power(sim: Simulation) -> None:
    """Upgrade one coordinator, which then leads and writes what the other one cannot read. Then all lose
    power, with the broker, and the leader is away for long.
    """

    def again(coordinator: SimCoordinator, after_s: float) -> None:
        coordinator.crash()
        sim.world.call_later(after_s, coordinator.restart)

    def black_out() -> None:
        sim.network.stop_broker(0.3)
        again(new, 90.0)
        again(old, 0.5)

    new, old = sim.coordinator, next(one for one in sim.coordinators if one is not sim.coordinator)
    new.crash()
    new.program_version = 1
    sim.world.call_later(0.5, new.restart)
    sim.world.call_later(4.0, again, old, 1.0)
    sim.world.call_later(9.0, black_out)


@pytest.mark.parametrize("mutant", ["check", "bar"])
def test_a_coordinator_that_leads_from_an_older_journal_is_found(
    monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    """It treats a journal that it cannot read as if there were none, or forgets in a restart that there was
    one.
    """
    if mutant == "check":
        begin, keep = Takeover.begin, Takeover.save_copy

        def unread(self: Takeover, copy: JournalCopy) -> bool:
            return bool(self._unreadable(copy.schema, copy.protocol, copy.version))

        def begin_without(self: Takeover, copy: JournalCopy | None, incarnation: int) -> InitialLead:
            return begin(self, None if copy is not None and unread(self, copy) else copy, incarnation)

        monkeypatch.setattr(Takeover, "check", lambda self, copy: "")
        monkeypatch.setattr(
            Takeover, "save_copy", lambda self, copy: "" if unread(self, copy) else keep(self, copy)
        )
        monkeypatch.setattr(Takeover, "begin", begin_without)
        found("", seeds_from(60), SeedOverrides(coordinators=3, upgrades=True))
        return
    monkeypatch.setattr(simulation_run, "HEAL_S", 70.0)
    lost = SeedOverrides(
        coordinators=2, upgrades=False, triggered_faults=(("StepCommitted", upgrade_and_lose_power, 2),)
    )
    assert [run_seed(seed, overrides=lost).violation for seed in range(3)] == [None] * 3

    def bar(self: Journal, position: tuple[int, int], schema: int, protocol: int, version: str) -> None:
        self._foreign = position, (schema, protocol, version)

    monkeypatch.setattr(Journal, "remember_foreign_journal", bar)
    found("a journal that it cannot read", range(10), lost)


def test_a_standby_that_uses_the_leader_s_clock_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def save_copy(
        self: Journal,
        state: bytes,
        position: tuple[int, int],
        writer_offset_s: float,
        real: Callable[..., None] = Journal.save_copy,
    ) -> None:
        real(self, state, position, self._offset_s())

    monkeypatch.setattr(Journal, "save_copy", save_copy)
    crashes = tuple(("SnapshotCompleted", faults.crash_coordinator, passed) for passed in (0, 1))
    found(
        "takes the newest snapshot to be", overrides=SeedOverrides(coordinators=2, triggered_faults=crashes)
    )


def test_a_leader_that_publishes_commands_before_its_journal_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def publish(self: Leadership, topic: str, payload: bytes, **more: Any) -> None:
        if topic == TOPICS.journal:
            asyncio.get_running_loop().call_later(0.02, lambda: real(self, topic, payload, **more))
        else:
            real(self, topic, payload, **more)

    real = Leadership.publish
    monkeypatch.setattr(Leadership, "publish", publish)
    found("published before it was persisted", overrides=SeedOverrides(coordinators=2))


def test_a_generation_published_before_it_is_persisted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClusterMachine, "_take_out", lambda self: without_journal(real_take_out(self)))
    found("published before it was persisted")


@pytest.mark.parametrize(
    ("mutant", "expected"),
    [
        (lambda to_all, node, incarnation: to_all.receivers.get(node), "handles a command"),
        (lambda to_all, node, incarnation: incarnation, "handles a command"),
    ],
    ids=["another incarnation's", "another node's"],
)
def test_a_node_that_obeys_commands_for_others_is_found(
    monkeypatch: pytest.MonkeyPatch, mutant: Callable[..., int | None], expected: str
) -> None:
    def addressed(to_all: ToNodes, node: str, incarnation: int) -> ToNode | None:
        if mutant(to_all, node, incarnation) is None:
            return None
        fields = {"command": to_all.command, "cause": to_all.cause}
        return ToNode(node=node, incarnation=incarnation, **fields)

    monkeypatch.setattr(ToNodes, "addressed", addressed)
    restarts = tuple(("GenerationStarted", faults.crash_node, passed) for passed in (0, 1))
    found(expected, overrides=SeedOverrides(triggered_faults=restarts))


def test_a_node_let_back_in_after_the_cluster_went_on_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "may_return", lambda c, node: True)
    monkeypatch.setattr(recovery, "is_trusted", lambda *everything: True)
    cuts = tuple(("TrainingResumed", faults.cut_node, passed) for passed in (0, 0, 1, 2))
    found(
        "",
        seeds_from(162),
        overrides=SeedOverrides(
            coordinators=1, triggered_faults=(*cuts, ("NodeLost", faults.exit_trainer, 0))
        ),
    )


def test_a_fenced_agent_that_goes_on_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fence(a: agent_commands.Agent, command: agent_commands.Fence) -> None:
        agent_commands.send_heartbeat(a)
        real(a, command)

    real = agent_commands.fence
    monkeypatch.setattr(agent_commands, "fence", fence)
    found("after it was fenced")


def test_an_agent_that_repeats_no_report_after_an_outage_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def hello(a: agent_commands.Agent) -> None:
        before = len(a.out)
        real(a)
        del a.out[before + 1 :]

    real = agent_commands.send_hello
    monkeypatch.setattr(agent_commands, "send_hello", hello)
    outages = tuple((name, faults.restart_broker, 0) for name in ("Quiesced", "PlanChosen", "NodeLost"))
    found("no progress after the healing", seeds_from(60), SeedOverrides(triggered_faults=outages))


def test_a_snapshot_that_is_retained_before_it_is_complete_everywhere_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshots, "is_complete_everywhere", lambda c, underway: True)
    found("did not complete it")


def test_a_snapshot_that_is_retained_before_it_is_durable_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    completed: list[Cluster] = []

    def complete(c: Cluster, *others: Any) -> None:
        completed.append(c)
        real(c, *others)

    def take_out(machine: ClusterMachine) -> list[Effect]:
        effects = real_take_out(machine)
        if not completed:
            return effects
        completed.clear()
        return without_journal(effects)

    real = snapshots.record_complete
    monkeypatch.setattr(snapshots, "record_complete", complete)
    monkeypatch.setattr(ClusterMachine, "_take_out", take_out)
    found("the journal names")


FLIPS = SeedOverrides(
    corruption=True,
    zero1=False,
    protection="aec",
    triggered_faults=(("SnapshotCompleted", faults.corrupt_parameter, 1),),
)


def test_a_snapshot_that_counts_before_it_is_compared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "is_verified", lambda c, step: True)
    found("wrote a flipped bit", overrides=FLIPS)


def test_corrupt_state_that_counts_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decision, "without_state", lambda decision: decision)
    found("goes on with state of which the copies differ", overrides=FLIPS)


def test_a_rollback_to_an_abandoned_snapshot_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def abandon_nothing(c: Cluster, why: str) -> None:
        underway = c.snapshots.pending
        if underway is not None and underway.completed and c.resumption is not None and c.job is not None:
            one = next(iter(underway.completed.values()))
            groups = snapshots.groups_of(c.resumption.plan, c.resumption.protection)
            c.snapshots.newest = Snapshot(
                step=one.step, generation=one.generation, vote=one.vote, groups=groups
            )
        real(c, why)

    real = snapshots.abandon
    monkeypatch.setattr(snapshots, "abandon", abandon_nothing)
    found("did not complete it")


def test_a_rollback_that_undoes_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingProgress, "roll_back", lambda self, step, vote: None)
    found("which has no complete snapshot")


def test_trainers_that_do_not_learn_what_to_retain_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_snapshots, "send_retained", lambda a, device: None)
    found("overwrites its shard of the newest snapshot", seeds_from(100))


def test_late_duplicates_of_prepare_that_are_obeyed_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(a: agent_commands.Agent, command: Prepare) -> None:
        a.past_jobs.clear()
        real(a, command)
        a.kill_trainers()
        a.start_trainers()

    real = agent_commands.prepare
    monkeypatch.setattr(agent_commands, "prepare", prepare)
    # Otherwise it would be repaired.
    monkeypatch.setattr(signals, "take_acknowledgement", lambda c, node, signal: None)
    found("no progress after the healing", seeds_from(116), SeedOverrides(duplicates=0.1))


def test_a_snapshot_that_counts_with_a_wrong_protection_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The snapshot counts as protected as the job file says, and not as the owners were instructed."""

    def complete(c: Cluster, *others: Any) -> None:
        if c.resumption is not None and c.job is not None and c.job.snapshot.auto_protection:
            c.resumption = replace(c.resumption, protection="none")
        real(c, *others)

    real = snapshots.record_complete
    monkeypatch.setattr(snapshots, "record_complete", complete)
    found("counts as", seeds_from(23))


def test_a_switch_that_does_not_wait_for_a_boundary_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        boundaries, "reconfigure", lambda c, why, mode, record: recovery.reconfigure(c, why, "abort", record)
    )
    found("is switched, but steps are computed again", seeds_from(17))


def test_a_snapshot_reported_complete_before_the_replica_peer_has_it_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrote(a: agent_commands.Agent, device: int, report: ShardWritten) -> None:
        real(a, device, report)
        underway = a.local_snapshot
        if underway is not None and underway.written is not None and underway.completed is None:
            agent_snapshots.complete(a, underway.written)

    real = agent_snapshots.note_written
    monkeypatch.setattr(agent_snapshots, "note_written", wrote)
    found("has no copy of", seeds_from(11))


def test_snapshot_copies_that_are_ignored_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollback, "held_copies", lambda *everything, **others: {})
    crashes = tuple(("SnapshotCompleted", faults.crash_node, passed) for passed in (1, 2))
    alone = SeedOverrides(zero1=False, protection="aec+buddy", checkpoints=False, triggered_faults=crashes)
    found("and replica peers of", seeds_from(180), alone)


# --- names that never come back ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name", "mutant", "expected", "first"),
    [
        (membership, "needed_nodes", lambda c: frozenset(), "the job's journal names it", 4),
        (machine, "remove_absent", lambda c: None, "is gone for good, but is listed", 0),
        (recovery, "remove_unknown", lambda c, name: None, "is gone for good, but its state is retained", 36),
    ],
    ids=["nodes it needs", "none", "none at the broker"],
)
def test_a_coordinator_that_removes_nodes_it_needs_or_none_is_found(
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    mutant: Callable[..., Any],
    expected: str,
    first: int,
) -> None:
    monkeypatch.setattr(module, name, mutant)
    found(expected, seeds_from(first), SeedOverrides(churn=True))


# --- evaluations ------------------------------------------------------------------------------------


EVALUATED = SeedOverrides(
    evaluations=True,
    triggered_faults=tuple(
        (name, faults.exit_trainer, passed) for name in ("Evaluated", "StepCommitted") for passed in (1, 3)
    ),
    at_commits=EXITS,
)


def test_an_evaluation_that_counts_as_published_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def learn(c: Cluster, step: int, evaluation: Evaluation | None) -> None:
        c.progress.evaluated = max(c.progress.evaluated, step)

    monkeypatch.setattr(recovery, "learn_evaluation", learn)
    found("was published, but Evaluated", overrides=EVALUATED)


def test_an_evaluation_that_is_published_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(c: Cluster) -> None:
        real(c)
        c.progress.evaluated = 0

    real = progress._publish_evaluation
    monkeypatch.setattr(progress, "_publish_evaluation", tell)
    found("was published twice", overrides=EVALUATED)


def test_ranks_that_go_on_before_an_evaluation_ends_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is lost if a rank stops everybody in the middle of an evaluation, and the next group does not
    start it again.
    """

    def resume(self: SimTrainer, frame: ResumeRank) -> None:
        real(self, frame)
        self.evaluated = max(self.evaluated, frame.step)

    real = SimTrainer.resume
    monkeypatch.setattr(SimTrainer, "resume", resume)
    found("was published, but Evaluated", overrides=EVALUATED)


# --- ZeRO-1 --------------------------------------------------------------------------------------


def test_replicas_that_are_ignored_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_replicas(held: Any, nodes: Any) -> Any:
        return {
            device: tuple(p for p in of if not p.replica) if isinstance(of, tuple) else of
            for device, of in real(held, nodes).items()
        }

    real = recovery.of_nodes
    monkeypatch.setattr(recovery, "of_nodes", without_replicas)
    found("rolled back although live trainers hold all", SHARDED)


def test_a_part_that_counts_as_the_whole_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """All members of the plan together must have all parts."""

    def needs(nodes: Any, devices: int, parts: Any, layers: int) -> Any:
        some = {
            device: tuple(structs.replace(p, start=0, end=1, of=1) for p in of)
            for device, of in parts.items()
        }
        return real(nodes, devices, some, layers)

    real = part_needs
    monkeypatch.setattr("planner.planner.part_needs", needs)
    monkeypatch.setattr(plans, "_PLANS", {})
    found("starts without all of layers", SHARDED)


def test_gradients_of_parts_that_are_ignored_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_parts_by_gradients", lambda *everything, **more: ())
    found("live trainers hold all", overrides=SeedOverrides(zero1=True, protection="aor", at_commits=EXITS))


def test_an_update_that_was_not_gathered_and_counts_as_whole_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def whole(
        reports: Reports,
        known: CommittedStep | None,
        resumption: Resumption | None,
        mode: QuiesceMode,
        *,
        zero1: bool,
    ) -> Decision:
        decision = real_decide(reports, known, resumption, mode, zero1=zero1)
        layers = {d: frozenset(p.layer for p in of) for d, of in decision.parts.items()}
        return replace(decision, holdings=layers)

    monkeypatch.setattr(recovery, "decide", whole)
    found("starts without layer", SHARDED)


def test_a_checkpoint_that_is_committed_before_every_layer_is_written_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(persisting, "all_written", lambda writing: True)
    found("is committed with layers", overrides=SeedOverrides(checkpoints=True))


def test_a_snapshot_that_is_dropped_while_it_is_persisted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "pinned_step", lambda c, record: 0)
    found("while it is persisted", overrides=SeedOverrides(checkpoints=True))


def test_a_coordinator_that_forgets_what_it_wrote_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "_persisting", lambda c: {})
    crashes = tuple(("CheckpointCompleted", faults.crash_coordinator, passed) for passed in (0, 1))
    found(
        "checkpoint", seeds_from(13), SeedOverrides(zero1=False, checkpoints=True, triggered_faults=crashes)
    )


def test_endless_rollbacks_to_a_corrupt_checkpoint_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def search(c: Cluster, reason: str) -> bool:
        c.checkpoints.corrupt_steps.clear()
        return real(c, reason)

    real = rollback.search_checkpoint
    monkeypatch.setattr(rollback, "search_checkpoint", search)
    triggered = tuple(
        ("CheckpointCompleted", f, 0) for f in (faults.corrupt_checkpoint, faults.lose_all_memory)
    )
    found(
        "no progress after the healing",
        seeds_from(36),
        SeedOverrides(checkpoints=True, triggered_faults=triggered),
    )


def test_a_checkpoint_location_that_is_not_tried_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = (("CheckpointCompleted", 0), ("ClusterPaused", 0), ("Quiesced", 3), ("NodeJoined", 3))
    closed = tuple(
        (name, faults.close_checkpoint_store, passed) for name, passed in (*moments, ("NodeJoined", 6))
    )
    lost = ("CheckpointCompleted", faults.lose_all_memory, 0)
    monkeypatch.setattr(rollback, "_note_unreadable", lambda c: False)
    found(
        "intact checkpoints",
        range(24, 2 * SEEDS),
        SeedOverrides(checkpoints=True, triggered_faults=(lost, *closed)),
    )


# --- bits that change in memory ----------------------------------------------------------------------


def test_endless_requests_for_a_corrupt_shard_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollback, "RESTORE_TRIES", 1_000_000)
    triggered = tuple(("SnapshotCompleted", f, 0) for f in (faults.corrupt_shards, faults.fail_all_trainers))
    found(
        "no progress after the healing",
        seeds_from(15),
        SeedOverrides(protection="none", zero1=False, triggered_faults=triggered),
    )


def test_a_node_that_does_not_learn_its_repair_sources_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    # The rollback has its own reference to this function, so only the order to retain a snapshot lacks them.
    real = snapshots.restore_from
    monkeypatch.setattr(
        snapshots,
        "restore_from",
        lambda c, record, names: structs.replace(real(c, record, names), sources={}),
    )
    triggered = (("SnapshotCompleted", faults.corrupt_shard, 1),)
    found(
        "others hold what it takes",
        overrides=SeedOverrides(protection="aec", zero1=False, triggered_faults=triggered),
    )
