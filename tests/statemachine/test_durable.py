"""Tests of the durable state: it is complete, whatever parts were reused from the last write."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statemachine.cluster.durable.durable import SCHEMA, InvalidJournalError, columns, read
from statemachine.cluster.durable.records import rows
from statemachine.cluster.machine import ClusterMachine
from statemachine.cluster.node import NodeMachine
from statemachine.events import NodeVanished
from statemachine.messages.values import NodeFacts
from statemachine.timing import Timing
from tests.helpers.snapshot_machine import HELD, KEY, Snapshots
from tests.helpers.transcripts import Coordination, report


def plain(state: Any) -> dict[str, Any]:
    """Return the state as it is read from a journal."""
    decoded: dict[str, Any] = json.loads(msgspec.json.encode(state))
    return decoded


class Checked(Snapshots):
    """A script which checks that the machine stores after each step what one that reuses nothing would store."""

    def feed(self, kind: Any, **values: Any) -> list[Any]:
        effects = super().feed(kind, **values)
        kept = plain(self.machine.durable_parts())
        self.machine._c.cached_parts.clear()
        assert plain(self.machine.durable_parts()) == kept
        self.machine.durable_parts()
        return effects


def test_reused_parts_equal_newly_made_parts() -> None:
    s = Checked()
    s.complete_snapshot()
    s.both_hosts_die()
    s.hello("node-3", 203, snapshots=(KEY,))
    s.survivors(3)
    s.plan_or_not()
    s.check()
    s.plan()
    for name in ("node-0", "node-2"):
        s.resumed(name, 3)
    s.feed(NodeVanished, node="node-2", incarnation=102)
    s.quiesced("node-0", 4, report(3, held=HELD["node-0"], lineage=3))


def test_a_restored_machine_writes_the_state_that_it_read() -> None:
    s = Snapshots()
    s.complete_snapshot()
    s.both_hosts_die()
    s.hello("node-3", 203, snapshots=(KEY,))
    s.survivors(3)
    s.plan_or_not()
    s.check()
    s.plan()
    machine, _ = ClusterMachine.restore(Timing(), plain(s.machine.durable_state()), 1e9, "restart")
    written = plain(machine.durable_state())
    assert written["schema"] == SCHEMA and written["lineage"] == 3
    other, _ = ClusterMachine.restore(Timing(), written, 1e9, "restart")
    assert plain(other.durable_state()) == written


def test_parts_that_are_as_they_were_are_the_same_objects() -> None:
    s = Coordination()
    s.running()
    before = s.machine.durable_parts()
    s.stepped("node-0", 1, 2)
    after = s.machine.durable_parts()
    assert after["known"] != before["known"]
    for name in (
        "job",
        "profiled",
        "hosts",
        "held",
        "plan",
        "pipelines",
        "resumed_ready",
        "resumed_ready_parts",
    ):
        assert after[name] is before[name], name
    s.feed(NodeVanished, node="node-3", incarnation=103)
    assert s.machine.durable_parts()["before"] is after["pipelines"]
    s.hello("node-3", 203)
    assert s.machine.durable_parts()["hosts"]["incarnation"] == [100, 101, 102, 203]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("hosts", None),
        ("hosts", {"name": ["node-0"], "incarnation": [100], "facts": {}}),
        ("hosts", {"name": [["node-0"]] * 4, "incarnation": [100] * 4, "facts": {}}),
        ("nodes", {}),
        ("nodes", {"state": ["HEALTHY"] * 4}),
        ("nodes", {"state": ["HEALTHY"] * 4, "prepared": [True]}),
        ("held", [[]]),
        ("held", [7] * 4),
        ("recovery", {}),
        ("attempt", {}),
        ("pipelines", [7]),
        ("plan", {}),
    ],
)
def test_columns_that_do_not_fit_are_rejected(name: str, wrong: Any) -> None:
    s = Coordination()
    s.running()
    with pytest.raises(InvalidJournalError, match="cannot be read"):
        read(Timing(), s.machine.durable_state() | {name: wrong}, 0.0)


@given(st.lists(st.tuples(st.text(), st.integers())))
def test_columns_turn_back_into_rows(values: list[tuple[str, int]]) -> None:
    facts = [NodeFacts(devices=1, host=host, rendezvous_port=port) for host, port in values]
    nodes = [NodeMachine(name=one.host, incarnation=one.rendezvous_port, facts=one) for one in facts]
    table = columns(nodes, ("name", "incarnation"))
    assert rows(table) == [{"name": host, "incarnation": port} for host, port in values]
