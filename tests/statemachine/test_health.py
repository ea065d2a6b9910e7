"""Tests of the decisions about health checks: who is set aside, who is tested again, and who takes part."""

from typing import Any

import msgspec
import pytest

from statemachine.cluster.machine import ClusterMachine
from statemachine.effects import AnswerRequest, EmitEvent
from statemachine.events import BrokerConnected, ReadmitRequested
from statemachine.hardware import HardwareLimits, HealthLimits
from statemachine.messages.cluster import (
    Acknowledgement,
    CheckHealth,
    Fence,
    HealthChecked,
    Heartbeat,
    RequestHello,
)
from statemachine.messages.common import Prepared
from statemachine.messages.values import DeviceHealth, HealthReport, LinkHealth, NodeActivity
from statemachine.timing import Timing
from tests.helpers.cluster_machine import restarted
from tests.helpers.transcripts import Coordination, facts, health_report

OTHERS = ("node-0", "node-1", "node-2")
TESTED = msgspec.structs.replace(facts(), checks_health=True)


def devices(number: int, *found: dict[str, Any]) -> HealthReport:
    """Return the result of a check of a node with several devices."""
    return HealthReport(
        number=number, devices=tuple(DeviceHealth(device=index, **one) for index, one in enumerate(found))
    )


class Checked(Coordination):
    """A job that three nodes train, which have passed their checks, and a script that keeps all events."""

    def __init__(self, known: int = 3, **limits: Any) -> None:
        limits = {"every_s": 600.0, **limits}
        super().__init__(ClusterMachine(Timing(), HardwareLimits(health=HealthLimits(**limits))))
        self.seen: list[EmitEvent] = []
        self.ordered: list[str] = []
        self.running(3, steps=1000)
        for name in OTHERS[:known]:
            self.say(name, HealthChecked(report=health_report(1, 100.0)))

    def took(self, effects: list[Any]) -> list[Any]:
        super().took(effects)
        self.seen += self.all(EmitEvent)
        self.ordered += [one.node for one in self.commands(CheckHealth)]
        return effects

    def join(self, name: str, report: HealthReport | None, incarnation: int = 103, **values: Any) -> None:
        """Let a node appear that tests its devices, and build the job."""
        self.hello(name, incarnation, facts=msgspec.structs.replace(TESTED, **values))
        if report is not None:
            self.say(name, HealthChecked(report=report))
        self.say(name, Prepared(job_id="job-1", profile=None))

    def check(self, name: str, report: HealthReport) -> None:
        self.fire("tick", Timing().heartbeat_s)
        self.say(name, HealthChecked(report=report))

    def ready(self, name: str) -> bool:
        ready: bool = self.machine._c.nodes[name].ready
        return ready

    def aside(self, name: str) -> str:
        quarantine = self.machine.public_state()["nodes"][name]["quarantine"]
        return "" if quarantine is None else str(quarantine["cause"])

    def named(self, name: str) -> list[EmitEvent]:
        return [event for event in self.seen if event.name == name]


def test_a_node_takes_part_only_when_its_check_has_ended() -> None:
    s = Checked()
    s.join("node-3", None)
    assert not s.ready("node-3") and "join" not in s.due
    s.say("node-3", HealthChecked(report=health_report(1)))
    assert s.ready("node-3") and "join" in s.due


def test_a_node_that_makes_no_checks_takes_part_and_so_do_all_if_the_coordinator_wants_none() -> None:
    s = Checked()
    s.join("node-3", None, checks_health=False)
    assert s.ready("node-3")
    off = Checked(enabled=False)
    off.join("node-3", None)
    off.say("node-3", HealthChecked(report=health_report(1, wrong="a product is wrong")))
    off.check("node-3", health_report(2, 1.0))
    assert off.ready("node-3") and not off.ordered


@pytest.mark.parametrize("in_hello", [False, True])
def test_a_wrong_product_sets_a_newcomer_aside_at_once_without_a_fence(in_hello: bool) -> None:
    s = Checked()
    report = devices(1, {"kind": "H100"}, {"kind": "H100", "wrong": "a product is wrong"})
    if in_hello:
        s.hello("node-3", 103, facts=TESTED, health=report)
    else:
        s.hello("node-3", 103, facts=TESTED)
        s.say("node-3", HealthChecked(report=report))
    assert s.aside("node-3") == "wrong_device" and not s.commands(Fence)
    (event,) = s.named("NodeQuarantined")
    assert [one["detail"] for one in event.details["evidence"]] == ["device 1: a product is wrong"]
    assert event.details["readmit"] == "ftd readmit node-3"
    assert s.machine.public_state()["nodes"]["node-3"]["health"]["problem"] == "device 1: a product is wrong"


def test_a_wrong_product_of_a_node_that_trains_ends_its_incarnation() -> None:
    s = Checked()
    s.say("node-2", HealthChecked(report=health_report(2, wrong="a product is wrong")))
    assert s.aside("node-2") == "wrong_device"
    assert [one.node for one in s.commands(Fence)] == ["node-2"]
    assert [one.name for one in s.all(EmitEvent) if one.name == "GenerationStarted"]


@pytest.mark.parametrize(
    ("first", "second", "cause"),
    [
        ({"compute_gflops": 49.0}, {"compute_gflops": 49.0}, "slow_device"),
        ({"compute_gflops": 49.0}, {"compute_gflops": 51.0}, ""),
        ({"compute_gflops": 51.0}, None, ""),
        ({"compute_gflops": 49.0, "kind": "A100"}, None, ""),
        ({"compute_gflops": 0.0}, None, ""),
        ({"failed": "its test did not end"}, {"compute_gflops": 10.0}, "slow_device"),
        ({"failed": "its test did not end"}, {"compute_gflops": 100.0}, ""),
        ({"compute_gflops": 10.0}, {"wrong": "a product is wrong"}, "wrong_device"),
    ],
)
def test_a_slow_device_is_tested_again_and_set_aside_if_it_is_slow_again(
    first: dict[str, Any], second: dict[str, Any] | None, cause: str
) -> None:
    s = Checked()
    s.join("node-3", devices(1, {"kind": "H100", **first}))
    assert s.ready("node-3") == (second is None)
    s.fire("tick", 0.25)
    assert s.ordered == ([] if second is None else ["node-3"])
    if second is not None:
        s.say("node-3", HealthChecked(report=devices(2, {"kind": "H100", **second})))
    assert s.aside("node-3") == cause and s.ready("node-3") == (not cause)
    if cause == "slow_device":
        assert len(s.named("NodeQuarantined")[0].details["evidence"]) == 2


def test_memory_and_each_device_of_a_node_are_compared() -> None:
    s = Checked(known=0)
    sound = {"kind": "H100", "compute_gflops": 100.0, "memory_gb_s": 1000.0}
    for name in OTHERS:
        s.say(name, HealthChecked(report=devices(1, sound, sound)))
    slow = devices(1, sound, {**sound, "memory_gb_s": 400.0})
    s.join("node-3", slow)
    s.check("node-3", msgspec.structs.replace(slow, number=2))
    assert s.aside("node-3") == "slow_device"
    assert "device 1 (H100): copies in memory at 400 GB/s, and the other nodes at 1000" in (
        s.named("NodeQuarantined")[0].reason
    )


def test_nobody_is_slow_before_enough_others_are_known_and_then_a_result_is_compared_at_the_next_tick() -> (
    None
):
    s = Checked(known=2)
    s.join("node-3", health_report(1, 10.0))
    s.fire("tick", 0.25)
    assert s.ready("node-3") and not s.ordered
    s.say("node-2", HealthChecked(report=health_report(1, 100.0)))
    s.fire("tick", 0.25)
    assert s.ordered == ["node-3"] and not s.ready("node-3")


def test_a_test_that_hung_once_keeps_no_node_out_where_too_few_others_are_known_to_compare_speeds() -> None:
    s = Checked(known=1)
    s.join("node-3", devices(1, {"kind": "H100", "failed": "its test did not end"}))
    assert not s.ready("node-3")
    s.check("node-3", health_report(2, 100.0))
    assert s.ready("node-3") and "join" in s.due
    s.ordered.clear()
    s.fire("tick", 0.25)
    assert not s.ordered


def test_a_node_whose_tests_hung_is_readmitted_where_too_few_others_are_known_to_compare_speeds() -> None:
    s = Checked(known=1)
    hung = {"kind": "H100", "failed": "its test did not end"}
    s.join("node-3", devices(1, hung))
    s.check("node-3", devices(2, hung))
    assert s.aside("node-3") == "slow_device"
    s.check("node-3", health_report(3, 100.0))
    s = taken_over(s)
    s.hello("node-3", 103, facts=TESTED, job_id="job-1", prepared=True, health=health_report(3, 100.0))
    assert s.aside("node-3") == "slow_device"
    for number in (4, 5):
        s.say("node-3", HealthChecked(report=health_report(number, 100.0)))
    assert not s.aside("node-3")


def test_a_node_that_trains_is_neither_tested_nor_judged_by_its_speed() -> None:
    s = Checked()
    s.say("node-2", HealthChecked(report=health_report(2, 10.0)))
    for _ in range(5):
        s.fire("tick", 700.0)
    assert not s.ordered and not s.aside("node-2")


def test_a_slow_link_counts_by_the_quickest_of_its_transfers() -> None:
    def linked(number: int, *speeds: float) -> HealthReport:
        links = tuple(LinkHealth(node="node-9", latency_ms=0.1, mb_s=speed) for speed in speeds)
        return msgspec.structs.replace(health_report(number), links=links)

    s = Checked(known=0)
    for name in OTHERS:
        s.say(name, HealthChecked(report=linked(1, 1000.0)))
    s.join("node-3", linked(1, 100.0, 900.0))
    assert s.ready("node-3")
    s.join("node-4", linked(1, 100.0, 90.0), incarnation=104)
    assert not s.ready("node-4")
    s.check("node-4", linked(2, 110.0))
    assert s.aside("node-4") == "slow_link"
    assert "transfers from other nodes at 110 MB/s, and those of the other nodes at 1000" in (
        s.named("NodeQuarantined")[0].reason
    )


def test_an_idle_node_is_tested_periodically_with_links_to_nodes_on_other_hosts() -> None:
    s = Checked(every_s=60.0)
    s.join("node-3", health_report(1), host="10.0.0.9", snapshot_port=7)
    s.hello("node-4", 104, facts=msgspec.structs.replace(TESTED, host="10.0.0.8", snapshot_port=8))
    s.say("node-4", HealthChecked(report=health_report(1)))
    s.fire("tick", 0.25)
    orders = {one.node: one.command for one in s.commands(CheckHealth)}
    assert [(peer.node, peer.address) for peer in orders["node-3"].peers] == [("node-4", "10.0.0.8:8")]
    assert [(peer.node, peer.address) for peer in orders["node-4"].peers] == [("node-3", "10.0.0.9:7")]
    s.say("node-3", HealthChecked(report=health_report(2)))
    s.ordered.clear()
    for _ in range(3):
        s.fire("tick", 5.0)
    assert s.ordered == ["node-4"], "its answer is missing"
    s.fire("tick", 61.0)
    assert "node-3" in s.ordered


def test_a_slow_node_is_readmitted_when_it_has_passed_two_checks_in_a_row() -> None:
    s = Checked(every_s=60.0)
    s.join("node-3", health_report(1, 10.0))
    s.check("node-3", health_report(2, 10.0))
    assert s.aside("node-3") == "slow_device"
    for number, speed in enumerate((100.0, 10.0, 100.0, 100.0), start=3):
        assert s.aside("node-3") == "slow_device"
        s.ordered.clear()
        s.fire("tick", 61.0)
        assert s.ordered == ["node-3"]
        s.say("node-3", HealthChecked(report=health_report(number, speed)))
    assert not s.aside("node-3") and s.ready("node-3")
    assert s.named("NodeReadmitted")[0].details == {"by": "health", "cause": "slow_device"}
    assert len(s.named("HealthCheckPassed")) == 2


def test_a_wrong_device_stays_aside_until_a_user_readmits_it_and_it_passes_another_check() -> None:
    s = Checked(every_s=60.0)
    s.join("node-3", health_report(1, wrong="a product is wrong"))
    for number in range(2, 6):
        s.fire("tick", 61.0)
        s.say("node-3", HealthChecked(report=health_report(number)))
    assert s.aside("node-3") == "wrong_device" and len(s.named("HealthCheckPassed")) == 1
    s.feed(ReadmitRequested, request="r", node="node-3")
    assert "if it passes another health check" in s.one(AnswerRequest).detail
    assert not s.ready("node-3") and "join" not in s.due
    s.check("node-3", health_report(6, wrong="a product is wrong"))
    assert s.aside("node-3") == "wrong_device"
    s.feed(ReadmitRequested, request="r", node="node-3")
    s.check("node-3", health_report(7))
    assert s.ready("node-3") and not s.aside("node-3")


def test_a_check_that_was_ordered_before_a_user_readmits_a_node_does_not_count() -> None:
    s = Checked(every_s=60.0)
    s.join("node-3", health_report(1, wrong="a product is wrong"))
    s.fire("tick", 61.0)
    assert s.ordered == ["node-3"]
    s.feed(ReadmitRequested, request="r", node="node-3")
    s.say("node-3", HealthChecked(report=health_report(2, wrong="a product is wrong")))
    assert not s.aside("node-3") and not s.ready("node-3")
    s.check("node-3", health_report(3))
    assert s.ordered == ["node-3", "node-3"] and s.ready("node-3")


def test_a_node_in_use_whose_hello_shows_a_wrong_product_is_fenced_and_told_nothing_else() -> None:
    s = Checked()
    s.hello(
        "node-0",
        100,
        facts=TESTED,
        job_id="job-0",
        generation=1,
        health=health_report(2, wrong="a product is wrong"),
    )
    assert s.aside("node-0") == "wrong_device"
    assert [type(one.command) for one in s.commands() if one.node == "node-0"] == [Fence]


def test_the_largest_share_of_nodes_that_are_set_aside_holds_for_health_checks_too() -> None:
    s = Checked()
    s.join("node-3", health_report(1, wrong="a product is wrong"))
    s.join("node-4", health_report(1, wrong="a product is wrong"), incarnation=104)
    assert s.aside("node-3") and not s.aside("node-4")
    assert "1 of 5 nodes are set aside already" in s.named("QuarantineSkipped")[0].reason


def test_a_report_that_was_lost_is_requested_and_an_old_one_changes_nothing() -> None:
    s = Checked()
    s.join("node-3", None)
    said = Acknowledgement(activity=NodeActivity.PREPARED, job_id="job-1", health_number=2)
    for _ in range(4):
        s.wait(0.25)
        s.say("node-3", Heartbeat(generation=0, committed=None, acknowledgement=said))
        if s.commands(RequestHello):
            break
    else:
        raise AssertionError("nothing was requested")
    s.say("node-3", HealthChecked(report=health_report(2)))
    s.say("node-3", HealthChecked(report=health_report(1, wrong="a product is wrong")))
    assert s.ready("node-3")


def test_a_restarted_coordinator_keeps_the_quarantine_and_does_not_wait_for_checks_that_were_reported() -> (
    None
):
    s = Checked()
    s.join("node-3", health_report(1, wrong="a product is wrong"))
    s.join("node-4", health_report(1), incarnation=104)
    machine, _ = ClusterMachine.restore(Timing(), s.machine.durable_state(), s.now, "restarted")
    nodes = machine._c.nodes
    assert nodes["node-3"].quarantine is not None and nodes["node-4"].ready
    machine.step(BrokerConnected(at=s.now, cause="test"))
    assert nodes["node-4"].ready


def taken_over(s: Checked, **limits: Any) -> Checked:
    """Return the cluster with the coordinator restarted, and connected."""
    other = restarted(s, HardwareLimits(health=HealthLimits(every_s=600.0, **limits)))
    other.feed(BrokerConnected)
    return other


def test_a_restarted_coordinator_waits_for_a_check_that_was_not_reported() -> None:
    s = Checked()
    s.join("node-3", None)
    s = taken_over(s)
    s.say("node-3", Prepared(job_id="job-1", profile=None))
    assert not s.ready("node-3")
    s.say("node-3", HealthChecked(report=health_report(1, wrong="a product is wrong")))
    assert s.aside("node-3") == "wrong_device"
    assert taken_over(s).aside("node-3") == "wrong_device"
    off = Checked()
    off.join("node-3", None)
    assert taken_over(off, enabled=False).ready("node-3")


def test_a_readmitted_node_is_tested_again_if_the_coordinator_is_restarted_before() -> None:
    s = Checked()
    s.join("node-3", health_report(1, wrong="a product is wrong"))
    s.feed(ReadmitRequested, request="r", node="node-3")
    s = taken_over(s)
    old = health_report(1, wrong="a product is wrong")
    s.hello("node-3", 103, facts=TESTED, job_id="job-1", prepared=True, health=old)
    assert not s.aside("node-3") and not s.ready("node-3")
    s.check("node-3", health_report(2))
    assert s.ordered == ["node-3"] and s.ready("node-3")


def test_a_suspected_node_is_judged_again_after_a_restart() -> None:
    s = Checked()
    s.join("node-3", health_report(1, 1.0))
    s = taken_over(s)
    assert not s.ready("node-3")
    for number, name in enumerate(OTHERS):
        at_work = {"job_id": "job-1", "prepared": True, "training": True, "generation": 1}
        s.hello(name, 100 + number, facts=TESTED, health=health_report(1, 100.0), **at_work)
    s.hello("node-3", 103, facts=TESTED, job_id="job-1", prepared=True, health=health_report(1, 1.0))
    assert not s.ready("node-3") and not s.aside("node-3")
    s.check("node-3", health_report(2, 100.0))
    assert s.ready("node-3")
    off = Checked()
    off.join("node-3", health_report(1, 1.0))
    assert taken_over(off, enabled=False).ready("node-3")
