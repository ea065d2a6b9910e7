"""What users want of a running job's snapshots: one now, another interval, another protection."""

from msgspec.structs import replace

from statemachine.cluster.jobs import answer
from statemachine.cluster.snapshots.protections import AUTO
from statemachine.cluster.state import Cluster
from statemachine.events import SnapshotRequested


def requested(c: Cluster, event: SnapshotRequested) -> None:
    """Journaled with the job, so a coordinator that comes back knows it."""
    job = c.job
    if job is None or not c.active:
        answer(c, event.request, False, "no job is under way")
        return
    replicas_alone = job.policy.zero1 and not event.now and event.every_steps is None
    if job.snapshot.every_steps < 1 and not replicas_alone:
        answer(
            c,
            event.request,
            False,
            f"job {job.name!r} was submitted without snapshots, so its nodes set no memory aside for them: "
            'stop it, write [snapshot] every_steps = "auto" into its file, and submit it again',
        )
        return
    said: list[str] = []
    if event.every_steps is not None:
        said.append(_set_interval(c, event.every_steps))
    if event.protection is not None:
        said.append(_set_protection(c, event.protection))
    if event.now:
        c.keeping.asked, c.dirty = True, True
        c.persist()
        said.append(f"a snapshot follows the {'step in flight' if c.planned else 'first step'}")
    answer(c, event.request, True, "; ".join(said) or "nothing was asked for")


def _set_interval(c: Cluster, every: int | str) -> str:
    assert c.job is not None, "a job is under way"
    before = c.job.snapshot
    if isinstance(every, str):
        after = replace(before, auto_interval=True, paused=False)
        words = f"as often as measurements say, now every {_steps(after.every_steps)}"
        c.keeping.measured = None  # The next snapshot chooses, whatever was chosen before.
    elif every == 0:
        after = replace(before, auto_interval=False, paused=True)
        words = "none is taken from now on; the newest stays"
    else:
        after = replace(before, auto_interval=False, paused=False, every_steps=every)
        words = f"every {_steps(every)}"
    if after != before:
        c.job = replace(c.job, snapshot=after)
        c.dirty = True
        c.persist()
        c.emit(
            "SnapshotIntervalChosen",
            f"a user asked: {words}",
            every_steps=0 if after.paused else after.every_steps,
            before=0 if before.paused else before.every_steps,
            by="user",
        )
        c.publish()
    return f"snapshots: {words}"


def _set_protection(c: Cluster, scheme: str) -> str:
    """Met at the next boundary (``jobs.change_protection``)."""
    assert c.job is not None, "a job is under way"
    before = c.job.snapshot
    auto = scheme == AUTO
    after = replace(before, auto_protection=auto, protection=before.protection if auto else scheme)
    if after == before:
        return f"protection: it is {scheme} already"
    c.job = replace(c.job, snapshot=after)
    c.dirty = True
    c.persist()
    c.publish()
    return f"protection: {'what suits the plan' if auto else scheme}, from the next step boundary on"


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"
