"""From what a coordinator may begin to lead: the newest journal that ever was at the broker.

It is replicated asynchronously: the leader does not wait until a standby has it. So where the broker forgets
it, and the leader that wrote it is away, a standby begins from less. That is all that is let pass: nobody
who is there has more; and who begins was there when the broker lost it, or waited ``lost_record_timeout_s``, unless the
end of the newest was lost in the same moment, with its host's power, or was never on its writer's disk, which was full.
"""

from typing import TYPE_CHECKING

from ftd.faults.sim.losses import Written
from ftd.faults.sim.network import JOURNAL, Network
from ftd.transport.wire.coordinators import decode_copy

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
    if me.unreadable is not None and me.unreadable.position > position and not me.reads(me.unreadable):
        truth.broken(f"{what}, and saw {me.unreadable.position}, a journal that it cannot read")
    if position >= truth.replicated:
        if view.lineage > truth.lineage:  # A rollback that is on its disk alone: the broker was out of reach.
            truth.persisted(view)
        return
    what += f", and {truth.replicated} was at the broker"
    retained = network.retained.get(JOURNAL)
    if retained is not None and decode_copy(retained).position > position:
        truth.broken(f"{what}, which still has {decode_copy(retained).position}")
    for other in truth.coordinators:
        since = other.following_since
        there = since is not None and since < truth.world.now - _NEWS_S and not other.frozen
        there = there and network.reaches(other.name)
        if there and other is not me and not other.ineligible and other.position > position:
            truth.broken(f"{what}, and {other.name}, which is there, has {other.position}")
    waited_s = truth.world.now - (me.following_since or truth.world.now)
    # What was known last went with its host's power: there is nobody to wait for.
    gone = any(other.disk.knew >= truth.replicated for other in truth.coordinators)
    # What a leader could not write to its own disk was at the broker, and nothing followed from it.
    gone |= truth.replicated_by == me.name
    if (
        not gone
        and not network.aged
        and me.started_at > network.forgot_at
        and waited_s < truth.world.timing.lost_record_timeout_s
    ):
        truth.broken(f"{what}, without having been there then; it waited {waited_s:.1f} s")
    _forgets(truth, view)
    # What it decided when it had been deposed already reached nobody, and is published now.
    truth.announced -= me.decided_generations()


def _reads_times(truth: "Invariants", me: "SimCoordinator", what: str) -> None:
    """On its own host's clock, whoever's they were."""
    snapshot = me.machine.public_state()["snapshot"]
    if snapshot is None:
        return
    age_s = me.clock.monotonic_s() - snapshot["at"]
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
