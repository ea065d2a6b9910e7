"""Tests of intervals of persistent checkpoints that follow from measurements and from failures."""

import json
from typing import Any

import pytest

from planner.state_loss import HolderGroup
from statemachine.cluster.machine import ClusterMachine
from statemachine.cluster.snapshots.checkpoint_intervals import holder_groups
from statemachine.effects import EmitEvent
from statemachine.events import CheckpointCommitted
from statemachine.messages.cluster import Stepped
from statemachine.timing import Timing
from tests.helpers.transcripts import committed
from tests.helpers.writing import Writing


class Auto(Writing):
    """A job of many steps whose interval of checkpoints is chosen; steps take 0.1 s."""

    def __init__(self) -> None:
        super().__init__()
        self.train(100_000, every_steps=1, auto_interval=True)

    def checkpoint(self, step: int, *, write_s: float, slower_s: float = 0.0) -> list[EmitEvent]:
        """Train to a snapshot of this step and write it; return the events about the interval."""
        for number in range(step - 4, step):
            self.say("node-0", Stepped(generation=1, steps=(committed(number),), step_s=0.1))
        self.snapshot(step)
        orders = self.orders()
        assert orders, "a checkpoint is due"
        for number in range(step + 1, step + 5):
            self.wait(write_s / 4)
            self.say("node-0", Stepped(generation=1, steps=(committed(number),), step_s=0.1 + slower_s))
        for node, order in orders.items():
            self.wrote(order, node)
        self.feed(
            CheckpointCommitted,
            attempt=orders["node-0"].attempt,
            step=orders["node-0"].record.step,
            pruned=(),
        )
        return self.events("CheckpointIntervalChosen")

    @property
    def every(self) -> int:
        state: dict[str, Any] = self.machine.public_state()["checkpoint"]
        assert state["auto_interval"]
        every: int = state["every_steps"]
        return every


def test_the_first_snapshot_is_written_and_gives_the_interval() -> None:
    s = Auto()
    (chosen,) = s.checkpoint(10, write_s=2.0, slower_s=0.1)
    # A write of 2 s in which steps take twice as long costs 1 s of training. A failure of one of four nodes is
    # expected every 22,000 s, and one in ten loses the state: √(2 · 1 · 220,000) s.
    assert chosen.details["cost_s"] == pytest.approx(1.0)
    assert chosen.details["write_s"] == pytest.approx(2.0)
    assert chosen.details["failure_horizon_s"] == 22_000.0
    assert chosen.details["loss_horizon_s"] == pytest.approx(220_000.0, rel=0.01)
    assert s.every == chosen.details["every_steps"] == pytest.approx((2 * 220_000) ** 0.5 / 0.1, rel=0.01)
    assert chosen.reason.startswith(
        "a checkpoint costs 1 s of training and takes 2 s to write, and memory is expected to lose the state "
        "every 2.5"
    )


def test_measurements_that_differ_a_little_do_not_change_the_interval() -> None:
    s = Auto()
    s.checkpoint(10, write_s=2.0, slower_s=0.1)
    every = s.every
    assert not s.checkpoint(10 + every, write_s=2.2, slower_s=0.08)
    assert s.every == every


def test_writes_that_do_not_slow_training_down_leave_the_storage_time() -> None:
    s = Auto()
    s.checkpoint(10, write_s=2.0)
    assert s.every == 200


def test_the_interval_survives_a_restart() -> None:
    s = Auto()
    s.checkpoint(10, write_s=2.0)
    journal = json.loads(json.dumps(s.machine.durable_state()))
    s.machine, _ = ClusterMachine.restore(Timing(), journal, s.now, "restart")
    assert s.every == 200


def test_layers_withstand_the_loss_of_all_owners_but_one() -> None:
    s = Auto()
    resumption = s.machine._c.resumption
    assert resumption is not None
    plan, one, none = resumption.plan, HolderGroup(nodes=2, tolerated=1), HolderGroup(nodes=2, tolerated=0)
    assert holder_groups(plan, {}, "aec", zero1=False) == [one, one]
    assert holder_groups(plan, {}, "none", zero1=True) == [none, none]
    assert holder_groups(plan, {}, "aor", zero1=True) == [one, one]
