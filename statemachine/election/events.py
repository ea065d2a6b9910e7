"""What is told of who leads, as events."""

from statemachine.effects import EmitEvent
from statemachine.election.leadership import Peer, TermClaim
from statemachine.timing import Timing


def takeover_events(cause: str, claimed: TermClaim, at: float, timing: Timing) -> list[EmitEvent]:
    """The loss of who led before, and who leads instead; nothing where that is the same host's."""
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
    """Who looks like a standby and is none."""
    return EmitEvent(
        cause=cause,
        name="StandbyIneligible",
        reason=f"{peer.name} will not take over: {peer.ineligible}",
        details={"coordinator": peer.name, "why": peer.ineligible},
    )


def takeover_rejected(cause: str, me: Peer) -> EmitEvent:
    """Nobody leads, and nobody will until somebody comes who may."""
    return EmitEvent(
        cause=cause,
        name="TakeoverRejected",
        reason=f"nobody leads, and {me.name} must not: {me.ineligible}",
        details={"coordinator": me.name, "why": me.ineligible},
    )
