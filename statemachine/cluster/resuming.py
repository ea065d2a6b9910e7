"""What the nodes are told with a plan: the Resume of the present generation."""

from dataclasses import replace

from statemachine.cluster.state import Attempt, Cluster
from statemachine.messages.cluster import Resume
from statemachine.messages.values import Buddy, NodeFacts, Restore


def restore_of(c: Cluster, attempt: Attempt) -> Restore | None:
    """Where everybody's state comes from after a rollback."""
    record, checkpoint, job = c.keeping.newest, attempt.checkpoint, c.job
    if job is not None and checkpoint is not None:
        return Restore(
            job_id=job.job_id,
            step=checkpoint.step,
            generation=0,
            groups=(),
            sources={},
            url=job.checkpoint.url,
            job_name=job.name,
        )
    if attempt.restoring is None or record is None or job is None:
        return None
    facts = {name: c.nodes[name].facts for name in attempt.sources}
    return Restore(
        job_id=job.job_id,
        step=record.step,
        generation=record.generation,
        groups=record.groups,
        sources={name: _served_at(fact) for name, fact in facts.items()},
    )


def _served_at(facts: NodeFacts) -> str:
    return f"{facts.host}:{facts.snapshot_port}"


def resume_limit_s(c: Cluster) -> float:
    restoring = c.resumption is not None and c.resumption.restore is not None
    return c.timing.restore_s if restoring else c.timing.resume_s


def resume_command(c: Cluster) -> Resume | None:
    """The Resume of the present generation, also for a node that has to be told again."""
    resumption, job = c.resumption, c.job
    if resumption is None or job is None:
        return None
    plan = replace(resumption.plan, considered=())  # Which is for people.
    hosts = {name: c.nodes[name].facts.host for name in plan.nodes}
    first = c.nodes[plan.devices[0].node].facts
    return Resume(
        generation=resumption.generation,
        job_id=job.job_id,
        step=resumption.step,
        vote=resumption.vote,
        plan=plan,
        hosts=hosts,
        rendezvous=f"{first.host}:{first.rendezvous_port}",
        lineage=resumption.lineage,
        protection=resumption.protection,
        restore=resumption.restore,
        held_parts=resumption.held_parts,
        evaluated=resumption.evaluated,
        buddies={
            owner: Buddy(node=name, address=_served_at(c.nodes[name].facts))
            for owner, name in resumption.buddies.items()
            if name in c.nodes
        },
    )
