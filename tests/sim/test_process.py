"""The event loops of simulated processes: virtual time, SIGSTOP and SIGKILL."""

import asyncio

import pytest

from ftd.faults.sim.process import ProcessLoop
from ftd.faults.sim.world import World


def test_time_jumps_from_timer_to_timer() -> None:
    world = World(0)
    loop = ProcessLoop(world)
    woken: list[float] = []

    async def sleep() -> None:
        for delay_s in (1.0, 0.5, 100.0):
            await asyncio.sleep(delay_s)
            woken.append(asyncio.get_running_loop().time())

    loop.create_task(sleep())
    world.run(1000.0)
    assert woken == [1.0, 1.5, 101.5]


def test_a_thawed_process_runs_what_arrived_while_it_was_frozen() -> None:
    world = World(0)
    loop = ProcessLoop(world)
    came: list[tuple[str, float]] = []
    loop.call_later(1.0, lambda: came.append(("timer", world.now)))
    loop.freeze()
    world.call_later(2.0, loop.enter, lambda: came.append(("message", world.now)))
    world.call_later(3.0, loop.thaw)
    world.run(10.0)
    assert sorted(came) == [("message", 3.0), ("timer", 3.0)]


def test_a_killed_process_runs_nothing_and_leaves_no_task() -> None:
    world = World(0)
    loop = ProcessLoop(world)
    came: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(5.0)
            came.append("slept")
        finally:
            came.append("ended")

    task = loop.create_task(work())
    world.call_later(1.0, loop.kill)
    world.call_later(2.0, loop.enter, came.append, "message")
    world.run(10.0)
    assert task.cancelled() and came == ["ended"]


def test_an_exception_in_a_task_ends_the_run() -> None:
    world = World(0)
    loop = ProcessLoop(world)

    def broken() -> None:
        raise ZeroDivisionError("planted")

    loop.call_later(1.0, broken)
    with pytest.raises(ZeroDivisionError):
        world.run(10.0)
