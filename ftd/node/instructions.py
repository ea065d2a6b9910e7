"""Instructions to trainers: what a job and a plan of named devices mean for one device.

Rank r is ``plan.devices[r]``. The plan names devices, the instruction names ranks.
"""

import msgspec

from planner.values import Device, Plan
from statemachine.messages import cluster, trainer
from statemachine.messages.values import HeldPart, Job


def make_world_data(
    plan: Plan, hosts: dict[str, str], held_parts: tuple[HeldPart, ...] = ()
) -> trainer.WorldData:
    """Return the training group of a plan.

    :param hosts: address of each node of the plan.
    """
    ranks = {device: rank for rank, device in enumerate(plan.devices)}
    return trainer.WorldData(
        pipelines=tuple(
            trainer.WorldPipeline(
                stages=tuple(
                    trainer.WorldStage(
                        first_layer=stage.first_layer,
                        end_layer=stage.end_layer,
                        ranks=tuple(ranks[device] for device in stage.devices),
                        recompute=stage.recompute,
                        within=stage.within,
                        replicas=stage.replicas,
                    )
                    for stage in pipeline.stages
                ),
                first_microbatch=pipeline.first_microbatch,
                microbatches=pipeline.microbatches,
            )
            for pipeline in plan.pipelines
        ),
        transfers=tuple(
            trainer.TransferData(layer=t.layer, source=ranks[t.source], target=ranks[t.target])
            for t in plan.transfers
        ),
        hosts=tuple(hosts[device.node] for device in plan.devices),
        held_parts=tuple(
            trainer.PartData(
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
        step_s=plan.estimated_iteration_s,
    )


def rank_of(plan: Plan, device: Device) -> int:
    """Return the device's rank in the plan, or -1 if the plan does not use it."""
    try:
        return plan.devices.index(device)
    except ValueError:
        return -1


def make_resume_instruction(
    resume: cluster.Resume, device: Device, token: str, restore: str = ""
) -> trainer.ResumeRank:
    """Return the instruction for one device to resume training.

    :param restore: directory in which the device's layers are staged; empty if it keeps the state that it
        holds.
    :raises ValueError: the rendezvous address is not host:port.
    """
    host, _, port = resume.rendezvous.rpartition(":")
    released = next((each for each in resume.plan.released_layers if each.device == device), None)
    return trainer.ResumeRank(
        generation=resume.generation,
        step=resume.step,
        vote=resume.vote,
        rank=rank_of(resume.plan, device),
        world=make_world_data(resume.plan, resume.hosts, resume.held_parts),
        rendezvous_host=host,
        rendezvous_port=int(port),
        token=token,
        nodes=tuple(device.node for device in resume.plan.devices),
        protection=resume.protection,
        restore=restore,
        lineage=resume.lineage,
        skipped_batches=resume.skipped_batches,
        evaluated=resume.evaluated,
        parked=() if released is None else released.parked,
        dropped=() if released is None else released.dropped,
    )


def make_prepare_instruction(
    job: Job,
    profile: bool,
    arena: str = "",
    arena_limit_bytes: int | None = None,
    *,
    describe: bool = False,
    memory_limit_bytes: int | None = None,
) -> trainer.PrepareJob:
    """Return the instruction for a trainer to prepare for a job.

    :param memory_limit_bytes: memory of the device that the node allows; ``None``: all of it.

    :raises msgspec.ValidationError: the job's training table is not valid for a trainer.
    """
    training = msgspec.convert(job.training, trainer.TrainingData)
    return trainer.PrepareJob(
        job_id=job.job_id,
        training=training,
        profile=profile,
        devices_per_node=job.policy.devices_per_node,
        arena=arena,
        arena_limit_bytes=arena_limit_bytes,
        describe=describe,
        planned_memory_bytes=job.policy.device_memory_bytes,
        memory_limit_bytes=memory_limit_bytes,
    )
