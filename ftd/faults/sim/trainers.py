"""Trainers as the protocol sees them: what they hold, where in a step they are, who waits for whom.

State is a *version*: the model at step 0, or a version plus one step computed by one generation's group.
Two trainers have equal state exactly when their versions are equal, so that redoing a step gives another
version, as different rounding does. A step's vote carries its version as the loss.

Under ZeRO-1 ``layers`` are those whose parameters are whole, and ``parts`` is the state of the optimizer. An
update makes what a rank keeps of it new; layers are whole again once their owners have gathered them.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from ftd.faults.sim.arena import Shard
from ftd.faults.sim.sharding import all_of, is_sharded
from planner.values import Device, StatePart
from statemachine.agent.events import TrainerReported
from statemachine.messages.cluster import Resume
from statemachine.messages.common import Finished, Snapping, SnapshotFailed
from statemachine.messages.trainer import MachineReport, Quiesced, Snapped, Stepped
from statemachine.messages.values import Evaluation, HeldSnapshot, QuiesceMode

if TYPE_CHECKING:
    from ftd.faults.sim.group import Group
    from ftd.faults.sim.node import SimNode

Phase = Literal[
    "idle", "quiesced", "joining", "moving", "evaluate", "sum", "compute", "vote", "commit", "gather",
    "stopped", "done",
]  # fmt: skip
EVALUATION_BATCHES = 2
"""Held-out batches of one evaluation."""
STEPPING = frozenset({"evaluate", "sum", "compute", "vote", "commit", "gather"})


class SimTrainer:
    """One trainer process."""

    __slots__ = (
        "_backlog",
        "alive",
        "asleep",
        "built",
        "committed",
        "copy",
        "device",
        "evaluate_every",
        "evaluated",
        "evaluation",
        "flag",
        "frozen",
        "generation",
        "gradients",
        "group",
        "layers",
        "lineage",
        "node",
        "parts",
        "phase",
        "pid",
        "progress",
        "rank",
        "ready",
        "snap_flag",
        "steps",
        "token",
        "version",
    )  # fmt: skip

    def __init__(self, node: "SimNode", device: int, pid: int) -> None:
        self.node, self.device, self.pid = node, device, pid
        self.alive = True
        self.frozen = False
        """SIGSTOP: no beat, no progress."""
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        """What it does when it goes on."""
        self.asleep = False
        """The main thread sleeps; the control thread beats."""
        self.built = False
        self.steps = 0
        self.evaluate_every = 0
        """Evaluate after every so many steps and after the last one; 0: never."""
        self.evaluated = 0
        """The newest step whose evaluation is known."""
        self.evaluation: Evaluation | None = None
        """Of the state after ``committed``, if the present group evaluated it."""
        self.phase: Phase = "idle"
        self.generation = 0
        self.committed = 0
        self.version = 0
        self.ready: int | None = None
        self.gradients: tuple[int, frozenset[int], frozenset[StatePart]] = (0, frozenset(), frozenset())
        """Generation, layers and kept parts of the complete gradients, while ``ready``."""
        self.layers: dict[int, int] = {}
        """Version of each layer held completely."""
        self.parts: dict[StatePart, int] = {}
        """Under ZeRO-1, version of each part."""
        self.group: Group | None = None
        self.rank = -1
        self.flag: int | None = None
        """Generation of a Quiesce(boundary) that waits for the end of a step."""
        self.token = 0
        """Counts changes of mind: what was scheduled before does not count."""
        self.progress = 0
        self.lineage = 0
        self.snap_flag = False
        self.copy: Shard | None = None
        """What is being copied into host memory."""

    @property
    def able(self) -> bool:
        return self.alive and not self.frozen and not self.asleep

    def build(self, layers: int, steps: int, *, evaluate_every: int, sharded: bool) -> None:
        self.built, self.steps, self.evaluate_every = True, steps, evaluate_every
        self.layers = dict.fromkeys(range(layers), 0)
        self.parts = all_of(self.layers) if sharded else {}

    # --- a process that is stopped ----------------------------------------------------------------

    def do(self, action: Callable[..., None], *arguments: Any) -> None:
        """Now, or where it is stopped, when it goes on."""
        if self.frozen:
            self._backlog.append((action, arguments))
        else:
            action(*arguments)

    def _later(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        self.node.world.at(delay_s, self.do, action, *arguments)

    def wake(self) -> None:
        if not self.alive or not self.frozen:
            return
        self.frozen = False
        backlog, self._backlog = self._backlog, []
        for action, arguments in backlog:
            self.do(action, *arguments)

    # --- instructions ---------------------------------------------------------------------------

    def quiesce(self, generation: int, mode: QuiesceMode) -> None:
        if not self.able or generation <= self.generation:
            return
        if mode == "boundary" and self.phase in STEPPING:
            self.flag = generation
            return
        self.flag = None
        self._leave()
        self.generation = generation
        self.phase = "quiesced"
        self._later(self.node.world.between(0.0005, 0.03), self._report, self.token)

    def _leave(self) -> None:
        """Out of the group. An APPLY that has begun is finished, or given up in time."""
        group, self.group = self.group, None
        self.token += 1
        if group is None:
            return
        if self.phase == "commit" and self.node.world.chance(0.5):
            self._apply(group)
            if self.layers and self.alive:  # under ZeRO-1 it is over before the parts were gathered
                self._say_stepped(group)
        self.snap_flag = False
        if self.copy is not None:  # at the speed of memory, or there is no time for it
            self._copied(self.copy, self.node.world.chance(0.7))
        group.left(self)

    def _report(self, token: int) -> None:
        if not self.able or token != self.token:
            return
        step_of = self.node.versions.step
        held = tuple(layer for layer, v in self.layers.items() if step_of[v] == self.committed)
        vote = self.node.versions.vote(self.version) if self.committed else None
        report = Quiesced(
            generation=self.generation,
            committed_step=self.committed,
            ready_step=self.ready,
            vote=vote,
            held=held,
            lineage=self.lineage,
            parts=tuple(sorted(part for part, v in self.parts.items() if step_of[v] == self.committed)),
            evaluation=self.evaluation,
        )
        self.report(report)

    def report(self, report: MachineReport) -> None:
        """Send a message to the node."""
        node = self.node
        node.feed(TrainerReported(at=node.world.now, cause="trainer", device=self.device, report=report))

    def resume(self, resume: Resume, staged: dict[int, int] | None = None) -> None:
        """Roll forward or drop the step in flight, then meet the others, or wait without a rank.

        ``staged``: versions of the layers restored from a snapshot.
        """
        if not self.able or resume.generation != self.generation or self.phase != "quiesced":
            return
        node = self.node
        node.invariants.resumes(self, resume)
        rank = next(
            (r for r, d in enumerate(resume.plan.devices) if d.node == node.name and d.index == self.device),
            -1,
        )
        if self.lineage != resume.lineage:
            # All it has is of a past that was undone.
            self._drop(resume)
            self.lineage = resume.lineage
        if staged is not None:
            self._drop(resume)
            self.layers, self.parts = dict(staged), all_of(staged) if is_sharded(resume) else {}
        elif self.ready is not None and self.ready == resume.step:
            self._update(*self.gradients)
        elif self.committed != resume.step and rank >= 0:
            self._drop(resume)  # Stale: everything comes from others.
        self.ready = self.evaluation = None
        self.evaluated = resume.evaluated
        self.rank, self.token = rank, self.token + 1
        if rank < 0:
            self.phase = "idle"
            return
        node.arena.forget(self.device, resume.step)
        self.phase = "joining"
        self.group = node.invariants.group(node.world, resume, self)
        self.group.join(self)

    def _drop(self, resume: Resume) -> None:
        self.layers, self.parts, self.ready, self.committed = {}, {}, None, resume.step
        self.node.invariants.resumes_from(resume.vote)
        self.version = int(resume.vote.loss) if resume.vote is not None else 0

    def _update(self, generation: int, layers: frozenset[int], kept: frozenset[StatePart]) -> None:
        """The optimizer's step. What it does not make new is dropped; under ZeRO-1 only the part of a lone
        owner makes the layer whole."""
        child = self.node.versions.child
        alone = {part.layer for part in kept if part.is_whole}
        whole = alone if self.parts else layers
        self.layers = {n: child(v, generation) for n, v in self.layers.items() if n in whole}
        self.parts = {part: child(v, generation) for part, v in self.parts.items() if part in kept}
        self.version = child(self.version, generation)
        self.committed += 1

    # --- steps ------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Evaluate where that is due, else compute the next step, if there is one."""
        assert self.group is not None
        if self._evaluation_due:
            self.evaluate(1)
        elif self.committed >= self.steps:
            self.phase = "done"
            self._later(0.01, self._done, self.token, self.group.generation)
        else:
            self.start_step()

    @property
    def _evaluation_due(self) -> bool:
        step, every = self.committed, self.evaluate_every
        due = every > 0 and step > 0 and (step % every == 0 or step == self.steps)
        return due and self.evaluated < step

    def evaluate(self, batch: int) -> None:
        """Compute held-out batch ``batch`` (from 1)."""
        self.phase = "evaluate"
        self.progress += 1
        world, pace = self.node.world, self.node.pace
        computing_s = pace.step_s * world.between(0.2, 0.5) * self.node.slowness
        self._later(computing_s, self._computed_batch, self.token, batch)

    def _computed_batch(self, token: int, batch: int) -> None:
        if token == self.token and self.able and self.group is not None:
            self.phase = "sum"
            self.group.summed(self, batch, self.flag is not None)

    def pass_sum(self, token: int, batch: int, stop: bool) -> None:
        """Every rank has computed the batch."""
        if token != self.token or not self.able or self.group is None:
            return
        last = batch == EVALUATION_BATCHES
        if last:
            self.evaluated = self.committed
            self.evaluation = self.node.versions.evaluation(self.version, self.group.generation)
        if stop:
            self._stop()
        elif last:
            self.go_on()
        else:
            self.evaluate(batch + 1)

    def _stop(self) -> None:
        """Somebody wants everybody to stop; the order itself may come a little later."""
        self._leave()
        self.phase = "stopped"
        if self.flag is not None:
            generation, self.flag = self.flag, None
            self.quiesce(generation, "boundary")

    def start_step(self) -> None:
        self.phase = "compute"
        self.progress += 1
        world, pace = self.node.world, self.node.pace
        computing_s = pace.step_s * (1 + pace.imbalance * world.rng.random()) * self.node.slowness
        self._later(computing_s, self._computed, self.token)

    def _computed(self, token: int) -> None:
        if token != self.token or self.group is None:
            return
        if not self.able:
            return
        self.phase = "vote"
        self.ready = self.committed + 1
        self.gradients = (self.group.generation, self.group.owned[self.rank], self.group.kept[self.rank])
        snap, self.snap_flag = self.snap_flag, False
        self.group.arrived(self, self.flag is not None, snap)

    def commit(self, token: int, stop: bool, snap: bool) -> None:
        if token != self.token or not self.able or self.group is None:
            return
        group = self.group
        if self.copy is not None:
            self._copied(self.copy, True)  # the copy must end before the next APPLY: a stall
        self._apply(group)
        self.do(self._applied, token, group, stop, snap)

    def _applied(self, token: int, group: "Group", stop: bool, snap: bool) -> None:
        """Nobody knows yet, and it may be the last that it did."""
        if token != self.token or not self.able:
            return
        if group.sharded and len(group.resume.plan.pipelines) > 1:
            self.phase = "gather"
            group.applied(self, stop, snap)
        else:
            self.committed_whole(token, stop, snap)

    def committed_whole(self, token: int, stop: bool, snap: bool) -> None:
        """The update is complete, and under ZeRO-1 gathered."""
        if token != self.token or not self.able or self.group is None:
            return
        group = self.group
        if self.phase == "gather":
            self.layers = dict.fromkeys(group.owned[self.rank], self.version)
        self._say_stepped(group)
        if snap:
            self._begin_copy(group)
        if stop:
            self._stop()
        else:
            self.go_on()

    def _apply(self, group: "Group") -> None:
        # The first commit of a generation also drops what was kept for the sake of another failure.
        self._update(group.generation, group.owned[self.rank], group.kept[self.rank])
        self.ready = self.evaluation = None
        self.phase = "compute"
        self.node.invariants.commits(self, group)

    def _say_stepped(self, group: "Group") -> None:
        node = self.node
        node.invariants.gathered(self, group)
        self.report(
            Stepped(
                generation=group.generation,
                step=self.committed,
                vote=node.versions.vote(self.version),
                step_s=node.pace.step_s,
                bubble_s=0.0,
                microbatch_ms=group.expected_ms[self.rank] * node.slowness * node.world.between(0.9, 1.1),
            )
        )

    def snap(self, generation: int) -> None:
        if self.able and self.group is not None and self.group.generation == generation:
            self.snap_flag = True

    def snap_last(self, generation: int) -> None:
        """All steps are done: no ballot, and no step to copy it beside."""
        if not self.able or self.group is None or self.group.generation != generation or self.phase != "done":
            return
        self.report(Snapping(generation=generation, step=self.committed))
        self._begin_copy(self.group)

    def _begin_copy(self, group: "Group") -> None:
        node = self.node
        key = HeldSnapshot(job_id=group.resume.job_id, step=self.committed, generation=group.generation)
        mine = frozenset(d.index for d in group.resume.plan.devices if d.node == node.name)
        # The devices of a stage share its layers out.
        share = {
            layer
            for pipeline in group.resume.plan.pipelines
            for stage in pipeline.stages
            for layer in range(stage.first_layer, stage.end_layer)
            if stage.devices[layer % len(stage.devices)] == Device(node=node.name, index=self.device)
        }
        node.arena.begin(self.device, key)
        layers = {layer: version for layer, version in self.layers.items() if layer in share}
        self.copy = Shard(key=key, layers=layers, devices=mine)
        self._later(node.world.between(0.005, 1.5 * node.pace.step_s), self._copied, self.copy, True)

    def _copied(self, copy: "Shard", whole: bool) -> None:
        """The copying ends, well or not."""
        if self.copy is not copy or not self.alive:
            return
        self.copy = None
        node, key = self.node, copy.key
        if not whole or node.world.chance(node.pace.full):
            self.report(SnapshotFailed(generation=key.generation, step=key.step, detail="no room"))
            return
        node.arena.commit(self.device, copy)
        self.report(
            Snapped(
                generation=key.generation,
                step=key.step,
                size_bytes=100,
                copy_s=0.01,
                stall_s=0.0,
                idle_bytes=100,
            )
        )

    def _done(self, token: int, generation: int) -> None:
        if not self.able or token != self.token:
            return
        if self.flag is not None:
            requested, self.flag = self.flag, None
            self.quiesce(requested, "boundary")
            return
        digests = {layer: str(v) for layer, v in self.layers.items()}
        self.report(
            Finished(
                generation=generation,
                step=self.committed,
                digests=digests,
                evaluation=self.evaluation,
            )
        )

    def die(self) -> None:
        self.alive = False
        group, self.group = self.group, None
        self.token += 1
        if group is not None:
            group.left(self)
