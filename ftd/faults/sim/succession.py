"""From what a coordinator may begin to lead: the newest journal that ever was at the broker.

It is replicated asynchronously: the leader does not wait until a standby has it. So where the broker forgets
it, and the leader that wrote it is away, a standby begins from less. That is all that is let pass: nobody
who is there has more; and who begins was there when the broker lost it, or waited ``lost_record_timeout_s``, unless the
end of the newest was lost in the same moment, with its host's power.
"""

from typing import TYPE_CHECKING

from ftd.faults.sim.losses import Written
from ftd.faults.sim.network import Network
from statemachine.cluster.durable.outbox import OUTBOX

if TYPE_CHECKING:
    from ftd.faults.sim.coordinator import SimCoordinator
    from ftd.faults.sim.invariants import Invariants

_NEWS_S = 1.5
"""That somebody is there takes so long to be heard, at most."""


def begins(
    truth: "Invariants", network: Network, me: "SimCoordinator", position: tuple[int, int], view: Written
) -> None:
    """``me`` begins to lead from the journal of this position, which says what ``view`` says."""
    what = f"{me.name} begins to lead from the journal {position}"
    _reads_times(truth, me, what)
    unread = me.unread
    if unread is not None and unread.position > position and not me.disk.reads(unread):
        truth.broken(f"{what}, and saw {unread.position}, a journal that it cannot read")
    if position >= truth.replicated:
        if view.lineage > truth.lineage:  # A rollback that is on its disk alone: the broker was out of reach.
            truth.persisted(view)
        return
    what += f", and {truth.replicated} was at the broker"
    if network.retained.journal is not None and network.retained.journal.position > position:
        truth.broken(f"{what}, which still has {network.retained.journal.position}")
    for name, watch in network.watches.items():
        other, session = watch.coordinator, network.sessions[name]
        there = watch.alive and session.open and not session.cut and not other.frozen
        there = there and watch.since < truth.world.now - _NEWS_S
        if there and other is not me and not other.disk.ineligible and other.disk.position > position:
            truth.broken(f"{what}, and {name}, which is there, has {other.disk.position}")
    waited_s = truth.world.now - me.seat.since
    # What was known last went with its host's power: there is nobody to wait for.
    gone = any(watch.coordinator.disk.knew >= truth.replicated for watch in network.watches.values())
    if (
        not gone
        and not network.aged
        and me.seat.made_at > network.forgot_at
        and waited_s < truth.world.timing.lost_record_timeout_s
    ):
        truth.broken(f"{what}, without having been there then; it waited {waited_s:.1f} s")
    _forgets(truth, view)
    # What it decided when it had been deposed already reached nobody, and is told now.
    truth.announced -= {event["generation"] for _, event in (me.disk.journal or {}).get(OUTBOX, ())}


def _reads_times(truth: "Invariants", me: "SimCoordinator", what: str) -> None:
    """On its own host's clock, whoever's they were."""
    snapshot = me.machine.public_state()["snapshot"]
    if snapshot is None:
        return
    age_s = truth.world.now + me.disk.clock_s - snapshot["at"]
    if not -1e-3 <= age_s <= truth.world.now:
        truth.broken(f"{what}, and takes the newest snapshot to be {age_s:.0f} s old")


def _forgets(truth: "Invariants", view: Written) -> None:
    """What is lost with the newest journals: what nodes know of it they say."""
    truth.known = min(truth.known, view.committed_step)
    truth.newest, truth.lineage, truth.trained = view.snapshot, view.lineage, None
    truth.place.writing = view.writing
    truth.telling.lose()
    truth.next_to_tell = 0  # What was told may be told again, as it is found out anew.
    truth.unforced = True
