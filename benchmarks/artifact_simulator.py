"""Accounting of the simulator that made Oobleck's Table 2, written again from its rules.

The simulator (SymbioticLab/Oobleck, branch sosp23-artifact, tools/simulator) counts differently from a real job and
from ``ftd replay``; these rules are needed to find the published figures, and nothing else uses them:

* Times are whole milliseconds. Nodes are ready 45 s after they were added; then the job starts with its pause.
* A failure begins a pause, but the iterations of the old configuration *run on during the pause* and count, if they end
  before it does. The iteration that is in flight at the end of the pause is lost.
* The mean begins at the job's start and ends with the last iteration before the last removal, not at a fixed time.
* Oobleck: every failure takes the model's pause, and each iteration of the present nodes takes batch / throughput.
* Bamboo: pipelines have 12 stages. A failed stage is computed by the stage before it; the iteration in which this
  happens takes half of its remaining time longer, and those after it 1.5 times as long. At the end of an iteration in
  which a node computes two stages, all nodes reconfigure. If a node that computes two stages fails, or the stage
  before it does so already, the job starts again. Idle nodes replace failed ones only when it reconfigures, and the
  failure of an idle node slows iterations just as much.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

READY_MS = 45_000
STAGES = 12
SLOWDOWN = 1.5
RESTART_MS = 30_000
"""Pause of Bamboo when it starts again."""

Removals = Sequence[tuple[int, str]]
"""Times in milliseconds, ascending, and names of removed nodes."""


def oobleck_samples_per_s(
    throughput: Callable[[int], float], batch: float, pause_s: float, nodes: int, removals: Removals
) -> float:
    """Return the mean throughput of Oobleck.

    :param throughput: samples per second by the number of nodes.
    :param nodes: number of nodes at the start.
    """
    pause = round(pause_s * 1e3)
    begin = start = last = READY_MS + pause
    samples = 0.0
    for lost, (at, _) in enumerate(removals):
        final = lost == len(removals) - 1
        end = at if final else at + pause
        rate = throughput(nodes - lost)
        if rate:
            iteration = int(batch / rate * 1e3)
            count = max(0, (end - begin - 1) // iteration)
            samples += count * batch
            last = begin + count * iteration if count else last
        begin = end
    return samples / (last - start) * 1e3 if last > start else 0.0


@dataclass(slots=True)
class _Bamboo:
    """State of Bamboo's simulation."""

    throughput: Callable[[int], float]
    batch: float
    reconfigure: int
    stages: dict[str, list[tuple[int, int]]]
    """Stages that each present node computes, as (pipeline, stage)."""
    pipelines: int = 0
    idle: int = 0
    iteration: int = 0
    version: int = 0
    running: bool = False
    participants: list[str] = field(default_factory=list)
    """Nodes that take part in the reconfiguration under way."""
    failure: tuple[int, int] | None = None
    """Iterations and time at the first failure since the last reconfiguration."""
    extended: bool = False
    """Whether the iteration of that failure was made longer."""
    count: int = 0
    start: int | None = None
    last: int = 0
    events: list[tuple[int, int, int | str]] = field(default_factory=list)

    def begin(self, at: int, pause: int, kind: int) -> None:
        self.running = False
        self.participants = list(self.stages)
        heapq.heappush(self.events, (at + pause, kind, 0))

    def end_pause(self, at: int, kind: int) -> None:
        if any(node not in self.stages for node in self.participants):
            self.begin(at, RESTART_MS if kind == _RESTARTED else self.reconfigure, kind)
            return
        self.pipelines = len(self.participants) // STAGES
        places = [(pipeline, stage) for pipeline in range(self.pipelines) for stage in range(STAGES)]
        for index, node in enumerate(self.participants):
            self.stages[node] = [places[index]] if index < len(places) else []
        self.idle = len(self.participants) - len(places)
        self.failure, self.extended, self.version = None, False, self.version + 1
        if self.pipelines:
            self.running = True
            self.iteration = int(self.batch / self.throughput(len(self.stages)) * 1e3)
            if self.start is None:
                self.start = self.last = at
            self.compute(at)

    def compute(self, at: int) -> None:
        heapq.heappush(self.events, (at + self.iteration, _COMPUTED, self.version))

    def remove(self, at: int, node: str) -> None:
        stages = self.stages.pop(node)
        if stages:
            pipeline, stage = stages[0]
            before = (pipeline, (stage - 1) % STAGES)
            backup = next((other for other in self.stages.values() if before in other), None)
            if len(stages) > 1 or (backup is not None and len(backup) > 1):
                self.begin(at, RESTART_MS, _RESTARTED)
                return
            if backup is not None:
                backup.append((pipeline, stage))
        if self.running and self.failure is None:
            self.failure, self.extended = (self.count, at), False
            self.iteration = int(self.iteration * SLOWDOWN)

    def end_iteration(self, at: int, version: int) -> None:
        if version != self.version:
            return
        if self.failure is not None and not self.extended and self.failure[0] == self.count:
            self.extended = True
            later = at + int((at - self.failure[1]) * (SLOWDOWN - 1))
            heapq.heappush(self.events, (later, _COMPUTED, version))
            return
        self.count, self.last = self.count + 1, at
        doubled = sum(len(stages) > 1 for stages in self.stages.values())
        active = self.pipelines * STAGES - doubled
        if doubled or (active + self.idle) // STAGES > self.pipelines:
            self.begin(at, self.reconfigure, _RECONFIGURED)
        else:
            self.compute(at)


@dataclass(frozen=True, slots=True)
class _HeapEvent:
    """Event whose order is that of its time and kind alone, so that a heap decides among equal ones."""

    at: int
    kind: int
    node: str

    def __lt__(self, other: "_HeapEvent") -> bool:
        return (self.at, self.kind) < (other.at, other.kind)


def _heap_order(nodes: Sequence[str], removals: Removals) -> tuple[list[str], list[str]]:
    """Return the nodes in the orders in which they were added and became ready.

    All do so at the same time, and the simulator's heap decides: which node has which stage follows from it.
    """
    add, remove, become_ready, start = range(4)
    heap: list[_HeapEvent] = []
    for node in nodes:
        heapq.heappush(heap, _HeapEvent(0, add, node))
    for at, node in removals:
        heapq.heappush(heap, _HeapEvent(at, remove, node))
    heapq.heapify(heap)  # The simulator does so, too, which permutes equal events.
    added: list[str] = []
    ready: list[str] = []
    while len(ready) < len(nodes):
        event = heapq.heappop(heap)
        if event.kind == add:
            added.append(event.node)
            heapq.heappush(heap, _HeapEvent(READY_MS, become_ready, event.node))
        elif event.kind == become_ready:
            if not ready:
                heapq.heappush(heap, _HeapEvent(READY_MS + RESTART_MS, start, ""))
            ready.append(event.node)
    return added, ready


# Kinds of events, in the order in which those of one millisecond happen.
_REMOVED, _RESTARTED, _RECONFIGURED, _COMPUTED = range(4)


def bamboo_samples_per_s(
    throughput: Callable[[int], float], batch: float, pause_s: float, nodes: Sequence[str], removals: Removals
) -> float:
    """Return the mean throughput of Bamboo.

    :param throughput: samples per second by the number of nodes.
    :param pause_s: time of a reconfiguration.
    :param nodes: nodes at the start, in their order.
    """
    added, ready = _heap_order(nodes, removals)
    job = _Bamboo(throughput, batch, round(pause_s * 1e3), {node: [] for node in added})
    job.events = [(at, _REMOVED, node) for at, node in removals]
    heapq.heapify(job.events)
    job.begin(READY_MS, RESTART_MS, _RESTARTED)
    job.participants = ready
    end = removals[-1][0]
    while job.events:
        at, kind, what = heapq.heappop(job.events)
        if at >= end:
            break
        if kind == _REMOVED:
            job.remove(at, str(what))
        elif kind == _COMPUTED:
            job.end_iteration(at, int(what))
        else:
            job.end_pause(at, kind)
    if job.start is None or job.last <= job.start:
        return 0.0
    return job.count * batch / (job.last - job.start) * 1e3
