"""ZeRO-1 on one rank: its parts, their updates, the parameters of the others, and the replica that it keeps.

What a rank has at the committed step, parts of older generations and those made for a new one, stays until
the first update of the new one, as the plan after a failure before that may need it. An update that has
passed VOTE counts, whether the parameters of the others could be gathered afterwards or not: then they come
with the next generation's state.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.groups.communicator import Communicator
from runtime.layers.model import Model
from runtime.layers.state import StateError
from runtime.layers.transfer import Exchange
from runtime.layers.world import owners_of_layer
from runtime.watch.pace import Pace
from runtime.wire.protocol import Resume, StatePartData, WorldData
from runtime.zero.gather import ParameterGather
from runtime.zero.part_states import PartState, PartStates
from runtime.zero.parts import (
    Move,
    Shape,
    Slice,
    everything,
    keeps_replica,
    moves_of,
    pipeline_of,
    protector_and_protege,
)
from runtime.zero.replica import CHECK_STEPS, Replica
from runtime.zero.sharded_optimizer import ShardedOptimization
from storage.buckets import Bucket

_DIGEST_BYTES = 16
_TOLERANCE = 1e-3
"""Between an owner on another kind of device and its replica, relative, after ``CHECK_STEPS`` steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diverged:
    layer: int
    detail: str


class Sharding:
    """The engine's ZeRO-1; called by the main thread alone."""

    def __init__(self, model: Model, optimization: ShardedOptimization, pace: Pace) -> None:
        self._model = model
        self._optimization = optimization
        self._pace = pace
        self.shape = Shape.of(model.parameter_layers, model.parameter_sizes)
        self.states = PartStates(model, optimization, self.shape)
        self.states.keep_whole(range(model.layer_count))
        self.replica: Replica | None = None
        self._world: WorldData | None = None
        self._communicator: Communicator | None = None
        self._own: list[PartState] = []
        """Of the newest generation, as is the replica."""
        self._gather: ParameterGather | None = None
        self._aor = False

    # --- between generations ---------------------------------------------------------------------

    def parts(self) -> tuple[StatePartData, ...]:
        """What is kept at the committed step."""
        self._finish()
        return tuple(part.said() for part in self.states.kept)

    def forget(self) -> None:
        """Keep nothing."""
        self.leave()
        self._end_replica()
        self.states.kept = []

    def restored(self, layers: Iterable[int]) -> None:
        """These were just filled whole, state included, and nothing else is kept."""
        self.states.keep_whole(layers)

    def enter(
        self, resume: Resume, communicator: Communicator, buckets: Collection[Bucket], complete: set[int]
    ) -> int:
        """Get whole parameters of the rank's layers, and make its new parts; returns the bytes received.

        :param complete: layers that are whole; gets the rank's layers when all is there.
        :raises CommunicationError: aborted, or a peer is lost; what is kept is as it was.
        :raises PartsError: some of it is nowhere.
        """
        world, rank = resume.world, resume.rank
        aor = "aor" in resume.protection.split("+")
        self._end_replica()
        own = [layer for layer, ranks in owners_of_layer(world).items() if rank in ranks]
        for layer in own:
            self._model.materialise(layer)
        self._optimization.refresh()
        with torch.no_grad():
            self.states.fill_from_replicas(complete)
            held = everything(world) if resume.restore else world.held_parts
            moves = moves_of(self.shape, world, held, replicas=aor)
            received_bytes = self._exchange(moves, communicator)
            part, parts = pipeline_of(world, rank), len(world.pipelines)
            self._own = [self.states.cut(layer, part, parts, replica=False) for layer in own]
            replicas: list[PartState] = []
            if aor and keeps_replica(world, rank):
                following = (part + 1) % parts
                replicas = [self.states.cut(layer, following, parts, replica=True) for layer in own]
        self.states.forget_arrived()
        known = {part.said() for part in self.states.kept}
        self.states.kept += [part for part in (*self._own, *replicas) if part.said() not in known]
        complete |= set(own)
        self._optimization.adopt(one for p in self._own for one in p.slices)
        if replicas:
            self.replica = Replica(replicas, self._optimization, self._model.device, self._pace)
        self._world, self._communicator = world, communicator
        self._aor = aor and parts > 1
        self._gather = ParameterGather(self._model, self.shape, buckets, world, communicator)
        return received_bytes

    def leave(self) -> None:
        """The generation is over."""
        self._world = self._communicator = self._gather = None

    # --- for snapshots ---------------------------------------------------------------------------

    def kept(self, layers: Iterable[int], *, replica: bool) -> list[PartState]:
        """This generation's parts of these layers at the committed step, ascending; or the replicas.

        :raises StateError: the replica of one is not to be had.
        """
        if replica:
            self._finish()
        found = (
            {part.layer: part for part in self.states.kept if part.replica}
            if replica
            else {part.layer: part for part in self._own}
        )
        missing = [layer for layer in layers if layer not in found]
        if missing:
            raise StateError(f"no replica of layers {missing} is kept here")
        return [found[layer] for layer in layers]

    def value_of(self, one: Slice) -> Tensor:
        """The slice of the present parameter, which is whole: its memory, not a copy."""
        return self._optimization.value_of(one)

    def schedule(self) -> dict[str, Any]:
        return self._optimization.schedule()

    # --- the step --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Gradients are about to change."""
        if self.replica is not None:
            self.replica.await_taken()

    def update(self, owned: Collection[int], *, skipped: bool) -> None:
        """APPLY on the own part, from the gradients in ``.grad``; the replica follows on its own."""
        if self.replica is not None and not skipped:
            gradients = [self._optimization.gradient_of(one.slice) for one in self.replica.slices]
            self.replica.follow(gradients, self._optimization.options())
        self._optimization.step(owned, skipped=skipped)
        followed = self.replica is not None and self.replica.error is None
        self.states.kept = [*self._own, *(self.replica.parts if self.replica and followed else [])]

    def gather(self) -> None:
        """:raises CommunicationError: aborted, or a peer is lost; only the own part is at the new step."""
        assert self._gather is not None
        self._gather.run(self._pace)

    # --- replicas against their owners -------------------------------------------------------------

    def check(self, step: int) -> tuple[Diverged, ...]:
        """Behind every ``CHECK_STEPS`` steps: compare, and make anew what differs. All are whole.

        :raises CommunicationError: aborted, or a peer is lost; replicas that differ are not kept.
        """
        if step % CHECK_STEPS or not self._aor:
            return ()
        world, communicator = self._world, self._communicator
        assert world is not None and communicator is not None
        self._finish()
        rank = communicator.rank
        served: dict[int, list[PartState]] = {}
        followed: dict[int, list[int]] = {}
        for part in self._own:
            protectors, protege = protector_and_protege(world, part.layer, rank)
            for protector in protectors:
                served.setdefault(protector, []).append(part)
            if keeps_replica(world, rank):
                followed.setdefault(protege, []).append(part.layer)
        differing, asked = self._compare(communicator, served, followed)
        if not (differing or asked):
            return ()
        return self._renew(communicator, differing, asked)

    def _compare(
        self, communicator: Communicator, served: dict[int, list[PartState]], followed: dict[int, list[int]]
    ) -> tuple[dict[int, int], list[tuple[int, PartState]]]:
        """Layers whose replica here differs, with their owner's rank; and own parts that others ask for."""
        digests = {peer: b"".join(map(self.states.digest, parts)) for peer, parts in served.items()}
        sizes = {peer: _DIGEST_BYTES * len(layers) for peer, layers in followed.items()}
        theirs = self._talk(communicator, digests, sizes)
        mine = {part.layer: self.states.digest(part) for part in self.states.kept if part.replica}
        verdicts: dict[int, bytes] = {}
        differing: dict[int, int] = {}
        for peer, layers in followed.items():
            said = [theirs[peer][i * _DIGEST_BYTES : (i + 1) * _DIGEST_BYTES] for i in range(len(layers))]
            bad = [not self._exact or mine.get(layer) != one for layer, one in zip(layers, said, strict=True)]
            differing |= {layer: peer for layer, is_bad in zip(layers, bad, strict=True) if is_bad}
            verdicts[peer] = bytes(bad)
        answers = self._talk(communicator, verdicts, {peer: len(parts) for peer, parts in served.items()})
        asked = [
            (peer, part)
            for peer, parts in served.items()
            for part, is_bad in zip(parts, answers[peer], strict=True)
            if is_bad
        ]
        return differing, asked

    def _renew(
        self, communicator: Communicator, differing: dict[int, int], asked: list[tuple[int, PartState]]
    ) -> tuple[Diverged, ...]:
        """Replicas made anew from their owners."""
        assert self._world is not None
        rank, parts = communicator.rank, len(self._world.pipelines)
        following = (pipeline_of(self._world, rank) + 1) % parts
        error = self.replica.error if self.replica is not None else None
        old = {part.layer: part for part in self.states.kept if part.replica}
        self.states.kept = [p for p in self.states.kept if not (p.replica and p.layer in differing)]
        moves = [m for peer, part in asked for m in self._moves_of(part.layer, part.part, parts, rank, peer)]
        for layer, peer in differing.items():
            moves += self._moves_of(layer, following, parts, peer, rank)
        with torch.no_grad():
            self._exchange(moves, communicator)
            new = [self.states.cut(layer, following, parts, replica=True) for layer in differing]
        self.states.forget_arrived()
        if not differing:
            return ()
        self._end_replica()
        self.states.kept += new
        kept = [part for part in self.states.kept if part.replica]
        self.replica = Replica(kept, self._optimization, self._model.device, self._pace)
        diverged = []
        for part in new:
            if error is not None:
                diverged.append(Diverged(layer=part.layer, detail=f"{type(error).__name__}: {error}"))
            elif self._exact or not _close(old[part.layer], part):
                detail = (
                    f"part {following} of {parts} differed from its owner's; it was taken from there anew"
                )
                diverged.append(Diverged(layer=part.layer, detail=detail))
        return tuple(diverged)

    def _moves_of(self, layer: int, part: int, parts: int, source: int, target: int) -> list[Move]:
        """The optimizer's state of a part."""
        moves = []
        for number, vector in enumerate(self.shape.vectors):
            start, end = vector.part(part, parts)
            if vector.layer == layer and start < end:
                moves.append(
                    Move(
                        source=source,
                        target=target,
                        layer=layer,
                        what="optimizer",
                        vector=number,
                        start=start,
                        end=end,
                    )
                )
        return moves

    # --- inside ----------------------------------------------------------------------------------

    @property
    def _exact(self) -> bool:
        """An owner on another kind of device rounds otherwise than its replica."""
        return self._model.device.type == "cpu"

    def _talk(
        self, communicator: Communicator, said: dict[int, bytes], sizes: dict[int, int]
    ) -> dict[int, bytes]:
        """Send bytes to some ranks, and take so many from others."""
        device = self._model.device
        heard = {peer: torch.empty(size, dtype=torch.uint8, device=device) for peer, size in sizes.items()}
        pendings = [
            communicator.send(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device), peer, "state")
            for peer, data in sorted(said.items())
        ]
        pendings += [communicator.receive(tensor, peer, "state") for peer, tensor in sorted(heard.items())]
        for pending in pendings:
            self._pace.wait(communicator, pending)
        return {peer: bytes(tensor.cpu().numpy()) for peer, tensor in heard.items()}

    def _exchange(self, moves: Sequence[Move], communicator: Communicator) -> int:
        exchange = Exchange(
            moves, packer=self.states, communicator=communicator, pace=self._pace, device=self._model.device
        )
        exchange.run()
        return exchange.received_bytes

    def _finish(self) -> None:
        """The replica is at the committed step, or not kept."""
        if self.replica is not None:
            self.replica.finish()
            if self.replica.error is not None:
                self.states.kept = [part for part in self.states.kept if not part.replica]

    def _end_replica(self) -> None:
        if self.replica is not None:
            self._finish()
            self.replica.close()
            self.replica = None


def _close(old: PartState, new: PartState) -> bool:
    for mine, theirs in zip(old.slices, new.slices, strict=True):
        for key, value in theirs.state.items():
            known = mine.state.get(key)
            if not isinstance(value, Tensor) or not isinstance(known, Tensor):
                if value != known:
                    return False
            elif not torch.allclose(known, value, rtol=_TOLERANCE, atol=1e-6):
                return False
    return True
