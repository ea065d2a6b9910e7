"""The planner: from what is true of the cluster to who computes what.

``precompute`` does the slow part once, at the job's start; ``plan`` is on the way to recovery and looks up:
the steps of Oobleck §5.1 or the best instantiation say which templates, an assignment says which nodes.
The same situation always gives the same plan.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.assignment import Assigner, Masks, Position, natural_key, places_of
from planner.batch import check_batch
from planner.costs import StageCosts
from planner.errors import InfeasibleError, TooFewNodesError
from planner.instantiation import Instantiation, Instantiator
from planner.precomputed import Precomputed, check_precomputed
from planner.reasons import reason_of
from planner.reconfiguration import reinstantiate
from planner.templates import Templates, check_tolerance, smallest_pipeline
from planner.transfers import transfers
from planner.values import (
    Device,
    Method,
    ModelProfile,
    PipelinePlacement,
    Plan,
    Policy,
    Situation,
    StagePlacement,
    Template,
)

Told = Callable[[int, int], None]
"""How far something is: done, of all."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """Template sizes in the plan's order, each with the previous pipeline it goes on from, if any."""

    method: Method
    pipelines: tuple[tuple[int, int | None], ...]

    @property
    def sizes(self) -> list[int]:
        return [size for size, _ in self.pipelines]


class Planner:
    """Plans for one job. Not safe for use by several threads at once."""

    def __init__(self, profile: ModelProfile, policy: Policy) -> None:
        """:raises InfeasibleError: the profile or policy makes no sense, or no pipeline fits into memory.
        :raises BatchError: the global batch is no multiple of the microbatch.
        """
        self.costs = StageCosts(profile, policy)
        check_batch(policy.global_batch, policy.microbatch_rows, 1)
        self.profile, self.policy = profile, policy
        self.n0 = smallest_pipeline(self.costs)
        """Fewest nodes that hold one replica."""
        self._assigner = Assigner(profile)
        self._instantiator: Instantiator | None = None
        self._templates: Templates | None = None

    @property
    def fewest_nodes(self) -> int:
        """Nodes without which there is no plan: n₀, or (f+1)·n₀ where the user wants Oobleck's rule."""
        replicas = self.policy.tolerate + 1 if self.policy.minimum == "oobleck" else 1
        return replicas * self.n0

    def check_tolerance(self, nodes: int) -> None:
        """Whether the job can start on ``nodes`` nodes with ``policy.tolerate`` failures to spare.

        :raises InfeasibleError, BatchError: it cannot; says what would work.
        """
        check_tolerance(self.policy, self.n0, nodes)

    def precompute(self, max_nodes: int, told: Told | None = None, *, present: int | None = None) -> None:
        """Make all templates and instantiations for up to ``max_nodes`` nodes.

        Those for ``present`` nodes (default: all) come first, then those for fewer and fewer, then for more:
        a loss is likelier than a join, and small ones likelier than large ones.

        :param told: called with the number of instantiations made so far and of all, from (0, all), which
            comes when the templates are made, to (all, all).
        :raises InfeasibleError: ``max_nodes`` nodes cannot hold one replica.
        """
        instantiator = self.instantiator(max_nodes)
        now = min(max(present or max_nodes, self.n0), max_nodes)
        counts = [*range(now, self.n0 - 1, -1), *range(now + 1, max_nodes + 1)]
        for done, nodes in enumerate(counts):
            if told is not None:
                told(done, len(counts))
            instantiator.best(nodes)
        if told is not None:
            told(len(counts), len(counts))

    def precomputed(self) -> Precomputed:
        """What ``precompute`` made, for ``restore`` in another planner of the same job.

        :raises InfeasibleError: nothing was precomputed.
        """
        if self._templates is None:
            raise InfeasibleError("nothing was precomputed; call precompute first")
        nodes = self._templates.nodes
        instantiator = self.instantiator(nodes)
        return Precomputed(
            nodes=nodes,
            templates=tuple(self._templates.by_nodes.values()),
            instantiations={count: instantiator.best(count) for count in range(self.n0, nodes + 1)},
        )

    def restore(self, precomputed: Precomputed) -> None:
        """Go on from what another planner of this job precomputed; what it lacks is made when it is needed.

        :raises RestoreError: it is of another job; the planner is as it was.
        """
        check_precomputed(precomputed, self.costs, self.n0)
        by_nodes = {template.nodes: template for template in precomputed.templates}
        self._templates = Templates(self.costs, precomputed.nodes, by_nodes)
        self._instantiator = Instantiator(self.costs, self._templates)
        for nodes, found in precomputed.instantiations.items():
            self._instantiator.remember(nodes, found)

    def templates(self, nodes: int) -> Templates:
        """The templates; made anew if the cluster has outgrown them.

        :raises InfeasibleError: ``nodes`` nodes cannot hold one replica.
        """
        if self._templates is None or self._templates.nodes < nodes:
            self._templates = Templates(self.costs, nodes)
            self._instantiator = Instantiator(self.costs, self._templates)
        return self._templates

    def instantiator(self, nodes: int) -> Instantiator:
        """Of ``templates(nodes)``."""
        templates = self.templates(nodes)
        if self._instantiator is None:
            self._instantiator = Instantiator(self.costs, templates)
        return self._instantiator

    def fresh(self, nodes: Sequence[str]) -> Situation:
        """The situation at a job's start: every device holds every layer, at step 0."""
        everything = frozenset(range(len(self.profile.layers)))
        devices = range(self.policy.devices_per_node)
        holdings = {Device(node=node, index=index): everything for node in nodes for index in devices}
        return Situation(nodes=tuple(nodes), holdings=holdings)

    def plan(self, situation: Situation) -> Plan:
        """Who computes what, for the usable nodes and what their devices hold.

        Nodes of the previous plan that are not usable are lost; usable ones that it did not name joined.
        Holdings of nodes that are not usable count for nothing: their trainers are in no training group.

        :raises TooFewNodesError: fewer nodes than ``fewest_nodes``.
        :raises StateLostError: no usable device holds some layer.
        """
        nodes = sorted(set(situation.nodes), key=natural_key)
        if len(nodes) < self.fewest_nodes:
            raise TooFewNodesError(
                f"{len(nodes)} nodes are usable and {self.fewest_nodes} are needed",
                needed=self.fewest_nodes,
                present=len(nodes),
            )
        masks = self._assigner.masks(nodes, self.policy.devices_per_node, situation.holdings)
        previous = situation.previous
        if previous is not None:
            unchanged = self._unchanged(previous, nodes, masks)
            if unchanged is not None:
                return unchanged
        instantiator = self.instantiator(len(nodes))
        layout = self._layout(previous, nodes, instantiator)
        placements = self._place(layout, instantiator.of(layout.sizes), previous, nodes, masks)
        return self._as_plan(layout.method, placements, previous, nodes, masks)

    def _unchanged(self, previous: Plan, nodes: list[str], masks: Masks) -> Plan | None:
        """The previous plan, if its nodes are all there, nobody joined, and they hold every layer."""
        used = set(previous.nodes)
        if not used <= set(nodes) or not set(nodes) <= used | set(previous.idle_nodes):
            return None
        if transfers(self.profile, previous.pipelines, masks) is None:
            return None
        return self._as_plan("unchanged", previous.pipelines, previous, nodes, masks)

    def _layout(self, previous: Plan | None, nodes: list[str], instantiator: Instantiator) -> _Layout:
        best = instantiator.best(len(nodes))
        if previous is None:
            return _Layout("initial", tuple((size, None) for size in best.sizes))
        usable = set(nodes)
        before = [len(pipeline.nodes) for pipeline in previous.pipelines]
        left = [sum(node in usable for node in pipeline.nodes) for pipeline in previous.pipelines]
        if usable <= set(previous.nodes) | set(previous.idle_nodes):
            mended = reinstantiate(before, left, self.templates(len(nodes)).sizes)
            if mended is not None and sum(mended.sizes) == best.nodes:
                kept = tuple((size, index) for index, size in enumerate(mended.sizes) if size)
                if instantiator.required(len(nodes)) <= len(kept) <= self.policy.microbatches:
                    return _Layout(mended.method, kept)
        return _Layout("best", _aligned(best.sizes, before, left))

    def _place(
        self,
        layout: _Layout,
        instantiation: Instantiation,
        previous: Plan | None,
        nodes: list[str],
        masks: Masks,
    ) -> tuple[PipelinePlacement, ...]:
        by_size = self.templates(len(nodes)).by_nodes
        templates = [by_size[size] for size in layout.sizes]
        places = [places_of(template) for template in templates]
        habits: dict[str, Position] = {}
        for number, (_, before) in enumerate(layout.pipelines):
            if previous is not None and before is not None:
                earlier = previous.pipelines[before].nodes
                habits |= {node: (number, offset) for offset, node in enumerate(earlier)}
        taken = self._assigner.assign(places, nodes, masks, habits)
        shares = list(
            zip(instantiation.sizes, instantiation.microbatches, instantiation.pipeline_ms, strict=True)
        )
        placements: list[PipelinePlacement] = []
        first = 0
        for number, template in enumerate(templates):
            share = next(share for share in shares if share[0] == template.nodes)
            shares.remove(share)
            devices = [
                self._assigner.devices_for(node, masks[node], place)
                for node, place in zip(taken[number], places[number], strict=True)
            ]
            placements.append(
                PipelinePlacement(
                    stages=_on_devices(template, devices),
                    first_microbatch=first,
                    microbatches=share[1],
                    estimated_s=share[2] / 1e3,
                )
            )
            first += share[1]
        return tuple(placements)

    def _as_plan(
        self,
        method: Method,
        placements: tuple[PipelinePlacement, ...],
        previous: Plan | None,
        nodes: list[str],
        masks: Masks,
    ) -> Plan:
        moves = transfers(self.profile, placements, masks)
        assert moves is not None, "the nodes were chosen so that they hold every layer"
        used = {node for placement in placements for node in placement.nodes}
        idle = tuple(node for node in nodes if node not in used)
        known = {*previous.nodes, *previous.idle_nodes} if previous is not None else set(nodes)
        lost = sorted(known.difference(nodes), key=natural_key)
        joined = [node for node in nodes if node not in known]
        sizes = [len(placement.nodes) for placement in placements]
        return Plan(
            pipelines=placements,
            transfers=moves,
            method=method,
            reason=reason_of(method, sizes, lost, joined, idle),
            estimated_iteration_s=max(placement.estimated_s for placement in placements),
            idle_nodes=idle,
        )


def _aligned(
    sizes: Sequence[int], before: Sequence[int], left: Sequence[int]
) -> tuple[tuple[int, int | None], ...]:
    """New sizes in the order of the previous pipelines: whole ones keep theirs, then the fullest choose."""
    free = list(sizes)
    matched: dict[int, int] = {}
    order = sorted(range(len(before)), key=lambda index: (left[index] != before[index], -left[index], index))
    for exact in (True, False):
        for index in order:
            wanted = [size for size in free if size == left[index]] if exact else free
            if index not in matched and left[index] and wanted:
                nearest = min((abs(size - left[index]), -size, size) for size in wanted)[2]
                matched[index] = nearest
                free.remove(nearest)
    going_on: list[tuple[int, int | None]] = [(size, index) for index, size in sorted(matched.items())]
    return (*going_on, *((size, None) for size in free))


def _on_devices(template: Template, devices: Sequence[Sequence[Device]]) -> tuple[StagePlacement, ...]:
    """The template's stages on the devices of its nodes, which are in the order of the places."""
    left = [list(of_node) for of_node in devices]
    placed: list[StagePlacement] = []
    for stage in template.stages:
        of_node = left[stage.node_offset]
        taken, left[stage.node_offset] = of_node[: stage.devices], of_node[stage.devices :]
        placed.append(
            StagePlacement(
                first_layer=stage.first_layer, end_layer=stage.end_layer, devices=tuple(sorted(taken))
            )
        )
    return tuple(placed)
