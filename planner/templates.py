"""Pipeline templates (Oobleck §4.1.1): the sizes that exist, and the best mapping of each.

n₀ is the fewest nodes whose memory holds one replica. The paper makes templates of n₀ … N − f·n₀ nodes:
with those, any N' from (f+1)·n₀ to N is a sum of at least f+1 of them. A job that may continue below
(f+1)·n₀ nodes also needs its sums from n₀ on, and Theorem A.1 guarantees them for p > n₀ − 1 consecutive
sizes. So sizes go up to at least 2·n₀ − 1 (p = n₀), as far as there are nodes.
"""

from collections.abc import Mapping

import msgspec

from planner.errors import BatchError, InfeasibleError
from planner.mapping.mapper import best_templates
from planner.reasons import count_noun, describe_within
from planner.stages.costs import StageCosts
from planner.stages.feasibility import FullestStage, fewest_nodes, find_fullest_stage
from planner.stages.memory import StageMemory, in_flight
from planner.values import ModelProfile, Policy, Template

GIB = 1 << 30
_KEPT = {
    "none": "activations",
    "selective": "selected activations",
    "full": "layers' inputs",
}
"""Words for what stays in memory between forward and backward, by the stage's recomputation."""


class Templates:
    """The templates of one job for clusters of up to ``nodes`` nodes; they never change while it trains."""

    def __init__(
        self, costs: StageCosts, nodes: int, templates: Mapping[int, Template] | None = None
    ) -> None:
        """:param templates: templates computed before for the same costs and ``nodes``, by their nodes,
            ascending; ``None`` computes them now.
        :raises InfeasibleError: no number of nodes can hold the model, or ``nodes`` cannot.
        """
        policy = costs.policy
        self.nodes = nodes
        self.n0 = smallest_pipeline(costs)
        """Fewest nodes that hold one replica."""
        if nodes < self.n0:
            enough = [setting for setting, fewest in _helpful_settings(costs) if fewest <= nodes]
            raise InfeasibleError(
                f"one replica of the model needs {self.n0} nodes of {policy.devices_per_node} devices, and "
                f"there are {nodes}: {_tightest(costs, nodes)}; start {self.n0} nodes or more"
                + (f", or use {' or '.join(enough)}" if enough else "")
            )
        self.by_nodes: dict[int, Template]
        if templates is not None:
            self.by_nodes = dict(templates)
            return
        largest = max(nodes - policy.tolerate * self.n0, min(nodes, 2 * self.n0 - 1))
        largest = min(largest, costs.most_nodes)
        shares = {size: expected_share(policy, size, nodes) for size in range(self.n0, largest + 1)}
        self.by_nodes = best_templates(costs, shares)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Nodes per template, ascending."""
        return tuple(self.by_nodes)


def expected_share(policy: Policy, size: int, nodes: int) -> int:
    """Return the microbatches that a pipeline of ``size`` nodes gets if all ``nodes`` are used."""
    return max(1, round(policy.microbatches * size / nodes))


def smallest_pipeline(costs: StageCosts) -> int:
    """Return n₀, the fewest nodes that hold one replica.

    :raises InfeasibleError: even the longest possible pipeline does not fit into memory.
    """
    if costs.most_nodes < 1:
        raise InfeasibleError(
            f"{costs.layers} layers cannot use the {costs.devices_per_node} devices of one node: a stage of "
            f"microbatch {costs.policy.microbatch_rows} keeps at most {costs.max_devices} devices busy, and "
            "every stage needs a layer; use fewer devices per node or a larger microbatch"
        )
    fewest = fewest_nodes(costs)
    if fewest is not None:
        return fewest
    settings = [
        f"{setting}, which fits on {count_noun(n, 'node')} or more" for setting, n in _helpful_settings(costs)
    ]
    _, memory = _fullest(costs, costs.most_nodes)
    remedies = ["devices with more memory"]
    if memory.total - memory.activations <= (costs.memory.limit_bytes or 0):
        remedies.append("a smaller microbatch")
    remedies += settings or ["an optimizer that keeps less", "smaller layers"]
    raise InfeasibleError(
        f"the model does not fit into devices of {_size(costs.memory.limit_bytes or 0)} on any number of "
        f"nodes: {_tightest(costs, costs.most_nodes)}; use {', '.join(remedies[:-1])} or {remedies[-1]}"
    )


def explain_tolerance_limit(costs: StageCosts, n0: int) -> str:
    """Say what does not fit on one node fewer than n₀; empty if a single node suffices."""
    return f"on {count_noun(n0 - 1, 'node')} {_tightest(costs, n0 - 1)}" if n0 > 1 else ""


def _helpful_settings(costs: StageCosts) -> list[tuple[str, int]]:
    """Return settings of the job with which a replica fits, and the fewest nodes that hold one then.

    Settings are named one by one; together only if none of them suffices alone.
    """
    profile, policy = costs.profile, costs.policy
    settings: list[tuple[str, Policy]] = []
    recomputing = msgspec.structs.replace(policy, activation_checkpointing="auto")
    if policy.activation_checkpointing != "auto":
        settings.append(("activation_checkpointing = auto", recomputing))
    if policy.within_node != "auto" and costs.max_devices > 1 and profile.shard_problem is None:
        settings.append(("within_node = auto", msgspec.structs.replace(policy, within_node="auto")))
    found = _fitting(profile, settings)
    if not found and len(settings) == 2:
        both = " with ".join(setting for setting, _ in settings)
        found = _fitting(profile, [(both, msgspec.structs.replace(recomputing, within_node="auto"))])
    return found


def _fitting(profile: ModelProfile, settings: list[tuple[str, Policy]]) -> list[tuple[str, int]]:
    """Return the settings with which a replica fits, each with the fewest nodes that hold one."""
    fewest = [(setting, fewest_nodes(StageCosts(profile, policy))) for setting, policy in settings]
    return [(setting, nodes) for setting, nodes in fewest if nodes is not None]


def costs_for(profile: ModelProfile, policy: Policy) -> StageCosts:
    """Return the costs with which templates are made.

    With ZeRO-1 the optimizer state is in f + 1 parts if that makes a replica fit on fewer nodes; then f + 1
    pipelines are always needed. If it does not, ZeRO-1 gains nothing and is not considered, so that a
    single pipeline, which has all parts, may continue.

    :raises InfeasibleError: an entry of the profile or the policy makes no sense.
    """
    costs = StageCosts(profile, policy)
    if not policy.zero1 or costs.most_nodes < 1:
        return costs
    whole = StageCosts(profile, msgspec.structs.replace(policy, zero1=False))
    return whole if fewest_nodes(whole) == fewest_nodes(costs) else costs


def check_tolerance(policy: Policy, n0: int, nodes: int, costs: StageCosts | None = None) -> None:
    """Check that the job can *start* and then tolerate ``policy.tolerate`` failures; later it may continue
    with fewer nodes.

    :param costs: the costs from which n₀ follows; the error then says which stage does not fit on fewer
        nodes, and names settings with which the nodes suffice.
    :raises InfeasibleError: there are fewer than (f+1)·n₀ nodes.
    :raises BatchError: there are fewer microbatches than the f+1 pipelines, each of which must compute
        something.
    """
    replicas = policy.tolerate + 1
    if nodes < replicas * n0:
        most = nodes // n0 - 1
        fewer = f"at most {most}" if most > 0 else "0"
        advice = f"set tolerance.failures to {fewer}, or start" if most >= 0 else "start"
        settings = [] if costs is None else _helpful_settings(costs)
        why = "" if costs is None else explain_tolerance_limit(costs, n0)
        needed_nodes = count_noun(replicas * n0, "node")
        each = f"{replicas} replicas of {count_noun(n0, 'node')} each, " if replicas > 1 else "one replica, "
        enough = [setting for setting, fewest in settings if replicas * fewest <= nodes]
        raise InfeasibleError(
            f"tolerance.failures = {policy.tolerate} needs {each}{needed_nodes}, and there "
            f"{'is' if nodes == 1 else 'are'} {count_noun(nodes, 'node')}"
            + (f" ({why})" if why else "")
            + f"; {advice} {needed_nodes}"
            + (f", or use {' or '.join(enough)}" if enough else "")
        )
    if policy.microbatches < replicas:
        needed = replicas * policy.microbatch_rows
        raise BatchError(
            f"tolerance.failures = {policy.tolerate} needs {replicas} pipelines, and global_batch "
            f"{policy.global_batch} has only {policy.microbatches} microbatches of {policy.microbatch_rows}; "
            f"the nearest global batch that can be distributed is {needed}",
            (needed,),
        )


def _tightest(costs: StageCosts, nodes: int) -> str:
    """Say which stage lacks memory, in the mapping of ``nodes`` nodes that lacks least."""
    stage, memory = _fullest(costs, nodes)
    one = stage.end_layer - stage.first_layer == 1
    where = f"layer {stage.first_layer}" if one else f"layers {stage.first_layer} to {stage.end_layer - 1}"
    problem = None
    if stage.devices > 1:
        where += f" on {stage.devices} devices, {describe_within(stage.mode.within, stage.mode.replicas)},"
        problem = costs.profile.shard_problem if costs.policy.within_node == "auto" else None
    buffers = (
        f", {_short(memory.undivided)} of them buffers, whole on each device" if memory.undivided else ""
    )
    gathered = f"gathered of a layer at a time {_short(memory.gathered)}, " if memory.gathered else ""
    working = f", one layer at a time {_short(memory.working)}" if memory.working else ""
    alive = in_flight(stage.stages_after, costs.policy.microbatches)
    return (
        f"the stage of {where} needs {_size(stage.size_bytes)} per device (parameters "
        f"{_short(memory.parameters)}{buffers}, gradients {_short(memory.gradients)}, optimizer "
        f"{_short(memory.optimizer)}, {gathered}{_KEPT[stage.mode.recompute]} of {alive} microbatches in flight "
        f"{_short(memory.activations)}{working}) and a device has {_size(costs.memory.limit_bytes or 0)}"
        + (f"; it cannot be sharded: {problem}" if problem else "")
    )


def _fullest(costs: StageCosts, nodes: int) -> tuple[FullestStage, StageMemory]:
    stage = find_fullest_stage(costs, nodes)
    memory = costs.memory.breakdown(
        stage.first_layer, stage.end_layer, stage.devices, stage.stages_after, stage.mode
    )
    return stage, memory


def _short(size_bytes: int) -> str:
    return _size(size_bytes).partition(" (")[0]


def _size(size_bytes: int) -> str:
    """Format a size for people: MiB below one GiB."""
    if size_bytes < GIB:
        return f"{size_bytes / (1 << 20):.1f} MiB ({size_bytes} bytes)"
    return f"{size_bytes / GIB:.2f} GiB ({size_bytes} bytes)"
