"""The planner: from the state of the cluster to a plan.

``precompute`` does the slow part once, at the job's start. ``plan`` is on the path of recovery and looks
results up: it compares some layouts (the steps of Oobleck §5.1, the best instantiation, and some between
them), assigns nodes to each, and takes the layout that commits most steps until the next failure. The same
situation always gives the same plan.
"""

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from planner.changes.assignment import Assigner
from planner.changes.candidates import PipelineLayout, candidate_layouts, first_layout
from planner.changes.cover import Masks, StateNeeds, whole_layers
from planner.changes.parts import moved_bytes, part_needs
from planner.changes.stragglers import estimates_s, estimates_still_hold, has_notable_stragglers, rebalance
from planner.changes.tradeoff import DEFAULT_HORIZON_S, choose_layout, place_stages
from planner.changes.transition import layers_to_release, parts_to_release, plan_transfers
from planner.errors import InfeasibleError, SolverError, TooFewNodesError
from planner.pipelines.batch import check_batch
from planner.pipelines.instantiation import Instantiator
from planner.precomputed import Precomputed, check_precomputed
from planner.reasons import explain_plan, natural_key
from planner.templates import (
    Templates,
    check_tolerance,
    costs_for,
    explain_tolerance_limit,
    smallest_pipeline,
)
from planner.values import (
    ConsideredPlan,
    Device,
    ModelProfile,
    PipelinePlacement,
    Plan,
    Policy,
    ReleasedLayers,
    Situation,
)

ProgressCallback = Callable[[int, int], None]
"""Progress of a task: amount done, and total amount."""


class Planner:
    """A planner for one job. It must not be used by several threads at once."""

    def __init__(self, profile: ModelProfile, policy: Policy) -> None:
        """Raises:
        InfeasibleError: the profile or policy makes no sense, or no pipeline fits into memory.
        BatchError: the global batch is not a multiple of the microbatch.
        """
        self.costs = costs_for(profile, policy)
        check_batch(policy.global_batch, policy.microbatch_rows, 1)
        self.profile, self.policy = profile, policy
        self.n0 = smallest_pipeline(self.costs)
        """Fewest nodes that hold one replica."""
        self._assigner = Assigner(profile)
        self._instantiator: Instantiator | None = None

    @property
    def fewest_nodes(self) -> int:
        """Fewest nodes for which there is a plan: n₀, or (f+1)·n₀ if the user wants Oobleck's rule, or if no
        pipeline has room for more than its part of the optimizer state (ZeRO-1).
        """
        all_replicas = self.policy.minimum == "oobleck" or self.costs.policy.zero1
        return (self.policy.tolerate + 1 if all_replicas else 1) * self.n0

    def check_tolerance(self, nodes: int) -> None:
        """Check that the job can start on ``nodes`` nodes and then tolerate ``policy.tolerate`` failures.

        Raises:
            InfeasibleError, BatchError: it cannot; the message says what would work.
        """
        check_tolerance(self.policy, self.n0, nodes, self.costs)

    def precompute(
        self, max_nodes: int, on_progress: ProgressCallback | None = None, *, present: int | None = None
    ) -> None:
        """Compute all templates and instantiations for up to ``max_nodes`` nodes.

        Those for ``present`` nodes (default: all) come first, then those for fewer nodes in descending
        order, then those for more: a loss is likelier than a join, and small losses are likelier than large
        ones.

        :param on_progress: called with the number of instantiations computed so far and the total number,
            from (0, total) when the templates are ready, to (total, total).
        :raises InfeasibleError: ``max_nodes`` nodes cannot hold one replica.
        """
        instantiator = self.instantiator(max_nodes)
        now = min(max(present or max_nodes, self.n0), max_nodes)
        counts = [*range(now, self.n0 - 1, -1), *range(now + 1, max_nodes + 1)]
        for done, nodes in enumerate(counts):
            if on_progress is not None:
                on_progress(done, len(counts))
            instantiator.best(nodes)
        if on_progress is not None:
            on_progress(len(counts), len(counts))

    def precomputed(self) -> Precomputed:
        """Return what ``precompute`` has computed (so far, if called from ``on_progress``), for ``restore`` in
        another planner of the same job.

        :raises InfeasibleError: nothing was precomputed.
        """
        if self._instantiator is None:
            raise InfeasibleError("nothing was precomputed; call precompute first")
        templates = self._instantiator.templates
        return Precomputed(
            nodes=templates.nodes,
            templates=tuple(templates.by_nodes.values()),
            instantiations=self._instantiator.known,
        )

    def restore(self, precomputed: Precomputed) -> None:
        """Continue from what another planner of this job precomputed; missing results are computed when they
        are needed.

        :raises RestoreError: the results belong to another job; the planner is unchanged.
        """
        check_precomputed(precomputed, self.costs, self.n0)
        by_nodes = {template.nodes: template for template in precomputed.templates}
        self._instantiator = Instantiator(self.costs, Templates(self.costs, precomputed.nodes, by_nodes))
        for nodes, found in precomputed.instantiations.items():
            self._instantiator.remember(nodes, found)

    def instantiator(self, nodes: int) -> Instantiator:
        """Return the instantiator, made again with its templates if the cluster has outgrown them.

        :raises InfeasibleError: ``nodes`` nodes cannot hold one replica.
        """
        if self._instantiator is None or self._instantiator.templates.nodes < nodes:
            self._instantiator = Instantiator(self.costs, Templates(self.costs, nodes))
        return self._instantiator

    def initial_situation(self, nodes: Sequence[str]) -> Situation:
        """Return the situation at a job's start: every device holds every layer, at step 0."""
        everything = frozenset(range(len(self.profile.layers)))
        devices = range(self.policy.devices_per_node)
        holdings = {Device(node=node, index=index): everything for node in nodes for index in devices}
        return Situation(nodes=tuple(nodes), holdings=holdings, in_memory=False)

    def plan(self, situation: Situation) -> Plan:
        """Return a plan for the usable nodes and the state that their devices hold.

        Nodes of the previous plan that are not usable were lost; usable nodes that it did not name have
        joined. Holdings of nodes that are not usable are ignored, because their trainers are in no training
        group.

        :raises TooFewNodesError: fewer nodes than ``fewest_nodes`` are usable.
        :raises StateLostError: no usable device holds some layer.
        """
        try:
            return self._plan(situation)
        except SolverError as error:
            # The exact method finds shares that are equally good, so a running job continues without its
            # solver.
            plan = self._with_exact_shares()._plan(situation)
            reason = (
                f"{plan.reason.removesuffix('.')}; the shares are from the exact method, because {error}."
            )
            return replace(plan, reason=reason)

    def _with_exact_shares(self) -> "Planner":
        """Return a planner for the same job that needs no solver and has the same templates."""
        other = Planner(self.profile, replace(self.policy, batch_solver="exact"))
        if self._instantiator is not None:
            other.restore(self.precomputed())
        return other

    def _plan(self, situation: Situation) -> Plan:
        """Plan as ``plan`` does.

        :raises SolverError: a solver was to compute the shares, and it failed.
        """
        nodes = sorted(set(situation.nodes), key=natural_key)
        if len(nodes) < self.fewest_nodes:
            why = explain_tolerance_limit(self.costs, self.n0)
            usable = f"{len(nodes)} {'node is' if len(nodes) == 1 else 'nodes are'} usable"
            needed = f"{self.fewest_nodes} {'is' if self.fewest_nodes == 1 else 'are'} needed"
            raise TooFewNodesError(
                f"{usable} and {needed}{f', because {why}' if why else ''}",
                needed=self.fewest_nodes,
                present=len(nodes),
            )
        masks, needs = self._held(situation, nodes)
        unchanged = self._unchanged(situation, nodes, masks, needs)
        if unchanged is not None and estimates_still_hold(self.costs, unchanged.pipelines, situation.speeds):
            return unchanged
        horizon_s = DEFAULT_HORIZON_S if situation.horizon_s is None else situation.horizon_s
        instantiator = self.instantiator(len(nodes))
        previous = situation.previous
        earlier = [pipeline.nodes for pipeline in previous.pipelines] if previous is not None else []
        weighed, considered = choose_layout(
            self._layouts(earlier, nodes),
            instantiator=instantiator,
            assigner=self._assigner,
            nodes=nodes,
            masks=masks,
            needs=needs,
            earlier=earlier,
            link=self.profile.link,
            horizon_s=horizon_s,
            # Only whole layers stay in devices' memory until the plan's first commit.
            memory=self.costs.memory if situation.in_memory and situation.parts is None else None,
        )
        placements = place_stages(weighed, instantiator.templates.by_nodes, self._assigner, masks)
        if unchanged is not None:
            starts, considered = [unchanged.pipelines, placements], ()
        else:
            starts = [placements]
        if unchanged is not None or has_notable_stragglers(situation.speeds, nodes):
            placements = rebalance(self.costs, starts, situation.speeds, masks, horizon_s)
        return self._as_plan(placements, situation, nodes, masks, considered, horizon_s)

    def _held(self, situation: Situation, nodes: list[str]) -> tuple[Masks, StateNeeds]:
        """Return the layers that devices need not receive, or only in part, and the state that a plan's nodes
        must have.
        """
        parts, devices = situation.parts, self.policy.devices_per_node
        if parts is None:
            masks = self._assigner.masks(nodes, devices, situation.holdings)
            return masks, whole_layers(masks, len(self.profile.layers))
        some = {
            device: layers.union(part.layer for part in parts.get(device, ()))
            for device, layers in situation.holdings.items()
        }
        needs = part_needs(nodes, devices, parts, len(self.profile.layers))
        return self._assigner.masks(nodes, devices, some), needs

    def compare_iteration_s(self, situation: Situation) -> tuple[float, float]:
        """Return the seconds of a step under ``situation.previous`` unchanged, and under the plan that
        ``plan`` would make.

        :raises TooFewNodesError, StateLostError: as ``plan``.
        """
        assert situation.previous is not None, "there is a plan to compare with"
        possible = self.plan(situation)
        present_s = max(estimates_s(self.costs, situation.previous.pipelines, situation.speeds))
        return present_s, possible.estimated_iteration_s

    def _unchanged(
        self, situation: Situation, nodes: list[str], masks: Masks, needs: StateNeeds
    ) -> Plan | None:
        """Return the previous plan if all its nodes are present, no node joined, and they hold every layer."""
        previous = situation.previous
        if previous is None:
            return None
        used = set(previous.nodes)
        if not used <= set(nodes) or not set(nodes) <= used | set(previous.idle_nodes):
            return None
        if not needs.held_by(used):
            return None
        return self._as_plan(previous.pipelines, situation, nodes, masks, (), 0.0)

    def _layouts(self, earlier: Sequence[Sequence[str]], nodes: list[str]) -> list[PipelineLayout]:
        instantiator = self.instantiator(len(nodes))
        if not earlier:
            return [first_layout(instantiator.best(len(nodes)))]
        usable = set(nodes)
        return candidate_layouts(
            before=[len(of_pipeline) for of_pipeline in earlier],
            left=[sum(node in usable for node in of_pipeline) for of_pipeline in earlier],
            nodes=len(nodes),
            instantiator=instantiator,
            most=self.policy.microbatches,
        )

    def _as_plan(
        self,
        placements: tuple[PipelinePlacement, ...],
        situation: Situation,
        nodes: list[str],
        masks: Masks,
        considered: tuple[ConsideredPlan, ...],
        horizon_s: float,
    ) -> Plan:
        """:param considered: empty if the previous plan continues, unchanged or with other shares."""
        moves = plan_transfers(self.profile, placements, masks)
        assert moves is not None, "the nodes were chosen so that they hold every layer"
        parts, part_bytes = situation.parts, 0
        if parts is not None:
            moves = ()
            part_bytes = moved_bytes(
                self.profile, placements, situation.holdings, parts, zero1=self.policy.zero1
            )
        gone: tuple[ReleasedLayers, ...] = ()
        memory, tolerate = self.costs.memory, self.policy.tolerate
        if parts is not None and situation.in_memory:
            gone = parts_to_release(
                self.profile,
                memory,
                placements,
                situation.holdings,
                parts,
                tolerate,
                zero1=self.policy.zero1,
            )
        elif situation.in_memory:
            gone = layers_to_release(self.profile, memory, placements, masks, moves, tolerate)
        taken = [placement.nodes for placement in placements]
        used = {node for of_pipeline in taken for node in of_pipeline}
        idle = tuple(node for node in nodes if node not in used)
        previous = situation.previous
        known = {*previous.nodes, *previous.idle_nodes} if previous is not None else set(nodes)
        lost = sorted(known.difference(nodes), key=natural_key)
        joined = [node for node in nodes if node not in known]
        same = previous is not None and placements == previous.pipelines
        method = considered[0].method if considered else "unchanged" if same else "rebalance"
        slow = {node: speed for node, speed in situation.speeds.items() if node in used and speed < 1}
        sizes = [len(of_pipeline) for of_pipeline in taken]
        withins = [stage.within for each in placements for stage in each.stages if len(stage.devices) > 1]
        reason = explain_plan(method, sizes, lost, joined, idle, considered, horizon_s, slow, gone, withins)
        return Plan(
            pipelines=placements,
            transfers=moves,
            method=method,
            reason=reason,
            estimated_iteration_s=max(placement.estimated_s for placement in placements),
            idle_nodes=idle,
            considered=considered,
            part_bytes=part_bytes,
            released_layers=gone,
        )
