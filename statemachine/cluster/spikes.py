"""Spikes of the loss: a step whose loss is far above the last ones is undone, and its batch is never used again.

The update of such a step may destroy what the steps before it learned. With ``on_spike = "skip"`` all nodes
return to the newest snapshot before that step, and the sample order leaves the step's batch out
(``batch_of``); so the steps after the snapshot have the same samples as before, up to the spike. The
batches that are left out are journalled, travel with every Resume, and stand in every vote, and so in
every checkpoint.

A loss is a spike if it exceeds the median of the last ``spike_window`` losses by more than
``spike_deviations`` robust standard deviations (1.4826 times the median absolute deviation; at least 1% of
the median, since equal losses have none). A loss that stays high whatever batch is used is no spike: after
three batches for one step the loss is accepted, and no step is judged until the window is full again.
"""

from dataclasses import replace

from statemachine.cluster.loss_spikes import Spike, threshold_of
from statemachine.cluster.state import Cluster
from statemachine.messages.values import Vote, batch_of

MAX_TRIES = 3
"""Batches that are left out for one step before its loss is accepted."""


def note_loss(c: Cluster, step: int, vote: Vote) -> None:
    """Judge the loss of a step with an update that is being published."""
    policy, spikes = c.current_job.updates, c.spikes
    if spikes.pending is not None:
        return
    if len(spikes.losses) >= policy.spike_window:
        threshold = threshold_of([loss for _, loss in spikes.losses], policy.spike_deviations)
        if not vote.loss <= threshold:
            _take_spike(c, step, vote, threshold)
            return
    c.spikes = spikes.with_loss(step, vote.loss, policy.spike_window)


def _take_spike(c: Cluster, step: int, vote: Vote, threshold: float) -> None:
    """Return to a snapshot before the step, or accept the loss if that is impossible or did not help."""
    newest = c.snapshots.newest
    batch = batch_of(step, c.spikes.skipped_batches)
    spike = Spike(step=step, loss=vote.loss, batch=batch, threshold=threshold)
    tried = c.spikes.tries if step <= c.spikes.tried_step else 0
    if tried >= MAX_TRIES:
        accept(c, spike, f"it was so with {tried + 1} different batches, so it is accepted")
    elif newest is None or newest.step >= step:
        accept(c, spike, "there is no snapshot of an earlier step, so it is accepted")
    else:
        c.spikes = replace(c.spikes, pending=spike)
        _emit(c, spike, f"back to the snapshot of step {newest.step}, without batch {batch}", skipped=True)
    c.dirty = True


def accept(c: Cluster, spike: Spike, why: str) -> None:
    """Continue without undoing the spike."""
    c.spikes = replace(c.spikes, losses=(), pending=None, tries=0, tried_step=0)
    _emit(c, spike, why, skipped=False)


def _emit(c: Cluster, spike: Spike, what: str, *, skipped: bool) -> None:
    c.emit(
        "LossSpiked",
        f"{spike.describe()}: {what}",
        step=spike.step,
        loss=spike.loss,
        threshold=spike.threshold,
        batch=spike.batch,
        skipped=skipped,
    )


def is_judged(c: Cluster, step: int) -> bool:
    """Return whether a snapshot of this step may replace the newest one: no loss up to it is a spike."""
    if c.current_job.updates.on_spike != "skip":
        return True
    return c.spikes.pending is None and c.progress.published_step >= step
