"""Tests of when a node's agent runs health checks, and of what waits for them."""

import msgspec
import pytest

from statemachine.agent.events import AgentStarted, HealthCheckEnded, TrainerFailed, TrainerReported
from statemachine.agent.machine import AgentMachine
from statemachine.effects import RunHealthCheck, StopHealthCheck
from statemachine.events import BrokerConnected
from statemachine.messages.cluster import (
    CheckHealth,
    Fence,
    HealthChecked,
    Heartbeat,
    Hello,
    RequestHello,
    TrainerLost,
)
from statemachine.messages.common import Prepared
from statemachine.messages.values import FailureCause, ReplicaPeer
from statemachine.timing import Timing
from tests.helpers.agent_machine import Daemon
from tests.helpers.transcripts import Script, facts, health_report

TESTED = msgspec.structs.replace(facts(), checks_health=True)
PEERS = (ReplicaPeer(node="b", address="b:1"),)


class CheckedDaemon(Daemon):
    """The agent of a node that tests its device; its first check has begun."""

    def __init__(self) -> None:
        Script.__init__(self, AgentMachine("a", Timing()))
        self.devices = 1
        self.feed(AgentStarted, incarnation=7, facts=TESTED)
        assert self.one(RunHealthCheck).number == 1
        self.feed(BrokerConnected)

    def end(self, number: int) -> None:
        self.feed(HealthCheckEnded, report=health_report(number))


def test_prepared_waits_for_the_check_at_the_start_which_is_reported_first() -> None:
    d = CheckedDaemon()
    d.prepared()
    assert not d.signals(Prepared)
    d.order(RequestHello())
    (hello,) = d.signals(Hello)
    assert not hello.prepared and hello.health is None
    d.end(1)
    assert [type(signal) for signal in d.signals()] == [HealthChecked, Prepared]
    d.order(RequestHello())
    (hello,) = d.signals(Hello)
    assert hello.prepared and hello.health == health_report(1)
    (heartbeat,) = d.signals(Heartbeat)
    assert heartbeat.acknowledgement.health_number == 1


def test_a_node_that_tests_nothing_runs_no_check() -> None:
    d = Daemon()
    d.prepared()
    assert not [line for line in d.lines if "RunHealthCheck" in line]
    d.order(CheckHealth(peers=PEERS))
    assert not d.all(RunHealthCheck)


@pytest.mark.parametrize(
    ("cause", "detail", "checked"),
    [
        ("raised", "Traceback", True),
        ("hung", "no progress", True),
        ("exited", "killed by SIGSEGV", True),
        ("exited", "killed by SIGKILL", False),
        ("exited", "exited with code 1", False),
    ],
)
def test_a_failure_that_counts_for_a_quarantine_leads_to_a_check_before_the_return(
    cause: FailureCause, detail: str, checked: bool
) -> None:
    d = CheckedDaemon()
    d.end(1)
    d.prepared()
    d.feed(TrainerFailed, device=0, pid=50, cause_of_failure=cause, detail=detail)
    assert d.signals(TrainerLost) and bool(d.all(RunHealthCheck)) == checked
    d.pass_time(Timing().restart_backoff_s)
    d.up(51)
    d.feed(TrainerReported, device=0, report=Prepared(job_id="job-1", profile=None))
    assert bool(d.signals(Prepared)) != checked
    if checked:
        d.end(2)
        assert d.signals(Prepared)


def test_a_wrong_result_is_reported_until_the_coordinator_orders_another_check() -> None:
    """The coordinator may not have received it before the next check passes."""
    d = CheckedDaemon()
    d.feed(HealthCheckEnded, report=health_report(1, wrong="a product is wrong"))
    d.feed(TrainerFailed, device=0, pid=50, cause_of_failure="hung", detail="no progress")
    d.end(2)
    assert d.signals(HealthChecked)[-1].report == health_report(2, wrong="a product is wrong")
    d.order(CheckHealth())
    d.end(3)
    assert d.signals(HealthChecked)[-1].report == health_report(3)


def test_an_idle_node_obeys_an_order_and_stops_when_it_gets_work() -> None:
    d = CheckedDaemon()
    d.end(1)
    d.order(CheckHealth(peers=PEERS))
    assert d.one(RunHealthCheck).peers == PEERS
    d.order(CheckHealth())
    assert not d.all(RunHealthCheck), "one check at a time"
    d.prepared()
    assert [line for line in d.lines if "StopHealthCheck" in line]
    d.end(2)
    assert not d.signals(HealthChecked)


def test_a_node_that_trains_ignores_an_order() -> None:
    d = CheckedDaemon()
    d.end(1)
    d.prepared()
    d.training()
    d.order(CheckHealth())
    assert not d.all(RunHealthCheck) and not d.all(StopHealthCheck)


def test_a_new_incarnation_is_tested_again_under_another_number() -> None:
    d = CheckedDaemon()
    d.order(Fence(reason="r"))
    d.feed(AgentStarted, incarnation=8, facts=TESTED)
    assert d.one(RunHealthCheck).number == 2
    d.end(1)
    assert not d.signals(HealthChecked)
