"""The replay: a discrete-event simulation of one policy on one trace.

It advances a policy's job from change to change, keeps the account of time in exclusive categories, and takes
back iterations that a reaction undoes.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ftd.replay.outcome import Outcome, Recovery, Span
from ftd.replay.policy import CATEGORIES, Category, Change, Pause, Reaction, RecoveryPolicy, Running
from ftd.replay.traces.trace import Trace, TraceChange

_ROUNDING_S = 1e-9
"""Time below which an iteration counts as complete, against rounding."""


def replay(
    policy: RecoveryPolicy, trace: Trace, on_progress: Callable[[float], None] | None = None
) -> Outcome:
    """Replay ``trace`` under ``policy``.

    :param on_progress: called with the virtual time, in seconds, after each change.
    """
    account = _Account()
    nodes = dict.fromkeys(trace.initial_nodes)
    steps = deque(_steps(trace))
    account.react(policy.start(tuple(nodes), _next_s(steps, trace)))
    node_s, before_s = 0.0, 0.0
    while True:
        wake_at_s = policy.wake_at_s
        if wake_at_s is not None and wake_at_s < _next_s(steps, trace):
            step = _Step(at_s=max(wake_at_s, before_s))
        elif steps:
            step = steps.popleft()
        else:
            break
        account.advance(step.at_s)
        node_s += len(nodes) * (step.at_s - before_s)
        before_s = step.at_s
        for node in step.removed:
            del nodes[node]
        nodes.update(dict.fromkeys(step.added))
        reaction = policy.change(
            Change(
                at_s=step.at_s,
                nodes=tuple(nodes),
                removed=step.removed,
                added=step.added,
                leaving=step.leaving,
                notice_s=step.notice_s,
                until_s=_next_s(steps, trace),
                running=account.is_running,
                boundary_s=account.boundary_s,
                iterations=account.iterations,
            )
        )
        if reaction is not None:
            account.react(reaction, lost=len(step.removed))
        if on_progress is not None:
            on_progress(step.at_s)
    account.advance(trace.end_s)
    node_s += len(nodes) * (trace.end_s - before_s)
    return account.outcome(policy.name, node_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """An instant at which a policy is asked."""

    at_s: float
    removed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    notice_s: float = 0.0


def _next_s(steps: Sequence[_Step], trace: Trace) -> float:
    return steps[0].at_s if steps else trace.end_s


def _steps(trace: Trace) -> list[_Step]:
    """Return the changes before the trace's end and their announcements, in the order of their times."""
    changes = trace.changes
    steps = [_Step(at_s=change.at_s, removed=change.removed, added=change.added) for change in changes]
    steps += [_announcement(change) for change in changes if change.removed and change.notice_s > 0]
    return sorted((step for step in steps if step.at_s < trace.end_s), key=lambda step: step.at_s)


def _announcement(change: TraceChange) -> _Step:
    at_s = max(0.0, change.at_s - change.notice_s)
    return _Step(at_s=at_s, leaving=change.removed, notice_s=change.at_s - at_s)


@dataclass(slots=True)
class _Iterations:
    """Consecutive iterations under one ``Running``, apart from stalls."""

    running: Running
    begin_s: float
    end_s: float
    count: int = 0


class _Account:
    """The state of a job in virtual time, and where its time went."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self._seconds: dict[Category, float] = dict.fromkeys(CATEGORIES, 0.0)
        self._pauses: list[Pause] = []
        self._running: Running | None = None
        self._partial_s = 0.0
        """Time spent in the iteration in flight."""
        self._pending: tuple[float, Reaction, int] | None = None
        """A reaction that takes place at a later time, and the number of nodes lost."""
        self._done: list[_Iterations] = []
        self.iterations = 0
        """Iterations that count so far."""
        self._durable: list[tuple[float, int]] = [(0.0, 0)]
        """Checkpoints: the time from which each can be used, and the number of iterations that it holds."""
        self._since_checkpoint = 0
        self._stalling = False
        """Whether the first pause is the stall of a checkpoint."""
        self._recoveries: list[Recovery] = []
        self._recovery: Recovery | None = None

    @property
    def is_running(self) -> bool:
        return self._running is not None and (not self._pauses or self._stalling)

    @property
    def boundary_s(self) -> float:
        """Return the time until the iteration in flight ends."""
        if self._running is None or self._pauses or not self._partial_s:
            return 0.0
        return self._running.iteration_s - self._partial_s

    def react(self, reaction: Reaction, lost: int = 0) -> None:
        """Begin a reaction now or, if it says so, later. It replaces one that has not begun."""
        self._pending = None
        if reaction.after_s > 0:
            self._pending = (self.at_s + reaction.after_s, reaction, lost)
        else:
            self._begin(reaction, lost)

    def _begin(self, reaction: Reaction, lost: int) -> None:
        redone_s = self._undo(reaction)
        if reaction.saved_s is not None:
            self._save(reaction.saved_s)
        if self._recovery is not None:
            self._recoveries.append(self._recovery)
        self._recovery = None
        if reaction.pauses:
            self._recovery = Recovery(at_s=self.at_s, seconds={}, lost=lost, redone_s=redone_s)
        self._pauses = [pause for pause in reaction.pauses if pause.seconds > 0]
        self._stalling = False
        self._running = reaction.running

    def advance(self, until_s: float) -> None:
        """Let the job go on until ``until_s``."""
        while self._pending is not None and self._pending[0] <= until_s:
            at_s, reaction, lost = self._pending
            self._advance(at_s)
            self._pending = None
            self._begin(reaction, lost)
        self._advance(until_s)

    def _advance(self, until_s: float) -> None:
        while self.at_s < until_s:
            if self._pauses:
                self._pause(until_s)
            elif self._running is None:
                self._spend("waiting", until_s - self.at_s)
            else:
                self._run(self._running, until_s)
        self.at_s = max(self.at_s, until_s)

    def _pause(self, until_s: float) -> None:
        pause = self._pauses[0]
        seconds = min(pause.seconds, until_s - self.at_s)
        if self._recovery is not None and not self._stalling:
            spent = self._recovery.seconds
            spent[pause.category] = spent.get(pause.category, 0.0) + seconds
        self._spend(pause.category, seconds)
        if seconds < pause.seconds:
            self._pauses[0] = Pause(category=pause.category, seconds=pause.seconds - seconds)
            return
        del self._pauses[0]
        if self._stalling:
            self._end_checkpoint()

    def _end_checkpoint(self) -> None:
        assert self._running is not None and self._running.checkpoints is not None
        self._stalling = False
        self._save(self._running.checkpoints.write_s)

    def _save(self, after_s: float) -> None:
        """Record a checkpoint of all iterations so far, which can be used ``after_s`` from now."""
        self._since_checkpoint = 0
        usable = [index for index, (at_s, _) in enumerate(self._durable) if at_s <= self.at_s]
        self._durable = self._durable[usable[-1] :]
        self._durable.append((self.at_s + after_s, self.iterations))

    def _run(self, running: Running, until_s: float) -> None:
        """Run iterations until ``until_s`` or the next checkpoint."""
        if self._recovery is not None:
            self._recoveries.append(self._recovery)
            self._recovery = None
        seconds = until_s - self.at_s
        checkpoints = running.checkpoints
        if checkpoints is not None:
            left = max(1, checkpoints.every_iterations - self._since_checkpoint)
            seconds = min(seconds, left * running.iteration_s - self._partial_s)
        whole = math.floor((self._partial_s + seconds + _ROUNDING_S) / running.iteration_s)
        begin_s = self.at_s - self._partial_s
        # Two products of the share could miss ``seconds`` by a rounding error and leave a loop without progress.
        computing_s = seconds * running.efficiency
        self._seconds["computing"] += computing_s
        self._seconds["reduced"] += seconds - computing_s
        self.at_s += seconds
        self._partial_s = max(0.0, self._partial_s + seconds - whole * running.iteration_s)
        if self._partial_s < _ROUNDING_S:
            self._partial_s = 0.0
        if whole:
            self._add(running, begin_s, begin_s + whole * running.iteration_s, whole)
            self._since_checkpoint += whole
        if checkpoints is not None and self._since_checkpoint >= checkpoints.every_iterations:
            self._pauses = [Pause(category="stalled", seconds=checkpoints.stall_s)]
            self._stalling = True
            if checkpoints.stall_s <= 0:
                self._pauses = []
                self._end_checkpoint()

    def _add(self, running: Running, begin_s: float, end_s: float, count: int) -> None:
        last = self._done[-1] if self._done else None
        if last is not None and last.running == running and abs(last.end_s - begin_s) < _ROUNDING_S:
            last.end_s, last.count = end_s, last.count + count
        else:
            self._done.append(_Iterations(running, begin_s, end_s, count))
        self.iterations += count

    def _undo(self, reaction: Reaction) -> float:
        """Take back what the reaction loses, and return the computing time of it in seconds."""
        keep = reaction.keep_iterations
        if reaction.undo == "nothing" and keep is None:
            # The iteration in flight goes on after the pauses, at whatever pace: its share of work is kept.
            if self._running is not None and reaction.running is not None:
                self._partial_s *= reaction.running.iteration_s / self._running.iteration_s
            return 0.0
        redone_s = self._partial_s
        if redone_s and self._running is not None:
            self._lose(redone_s, self._running)
        self._partial_s = 0.0
        if reaction.undo == "checkpoint":
            usable = [(at_s, count) for at_s, count in self._durable if at_s <= self.at_s]
            self._durable = usable
            keep = usable[-1][1] if keep is None else min(keep, usable[-1][1])
        if keep is not None:
            self._durable = [(at_s, min(count, keep)) for at_s, count in self._durable]
            surplus = max(0, self.iterations - keep)
            while surplus:
                last = self._done[-1]
                taken = min(surplus, last.count)
                lost_s = taken * last.running.iteration_s
                self._lose(lost_s, last.running)
                redone_s += lost_s
                last.count -= taken
                last.end_s -= lost_s
                surplus -= taken
                self.iterations -= taken
                if not last.count:
                    self._done.pop()
            self._since_checkpoint = 0
        return redone_s

    def _lose(self, seconds: float, running: Running) -> None:
        self._seconds["computing"] -= seconds * running.efficiency
        self._seconds["reduced"] -= seconds * (1 - running.efficiency)
        self._seconds["redone"] += seconds

    def _spend(self, category: Category, seconds: float) -> None:
        self._seconds[category] += seconds
        self.at_s += seconds

    def outcome(self, policy: str, node_s: float) -> Outcome:
        """Return the result so far; the iteration in flight does not count yet."""
        if self._recovery is not None:
            self._recoveries.append(self._recovery)
        spans = tuple(
            Span(begin_s=each.begin_s, end_s=each.end_s, samples=each.count * each.running.samples)
            for each in self._done
        )
        return Outcome(
            policy=policy,
            wall_s=self.at_s,
            samples=math.fsum(span.samples for span in spans),
            iterations=self.iterations,
            seconds=self._seconds,
            spans=spans,
            recoveries=tuple(self._recoveries),
            node_s=node_s,
        )
