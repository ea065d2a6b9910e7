"""Tests of the driver: the order of effects, timers, and that bugs do not end a daemon."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from ftd.driver import Driver, EventRateLimiter
from ftd.errors import JournalError
from statemachine.effects import CancelTimer, Effect, EmitEvent, PersistState, PublishCluster, SetTimer
from statemachine.events import BrokerConnected, BrokerDisconnected, Event, TimerFired
from tests.helpers.waiting import PATIENCE_S


def emit(name: str) -> EmitEvent:
    return EmitEvent(cause="c", name=name, reason="")


class Scripted:
    """State machine that answers each kind of event with the effects it was given."""

    def __init__(self, script: dict[type[Event], Callable[[Any], list[Effect]]]) -> None:
        self.script = script
        self.events: list[Event] = []

    def step(self, event: Event) -> list[Effect]:
        self.events.append(event)
        return self.script.get(type(event), lambda _: [])(event)


def drive(machine: Scripted, perform: Callable[[Effect], Any], *events: type[Event]) -> Driver:
    """Feed events and run until an ``EmitEvent`` named Done has been performed."""

    async def scene() -> Driver:
        done = asyncio.Event()

        def performing(effect: Effect) -> Any:
            if isinstance(effect, EmitEvent) and effect.name == "Done":
                done.set()
                return None
            return perform(effect)

        driver = Driver(machine, performing)
        for kind in events:
            driver.feed(kind(at=driver.now(), cause=driver.new_cause()))
        running = asyncio.create_task(driver.run())
        waiting = asyncio.create_task(done.wait())
        await asyncio.wait([running, waiting], timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        ended = running.done()
        for task in (running, waiting):
            task.cancel()
        results = await asyncio.gather(running, waiting, return_exceptions=True)
        driver.stop_timers()
        if ended and isinstance(results[0], BaseException):
            raise results[0]
        assert done.is_set()
        return driver

    return asyncio.run(scene())


def test_each_effect_is_finished_before_the_next_begins() -> None:
    log: list[str] = []

    async def slowly() -> None:
        await asyncio.sleep(0.02)
        log.append("persisted")

    def perform(effect: Effect) -> Any:
        if isinstance(effect, PersistState):
            return slowly()
        log.append(type(effect).__name__)
        return None

    machine = Scripted(
        {
            BrokerConnected: lambda _: [emit("A"), PersistState(cause="c"), PublishCluster(cause="c")],
            BrokerDisconnected: lambda _: [emit("Done")],
        }
    )
    drive(machine, perform, BrokerConnected, BrokerDisconnected)
    assert log == ["EmitEvent", "persisted", "PublishCluster"]


def test_timers_fire_once_and_a_new_one_replaces_the_old() -> None:
    machine = Scripted(
        {
            BrokerConnected: lambda _: [
                SetTimer(cause="c", name="a", delay_s=0.01),
                SetTimer(cause="c", name="b", delay_s=0.01),
                SetTimer(cause="c", name="b", delay_s=0.06),
                SetTimer(cause="c", name="gone", delay_s=0.01),
                CancelTimer(cause="c", name="gone"),
                CancelTimer(cause="c", name="never set"),
                SetTimer(cause="c", name="end", delay_s=0.12),
            ],
            TimerFired: lambda event: [emit("Done")] if event.name == "end" else [],
        }
    )
    drive(machine, lambda _: None, BrokerConnected)
    fired = [event.name for event in machine.events if isinstance(event, TimerFired)]
    assert fired == ["a", "b", "end"]


def test_an_expired_timer_can_be_cancelled_before_it_is_processed() -> None:
    """The step that cancels the timer also blocks the loop until the timer has expired."""

    async def block() -> None:
        await asyncio.sleep(0.05)

    machine = Scripted(
        {
            BrokerConnected: lambda _: [
                SetTimer(cause="c", name="a", delay_s=0.01),
                PersistState(cause="c"),
                CancelTimer(cause="c", name="a"),
                SetTimer(cause="c", name="end", delay_s=0.02),
            ],
            TimerFired: lambda _: [emit("Done")],
        }
    )
    drive(machine, lambda effect: block() if isinstance(effect, PersistState) else None, BrokerConnected)
    assert [event.name for event in machine.events if isinstance(event, TimerFired)] == ["end"]


def test_a_bug_in_a_step_or_an_effect_is_counted_and_the_daemon_continues() -> None:
    def bug(_: Any) -> list[Effect]:
        raise RuntimeError("a bug of ours")

    def perform(effect: Effect) -> None:
        raise ValueError("another")

    machine = Scripted({BrokerConnected: bug, BrokerDisconnected: lambda _: [emit("A"), emit("Done")]})
    assert drive(machine, perform, BrokerConnected, BrokerDisconnected).bugs == 2


def test_a_journal_error_ends_the_driver() -> None:
    published: list[Effect] = []

    def perform(effect: Effect) -> None:
        if isinstance(effect, PersistState):
            raise JournalError("the disk is full")
        published.append(effect)

    machine = Scripted({BrokerConnected: lambda _: [PersistState(cause="c"), PublishCluster(cause="c")]})
    with pytest.raises(JournalError):
        drive(machine, perform, BrokerConnected)
    assert published == []


def test_causes_are_unique_and_short() -> None:
    async def scene() -> tuple[Driver, Driver]:
        return Driver(Scripted({}), lambda _: None), Driver(Scripted({}), lambda _: None)

    one, other = asyncio.run(scene())
    causes = [driver.new_cause() for driver in (one, other) for _ in range(100)]
    assert len(set(causes)) == 200
    assert all(len(cause) == 12 for cause in causes)


def test_one_event_of_a_kind_passes_per_second() -> None:
    limiter = EventRateLimiter()

    def ignored(why: str) -> EmitEvent:
        return EmitEvent(cause="c", name="MessageIgnored", reason=why)

    assert limiter.admit(ignored("old"), 10.0) == 0
    assert limiter.admit(ignored("old"), 10.1) is None
    assert limiter.admit(ignored("older"), 10.1) == 0
    assert limiter.admit(ignored("old"), 10.9) is None
    assert limiter.admit(ignored("old"), 11.0) == 2
    assert limiter.admit(ignored("old"), 12.0) == 0
    for moment in range(10):
        assert limiter.admit(emit("NodeLost"), float(moment) / 100) == 0
    for index in range(5000):
        limiter.admit(ignored(str(index)), 20.0)
    assert len(limiter._kinds) <= EventRateLimiter.MAX_KINDS


def test_queued_events_are_processed_in_one_batch() -> None:
    """All queued events take one step and one call after its effects; a bug affects only its own event."""
    batches: list[list[str]] = []
    done: list[str] = []

    def step_batch(events: Any, bug: Callable[[Any], None]) -> list[Effect]:
        batches.append([type(event).__name__ for event in events])
        for event in events:
            if isinstance(event, BrokerDisconnected):
                try:
                    raise RuntimeError("a bug")
                except RuntimeError:
                    bug(event)
        return [emit("Done")]

    async def scene() -> Driver:
        effects_done = asyncio.Event()
        driver = Driver(
            Scripted({}),
            lambda effect: done.append("effect"),
            step_batch=step_batch,
            on_effects_done=lambda: (done.append("effects done"), effects_done.set())[0],
        )
        for kind in (BrokerConnected, BrokerDisconnected, BrokerConnected):
            driver.feed(kind(at=driver.now(), cause=driver.new_cause()))
        running = asyncio.create_task(driver.run())
        await asyncio.wait_for(effects_done.wait(), PATIENCE_S)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return driver

    driver = asyncio.run(scene())
    assert batches == [["BrokerConnected", "BrokerDisconnected", "BrokerConnected"]]
    assert done == ["effect", "effects done"]
    assert driver.bugs == 1
