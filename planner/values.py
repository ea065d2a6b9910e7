"""Inputs and results of the planner: plain immutable values.

Layers are numbered 0 … L−1, and a range of layers is half open, ``[first_layer, end_layer)``. A *device* is
one accelerator (or one simulated device on a CPU) of one node. Sizes are bytes. Times that come from a
profile are milliseconds, the unit of profiles: their sums stay exact if the profile's numbers are, which
the same numbers in seconds would not. Everything that a plan tells the rest of ftd is in seconds.
"""

from math import gcd
from typing import Literal, NamedTuple

import msgspec

Recompute = Literal["none", "selective", "full"]
"""Way in which a stage gets the activations that its backward pass needs: ``none`` keeps all of them;
``selective`` keeps the outputs of matrix products and attention and computes the rest again; ``full`` keeps
the layers' inputs and computes each layer again.
"""
ActivationCheckpointing = Literal["none", "selective", "full", "auto"]
"""One ``Recompute`` for all stages; or ``auto``: for each stage the fastest one that fits into memory."""
Within = Literal["replicate", "shard", "tensor"]
"""Way in which the devices of a stage share its work. With ``replicate`` and ``shard`` they split the rows of
a microbatch. ``replicate``: each device holds all parameters, gradients and optimizer state. ``shard``:
each of k devices holds a k-th of each layer's state, and gathers a layer's parameters for its forward and
its backward pass. ``tensor``: each holds a k-th too, and computes a k-th of the layers' linear modules, on
all rows. A stage of one device is ``replicate``. The devices of a tensor-parallel stage may be several
*replicas* (``StageTemplate.replicas``), each of which has all of the state in parts, and its share of the rows.
"""
WithinNode = Literal["auto", "replicate", "shard", "tensor"]
"""One ``Within`` for all stages of several devices; or ``auto``: for each stage the fastest one that fits."""
Objective = Literal["iteration", "paper"]
BatchObjective = Literal["minmax", "variance"]
BatchSolver = Literal["exact", "pyomo"]
Minimum = Literal["one_replica", "oobleck"]
"""Fewest nodes with which a job continues: those of one replica of the model, or of ``tolerate`` + 1 replicas."""


class SplitTime(msgspec.Struct, frozen=True, kw_only=True):
    """Time of one microbatch of one layer on several devices of a node, including their communication."""

    devices: int
    forward_ms: float
    backward_ms: float
    activation_bytes: int | None = None
    """Bytes that autograd keeps on the device that keeps most. ``None``: the share by rows of what one device
    keeps, which is too little if a part does not depend on the rows (low-precision copies of parameters) or
    if rows are not split. Recomputation changes what is kept in proportion.
    """


class Recomputation(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of one microbatch of one layer on one device that recomputes activations."""

    activation_bytes: int
    """Bytes kept between the forward and the backward pass."""
    recompute_ms: float
    """Additional time of both passes together, compared with no recomputation."""


class TensorSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one layer that tensor parallelism divides, and what its devices exchange for one microbatch."""

    parameter_bytes: int
    """Parameters that are divided; the others are gathered while the layer runs."""
    column_bytes: int
    """Part of ``parameter_bytes`` that belongs to rowwise modules, for which a device also keeps columns and
    their gradients.
    """
    activation_bytes: int
    """Part of what autograd keeps that is divided."""
    forward_bytes: int
    """Activations that the devices sum or gather in the forward pass."""
    forward_exchanges: int
    """Number of operations that exchange ``forward_bytes``."""
    backward_bytes: int
    """Gradients that the devices sum in the backward pass."""
    backward_exchanges: int


class LayerProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The measured cost of one layer for one microbatch on one device."""

    forward_ms: float
    backward_ms: float
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    """Bytes that autograd keeps between the forward and the backward pass of one microbatch."""
    output_bytes: int
    """Bytes sent to the next stage in one direction for one microbatch."""
    full: Recomputation | None = None
    """``None``: the layer keeps its input, which is the output of the previous layer, and runs its forward
    pass again.
    """
    selective: Recomputation | None = None
    """``None``: not measured, or the layer cannot be recomputed selectively."""
    working_bytes: int = 0
    """Most bytes that the forward or the backward pass of one microbatch needs for a moment, in addition to
    ``activation_bytes`` and the summed gradients: the gradient of a parameter before it is added to the sum,
    and values between operations.
    """
    buffer_bytes: int = 0
    """Part of ``parameter_bytes`` in persistent buffers, which are whole on each device of a stage."""
    tensor: TensorSplit | None = None
    """``None``: tensor parallelism divides no part of the layer, and each device computes all of it."""
    split: tuple[SplitTime, ...] = ()
    """Measurements on more than one device. For other numbers the model is: a microbatch is split by rows, so
    d devices take ⌈rows / d⌉ / rows of the time of one.
    """

    @property
    def state_bytes(self) -> int:
        """Bytes that a device must receive to become an owner of this layer."""
        return self.parameter_bytes + self.optimizer_bytes


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of moving bytes from one device to another."""

    latency_ms: float = 0.1
    bytes_per_s: float = 1e9

    def time_ms(self, size_bytes: float) -> float:
        return self.latency_ms + size_bytes / self.bytes_per_s * 1e3


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A model measured layer by layer, and the links between its stages."""

    layers: tuple[LayerProfile, ...]
    microbatch_rows: int
    device_memory_bytes: int | None = None
    """Memory of one device; ``None`` applies no memory limit."""
    stage_devices: tuple[int, ...] | None = None
    """Possible numbers of devices of a stage, ascending; ``None``: any number up to the microbatch's rows."""
    link: Link = msgspec.field(default_factory=Link)
    """Link for activations and their gradients, from stage to stage."""
    ring: Link = msgspec.field(default_factory=Link)
    """One hop of the ring in which owners all-reduce gradients: 2·(owners − 1) / owners of each byte travels
    over 2·(owners − 1) hops.
    """
    inner: Link | None = None
    """One hop of a ring among the devices of one node, for what a sharded stage gathers and reduces. ``None``:
    equal to ``ring``.
    """
    shard_problem: str | None = None
    """Reason, in words, why the devices of a stage cannot hold shards of this model; ``None``: they can."""
    tensor_problem: str | None = None
    """Reason, in words, why the devices of a stage cannot compute parts of this model's layers; ``None``: they
    can, for layers that have ``LayerProfile.tensor``.
    """
    tensor_counts: tuple[tuple[str, int], ...] = ()
    """Numbers that the number of devices of such a stage must divide (features, attention heads), each with
    its name.
    """
    flops: float | None = None
    """Floating-point operations of a microbatch, forward and backward, without recomputation; ``None``:
    unknown. No plan depends on it.
    """
    device_peak_flops: float | None = None
    """Most operations per second of one device in the precision that computes; ``None``: unknown."""


class PlannerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Choices of how layers are arranged on the nodes.

    Each is a key of ``[planner]`` in a job file, a field of a submitted job's policy, and an option of
    ``ftd plan``. All three take the name, the allowed values, the default and the meaning from this
    declaration.
    """

    objective: Objective = "iteration"
    """Quantity that a plan minimises: the time of a step, or the formula of the Oobleck paper."""
    split: Literal["any", "aligned"] = "any"
    """Way in which a node's devices are split into stages; ``aligned``: into aligned powers of two."""
    batch_objective: BatchObjective = "minmax"
    """Quantity that the pipelines' shares of the batch minimise."""
    batch_solver: BatchSolver = "exact"
    """Method that computes the shares: the planner's own combinatorial method, or integer programs (Pyomo,
    HiGHS).
    """
    within_node: WithinNode = "auto"
    """Way in which the devices of a stage share its work: each holds all of the stage's parameters and
    optimizer state (``replicate``), a shard of them (``shard``), or the part of them that it computes with
    (``tensor``); ``auto``: for each stage the fastest one that fits.
    """


class RequestedPolicy(PlannerOptions, frozen=True, kw_only=True):
    """Requirements of a job on its plans, on whatever nodes it runs."""

    tolerate: int = 1
    """Oobleck's f: number of simultaneous node failures that must leave a copy of every layer."""
    global_batch: int
    """Samples of one step over all pipelines; exact, never changed by a plan."""
    microbatch_rows: int
    """Samples of one microbatch; divides ``global_batch``."""
    minimum: Minimum = "one_replica"
    """Fewest nodes to train on: one replica's n₀, or Oobleck's (f+1)·n₀ (§4.1.1)."""
    activation_checkpointing: ActivationCheckpointing = "none"
    device_memory_bytes: int | None = None
    """Memory of one device in bytes, instead of the profile's value."""
    within_node: WithinNode = "replicate"  # Jobs that are submitted without it hold whole layers.


class Policy(RequestedPolicy, frozen=True, kw_only=True):
    """Requirements that a plan must meet: a job's request on the nodes of one cluster."""

    devices_per_node: int = 1
    zero1: bool = False
    """ZeRO-1: each owner of a layer, one in each pipeline, keeps only its part of the optimizer state."""

    @property
    def microbatches(self) -> int:
        return self.global_batch // self.microbatch_rows


class Device(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One device of one node, which runs one training rank."""

    node: str
    index: int


class StatePart(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """Parameters and optimizer state of a range of a layer's elements: [n·start // of, n·end // of) of each
    vector of n elements. The fractions are in lowest terms, so that equal ranges are equal values.
    """

    layer: int
    start: int
    end: int
    of: int
    replica: bool = False
    """Whether the part is held on the host for its owner (AOR), as current as the owner's."""

    def __post_init__(self) -> None:
        divisor = gcd(self.start, self.end, self.of)
        if divisor > 1:
            for name in ("start", "end", "of"):
                msgspec.structs.force_setattr(self, name, getattr(self, name) // divisor)

    @property
    def is_whole(self) -> bool:
        """Whether the part is the whole layer."""
        return self.start == 0 and self.end == self.of


class Mode(NamedTuple):
    """Choice of the planner for a stage of given layers and devices."""

    recompute: Recompute
    within: Within = "replicate"
    replicas: int = 1
    """As in ``StageTemplate``."""

    def parts(self, devices: int) -> int:
        """Return the number of parts into which ``devices`` devices divide the stage's state."""
        return 1 if self.within == "replicate" else max(1, devices // self.replicas)

    def of(self, devices: int) -> "Mode":
        """Return the mode that a stage of ``devices`` devices has: one device is all replicas of any mode."""
        return self if devices > 1 else Mode(self.recompute)


class StageTemplate(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive layers on ``devices`` devices of the template's node ``node_offset``."""

    first_layer: int
    end_layer: int
    node_offset: int
    devices: int
    recompute: Recompute = "none"
    within: Within = "replicate"
    replicas: int = 1
    """Number of groups of consecutive devices, each of which holds the stage's divided state once, and computes
    its share of the rows. Above 1 only for ``tensor``.
    """

    @property
    def mode(self) -> Mode:
        return Mode(self.recompute, self.within, self.replicas)

    @property
    def parts(self) -> int:
        """Number of parts into which the stage's state is divided."""
        return 1 if self.within == "replicate" else self.devices // self.replicas


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline for ``nodes`` nodes that are not yet named (Oobleck §4.1)."""

    nodes: int
    stages: tuple[StageTemplate, ...]
    objective_ms: float
    lower_bound_ms: float

    @property
    def proved_optimal(self) -> bool:
        return self.objective_ms <= self.lower_bound_ms


class StagePlacement(msgspec.Struct, frozen=True, kw_only=True):
    """A stage on named devices, all of one node."""

    first_layer: int
    end_layer: int
    devices: tuple[Device, ...]
    recompute: Recompute = "none"
    within: Within = "replicate"
    replicas: int = 1
    """As in ``StageTemplate``."""

    @property
    def mode(self) -> Mode:
        return Mode(self.recompute, self.within, self.replicas)

    @property
    def parts(self) -> int:
        """Number of parts into which the stage's state is divided."""
        return 1 if self.within == "replicate" else len(self.devices) // self.replicas


class PipelinePlacement(msgspec.Struct, frozen=True, kw_only=True):
    """A template on named nodes with its share of the global batch.

    The pipeline computes microbatches ``first_microbatch … first_microbatch + microbatches − 1`` of the
    global batch; microbatch k is always rows ``[k·rows, (k+1)·rows)``, whatever the plan.
    """

    stages: tuple[StagePlacement, ...]
    first_microbatch: int
    microbatches: int
    estimated_s: float

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(d.node for s in self.stages for d in s.devices))


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """A copy of one layer's whole state (parameters, optimizer, persistent buffers) from one device to
    another.
    """

    layer: int
    source: Device
    target: Device
    size_bytes: int


class ReleasedLayers(msgspec.Struct, frozen=True, kw_only=True):
    """Old layers for which a device has no room next to its new stage (``planner.changes.transition``)."""

    device: Device
    parked: tuple[int, ...]
    """Layers kept in host memory from before new state arrives until the first commit; they count as held and
    can be sent.
    """
    dropped: tuple[int, ...]
    """Layers that are freed at once, because other nodes of the plan hold them."""


Method = Literal[
    "initial", "unchanged", "rebalance", "simple", "borrow", "merge", "grow", "keep", "even", "best"
]
"""Way in which a layout was made: ``planner.changes.candidates`` defines each; ``rebalance``: the same nodes
under other speeds (``planner.changes.stragglers``).
"""


class ConsideredPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A layout that was compared with others, and its cost (``planner.changes.tradeoff``)."""

    method: Method
    sizes: tuple[int, ...]
    """Number of nodes of each pipeline."""
    iteration_s: float
    """Time of a step, with the batch distributed again."""
    transfer_bytes: int | None
    """Bytes to move. ``None``: not counted, because the step alone takes longer than another layout's step
    with its transfer.
    """
    transfer_s: float | None
    """Time of the device that sends or receives most."""
    expected_iteration_s: float
    """Time of a step if the transfer is paid back until the next failure; a lower bound if the transfer was
    not counted.
    """


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The computation of every device, and the bytes that must move before it can start."""

    pipelines: tuple[PipelinePlacement, ...]
    transfers: tuple[Transfer, ...]
    """Transfers, the largest first, spread over sources."""
    method: Method
    reason: str
    """One sentence for the user: what was decided and why."""
    estimated_iteration_s: float
    idle_nodes: tuple[str, ...] = ()
    considered: tuple[ConsideredPlan, ...] = ()
    """Layouts that were compared, this plan's first, then by the expected time of a step; empty if the
    previous plan continues.
    """
    part_bytes: int = 0
    """Bytes that must move under ZeRO-1, without replicas. ``transfers`` is empty then: the ranks compute from
    what they hold who sends which part to whom.
    """
    released_layers: tuple[ReleasedLayers, ...] = ()

    @property
    def devices(self) -> tuple[Device, ...]:
        """Every device in use, in rank order: rank r is ``devices[r]``."""
        return tuple(d for p in self.pipelines for s in p.stages for d in s.devices)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(d.node for p in self.pipelines for s in p.stages for d in s.devices))


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """Facts at the moment of planning.

    ``holdings`` names, for every usable device, the layers that it holds complete at the step from which
    training resumes. ``previous`` is the plan that was running, or ``None`` at the start.
    """

    nodes: tuple[str, ...]
    holdings: dict[Device, frozenset[int]] = msgspec.field(default_factory=dict)
    previous: Plan | None = None
    speeds: dict[str, float] = msgspec.field(default_factory=dict)
    """Measured speed of a node as a factor: 1, which also holds for nodes that are not named, is the profile's
    speed; a node of speed 0.5 takes twice as long.
    """
    horizon_s: float | None = None
    """Expected time to the next failure, above 0, in which a better plan has to pay back the bytes that it
    moves. ``None``: unknown; ``planner.changes.tradeoff.DEFAULT_HORIZON_S`` is used.
    """
    parts: dict[Device, tuple[StatePart, ...]] | None = None
    """Parts of layers that each usable device has at that step under ZeRO-1, including replicas; ``holdings``
    are then the layers whose parameters are whole. ``None``: ``holdings`` are whole states.
    """
    in_memory: bool = True
    """Whether ``holdings`` occupy the devices' memory. At step 0 and after a rollback they do not: devices can
    make or read these layers, and do so only for their own stages.
    """
