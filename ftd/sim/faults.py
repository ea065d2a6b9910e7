"""What can go wrong, drawn by the seed: at random times, and in reaction to phases of a recovery."""

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from ftd.sim import damage
from statemachine.effects import EmitEvent

if TYPE_CHECKING:
    from ftd.sim.node import SimNode
    from ftd.sim.run import Simulation

Fault = Callable[["Simulation"], None]

PHASES = (
    "GenerationStarted", "Quiesced", "PlanChosen", "TrainingResumed", "NodeJoined", "NodeLost", "RolledBack",
    "SnapshotCompleted", "SnapshotGivenUp",
)  # fmt: skip
"""Events that mark the moments of a recovery; a fault shortly after each of them hits the next phase."""


def protections(*, sharded: bool) -> tuple[str, ...]:
    """What snapshots may be protected with, ``sharded`` by ZeRO-1 or not."""
    if sharded:
        return ("none", "aor", "aor", "arc:1+aor")
    return ("none", "aec", "aec+buddy", "aec+buddy", "arc:1", "aec2", "aec+arc:1", "buddy")


def _live(sim: "Simulation") -> list["SimNode"]:
    return [node for node in sim.nodes.values() if node.up]


def _some_node(sim: "Simulation") -> "SimNode | None":
    live = _live(sim)
    return sim.world.rng.choice(live) if live else None


def crash_node(sim: "Simulation") -> None:
    node = _some_node(sim)
    if node is not None:
        host = sim.world.chance(0.6)
        sim.log(f"crash {node.name}{', its memory is gone' if host else ''}")
        node.crash(host=host)
        if sim.world.chance(0.7):
            sim.world.at(sim.world.between(0.05, 8.0), sim.revive, node)


def crash_two(sim: "Simulation") -> None:
    crash_node(sim)
    if sim.world.chance(0.5):
        crash_node(sim)
    else:
        sim.world.at(sim.world.between(0.0, 0.05), crash_node, sim)


def exit_trainer(sim: "Simulation") -> None:
    _fail_trainer(sim, "exited")


def raise_in_trainer(sim: "Simulation") -> None:
    _fail_trainer(sim, "raised")


def _fail_trainer(sim: "Simulation", cause: str) -> None:
    node = _some_node(sim)
    if node is not None:
        device = sim.world.rng.randrange(node.devices)
        sim.log(f"trainer {node.name}/{device} {cause}")
        node.fail_trainer(device, "raised" if cause == "raised" else "exited")


def fail_all_trainers(sim: "Simulation") -> None:
    """Something that strikes every process at once: a driver, a bug at one step."""
    spared = _some_node(sim) if sim.world.chance(0.5) else None
    sim.log(f"all trainers exit{f', but for those of {spared.name}' if spared is not None else ''}")
    for node in _live(sim):
        if node is spared:
            continue
        for device in list(node.trainers):
            node.fail_trainer(device, "exited")


def hang_trainer(sim: "Simulation") -> None:
    node = _some_node(sim)
    if node is None or not node.trainers:
        return
    trainer = sim.world.rng.choice(list(node.trainers.values()))
    if sim.world.chance(0.5):
        trainer.frozen = True
    else:
        trainer.asleep = True
    sim.log(f"trainer {node.name}/{trainer.device} {'frozen' if trainer.frozen else 'asleep'}")


def cut_node(sim: "Simulation") -> None:
    """The host is cut off: from the broker, and mostly from the other hosts."""
    node = _some_node(sim)
    if node is not None:
        _cut(sim, node, sim.world.between(0.1, 12.0))


def _cut(sim: "Simulation", node: "SimNode", for_s: float) -> None:
    sim.log(f"cut {node.name} for {for_s:.2f} s")
    sim.network.cut(node.name, for_s)
    if sim.world.chance(0.7) and not node.data_cut:
        node.data_cut = True
        for trainer in list(node.trainers.values()):
            if trainer.group is not None and sim.world.chance(0.6):
                trainer.group.break_connection()
        sim.world.at(for_s, sim.reconnect_data, node)


def break_connection(sim: "Simulation") -> None:
    """Two trainers lose their connection, and nothing else happens."""
    node = _some_node(sim)
    groups = [t.group for t in node.trainers.values() if t.group is not None] if node is not None else []
    if groups:
        sim.log(f"break a connection of generation {groups[0].generation}")
        groups[0].break_connection()


def cut_several(sim: "Simulation") -> None:
    """A switch fails: some or all nodes lose the broker at once."""
    for_s = sim.world.between(0.1, 12.0)
    live = _live(sim)
    for node in live if sim.world.chance(0.4) else live[: len(live) // 2 + 1]:
        _cut(sim, node, for_s)


def reset_session(sim: "Simulation") -> None:
    node = _some_node(sim)
    if node is not None and sim.network.sessions[node.name].open:
        sim.log(f"reset the session of {node.name}")
        sim.network.drop(node.name)


def reset_coordinator(sim: "Simulation") -> None:
    if sim.network.seat is not None:
        sim.log("reset the leader's session")
        sim.network.end_seat()


def cut_coordinator(sim: "Simulation") -> None:
    for_s = sim.world.between(0.1, 10.0)
    sim.log(f"cut {sim.coordinator.name} for {for_s:.2f} s")
    sim.network.cut(sim.coordinator.name, for_s)


def crash_coordinator(sim: "Simulation") -> None:
    if not sim.coordinator.up:
        return
    coordinator = sim.coordinator
    if sim.world.chance(0.5):
        sim.log(f"crash {coordinator.name}")
        coordinator.crash()
        sim.world.at(sim.world.between(0.05, 8.0), coordinator.restart)
    else:
        sim.log(f"crash {coordinator.name} amid its effects")
        sim.coordinator.crash_after = sim.world.rng.randrange(40)


def freeze_coordinator(sim: "Simulation") -> None:
    for_s = sim.world.between(0.5, 8.0)
    sim.log(f"freeze {sim.coordinator.name} for {for_s:.2f} s")
    sim.coordinator.freeze(for_s)


def freeze_daemon(sim: "Simulation") -> None:
    node = _some_node(sim)
    if node is not None:
        for_s = sim.world.between(0.5, 8.0)
        sim.log(f"freeze the daemon of {node.name} for {for_s:.2f} s")
        node.freeze(for_s)


def restart_broker(sim: "Simulation") -> None:
    for_s = sim.world.between(0.1, 6.0)
    sim.log(f"the broker is down for {for_s:.2f} s")
    sim.network.stop_broker(for_s)


def drain_node(sim: "Simulation") -> None:
    node = _some_node(sim)
    if node is not None:
        sim.log(f"drain {node.name}")
        sim.coordinator.drain(node.name)


def terminate_node(sim: "Simulation") -> None:
    node = _some_node(sim)
    if node is not None:
        sim.log(f"terminate {node.name}")
        node.terminate()
        sim.world.at(sim.world.between(1.0, 15.0), sim.revive, node)


def unbuildable(sim: "Simulation") -> None:
    """The next trainers of a node cannot build the job (a file is missing there, for a while)."""
    node = _some_node(sim)
    if node is not None:
        node.unbuildable = sim.world.rng.randrange(1, 4)
        sim.log(f"{node.unbuildable} builds fail on {node.name}")


def slow_node(sim: "Simulation") -> None:
    """A node computes slowly, for a while or until the healing."""
    node = _some_node(sim)
    if node is not None:
        node.slowness = sim.world.between(1.2, 6.0)
        sim.log(f"slow {node.name} by {node.slowness:.1f}")
        if sim.world.chance(0.6):
            sim.world.at(sim.world.between(3.0, 15.0), sim.quicken, node)


def add_node(sim: "Simulation") -> None:
    sim.add_node()


def lose_all_memory(sim: "Simulation") -> None:
    """The whole cluster goes down and comes back: only what is on a disk is left."""
    sim.log("all hosts crash, their memory is gone")
    for node in list(sim.nodes.values()):
        node.crash(host=True)
        sim.world.at(sim.world.between(0.05, 6.0), sim.revive, node)


def damage_checkpoint(sim: "Simulation") -> None:
    """A byte of the newest checkpoint is not what was written."""
    if sim.place.kept:
        step = max(sim.place.kept)
        sim.log(f"the checkpoint of step {step} is damaged")
        sim.place.kept[step].damaged = True


def close_place(sim: "Simulation") -> None:
    """Nobody can read or write checkpoints: a mount is gone."""
    for_s = sim.world.between(0.5, 10.0)
    sim.log(f"the place of checkpoints is closed for {for_s:.2f} s")
    sim.place.closed_until = sim.world.now + for_s


def hang_place(sim: "Simulation") -> None:
    for_s = sim.world.between(0.5, 10.0)
    sim.log(f"the place of checkpoints hangs for {for_s:.2f} s")
    sim.place.hung_until = sim.world.now + for_s


def restart_node(sim: "Simulation") -> None:
    """SIGKILL and at once a new daemon: its Hello may overtake the old one's last will."""
    node = _some_node(sim)
    if node is not None:
        sim.log(f"restart {node.name}")
        node.crash()
        sim.world.at(sim.world.between(0.001, 0.1), sim.revive, node)


def stop_job(sim: "Simulation") -> None:
    if sim.job is not None and sim.world.chance(0.3):
        sim.log("stop the job")
        sim.coordinator.stop(sim.job.job_id)


def switch_protection(sim: "Simulation") -> None:
    """A user wants another one; or changes their mind at once."""
    schemes = ("auto", *protections(sharded=sim.policy.zero1))
    for scheme in sim.world.rng.choices(schemes, k=sim.world.rng.choice((1, 1, 2))):
        sim.log(f"protect {scheme}")
        sim.coordinator.ask_snapshots(protection=scheme)


def change_interval(sim: "Simulation") -> None:
    every = sim.world.rng.choice(("auto", 0, 1, 2, 4))
    sim.log(f"snapshots every {every}")
    sim.coordinator.ask_snapshots(every_steps=every, now=sim.world.chance(0.3))


FAULTS: tuple[tuple[int, Fault], ...] = (
    (6, crash_node),
    (3, crash_two),
    (4, exit_trainer),
    (2, raise_in_trainer),
    (2, fail_all_trainers),
    (3, hang_trainer),
    (4, cut_node),
    (2, cut_several),
    (2, break_connection),
    (2, reset_session),
    (1, reset_coordinator),
    (1, cut_coordinator),
    (4, crash_coordinator),
    (1, freeze_coordinator),
    (2, freeze_daemon),
    (3, restart_broker),
    (2, drain_node),
    (2, terminate_node),
    (1, unbuildable),
    (5, slow_node),
    (3, add_node),
    (2, restart_node),
    (1, stop_job),
    (4, switch_protection),
    (2, change_interval),
)
"""With weights."""

_KINDS = [fault for _, fault in FAULTS]
_WEIGHTS = [weight for weight, _ in FAULTS]


_DURING_A_ROLLBACK: tuple[Fault, ...] = (
    exit_trainer, crash_node, restart_node, crash_coordinator, cut_node, break_connection, freeze_daemon,
    fail_all_trainers, switch_protection,
)  # fmt: skip


def _draw_rollback(sim: "Simulation") -> list[tuple[str, Fault, int]]:
    """Enough dies behind a snapshot that it is needed, and more while it is read."""
    rng = sim.world.rng
    if sim.snapshot.every_steps < 1 or not sim.world.chance(0.4):
        return []
    losses = [fail_all_trainers, fail_all_trainers, crash_two]
    drawn: list[tuple[str, Fault, int]] = [("SnapshotCompleted", rng.choice(losses), rng.randrange(3))]
    for _ in range(rng.randrange(3)):
        drawn.append(("RolledBack", rng.choice(_DURING_A_ROLLBACK), 0))
    return drawn


def _draw_going_back(sim: "Simulation") -> list[tuple[str, Fault, int]]:
    """No memory helps any more, and more dies while everybody goes back to a checkpoint."""
    rng = sim.world.rng
    if not sim.checkpoint.url or not sim.world.chance(0.7):
        return []
    drawn: list[tuple[str, Fault, int]] = [("CheckpointCompleted", lose_all_memory, rng.randrange(3))]
    if sim.world.chance(0.5):
        drawn.append(("CheckpointStarted", rng.choice(_DURING_A_ROLLBACK), rng.randrange(3)))
    if sim.world.chance(0.3):
        drawn.append(("CheckpointCompleted", damage_checkpoint, rng.randrange(3)))
    for _ in range(rng.randrange(3)):
        drawn.append(("RolledBack", rng.choice(_DURING_A_ROLLBACK), 0))
    return drawn


def _draw_place(sim: "Simulation") -> list[tuple[str, Fault, int]]:
    """The place itself fails, while something is written there or is to be read."""
    rng = Random(f"place {sim.world.seed}")  # of its own, so that the other draws are as they were
    if not sim.checkpoint.url or rng.random() < 0.4:
        return []
    moments = ("CheckpointStarted", "CheckpointCompleted", "RolledBack", "NodeLost", "JobSubmitted")
    count = rng.randrange(1, 4)
    return [
        (rng.choice(moments), rng.choice((close_place, hang_place)), rng.randrange(3)) for _ in range(count)
    ]


def draw(sim: "Simulation", until_s: float) -> None:
    """Schedule the seed's faults: a few at any time, some tied to the phases of recoveries and to commits."""
    rng = sim.world.rng
    for fault in rng.choices(_KINDS, _WEIGHTS, k=rng.randrange(1, 6)):
        sim.world.at(sim.world.between(0.5, until_s), sim.strike, fault)
    reactions = rng.choices(_KINDS, _WEIGHTS, k=rng.randrange(0, 6))
    pending = [(rng.choice(PHASES), fault, rng.randrange(4)) for fault in reactions]
    pending += _draw_rollback(sim) + _draw_going_back(sim)
    if sim.world.chance(0.3):
        pending.append((rng.choice(("GenerationStarted", "Quiesced")), switch_protection, rng.randrange(3)))
    commits = [
        (rng.randrange(1, 80), fault) for fault in rng.choices(_KINDS, _WEIGHTS, k=rng.randrange(0, 4))
    ]

    pending += _draw_place(sim) + damage.draw(sim)
    pending += sim.leaning.strikes
    commits += sim.leaning.at_commits

    def react(event: EmitEvent) -> None:
        for index, (name, fault, skip) in enumerate(pending):
            if name == event.name and skip > 0:
                pending[index] = (name, fault, skip - 1)
            elif name == event.name:
                del pending[index]
                longest_s = 0.5 if name in ("RolledBack", "SnapshotCompleted") else 0.1
                sim.world.at(sim.world.between(0.0, longest_s), sim.strike, fault)
                return

    count = 0

    def on_commit() -> None:
        nonlocal count
        count += 1
        for number, fault in commits:
            if number == count:
                sim.world.at(sim.world.between(0.0, 0.01), sim.strike, fault)

    for coordinator in sim.coordinators:
        coordinator.on_event = react
    sim.invariants.on_commit = on_commit
