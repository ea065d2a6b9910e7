"""One seed: draw a cluster and its faults, let them happen, heal, and require that the job is done."""

import traceback
from dataclasses import dataclass
from random import Random

from ftd.faults.sim import drawing, faults, upgrades
from ftd.faults.sim.coordinator import AtBroker, SimCoordinator, leader_of
from ftd.faults.sim.forgotten import Listed
from ftd.faults.sim.invariants import Invariants
from ftd.faults.sim.network import Network
from ftd.faults.sim.node import Pace, SimNode
from ftd.faults.sim.place import SimPlace
from ftd.faults.sim.plans import MOST_NODES
from ftd.faults.sim.versions import Versions
from ftd.faults.sim.world import Violation, World
from planner.values import LayerProfile, ModelProfile, Policy
from statemachine.messages.cluster import ToNode, ToNodes
from statemachine.messages.values import CheckpointPolicy, Job, SnapshotPolicy

CHAOS_S = 16.0
"""Faults begin in this time; each lasts as long as it lasts, until the healing."""
HEAL_S = 24.0
PATIENCE_S = 150.0
"""After the healing the job must be done within this time. One whose state is lost is given up
``lost_state_s`` after the last node came back, and the next one takes as long again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model and policy that planners exist for; few, so that templates are made once for all seeds."""

    layers: int
    devices: int
    memory_bytes: int | None
    tolerate: int = 1
    oobleck: bool = False
    microbatches: int = 12
    nodes: tuple[int, int] = (3, 5)
    """Fewest and most nodes at the start."""


SHAPES = (
    Shape(layers=4, devices=1, memory_bytes=None, nodes=(2, 4)),
    Shape(layers=5, devices=2, memory_bytes=30_000, nodes=(3, 5)),
    Shape(layers=4, devices=2, memory_bytes=None, nodes=(2, 3)),
    Shape(layers=6, devices=1, memory_bytes=36_500, nodes=(4, 6)),
    Shape(layers=5, devices=1, memory_bytes=60_000, oobleck=True, nodes=(4, 5)),
    # Two microbatches and two layers use four nodes at most: the others are idle members.
    Shape(layers=2, devices=2, memory_bytes=None, microbatches=2, nodes=(3, 6)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaning:
    """What every seed is to have besides what it draws: for who looks for one thing, and finds it soon,
    whatever else is drawn."""

    zero1: bool | None = None
    protection: str = ""
    checkpoints: bool | None = None
    coordinators: int | None = None
    duplicates: float | None = None
    """Probability that a message comes again."""
    upgrades: bool | None = None
    """Coordinators get another program in the middle of it."""
    churn: bool | None = None
    """Nodes go for good, and others come under new names."""
    late_wills: bool | None = None
    """Hosts lose power, and their last wills come when the keep-alive is over."""
    evaluations: bool | None = None
    """The state after every so many steps is evaluated."""
    rarer: bool | None = None
    """Faults that come more seldom, and two in one instant."""
    strikes: tuple[drawing.Strike, ...] = ()
    at_commits: tuple[tuple[int, faults.Fault], ...] = ()
    """With the so manieth commit of a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    seed: int
    violation: str | None
    """What broke, or ``None``."""
    events: int
    virtual_s: float
    trace: tuple[str, ...]
    faults: tuple[str, ...]

    @property
    def replay(self) -> str:
        """The one line that shows this run again."""
        return f"ftd sim --seed {self.seed} --trace"


def _profile(shape: Shape) -> ModelProfile:
    layers = tuple(
        LayerProfile(
            forward_ms=10.0 * (1 + n % 3),
            backward_ms=20.0 * (1 + n % 3),
            parameter_bytes=2000 + 500 * n,
            gradient_bytes=2000 + 500 * n,
            optimizer_bytes=4000 + 1000 * n,
            activation_bytes=1000,
            output_bytes=500,
        )
        for n in range(shape.layers)
    )
    return ModelProfile(layers=layers, microbatch_rows=2, device_memory_bytes=shape.memory_bytes)


PROFILES = {shape: _profile(shape) for shape in SHAPES}


class Simulation:
    """A cluster, a user who submits jobs, and whatever happens to them."""

    def __init__(self, seed: int, *, tracing: bool = False, leaning: Leaning | None = None) -> None:
        self.world = world = World(seed, tracing=tracing)
        self.leaning = leaning = leaning or Leaning()
        self.shape = shape = world.rng.choice(SHAPES)
        self.profile = PROFILES[shape]
        self.policy = Policy(
            devices_per_node=shape.devices,
            tolerate=shape.tolerate,
            global_batch=2 * shape.microbatches,
            microbatch_rows=2,
            minimum="oobleck" if shape.oobleck else "one_replica",
            zero1=seed % 3 == 1 if leaning.zero1 is None else leaning.zero1,
        )
        self.pace = Pace(
            step_s=world.between(0.1, 0.6),
            imbalance=world.between(0.1, 1.0),
            commit_spread_s=world.rng.choice((0.01, 0.1, 0.3)),
            full=world.rng.choice((0.0, 0.0, 0.05)),
        )
        every, scheme = (
            world.rng.choice((0, 1, 2, 3, 5)),
            world.rng.choice(faults.protections(sharded=self.policy.zero1)),
        )
        self.snapshot = SnapshotPolicy(
            every_steps=max(every, 1) if leaning.protection or leaning.checkpoints else every,
            protection=leaning.protection or scheme,
            auto_interval=world.chance(0.2),
            auto_protection=world.chance(0.2),
        )
        self.checkpoint = CheckpointPolicy()
        wanted = seed % 3 == 0 if leaning.checkpoints is None else leaning.checkpoints
        if self.snapshot.every_steps and wanted:  # the other seeds are as they are without
            self.checkpoint = CheckpointPolicy(
                url="/checkpoints",
                every_steps=world.rng.choice((1, 2, 4)),
                keep=world.rng.choice((1, 2, 3)),
                huggingface_every_steps=3 * (seed % 2),
                huggingface_directory="/exports",
            )
        self.faults: list[str] = []
        self.healed = False
        self.job: Job | None = None
        self.jobs = 0
        self.versions = Versions()
        self.invariants = Invariants(world, self.versions, self.policy, self.profile)
        own = Random(f"{seed} evaluations")  # The other seeds are as they are without.
        every, some = own.choice((1, 2, 3, 7)), own.random() < 0.4
        if some if leaning.evaluations is None else leaning.evaluations:
            self.invariants.evaluations.every_steps = every
        self.network = Network(world)
        drawn = world.rng.choice((0.0, 0.0, 0.03))
        self.network.duplicates = drawn if leaning.duplicates is None else leaning.duplicates
        self.network.slow = world.rng.choice((0.0, 0.0, 0.05))
        self.place = self.invariants.place = SimPlace(
            invariants=self.invariants,
            full=world.rng.choice((0.0, 0.0, 0.05)) if self.checkpoint.url else 0.0,
        )
        self.coordinators = [
            SimCoordinator(world, self.network, self.invariants, f"coordinator-{number}")
            for number in range((seed % 3 + 1) if leaning.coordinators is None else leaning.coordinators)
        ]
        for coordinator in self.coordinators:  # Each host was started at another time.
            coordinator.clock.since_boot_s = Random(f"{seed} {coordinator.name}").uniform(5e3, 1e5)
        self.invariants.coordinators = [*self.coordinators]
        AtBroker(self.network, self.invariants, self.coordinators)
        self.nodes: dict[str, SimNode] = {}
        self.invariants.nodes = self.nodes
        self.network.take_command = self._command

    @property
    def coordinator(self) -> SimCoordinator:
        """The one that leads; or that did, as far as it knows."""
        return leader_of(self.network, self.coordinators)

    def _command(self, node: str, message: ToNode | ToNodes) -> None:
        self.nodes[node].command(message)

    def log(self, what: str) -> None:
        self.faults.append(f"{self.world.now:7.3f} {what}")
        if self.world.tracing:
            self.world.note("FAULT", what)

    # --- what the world does ----------------------------------------------------------------------

    def begin(self) -> None:
        world = self.world
        for coordinator in self.coordinators:
            coordinator.start()
        for _ in range(world.rng.randint(*self.shape.nodes)):
            self.add_node()
        world.at(world.between(0.1, 1.0), self.submit)
        drawing.draw(self, CHAOS_S)
        Listed(self)
        world.at(HEAL_S, self.heal)

    def add_node(self) -> None:
        if sum(node.gone_at is None for node in self.nodes.values()) >= MOST_NODES:
            return
        node = SimNode(
            self.world,
            self.network,
            self.invariants,
            self.versions,
            f"node-{len(self.nodes)}",
            self.shape.devices,
            self.profile,
            self.pace,
        )
        self.nodes[node.name] = node
        self.world.at(self.world.between(0.0, 0.3), self.revive, node)

    def revive(self, node: SimNode) -> None:
        if not node.up and node.gone_at is None:
            node.start()

    def reconnect_data(self, node: SimNode) -> None:
        node.data_cut = False

    def quicken(self, node: SimNode) -> None:
        node.slowness = 1.0

    def strike(self, fault: faults.Fault) -> None:
        if not self.healed:
            fault(self)

    def submit(self) -> None:
        """The user submits the job, and again when there was nobody to take it."""
        open_here = self.coordinator.leading and self.coordinator.heard
        if not open_here or (self.checkpoint.url and (self.place.closed or self.place.hangs_s)):
            self.world.at(0.7, self.submit)
            return
        self.jobs += 1
        steps = self.world.rng.randrange(12, 30)
        if self.invariants.failed_job is not None:
            self.place.remove_damaged()
        begin = self.place.newest() if self.checkpoint.url else None
        self.job = Job(
            job_id=f"job-{self.jobs}",
            name="job",
            steps=steps + (begin.step if begin is not None else 0),
            policy=self.policy,
            snapshot=self.snapshot,
            checkpoint=self.checkpoint,
            training={"evaluation_every_steps": self.invariants.evaluations.every_steps},
        )
        self.coordinator.submit(self.job, begin)
        self.world.at(1.0, self.look, self.job)

    def look(self, job: Job) -> None:
        """Is the job over? A user whose job ended before the healing submits another."""
        machine = self.coordinator.machine
        state = str(machine.phase)
        if not self.coordinator.leading or state not in ("FINISHED", "FAILED", "WAITING"):
            pass
        elif self.job_is_unknown(job):
            self.submit()
            return
        elif state == "FINISHED" and self.healed and not self.left_out():
            self.world.done = True
            return
        elif state == "FINISHED" and self.healed:
            pass  # They are waited for.
        elif state in ("FINISHED", "FAILED"):
            if self.healed or self.world.chance(0.5):
                self.submit()
                return
            self.world.done = state == "FINISHED" and self.world.chance(0.5)
        self.world.at(1.0, self.look, job)

    def left_out(self) -> list[str]:
        """Nodes that are there and do not belong to the cluster."""
        listed = self.coordinator.machine.public_state()["nodes"]
        there = {name for name, node in listed.items() if node["state"] != "OFFLINE"}
        return [node.name for node in self.nodes.values() if node.up and node.name not in there]

    def job_is_unknown(self, job: Job) -> bool:
        """The coordinator was killed before it journaled the job: the user has no answer and asks again."""
        known = self.coordinator.machine.public_state()["job"]
        return known is None or known["id"] != job.job_id

    def heal(self) -> None:
        """From here on nothing goes wrong any more."""
        self.healed = True
        self.log("healed")
        for coordinator in self.coordinators:
            coordinator.crash_after = None
            coordinator.thinks_s = coordinator.disk.full_until = 0.0
        self.network.duplicates = self.network.slow = 0.0
        self.network.lines.clear()
        self.network.apart.clear()
        self.network.start_broker()
        self.place.opens()
        for name in list(self.network.links):
            self.network.heal(name)
        upgrades.finish(self)
        for coordinator in self.coordinators:
            coordinator.thaw()
            coordinator.restart()
        for node in self.nodes.values():
            node.eased()
            self.revive(node)
            for trainer in list(node.trainers.values()):
                if trainer.frozen or trainer.asleep:
                    node.fail_trainer(trainer.device, "exited")
        # Nodes that were drained or asked to leave, too, come back to work in the end.
        self.world.at(25.0, self._replace_drained)

    def _replace_drained(self) -> None:
        for name, state in self.coordinator.machine.public_state()["nodes"].items():
            if state["draining"]:
                self.nodes[name].crash()
                self.world.at(0.5, self.revive, self.nodes[name])
        for node in self.nodes.values():
            self.world.at(1.0, self.revive, node)

    def finish(self) -> None:
        """:raises Violation: an invariant broke, or the job was not done in time after the healing."""
        self.begin()
        try:
            self.world.run(HEAL_S + PATIENCE_S)
        finally:
            leader = self.coordinator
            for coordinator in self.coordinators:
                coordinator.loop.kill()
        if not self.world.done:
            state = leader.machine.public_state()
            raise Violation(
                f"no progress after the healing: {state['phase']} at step {state['step']}, "
                f"generation {state['generation']}, waiting for {state['waiting_for'] or 'nothing'}, "
                f"without {self.left_out() or 'nobody'}"
            )
        self.invariants.telling.complete()


def run_seed(seed: int, *, tracing: bool = False, leaning: Leaning | None = None) -> Result:
    """Run one seed to its end."""
    simulation = Simulation(seed, tracing=tracing, leaning=leaning)
    violation: str | None = None
    try:
        simulation.finish()
    except Violation as error:
        violation = str(error)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        violation = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
    world = simulation.world
    return Result(
        seed=seed,
        violation=violation,
        events=world.events,
        virtual_s=world.now,
        trace=tuple(world.lines),
        faults=tuple(simulation.faults),
    )
