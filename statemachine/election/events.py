"""Events that the leader publishes about the election."""

from statemachine.effects import EmitEvent
from statemachine.election.leadership import Peer, TermClaim
from statemachine.timing import Timing


def takeover_events(cause: str, claimed: TermClaim, at: float, timing: Timing) -> list[EmitEvent]:
    """Return the loss of the previous leader and the election of the next; nothing if both have the same name."""
    leader, before, how = claimed.leader, claimed.before, claimed.how
    if before is None or before.name == leader.name:
        return []
    words = {
        "last_will": "the broker lost its session",
        "goodbye": "it was stopped",
        "silence": f"it was silent for {timing.leader_silence_s:g} s",
    }
    return [
        EmitEvent(
            cause=cause,
            name="LeaderLost",
            reason=f"{before.name} led the cluster: {words[how]}",
            details={
                "leader": before.name,
                "term": before.term,
                "how": how,
                "detected_at": claimed.noticed_at,
            },
        ),
        EmitEvent(
            cause=cause,
            name="LeaderElected",
            reason=f"{leader.name} leads the cluster in place of {before.name}",
            details={"leader": leader.name, "term": leader.term, "took_s": at - claimed.noticed_at},
        ),
    ]


def standby_ineligible(cause: str, peer: Peer) -> EmitEvent:
    """Return the event that a peer looks like a standby but will not take over."""
    return EmitEvent(
        cause=cause,
        name="StandbyIneligible",
        reason=f"{peer.name} will not take over: {peer.ineligible}",
        details={"coordinator": peer.name, "why": peer.ineligible},
    )


def takeover_rejected(cause: str, me: Peer) -> EmitEvent:
    """Return the event that no coordinator leads, and that none will until an eligible one appears."""
    return EmitEvent(
        cause=cause,
        name="TakeoverRejected",
        reason=f"no coordinator leads, and {me.name} must not: {me.ineligible}",
        details={"coordinator": me.name, "why": me.ineligible},
    )
