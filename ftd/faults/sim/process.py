"""The event loop of one simulated process, on the world's virtual time.

The production classes of the daemons run on it unchanged. A frozen process (SIGSTOP) runs nothing until it
thaws; what arrived meanwhile then runs in order. A killed process (SIGKILL) runs nothing any more, and
nothing in its memory reaches the network or a disk.
"""

import asyncio
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from random import Random
from typing import Any

from ftd.faults.sim.world import World
from ftd.transport.mqtt.session import ignore

_MOST_LAST_CALLS = 10_000
"""The number of callbacks that the tasks of a killed process may take to end."""


class ProcessLoop(asyncio.BaseEventLoop):
    """The event loop described above. It is single-threaded and shares the world's queue with all others."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.alive, self.frozen = True, False
        self._inside = False
        super().__init__()
        self._ready: deque[asyncio.Handle] = deque()
        self._held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._busy_rng: Random | None = None
        self._pausing = False

    # --- from outside --------------------------------------------------------------------------------

    def enter(self, action: Callable[..., None], *arguments: Any) -> None:
        """Call something in this process: at once, when it thaws, or never."""
        if not self.alive:
            return
        if self._inside:
            action(*arguments)
        elif self.frozen or self._pausing:
            self._held.append((action, arguments))
        elif self._busy_rng is not None and self._busy_rng.random() >= 0.7:
            self._pausing = True
            self._held.append((action, arguments))
            self.world.call_later(self._busy_rng.uniform(0.0, 0.05), self._resume)
        else:
            self._run([(action, arguments)])

    def enable_busy_periods(self, name: str) -> None:
        """Be busy at times, and handle together what arrived meanwhile."""
        self._busy_rng = Random(f"{self.world.seed} {name} together")

    def _resume(self) -> None:
        self._pausing = False
        if not self.frozen:
            self.thaw()

    def freeze(self) -> None:
        """Stop the process, as SIGSTOP does."""
        self.frozen = True

    def thaw(self) -> None:
        """Continue the process, as SIGCONT does: everything that arrived meanwhile is there at once."""
        self.frozen = False
        if self.alive and not self._pausing:
            held, self._held = self._held, []
            self._run(held)

    def kill(self) -> None:
        """Kill the process, as SIGKILL does. Its tasks are ended, so that none is left to the garbage
        collector.
        """
        self.alive = False
        self._held.clear()
        if self._inside:  # It is inside its own callback: end the tasks after that.
            self.world.call_later(0.0, self._end)
        else:
            self._end()

    def _end(self) -> None:
        self._inside = True
        events._set_running_loop(self)
        try:
            for task in sorted(self._tasks, key=lambda task: task.get_name()):
                task.cancel()
            for _ in range(_MOST_LAST_CALLS):
                if not self._ready:
                    break
                self._ready.popleft()._run()
        finally:
            self._inside = False
            events._set_running_loop(None)

    def _run(self, actions: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        """Call these, then everything that follows from them at this moment."""
        ready, outside = self._ready, events._get_running_loop()
        self._inside = True
        events._set_running_loop(self)
        try:
            for action, arguments in actions:
                action(*arguments)
            while ready and self.alive and not self.frozen:
                handle: Any = ready.popleft()
                if not handle._cancelled:
                    try:
                        handle._context.run(handle._callback, *handle._args)
                    except Exception as error:
                        self.call_exception_handler({"exception": error})
        finally:
            self._inside = False
            events._set_running_loop(outside)

    # --- as an event loop ------------------------------------------------------------------------------

    def time(self) -> float:
        """Return the world's time."""
        return self.world.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        if not self._inside and self.alive:
            self.world.call_later(0.0, self.enter, ignore)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self.world.call_later(max(0.0, when - self.world.now), self._due, handle)
        return handle

    def _due(self, handle: asyncio.TimerHandle) -> None:
        if not handle._cancelled:
            self.enter(self._ready.append, handle)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> "asyncio.Task[Any]":
        task = asyncio.Task(coro, loop=self, name=name or f"task-{self.world.next_serial():09d}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Fail the run, since an exception that nobody handles is a bug of the daemon."""
        error = context.get("exception")
        if self.alive and isinstance(error, Exception):
            self.world.fail(error)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._inside

    def is_closed(self) -> bool:
        return not self.alive


class ProcessHost:
    """A host on which simulated processes run, one after the other."""

    world: World
    loop: ProcessLoop
    """The loop of the newest process."""

    @property
    def up(self) -> bool:
        """Whether the process is running."""
        return self.loop.alive

    @property
    def frozen(self) -> bool:
        """Whether the process is stopped."""
        return self.loop.frozen

    def freeze(self, for_s: float) -> None:
        """SIGSTOP the process: messages wait for it, and its timers are late."""
        if self.up and not self.frozen:
            self.loop.freeze()
            self.world.call_later(for_s, self.loop.thaw)


class SimClock:
    """The clocks of one simulated host."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.since_boot_s = 0.0
        """Seconds by which the host's monotonic clock is ahead of the world's."""

    def monotonic_s(self) -> float:
        return self._world.now + self.since_boot_s

    def wall_s(self) -> float:
        return _EPOCH_S + self._world.now

    def cpu_s(self) -> float:
        """Return 0: computing takes no CPU time here."""
        return 0.0


_EPOCH_S = 1_700_000_000.0
