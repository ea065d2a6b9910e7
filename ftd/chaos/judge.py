"""Was what a scenario expects so? Judged from public events and states, of a real cluster or a simulated one.

Pure: whoever plays the scenario says when faults strike and hands on what the cluster says, each with its
moment (seconds on one clock). A fault's expectations are about its *window*: from its strike until the next
fault strikes, or until the end. Faults that strike within ``TOGETHER_S`` share one. ``ResumedWithin`` alone
looks past the window's end, since what strikes during a recovery makes that recovery longer.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, assert_never

from ftd.chaos.values import (
    Cause,
    Expectation,
    Fault,
    Finishes,
    InState,
    NodeStates,
    NotSeen,
    Recoveries,
    ResumedWithin,
    SameLosses,
    Scenario,
    Seen,
    StepsLost,
    StepsRecomputed,
    Tier,
)

Json = Mapping[str, Any]
Status = Literal["met", "failed", "skipped"]

TOGETHER_S = 0.1
"""Faults that strike this close together are one blow."""
_FAILURES = frozenset({"node_lost", "trainer_lost", "connection_lost", "resumed"})
_ROLLBACK_TIERS = frozenset({"memory", "decoded", "buddy", "persistent"})
_ENDS = frozenset({"JobFinished", "JobFailed", "JobStopped"})
_STANDSTILLS = frozenset({"PAUSED", "FINISHED", "FAILED", "WAITING"})
"""Phases in which no step follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of one expectation."""

    fault: str
    """Id of the fault whose expectation it is; empty: the scenario's."""
    what: str
    """The expectation in words."""
    status: Status
    detail: str
    """What was seen instead, or by how much it was met."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Strike:
    fault: Fault
    at_s: float
    number: int
    """Of events seen before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """An event or a state, in the order of arrival."""

    at_s: float
    event: Json | None = None
    state: Json | None = None


@dataclass(slots=True, kw_only=True)
class Judge:
    """Gathers what happens to one scenario's cluster; ``conclude`` says what was met.

    :param reference: loss of each step in an undisturbed run of the same job, for ``SameLosses``.
    """

    scenario: Scenario
    reference: Mapping[int, float | None] = field(default_factory=dict)
    _told: list[_Told] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)
    _strikes: list[_Strike] = field(default_factory=list)
    _skipped: dict[str, str] = field(default_factory=dict)
    _unjudged: dict[Expectation, str] = field(default_factory=dict)
    _refused: dict[str, str] = field(default_factory=dict)
    _news: tuple[Any, ...] = ()
    _settled_at: int | None = None
    """The committed step at which nothing was open any more."""
    _step: int = 0
    _ended: bool = False

    # --- what happens ------------------------------------------------------------------------------

    def struck(self, fault: Fault, at_s: float) -> None:
        """A fault strikes now."""
        self._strikes.append(_Strike(fault=fault, at_s=at_s, number=len(self._told)))
        self._settled_at = None

    def refused(self, fault: Fault, why: str) -> None:
        """It could not be done: the scenario is not what was played."""
        self._refused[fault.id] = why

    def skipped(self, fault: Fault, why: str) -> None:
        """It was left out on purpose; what it expects is not judged."""
        self._skipped[fault.id] = why

    def unjudged(self, expectation: Expectation, why: str) -> None:
        """Whoever plays the scenario cannot see what this is about."""
        self._unjudged[expectation] = why

    def on_event(self, event: Json, at_s: float) -> None:
        """One event envelope; a second delivery changes nothing."""
        identity = str(event.get("id") or "")
        if identity and identity in self._seen:
            return
        self._seen.add(identity)
        self._told.append(_Told(at_s=at_s, event=event))
        name = event.get("event")
        if name == "StepCommitted":
            self._step = int(event["step"])
        elif name == "RolledBack" and self._settled_at is not None:
            self._settled_at = min(self._settled_at, int(event["details"]["to_step"]))
        self._ended |= name in _ENDS
        if name != "StepCommitted":  # Most events are steps, and none of them is waited for.
            self._look()

    def on_state(self, state: Json, at_s: float) -> None:
        """The cluster's state. That of a coordinator that is away tells nothing."""
        news = (state.get("phase"), {name: n.get("state") for name, n in (state.get("nodes") or {}).items()})
        if state.get("phase") == "UNREACHABLE" or news == self._news:
            return
        self._news = news
        self._told.append(_Told(at_s=at_s, state=state))
        self._look()

    def _look(self) -> None:
        if self._settled_at is None and not self._waits_for():
            self._settled_at = self._step

    def _waits_for(self) -> list[str]:
        """What may still come and has not: of faults and of expectations that only time can meet."""
        done = {strike.fault.id for strike in self._strikes} | set(self._skipped) | set(self._refused)
        open_ = [f"fault {fault.id}" for fault in self.scenario.faults if fault.id not in done]
        if not open_:
            waited = (Seen, ResumedWithin, Cause, NodeStates, InState, Finishes)
            open_ = [
                str(expectation)
                for fault, expectation in self._expectations()
                if isinstance(expectation, waited) and self._judge(fault, expectation)[0] != "met"
            ]
        return open_

    # --- what it comes to --------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """Every fault has struck, what is expected has come, and ``steps_after`` steps followed; or the job
        is over, and nothing can come any more."""
        if self._ended:
            return True
        if self._settled_at is None:
            return False
        return self._stands_still or self._step >= self._settled_at + self.scenario.steps_after

    @property
    def waiting_for(self) -> str:
        """In words, what has not come yet."""
        left = self._waits_for()
        if left:
            return ", ".join(left)
        return "" if self.settled else f"{self.scenario.steps_after} more steps"

    @property
    def _stands_still(self) -> bool:
        """The scenario is to end where no step follows."""
        last = max((strike.at_s for strike in self._strikes), default=0.0) - TOGETHER_S
        at_the_end = [e for s in self._strikes if s.at_s >= last for e in s.fault.expect]
        return any(
            isinstance(e, Finishes) or (isinstance(e, InState) and e.phase in _STANDSTILLS)
            for e in (*at_the_end, *self.scenario.expect)
        )

    def conclude(self) -> tuple[Verdict, ...]:
        """All that was expected, in the scenario's order; and that each fault struck, and steps followed."""
        verdicts: list[Verdict] = []
        struck = {strike.fault.id for strike in self._strikes}
        for fault in self.scenario.faults:
            if fault.id in self._skipped:
                verdicts.append(self._verdict(fault.id, str(fault), "skipped", self._skipped[fault.id]))
                verdicts += [self._verdict(fault.id, str(e), "skipped", "its fault is") for e in fault.expect]
                continue
            if fault.id in self._refused or fault.id not in struck:
                why = self._refused.get(fault.id, "never happened: its moment did not come")
                verdicts.append(self._verdict(fault.id, str(fault), "failed", why))
            verdicts += [self._verdict(fault.id, str(e), *self._judge(fault, e)) for e in fault.expect]
        verdicts += [self._verdict("", str(e), *self._judge(None, e)) for e in self.scenario.expect]
        if not self._stands_still and self.scenario.steps_after:
            verdicts.append(self._goes_on())
        return tuple(verdicts)

    @staticmethod
    def _verdict(fault: str, what: str, status: Status, detail: str) -> Verdict:
        return Verdict(fault=fault, what=what, status=status, detail=detail)

    def _goes_on(self) -> Verdict:
        """At least that much follows the last fault."""
        begin = max((strike.number for strike in self._strikes), default=0)
        told = (t.event for t in self._told[begin:])
        steps = {int(event["step"]) for event in told if event and event["event"] == "StepCommitted"}
        finished = any(_named(t, "JobFinished") for t in self._told)
        wanted = self.scenario.steps_after
        enough = len(steps) >= wanted or finished
        what = f"{wanted} more steps behind the last fault"
        return self._verdict("", what, "met" if enough else "failed", f"{len(steps)} followed")

    def _expectations(self) -> list[tuple[Fault | None, Expectation]]:
        of_faults = [(fault, e) for fault in self.scenario.faults for e in fault.expect]
        played = [(f, e) for f, e in of_faults if f.id not in self._skipped and f.id not in self._refused]
        return [*played, *((None, expectation) for expectation in self.scenario.expect)]

    def _window(self, fault: Fault | None) -> tuple[float, int, int]:
        """When a fault struck, and from where to where what was told is about it; of the whole scenario, the
        moment of its last fault, and everything."""
        if fault is None:
            return max((s.at_s for s in self._strikes), default=math.nan), 0, len(self._told)
        mine = [s for s in self._strikes if s.fault.id == fault.id]
        if not mine:
            return math.nan, 0, 0
        first = mine[0]
        later = [s.number for s in self._strikes if s.at_s > first.at_s + TOGETHER_S]
        return first.at_s, first.number, min(later, default=len(self._told))

    def _judge(self, fault: Fault | None, expectation: Expectation) -> tuple[Status, str]:
        if expectation in self._unjudged:
            return "skipped", self._unjudged[expectation]
        struck_s, begin, end = self._window(fault)
        if math.isnan(struck_s) and (fault is not None or isinstance(expectation, ResumedWithin)):
            return "failed", "the fault did not strike"
        if isinstance(expectation, ResumedWithin):
            since = begin if fault is not None else max(s.number for s in self._strikes)
            return _resumed(expectation, struck_s, self._told[since:])
        window = self._told[begin:end]
        recoveries = _recoveries(window)
        match expectation:
            case StepsLost():
                lost = sum(int(r["rolled_back_steps"]) for r in recoveries)
                return _at_most(lost, expectation.most, "undone")
            case StepsRecomputed():
                again = sum(int(r["recomputed_steps"]) for r in recoveries)
                return _at_most(again, expectation.most, "computed again")
            case Recoveries():
                causes = ", ".join(str(r["cause"]) for r in recoveries)
                return _at_most(len(recoveries), expectation.most, f"seen{f' ({causes})' if causes else ''}")
            case Tier():
                return _tier(expectation, recoveries)
            case Cause():
                causes = ", ".join(str(r["cause"]) for r in recoveries) or "no recovery"
                return _met(any(r["cause"] in expectation.allowed for r in recoveries), causes)
            case Seen() | NotSeen():
                count = sum(1 for told in window if _named(told, expectation.event))
                return _met((count > 0) == isinstance(expectation, Seen), f"seen {count} times")
            case NodeStates() | InState():
                return _state(expectation, self._told[:end])
            case Finishes():
                ends = [told.event for told in self._told if told.event and told.event["event"] in _ENDS]
                said = f"{ends[-1]['event']}: {ends[-1].get('reason') or ''}" if ends else "it has not ended"
                return _met(bool(ends) and ends[-1]["event"] == "JobFinished", said.rstrip(": "))
            case SameLosses():
                return _losses(expectation, window, self.reference)
            case _:
                assert_never(expectation)


def _met(met: bool, detail: str) -> tuple[Status, str]:
    return "met" if met else "failed", detail


def _at_most(count: int, most: int, what: str) -> tuple[Status, str]:
    return _met(count <= most, f"{count} {what}")


def _named(told: _Told, name: str) -> bool:
    return told.event is not None and told.event["event"] == name


def _recoveries(window: list[_Told]) -> list[Json]:
    """Without the job's start."""
    found = [t.event["details"]["recovery"] for t in window if t.event and _named(t, "RecoveryCompleted")]
    return [recovery for recovery in found if recovery["cause"] != "start"]


def _resumed(expectation: ResumedWithin, struck_s: float, since: list[_Told]) -> tuple[Status, str]:
    first = next((told.at_s for told in since if _recoveries([told])), None)
    if first is None:
        return "failed", "it has not resumed"
    took_s = first - struck_s
    return _met(took_s <= expectation.limit_s, f"after {took_s:.3f} s")


def _tier(expectation: Tier, recoveries: list[Json]) -> tuple[Status, str]:
    """Of the recoveries from failures; a node that comes back afterwards gets its state from live ones."""
    failures = [r for r in recoveries if r["cause"] in _FAILURES or r["tier"] in _ROLLBACK_TIERS]
    tiers = [str(r["tier"]) for r in failures or recoveries]
    if not tiers:
        return "failed", "there was no recovery"
    return _met(all(tier in expectation.allowed for tier in tiers), ", ".join(tiers))


def _state(expectation: NodeStates | InState, told: list[_Told]) -> tuple[Status, str]:
    """The newest state there is."""
    state = next((t.state for t in reversed(told) if t.state is not None), None)
    if state is None:
        return "failed", "no state was seen"
    if isinstance(expectation, InState):
        return _met(state.get("phase") == expectation.phase, str(state.get("phase")))
    nodes = state.get("nodes") or {}
    found = {node: str((nodes.get(node) or {}).get("state", "unknown")) for node, _ in expectation.states}
    said = ", ".join(f"{node} {state}" for node, state in found.items())
    return _met(all(found[node] == wanted for node, wanted in expectation.states), said)


def _losses(
    expectation: SameLosses, window: list[_Told], reference: Mapping[int, float | None]
) -> tuple[Status, str]:
    """A loss that is no number equals another such."""
    compared = 0
    for told in window:
        if told.event is None or not _named(told, "StepCommitted") or told.event["step"] not in reference:
            continue
        step, loss = told.event["step"], told.event["details"].get("loss")
        wanted = reference[step]
        both = wanted is not None and loss is not None
        if both and not math.isclose(wanted or 0.0, loss, rel_tol=expectation.relative, abs_tol=1e-12):
            return "failed", f"step {step} has loss {loss}, undisturbed {wanted}"
        if not both and wanted is not loss:
            return "failed", f"step {step} has loss {loss}, undisturbed {wanted}"
        compared += 1
    return _met(compared > 0, f"{compared} steps compared")
