"""The faults that a seed draws: at random times, with commits, and after events of a recovery.

Kinds of faults that were added later have a random generator of their own each (``separate_rng``), so that
everything else in a seed stays the same.

With ``triggered_overrides``, a seed also draws its settings and faults that follow any kind of event: a few hundred of
these find what thousands of other seeds do not, because each fault hits the reaction to another one.
"""

from collections.abc import Callable
from random import Random

from ftd.faults.sim import faults, host_faults, slow_faults, upgrade_faults
from ftd.faults.sim.simulation import Fault, SeedOverrides, Simulation, TriggeredFault
from statemachine.effects import EmitEvent

PHASES = (
    "GenerationStarted", "Quiesced", "PlanChosen", "TrainingResumed", "NodeJoined", "NodeLost", "RolledBack",
    "SnapshotCompleted", "SnapshotAbandoned",
)  # fmt: skip
"""Events that mark the phases of a recovery; a fault shortly after one of them hits the next phase."""

FAULTS: tuple[tuple[int, Fault], ...] = (
    (6, faults.crash_node),
    (3, faults.crash_two),
    (4, faults.exit_trainer),
    (2, faults.raise_in_trainer),
    (2, faults.fail_all_trainers),
    (3, faults.hang_trainer),
    (4, faults.cut_node),
    (2, faults.cut_several),
    (2, faults.break_connection),
    (2, faults.reset_session),
    (1, faults.reset_coordinator),
    (1, faults.cut_coordinator),
    (4, faults.crash_coordinator),
    (1, faults.freeze_coordinator),
    (2, faults.freeze_daemon),
    (3, faults.restart_broker),
    (2, faults.drain_node),
    (2, faults.terminate_node),
    (1, faults.fail_builds),
    (5, slow_faults.slow_node),
    (3, Simulation.add_node),
    (2, faults.restart_node),
    (1, faults.stop_job),
    (4, faults.switch_protection),
    (2, faults.change_interval),
)
"""Faults with their weights."""

RARE_FAULTS: tuple[Fault, ...] = (
    faults.lose_messages, faults.partition_two, faults.restore_broker, faults.repeat_request, faults.fill_disk,
    slow_faults.pause_host, slow_faults.pause_trainer, slow_faults.restart_slowly, slow_faults.slow_transfers,
    slow_faults.slow_planning, slow_faults.stutter_daemon, slow_faults.stutter_leader,
)  # fmt: skip

_DURING_A_ROLLBACK: tuple[Fault, ...] = (
    faults.exit_trainer, faults.crash_node, faults.restart_node, faults.crash_coordinator, faults.cut_node,
    faults.break_connection, faults.freeze_daemon, faults.fail_all_trainers, faults.switch_protection,
)  # fmt: skip

EVENTS = (
    "GenerationStarted", "Quiesced", "PlanChosen", "TrainingResumed", "RecoveryCompleted", "StepCommitted",
    "RolledBack", "SnapshotCompleted", "SnapshotFailed", "CheckpointStarted", "CheckpointCompleted", "NodeLost",
    "NodeJoined", "TrainerLost", "NodeDraining", "NodeFenced", "ClusterPaused", "LeaderElected", "JobPrepared",
    "ProtectionChanged",
)  # fmt: skip
"""Events that ``triggered_overrides`` lets faults follow."""

_TRIGGERED_FAULTS: tuple[Fault, ...] = (
    *(fault for _, fault in FAULTS), *RARE_FAULTS, faults.lose_all_memory, faults.corrupt_checkpoint,
    faults.close_checkpoint_store, faults.hang_checkpoint_store, faults.corrupt_shard, faults.corrupt_shards,
    faults.power_cut, faults.kill_between_effects, faults.crash_two_hosts,
    faults.depose_leader_and_clear_broker, faults.freeze_everything, faults.request_snapshot_now,
    faults.restore_saved_broker, faults.kill_node_between_effects,
)  # fmt: skip


def triggered_overrides(seed: int) -> SeedOverrides:
    """Draw the settings of a seed, and two to eight faults that each follow an event."""
    rng = Random(f"{seed} triggered")

    def sometimes(likely: float) -> bool | None:
        return True if rng.random() < likely else None

    return SeedOverrides(
        triggered_faults=tuple(
            (rng.choice(EVENTS), rng.choice(_TRIGGERED_FAULTS), rng.choice((0, 0, 1, 1, 2, 3, 5)))
            for _ in range(rng.randint(2, 8))
        ),
        coordinators=rng.choice((None, None, None, 1, 2, 2, 3)),
        checkpoints=sometimes(0.3),
        power_losses=sometimes(0.3),
        churn=sometimes(0.2),
        corruption=sometimes(0.15),
        upgrades=sometimes(0.1),
        evaluations=sometimes(0.1),
        rare_faults=rng.choice((None,) * 8 + (True, False)),
        zero1=rng.choice((None,) * 12 + (True, False)),
    )


def _draw_rollback(sim: Simulation) -> list[TriggeredFault]:
    """Draw losses after a snapshot that are large enough for a rollback to it, and more faults while it is
    read.
    """
    rng = sim.world.rng
    if sim.snapshot.every_steps < 1 or not sim.world.chance(0.4):
        return []
    losses = [faults.fail_all_trainers, faults.fail_all_trainers, faults.crash_two]
    drawn: list[TriggeredFault] = [("SnapshotCompleted", rng.choice(losses), rng.randrange(3))]
    for _ in range(rng.randrange(3)):
        drawn.append(("RolledBack", rng.choice(_DURING_A_ROLLBACK), 0))
    return drawn


def _draw_checkpoint_rollback(sim: Simulation) -> list[TriggeredFault]:
    """Draw the loss of all memory, and more faults while everybody rolls back to a checkpoint."""
    rng = sim.world.rng
    if not sim.checkpoint.url or not sim.world.chance(0.7):
        return []
    drawn: list[TriggeredFault] = [("CheckpointCompleted", faults.lose_all_memory, rng.randrange(3))]
    if sim.world.chance(0.5):
        drawn.append(("CheckpointStarted", rng.choice(_DURING_A_ROLLBACK), rng.randrange(3)))
    if sim.world.chance(0.3):
        drawn.append(("CheckpointCompleted", faults.corrupt_checkpoint, rng.randrange(3)))
    for _ in range(rng.randrange(3)):
        drawn.append(("RolledBack", rng.choice(_DURING_A_ROLLBACK), 0))
    return drawn


def _draw_store_failures(sim: Simulation) -> list[TriggeredFault]:
    """Draw failures of the checkpoint store while a checkpoint is written or about to be read."""
    rng = Random(f"place {sim.world.seed}")
    if not sim.checkpoint.url or rng.random() < 0.4:
        return []
    moments = ("CheckpointStarted", "CheckpointCompleted", "RolledBack", "NodeLost", "JobSubmitted")
    kinds = (faults.close_checkpoint_store, faults.hang_checkpoint_store)
    return [(rng.choice(moments), rng.choice(kinds), rng.randrange(3)) for _ in range(rng.randrange(1, 4))]


def _draw_corruption(sim: Simulation) -> list[TriggeredFault]:
    """Draw corruption after a snapshot, or when everybody is about to roll back to it."""
    rng = Random(f"damage {sim.world.seed}")  # A generator of its own, so that the other draws stay the same.
    if sim.snapshot.every_steps < 1 or rng.random() < 0.5:
        return []
    moments = ("SnapshotCompleted", "SnapshotCompleted", "GenerationStarted", "Quiesced", "RolledBack")
    kinds = (faults.corrupt_shard, faults.corrupt_shard, faults.corrupt_shards)
    return [(rng.choice(moments), rng.choice(kinds), rng.randrange(3)) for _ in range(rng.randrange(1, 4))]


def separate_rng(sim: Simulation, what: str, likely: float, overrides: bool | None) -> Random | None:
    """Return the random generator of something that happens only in some seeds, or in all whose overrides say
    so; otherwise ``None``.
    """
    rng = Random(f"{sim.world.seed} {what}")
    happens = rng.random() < likely if overrides is None else overrides
    return rng if happens else None


def _draw_hosts(
    sim: Simulation,
    rng: Random | None,
    most: int,
    until_s: float,
    inject: Callable[[Simulation, float, float], None],
    longest_s: float,
) -> None:
    """Schedule up to ``most`` host faults, each of a random duration of at most ``longest_s``."""
    for _ in range(rng.randint(1, most) if rng is not None else 0):
        assert rng is not None
        sim.world.call_later(
            rng.uniform(0.5, until_s), inject, sim, rng.random(), rng.uniform(0.1, longest_s)
        )


def _draw_flipped_bits(sim: Simulation, until_s: float) -> None:
    """Let jobs compare replicas, and schedule bits that flip in parameters."""
    rng = separate_rng(sim, "corruption", 0.2, sim.overrides.corruption)
    if rng is None:
        return
    sim.compare_replicas_every = rng.choice((1, 3, 5, 100))
    for _ in range(rng.randint(1, 4)):
        sim.world.call_later(rng.uniform(1.5, until_s), sim.inject, faults.corrupt_parameter)


def _choose_faults(rng: Random, least: int, most: int) -> list[Fault]:
    kinds, weights = [fault for _, fault in FAULTS], [weight for weight, _ in FAULTS]
    return rng.choices(kinds, weights, k=rng.randrange(least, most))


def draw(sim: Simulation, until_s: float) -> None:
    """Schedule the seed's faults: a few at any time, some tied to the phases of recoveries and to commits."""
    rng, overrides = sim.world.rng, sim.overrides
    for fault in _choose_faults(rng, 1, 6):
        sim.world.call_later(sim.world.between(0.5, until_s), sim.inject, fault)
    reactions = _choose_faults(rng, 0, 6)
    pending = [(rng.choice(PHASES), fault, rng.randrange(4)) for fault in reactions]
    pending += _draw_rollback(sim) + _draw_checkpoint_rollback(sim)
    if sim.world.chance(0.3):
        moment = rng.choice(("GenerationStarted", "Quiesced"))
        pending.append((moment, faults.switch_protection, rng.randrange(3)))
    commits = [(rng.randrange(1, 80), fault) for fault in _choose_faults(rng, 0, 4)]
    pending += _draw_store_failures(sim) + _draw_corruption(sim)
    more, instants = _draw_rare(sim, until_s)
    _react(sim, [*pending, *overrides.triggered_faults, *more])
    _at_commits(sim, [*commits, *overrides.at_commits], instants)
    upgrade_faults.draw(sim, separate_rng(sim, "upgrades", 0.3, overrides.upgrades), until_s)
    _draw_hosts(
        sim, separate_rng(sim, "churn", 0.25, overrides.churn), 4, until_s, host_faults.replace_host, 3.0
    )
    _draw_flipped_bits(sim, until_s)
    if (requests := separate_rng(sim, "requests", 0.3, None)) is not None:
        for _ in range(requests.randint(1, 3)):
            sim.world.call_later(requests.uniform(0.5, until_s), faults.request_fault, sim, requests)
    if (bad := separate_rng(sim, "bad node", 0.3, overrides.bad_node)) is not None:
        sim.world.call_later(bad.uniform(0.5, until_s), faults.fail_repeatedly, sim, bad)
    if sim.world.checks_health:
        bad_devices = Random(f"{sim.world.seed} bad devices")
        for _ in range(bad_devices.randint(0, 3)):
            sim.world.call_later(bad_devices.uniform(0.5, until_s), faults.make_device_bad, sim, bad_devices)
    _draw_hosts(
        sim, separate_rng(sim, "power", 0.2, overrides.power_losses), 3, until_s, host_faults.lose_power, 8.0
    )


def _draw_rare(sim: Simulation, until_s: float) -> tuple[list[TriggeredFault], list[tuple[int, Fault]]]:
    """Schedule rare faults, some at the same instant as another fault. Return those to inject after events,
    and at commits.
    """
    rng = separate_rng(sim, "rarer", 0.4, sim.overrides.rare_faults)
    if rng is None:
        return [], []
    for fault in rng.choices(RARE_FAULTS, k=rng.randrange(1, 4)):
        when_s = rng.uniform(0.5, until_s)
        both = [fault, *_choose_faults(rng, 0, 2)]
        for one in rng.sample(both, k=len(both)):  # The order is random.
            sim.world.call_later(when_s, sim.inject, one)
    moments = (*PHASES, "CheckpointStarted", "CheckpointCompleted", "JobSubmitted", "ClusterPaused")
    more = [
        (rng.choice(moments), fault, rng.randrange(4))
        for fault in rng.choices(RARE_FAULTS, k=rng.randrange(4))
    ]
    return more, [(rng.randrange(1, 80), fault) for fault in _choose_faults(rng, 0, 3)]


def _react(sim: Simulation, pending: list[TriggeredFault]) -> None:
    def react(event: EmitEvent) -> None:
        for index, (name, fault, skip) in enumerate(pending):
            if name == event.name and skip > 0:
                pending[index] = (name, fault, skip - 1)
            elif name == event.name:
                del pending[index]
                longest_s = 0.5 if name in ("RolledBack", "SnapshotCompleted") else 0.1
                sim.world.call_later(sim.world.between(0.0, longest_s), sim.inject, fault)
                return

    for coordinator in sim.coordinators:
        coordinator.on_event = react


def _at_commits(sim: Simulation, commits: list[tuple[int, Fault]], instants: list[tuple[int, Fault]]) -> None:
    """Inject faults shortly after a commit, or at the same instant, before the trainer that committed can
    report it.
    """
    count = 0

    def on_commit() -> None:
        nonlocal count
        count += 1
        for number, fault in commits:
            if number == count:
                sim.world.call_later(sim.world.between(0.0, 0.01), sim.inject, fault)
        for number, fault in instants:
            if number == count:
                sim.inject(fault)

    sim.invariants.on_commit = on_commit
