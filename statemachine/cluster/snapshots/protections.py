"""What protects a job's snapshots: asked for by the job or a user, settled with each plan.

Every plan has its own number of owners, so each is asked for a protection with the rest (``ComputePlan``):
the scheme that is wished for, or the cheapest that withstands the losses that the job is to survive. It holds
for the plan's generation; trainers learn it with their Resume. A wish that changes while a group trains is
met by a boundary and the same plan: nothing is computed again and nothing moves.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from statemachine.cluster.phases import Running
from statemachine.cluster.state import Cluster
from statemachine.messages.values import ProtectionChoice, ProtectionRequest

AUTO = "auto"


def requested_protection(c: Cluster) -> str:
    """A scheme, or ``auto``."""
    return AUTO if c.current_job.snapshot.auto_protection else c.current_job.snapshot.protection


def protection_request(c: Cluster, nodes: Iterable[str]) -> ProtectionRequest | None:
    """What a plan on these nodes is asked for; ``None``: there is nothing to protect."""
    job = c.current_job
    if job.snapshot.every_steps < 1 and not job.policy.zero1:
        return None
    limits = {name: c.nodes[name].facts.snapshot_bytes for name in nodes}
    return ProtectionRequest(
        scheme=None if job.snapshot.auto_protection else job.snapshot.protection,
        losses=max(1, job.policy.tolerate),
        zero1=job.policy.zero1,
        limits={name: size_bytes for name, size_bytes in limits.items() if size_bytes},
    )


def request_changed(c: Cluster, group: Running) -> bool:
    """The group that trains was planned with another wish, and has steps left to profit from a new one."""
    job, wish = c.current_job, group.resumption.requested_protection
    if not wish:
        return False
    return wish != requested_protection(c) and not group.finished and c.progress.known_step + 1 < job.steps


def adopt_protection(c: Cluster, choice: ProtectionChoice | None) -> str:
    """The scheme of the plan that is here. Told where it is another one than before, or was not given."""
    job, last = c.current_job, c.resumption
    policy = job.snapshot
    if choice is None:
        return policy.protection
    before = last.protection if last is not None else None
    if policy.auto_protection and policy.protection != choice.scheme:
        c.job = replace(job, snapshot=replace(policy, protection=choice.scheme))
    given = last is None and not policy.auto_protection and not choice.fallback
    if choice.scheme != before and not given:
        c.emit(
            "ProtectionChanged",
            choice.reason,
            protection=choice.scheme,
            before=before,
            by="auto" if policy.auto_protection else "fallback" if choice.fallback else "user",
        )
    if before is not None and choice.scheme != before and not policy.paused:
        c.snapshots.user_requested = True  # The newest snapshot is still protected as before.
    return choice.scheme
