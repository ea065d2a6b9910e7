"""Trainers as the protocol sees them: what they hold, where in a step they are, who waits for whom.

State is a *version*: the model at step 0, or a version plus one step computed by one generation's group.
Two trainers have equal state exactly when their versions are equal, so that redoing a step gives another
version, as different rounding does. A step's vote carries its version as the loss.
"""

from typing import TYPE_CHECKING, Literal

from ftd.sim.world import Violation, World
from planner.layers import expected_ms
from statemachine.events import (
    TrainerDone,
    TrainerQuiesced,
    TrainerResumed,
    TrainerStepped,
    TrainerSuspectedPeer,
)
from statemachine.messages import Resume
from statemachine.rules import owned_layers
from statemachine.values import DeviceReport, QuiesceMode, Vote

if TYPE_CHECKING:
    from ftd.sim.invariants import Invariants
    from ftd.sim.node import SimNode

Phase = Literal["idle", "quiesced", "joining", "moving", "compute", "vote", "commit", "stopped", "done"]
STEPPING = frozenset({"compute", "vote", "commit"})


class Versions:
    """All states that ever were: version 0 is step 0."""

    def __init__(self) -> None:
        self.step = [0]
        self.parent = [0]
        self._child: dict[tuple[int, int], int] = {}

    def child(self, version: int, generation: int) -> int:
        """The state one step on, by gradients of ``generation``'s group."""
        key = (version, generation)
        child = self._child.get(key)
        if child is None:
            child = self._child[key] = len(self.step)
            self.step.append(self.step[version] + 1)
            self.parent.append(version)
        return child


class SimTrainer:
    """One trainer process."""

    __slots__ = (
        "alive", "asleep", "built", "committed", "device", "flag", "frozen", "generation", "gradients",
        "group", "layers", "node", "phase", "pid", "progress", "rank", "ready", "steps", "token", "version",
    )  # fmt: skip

    def __init__(self, node: "SimNode", device: int, pid: int) -> None:
        self.node, self.device, self.pid = node, device, pid
        self.alive = True
        self.frozen = False
        """SIGSTOP: no beat, no progress."""
        self.asleep = False
        """The main thread sleeps; the control thread beats."""
        self.built = False
        self.steps = 0
        self.phase: Phase = "idle"
        self.generation = 0
        self.committed = 0
        self.version = 0
        self.ready: int | None = None
        self.gradients: tuple[int, frozenset[int]] = (0, frozenset())
        """Generation and layers of the complete gradients, while ``ready``."""
        self.layers: dict[int, int] = {}
        """Version of each layer held completely."""
        self.group: Group | None = None
        self.rank = -1
        self.flag: int | None = None
        """Generation of a Quiesce(boundary) that waits for the end of a step."""
        self.token = 0
        """Counts changes of mind: what was scheduled before does not count."""
        self.progress = 0

    @property
    def able(self) -> bool:
        return self.alive and not self.frozen and not self.asleep

    def build(self, layers: int, steps: int) -> None:
        self.built, self.steps = True, steps
        self.layers = dict.fromkeys(range(layers), 0)

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
        self.node.world.at(self.node.world.between(0.0005, 0.03), self._report, self.token)

    def _leave(self) -> None:
        """Out of the group. An APPLY that has begun is finished, or given up in time."""
        group, self.group = self.group, None
        self.token += 1
        if group is None:
            return
        if self.phase == "commit" and self.node.world.chance(0.5):
            self._apply(group)
        group.left(self)

    def _report(self, token: int) -> None:
        if not self.able or token != self.token:
            return
        held = tuple(
            layer for layer, v in self.layers.items() if self.node.versions.step[v] == self.committed
        )
        vote = Vote(loss=float(self.version), gradient_norm=1.0) if self.committed else None
        report = DeviceReport(
            device=self.device, committed_step=self.committed, ready_step=self.ready, vote=vote, held=held
        )
        node = self.node
        node.feed(
            TrainerQuiesced(at=node.world.now, cause="trainer", generation=self.generation, report=report)
        )

    def resume(self, resume: Resume) -> None:
        """Roll forward or drop the step in flight, then meet the others, or wait without a rank."""
        if not self.able or resume.generation != self.generation or self.phase != "quiesced":
            return
        node = self.node
        node.invariants.resumes(self, resume)
        rank = next(
            (r for r, d in enumerate(resume.plan.devices) if d.node == node.name and d.index == self.device),
            -1,
        )
        if self.ready is not None and self.ready == resume.step:
            generation, layers = self.gradients
            self.layers = {
                layer: node.versions.child(v, generation)
                for layer, v in self.layers.items()
                if layer in layers
            }
            self.version = node.versions.child(self.version, generation)
            self.committed = resume.step
        elif self.committed != resume.step and rank >= 0:
            # Stale: everything comes from others.
            self.layers, self.committed = {}, resume.step
            self.version = int(resume.vote.loss) if resume.vote is not None else 0
        self.ready = None
        self.rank, self.token = rank, self.token + 1
        if rank < 0:
            self.phase = "idle"
            return
        self.phase = "joining"
        self.group = node.invariants.group(node.world, resume, self)
        self.group.join(self)

    # --- steps ------------------------------------------------------------------------------------

    def start_step(self) -> None:
        self.phase = "compute"
        self.progress += 1
        world, pace = self.node.world, self.node.pace
        computing_s = pace.step_s * (1 + pace.imbalance * world.rng.random()) * self.node.slowness
        world.at(computing_s, self._computed, self.token)

    def _computed(self, token: int) -> None:
        if token != self.token or self.group is None:
            return
        if not self.able:
            return
        self.phase = "vote"
        self.ready = self.committed + 1
        self.gradients = (self.group.generation, self.group.owned[self.rank])
        self.group.arrived(self, self.flag is not None)

    def commit(self, token: int, stop: bool) -> None:
        if token != self.token or not self.able or self.group is None:
            return
        group = self.group
        self._apply(group)
        if stop:
            self._leave()
            self.phase = "stopped"
            if self.flag is not None:
                generation, self.flag = self.flag, None
                self.quiesce(generation, "boundary")
        elif self.committed >= self.steps:
            self.phase = "done"
            self.node.world.at(0.01, self._done, self.token, group.generation)
        else:
            self.start_step()

    def _apply(self, group: "Group") -> None:
        node, owned = self.node, group.owned[self.rank]
        # The first commit of a generation also drops what was kept for the sake of another failure.
        self.layers = {
            layer: node.versions.child(v, group.generation)
            for layer, v in self.layers.items()
            if layer in owned
        }
        self.version = node.versions.child(self.version, group.generation)
        self.committed += 1
        self.ready = None
        self.phase = "compute"
        node.invariants.commits(self, group)
        node.feed(
            TrainerStepped(
                at=node.world.now,
                cause="trainer",
                device=self.device,
                generation=group.generation,
                step=self.committed,
                vote=Vote(loss=float(self.version), gradient_norm=1.0),
                step_s=node.pace.step_s,
                microbatch_ms=group.expected_ms[self.rank] * node.slowness * node.world.between(0.9, 1.1),
            )
        )

    def _done(self, token: int, generation: int) -> None:
        if not self.able or token != self.token:
            return
        if self.flag is not None:
            requested, self.flag = self.flag, None
            self.quiesce(requested, "boundary")
            return
        node = self.node
        digests = {layer: str(v) for layer, v in self.layers.items()}
        node.feed(
            TrainerDone(
                at=node.world.now,
                cause="trainer",
                device=self.device,
                generation=generation,
                step=self.committed,
                digests=digests,
            )
        )

    def die(self) -> None:
        self.alive = False
        group, self.group = self.group, None
        self.token += 1
        if group is not None:
            group.left(self)


class Group:
    """The ranks of one generation that meet, move state and vote."""

    def __init__(self, world: World, resume: Resume, invariants: "Invariants") -> None:
        self.world, self.resume, self.invariants = world, resume, invariants
        self.generation = resume.generation
        devices = resume.plan.devices
        owned = owned_layers(resume.plan)
        self.owned = [owned[device] for device in devices]
        self.size = len(devices)
        expected = expected_ms(invariants.profile, invariants.policy, resume.plan.pipelines)
        self.expected_ms = [expected[device] for device in devices]
        self.members: dict[int, SimTrainer] = {}
        self.gone = False
        """Somebody left: nothing that needs everybody happens any more."""
        self.broken = False
        """A connection broke for good: nothing at all happens any more."""
        self.votes: dict[int, bool] = {}
        """Ranks at the VOTE of the present step, with their stop flags."""
        rank_of = {device: rank for rank, device in enumerate(devices)}
        self.transfers = [(t.layer, rank_of[t.source], rank_of[t.target]) for t in resume.plan.transfers]
        self.owes = [0] * self.size
        """Transfers that each rank has yet to take part in."""
        for _, source, target in self.transfers:
            self.owes[source] += 1
            self.owes[target] += 1

    def join(self, trainer: SimTrainer) -> None:
        if trainer.rank in self.members:
            raise Violation(f"rank {trainer.rank} joined generation {self.generation} twice")
        self.members[trainer.rank] = trainer
        if len(self.members) == self.size and not self.gone:
            self.world.at(self.world.between(0.005, 0.05), self._form)

    def left(self, trainer: SimTrainer) -> None:
        """A member stopped, died or was told to: its vote may or may not have gone out."""
        self.gone = True
        if self.members.get(trainer.rank) is trainer:
            del self.members[trainer.rank]
        if trainer.rank in self.votes and self.world.chance(0.5):
            del self.votes[trainer.rank]

    def break_connection(self) -> None:
        """As TCP does after too long a cut; at least one rank notices, some time later."""
        if self.broken:
            return
        self.broken = self.gone = True
        members = list(self.members.values())
        sure = self.world.rng.choice(members) if members else None
        for member in members:
            if member is sure or self.world.chance(0.3):
                self.world.at(self.world.between(0.1, 2.0), self._suspect, member)

    def _suspect(self, member: SimTrainer) -> None:
        if member.alive and member.group is self:
            node = member.node
            node.feed(
                TrainerSuspectedPeer(
                    at=self.world.now,
                    cause="trainer",
                    device=member.device,
                    generation=self.generation,
                    detail="connection reset",
                )
            )

    def _connected(self) -> bool:
        return not any(member.node.data_cut for member in self.members.values())

    def _form(self) -> None:
        if self.gone:
            return
        if not self._connected():
            self.world.at(0.5, self._form)
            return
        self.invariants.forms(self)
        world, when = self.world, [world_delay(self.world) for _ in range(self.size)]
        for layer, source, target in self.transfers:
            begin = max(when[source], when[target])
            when[source] = when[target] = begin + world.between(0.005, 0.08)
            world.at(when[target], self._moved, layer, self.members[source], self.members[target])
        for rank, member in self.members.items():
            member.phase = "moving"
            if self.owes[rank] == 0:
                world.at(when[rank], self._rank_resumed, member, member.token)

    def _moved(self, layer: int, source: SimTrainer, target: SimTrainer) -> None:
        if self.broken:
            return
        if source.group is not self or target.group is not self or not source.able or not target.able:
            return
        if source.node.data_cut or target.node.data_cut:
            self.world.at(0.5, self._moved, layer, source, target)
            return
        self.invariants.moves(self, layer, source)
        target.layers[layer] = source.layers[layer]
        for member in (source, target):
            member.progress += 1
            self.owes[member.rank] -= 1
            if self.owes[member.rank] == 0:
                self._rank_resumed(member, member.token)

    def _rank_resumed(self, member: SimTrainer, token: int) -> None:
        if member.token != token or not member.able:
            return
        self.invariants.starts(self, member)
        node = member.node
        node.feed(
            TrainerResumed(
                at=self.world.now,
                cause="trainer",
                device=member.device,
                generation=self.generation,
                bytes_moved=0,
                rendezvous_s=0.01,
                state_s=0.01,
            )
        )
        if member.token != token:
            return
        if member.committed >= member.steps:
            member.phase = "done"
            self.world.at(0.01, member._done, member.token, self.generation)
        else:
            member.start_step()

    def arrived(self, trainer: SimTrainer, stop: bool) -> None:
        self.votes[trainer.rank] = stop
        if len(self.votes) == self.size:
            self._pass_vote(trainer.committed)

    def _pass_vote(self, step: int) -> None:
        if len(self.votes) < self.size or self.broken:
            return
        if not self._connected():
            self.world.at(0.5, self._pass_vote, step)
            return
        stop = any(self.votes.values())
        self.votes = {}
        for member in list(self.members.values()):
            if member.phase == "vote" and member.committed == step:
                member.phase = "commit"
                delay = self.world.between(0.001, member.node.pace.commit_spread_s)
                self.world.at(delay, member.commit, member.token, stop)


def world_delay(world: World) -> float:
    return world.between(0.001, 0.02)
