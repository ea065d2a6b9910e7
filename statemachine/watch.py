"""Hangs: a trainer that neither works nor waits.

The beat comes from the trainer's control thread and says whether the main thread moved (a counter of
operations) or has nothing to do but wait for others. While steps commit, a few median steps without either
is a hang; without steps (model build, rendezvous, state transfer) patience is long.
"""

from statistics import median

from statemachine.agent_events import TrainerBeat
from statemachine.agent_state import WATCH, Agent, Trainer, TrainerPhase


def beat(a: Agent, event: TrainerBeat) -> None:
    trainer = a.trainers[event.device]
    trainer.beat_at = a.at
    trainer.reading = event.reading
    if event.waiting or event.progress != trainer.progress:
        trainer.moved_at = a.at
        trainer.progress = event.progress


def look(a: Agent, late_s: float) -> tuple[Trainer, str] | None:
    """At every watch: the first trainer found hanging, and how that showed."""
    if all(trainer.phase is TrainerPhase.DOWN for trainer in a.trainers):
        return None
    a.set_timer(WATCH, a.timing.watch_s)
    if late_s > 3 * a.timing.watch_s:
        # It is we who were away: their beats are still queued.
        for trainer in a.trainers:
            trainer.beat_at = trainer.moved_at = a.at
        return None
    for trainer in a.trainers:
        if trainer.phase is not TrainerPhase.DOWN and (how := _hangs(a, trainer)):
            return trainer, how
    return None


def _hangs(a: Agent, trainer: Trainer) -> str | None:
    """How it shows that it does, and which limit says so."""
    timing = a.timing
    silent_s, still_s = a.at - trainer.beat_at, a.at - trainer.moved_at
    if trainer.phase is TrainerPhase.STARTING:
        late = silent_s > timing.idle_progress_s
        return f"it did not start within {timing.idle_progress_s:g} s (idle_progress_s)" if late else None
    if a.stepping:
        step_s = timing.hang_s(median(a.durations) if a.durations else 0.0)
        beat_limit = progress_limit = (step_s, "hang_floor_s, hang_steps")
    else:
        beat_limit, progress_limit = (
            (timing.idle_beat_s, "idle_beat_s"),
            (timing.idle_progress_s, "idle_progress_s"),
        )
    if silent_s > beat_limit[0]:
        return f"no sign of life for {silent_s:.2f} s; limit {_limit(*beat_limit)}"
    if trainer.reading:
        progress_limit = max(progress_limit, (timing.reading_s, "reading_s"))
    if still_s <= progress_limit[0]:
        return None
    what = "reading samples" if trainer.reading else "no progress"
    return f"{what} for {still_s:.2f} s, and it did not wait; limit {_limit(*progress_limit)}"


def _limit(limit_s: float, keys: str) -> str:
    return f"{limit_s:.3g} s (timing: {keys})"
