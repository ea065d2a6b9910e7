"""The trainers of one generation: they meet, move state, vote; none goes on without the others."""

from collections.abc import Iterable
from itertools import combinations
from typing import TYPE_CHECKING

from ftd.faults.sim.sharding import is_sharded, kept_parts, moves
from ftd.faults.sim.trainers import SimTrainer
from ftd.faults.sim.world import Violation, World
from planner.stages.layers import expected_ms
from statemachine.cluster.rules import owned_layers
from statemachine.messages.cluster import Resume
from statemachine.messages.common import PeerSuspected, Resumed, Snapping

if TYPE_CHECKING:
    from ftd.faults.sim.invariants import Invariants


class Group:
    """The ranks of one generation."""

    def __init__(self, world: World, resume: Resume, invariants: "Invariants") -> None:
        self.world, self.resume, self.invariants = world, resume, invariants
        self.generation = resume.generation
        devices = resume.plan.devices
        owned = owned_layers(resume.plan)
        self.owned = [owned[device] for device in devices]
        self.sharded = is_sharded(resume)
        self.kept = [kept_parts(resume, device) if self.sharded else frozenset() for device in devices]
        self.size = len(devices)
        expected = expected_ms(invariants.profile, invariants.policy, resume.plan.pipelines)
        self.expected_ms = [expected[device] for device in devices]
        self.members: dict[int, SimTrainer] = {}
        self.gone = False
        """Somebody left: nothing that needs everybody happens any more."""
        self.broken = False
        """A connection broke for good: nothing at all happens any more."""
        self.snap = False
        """Some rank's ballot of the present step asked for a snapshot."""
        self.votes: dict[int, bool] = {}
        """Ranks at the VOTE of the present step, with their stop flags."""
        self.sums: dict[int, bool] = {}
        """Ranks that have computed the present held-out batch, with their stop flags."""
        self.updated: dict[int, tuple[bool, bool]] = {}
        """Under ZeRO-1: ranks that have yet to gather the present step, with its stop and snapshot flags."""
        self.formed: dict[int, SimTrainer] = {}
        """Who met."""
        self.trained_by: dict[int, SimTrainer] = {}
        """The same, once somebody passed the first VOTE."""
        rank_of = {device: rank for rank, device in enumerate(devices)}
        self.transfers: list[tuple[int, tuple[int, ...], int]] = [
            (t.layer, (rank_of[t.source],), rank_of[t.target]) for t in resume.plan.transfers
        ]
        if self.sharded:
            self.transfers = moves(resume, invariants.layers)
        self.owes = [0] * self.size
        """Transfers that each rank has yet to take part in."""
        for _, sources, target in self.transfers:
            for rank in {*sources, target}:
                self.owes[rank] += 1

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
        if trainer.rank in self.sums and self.world.chance(0.5):
            del self.sums[trainer.rank]

    def break_connection(self) -> None:
        """As TCP does after too long a cut; at least one rank notices, some time later."""
        if self.broken:
            return
        self.broken = self.gone = True
        members = list(self.members.values())
        sure = self.world.rng.choice(members) if members else None
        for member in members:
            if member is sure or self.world.chance(0.3):
                self.world.at(self.world.between(0.1, 2.0), member.do, self._suspect, member)

    def _suspect(self, member: SimTrainer) -> None:
        if member.alive and member.group is self:
            member.report(PeerSuspected(generation=self.generation, detail="connection reset"))

    def _connected(self, members: Iterable[SimTrainer] | None = None) -> bool:
        """All of them (of all members, where nobody is named), with each other."""
        nodes = {m.node.name: m.node for m in (self.members.values() if members is None else members)}
        return not any(a.data_cut for a in nodes.values()) and all(
            a.reaches(b) for a, b in combinations(nodes.values(), 2)
        )

    def _form(self) -> None:
        if self.gone:
            return
        if not self._connected():
            self.world.at(0.5, self._form)
            return
        self.invariants.forms(self)
        self.formed = dict(self.members)
        self._drop()
        world, when = self.world, [world_delay(self.world) for _ in range(self.size)]
        for layer, sources, target in self.transfers:
            involved = {*sources, target}
            end = max(when[rank] for rank in involved) + world.between(0.005, 0.08)
            for rank in involved:
                when[rank] = end
            senders = [self.members[rank] for rank in sources]
            world.at(end, self._moved, layer, senders, self.members[target])
        for rank, member in self.members.items():
            member.phase = "moving"
            if self.owes[rank] == 0:
                world.at(when[rank], member.do, self._rank_resumed, member, member.token)

    def _drop(self) -> None:
        """Before state moves: those without room drop old layers. What is parked is as what is kept."""
        devices = self.resume.plan.devices
        for each in self.resume.plan.released:
            member = self.members[devices.index(each.device)]
            for layer in each.dropped:
                member.layers.pop(layer, None)

    def _moved(self, layer: int, sources: list[SimTrainer], target: SimTrainer) -> None:
        involved = list(dict.fromkeys([*sources, target]))
        if self.broken or not all(m.group is self and (m.able or m.frozen) for m in involved):
            return
        if any(member.frozen for member in involved) or not self._connected(involved):
            self.world.at(0.5, self._moved, layer, sources, target)
            return
        if self.sharded:
            target.layers[layer] = version = self.invariants.moves_parts(self, layer, sources)
            here = [part for part in self.kept[target.rank] if part.layer == layer]
            target.parts |= dict.fromkeys(here, version)
        else:
            self.invariants.moves(self, layer, sources[0])
            target.layers[layer] = sources[0].layers[layer]
        for member in involved:
            member.progress += 1
            self.owes[member.rank] -= 1
            if self.owes[member.rank] == 0:
                self._rank_resumed(member, member.token)

    def _rank_resumed(self, member: SimTrainer, token: int) -> None:
        if member.token != token or not member.able:
            return
        self.invariants.starts(self, member)
        member.report(Resumed(generation=self.generation, bytes_moved=0, rendezvous_s=0.01, state_s=0.01))
        if member.token != token:
            return
        member.go_on()

    def summed(self, trainer: SimTrainer, batch: int, stop: bool) -> None:
        """A rank has computed a held-out batch of the state that it is at."""
        self.sums[trainer.rank] = stop
        if len(self.sums) == self.size:
            self._pass_sum(trainer.committed, batch)

    def _pass_sum(self, step: int, batch: int) -> None:
        if len(self.sums) < self.size or self.broken:
            return
        if not self._connected():
            self.world.at(0.5, self._pass_sum, step, batch)
            return
        stop, self.sums = any(self.sums.values()), {}
        for member in list(self.members.values()):
            if member.phase == "sum" and member.committed == step:
                delay = self.world.between(0.001, member.node.pace.commit_spread_s)
                self.world.at(delay, member.do, member.pass_sum, member.token, batch, stop)

    def arrived(self, trainer: SimTrainer, stop: bool, snap: bool) -> None:
        self.votes[trainer.rank] = stop
        self.snap = self.snap or snap
        if len(self.votes) == self.size:
            self._pass_vote(trainer.committed)

    def _pass_vote(self, step: int) -> None:
        if len(self.votes) < self.size or self.broken:
            return
        if not self._connected():
            self.world.at(0.5, self._pass_vote, step)
            return
        stop, snap = any(self.votes.values()), self.snap
        self.votes, self.snap = {}, False
        if not self.trained_by and self.members:  # Votes of who is dead by now may go out yet.
            self.trained_by = self.formed
            self.invariants.trains(self)
        for member in list(self.members.values()):
            if member.phase == "vote" and member.committed == step:
                member.phase = "commit"
                if snap:
                    self.world.at(0.0, member.do, self._snapping, member, step + 1)
                delay = self.world.between(0.001, member.node.pace.commit_spread_s)
                self.world.at(delay, member.do, member.commit, member.token, stop, snap)

    def applied(self, trainer: SimTrainer, stop: bool, snap: bool) -> None:
        """A rank has made its parts new. Who has the same layers gathers when all of them have."""
        self.updated[trainer.rank] = (stop, snap)
        self._gather(trainer.committed)

    def _gather(self, step: int) -> None:
        if self.broken:
            return
        if not self._connected():
            self.world.at(0.5, self._gather, step)
            return
        for rank, flags in list(self.updated.items()):
            peers = [r for r in range(self.size) if not self.owned[r].isdisjoint(self.owned[rank])]
            members = [self.members.get(peer) for peer in peers]
            if all(peer is not None and peer.committed >= step for peer in members):
                del self.updated[rank]
                member = self.members[rank]
                gathering_s = self.world.between(0.001, 0.05)
                self.world.at(gathering_s, member.do, member.committed_whole, member.token, *flags)

    def _snapping(self, member: SimTrainer, step: int) -> None:
        member.report(Snapping(generation=self.generation, step=step))


def world_delay(world: World) -> float:
    return world.between(0.001, 0.02)
