"""The checks at the broker: what coordinators publish, and from which journal one may begin to lead.

A coordinator begins from the newest journal that ever was at the broker. Journals are replicated
asynchronously: the leader does not wait until a standby has one. So if the broker loses the newest journal
while the leader that wrote it is away, a standby begins from an older one. That is allowed only if nobody
who is connected has a newer one, and if the new leader was connected when the broker lost it or waited
``lost_record_timeout_s``. The wait is not required if the end of the newest journal was lost in the same
moment with its host's power, or never reached its writer's disk, which was full.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from ftd.faults.sim.coordinator import SimCoordinator
from ftd.faults.sim.invariants import Invariants
from ftd.faults.sim.journals import decode_outbox, decode_state
from ftd.faults.sim.network import COMMAND, EVENTS, JOURNAL, TOPICS, SimConnection, SimNetwork
from ftd.faults.sim.node import SimNode, decoded
from ftd.faults.sim.oracle import JournalView
from ftd.transport.wire.codec import decode_from_node, decode_to_node
from ftd.transport.wire.coordinator_messages import decode_copy
from ftd.transport.wire.public import EventMessage, decode_json
from statemachine.effects import EmitEvent
from statemachine.messages.values import NodeState

_NOTICE_S = 1.5
"""The longest time until others notice that a coordinator is connected."""
STATE_S = 2.0
"""Time within which a node that has connected, or sees another state than its own, publishes its state."""


class BrokerChecks:
    """The checks of each message that coordinators publish, once the broker has it, and of each start of a
    leader.
    """

    def __init__(
        self, network: SimNetwork, invariants: Invariants, coordinators: Sequence[SimCoordinator]
    ) -> None:
        self._network, self._invariants = network, invariants
        self._coordinators = {one.name: one for one in coordinators}
        self._journal: dict[str, Any] | None = None
        self._payload: bytes | None = None
        network.on_published = self._published
        for one in coordinators:
            one.on_lead = partial(self._check_lead, one)
            one.on_lead_again = partial(self._check_lead_again, one)

    @property
    def journal(self) -> dict[str, Any] | None:
        """The journal that the broker retains, as plain values."""
        payload = self._network.retained.get(JOURNAL)
        if payload is not self._payload:
            self._payload = payload
            self._journal = decode_state(decode_copy(payload).state) if payload else None
        return self._journal

    def _published(self, connection: SimConnection, topic: str, payload: bytes, note: Any) -> None:
        if connection.is_node:
            self._check_node(connection, topic, payload)
        else:
            self._coordinators[connection.host].check(lambda: self._look(connection, topic, payload, note))

    def _check_node(self, connection: SimConnection, topic: str, payload: bytes) -> None:
        oracle, name = self._invariants, connection.host
        if topic == connection.signal_topic:
            if name in oracle.fenced_incarnations:
                oracle.check_signal(name, decode_from_node(payload, name).incarnation)
        elif topic == EVENTS:
            oracle.check_details(decode_json(payload, EventMessage))

    def _look(self, connection: SimConnection, topic: str, payload: bytes, note: Any) -> None:
        oracle = self._invariants
        if topic == JOURNAL:
            if not payload:
                return
            copy = decode_copy(payload)
            oracle.led_last = connection.host
            if copy.position > oracle.replicated:
                oracle.replicated, oracle.replicated_by = copy.position, connection.host
            oracle.on_journal(note)
            oracle.published_events.on_journaled(decode_outbox(copy.state))
        elif topic == COMMAND:
            oracle.check_command(decoded(payload).command, self.journal, heard=self._has_heard(connection))
        elif topic == EVENTS:
            message = decode_json(payload, EventMessage)
            if oracle.published_events.is_new(message):
                self._event(self._coordinators[connection.host], message)
        elif (node := TOPICS.node_of(topic)) is not None:
            if topic == TOPICS.node_command(node):
                heard = self._has_heard(connection)
                oracle.check_command(decode_to_node(payload).command, self.journal, heard=heard)
            elif topic == TOPICS.node_state(node) and not payload:
                oracle.check_removal(self.journal, node)

    def _has_heard(self, connection: SimConnection) -> bool:
        """Return whether a coordinator has been connected long enough to have what nodes reported meanwhile."""
        return connection.since < self._invariants.world.now - _NOTICE_S

    def check_state(self, node: SimNode) -> None:
        """Check that the broker retains the own state of a node that has been connected for a while."""
        network, settled_at = self._network, self._invariants.world.now - STATE_S
        connection = network.connection_of(node.name)
        if connection is None or max(connection.since, node.serving_since) > settled_at:
            return
        if not node.up or node.frozen or node.agent.rejected or not network.reaches(node.name):
            return
        state = network.state_of(node.name)
        if state is None or state.incarnation != node.incarnation or state.state is NodeState.OFFLINE:
            self._invariants.violated(f"{node.name} is connected, but the broker retains {state}")

    def _event(self, of: SimCoordinator, message: EventMessage) -> None:
        event = EmitEvent(
            cause=message.cause,
            name=message.event,
            reason=message.reason,
            node=message.node,
            generation=message.generation,
            step=message.step,
            details=message.details,
        )
        self._invariants.check_event(event)
        if of.on_event is not None:
            of.on_event(event)

    def _check_lead(self, me: SimCoordinator, position: tuple[int, int], view: JournalView) -> None:
        """Check that ``me`` may begin to lead from the journal of this position, whose content is ``view``."""
        oracle, network = self._invariants, self._network
        what = f"{me.name} begins to lead from the journal {position}"
        self._check_snapshot_age(me, what)
        if me.unreadable is not None and me.unreadable.position > position and not me.reads(me.unreadable):
            oracle.violated(f"{what}, but saw {me.unreadable.position}, a journal that it cannot read")
        if position >= oracle.replicated:
            if view.lineage > oracle.lineage:
                # A rollback that is on its disk only: the broker was out of reach.
                oracle.on_journal(view)
            return
        what += f", and {oracle.replicated} was at the broker"
        retained = network.retained.get(JOURNAL)
        if retained is not None and decode_copy(retained).position > position:
            oracle.violated(f"{what}, which still has {decode_copy(retained).position}")
        for other in self._coordinators.values():
            since = other.following_since
            there = since is not None and since < oracle.world.now - _NOTICE_S and not other.frozen
            there = there and network.reaches(other.name)
            if there and other is not me and not other.ineligible and other.position > position:
                oracle.violated(f"{what}, but {other.name}, which is connected, has {other.position}")
        waited_s = oracle.world.now - (me.following_since or oracle.world.now)
        # The newest knowledge was lost with its host's power, so there is nobody to wait for.
        lost_for_good = any(other.disk.knew >= oracle.replicated for other in self._coordinators.values())
        # What a leader could not write to its own disk was at the broker, and nothing followed from it.
        lost_for_good |= oracle.replicated_by == me.name
        # The others could not write it to their disks either.
        lost_for_good |= all(other.position <= position for other in self._coordinators.values())
        # A coordinator that has never met another one knows of nobody to wait for, even if it led alone before.
        is_alone = me.process is not None and not me.process.journal.shared
        if (
            not lost_for_good
            and not is_alone
            and not network.restored_stale
            and me.started_at > network.lost_state_at
            and waited_s < oracle.world.timing.lost_record_timeout_s
        ):
            oracle.violated(f"{what}; it was not connected then and waited only {waited_s:.1f} s")
        self._forget_lost(view)
        # What it decided after it had been deposed reached nobody, and is published now.
        oracle.announced -= me.decided_generations()

    def _check_lead_again(self, me: SimCoordinator, view: JournalView) -> None:
        """Check that ``me``, whose session was lost, may lead again with the state that it had.

        No other coordinator led in between, unless the broker came back with what it had retained before that:
        then nothing there shows it. One that wrote nothing newer decided nothing.
        """
        oracle = self._invariants
        other, oracle.led_last = oracle.led_last, me.name
        if other == me.name:
            return
        if not self._network.restored_stale and self._coordinators[other].position > me.position:
            oracle.violated(f"{me.name} leads again with its state, and {other} led in between")
        self._forget_lost(view)
        # Its generations are older than those of the other one, until a node reports one of them.
        oracle.newest_resume = min(oracle.newest_resume, view.generation)

    def _check_snapshot_age(self, me: SimCoordinator, what: str) -> None:
        """Check that it computes the snapshot's age with its own host's clock, whichever host wrote the
        journal.
        """
        oracle = self._invariants
        snapshot = me.machine.public_state()["snapshot"]
        if snapshot is None:
            return
        age_s = me.clock.monotonic_s() - snapshot["at"]
        if not -1e-3 <= age_s <= oracle.world.now:
            oracle.violated(f"{what}, and takes the newest snapshot to be {age_s:.0f} s old")

    def _forget_lost(self, view: JournalView) -> None:
        """Forget what was lost with the newest journals; nodes report what they know of it."""
        oracle = self._invariants
        oracle.known_step = min(oracle.known_step, view.committed_step)
        oracle.newest, oracle.lineage, oracle.groups.trained = view.snapshot, view.lineage, None
        oracle.writing = view.writing
        oracle.leaving.clear()  # The planner is asked again which nodes may leave.
        oracle.published_events.on_journals_lost()
        # Published steps may be published again, as the leader learns of them again.
        oracle.next_to_publish = 0
        oracle.journal_tail_lost = True
