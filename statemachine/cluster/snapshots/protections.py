"""Protection of a job's snapshots: requested by the job or a user, and chosen with each plan.

Every plan has its own number of owners, so a protection is requested together with each plan
(``ComputePlan``): the requested scheme, or the cheapest one that tolerates the losses which the job is to
survive. It holds for the plan's generation; trainers learn it with their Resume. If the request changes
while a group trains, the group stops at a boundary and resumes under the same plan: nothing is computed
again and nothing moves.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from statemachine.cluster.phases import Running
from statemachine.cluster.snapshots.replica_peers import has_buddy
from statemachine.cluster.state import Cluster
from statemachine.messages.values import ProtectionChoice, ProtectionRequest

AUTO = "auto"


def requested_protection(c: Cluster) -> str:
    """Return the requested scheme, or ``auto``."""
    return AUTO if c.current_job.snapshot.auto_protection else c.current_job.snapshot.protection


def protection_request(c: Cluster, nodes: Iterable[str]) -> ProtectionRequest | None:
    """Return the protection to request for a plan on these nodes, or ``None`` if there is nothing to protect."""
    job = c.current_job
    if job.snapshot.every_steps < 1 and not job.policy.zero1:
        return None
    facts = {name: c.nodes[name].facts for name in nodes}
    may_copy = job.snapshot.auto_protection or has_buddy(job.snapshot.protection)
    return ProtectionRequest(
        scheme=None if job.snapshot.auto_protection else job.snapshot.protection,
        losses=max(1, job.policy.tolerate),
        zero1=job.policy.zero1,
        limits={name: one.snapshot_bytes for name, one in facts.items() if one.snapshot_bytes},
        # Half of a configured limit, which is what a node gives its own snapshots (``ftd.snapshots.service``).
        own_limits={
            name: one.snapshot_bytes // 2 for name, one in facts.items() if may_copy and one.snapshot_limited
        },
    )


def request_changed(c: Cluster, group: Running) -> bool:
    """Return whether the group was planned with a different request and has steps left to benefit from the new
    one.
    """
    job, wish = c.current_job, group.resumption.requested_protection
    if not wish:
        return False
    return wish != requested_protection(c) and not group.finished and c.progress.known_step + 1 < job.steps


def adopt_protection(c: Cluster, choice: ProtectionChoice | None) -> str:
    """Adopt and return the scheme of the new plan; publish it if it differs from the last one or from the
    request.
    """
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
        c.snapshots.user_requested = True  # The newest snapshot still has the previous protection.
    return choice.scheme
