"""A cluster that a seed draws, as the faults see it."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from ftd.faults.sim.cluster import SimCluster
from ftd.faults.sim.host import StepTiming
from ftd.faults.sim.plans import MOST_NODES
from ftd.faults.sim.world import World
from planner.values import LayerProfile, ModelProfile, Policy
from statemachine.messages.values import CheckpointPolicy, Job, SnapshotPolicy, UpdatePolicy

Fault = Callable[["Simulation"], None]

TriggeredFault = tuple[str, Fault, int]
"""The name of an event, the fault to inject shortly after it, and how many such events to skip first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """A model and policy for which planners exist. There are few, so that templates are computed once for all
    seeds.
    """

    layers: int
    devices: int
    memory_bytes: int | None
    oobleck: bool = False
    microbatches: int = 12
    nodes: tuple[int, int] = (3, 5)
    """The smallest and largest number of nodes at the start."""


SHAPES = (
    JobShape(layers=4, devices=1, memory_bytes=None, nodes=(2, 4)),
    JobShape(layers=5, devices=2, memory_bytes=30_000, nodes=(3, 5)),
    JobShape(layers=4, devices=2, memory_bytes=None, nodes=(2, 3)),
    JobShape(layers=6, devices=1, memory_bytes=36_500, nodes=(4, 6)),
    JobShape(layers=5, devices=1, memory_bytes=60_000, oobleck=True, nodes=(4, 5)),
    # Two microbatches and two layers use at most four nodes: the others are idle members.
    JobShape(layers=2, devices=2, memory_bytes=None, microbatches=2, nodes=(3, 6)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedOverrides:
    """Settings that every seed has in addition to what it draws, so that tests for one thing find it soon, whatever
    else is drawn.

    ``None`` leaves the choice to the seed.
    """

    zero1: bool | None = None
    protection: str = ""
    checkpoints: bool | None = None
    coordinators: int | None = None
    duplicates: float | None = None
    """The probability that a message is duplicated."""
    upgrades: bool | None = None
    """Whether coordinators get another program version during the run."""
    churn: bool | None = None
    """Whether nodes go for good and others come under new names."""
    power_losses: bool | None = None
    """Whether hosts lose power, so that their last wills come when the keep-alive expires."""
    bad_node: bool | None = None
    """Whether the trainers of one node raise again and again."""
    bad_devices: bool | None = None
    """Whether nodes check their health, and devices are wrong, slow or hung."""
    evaluations: bool | None = None
    """Whether jobs evaluate the state after some steps."""
    corruption: bool | None = None
    """Whether jobs compare replicas, and bits of parameters flip."""
    rare_faults: bool | None = None
    """Whether rare faults are injected, and two faults at one instant."""
    triggered_faults: tuple[TriggeredFault, ...] = ()
    at_commits: tuple[tuple[int, Fault], ...] = ()
    """Faults to inject at the given commit of a rank, counted over all ranks."""


def _profile(shape: JobShape) -> ModelProfile:
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


def protections(*, sharded: bool) -> tuple[str, ...]:
    """Return the protections that snapshots may have, ``sharded`` by ZeRO-1 or not."""
    if sharded:
        return ("none", "aor", "aor", "arc:1+aor")
    return ("none", "aec", "aec+buddy", "aec+buddy", "arc:1", "aec2", "aec+arc:1", "buddy")


class Simulation(SimCluster):
    """A cluster with its job, as the faults see it."""

    def __init__(self, seed: int, *, tracing: bool = False, overrides: SeedOverrides | None = None) -> None:
        world = World(seed, tracing=tracing)
        if overrides is not None and overrides.bad_devices is not None:
            world.checks_health = overrides.bad_devices
        self.overrides = overrides = overrides or SeedOverrides()
        self.shape = shape = world.rng.choice(SHAPES)
        policy = Policy(
            devices_per_node=shape.devices,
            global_batch=2 * shape.microbatches,
            microbatch_rows=2,
            minimum="oobleck" if shape.oobleck else "one_replica",
            zero1=seed % 3 == 1 if overrides.zero1 is None else overrides.zero1,
        )
        step_timing = StepTiming(
            step_s=world.between(0.1, 0.6),
            imbalance=world.between(0.1, 1.0),
            commit_spread_s=world.rng.choice((0.01, 0.1, 0.3)),
            no_room_probability=world.rng.choice((0.0, 0.0, 0.05)),
        )
        every, scheme = (
            world.rng.choice((0, 1, 2, 3, 5)),
            world.rng.choice(protections(sharded=policy.zero1)),
        )
        self.snapshot = SnapshotPolicy(
            every_steps=max(every, 1) if overrides.protection or overrides.checkpoints else every,
            protection=overrides.protection or scheme,
            auto_interval=world.chance(0.2),
            auto_protection=world.chance(0.2),
        )
        self.checkpoint = CheckpointPolicy()
        wants_checkpoints = seed % 3 == 0 if overrides.checkpoints is None else overrides.checkpoints
        # The other seeds stay as they are without checkpoints.
        if self.snapshot.every_steps and wants_checkpoints:
            self.checkpoint = CheckpointPolicy(
                url="/checkpoints",
                every_steps=world.rng.choice((1, 2, 4)),
                auto_interval=overrides.checkpoints is None and seed % 9 == 0,
                keep=world.rng.choice((1, 2, 3)),
                huggingface_every_steps=3 * (seed % 2),
                huggingface_directory="/exports",
            )
        self.compare_replicas_every = 0
        # A loss is the number of a state, so one that follows a step that was redone may be a spike.
        own = Random(f"{seed} spikes")
        spikes = bool(self.snapshot.every_steps) and own.random() < 0.3
        self.updates = UpdatePolicy(
            max_skipped=0,
            on_spike="skip" if spikes else "continue",
            spike_deviations=own.choice((1.9, 2.2)),
            spike_window=3,
        )
        self.faults: list[str] = []
        self.healed = False
        self.job: Job | None = None
        """The newest submitted job."""
        self.jobs = 0
        count = (seed % 3 + 1) if overrides.coordinators is None else overrides.coordinators
        super().__init__(
            world,
            policy,
            PROFILES[shape],
            [f"coordinator-{number}" for number in range(count)],
            step_timing=step_timing,
        )
        own = Random(f"{seed} evaluations")  # The other seeds stay as they are without evaluations.
        every, some = own.choice((1, 2, 3, 7)), own.random() < 0.4
        if some if overrides.evaluations is None else overrides.evaluations:
            self.invariants.evaluations.every_steps = every
        drawn = world.rng.choice((0.0, 0.0, 0.03))
        self.network.duplicate_probability = drawn if overrides.duplicates is None else overrides.duplicates
        self.network.slow_probability = world.rng.choice((0.0, 0.0, 0.05))
        if self.checkpoint.url:
            self.checkpoint_store.write_failure_probability = world.rng.choice((0.0, 0.0, 0.05))
        for coordinator in self.coordinators:  # Each host was booted at another time.
            coordinator.clock.since_boot_s = Random(f"{seed} {coordinator.name}").uniform(5e3, 1e5)

    def log(self, what: str) -> None:
        self.faults.append(f"{self.world.now:7.3f} {what}")
        if self.world.tracing:
            self.world.note("FAULT", what)

    def add_node(self) -> None:
        if sum(node.removed_at is None for node in self.nodes.values()) >= MOST_NODES:
            return
        node = self.make_node(f"node-{len(self.nodes)}")
        self.world.call_later(self.world.between(0.0, 0.3), self.start_if_down, node)

    def inject(self, fault: Fault) -> None:
        if not self.healed:
            fault(self)
