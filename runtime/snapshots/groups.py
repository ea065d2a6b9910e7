"""The layers that a rank saves in snapshots, and the nodes with which it shares them (REFT §4.1).

A *span* is a sequence of layers with the same owners: one stage in each pipeline, and so one node in each.
All devices of a stage copy a share: a span is cut into as many groups of about equal size as the largest of
its stages has devices, and each stage assigns each group to one of its devices. A group has a code of its
own over its owners.

Where owners have only parts of the state (ZeRO-1), or the devices of a stage have (sharding), there is no
code: each rank saves its parts. A device of a sharded stage saves its own parts of all layers of a span.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from runtime.layers.model import Model
from runtime.layers.world import is_first_replica, is_sharded, stages_of_layer
from runtime.zero.cells import holds_replicas
from statemachine.messages.trainer import WorldData, WorldStage
from storage.codes import Code, make_code


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Layers ``[first_layer, end_layer)``, of which this rank saves the share of ``owner``."""

    first_layer: int
    end_layer: int
    owners: tuple[str, ...]
    """Names of the owners' nodes, in the order of the pipelines."""
    owner: int
    scheme: str
    parted: bool = False
    """Whether each owner saves parts of its own (``runtime.snapshots.parts``); otherwise they share the bytes."""
    device: int = 0
    """Number of this rank in its stage, where other ranks of the stage save other parts of the same layers."""
    own: bool = True
    """Whether this rank saves its own parts."""
    replica: bool = False
    """Whether this rank saves the replicas that it holds of the next owner's parts."""

    @property
    def code(self) -> Code:
        """The code over the owners.

        :raises ValueError: there is no such scheme, or it does not support so many owners.
        """
        return make_code(self.scheme, len(self.owners))

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.end_layer)

    @property
    def name(self) -> str:
        """Prefix of the names of its parts; unique within a node."""
        return f"group-{self.first_layer}.{self.device}" if self.device else f"group-{self.first_layer}"


def layer_bytes(model: Model) -> tuple[int, ...]:
    """Return the bytes of each layer's parameters, which are the same on all ranks."""
    return tuple(
        sum(tensor.value.nbytes for tensor in model.tensors_of(layer) if tensor.kind == "parameter")
        for layer in range(model.layer_count)
    )


def layer_groups(
    world: WorldData,
    nodes: tuple[str, ...],
    rank: int,
    scheme: str,
    sizes: Sequence[int],
    *,
    zero1: bool = False,
    coupled: bool = False,
) -> tuple[LayerGroup, ...]:
    """Return the groups that this rank saves; none if other ranks of its stage do, or if ``nodes`` is empty.

    :param nodes: the name of each rank's node.
    :param sizes: bytes of each layer, for equal shares (``layer_bytes``).
    :param zero1: owners have parts of the optimizer's state.
    :param coupled: the first device of a stage computes all rows, so that only its buffers are right.
    """
    mine = next(
        (
            (index, stage)
            for index, p in enumerate(world.pipelines)
            for stage in p.stages
            if rank in stage.ranks
        ),
        None,
    )
    if mine is None or not nodes:
        return ()
    owner, stage = mine
    owners = [stages_of_layer(world, layer) for layer in range(stage.first_layer, stage.end_layer)]
    starts = [i for i in range(len(owners)) if i == 0 or owners[i] != owners[i - 1]]
    replica = zero1 and "arc:1" in scheme.split("+") and holds_replicas(world, rank)
    return tuple(
        LayerGroup(
            first_layer=first,
            end_layer=end,
            owners=tuple(nodes[min(one.ranks)] for one in owners[start]),
            owner=owner,
            scheme=scheme,
            parted=zero1 or any(map(is_sharded, owners[start])),
            device=sorted(stage.ranks).index(rank) if is_sharded(stage) else 0,
            own=own,
            replica=replica,
        )
        for start, stop in zip(starts, [*starts[1:], len(owners)], strict=True)
        for first, end, own in _shares(
            owners[start],
            stage,
            rank,
            range(stage.first_layer + start, stage.first_layer + stop),
            sizes,
            coupled=coupled,
        )
        if own or replica
    )


def _shares(
    stages: Sequence[WorldStage],
    stage: WorldStage,
    rank: int,
    run: range,
    sizes: Sequence[int],
    *,
    coupled: bool,
) -> list[tuple[int, int, bool]]:
    """Return the groups of a span as (first layer, end layer, whether this rank of ``stage`` saves it)."""
    if is_sharded(stage):
        return [(run.start, run.stop, is_first_replica(stage, rank))]
    writers = sorted(stage.ranks)[: 1 if coupled else None]
    count = min(len(run), 1 if coupled else max(len(one.ranks) for one in stages))
    cuts = split_evenly([sizes[layer] for layer in run], count)
    return [
        (run.start + first, run.start + end, writers[number * len(writers) // count] == rank)
        for number, (first, end) in enumerate(pairwise(cuts))
    ]


def split_evenly(sizes: Sequence[int], count: int) -> list[int]:
    """Return where to split ``sizes`` into ``count`` sequences of about equal sums, from 0 to the end, none
    empty.

    :param count: number of sequences, from 1 to the number of sizes.
    """
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    cuts = [0]
    for number in range(1, count):
        candidates = range(cuts[-1] + 1, len(sizes) - (count - number) + 1)
        cuts.append(min(candidates, key=lambda cut: abs(sums[cut] * count - number * sums[-1])))
    return [*cuts, len(sizes)]
