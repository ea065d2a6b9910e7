"""A rank's layers in parts (ZeRO-1, shards): its own parts, their updates, and the replicas that it holds.

The parts held at the committed step, those of older generations and those made for a new one, stay until
the first update of the new generation, because the plan after an earlier failure may need them. An update
that has passed VOTE counts even if the parameters of the other owners could not be gathered afterwards;
they then arrive with the next generation's state.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.values import StatePart
from runtime.errors import TrainingError
from runtime.groups.communicator import CommunicationEdge, Communicator
from runtime.layers.model import Model
from runtime.layers.optimizer import state_tensors
from runtime.layers.state import PayloadTarget, StateError
from runtime.layers.tensor_plan import TensorPlan
from runtime.layers.transfer import StateExchange
from runtime.layers.world import is_sharded, is_tensor_parallel, replica_ranks, stage_of
from runtime.monitoring.progress import ProgressMonitor
from runtime.zero.cells import Fractions, owned_parts, replica_assignments, replica_parts, share_of
from runtime.zero.gather import ParameterGather
from runtime.zero.part_states import PartState, PartStates
from runtime.zero.parts import (
    ParameterLayout,
    ParameterVector,
    PartTransfer,
    initial_holdings,
    plan_transfers,
)
from runtime.zero.replica import CHECK_STEPS, ReplicaUpdater
from runtime.zero.sharded_optimizer import ShardedOptimization
from runtime.zero.shards import ShardMemory, StageShards
from runtime.zero.tensor_parts import StageTensorParts
from statemachine.messages.trainer import ResumeRank, WorldData, WorldStage
from storage.layerstate import LayerHeader

_DIGEST_BYTES = 16
_TOLERANCE = 1e-3
"""Relative difference between an owner on another kind of device and its replica that is tolerated after
``CHECK_STEPS`` steps.
"""


_Key = tuple[int, Fractions]
"""A layer and a part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A replica that differed from its owner's part."""

    layer: int
    detail: str


class ShardedState:
    """The engine's layers in parts; only the main thread calls it.

    :param zero1: owners divide the optimizer's state.
    :param tensor_parallel: stages may be tensor-parallel; the same for all trainers of the job.
    """

    def __init__(
        self,
        model: Model,
        optimization: ShardedOptimization,
        monitor: ProgressMonitor,
        *,
        zero1: bool,
        tensor_parallel: bool = False,
    ) -> None:
        self._model = model
        self._zero1 = zero1
        self.optimization = optimization
        self._monitor = monitor
        self._plan = model.tensor_plan if tensor_parallel else None
        apart = {} if self._plan is None else self._plan.vector_keys
        frozen = model.frozen_layers
        self.shape = ParameterLayout.from_parameters(
            model.parameter_layers | frozen, model.parameter_sizes, apart, frozen=frozen.keys()
        )
        self.states = PartStates(model, optimization, self.shape)
        self.states.hold_whole(range(model.layer_count))
        self.replica: ReplicaUpdater | None = None
        self._world: WorldData | None = None
        self._communicator: Communicator | None = None
        self._own: list[PartState] = []
        """This rank's own parts in the newest generation, to which the replica belongs, too."""
        self._gather: ParameterGather | None = None
        self._aor = False
        self.first_digests: dict[int, str] = {}
        """Digests of the layers that this rank had whole before the first step."""
        self._memory: ShardMemory | None = None
        """Shards of the newest generation, or those just restored, if this rank's stage shards."""
        self._parked: set[int] = set()
        """Layers whose whole parameters are in host memory."""

    # --- between generations ---------------------------------------------------------------------

    def held_parts(self) -> tuple[StatePart, ...]:
        """Return the parts held at the committed step."""
        self._finish()
        return tuple(part.to_state_part() for part in self.states.held)

    def clear(self) -> None:
        """Release all parts."""
        self.leave()
        self._end_replica()
        self.states.held, self._own, self._parked = [], [], set()
        self.states.discard_received(self.shape.vectors)
        # The optimizer would keep the memory of the parts alive.
        self.optimization.set_slices(())
        self.optimization.shards = self._memory = None
        self._model.shard((), None)

    def make_room(self, parked: Collection[int], dropped: Collection[int], stage: WorldStage) -> None:
        """Park and drop the parts of these layers until the first commit, before new state arrives.

        Parked state counts as held and is sent from host memory. What ``stage``, this rank's next one, needs
        of it is copied from there.
        """
        own = range(stage.first_layer, stage.end_layer)
        whole = () if is_sharded(stage) else own
        self._model.unpark(self._parked.intersection(whole))
        self._parked -= set(whole)
        if parked or dropped:
            self._end_replica()
            # The optimizer would keep the memory of the parts alive.
            self._own = []
            self.optimization.set_slices(())
            self.states.drop(dropped)
            self.states.park(parked)
            if self._memory is not None:
                self._memory.release({*parked, *dropped})
            self._model.park(set(parked) & self._model.held_layers, own, whole)
            self._parked |= (set(parked) & self._model.held_layers).difference(whole)
        self.optimization.refresh_parameters()

    def restore(self, world: WorldData, rank: int) -> Callable[[LayerHeader], list[PayloadTarget]]:
        """Allocate the parameters of this rank's stage in ``world``, whole or its share of them, after ``clear``.

        :returns: a function that holds this rank's parts of a layer with uninitialised memory, and returns the
            tensors to fill, ascending by the offset of their bytes in the layer's payload.
        """
        stage = stage_of(world, rank)
        own, share = range(stage.first_layer, stage.end_layer), share_of(stage, rank)
        if is_sharded(stage):
            self._memory = self._shard_memory(stage, rank)
            self._model.shard(own, None)
            self._model.materialise_buffers(own)
        else:
            for layer in own:
                self._model.materialise(layer)
        self.optimization.refresh_parameters()

        def hold(header: LayerHeader) -> list[PayloadTarget]:
            layer, shards = header.layer, self._memory
            value_of = self.optimization.parameter_slice if shards is None else shards.value_of
            values = {
                one.name: (one, value_of(one))
                for vector in self._vectors_of(layer, own, tied=True)
                for one in vector.slices(*vector.part_range(*share))
            }
            parts = owned_parts(world, rank, layer, zero1=self._zero1)
            return self.states.hold_restored(header, values, self._vectors_of(layer, own), parts, shards)

        return hold

    def transfers(self, resume: ResumeRank) -> tuple[PartTransfer, ...]:
        """Return the transfers of state before the first step of a generation.

        :raises PartsError: no rank holds some of the state.
        """
        world, restored = resume.world, bool(resume.restore)
        held = initial_holdings(world, zero1=self._zero1) if restored else world.held_parts
        replicas = self._has_replicas(resume)
        return plan_transfers(
            self.shape, world, held, zero1=self._zero1, replicas=replicas, restored=restored
        )

    def edges(self, resume: ResumeRank, transfers: Sequence[PartTransfer]) -> frozenset[CommunicationEdge]:
        """Return which ranks send state to which others, for ``transfers`` or to compare replicas."""
        pairs = {(transfer.source, transfer.target) for transfer in transfers}
        if self._has_replicas(resume):
            world = resume.world
            # Where no stage begins, a layer has the same replicas as the one before it.
            for layer in {stage.first_layer for line in world.pipelines for stage in line.stages}:
                for one in replica_assignments(world, layer):
                    pairs |= {(one.owner, one.holder), (one.holder, one.owner)}
        return frozenset(("state", source, target) for source, target in pairs)

    def _has_replicas(self, resume: ResumeRank) -> bool:
        return self._zero1 and "aor" in resume.protection.split("+")

    def enter(
        self,
        resume: ResumeRank,
        communicator: Communicator,
        transfers: Sequence[PartTransfer],
        complete: set[int],
        digest: Callable[[int], str],
    ) -> int:
        """Get the parameters of the rank's layers, whole or its share of them, and make its new parts.

        :param transfers: those of this generation (``ShardedState.transfers``).
        :param complete: layers that are whole; the rank's layers are added once they have arrived, unless
            its stage shards.
        :param digest: returns the digest of a whole layer; called before the first step.
        :returns: the number of bytes received.
        :raises CommunicationError: the group was aborted, or a peer is lost; the held parts are unchanged.
        """
        world, rank = resume.world, resume.rank
        stage = stage_of(world, rank)
        aor = self._has_replicas(resume)
        self._end_replica()
        self.states.discard_received(self.shape.vectors)
        self.states.complete = complete
        own = list(range(stage.first_layer, stage.end_layer))
        self._allocate(stage, own, communicator)
        with torch.no_grad():
            self._fill(own, complete, digest if resume.step == 0 else None)
            received_bytes = self._exchange(transfers, communicator)
            parts: list[PartState] = []
            replicas: list[PartState] = []
            for layer in own:
                vectors = self._vectors_of(layer, own)
                parts += [
                    self.states.make_part(layer, vectors, part)
                    for part in owned_parts(world, rank, layer, zero1=self._zero1)
                ]
                if aor:
                    replicas += [
                        self.states.make_part(layer, vectors, part, replica=True)
                        for part in replica_parts(world, rank, layer)
                    ]
                # Parts of the next layers then find room for what is put together from several ranges.
                self.states.discard_received(vectors)
        self._own = parts
        known = {part.to_state_part() for part in self.states.held}
        self.states.held += [part for part in (*self._own, *replicas) if part.to_state_part() not in known]
        if not is_sharded(stage):
            complete |= set(own)
        self.optimization.set_slices(one for p in self._own for one in p.slices)
        if replicas:
            self.replica = ReplicaUpdater(replicas, self.optimization, self._model.runtime, self._monitor)
        self._world, self._communicator = world, communicator
        self._aor = aor and len(world.pipelines) > 1
        if self._zero1:
            value_of, device = self.optimization.value_of, self._model.device
            self._gather = ParameterGather(self.shape, world, value_of, communicator, device)
        return received_bytes

    def _allocate(self, stage: WorldStage, own: list[int], communicator: Communicator) -> None:
        """Allocate memory for the parameters that this rank computes with."""
        shards: StageShards | None = None
        rank = communicator.rank
        memory = self._memory = self._shard_memory(stage, rank) if is_sharded(stage) else None
        if memory is not None:
            members = replica_ranks(stage, rank)
            given = self._model, self.shape, own, memory, members, communicator, self._monitor
            if is_tensor_parallel(stage):
                shards = StageTensorParts(*given, plan=self._plan_on(stage.parts))
            else:
                shards = StageShards(*given, same_rows=self._model.couples_rows)
        self.optimization.shards = shards
        self._model.shard(own if shards is not None else (), shards)
        if shards is None:
            for layer in own:
                self._model.materialise(layer)
        self.optimization.refresh_parameters()

    def _shard_memory(self, stage: WorldStage, rank: int) -> ShardMemory:
        """Return the memory of this rank's shards of the stage; ranges that are there keep theirs."""
        layers = range(stage.first_layer, stage.end_layer)
        index, _, count = share_of(stage, rank)
        return ShardMemory(self.shape, layers, index, count, self._model.device, self._memory)

    def _plan_on(self, devices: int) -> TensorPlan:
        """Return the tensor-parallel plan for replicas of ``devices`` devices.

        :raises TrainingError: the model has no such plan.
        """
        plan = self._plan
        problem = self._model.tensor_problem if plan is None else plan.find_problem(devices)
        if plan is None or problem is not None:
            raise TrainingError(
                f"the plan has a tensor-parallel stage of {devices} devices, which this model cannot use: {problem}; "
                "measure the profile again, or set planner.within_node = shard or replicate"
            )
        return plan

    def _fill(self, own: list[int], complete: set[int], digest: Callable[[int], str] | None) -> None:
        """Copy values held here to the memory that this rank computes with. Layers that can be provided are
        whole one at a time.
        """
        self.first_digests = {}
        for layer in own:
            self._monitor.tick()
            provided = layer in complete and layer not in self._model.held_layers
            if provided:
                self._model.provide([layer])
                self.optimization.refresh_parameters()
            if digest is not None and layer in complete:
                self.first_digests[layer] = digest(layer)
            self.states.copy_held_values(self._vectors_of(layer, own, tied=True), complete)
            if provided:
                self._model.drop([layer])
                self.optimization.refresh_parameters()
        self._model.materialise_buffers(own)

    def _vectors_of(
        self, layer: int, own: Collection[int], *, tied: bool = False
    ) -> tuple[ParameterVector, ...]:
        """Return the vectors that are kept with a layer.

        These are the layer's own vectors. With ``tied``, or if there is no ZeRO-1, they also include
        vectors shared with earlier layers, unless this rank has one of these layers.
        """
        if self._zero1 and not tied:
            return self.shape.vectors_of_layer(layer)
        vectors = self.shape.vectors_of_layer(layer, tied=True)
        return tuple(v for v in vectors if min(set(own).intersection(v.layers)) == layer)

    def leave(self) -> None:
        """End the generation."""
        if self.optimization.shards is not None:
            self.optimization.shards.end()
        self._world = self._communicator = self._gather = None

    # --- snapshots -----------------------------------------------------------------------------------

    def snapshot_parts(self, layers: Iterable[int], *, replica: bool) -> list[PartState]:
        """Return this generation's parts of these layers at the committed step, or the replicas, ascending.

        :raises StateError: the replica of one layer is not available.
        """
        if replica:
            self._finish()
        parts = [part for part in self.states.held if part.replica] if replica else self._own
        found: dict[int, list[PartState]] = {}
        for part in parts:
            homes = {name for vector in self.shape.vectors_of_layer(part.layer) for name in vector.names}
            slices = [one for one in part.slices if one.slice.name in homes]
            found.setdefault(part.layer, []).append(dataclasses.replace(part, slices=slices))
        missing = [layer for layer in layers if layer not in found]
        if missing:
            raise StateError(f"no replica of layers {missing} is held here")
        return [part for layer in layers for part in found[layer]]

    def own_tensors(self, names: Sequence[str]) -> Iterator[Tensor]:
        """Yield the memory of this rank's elements of each parameter, and of the optimizer's state for them, in
        the order of the parameters and their elements.
        """
        own = [one for part in self._own for one in part.slices if one.slice.name in names]
        for one in sorted(own, key=lambda one: (names.index(one.slice.name), one.slice.start)):
            yield self.optimization.value_of(one.slice)
            yield from state_tensors(one.state)

    # --- the step --------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Prepare for gradients to change: wait until the replica has copied the last ones."""
        if self.replica is not None:
            self.replica.await_gradients_copied()

    def update(self, owned: Collection[int], *, skipped: bool) -> None:
        """Apply the gradients in ``.grad`` to this rank's own parts; the replica follows in its own thread."""
        if self.replica is not None and not skipped:
            gradients = [self.optimization.gradient_of(one.slice) for one in self.replica.slices]
            self.replica.submit_update(gradients, self.optimization.options())
        self.optimization.step(owned, skipped=skipped)
        if self.optimization.shards is not None:
            self.optimization.shards.mark_values_changed()
        self._parked = set()
        followed = self.replica is not None and self.replica.error is None
        self.states.held = [*self._own, *(self.replica.parts if self.replica and followed else [])]

    def gather_parameters(self) -> None:
        """Gather the parameters that other owners updated (ZeRO-1).

        :raises CommunicationError: the group was aborted, or a peer is lost; only the own parts are at the
            new step.
        """
        assert self._gather is not None
        self._gather.run(self._monitor)

    # --- comparing replicas with their owners --------------------------------------------------------

    def check_replicas(self, step: int) -> tuple[Divergence, ...]:
        """Compare replicas with their owners' parts every ``CHECK_STEPS`` steps, and replace those that
        differ.

        :raises CommunicationError: the group was aborted, or a peer is lost; replicas that differ are not
            kept.
        """
        if step % CHECK_STEPS or not self._aor:
            return ()
        world, communicator = self._world, self._communicator
        assert world is not None and communicator is not None
        self._finish()
        rank = communicator.rank
        served: dict[int, list[PartState]] = {}
        followed: dict[int, list[_Key]] = {}
        own = {(part.layer, part.fractions): part for part in self._own}
        for layer in sorted({part.layer for part in self._own}):
            for copied in replica_assignments(world, layer):
                if copied.owner == rank:
                    served.setdefault(copied.holder, []).append(own[layer, copied.part])
                if copied.holder == rank:
                    followed.setdefault(copied.owner, []).append((layer, copied.part))
        differing, requested = self._compare(communicator, served, followed)
        if not (differing or requested):
            return ()
        return self._renew(communicator, differing, requested)

    def _compare(
        self,
        communicator: Communicator,
        served: dict[int, list[PartState]],
        followed: dict[int, list[_Key]],
    ) -> tuple[dict[_Key, int], list[tuple[int, PartState]]]:
        """Return the parts whose replica here differs, with their owner's rank, and own parts that others need
        again.
        """
        digests = {peer: b"".join(map(self.states.digest, parts)) for peer, parts in served.items()}
        sizes = {peer: _DIGEST_BYTES * len(keys) for peer, keys in followed.items()}
        theirs = self._exchange_bytes(communicator, digests, sizes)
        replicas = [part for part in self.states.held if part.replica]
        mine = {(part.layer, part.fractions): self.states.digest(part) for part in replicas}
        verdicts: dict[int, bytes] = {}
        differing: dict[_Key, int] = {}
        for peer, keys in followed.items():
            sent = [theirs[peer][i * _DIGEST_BYTES : (i + 1) * _DIGEST_BYTES] for i in range(len(keys))]
            bad = [not self._exact or mine.get(key) != one for key, one in zip(keys, sent, strict=True)]
            differing |= {key: peer for key, is_bad in zip(keys, bad, strict=True) if is_bad}
            verdicts[peer] = bytes(bad)
        answers = self._exchange_bytes(
            communicator, verdicts, {peer: len(parts) for peer, parts in served.items()}
        )
        requested = [
            (peer, part)
            for peer, parts in served.items()
            for part, is_bad in zip(parts, answers[peer], strict=True)
            if is_bad
        ]
        return differing, requested

    def _renew(
        self, communicator: Communicator, differing: dict[_Key, int], requested: list[tuple[int, PartState]]
    ) -> tuple[Divergence, ...]:
        """Replace replicas that differ by new ones from their owners."""
        rank = communicator.rank
        error = self.replica.error if self.replica is not None else None
        old = {(part.layer, part.fractions): part for part in self.states.held if part.replica}
        self.states.held = [
            p for p in self.states.held if not (p.replica and (p.layer, p.fractions) in differing)
        ]
        transfers = [
            m for peer, part in requested for m in self._transfers_of(part.layer, part.fractions, rank, peer)
        ]
        for (layer, fractions), peer in differing.items():
            transfers += self._transfers_of(layer, fractions, peer, rank)
        with torch.no_grad():
            self._exchange(transfers, communicator)
            new = [
                self.states.make_part(layer, self.shape.vectors_of_layer(layer), fractions, replica=True)
                for layer, fractions in differing
            ]
        self.states.discard_received(self.shape.vectors)
        if not differing:
            return ()
        self._end_replica()
        self.states.held += new
        kept = [part for part in self.states.held if part.replica]
        self.replica = ReplicaUpdater(kept, self.optimization, self._model.runtime, self._monitor)
        diverged = []
        for part in new:
            if error is not None:
                diverged.append(Divergence(layer=part.layer, detail=f"{type(error).__name__}: {error}"))
            elif self._exact or not _close(old[part.layer, part.fractions], part):
                start, end, of = part.fractions
                detail = (
                    f"the part from {start}/{of} to {end}/{of} differed from its owner's; it was copied from "
                    "the owner again"
                )
                diverged.append(Divergence(layer=part.layer, detail=detail))
        return tuple(diverged)

    def _transfers_of(self, layer: int, part: Fractions, source: int, target: int) -> list[PartTransfer]:
        """Return the transfers of the optimizer's state of a part."""
        transfers = []
        for number, vector in enumerate(self.shape.vectors):
            start, end = vector.part_range(*part)
            if vector.layer == layer and start < end:
                transfers.append(
                    PartTransfer(
                        source=source,
                        target=target,
                        layer=layer,
                        content="optimizer",
                        vector=number,
                        start=start,
                        end=end,
                    )
                )
        return transfers

    # --- helpers -------------------------------------------------------------------------------------

    @property
    def _exact(self) -> bool:
        """Whether a replica must equal its owner's part: an owner on another kind of device rounds
        differently.
        """
        return self._model.device.type == "cpu"

    def _exchange_bytes(
        self, communicator: Communicator, sent: dict[int, bytes], sizes: dict[int, int]
    ) -> dict[int, bytes]:
        """Send bytes to some ranks, and receive the given numbers of bytes from others."""
        device = self._model.device
        received = {peer: torch.empty(size, dtype=torch.uint8, device=device) for peer, size in sizes.items()}
        pendings = [
            communicator.send(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device), peer, "state")
            for peer, data in sorted(sent.items())
        ]
        pendings += [communicator.receive(tensor, peer, "state") for peer, tensor in sorted(received.items())]
        for pending in pendings:
            self._monitor.wait(communicator, pending)
        return {peer: bytes(self._monitor.to_host(tensor).numpy()) for peer, tensor in received.items()}

    def _exchange(self, transfers: Sequence[PartTransfer], communicator: Communicator) -> int:
        return StateExchange(
            transfers,
            endpoint=self.states,
            communicator=communicator,
            monitor=self._monitor,
            device=self._model.device,
        ).run()

    def _finish(self) -> None:
        """Wait until the replica is at the committed step, and release it if it failed."""
        if self.replica is not None:
            self.replica.finish()
            if self.replica.error is not None:
                self.states.held = [part for part in self.states.held if not part.replica]

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
