"""Trainers as the protocol sees them: what they hold, where in a step they are, and who waits for whom.

The trainers of one generation are a ``SimGroup``: they meet, move state and vote; none goes on without the
others.

State is a *version*: the model at step 0, or a version plus one step computed by one generation's group.
Two trainers have equal state exactly when their versions are equal. So redoing a step gives another
version, as different rounding does. A step's vote carries its version as the loss.

Under ZeRO-1 ``layers`` are those whose parameters are complete, and ``parts`` is the state of the
optimizer. An update makes new versions of what a rank keeps; layers are complete again once their owners
have gathered them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal

from ftd.faults.sim.arena import SimShard
from ftd.faults.sim.host import SimHost
from ftd.faults.sim.oracle import Oracle
from ftd.faults.sim.sharding import all_of, is_sharded, kept_parts, moves
from ftd.faults.sim.world import InvariantViolation
from ftd.node.ports import TrainerProcess
from planner.changes.parts import incomplete
from planner.stages.layers import expected_ms
from planner.values import Device, StatePart
from statemachine.cluster.replicas import copies_of
from statemachine.cluster.rules import owned_layers
from statemachine.messages.cluster import Resume
from statemachine.messages.common import (
    Finished,
    PeerSuspected,
    Prepared,
    ReplicaDigests,
    Resumed,
    SnapshotFailed,
    SnapshotStarted,
)
from statemachine.messages.trainer import (
    ModelDescribed,
    PrepareJob,
    Raised,
    Report,
    ResumeRank,
    ShardWritten,
    StagingCorrupted,
    TrainerQuiesced,
    TrainerStepped,
)
from statemachine.messages.values import Evaluation, HeldSnapshot, QuiesceMode
from storage.description import ModelDescription, encode_description

Phase = Literal[
    "idle", "quiesced", "joining", "moving", "evaluate", "sum", "compute", "vote", "commit", "gather",
    "stopped", "done",
]  # fmt: skip
DESCRIPTION = encode_description(ModelDescription())
"""The description of every simulated model."""
EVALUATION_BATCHES = 2
"""The number of held-out batches of one evaluation."""
STEPPING = frozenset({"evaluate", "sum", "compute", "vote", "commit", "gather"})


@dataclass(slots=True, eq=False)
class SimTrainer:
    """One trainer process."""

    node: SimHost
    groups: "SimGroups"
    device: int
    pid: int
    process: TrainerProcess | None = None
    """The process as the daemon knows it, once it has attached."""
    alive: bool = True
    frozen: bool = False
    """Whether the process is stopped (SIGSTOP): no heartbeat, no progress."""
    asleep: bool = False
    """Whether the main thread sleeps while the control thread sends heartbeats."""
    has_arena: bool = False
    """Whether it was given memory for snapshots."""
    steps: int = 0
    evaluate_every: int = 0
    """The interval of evaluations, which also follow the last step; 0 means never."""
    compare_every: int = 0
    """The interval of comparisons of replicas; 0 means never."""
    compare: bool = False
    """Whether the committed state is to be compared with that of other owners."""
    evaluated: int = 0
    """The newest step whose evaluation is known."""
    evaluation: Evaluation | None = None
    """The evaluation of the state after ``committed``, if the current group computed it."""
    phase: Phase = "idle"
    generation: int = 0
    committed: int = 0
    version: int = 0
    ready: int | None = None
    gradients: tuple[int, frozenset[int], frozenset[StatePart]] = (0, frozenset(), frozenset())
    """Generation, layers and kept parts of the complete gradients, while ``ready`` is set."""
    layers: dict[int, int] = field(default_factory=dict)
    """The version of each layer that is held completely."""
    parts: dict[StatePart, int] = field(default_factory=dict)
    """The version of each part under ZeRO-1."""
    group: "SimGroup | None" = None
    rank: int = -1
    flag: int | None = None
    """The generation of a Quiesce(boundary) that waits for the end of a step."""
    token: int = 0
    """Number of changes of the trainer's course. Actions that were scheduled before a change are ignored."""
    progress: int = 0
    lineage: int = 0
    snap_flag: bool = False
    copy: SimShard | None = None
    """The shard that is being copied into host memory."""
    _backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
    """Actions to run when the process continues."""

    @property
    def responsive(self) -> bool:
        return self.alive and not self.frozen and not self.asleep

    def build(self, prepare: PrepareJob) -> None:
        """Build a job's model and report it, unless the build fails."""
        node, training, profile = self.node, prepare.training, self.node.oracle.profile
        if not self.responsive:
            return
        if node.failing_builds > 0:
            node.failing_builds -= 1
            self.report(Raised(where="prepare", detail=f"simulated in {self.pid}"))
            return
        self.steps, self.evaluate_every = training.steps, training.evaluation_every_steps
        self.compare_every, self.has_arena = training.compare_replicas_every, bool(prepare.arena)
        self.layers = dict.fromkeys(range(len(profile.layers)), 0)
        self.parts = all_of(self.layers) if training.zero1 else {}
        if prepare.describe:
            self.report(ModelDescribed(job_id=prepare.job_id, description=DESCRIPTION))
        self.report(Prepared(job_id=prepare.job_id, profile=profile if prepare.profile else None))

    # --- when it acts -----------------------------------------------------------------------------

    def do(self, action: Callable[..., None], *arguments: Any) -> None:
        """Run an action now or, if the process is stopped, when it continues."""
        if self.frozen:
            self._backlog.append((action, arguments))
        else:
            action(*arguments)

    def later(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Schedule an action, unless the trainer's course changes before, or it sleeps or is dead then."""
        self.node.world.call_later(delay_s, self.do, self._go_on_with, self.token, action, *arguments)

    def _go_on_with(self, token: int, action: Callable[..., None], *arguments: Any) -> None:
        if token == self.token and self.responsive:
            action(*arguments)

    def wake(self) -> None:
        if not self.alive or not self.frozen:
            return
        self.frozen = False
        backlog, self._backlog = self._backlog, []
        for action, arguments in backlog:
            self.do(action, *arguments)

    # --- instructions ---------------------------------------------------------------------------

    def quiesce(self, generation: int, mode: QuiesceMode) -> None:
        if not self.responsive or generation <= self.generation:
            return
        if mode == "boundary" and self.phase in STEPPING:
            self.flag = generation
            return
        self.flag = None
        self._leave()
        self.generation = generation
        self.phase = "quiesced"
        self.later(self.node.world.between(0.0005, 0.03), self._report)

    def _leave(self) -> None:
        """Leave the group. An APPLY that has begun is finished, or aborted in time."""
        group, self.group = self.group, None
        self.token += 1
        if group is None:
            return
        if self.phase == "commit" and self.node.world.chance(0.5):
            self._apply(group)
            if self.layers and self.alive:  # Under ZeRO-1 it ends before the parts were gathered.
                self._say_stepped(group)
        self.snap_flag = False
        if self.copy is not None:  # The copy ends at the speed of memory, or there is no time for it.
            self._copied(self.copy, self.node.world.chance(0.7))
        # A flipped bit that nobody found while the group trained cannot be found later for sure.
        sound = self.node.versions.sound
        self.layers = {layer: sound.get(version, version) for layer, version in self.layers.items()}
        group.left(self)

    def _report(self) -> None:
        step_of = self.node.versions.step
        held = tuple(layer for layer, v in self.layers.items() if step_of[v] == self.committed)
        vote = self.node.versions.vote(self.version) if self.committed else None
        report = TrainerQuiesced(
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

    def report(self, report: Report) -> None:
        """Send a message to the node."""
        if self.process is not None:
            self.node.deliver(self.process, report)

    def resume(self, frame: ResumeRank) -> None:
        """Roll forward or drop the step in flight; then meet the others, or wait without a rank."""
        if not self.responsive or frame.generation != self.generation or self.phase != "quiesced":
            return
        node = self.node
        resume = node.resumes[frame.generation]
        self.groups.resumes(self, resume, frame)
        staged: dict[int, int] | None = None
        if frame.restore:
            found = node.staged.get(frame.restore)
            owned = owned_layers(resume.plan)[Device(node=node.name, index=self.device)]
            if found is None or not owned <= found.layers.keys():
                node.oracle.violated(f"{node.name}/{self.device} resumes before its layers are staged")
            elif not owned.isdisjoint(found.corrupt):
                self.report(StagingCorrupted(generation=frame.generation, part="shard", detail="changed"))
                return
            else:
                staged = {layer: found.layers[layer] for layer in sorted(owned)}
        rank = frame.rank
        if self.lineage != resume.lineage:
            # Everything it has belongs to a past that was undone.
            self._drop(resume)
            self.lineage = resume.lineage
        if staged is not None:
            self._drop(resume)
            self.layers, self.parts = dict(staged), all_of(staged) if is_sharded(resume) else {}
        elif self.ready is not None and self.ready == resume.step:
            self._update(*self.gradients)
        elif self.committed != resume.step and rank >= 0:
            self._drop(resume)  # Its state is stale: everything comes from others.
        self.ready = self.evaluation = None
        self.evaluated = resume.evaluated
        self.rank, self.token = rank, self.token + 1
        if rank < 0:
            self.phase = "idle"
            return
        node.arena.drop_after(self.device, resume.step)
        self.phase = "joining"
        self.group = self.groups.group(resume)
        self.group.join(self)

    def _drop(self, resume: Resume) -> None:
        self.layers, self.parts, self.ready, self.committed = {}, {}, None, resume.step
        self.node.oracle.check_resumed_vote(resume.vote)
        self.version = int(resume.vote.loss) if resume.vote is not None else 0

    def _update(self, generation: int, layers: frozenset[int], kept: frozenset[StatePart]) -> None:
        """Apply the optimizer's step. What it does not update is dropped; under ZeRO-1 only the part of a lone
        owner makes the layer complete.
        """
        child = self.node.versions.child
        alone = {part.layer for part in kept if part.is_whole}
        whole = alone if self.parts else layers
        self.layers = {n: child(v, generation) for n, v in self.layers.items() if n in whole}
        self.parts = {part: child(v, generation) for part, v in self.parts.items() if part in kept}
        before, self.version = self.version, child(self.version, generation)
        self.groups.oracle.check_batch(before, self.version)
        self.committed += 1

    # --- steps ------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Evaluate if that is due, else compute the next step if there is one."""
        assert self.group is not None
        if self._evaluation_due:
            self.evaluate(1)
        elif self.committed >= self.steps:
            self.phase = "done"
            self.later(0.01, self._done, self.group.generation)
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
        world, step_timing = self.node.world, self.node.step_timing
        computing_s = step_timing.step_s * world.between(0.2, 0.5) * self.node.slowness
        self.later(computing_s, self._computed_batch, batch)

    def _computed_batch(self, batch: int) -> None:
        assert self.group is not None
        self.phase = "sum"
        self.group.summed(self, batch, self.flag is not None)

    def pass_sum(self, batch: int, stop: bool) -> None:
        """Go on after every rank has computed the batch."""
        assert self.group is not None
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
        """Leave the group because a rank asked everybody to stop; the order itself may come a little later."""
        self._leave()
        self.phase = "stopped"
        if self.flag is not None:
            generation, self.flag = self.flag, None
            self.quiesce(generation, "boundary")

    def start_step(self) -> None:
        self.phase = "compute"
        self.progress += 1
        world, step_timing = self.node.world, self.node.step_timing
        computing_s = (
            step_timing.step_s * (1 + step_timing.imbalance * world.rng.random()) * self.node.slowness
        )
        self.later(computing_s, self._computed)

    def _computed(self) -> None:
        assert self.group is not None
        self.phase = "vote"
        self.ready = self.committed + 1
        self.gradients = (
            self.group.generation,
            self.group.owned[self.rank],
            self.group.kept_parts[self.rank],
        )
        snap, self.snap_flag = self.snap_flag, False
        self.group.arrived(self, self.flag is not None, snap)

    def commit(self, stop: bool, snap: bool) -> None:
        group, token = self.group, self.token
        assert group is not None
        if self.copy is not None:
            self._copied(self.copy, True)  # The copy must end before the next APPLY: a stall.
        self._say_digests(group)
        self._apply(group)
        # Nobody knows of the update yet, and the trainer may have died meanwhile.
        self.do(self._go_on_with, token, self._applied, group, stop, snap)

    def _applied(self, group: "SimGroup", stop: bool, snap: bool) -> None:
        if group.sharded and len(group.resume.plan.pipelines) > 1:
            self.phase = "gather"
            group.applied(self, stop, snap)
        else:
            self.committed_whole(stop, snap)

    def committed_whole(self, stop: bool, snap: bool) -> None:
        """Report the step after the update is complete and, under ZeRO-1, gathered."""
        group = self.group
        assert group is not None
        if self.phase == "gather":
            self.layers = dict.fromkeys(group.owned[self.rank], self.version)
        self._say_stepped(group)
        every = self.compare_every
        self.compare = every > 0 and (snap or self.committed % every == 0)
        if snap:
            self._begin_copy(group)
        if stop:
            self._stop()
        else:
            self.go_on()

    def _apply(self, group: "SimGroup") -> None:
        # The first commit of a generation also drops what was kept in case of another failure.
        self._update(group.generation, group.owned[self.rank], group.kept_parts[self.rank])
        self.ready = self.evaluation = None
        self.phase = "compute"
        self.groups.commits(self, group)

    def _say_stepped(self, group: "SimGroup") -> None:
        node = self.node
        self.groups.gathered(self, group)
        self.report(
            TrainerStepped(
                generation=group.generation,
                step=self.committed,
                vote=node.versions.vote(self.version),
                step_s=node.step_timing.step_s,
                bubble_s=0.0,
                microbatch_ms=group.expected_ms[self.rank] * node.slowness * node.world.between(0.9, 1.1),
            )
        )

    def _say_digests(self, group: "SimGroup") -> None:
        """Report digests of the state that is about to be updated, if replicas are compared."""
        compare, self.compare = self.compare, False
        if not compare:
            return
        digests = {
            layer: version for layer, version in self.layers.items() if layer in group.replicated_layers
        }
        if digests:
            self.report(
                ReplicaDigests(
                    generation=group.generation,
                    step=self.committed,
                    device=self.device,
                    kind="device",
                    digests=digests,
                )
            )

    def flip_bit(self) -> bool:
        """Corrupt a layer of which the group has another copy. Return whether there is one.

        Only while it trains: nothing compares what changes after the comparison at the end of the job.
        """
        group = self.group
        if group is None or group.sharded or not self.responsive or self.phase not in STEPPING:
            return False
        owned = sorted(group.replicated_layers.intersection(group.owned[self.rank], self.layers))
        if not owned or any(self.layers[layer] in self.node.versions.sound for layer in owned):
            return False
        self.layers[owned[0]] = self.node.versions.corrupt(self.layers[owned[0]])
        self.node.oracle.on_corrupted(group.generation, self.committed)
        return True

    def snap(self, generation: int) -> None:
        if self.responsive and self.group is not None and self.group.generation == generation:
            self.snap_flag = True

    def snap_last(self, generation: int) -> None:
        """Begin a snapshot after all steps are done: there is no vote, and no step to overlap the copy with."""
        if (
            not self.responsive
            or self.group is None
            or self.group.generation != generation
            or self.phase != "done"
        ):
            return
        self.report(SnapshotStarted(generation=generation, step=self.committed))
        self._begin_copy(self.group)

    def _begin_copy(self, group: "SimGroup") -> None:
        node = self.node
        key = HeldSnapshot(job_id=group.resume.job_id, step=self.committed, generation=group.generation)
        mine = frozenset(d.index for d in group.resume.plan.devices if d.node == node.name)
        # The devices of a stage divide its layers among themselves.
        share = {
            layer
            for pipeline in group.resume.plan.pipelines
            for stage in pipeline.stages
            for layer in range(stage.first_layer, stage.end_layer)
            if stage.devices[layer % len(stage.devices)] == Device(node=node.name, index=self.device)
        }
        node.arena.begin(self.device, key)
        layers = {layer: version for layer, version in self.layers.items() if layer in share}
        self.copy = SimShard(key=key, layers=layers, devices=mine)
        took_s = node.world.between(0.005, 1.5 * node.step_timing.step_s)
        node.world.call_later(took_s, self.do, self._copied, self.copy, True)

    def _copied(self, copy: SimShard, whole: bool) -> None:
        """End the copying, successfully or not."""
        if self.copy is not copy or not self.alive:
            return
        self.copy = None
        node, key = self.node, copy.key
        if not whole or not self.has_arena or node.world.chance(node.step_timing.no_room_probability):
            self.report(SnapshotFailed(generation=key.generation, step=key.step, detail="no room"))
            return
        node.arena.commit(self.device, copy)
        self.report(
            ShardWritten(
                generation=key.generation,
                step=key.step,
                size_bytes=100,
                copy_s=0.01,
                stall_s=0.0,
                idle_bytes=100,
            )
        )

    def _done(self, generation: int) -> None:
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
                kind="device",
                evaluation=self.evaluation,
            )
        )

    def die(self) -> None:
        self.alive = False
        group, self.group = self.group, None
        self.token += 1
        if group is not None:
            group.left(self)


class SimGroup:
    """The ranks of one generation."""

    def __init__(self, resume: Resume, groups: "SimGroups") -> None:
        oracle = groups.oracle
        self.world, self.resume, self.groups = oracle.world, resume, groups
        self.generation = resume.generation
        devices = resume.plan.devices
        owned = owned_layers(resume.plan)
        self.owned = [owned[device] for device in devices]
        self.sharded = is_sharded(resume)
        self.replicated_layers = frozenset(copies_of(resume.plan, zero1=oracle.policy.zero1))
        """Layers of which the group has several copies."""
        self.kept_parts = [kept_parts(resume, device) if self.sharded else frozenset() for device in devices]
        self.size = len(devices)
        expected = expected_ms(oracle.profile, oracle.policy, resume.plan.pipelines)
        self.expected_ms = [expected[device] for device in devices]
        self.members: dict[int, SimTrainer] = {}
        self.incomplete = False
        """Whether a member has left, so that nothing that needs all ranks happens any more."""
        self.broken = False
        """Whether a connection broke for good, so that nothing at all happens any more."""
        self.snap = False
        """Whether a rank's vote on the current step asked for a snapshot."""
        self.votes: dict[int, bool] = {}
        """Ranks at the VOTE of the current step, with their stop flags."""
        self.sums: dict[int, bool] = {}
        """Ranks that have computed the current held-out batch, with their stop flags."""
        self.updated: dict[int, tuple[bool, bool]] = {}
        """Ranks that have yet to gather the current step under ZeRO-1, with its stop and snapshot flags."""
        self.formed: dict[int, SimTrainer] = {}
        """The members that met."""
        self.trained_by: dict[int, SimTrainer] = {}
        """The same members, once one of them passed the first VOTE."""
        rank_of = {device: rank for rank, device in enumerate(devices)}
        self.transfers: list[tuple[int, tuple[int, ...], int]] = [
            (t.layer, (rank_of[t.source],), rank_of[t.target]) for t in resume.plan.transfers
        ]
        if self.sharded:
            self.transfers = moves(resume, oracle.layers)
        self.owes = [0] * self.size
        """The number of transfers that each rank has yet to take part in."""
        for _, sources, target in self.transfers:
            for rank in {*sources, target}:
                self.owes[rank] += 1

    def join(self, trainer: SimTrainer) -> None:
        if trainer.rank in self.members:
            raise InvariantViolation(f"rank {trainer.rank} joined generation {self.generation} twice")
        self.members[trainer.rank] = trainer
        if len(self.members) == self.size and not self.incomplete:
            self.world.call_later(self.world.between(0.005, 0.05), self._form)

    def left(self, trainer: SimTrainer) -> None:
        """Remove a member that stopped, died or was ordered to leave. Its vote may or may not have been sent."""
        self.incomplete = True
        if self.members.get(trainer.rank) is trainer:
            del self.members[trainer.rank]
        if trainer.rank in self.votes and self.world.chance(0.5):
            del self.votes[trainer.rank]
        if trainer.rank in self.sums and self.world.chance(0.5):
            del self.sums[trainer.rank]

    def break_connection(self) -> None:
        """Break a connection, as TCP does after too long a cut. At least one rank notices some time later."""
        if self.broken:
            return
        self.broken = self.incomplete = True
        members = list(self.members.values())
        sure = self.world.rng.choice(members) if members else None
        for member in members:
            if member is sure or self.world.chance(0.3):
                self.world.call_later(self.world.between(0.1, 2.0), member.do, self._suspect, member)

    def _suspect(self, member: SimTrainer) -> None:
        if member.alive and member.group is self:
            member.report(PeerSuspected(generation=self.generation, detail="connection reset"))

    def _connected(self, members: Iterable[SimTrainer] | None = None) -> bool:
        """Return whether these members (by default all) are connected with each other."""
        nodes = {m.node.name: m.node for m in (self.members.values() if members is None else members)}
        return not any(a.data_cut for a in nodes.values()) and all(
            a.reaches(b) for a, b in combinations(nodes.values(), 2)
        )

    def _form(self) -> None:
        if self.incomplete:
            return
        if not self._connected():
            self.world.call_later(0.5, self._form)
            return
        self.groups.forms(self)
        self.formed = dict(self.members)
        self._drop()
        world = self.world
        when = [world.between(0.001, 0.02) for _ in range(self.size)]
        for layer, sources, target in self.transfers:
            involved = {*sources, target}
            end = max(when[rank] for rank in involved) + world.between(0.005, 0.08)
            for rank in involved:
                when[rank] = end
            senders = [self.members[rank] for rank in sources]
            world.call_later(end, self._moved, layer, senders, self.members[target])
        for rank, member in self.members.items():
            member.phase = "moving"
            if self.owes[rank] == 0:
                member.later(when[rank], self._rank_resumed, member)

    def _drop(self) -> None:
        """Drop old layers where there is no room, before state moves. Parked layers count as held."""
        devices = self.resume.plan.devices
        for each in self.resume.plan.released_layers:
            member = self.members[devices.index(each.device)]
            for layer in each.dropped:
                member.layers.pop(layer, None)

    def _moved(self, layer: int, sources: list[SimTrainer], target: SimTrainer) -> None:
        involved = list(dict.fromkeys([*sources, target]))
        if self.broken or not all(m.group is self and (m.responsive or m.frozen) for m in involved):
            return
        if any(member.frozen for member in involved) or not self._connected(involved):
            self.world.call_later(0.5, self._moved, layer, sources, target)
            return
        if self.sharded:
            target.layers[layer] = version = self.groups.moves_parts(self, layer, sources)
            here = [part for part in self.kept_parts[target.rank] if part.layer == layer]
            target.parts |= dict.fromkeys(here, version)
        else:
            self.groups.moves(self, layer, sources[0])
            target.layers[layer] = sources[0].layers[layer]
        for member in involved:
            member.progress += 1
            self.owes[member.rank] -= 1
            if self.owes[member.rank] == 0:
                self._rank_resumed(member)

    def _rank_resumed(self, member: SimTrainer) -> None:
        if not member.responsive:
            return
        self.groups.starts(self, member)
        token = member.token
        member.report(Resumed(generation=self.generation, bytes_moved=0, rendezvous_s=0.01, state_s=0.01))
        if member.token == token:
            member.go_on()

    def summed(self, trainer: SimTrainer, batch: int, stop: bool) -> None:
        """Note that a rank has computed a held-out batch of its current state."""
        self.sums[trainer.rank] = stop
        if len(self.sums) == self.size:
            self._pass_sum(trainer.committed, batch)

    def _pass_sum(self, step: int, batch: int) -> None:
        if len(self.sums) < self.size or self.broken:
            return
        if not self._connected():
            self.world.call_later(0.5, self._pass_sum, step, batch)
            return
        stop, self.sums = any(self.sums.values()), {}
        for member in list(self.members.values()):
            if member.phase == "sum" and member.committed == step:
                delay = self.world.between(0.001, member.node.step_timing.commit_spread_s)
                member.later(delay, member.pass_sum, batch, stop)

    def arrived(self, trainer: SimTrainer, stop: bool, snap: bool) -> None:
        self.votes[trainer.rank] = stop
        self.snap = self.snap or snap
        if len(self.votes) == self.size:
            self._pass_vote(trainer.committed)

    def _pass_vote(self, step: int) -> None:
        if len(self.votes) < self.size or self.broken:
            return
        if not self._connected():
            self.world.call_later(0.5, self._pass_vote, step)
            return
        stop, snap = any(self.votes.values()), self.snap
        self.votes, self.snap = {}, False
        if not self.trained_by and self.members:  # The votes of a dead member may still be sent.
            self.trained_by = self.formed
            self.groups.trained = self
        for member in list(self.members.values()):
            if member.phase == "vote" and member.committed == step:
                member.phase = "commit"
                if snap:
                    self.world.call_later(0.0, member.do, self._snapping, member, step + 1)
                delay = self.world.between(0.001, member.node.step_timing.commit_spread_s)
                member.later(delay, member.commit, stop, snap)

    def applied(self, trainer: SimTrainer, stop: bool, snap: bool) -> None:
        """Note that a rank has updated its parts. Ranks with the same layers gather when all of them have."""
        self.updated[trainer.rank] = (stop, snap)
        self._gather(trainer.committed)

    def _gather(self, step: int) -> None:
        if self.broken:
            return
        if not self._connected():
            self.world.call_later(0.5, self._gather, step)
            return
        for rank, flags in list(self.updated.items()):
            peers = [r for r in range(self.size) if not self.owned[r].isdisjoint(self.owned[rank])]
            members = [self.members.get(peer) for peer in peers]
            if all(peer is not None and peer.committed >= step for peer in members):
                del self.updated[rank]
                member = self.members[rank]
                member.later(self.world.between(0.001, 0.05), member.committed_whole, *flags)

    def _snapping(self, member: SimTrainer, step: int) -> None:
        member.report(SnapshotStarted(generation=self.generation, step=step))


class SimGroups:
    """All groups of the world, and the invariants of meeting, moving state and committing."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.trained: SimGroup | None = None
        """The last group that passed a VOTE; since then all of its members have what they keep."""
        self._groups: dict[int, SimGroup] = {}
        """The group of each generation."""

    def resumes(self, trainer: SimTrainer, resume: Resume, frame: ResumeRank) -> None:
        """Check that a trainer's instruction is what the Resume means for it, that a trainer that obeys does not
        lose a step that it committed, and that all trainers of the generation leave out the same batches.
        """
        self._check_instruction(trainer, resume, frame)
        batches = self.oracle.versions.skipped_batches.setdefault(resume.generation, resume.skipped_batches)
        if batches != resume.skipped_batches:
            self.oracle.violated(
                f"generation {resume.generation} leaves out batches {batches} and {resume.skipped_batches}"
            )
        if trainer.committed > resume.step and trainer.lineage == resume.lineage:
            self.oracle.violated(
                f"{trainer.node.name}/{trainer.device} committed step {trainer.committed} and is ordered to "
                f"resume at {resume.step}"
            )

    def _check_instruction(self, trainer: SimTrainer, resume: Resume, frame: ResumeRank) -> None:
        device = Device(node=trainer.node.name, index=trainer.device)
        devices = resume.plan.devices
        stages = [stage for pipeline in frame.world.pipelines for stage in pipeline.stages]
        given = (
            devices[frame.rank] if frame.rank >= 0 else None,
            [rank for stage in stages for rank in stage.ranks],
            [(t.layer, devices[t.source], devices[t.target]) for t in frame.world.transfers],
            [(frame.step, frame.lineage, frame.evaluated, frame.skipped_batches, frame.vote)],
            bool(frame.restore),
        )
        meant = (
            device if device in devices else None,
            list(range(len(devices))),
            [(t.layer, t.source, t.target) for t in resume.plan.transfers],
            [(resume.step, resume.lineage, resume.evaluated, resume.skipped_batches, resume.vote)],
            resume.restore is not None and device in devices,
        )
        if given != meant:
            self.oracle.violated(f"{device} is instructed to resume {given}, but {meant} is meant")

    def group(self, resume: Resume) -> SimGroup:
        """Return the one group of this generation."""
        group = self._groups.get(resume.generation)
        if group is None:
            group = self._groups[resume.generation] = SimGroup(resume, self)
        elif group.resume.plan != resume.plan or group.resume.step != resume.step:
            self.oracle.violated(f"generation {resume.generation} has two plans")
        elif group.resume.evaluated != resume.evaluated:
            self.oracle.violated(f"ranks of generation {resume.generation} do not agree on what is evaluated")
        return group

    def forms(self, group: SimGroup) -> None:
        """Check that all members are at the same generation and step, and hold the same state."""
        step = group.resume.step
        versions = set()
        for rank, member in group.members.items():
            if member.generation != group.generation or member.committed != step:
                self.oracle.violated(
                    f"rank {rank} meets generation {group.generation} at step {step} with generation "
                    f"{member.generation} and step {member.committed}"
                )
            of_member = (*member.layers.values(), *member.parts.values())
            versions |= {v for v in of_member if self.oracle.versions.step[v] == step}
        if len(versions) > 1:
            self.oracle.violated(f"generation {group.generation} starts from different states of step {step}")
        lacking = self.missing_layers(group.members.values(), step)
        if lacking:
            self.oracle.violated(
                f"generation {group.generation} starts without all of layers {sorted(lacking)}"
            )
        published_version = self.oracle.published.get(step)
        if group.resume.lineage < self.oracle.lineage:
            return  # The order is from before a rollback, and the cluster went on without these nodes.
        if published_version is not None and versions and published_version not in versions:
            self.oracle.violated(
                f"generation {group.generation} starts from another state of step {step} than was published"
            )

    def moves(self, group: SimGroup, layer: int, source: SimTrainer) -> None:
        version = source.layers.get(layer)
        if version is None or self.oracle.versions.step[version] != group.resume.step:
            self.oracle.violated(
                f"{source.node.name}/{source.device} is to send layer {layer} of step {group.resume.step} "
                f"but does not hold it"
            )

    def moves_parts(self, group: SimGroup, layer: int, sources: list[SimTrainer]) -> int:
        """Check that the senders together have all of the layer in one version, and return that version."""
        step, at = group.resume.step, self.oracle.versions.step
        found = [
            {part: v for part, v in source.parts.items() if part.layer == layer and at[v] == step}
            for source in sources
        ]
        if layer in incomplete(map(list, found), self.oracle.layers):
            names = [f"{source.node.name}/{source.device}" for source in sources]
            self.oracle.violated(
                f"{names} are to send all of layer {layer} of step {step} but do not have it"
            )
        versions = {version for of_source in found for version in of_source.values()}
        if len(versions) > 1:
            self.oracle.violated(f"layer {layer} of step {step} is assembled from different states")
        return versions.pop()

    def starts(self, group: SimGroup, member: SimTrainer) -> None:
        """Check that a rank that begins to compute holds every layer it owns at the resume step."""
        for part in group.kept_parts[member.rank]:
            version = member.parts.get(part)
            if version is None or self.oracle.versions.step[version] != group.resume.step:
                self.oracle.violated(f"rank {member.rank} starts without {part} of step {group.resume.step}")
        for layer in group.owned[member.rank]:
            version = member.layers.get(layer)
            if version is None or self.oracle.versions.step[version] != group.resume.step:
                self.oracle.violated(
                    f"rank {member.rank} starts without layer {layer} of step {group.resume.step}"
                )
        member.compare = False
        if member.layers:
            member.version = member.layers[min(group.owned[member.rank])]

    def commits(self, trainer: SimTrainer, group: SimGroup) -> None:
        """Check that a step that was published is never committed differently.

        A whole group in a partition may go on for a while after the cluster abandoned it. Nobody learns of
        what it commits, and ``forms`` checks that none of it comes back.
        """
        self.oracle.on_commit()
        published_version = (
            self.oracle.published.get(trainer.committed)
            if group.generation == self.oracle.newest_resume
            else None
        )
        if published_version is not None and published_version != trainer.version:
            self.oracle.violated(
                f"step {trainer.committed} was committed again by generation {group.generation}, differently"
            )
        if set(trainer.parts) != set(group.kept_parts[trainer.rank]):
            self.oracle.violated(f"rank {trainer.rank} committed without all of its parts")
        if not group.sharded:
            self.gathered(trainer, group)

    def gathered(self, trainer: SimTrainer, group: SimGroup) -> None:
        if set(trainer.layers) != set(group.owned[trainer.rank]):
            self.oracle.violated(f"rank {trainer.rank} committed without all of its layers")

    def missing_layers(
        self, trainers: Iterable[SimTrainer], step: int, ready: Iterable[SimTrainer] = ()
    ) -> set[int]:
        """Return the layers that these trainers do not hold completely at ``step``, counting those that are
        ``ready`` for it once they have applied their gradients.
        """
        oracle = self.oracle
        at = oracle.versions.step
        if oracle.policy.zero1:
            parts = [[part for part, v in trainer.parts.items() if at[v] == step] for trainer in trainers]
            parts += [[part for part in trainer.parts if part in trainer.gradients[2]] for trainer in ready]
            return set(incomplete(parts, oracle.layers))
        held = {layer for trainer in trainers for layer, v in trainer.layers.items() if at[v] == step}
        return set(range(oracle.layers)).difference(held, *(trainer.gradients[1] for trainer in ready))
