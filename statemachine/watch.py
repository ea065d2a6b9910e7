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
    if event.waiting or event.progress != trainer.progress:
        trainer.moved_at = a.at
        trainer.progress = event.progress


def patience_s(a: Agent) -> tuple[float, float]:
    """How long without a beat, and how long without progress, is a hang now."""
    if a.stepping:
        limit = a.timing.hang_s(median(a.durations) if a.durations else 0.0)
        return limit, limit
    return a.timing.idle_beat_s, a.timing.idle_progress_s


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
    beat_s, progress_s = patience_s(a)
    for trainer in a.trainers:
        if trainer.phase is TrainerPhase.DOWN:
            continue
        if trainer.phase is TrainerPhase.STARTING:
            if a.at - trainer.beat_at > a.timing.idle_progress_s:
                return trainer, f"it did not start within {a.timing.idle_progress_s:g} s"
        elif a.at - trainer.beat_at > beat_s:
            return trainer, f"no sign of life for {a.at - trainer.beat_at:.2f} s"
        elif a.at - trainer.moved_at > progress_s:
            return (
                trainer,
                f"no progress for {a.at - trainer.moved_at:.2f} s, and it did not wait",
            )
    return None
