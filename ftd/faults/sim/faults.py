"""Faults of nodes, trainers, links, the broker and coordinators, and requests of users."""

from collections.abc import Callable
from functools import wraps
from random import Random
from typing import Any

from ftd.faults.sim.node import SimNode
from ftd.faults.sim.simulation import Fault, Simulation, protections
from ftd.node.message_faults import LinkFaults
from statemachine.messages.values import FailureCause, PlantedFault


def live_nodes(sim: Simulation) -> list[SimNode]:
    return [node for node in sim.nodes.values() if node.up]


def some_node(sim: Simulation) -> SimNode | None:
    live = live_nodes(sim)
    return sim.world.rng.choice(live) if live else None


def on_some_node(fault: Callable[[Simulation, SimNode], None]) -> Fault:
    """Return a fault that hits any node that is up, if there is one."""

    @wraps(fault)
    def inject(sim: Simulation) -> None:
        if (node := some_node(sim)) is not None:
            fault(sim, node)

    return inject


@on_some_node
def crash_node(sim: Simulation, node: SimNode) -> None:
    host = sim.world.chance(0.6)
    sim.log(f"crash {node.name}{', with its memory' if host else ''}")
    node.crash(host=host)
    if sim.world.chance(0.7):
        sim.world.call_later(sim.world.between(0.05, 8.0), sim.start_if_down, node)


def crash_two(sim: Simulation) -> None:
    crash_node(sim)
    if sim.world.chance(0.5):
        crash_node(sim)
    else:
        sim.world.call_later(sim.world.between(0.0, 0.05), crash_node, sim)


@on_some_node
def exit_trainer(sim: Simulation, node: SimNode) -> None:
    _fail_trainer(sim, node, "exited")


@on_some_node
def raise_in_trainer(sim: Simulation, node: SimNode) -> None:
    _fail_trainer(sim, node, "raised")


def _fail_trainer(sim: Simulation, node: SimNode, cause: FailureCause) -> None:
    device = sim.world.rng.randrange(node.devices)
    sim.log(f"trainer {node.name}/{device} {cause}")
    node.fail_trainer(device, cause)


def fail_repeatedly(sim: Simulation, rng: Random) -> None:
    """Let a trainer of one node raise again and again until the healing, as one on a bad device does. A user may
    readmit the node when it was set aside.
    """
    node = rng.choice(list(sim.nodes.values()))
    sim.log(f"bad {node.name}")
    period_s = rng.uniform(0.3, 4.0)

    def fail() -> None:
        if sim.healed:
            return
        node.fail_trainer(rng.randrange(node.devices), "raised")
        if rng.random() < 0.1:
            sim.coordinator.readmit(node.name)
        sim.world.call_later(period_s, fail)

    fail()


def make_device_bad(sim: Simulation, rng: Random) -> None:
    """Let the devices of a node be bad in health checks for a while, by themselves or as an injected fault.
    Something makes the node run a check meanwhile.
    """
    node = rng.choice(list(sim.nodes.values()))
    bad: tuple[PlantedFault, ...] = ("wrong", "wrong", "slow", "hung")
    how = rng.choice(bad)
    if sim.healed:
        return
    sim.log(f"the devices of {node.name} are {how} in health checks")
    for_s = rng.uniform(3.0, 15.0)
    sim.world.call_later(for_s, repair_device, sim, node)
    if rng.random() < 0.5:
        node.plant_bad_device(how, range(node.devices), for_s)
        node.fail_trainer(rng.randrange(node.devices), "exited", "killed by SIGSEGV")
    else:
        node.device_fault = how
        node.crash()
        sim.world.call_later(rng.uniform(0.05, 3.0), sim.start_if_down, node)


def repair_device(sim: Simulation, node: SimNode) -> None:
    """End the fault of a node's devices. A user readmits the node if it was set aside."""
    node.device_fault = ""
    sim.coordinator.readmit(node.name)


def fail_all_trainers(sim: Simulation) -> None:
    """Make all trainers exit at once, as a driver or a bug at one step does, possibly except those of one
    node.
    """
    spared = some_node(sim) if sim.world.chance(0.5) else None
    sim.log(f"all trainers exit{f', but for those of {spared.name}' if spared is not None else ''}")
    for node in live_nodes(sim):
        if node is spared:
            continue
        for device in list(node.trainers):
            node.fail_trainer(device, "exited")


@on_some_node
def hang_trainer(sim: Simulation, node: SimNode) -> None:
    if not node.trainers:
        return
    trainer = sim.world.rng.choice(list(node.trainers.values()))
    if sim.world.chance(0.5):
        trainer.frozen = True
    else:
        trainer.asleep = True
    sim.log(f"trainer {node.name}/{trainer.device} {'frozen' if trainer.frozen else 'asleep'}")


@on_some_node
def cut_node(sim: Simulation, node: SimNode) -> None:
    """Cut a host off from the broker, and mostly from the other hosts."""
    _cut(sim, node, sim.world.between(0.1, 12.0))


def _cut(sim: Simulation, node: SimNode, for_s: float) -> None:
    sim.log(f"cut {node.name} for {for_s:.2f} s")
    sim.network.cut(node.name, for_s)
    if sim.world.chance(0.7) and not node.data_cut:
        node.data_cut = True
        for trainer in list(node.trainers.values()):
            if trainer.group is not None and sim.world.chance(0.6):
                trainer.group.break_connection()
        sim.world.call_later(for_s, node.reconnect)


@on_some_node
def break_connection(sim: Simulation, node: SimNode) -> None:
    """Break the connection between two trainers, and nothing else."""
    groups = [trainer.group for trainer in node.trainers.values() if trainer.group is not None]
    if groups:
        sim.log(f"break a connection of generation {groups[0].generation}")
        groups[0].break_connection()


def cut_several(sim: Simulation) -> None:
    """Cut several or all nodes off from the broker at once, as a failing switch does."""
    for_s = sim.world.between(0.1, 12.0)
    live = live_nodes(sim)
    for node in live if sim.world.chance(0.4) else live[: len(live) // 2 + 1]:
        _cut(sim, node, for_s)


@on_some_node
def reset_session(sim: Simulation, node: SimNode) -> None:
    if sim.network.connection_of(node.name) is not None:
        sim.log(f"reset the session of {node.name}")
        sim.network.drop(node.name)


def reset_coordinator(sim: Simulation) -> None:
    if sim.network.leader is not None:
        sim.log("reset the leader's session")
        sim.network.drop_leader()


def cut_coordinator(sim: Simulation) -> None:
    for_s = sim.world.between(0.1, 10.0)
    sim.log(f"cut {sim.coordinator.name} for {for_s:.2f} s")
    sim.network.cut(sim.coordinator.name, for_s)


def crash_coordinator(sim: Simulation) -> None:
    if not sim.coordinator.up:
        return
    coordinator = sim.coordinator
    if sim.world.chance(0.5):
        sim.log(f"crash {coordinator.name}")
        coordinator.crash()
        sim.world.call_later(sim.world.between(0.05, 8.0), coordinator.restart)
    else:
        sim.log(f"crash {coordinator.name} between its effects")
        sim.coordinator.crash_after = sim.world.rng.randrange(40)


def freeze_coordinator(sim: Simulation) -> None:
    for_s = sim.world.between(0.5, 8.0)
    sim.log(f"freeze {sim.coordinator.name} for {for_s:.2f} s")
    sim.coordinator.freeze(for_s)


@on_some_node
def freeze_daemon(sim: Simulation, node: SimNode) -> None:
    for_s = sim.world.between(0.5, 8.0)
    sim.log(f"freeze the daemon of {node.name} for {for_s:.2f} s")
    node.freeze(for_s)


def restart_broker(sim: Simulation) -> None:
    for_s = sim.world.between(0.1, 6.0)
    sim.log(f"the broker is down for {for_s:.2f} s")
    sim.network.stop_broker(for_s)


@on_some_node
def drain_node(sim: Simulation, node: SimNode) -> None:
    """Drain a node, perhaps when possible, and perhaps think better of it."""
    rng = Random(f"drain {sim.world.seed} {len(sim.faults)}")
    waits = rng.random() < 0.6
    sim.log(f"drain {node.name}{' when possible' if waits else ''}")
    sim.coordinator.drain(node.name, when_possible=waits)
    if rng.random() < 0.3:
        sim.world.call_later(rng.uniform(0.0, 4.0), cancel_drain, sim, node.name)


def cancel_drain(sim: Simulation, name: str) -> None:
    sim.log(f"cancel the drain of {name}")
    sim.coordinator.drain(name, cancel=True)


@on_some_node
def terminate_node(sim: Simulation, node: SimNode) -> None:
    sim.log(f"terminate {node.name}")
    node.terminate()
    sim.world.call_later(sim.world.between(1.0, 15.0), sim.start_if_down, node)


@on_some_node
def fail_builds(sim: Simulation, node: SimNode) -> None:
    """Make the next trainers of a node unable to build the job, as if a file were missing there for a while."""
    node.failing_builds = sim.world.rng.randrange(1, 4)
    sim.log(f"{node.failing_builds} builds fail on {node.name}")


def lose_all_memory(sim: Simulation) -> None:
    """Crash all hosts, so that only what is on a disk survives."""
    sim.log("all hosts crash, with their memory")
    for node in list(sim.nodes.values()):
        node.crash(host=True)
        sim.world.call_later(sim.world.between(0.05, 6.0), sim.start_if_down, node)


def corrupt_checkpoint(sim: Simulation) -> None:
    """Change a byte of the newest checkpoint."""
    if sim.checkpoint_store.checkpoints:
        step = max(sim.checkpoint_store.checkpoints)
        sim.log(f"the checkpoint of step {step} is corrupt")
        sim.checkpoint_store.checkpoints[step].corrupt = True


def close_checkpoint_store(sim: Simulation) -> None:
    """Make checkpoints unreadable and unwritable, as if a mount were gone."""
    for_s = sim.world.between(0.5, 10.0)
    sim.log(f"the checkpoint store is unavailable for {for_s:.2f} s")
    sim.checkpoint_store.unavailable_until = sim.world.now + for_s


def hang_checkpoint_store(sim: Simulation) -> None:
    for_s = sim.world.between(0.5, 10.0)
    sim.log(f"the checkpoint store hangs for {for_s:.2f} s")
    sim.checkpoint_store.hung_until = sim.world.now + for_s


@on_some_node
def restart_node(sim: Simulation, node: SimNode) -> None:
    """SIGKILL a daemon and start a new one at once, whose Hello may overtake the old one's last will."""
    sim.log(f"restart {node.name}")
    node.crash()
    sim.world.call_later(sim.world.between(0.001, 0.1), sim.start_if_down, node)


def stop_job(sim: Simulation) -> None:
    if sim.job is not None and sim.world.chance(0.3):
        sim.log("stop the job")
        sim.coordinator.stop(sim.job.job_id)


def switch_protection(sim: Simulation) -> None:
    """Request another protection, as a user does who may change their mind at once."""
    schemes = ("auto", *protections(sharded=sim.policy.zero1))
    for scheme in sim.world.rng.choices(schemes, k=sim.world.rng.choice((1, 1, 2))):
        sim.log(f"protect {scheme}")
        sim.coordinator.request_snapshots(protection=scheme)


def change_interval(sim: Simulation) -> None:
    every = sim.world.rng.choice(("auto", 0, 1, 2, 4))
    sim.log(f"snapshots every {every}")
    sim.coordinator.request_snapshots(every_steps=every, now=sim.world.chance(0.3))


@on_some_node
def lose_messages(sim: Simulation, node: SimNode) -> None:
    """Lose, duplicate and delay some of the messages from and to a node."""
    world = sim.world
    if node.has_message_faults:
        return
    drop, for_s = world.between(0.02, 0.3), world.between(1.0, 8.0)
    sim.log(f"of {node.name}'s messages {drop:.0%} are lost for {for_s:.2f} s")
    faults = LinkFaults(drop=drop, duplicate=world.between(0.0, 0.3), late_s=world.between(0.0, 1.5))
    node.lose_messages(faults, for_s)


def request_fault(sim: Simulation, rng: Random) -> None:
    """Ask a node over the broker to inject a fault into itself."""
    live = live_nodes(sim)
    if sim.healed or not live:
        return
    node, for_s = rng.choice(live), rng.uniform(0.2, 5.0)
    fields: dict[str, Any] = rng.choice(
        (
            {"do": "kill"},
            {"do": "kill", "target": "trainer", "device": rng.randrange(node.devices)},
            {"do": "stop", "for_s": for_s},
            {"do": "stop", "target": "trainer", "for_s": for_s},
            {"do": "hang", "device": rng.randrange(node.devices)},
            {"do": "raise", "device": rng.randrange(node.devices)},
            {"do": "slow", "factor": rng.uniform(1.5, 6.0), "for_s": for_s},
            {"do": "term"},
            {"do": "flip"},
            {"do": "disconnect", "for_s": for_s},
            {"do": "lossy", "drop": 0.2, "duplicate": 0.2, "late_s": 0.5, "for_s": for_s},
        )
    )
    sim.log(f"request {fields} of {node.name}")
    node.request_fault(**fields)
    if fields["do"] in ("kill", "term"):
        sim.world.call_later(rng.uniform(1.0, 8.0), sim.start_if_down, node)


def partition_two(sim: Simulation) -> None:
    """Separate two hosts from each other, but not from the broker and all others."""
    there = live_nodes(sim)
    if len(there) < 2:
        return
    one, other = sim.world.rng.sample(there, 2)
    pair, for_s = frozenset((one.name, other.name)), sim.world.between(0.5, 15.0)
    sim.log(f"{one.name} and {other.name} do not reach each other for {for_s:.2f} s")
    sim.network.partitioned_pairs.add(pair)
    sim.world.call_later(for_s, sim.network.partitioned_pairs.discard, pair)
    theirs = [trainer.group for trainer in one.trainers.values() if trainer.group is not None]
    for group in theirs[:1]:
        if any(member.node is other for member in group.members.values()):
            group.break_connection()


def restore_broker(sim: Simulation) -> None:
    """Restart the broker with what it retained some time ago, or just now."""
    ago_s, for_s = sim.world.rng.choice((0.0, sim.world.between(0.1, 6.0))), sim.world.between(0.1, 6.0)

    def stop(left: dict[str, bytes]) -> None:
        if not sim.healed:
            sim.log(
                f"the broker is down for {for_s:.2f} s, and comes back with what it retained {ago_s:.2f} s before"
            )
            sim.network.stop_broker(for_s, left)

    if ago_s:
        sim.world.call_later(ago_s, stop, dict(sim.network.retained))
    elif sim.network.up:
        stop(dict(sim.network.retained))


def repeat_request(sim: Simulation) -> None:
    """Repeat a request, as a user does who got no answer."""
    leader = sim.coordinator
    if sim.job is not None and leader.machine.job_id == sim.job.job_id:
        sim.log("submit the job again")
        leader.submit(sim.job, None)


def corrupt_shard(sim: Simulation) -> None:
    """Change a bit of what one node holds of the newest complete snapshot."""
    _corrupt(sim, 1)


def corrupt_shards(sim: Simulation) -> None:
    """Change bits on several nodes, which is more than some protections withstand."""
    _corrupt(sim, 3)


def _corrupt(sim: Simulation, count: int) -> None:
    newest = sim.invariants.newest
    if newest is None:
        return
    key = sim.invariants.key_of(newest)
    holders = [node for node in sim.nodes.values() if node.arena.holds(key)]
    for node in sim.world.rng.sample(holders, min(count, len(holders))):
        sim.log(f"corrupt {node.name}'s shard of the snapshot of step {key.step}")
        for shard in node.arena.parts(key).values():
            shard.corrupt = True


def corrupt_parameter(sim: Simulation) -> None:
    """Flip a bit of a parameter in the memory of a trainer that trains, if another one has a copy of its layer."""
    trainers = [trainer for node in live_nodes(sim) for trainer in node.trainers.values()]
    for trainer in sim.world.rng.sample(trainers, len(trainers)):
        if trainer.flip_bit():
            sim.log(f"a bit flips in a parameter of {trainer.node.name}/{trainer.device}")
            return


def fill_disk(sim: Simulation) -> None:
    """Fill a coordinator's disk: it ends since it cannot write its journal, and again after every restart."""
    coordinator, for_s = sim.world.rng.choice(sim.coordinators), sim.world.between(0.5, 8.0)
    sim.log(f"the disk of {coordinator.name} is full for {for_s:.2f} s")
    coordinator.disk.full_until = sim.world.now + for_s


def power_cut(sim: Simulation) -> None:
    """Cut the power of the broker and the leader for a moment, as if they shared a host."""
    sim.network.stop_broker(sim.world.between(0.1, 3.0))
    leader = sim.coordinator
    leader.crash()
    leader.lose_power()
    sim.world.call_later(sim.world.between(0.5, 4.0), leader.restart)


def kill_between_effects(sim: Simulation) -> None:
    """Kill the leader between two effects of one of its next steps."""
    sim.coordinator.crash_after = sim.world.rng.randrange(12)


@on_some_node
def kill_node_between_effects(sim: Simulation, node: SimNode) -> None:
    """Kill a daemon between two of the next effects that it carries out, and start it again."""
    sim.log(f"kill {node.name} between effects")
    node.crash_after = sim.world.rng.randrange(12)
    sim.world.call_later(sim.world.between(1.0, 6.0), sim.start_if_down, node)


def crash_two_hosts(sim: Simulation) -> None:
    """Crash two hosts at once, with their memory."""
    live = live_nodes(sim)
    for node in sim.world.rng.sample(live, min(2, len(live))):
        node.crash(host=True)
        sim.world.call_later(sim.world.between(0.5, 5.0), sim.start_if_down, node)


def depose_leader_and_clear_broker(sim: Simulation) -> None:
    """Cut the leader off until another one leads, and let the broker forget everything just before the leader
    is back.
    """
    rng, for_s = sim.world.rng, sim.world.between(6.0, 9.0)
    sim.network.cut(sim.coordinator.name, for_s)
    sim.world.call_later(for_s + rng.uniform(-0.3, 0.3), sim.network.stop_broker, rng.uniform(0.1, 1.5))


def freeze_everything(sim: Simulation) -> None:
    """Freeze every process for the same time."""
    for_s = sim.world.between(2.0, 9.0)
    for coordinator in sim.coordinators:
        coordinator.freeze(for_s)
    for node in live_nodes(sim):
        node.freeze(for_s)


def request_snapshot_now(sim: Simulation) -> None:
    """Request a snapshot, as a user does."""
    sim.coordinator.request_snapshots(now=True)


def restore_saved_broker(sim: Simulation) -> None:
    """Let the broker save what it retains, and a while later lose power together with the leader."""
    rng, left = sim.world.rng, dict(sim.network.retained)

    def stop_and_crash() -> None:
        sim.network.stop_broker(rng.uniform(0.1, 1.5), left)
        leader = sim.coordinator
        leader.crash()
        sim.world.call_later(rng.uniform(4.0, 9.0), leader.restart)

    sim.world.call_later(rng.choice((0.5, 1.5, 3.0)), stop_and_crash)
