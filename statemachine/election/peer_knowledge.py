"""Knowledge of a coordinator about its peers, for the case that the broker loses the leader's record.

Then only the coordinators themselves can tell who led last and who has the newest state. How long a
coordinator leaves it to the others follows from whom it met, and from the journals that they said they
hold.
"""

from collections.abc import Collection, Iterable

from statemachine.election.leadership import Leader, Peer
from statemachine.timing import Timing

FORGOTTEN_TERMS = 100
"""Terms that are left out: more than there are leader sessions between two moments at which a broker saves
what it retains.
"""


class PeerKnowledge:
    """Knowledge of one coordinator about its peers."""

    def __init__(self, timing: Timing, *, shared: bool, names: Collection[str] = ()) -> None:
        """Create the knowledge of a coordinator that has met no peer in this process.

        :param shared: this coordinator has ever had peers.
        :param names: names of peers that it ever met.
        """
        self._timing = timing
        self._shared = shared
        self._names = set(names)
        self._new = not shared
        """Whether no coordinator that was met has ever known a cluster: it begins with whoever leads first."""
        self._past_peers: set[str] = set()
        """Names of peers that were present since this coordinator led: one of them may have led meanwhile."""
        self._furthest, self._furthest_at = (0, 0), 0.0
        """The newest position that a peer announced, and the time of that."""
        self.seen_leading = False
        """Whether the last leader was seen to lead in the current session with the broker."""

    def note_peer(self, me: Peer, peer: Peer, at: float, *, present_before: bool) -> None:
        """Note a peer's announcement.

        :param present_before: the peer was present before.
        """
        self.note_position(peer.position)
        self._new &= not peer.ineligible
        if peer.name == me.name:  # This coordinator itself, or what is left of an earlier process of it.
            return
        self._shared = True
        self._names.add(peer.name)
        if not present_before and peer.position >= self._furthest:
            self._furthest, self._furthest_at = peer.position, at

    def note_position(self, position: tuple[int, int]) -> None:
        """Note the position of a journal that this coordinator or another one holds."""
        self._new &= position == (0, 0)

    def note_departed(self, me: Peer, name: str) -> None:
        """Note what is left at the broker of a coordinator that was not met: it may have known a cluster."""
        if name not in ("", me.name):
            self._shared, self._new = True, False
            self._names.add(name)

    def note_session_lost(self, me: Peer, peers: Iterable[Peer]) -> None:
        """Note that the follower session is lost; ``peers`` were present."""
        self.seen_leading = False
        self._past_peers |= {peer.name for peer in peers} - {me.name}

    def note_leading(self) -> None:
        """Note that this coordinator leads: from now on no other has led."""
        self._past_peers.clear()
        self.seen_leading = True

    def next_term(self, known: int) -> int:
        """Return the term to claim. A broker that is restored from an older save may have lost some terms, and
        what two leaders wrote under one term could not be told apart.
        """
        return known + (1 if self.seen_leading or not known or not self._shared else FORGOTTEN_TERMS)

    def may_have_led(self, me: Peer, others: list[Peer]) -> bool:
        """Return whether a peer may have led since this coordinator did.

        This is so if a peer that was present since then is absent, or if one knows more. It is also so if a
        peer may have appeared while this coordinator was cut off, and no earlier peer can rule it out.
        """
        if self._furthest > me.position or self._absent(others):
            return True
        return self._shared and not self._has_witness(others)

    def _absent(self, others: Iterable[Peer]) -> set[str]:
        """Return the names of peers that were present since this coordinator led and are not present now."""
        return self._past_peers - {peer.name for peer in others}

    def _has_witness(self, others: Iterable[Peer]) -> bool:
        """Return whether a peer that was present since this coordinator led would know if another one had led. An
        ineligible one would not, because it stores no journal.
        """
        return any(peer.name in self._past_peers and not peer.ineligible for peer in others)

    def wait_until(
        self, me: Peer, others: list[Peer], leader: Leader | None, began_at: float, *, led: bool
    ) -> float:
        """Return the time until which this coordinator leaves it to others to lead, if the broker has no
        record.

        :param others: peers that are present.
        :param leader: the newest leader that was ever seen.
        :param began_at: time at which its follower session was opened.
        :param led: it led, and knows of no leader since.
        """
        if (self._new and leader is None) or (not self._shared and (led or leader is None)):
            return 0.0
        timing = self._timing
        if self._furthest > me.position:
            ahead = any(peer.position > me.position and not peer.ineligible for peer in others)
            wait_s = timing.lost_record_timeout_s + (timing.leader_silence_s if ahead else 0.0)
            return max(began_at, self._furthest_at) + wait_s
        kept_up = leader is not None and me.position[0] >= leader.term
        # Nobody who is present knows more. An ineligible peer has seen another one, which may be absent.
        present = {peer.name for peer in others if not peer.ineligible}
        all_present = bool(self._names) and self._names <= present
        if not (kept_up or (all_present and leader is None) or led):
            wait_s = timing.lost_record_timeout_s
        elif not led:
            wait_s = timing.leader_silence_s
        elif self._absent(others):
            wait_s = timing.lost_record_timeout_s
        else:
            wait_s = 0.0 if self._has_witness(others) else timing.leader_silence_s / 2
        return began_at + wait_s


def is_outdated(newest: tuple[int, int], others: Iterable[Peer]) -> bool:
    """Return whether a present, eligible peer holds a newer journal than ``newest``.

    The broker's journal is then a leftover from an older save, and that peer takes its turn soon.
    """
    return any(peer.position > newest and not peer.ineligible for peer in others)
