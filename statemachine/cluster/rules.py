"""The roll-forward rule as one pure function.

A step t+1 commits on a rank after the VOTE all-reduce of t+1, and no rank completes that all-reduce before
every rank entered it with complete gradients. Hence the rule: *if any rank is known to have committed t+1,
every survivor of that group can apply its gradients and reach t+1; otherwise all discard and redo t+1.*

The following makes it safe when generations follow each other closely, each perhaps half delivered:

* Only the group of the last *resumed* generation R (``Resumption``: the coordinator sent ``Resume``) can
  have committed anything after R's own resume step, and only if each planned rank obeyed R. So complete
  gradients of a step after R's resume step count only from ranks of R's plan: an idle node that never got
  R's Resume may still hold gradients of a step that R decided to redo.
* At R's resume step itself, gradients count from exactly those devices whose gradients counted when R was
  decided (``Resumption.ready``): they did not receive R's order to apply, or had no time to obey it.
* Gradients exist only for the layers that a rank owned; of layers that it merely held from before, it has
  the old state. So a device that counts by its gradients holds only what it owned in the plan of those
  gradients.
* Under ZeRO-1 gradients update what a rank owned in the plan of those gradients: its own part, and the
  replica of the next owner's part, if it has one. Nothing else of its layers is at that step, since
  parameters are whole only after the parts are gathered, and that takes the group.
* After a rollback (``rollback``) only reports of its lineage count: a trainer that did not get to obey the
  Resume that undid steps may still be at one of them, and holds nothing.
* A coordinator that began from an older journal, since the newest one was lost, may not know the last resumed
  generation. Gradients of a generation after R do not count: who owned which layer in it is unknown.
* A node whose report did not count in R's decision, and whose trainers are not new, must not be trusted at
  all: it may have committed a step that R redid (``is_trusted``).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, TypeVar

from planner.values import Device, Plan, StatePart
from statemachine.cluster.sharding import owned_parts
from statemachine.messages.values import (
    CommittedStep,
    DeviceReport,
    Evaluation,
    HeldPart,
    QuiesceMode,
    Restore,
    Vote,
)

Outcome = Literal["start", "boundary", "redo", "roll_forward"]
Reports = Mapping[str, tuple[DeviceReport, ...]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """The last generation whose ``Resume`` was sent, and what was decided for it."""

    generation: int
    step: int
    vote: Vote | None
    plan: Plan
    ready: dict[Device, frozenset[int]] = field(default_factory=dict)
    """Devices that counted by their gradients of ``step``, with the layers that they hold after applying them."""
    ready_parts: dict[Device, tuple[StatePart, ...]] = field(default_factory=dict)
    """Parts of those layers that they hold then, if layers are in parts."""
    held_parts: tuple[HeldPart, ...] = ()
    """Parts that the devices of the plan hold, if layers are in parts."""
    lineage: int = 0
    """Generation of the last rollback; 0: none."""
    restore: Restore | None = None
    """The snapshot or checkpoint from which the state of ``step`` comes."""
    protection: str = "none"
    """Protection scheme of this generation's snapshots."""
    requested_protection: str = ""
    """Protection that was requested with the plan: a scheme, or ``auto``."""
    replica_peers: dict[str, str] = field(default_factory=dict)
    """Owner → the node that holds a copy of its part of this generation's snapshots."""
    evaluated: int = 0
    """The newest step whose evaluation was reported when this was decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    step: int
    vote: Vote | None
    outcome: Outcome
    holdings: dict[Device, frozenset[int]]
    """Layers that each device holds complete at ``step`` (after applying gradients, if it is to roll forward)."""
    ready: dict[Device, frozenset[int]]
    """The part of ``holdings`` that counts by gradients; under ZeRO-1, the layers of these devices' ``parts``."""
    in_flight: bool
    """Whether some rank had gradients of a step that is now discarded and redone."""
    evaluation: Evaluation | None = None
    """Evaluation of the state after ``step``, if a report has it."""
    parts: dict[Device, tuple[StatePart, ...]] = field(default_factory=dict)
    """Parts that each device holds at ``step``, if layers are in parts. ``holdings`` then names the layers
    whose parameters it holds whole.
    """

    parted: bool = False
    """Whether trainers hold layers in parts: with ZeRO-1, or if stages may shard."""

    def without_state(self) -> "Decision":
        """Return the same decision if what devices hold does not count."""
        none: dict[Device, frozenset[int]] = dict.fromkeys(self.holdings, frozenset())
        return replace(self, holdings=none, ready={}, parts=dict.fromkeys(self.parts, ()))


def is_new(report: DeviceReport) -> bool:
    """Return whether a report is of a newly prepared trainer: the model as the seed initialises it, at step 0."""
    return report.committed_step == 0 and report.ready_step is None


def is_trusted(reports: Iterable[DeviceReport], counted_in: int, resumption: Resumption | None) -> bool:
    """Return whether a node's reports may count: it took part in every decision that was carried out, or is
    new.
    """
    if resumption is None or counted_in == resumption.generation:
        return True
    return all(is_new(report) for report in reports)


def owned_layers(plan: Plan) -> dict[Device, frozenset[int]]:
    """Return the layers that each device computes (and so has gradients of) under ``plan``."""
    owned: dict[Device, frozenset[int]] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            layers = frozenset(range(stage.first_layer, stage.end_layer))
            for device in stage.devices:
                owned[device] = owned.get(device, frozenset()) | layers
    return owned


def of_nodes(held: Mapping[Device, T], names: Iterable[str]) -> dict[Device, T]:
    """Return what the devices of these nodes hold."""
    among = frozenset(names)
    return {device: what for device, what in held.items() if device.node in among}


def decide(
    reports: Reports,
    known: CommittedStep | None,
    resumption: Resumption | None,
    mode: QuiesceMode,
    *,
    zero1: bool = False,
) -> Decision:
    """Decide which step to resume from, and which device holds which layer of it.

    ``known`` is the newest committed step that the coordinator has heard of, also from nodes that are dead
    now.

    :param zero1: owners of a layer share out its optimizer state.
    """
    lineage = resumption.lineage if resumption is not None else 0
    all_reports = [
        (Device(node=node, index=report.device), report)
        for node, devices in sorted(reports.items())
        for report in devices
    ]
    counted = [(device, report) for device, report in all_reports if report.lineage == lineage]
    target = max((report.committed_step for _, report in counted), default=0)
    vote = next((r.vote for _, r in counted if r.committed_step == target and r.vote is not None), None)
    if known is not None and known.step >= target:
        target, vote = known.step, known.vote
    found = (r.evaluation for _, r in counted if r.committed_step == target)
    evaluation = next((one for one in found if one is not None), None)
    # Computed only if gradients count: it takes long for a plan of a thousand nodes.
    owned = cache(lambda: owned_layers(resumption.plan) if resumption is not None else {})
    holdings: dict[Device, frozenset[int]] = {device: frozenset() for device, _ in all_reports}
    parts: dict[Device, tuple[StatePart, ...]] = dict.fromkeys(holdings, ())
    ready: dict[Device, frozenset[int]] = {}
    for device, report in counted:
        if report.committed_step == target:
            holdings[device], parts[device] = frozenset(report.held), report.parts
        elif report.ready_step == target:
            layers = _by_gradients(device, report, target, resumption, owned)
            if layers:
                ready[device] = layers
                parts[device] = _parts_by_gradients(device, report, target, resumption, zero1=zero1)
                holdings[device] = _whole(layers, parts[device]) if report.parts else layers
    in_flight = any(r.ready_step == target + 1 for _, r in counted)
    outcome: Outcome
    if resumption is None:
        outcome = "start"
    elif ready:
        outcome = "roll_forward"
    elif mode == "boundary" and not in_flight:
        outcome = "boundary"
    else:
        outcome = "redo"
    return Decision(
        step=target,
        vote=vote,
        outcome=outcome,
        holdings=holdings,
        ready=ready,
        in_flight=in_flight,
        evaluation=evaluation,
        parts=parts,
        parted=zero1 or any(parts.values()),
    )


def _by_gradients(
    device: Device,
    report: DeviceReport,
    target: int,
    resumption: Resumption | None,
    owned: Callable[[], dict[Device, frozenset[int]]],
) -> frozenset[int]:
    """Return the layers that ``device`` holds at ``target`` once it applies the gradients that it reports."""
    if resumption is None or report.resumed > resumption.generation:
        return frozenset()
    here = frozenset(report.held).union(part.layer for part in report.parts)
    if target > resumption.step:
        return owned().get(device, frozenset()) & here
    if target == resumption.step:
        return resumption.ready.get(device, frozenset()) & here
    return frozenset()


def _parts_by_gradients(
    device: Device,
    report: DeviceReport,
    target: int,
    resumption: Resumption | None,
    *,
    zero1: bool,
) -> tuple[StatePart, ...]:
    """Return the parts that ``device`` holds at ``target`` once it applies the gradients that it reports."""
    if resumption is None or not report.parts:
        return ()
    if target == resumption.step:
        counted = set(resumption.ready_parts.get(device, ()))
        return tuple(part for part in report.parts if part in counted)
    owned = owned_parts(resumption.plan, device, zero1=zero1)
    if "aor" not in resumption.protection:  # Replicas of the previous group do not follow this one's steps.
        owned = frozenset(kept for kept in owned if not kept.replica)
    return tuple(part for part in report.parts if part in owned)


def _whole(layers: frozenset[int], parts: tuple[StatePart, ...]) -> frozenset[int]:
    """Return the layers whose only part is the one here."""
    return layers.intersection(part.layer for part in parts if part.is_whole)
