"""Which layers a rank keeps for snapshots, and with whom it shares them out (REFT §4.1, design §7).

A group is a maximal run of layers with the same owners, one stage in each pipeline, so one node in each. The
rank with the lowest number of a stage writes for the stage; the others hold the same bytes.
"""

from dataclasses import dataclass

from runtime.layers.world import stages_of_layer
from runtime.wire.protocol import WorldData
from storage.codes import Code, make_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers ``[first_layer, end_layer)``, of which this rank keeps what ``owner`` keeps."""

    first_layer: int
    end_layer: int
    owners: tuple[str, ...]
    """Names of nodes, in the order of the pipelines."""
    owner: int
    scheme: str

    @property
    def code(self) -> Code:
        """:raises ValueError: there is no such scheme, or none for so many owners."""
        return make_code(self.scheme, len(self.owners))

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.end_layer)


def groups_of(world: WorldData, nodes: tuple[str, ...], rank: int, scheme: str) -> tuple[Group, ...]:
    """Those of the rank's stage; none where another rank writes for it, or ``nodes`` is empty.

    :param nodes: the name of each rank's node.
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
    if mine is None or not nodes or min(mine[1].ranks) != rank:
        return ()
    owner, stage = mine
    owners = [stages_of_layer(world, layer) for layer in range(stage.first_layer, stage.end_layer)]
    starts = [i for i in range(len(owners)) if i == 0 or owners[i] != owners[i - 1]]
    return tuple(
        Group(
            first_layer=stage.first_layer + start,
            end_layer=stage.first_layer + end,
            owners=tuple(nodes[min(one.ranks)] for one in owners[start]),
            owner=owner,
            scheme=scheme,
        )
        for start, end in zip(starts, [*starts[1:], len(owners)], strict=True)
    )
