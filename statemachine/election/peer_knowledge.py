"""What a coordinator knows of the others, for the day that the broker forgets who leads.

Then nobody but the coordinators themselves can say who led last and who has the newest state: how long one of
them leaves it to the others follows from whom it met, and from what those said that they keep.
"""

from collections.abc import Iterable

from statemachine.election.leadership import Leader, Peer
from statemachine.timing import Timing

FORGOTTEN_TERMS = 100
"""Terms that are left out: more than leader sessions between two moments in which a broker saves what it retains."""


class PeerKnowledge:
    """Of one coordinator."""

    def __init__(self, timing: Timing, *, shared: bool) -> None:
        """:param shared: this coordinator has had others beside it, ever."""
        self._timing = timing
        self._shared = shared
        self._new = not shared
        """Nobody that was met has ever known of a cluster: it begins with whoever leads first."""
        self._past_peers: set[str] = set()
        """Others that were there since this one led: one of them may have led meanwhile."""
        self._furthest, self._furthest_at = (0, 0), 0.0
        """The newest state that another one said it keeps, and when it was met last."""
        self.seen_leading = False
        """Who led last was seen to lead, in the present session with the broker."""

    def note_peer(self, me: Peer, peer: Peer, at: float, *, again: bool) -> None:
        """:param again: it was there already."""
        self._new &= peer.position == (0, 0) and not peer.ineligible
        if peer.name == me.name:  # It is this one; or what is left of it as it was before.
            return
        self._shared = True
        if not again and peer.position >= self._furthest:
            self._furthest, self._furthest_at = peer.position, at

    def note_session_lost(self, me: Peer, peers: Iterable[Peer]) -> None:
        """The watch breaks; these were there."""
        self.seen_leading = False
        self._past_peers |= {peer.name for peer in peers} - {me.name}

    def note_leading(self) -> None:
        """Nobody else has, from here on."""
        self._past_peers.clear()
        self.seen_leading = True

    def next_term(self, known: int) -> int:
        """The one to claim. A broker that is back with what it once saved may have forgotten some: what two
        wrote under one could not be told apart."""
        return known + (1 if self.seen_leading or not known or not self._shared else FORGOTTEN_TERMS)

    def may_have_led(self, me: Peer, others: list[Peer]) -> bool:
        """Since this one did: one that was beside it and is not there, or one that knows more; or one that
        came while this one was cut off, where nobody who was beside it can say that none did."""
        if self._furthest > me.position:
            return True
        return bool(self._past_peers - {peer.name for peer in others}) if self._past_peers else self._shared

    def wait_until(
        self, me: Peer, others: list[Peer], leader: Leader | None, began_at: float, *, led: bool
    ) -> float:
        """Until when this one leaves it to others to lead, where the broker has no record.

        :param others: who is there. :param leader: the newest that was ever seen.
        :param began_at: since when it watches. :param led: it led, and knows of nobody since.
        """
        if (self._new and leader is None) or (not self._shared and (led or leader is None)):
            return 0.0
        timing = self._timing
        if self._furthest > me.position:
            ahead = any(peer.position > me.position and not peer.ineligible for peer in others)
            wait_s = timing.lost_record_timeout_s + (timing.leader_silence_s if ahead else 0.0)
            return max(began_at, self._furthest_at) + wait_s
        kept_up = leader is not None and me.position[0] >= leader.term
        lately = kept_up or any(peer.position < me.position for peer in others)
        if not (lately or led):
            wait_s = timing.lost_record_timeout_s
        elif not led:
            wait_s = timing.leader_silence_s
        elif not self._past_peers:
            wait_s = timing.leader_silence_s / 2
        else:
            wait_s = (
                timing.lost_record_timeout_s if self._past_peers - {peer.name for peer in others} else 0.0
            )
        return began_at + wait_s


def is_outdated(newest: tuple[int, int], others: Iterable[Peer]) -> bool:
    """What is at the broker is from before, as it comes back with what it once saved: somebody who is there
    kept a newer journal than this, and takes his turn soon."""
    return any(peer.position > newest and not peer.ineligible for peer in others)
