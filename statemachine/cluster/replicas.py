"""Comparison of the copies of each layer, which finds silent corruption.

After every n-th step, and after each step of which a snapshot is taken, every device sends digests of its
layers (``ReplicaDigests``). Copies in the same layout, on devices of the same kind, must be equal bit for
bit: all owners apply the same summed gradients to the same state. If two differ, the state of one of them
is corrupt, and the gradients that it computed have reached all others. So the state of *every* device is
discarded, and the job returns to the newest snapshot (``rollback``). A snapshot counts only once its step
was compared, so that one is of a time when all copies agreed.

If more than half of the copies of a layer agree, the nodes with the others are at fault. This is known only
if no copy was made from another one since the last comparison that agreed: a copy of a corrupt layer agrees
with it. A node whose own devices differ is at fault in any case.

Under ZeRO-1 the parameters are compared, since each device has another part of the optimizer state. After each
step every device receives the parameters from the owners of their parts. So a difference is never older than
that step: a bit that flipped earlier was overwritten, or was received by all with the rest of its owner's part.

This module decides nothing but that; ``corruption`` acts on it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from planner.reasons import count_noun, join_names
from planner.values import Device, Plan
from statemachine.cluster.state import Cluster
from statemachine.messages.common import Finished, ReplicaDigests
from statemachine.messages.values import Divergence

MAX_TRIES = 3
"""Rollbacks for differing copies after which the job fails, if no comparison after a later step agreed. What
returns with every try is no passing fault of a device.
"""
_KEPT = 4
"""Steps of which incomplete digests are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """One copy of a layer, with all that makes it comparable with others."""

    layer: int
    like: str
    """Layout of the copy and kind of its devices. Only copies with the same are compared."""
    node: str
    digest: str


def comparing(c: Cluster) -> bool:
    """Return whether the copies of layers are compared, so that a snapshot counts only after that."""
    job, resumption = c.job, c.resumption
    if job is None or resumption is None or job.compare_replicas_every < 1:
        return False
    return bool(_copies(c))


def is_verified(c: Cluster, step: int) -> bool:
    """Return whether a snapshot of ``step`` of the current group may count."""
    # Nothing compares the last step's snapshot where the parameters could not be compared at the end.
    last = c.ended and step >= c.current_job.steps
    return c.replicas.agreed_step >= step or last or not comparing(c)


def take_digests(c: Cluster, node: str, report: ReplicaDigests) -> Divergence | None:
    """Record a device's digests. With the last device's, compare them, and return what differs."""
    comparisons, resumption = c.replicas, c.resumption
    assert resumption is not None, "a group trains"
    _follow_plan(c)
    reported = comparisons.reported.setdefault(report.step, {})
    reported[Device(node=node, index=report.device)] = report
    if len(reported) < comparisons.devices:
        for step in sorted(comparisons.reported)[:-_KEPT]:
            del comparisons.reported[step]
        return None
    return _compare(c, report.step)


def settle(c: Cluster) -> Divergence | None:
    """Compare what the ended group reported, also where a device is missing, and return what differs.

    Call this when all nodes have answered a Quiesce: digests that a node sent have arrived before its answer.
    """
    if comparing(c):
        for step in sorted(c.replicas.reported):
            if c.replicas.diverged is None:
                _compare(c, step)
    c.replicas.reported.clear()
    return c.replicas.diverged


def compare_finished(c: Cluster, finished: Mapping[str, Finished]) -> Divergence | None:
    """Compare the parameters after the last step, by the nodes' ``Finished``, and return what differs.

    A node whose own whole copies differ reports several digests.
    """
    if not comparing(c) or c.replicas.agreed_step >= c.current_job.steps:
        return c.replicas.diverged
    found: list[_Copy] = []
    complete = True
    for layer, copies in _copies(c).items():
        for like, devices in copies:
            node = devices[0].node
            digest, kind = finished[node].digests.get(layer), finished[node].kind
            complete = complete and bool(kind)
            if digest is not None and kind:
                different = digest.split("|") if len(devices) == 1 else [digest]
                like_these = f"{like} {kind}"
                found += [_Copy(layer=layer, like=like_these, node=node, digest=one) for one in different]
    return _conclude(c, c.current_job.steps, found, complete=complete)


def _compare(c: Cluster, step: int) -> Divergence | None:
    reported = c.replicas.reported.pop(step)
    found = []
    for layer, copies in _copies(c).items():
        for like, devices in copies:
            reports = [reported[device] for device in devices if device in reported]
            if len(reports) < len(devices):
                continue
            kinds = sorted({report.kind for report in reports})
            digest = " ".join(f"{report.digests.get(layer, 0):016x}" for report in reports)
            like_these = f"{like} {', '.join(kinds)}"
            found.append(_Copy(layer=layer, like=like_these, node=devices[0].node, digest=digest))
    return _conclude(c, step, found, complete=len(reported) >= c.replicas.devices)


def _conclude(c: Cluster, step: int, found: Iterable[_Copy], *, complete: bool) -> Divergence | None:
    """Record the result of a comparison."""
    comparisons, generation = c.replicas, c.resumed_generation
    comparable: dict[tuple[int, str], list[_Copy]] = {}
    for one in found:
        comparable.setdefault((one.layer, one.like), []).append(one)
    differing = [copies for copies in comparable.values() if len({copy.digest for copy in copies}) > 1]
    if not differing:
        if complete:
            comparisons.agreed_step, comparisons.copied = max(step, comparisons.agreed_step), False
            if step > comparisons.diverged_step:
                comparisons.tries = 0
            for older in [one for one in comparisons.reported if one <= step]:
                del comparisons.reported[older]
            c.persist()
        return None
    minority: set[str] = set()
    for copies in differing:
        [(digest, count)] = Counter(copy.digest for copy in copies).most_common(1)
        if 2 * count > len(copies) and not comparisons.copied:
            minority |= {copy.node for copy in copies if copy.digest != digest}
        for node in {copy.node for copy in copies}:
            if len({copy.digest for copy in copies if copy.node == node}) > 1:
                minority.add(node)
    first = differing[0]
    comparisons.diverged = Divergence(
        step=step,
        generation=generation,
        agreed_step=comparisons.agreed_step,
        layers=tuple(sorted({copies[0].layer for copies in differing})),
        digests={copy.node: copy.digest for copy in first},
        nodes=tuple(sorted({copy.node for copies in differing for copy in copies})),
        minority=tuple(sorted(minority)),
    )
    comparisons.diverged_step = max(comparisons.diverged_step, step)
    c.persist()
    return comparisons.diverged


def describe(diverged: Divergence) -> str:
    """Return what differs, in words."""
    layers = join_names([str(layer) for layer in diverged.layers])
    noun = "layer" if len(diverged.layers) == 1 else "layers"
    what = f"the copies of {noun} {layers} differ after step {diverged.step}"
    if diverged.minority:
        others = [name for name in diverged.nodes if name not in diverged.minority]
        same = f", and those of {join_names(others)} are equal" if len(others) > 1 else ""
        return f"{what}: the state of {join_names(diverged.minority)} is corrupt{same}"
    return f"{what}: nothing says which of {join_names(diverged.nodes)} is right"


def explain_loss(c: Cluster, diverged: Divergence) -> str:
    """Return why no device's state counts, and what is missing where there is nothing to return to."""
    lost = f"{describe(diverged)}; wrong gradients have reached all nodes, so the state of none counts"
    if c.snapshots.newest is None and not c.current_job.checkpoint.url:
        return (
            f"{lost}; and no snapshot was complete and compared before, nor does the job write checkpoints "
            "(snapshot.every_steps, checkpoint.url)"
        )
    return lost


def explain_repetition(c: Cluster) -> str | None:
    """Return why the job fails, if copies differ after every rollback."""
    diverged = c.replicas.diverged
    if diverged is None or c.replicas.tries < MAX_TRIES:
        return None
    return (
        f"{describe(diverged)}, again after {count_noun(c.replicas.tries, 'rollback')} for this reason: this is no "
        "passing fault; a device of these nodes is bad, or the training function does not give the same result "
        "everywhere (training.compare_replicas_every = 0 ends the comparison)"
    )


def _follow_plan(c: Cluster) -> None:
    """Begin with the digests of a new group."""
    comparisons, resumption = c.replicas, c.resumption
    assert resumption is not None, "a group trains"
    if comparisons.generation != resumption.generation:
        comparisons.generation = resumption.generation
        comparisons.reported.clear()
        comparisons.copies = copies_of(resumption.plan, zero1=c.current_job.policy.zero1)
        comparisons.devices = len(
            {device for copies in comparisons.copies.values() for _, devices in copies for device in devices}
        )


def _copies(c: Cluster) -> dict[int, list[tuple[str, tuple[Device, ...]]]]:
    _follow_plan(c)
    return c.replicas.copies


def copies_of(plan: Plan, *, zero1: bool = False) -> dict[int, list[tuple[str, tuple[Device, ...]]]]:
    """Return the copies of each layer that has several: their layout, and the devices that hold each.

    All devices of a stage, and so of a copy, are of one node. Under ZeRO-1 only whole copies count, of which the
    parameters are compared.
    """
    found: dict[int, list[tuple[str, tuple[Device, ...]]]] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            sharded = stage.within != "replicate" and len(stage.devices) > 1
            if sharded and zero1:
                continue
            layout = f"{stage.within} on {stage.parts}" if sharded else "whole"
            parts = stage.parts
            copies = [stage.devices[i : i + parts] for i in range(0, len(stage.devices), parts)]
            for layer in range(stage.first_layer, stage.end_layer):
                found.setdefault(layer, []).extend((layout, devices) for devices in copies)
    return {layer: copies for layer, copies in found.items() if len(copies) > 1}
