"""Hang detection: a trainer hangs if it neither works nor waits.

The heartbeat comes from the trainer's control thread and says whether the main thread moved (a counter of
operations) or only waits for others. While steps commit, a few median steps without either are a hang;
without steps (model build, rendezvous, state transfer) the limits are long.

A busy host is no hang: while threads of the trainer wait for a processor, its time stands still. This holds
for at most ``idle_heartbeat_s``: a group does not wait longer for a trainer whose host has no time for it.
"""

from statistics import median

from planner.reasons import three_digits
from statemachine.agent.events import TrainerStarved
from statemachine.agent.state import HANG_CHECK, Agent, TrainerPhase, TrainerRecord
from statemachine.messages.trainer import TrainerHeartbeat


def take_heartbeat(a: Agent, trainer: TrainerRecord, heartbeat: TrainerHeartbeat) -> None:
    trainer.heartbeat_at = a.at
    trainer.starved_s = 0.0
    trainer.reading = heartbeat.reading
    trainer.build_progress = heartbeat.build_progress
    if heartbeat.waiting or heartbeat.progress != trainer.progress:
        trainer.progress_at = a.at
        trainer.progress = heartbeat.progress


def add_starved_time(a: Agent, trainer: TrainerRecord, event: TrainerStarved) -> None:
    """Leave the time in which the trainer could not run out of account."""
    excused_s = max(0.0, min(event.for_s, a.timing.idle_heartbeat_s - trainer.starved_s))
    trainer.starved_s += excused_s
    trainer.heartbeat_at = min(a.at, trainer.heartbeat_at + excused_s)
    trainer.progress_at = min(a.at, trainer.progress_at + excused_s)


def find_hang(a: Agent, late_s: float) -> tuple[TrainerRecord, str, float] | None:
    """Check all trainers, periodically; return the first one that hangs, with the reason and the seconds since
    its last sign of life.
    """
    if all(trainer.phase is TrainerPhase.DOWN for trainer in a.trainers):
        return None
    a.set_timer(HANG_CHECK, a.timing.hang_check_s)
    if late_s > 3 * a.timing.hang_check_s:
        # The daemon itself was suspended: the trainers' heartbeats are still queued.
        for trainer in a.trainers:
            trainer.heartbeat_at = trainer.progress_at = a.at
        return None
    for trainer in a.trainers:
        if trainer.phase is not TrainerPhase.DOWN and (how := _hang_reason(a, trainer)):
            return trainer, *how
    return None


def _hang_reason(a: Agent, trainer: TrainerRecord) -> tuple[str, float] | None:
    """Return why the trainer counts as hung, with the limit that it exceeds, and the seconds since its last
    sign of life; ``None`` if it does not.
    """
    timing = a.timing
    silent_s, still_s = a.at - trainer.heartbeat_at, a.at - trainer.progress_at
    if trainer.phase is TrainerPhase.STARTING:
        if silent_s <= timing.idle_progress_s:
            return None
        return f"it did not start within {timing.idle_progress_s:g} s (idle_progress_s)", silent_s
    if a.stepping:
        step_s = timing.hang_s(median(a.durations) if a.durations else 0.0)
        beat_limit = progress_limit = (step_s, "hang_floor_s, hang_steps")
    else:
        beat_limit, progress_limit = (
            (timing.idle_heartbeat_s, "idle_heartbeat_s"),
            (timing.idle_progress_s, "idle_progress_s"),
        )
    if silent_s > beat_limit[0]:
        starved = f" in which it could run (and {trainer.starved_s:.2f} s more)" if trainer.starved_s else ""
        return f"no heartbeat for {silent_s:.2f} s{starved}; limit {_limit(*beat_limit)}", silent_s
    if trainer.reading:
        progress_limit = max(progress_limit, (timing.reading_s, "reading_s"))
    if still_s <= progress_limit[0]:
        return None
    what = "reading samples" if trainer.reading else "no progress"
    return f"{what} for {still_s:.2f} s, and it did not wait; limit {_limit(*progress_limit)}", still_s


def _limit(limit_s: float, keys: str) -> str:
    return f"{three_digits(limit_s)} s (timing: {keys})"
