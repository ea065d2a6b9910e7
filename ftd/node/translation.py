"""Between the agent machine's language and the trainers' frames: a plan becomes ranks, reports become events.

The runtime knows neither planner nor state machines, so this is where a ``Plan`` turns into plain data:
rank r is ``plan.devices[r]``, everything that names a device in the plan names its rank in the frame.
"""

from typing import Any, assert_never

import msgspec

from ftd.wire.profiles import problem_of_profile
from planner.values import Device, Plan
from statemachine.agent.events import (
    TrainerBeat,
    TrainerDone,
    TrainerFailed,
    TrainerPrepared,
    TrainerQuiesced,
    TrainerReplicaDiverged,
    TrainerResumed,
    TrainerSnapped,
    TrainerSnapping,
    TrainerSnapshotFailed,
    TrainerStepped,
    TrainerSuspectedPeer,
    TrainerUp,
)
from statemachine.events import Event
from statemachine.messages import cluster as messages
from statemachine.messages import trainer as protocol
from statemachine.messages.values import DeviceReport, FailureCause, HeldPart, Job


def world_data(
    plan: Plan, hosts: dict[str, str], held_parts: tuple[HeldPart, ...] = ()
) -> protocol.WorldData:
    """The training group of a plan; ``hosts`` maps each of its nodes to an address."""
    ranks = {device: rank for rank, device in enumerate(plan.devices)}
    return protocol.WorldData(
        pipelines=tuple(
            protocol.PipelineData(
                stages=tuple(
                    protocol.StageData(
                        first_layer=stage.first_layer,
                        end_layer=stage.end_layer,
                        ranks=tuple(ranks[device] for device in stage.devices),
                        recompute=stage.recompute,
                        within=stage.within,
                    )
                    for stage in pipeline.stages
                ),
                first_microbatch=pipeline.first_microbatch,
                microbatches=pipeline.microbatches,
            )
            for pipeline in plan.pipelines
        ),
        transfers=tuple(
            protocol.TransferData(layer=t.layer, source=ranks[t.source], target=ranks[t.target])
            for t in plan.transfers
        ),
        hosts=tuple(hosts[device.node] for device in plan.devices),
        held_parts=tuple(
            protocol.PartData(
                rank=ranks[held.device],
                layer=layer,
                start=held.start,
                end=held.end,
                of=held.of,
                replica=held.replica,
                whole=held.whole,
            )
            for held in held_parts
            for layer in range(held.first_layer, held.end_layer)
        ),
    )


def rank_of(plan: Plan, device: Device) -> int:
    """The device's rank in the plan, or -1 where it idles."""
    try:
        return plan.devices.index(device)
    except ValueError:
        return -1


def resume_frame(resume: messages.Resume, device: Device, token: str, restore: str = "") -> protocol.Resume:
    """The instruction for one device.

    :param restore: the directory in which its layers are staged; empty: it keeps what it holds.
    :raises ValueError: the rendezvous address is no host:port.
    """
    host, _, port = resume.rendezvous.rpartition(":")
    released = next((each for each in resume.plan.released if each.device == device), None)
    return protocol.Resume(
        generation=resume.generation,
        step=resume.step,
        vote=resume.vote,
        rank=rank_of(resume.plan, device),
        world=world_data(resume.plan, resume.hosts, resume.held_parts),
        rendezvous_host=host,
        rendezvous_port=int(port),
        token=token,
        nodes=tuple(device.node for device in resume.plan.devices),
        protection=resume.protection,
        restore=restore,
        lineage=resume.lineage,
        evaluated=resume.evaluated,
        parked=() if released is None else released.parked,
        dropped=() if released is None else released.dropped,
    )


def layers_of(plan: Plan, node: str, device: int | None = None) -> tuple[int, ...]:
    """All layers that devices of this node hold under the plan, or one of them; ascending."""
    layers = {
        layer
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        if any(one.node == node and device in (None, one.index) for one in stage.devices)
        for layer in range(stage.first_layer, stage.end_layer)
    }
    return tuple(sorted(layers))


def prepare_frame(
    job: Job,
    profile: bool,
    arena: str = "",
    arena_limit_bytes: int | None = None,
    *,
    describe: bool = False,
) -> protocol.Prepare:
    """:raises msgspec.ValidationError: the job's training table is not what a trainer understands."""
    training = msgspec.convert(job.training, protocol.TrainingData)
    return protocol.Prepare(
        job_id=job.job_id,
        training=training,
        profile=profile,
        devices_per_node=job.policy.devices_per_node,
        arena=arena,
        arena_limit_bytes=arena_limit_bytes,
        describe=describe,
    )


def cause_of(raised: protocol.Raised) -> FailureCause:
    """What a trainer whose code raised failed of."""
    match raised.where:
        case "prepare":
            return "unprepared"
        case "restore":
            return "foreign"
        case "training":
            return "raised"
        case _:
            assert_never(raised.where)


def event_of(report: protocol.MachineReport, *, device: int, pid: int, at: float, cause: str) -> Event:
    """What a trainer's frame means to the agent machine."""
    base: dict[str, Any] = {"at": at, "cause": cause}
    match report:
        case protocol.Attached():
            return TrainerUp(**base, device=device, pid=report.pid)
        case protocol.Prepared():
            return _prepared(report, device, pid, base)
        case protocol.Quiesced():
            return TrainerQuiesced(
                **base, generation=report.generation, report=_device_report(device, report)
            )
        case protocol.Resumed() | protocol.Stepped() | protocol.ReplicaDiverged() | protocol.Done():
            return _training_event(report, {**base, "device": device, "generation": report.generation})
        case protocol.Snapping() | protocol.Snapped() | protocol.SnapshotFailed():
            return _snapshot_event(report, device, base)
        case protocol.Beat():
            return TrainerBeat(
                **base,
                device=device,
                progress=report.progress,
                waiting=report.waiting,
                reading=report.reading,
                doing=report.doing,
            )
        case protocol.PeerSuspected():
            return TrainerSuspectedPeer(
                **base, device=device, generation=report.generation, detail=report.detail
            )
        case protocol.Raised():
            return TrainerFailed(
                **base,
                device=device,
                pid=pid,
                cause_of_failure=cause_of(report),
                detail=report.detail,
            )
        case _:
            assert_never(report)


def _prepared(report: protocol.Prepared, device: int, pid: int, base: dict[str, Any]) -> Event:
    """A profile that cannot be is no preparation: its trainer failed, and the job says why."""
    profile = report.profile
    problem = problem_of_profile(profile) if profile is not None else None
    if problem is not None:
        return TrainerFailed(
            **base,
            device=device,
            pid=pid,
            cause_of_failure="unprepared",
            detail=f"the model was measured, but the profile's {problem}",
        )
    return TrainerPrepared(**base, device=device, job_id=report.job_id, profile=profile)


def _training_event(report: protocol.TrainingReport, base: dict[str, Any]) -> Event:
    match report:
        case protocol.Resumed():
            return TrainerResumed(
                **base,
                bytes_moved=report.bytes_moved,
                rendezvous_s=report.rendezvous_s,
                state_s=report.state_s,
            )
        case protocol.Stepped():
            return TrainerStepped(
                **base,
                step=report.step,
                vote=report.vote,
                step_s=report.step_s,
                microbatch_ms=report.microbatch_ms,
            )
        case protocol.ReplicaDiverged():
            return TrainerReplicaDiverged(
                **base,
                step=report.step,
                layer=report.layer,
                detail=report.detail,
            )
        case protocol.Done():
            return TrainerDone(
                **base,
                step=report.step,
                digests=dict(report.digests),
                evaluation=report.evaluation,
            )
        case _:
            assert_never(report)


def _snapshot_event(
    report: protocol.Snapping | protocol.Snapped | protocol.SnapshotFailed, device: int, base: dict[str, Any]
) -> Event:
    where = {**base, "device": device, "generation": report.generation, "step": report.step}
    match report:
        case protocol.Snapping():
            return TrainerSnapping(**where)
        case protocol.Snapped():
            return TrainerSnapped(
                **where,
                size_bytes=report.size_bytes,
                copy_s=report.copy_s,
                stall_s=report.stall_s,
                idle_bytes=report.idle_bytes,
            )
        case protocol.SnapshotFailed():
            return TrainerSnapshotFailed(**where, detail=report.detail)
        case _:
            assert_never(report)


def _device_report(device: int, report: protocol.Quiesced) -> DeviceReport:
    return DeviceReport(
        device=device,
        committed_step=report.committed_step,
        ready_step=report.ready_step,
        vote=report.vote,
        held=report.held,
        lineage=report.lineage,
        parts=report.parts,
        evaluation=report.evaluation,
    )
