"""The replay: a discrete-event simulation of one policy on one trace.

It advances a policy's job from change to change, keeps the account of time in exclusive categories, and takes
back iterations that a reaction undoes.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ftd.garbage import rare_collections
from ftd.replay.outcome import Outcome, Recovery, Span
from ftd.replay.policy import (
    CATEGORIES,
    Category,
    Change,
    Checkpoints,
    Pause,
    Reaction,
    RecoveryPolicy,
    Running,
)
from ftd.replay.traces.trace import Trace

_ROUNDING_S = 1e-6
"""Time below which an iteration counts as complete, against rounding. Times in a trace of ten years are exact to
6e-8 s.
"""


@rare_collections()
def replay(
    policy: RecoveryPolicy, trace: Trace, on_progress: Callable[[float], None] | None = None
) -> Outcome:
    """Replay ``trace`` under ``policy``.

    :param on_progress: called with the virtual time, in seconds, after each change.
    """
    account = _Account()
    nodes = dict.fromkeys(trace.initial_nodes)
    steps = deque(_steps(trace))
    account.react(policy.start(tuple(nodes)))
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
        account.came += len(step.added)
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
    steps = [_Step(at_s=change.at_s, removed=change.removed, added=change.added) for change in trace.changes]
    came_s = dict.fromkeys(trace.initial_nodes, 0.0)
    for change in trace.changes:
        if change.removed and change.notice_s > 0:
            # A node cannot announce that it leaves before it has come.
            at_s = max(change.at_s - change.notice_s, *(came_s[node] for node in change.removed))
            steps.append(_Step(at_s=at_s, leaving=change.removed, notice_s=change.at_s - at_s))
        came_s.update(dict.fromkeys(change.added, change.at_s))
    return sorted((step for step in steps if step.at_s < trace.end_s), key=lambda step: step.at_s)


@dataclass(slots=True)
class _Iterations:
    """Consecutive iterations under one ``Running``, apart from stalls."""

    running: Running
    begin_s: float
    end_s: float
    count: int
    computing_s: float
    reduced_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Delayed:
    """A reaction that takes place at a later time."""

    at_s: float
    reaction: Reaction
    lost: int


def _only_runs(reaction: Reaction) -> bool:
    """Return whether a reaction changes nothing but the pace, so that a checkpoint that is being taken goes on."""
    running = reaction.running
    keeps_all = reaction.undo == "nothing" and reaction.keep_iterations is None
    return keeps_all and not reaction.pauses and running is not None and running.checkpoints is not None


class _Account:
    """The state of a job in virtual time, and where its time went."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self._seconds: dict[Category, float] = dict.fromkeys(CATEGORIES, 0.0)
        self._pauses: list[Pause] = []
        self._running: Running | None = None
        self._progress = 0.0
        """Share, from 0 to 1, of the iteration in flight that is computed."""
        self._in_flight_s = (0.0, 0.0)
        """Seconds of ``computing`` and of ``reduced`` that the iteration in flight took so far."""
        self._delayed: _Delayed | None = None
        self._done: list[_Iterations] = []
        self.iterations = 0
        """Iterations that count so far."""
        self.came = 0
        """Nodes that came and that no recovery has taken in yet: many systems wait until they are ready."""
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
        if self._running is None or self._pauses or not self._progress:
            return 0.0
        return self._running.iteration_s * (1 - self._progress)

    def react(self, reaction: Reaction, *, lost: int = 0) -> None:
        """Begin a reaction now or, if it says so, later. It replaces one that has not begun."""
        self._delayed = None
        if reaction.after_s > 0:
            at_s = self.at_s + reaction.after_s
            self._delayed = _Delayed(at_s=at_s, reaction=reaction, lost=lost)
        else:
            self._begin(reaction, lost)

    def _begin(self, reaction: Reaction, lost: int) -> None:
        if self._stalling and _only_runs(reaction):
            self._running = reaction.running
            return
        before = self.iterations
        redone_s = self._undo(reaction)
        if reaction.saved_s is not None:
            self._save(reaction.saved_s)
        if reaction.pauses and self._recovery is None:
            self._recovery = Recovery(at_s=self.at_s)
        if self._recovery is not None:
            self._recovery.lost += lost
            self._recovery.added += self.came
            self.came = 0
            self._recovery.rolled_back |= self.iterations < before
            self._recovery.redone_s += redone_s
        self._pauses = [pause for pause in reaction.pauses if pause.seconds > 0]
        self._stalling = False
        self._running = reaction.running

    def advance(self, until_s: float) -> None:
        """Let the job go on until ``until_s``."""
        while self._delayed is not None and self._delayed.at_s <= until_s:
            delayed = self._delayed
            self._advance(delayed.at_s)
            self._delayed = None
            self._begin(delayed.reaction, delayed.lost)
        self._advance(until_s)

    def _advance(self, until_s: float) -> None:
        while self.at_s < until_s:
            if self._pauses:
                self._pause(until_s)
            elif self._running is None:
                self._spend("waiting", until_s - self.at_s)
            else:
                self._run(self._running, until_s)
        self.at_s = until_s  # Sums of seconds round, and would miss or exceed it by a little.

    def _pause(self, until_s: float) -> None:
        pause = self._pauses[0]
        seconds = min(pause.seconds, until_s - self.at_s)
        if self._recovery is not None:
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
        self._forget_old_checkpoints()
        self._durable.append((self.at_s + after_s, self.iterations))

    def _save_without_stalls(self, running: Running, checkpoints: Checkpoints, count: int) -> None:
        """Record the checkpoints of the last ``count`` iterations, of which only the newest can matter."""
        every = checkpoints.every_iterations
        first = max(1, every - (self._since_checkpoint - count))
        if count < first:
            return
        made = 1 + (count - first) // every
        unwritten = math.ceil(checkpoints.write_s / (every * running.iteration_s))
        for index in range(max(0, made - unwritten - 2), made):
            after = count - first - index * every
            at_s = self.at_s - after * running.iteration_s
            self._durable.append((at_s + checkpoints.write_s, self.iterations - after))
        self._since_checkpoint = (count - first) % every
        self._forget_old_checkpoints()

    def _forget_old_checkpoints(self) -> None:
        """Keep the newest checkpoint that can be used, and those after it."""
        usable = [index for index, (at_s, _) in enumerate(self._durable) if at_s <= self.at_s]
        self._durable = self._durable[usable[-1] :]

    def _run(self, running: Running, until_s: float) -> None:
        """Run iterations until ``until_s`` or the next checkpoint that stalls."""
        if self._recovery is not None:
            self._recoveries.append(self._recovery)
            self._recovery = None
        seconds = until_s - self.at_s
        first_s = running.iteration_s * (1 - self._progress)
        checkpoints = running.checkpoints
        if checkpoints is not None and checkpoints.stall_s > 0:
            left = max(1, checkpoints.every_iterations - self._since_checkpoint)
            seconds = min(seconds, first_s + (left - 1) * running.iteration_s)
        if seconds < first_s - _ROUNDING_S:
            self._compute(running, seconds)
            self._progress += seconds / running.iteration_s
            self.at_s += seconds
            return
        count = 1 + math.floor((seconds - first_s + _ROUNDING_S) / running.iteration_s)
        rest_s = seconds - first_s - (count - 1) * running.iteration_s
        if rest_s < _ROUNDING_S:
            rest_s = 0.0
        begin_s = self.at_s - running.iteration_s * self._progress
        self._compute(running, seconds - rest_s)
        self.at_s += seconds - rest_s
        self._complete(running, begin_s, count)
        if checkpoints is not None and checkpoints.stall_s <= 0:
            self._save_without_stalls(running, checkpoints, count)
        elif checkpoints is not None and self._since_checkpoint >= checkpoints.every_iterations:
            self._pauses = [Pause(category="stalled", seconds=checkpoints.stall_s)]
            self._stalling = True
            return
        self._compute(running, rest_s)
        self._progress = rest_s / running.iteration_s
        self.at_s += rest_s

    def _compute(self, running: Running, seconds: float) -> None:
        computing_s = seconds * running.efficiency
        # The difference, and not a second product: a rounding error would add up.
        reduced_s = seconds - computing_s
        self._seconds["computing"] += computing_s
        self._seconds["reduced"] += reduced_s
        self._in_flight_s = (self._in_flight_s[0] + computing_s, self._in_flight_s[1] + reduced_s)

    def _complete(self, running: Running, begin_s: float, count: int) -> None:
        """Record iterations that end now: the one in flight and those after it.

        :param begin_s: time at which the first one would have begun if all of it had run at this pace.
        """
        computing_s, reduced_s = self._in_flight_s
        self._in_flight_s, self._progress = (0.0, 0.0), 0.0
        self.iterations += count
        self._since_checkpoint += count
        last = self._done[-1] if self._done else None
        if last is not None and last.running == running and abs(last.end_s - begin_s) < _ROUNDING_S:
            last.end_s, last.count = self.at_s, last.count + count
            last.computing_s += computing_s
            last.reduced_s += reduced_s
            return
        begin_s = max(begin_s, 0.0 if last is None else last.end_s)
        self._done.append(_Iterations(running, begin_s, self.at_s, count, computing_s, reduced_s))

    def _undo(self, reaction: Reaction) -> float:
        """Take back what the reaction loses, and return the computing time of it in seconds."""
        keep = reaction.keep_iterations
        if reaction.undo == "nothing" and keep is None:
            return 0.0  # The iteration in flight goes on after the pauses, at whatever pace.
        kept = (
            min(reaction.kept_share, self._progress) if reaction.undo == "iteration" and keep is None else 0.0
        )
        part = kept / self._progress if kept else 0.0
        computing_s, reduced_s = self._in_flight_s
        redone_s = self._lose((1 - part) * computing_s, (1 - part) * reduced_s)
        self._in_flight_s, self._progress = (part * computing_s, part * reduced_s), kept
        if reaction.undo == "checkpoint":
            self._durable = [(at_s, count) for at_s, count in self._durable if at_s <= self.at_s]
            newest = self._durable[-1][1]
            keep = newest if keep is None else min(keep, newest)
        if keep is not None:
            self._durable = [(at_s, min(count, keep)) for at_s, count in self._durable]
            while self.iterations > keep:
                redone_s += self._take_back(self._done[-1], self.iterations - keep)
            self._since_checkpoint = 0
        return redone_s

    def _take_back(self, last: _Iterations, surplus: int) -> float:
        """Take back at most ``surplus`` of the ``last`` iterations, and return their computing time in seconds."""
        taken = min(surplus, last.count)
        computing_s, reduced_s = (each * taken / last.count for each in (last.computing_s, last.reduced_s))
        last.computing_s -= computing_s
        last.reduced_s -= reduced_s
        last.count -= taken
        last.end_s -= taken * last.running.iteration_s
        self.iterations -= taken
        if not last.count:
            self._done.pop()
        return self._lose(computing_s, reduced_s)

    def _lose(self, computing_s: float, reduced_s: float) -> float:
        self._seconds["computing"] -= computing_s
        self._seconds["reduced"] -= reduced_s
        self._seconds["redone"] += computing_s + reduced_s
        return computing_s + reduced_s

    def _spend(self, category: Category, seconds: float) -> None:
        self._seconds[category] += seconds
        self.at_s += seconds

    def outcome(self, policy: str, node_s: float) -> Outcome:
        """Return the result so far. The iteration in flight does not count yet; nor does a recovery that goes on."""
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
