"""The state of one trainer, and the training step with its commit
(``docs/explanation/commit-and-recovery.md``).

A step is COMPUTE, SYNC, VOTE, APPLY. The engine always knows which of three statements is true; a quiesced
trainer reports it, and a recovery relies on it:

* It holds ``complete_layers`` at ``committed_step``, and nothing else here is valid.
* It also holds the complete, all-reduced gradients of ``ready_step`` = ``committed_step`` + 1 (at VOTE).
* It is in APPLY, which nothing interrupts.

Under ZeRO-1 (``sharding``) the rank also holds parts of layers at ``committed_step``, even if these layers
are not complete: parameters are gathered after the commit.
"""

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from runtime.allocator import give_back_memory
from runtime.data.batches import to_device
from runtime.data.held_out import HeldOutSampler
from runtime.data.loader import BatchLoader
from runtime.data.reading import BatchReader, MicrobatchKey, preserve_generators
from runtime.data.sampling import Sampler
from runtime.device import DeviceRuntime
from runtime.engine.evaluation import EvaluationExecutor
from runtime.engine.executor import StageExecutor
from runtime.engine.gradients import GradientBuffers
from runtime.engine.links import StageLinks
from runtime.engine.microbatches import StageTotals
from runtime.engine.model_agreement import check_model_agreement
from runtime.engine.staged_state import StagedStateLoader, StagingCorruptedError
from runtime.engine.step_hook import StepHook
from runtime.errors import TrainingError
from runtime.groups.communicator import CommunicationEdge, Communicator, Members
from runtime.layers.digests import StateDigest, flip_bit, read_sums
from runtime.layers.finite_values import FiniteValues
from runtime.layers.model import Model, ModelTensor, first_batch
from runtime.layers.optimizer import Optimization
from runtime.layers.parked import ParkedLayers
from runtime.layers.state import LayerStates, StateError
from runtime.layers.transfer import LayerEndpoint, StateExchange
from runtime.layers.world import (
    RankAssignment,
    check_world,
    communication_edges,
    has_shards,
    is_sharded,
    owners_of_layer,
    rank_assignment,
    replica_ranks,
    replicated_layers,
    stage_of,
)
from runtime.monitoring.progress import ProgressMonitor
from runtime.precision import PRECISIONS
from runtime.snapshots.groups import layer_bytes, layer_groups
from runtime.snapshots.schedule import StepTimes
from runtime.snapshots.writer import SnapshotWriter
from runtime.training import Training, load_training
from runtime.zero.cells import common_cells
from runtime.zero.parts import PartTransfer
from runtime.zero.sharded_optimizer import NotElementwiseError, ShardedOptimization
from runtime.zero.sharding import Divergence, ShardedState
from statemachine.messages.trainer import ResumeRank, TrainingData, WorldData
from statemachine.messages.values import BuildStage, Evaluation, NotFinite, Vote, batch_of
from storage.buckets import Bucket, derive_buckets


class EngineError(RuntimeError):
    """An instruction that contradicts the state here: a bug in the control plane."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryStats:
    """Costs of entering a generation."""

    bytes_moved: int
    rendezvous_s: float
    state_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    vote: Vote
    stop_requested: bool
    """Whether any rank wants all ranks to stop after this step."""
    snapshot_requested: bool
    """Whether any rank wants a snapshot of the state after this step (``begin_snapshot``)."""
    step_s: float
    bubble_s: float
    microbatch_ms: float
    """Time for computing one microbatch, without waits; 0 if this rank has none."""
    diverged: tuple[Divergence, ...] = ()
    digests: dict[int, int] = field(default_factory=dict)
    """Digests of the state *before* this step's update, by layer; empty if replicas were not compared."""


class Engine:
    """The model, optimizer and step counter of one trainer.

    :param verified: skip the comparison of the model's parts with the whole because another trainer makes
        it.
    :param runtime: the runtime of ``device``; by default one is created.
    :raises TrainingError: the user's training function raised, or returned something invalid.
    """

    def __init__(
        self,
        data: TrainingData,
        device: torch.device,
        monitor: ProgressMonitor,
        *,
        verified: bool = False,
        runtime: DeviceRuntime | None = None,
    ) -> None:
        monitor.set_build_progress(BuildStage.FUNCTION)
        training = load_training(data)
        self.data = data
        self.monitor = monitor
        monitor.set_build_progress(BuildStage.CUTTING if verified else BuildStage.CHECKING)
        self.model = Model(training, data, device, verified=verified, runtime=runtime)
        monitor.runtime = self.model.runtime
        monitor.tick()
        self.optimization = make_optimization(self.model, data)
        self.sharding: ShardedState | None = None
        if isinstance(self.optimization, ShardedOptimization):
            self.model.make_contiguous()
            self.optimization.refresh_parameters()
            self.sharding = ShardedState(
                self.model,
                self.optimization,
                monitor,
                zero1=data.zero1,
                tensor_parallel=data.within_node in ("auto", "tensor"),
            )
        self.states = LayerStates(self.model, self.optimization)
        self.parked = ParkedLayers(self.model, self.optimization, self.states)
        """Complete layers in host memory."""
        sampler = Sampler(len(training.dataset), data.global_batch, data.seed)
        reader = partial(
            BatchReader,
            collate=training.collate,
            microbatch_rows=data.microbatch_rows,
            seed=data.seed,
            dtype=PRECISIONS[data.precision].parameters,
            find_problem=self.model.find_problem,
        )
        self._held_out = make_held_out(training, data)
        held_out = None
        if self._held_out is not None:
            held_out = reader(training.evaluation, sampler=self._held_out, name="Training.evaluation")
            self.model.check_held_out(held_out.read(MicrobatchKey(0, 1, 0)))
        self._loader = BatchLoader(
            reader(training.dataset, sampler=sampler),
            held_out,
            workers=data.data_workers,
            pinned=device.type == "cuda",
        )
        self._nominal_weight = self.model.loss.nominal_weight * data.global_batch
        if self.model.loss.nominal_weight != 1:
            # A power of two does not round gradients, so losses equal those of a loop without this factor.
            self._nominal_weight = 2.0 ** round(math.log2(self._nominal_weight))
        self.committed_step = 0
        self.ready_step: int | None = None
        self.vote: Vote | None = None
        """Vote of ``committed_step``."""
        self.evaluation: Evaluation | None = None
        """Evaluation of the state after ``committed_step``, if the current group has made one."""
        self._evaluated = 0
        """The newest step whose evaluation is known."""
        self.complete_layers: set[int] = set(range(self.model.layer_count))
        self.lineage = 0
        """Lineage of the last Resume that was obeyed."""
        self.snapshots: SnapshotWriter | None = None
        self.owned_layers: frozenset[int] = frozenset()
        """Layers of this rank's stage in the newest generation; only these are kept up to date."""
        self._compared_layers: tuple[int, ...] = ()
        """Owned layers of which other ranks have copies."""
        self._compare = False
        """Whether the committed state is to be compared with that of other owners."""
        self._sharded = False
        """Whether this rank's stage shards, so that the rank has no whole layer."""
        self._buffers: list[tuple[ModelTensor, Tensor]] = []
        self._communicator: Communicator | None = None
        self._gradients: GradientBuffers | None = None
        self._executor: StageExecutor | None = None
        self._values = FiniteValues(self.model.layer_count)
        self._skipped_batches: tuple[int, ...] = ()
        """Batches that the sample order leaves out in the current generation."""
        self._rank_names: tuple[str, ...] = ()
        """Name of the node of each rank of the current generation."""
        self._evaluator: EvaluationExecutor | None = None
        self._hook: StepHook | None = None
        if training.on_step is not None:
            self._hook = StepHook(training.on_step, data.global_batch, monitor)
        self._calls_hook = False
        """Whether this rank calls the hook in the current generation."""

    def warm_up(self) -> None:
        """Compile the layers if the job compiles them, so that neither a step nor a recovery has to."""
        if self.data.compile:
            rows = self.data.microbatch_rows
            batch = first_batch(self.model.training, rows, PRECISIONS[self.data.precision].parameters)
            with self.monitor.reading_data():  # The compiler may take long without being hung.
                self.model.warm_up(to_device(batch, self.model.device), rows, self.monitor.tick)

    def close(self) -> None:
        """End the processes that read samples, because another job's engine replaces this one."""
        self._loader.close()

    # --- between generations ---------------------------------------------------------------------

    def commit_or_discard(
        self, step: int, vote: Vote | None, lineage: int = 0, refilled_layers: frozenset[int] = frozenset()
    ) -> None:
        """Move to ``step``: apply the gradients that are ready, discard the step in flight, or reset.

        :param lineage: if it differs from the engine's, the state here belongs to a past that was undone.
        :param refilled_layers: layers that ``restore`` is about to fill; the memory of those that are held
            stays.
        :raises EngineError: ``step`` must be applied, but its vote is missing.
        """
        if self.snapshots is not None:
            self.snapshots.finish()
        undone, self.lineage = lineage != self.lineage, lineage
        if undone:
            self._reset(step, vote, refilled_layers)
        elif self.ready_step is not None and self.ready_step == step:
            if vote is None:
                raise EngineError(f"step {step} must be applied, but its vote is missing")
            self._apply(vote, gather=False)
        elif self.committed_step == step:
            self._discard()
        else:
            # This trainer is new, or was absent: its state is outdated, and all of it comes from others.
            self._reset(step, vote, refilled_layers)
        self._leave()

    def stage_layers(self, resume: ResumeRank) -> frozenset[int]:
        """Return the layers of this rank's stage."""
        return frozenset(self._assignment_of(resume).layers)

    def _assignment_of(self, resume: ResumeRank) -> RankAssignment:
        coupled = self.model.couples_rows
        return rank_assignment(resume.world, resume.rank, self.data.microbatch_rows, coupled=coupled)

    def restore(self, directory: Path, resume: ResumeRank) -> None:
        """Restore the staged layers of this rank's stage and drop all others; call this after
        ``commit_or_discard``.

        Nothing is held if this raises.

        :raises StateError: the layers do not belong to this model.
        :raises StagingCorruptedError: they cannot be read from there.
        """
        layers = self.stage_layers(resume)
        self._reset(resume.step, resume.vote, layers)
        give_back_memory()
        share = None if self.sharding is None else self.sharding.restore(resume.world, resume.rank)
        try:
            with StagedStateLoader(directory, self.states, self.monitor.tick, share=share) as staged:
                for layer in sorted(layers):
                    self.monitor.tick()
                    staged.load_layer(layer)
                staged.verify()
        except (StateError, StagingCorruptedError):
            self._reset(resume.step, resume.vote)
            raise
        if self._hook is not None:
            self._hook.called_step = resume.step
        if not is_sharded(stage_of(resume.world, resume.rank)):
            self.complete_layers |= layers

    def enter(self, resume: ResumeRank, communicator: Communicator) -> EntryStats:
        """Form the groups, get the state that is missing, and prepare for training from ``resume.step``.

        :raises CommunicationError: the group was aborted, or a peer is lost. Layers that had arrived
            completely are kept.
        :raises TrainingError: it is the first step, and the trainers created different models; or the plan
            shards stages of a model that cannot be sharded, because the profile that was given says that
            it can.
        """
        world = resume.world
        check_world(world, self.model.layer_count, self.data.global_batch // self.data.microbatch_rows)
        if self.sharding is None and has_shards(world):
            raise TrainingError(
                "the plan shards a stage, and this model cannot be sharded: its optimizer is not known to update each "
                "element independently, and the job's profile does not say so; measure the profile again, or set "
                "planner.within_node = replicate"
            )
        assignment = self._assignment_of(resume)
        buckets = derive_buckets(
            self.model.parameter_layers, owners_of_layer(world), self.model.parameter_sizes
        )
        started = time.monotonic()
        edges = self._edges(world)
        transfers: tuple[PartTransfer, ...] = ()
        if self.sharding is not None:
            transfers = self.sharding.transfers(resume)
            edges |= self.sharding.edges(resume, transfers)
        with self.monitor.idle():
            communicator.form(self._groups(world, buckets), edges)
        formed = time.monotonic()
        self._make_room(resume, assignment)
        self._provide(assignment, world)
        if self.sharding is not None:
            received_bytes = self.sharding.enter(
                resume, communicator, transfers, self.complete_layers, self.states.digest
            )
        else:
            received_bytes = StateExchange(
                world.transfers,
                endpoint=LayerEndpoint(self.states, self.complete_layers, self.parked),
                communicator=communicator,
                monitor=self.monitor,
                device=self.model.device,
            ).run()
        self._sharded = self.model.sharded_layers == frozenset(assignment.layers)
        missing = set(assignment.layers) - self.complete_layers
        if missing and not self._sharded:
            raise EngineError(
                f"the plan assigns layers {sorted(missing)} to this rank, but no rank sent them"
            )
        self.owned_layers = frozenset(assignment.layers)
        self._compared_layers = self._layers_to_compare(world)
        self._compare = False
        if resume.step == 0:
            layers, sharding = self.model.layer_count, self.sharding
            digests = self.compute_digests() if sharding is None else sharding.first_digests
            check_model_agreement(digests, layers, communicator, self.model.device, self.monitor)
        if self.snapshots is not None:
            groups = layer_groups(
                world,
                resume.nodes,
                resume.rank,
                resume.protection,
                layer_bytes(self.model),
                zero1=self.data.zero1,
                coupled=self.model.couples_rows,
            )
            self.snapshots.begin_generation(groups, resume.step)
        self._communicator, self._calls_hook = communicator, resume.rank == 0
        self.model.set_recompute(assignment.recompute)
        if self.sharding is not None and has_shards(world):
            self._gradients = GradientBuffers.from_cells(
                self.model, self.sharding.shape, world, communicator, self.sharding.optimization.shards
            )
        else:
            self._gradients = GradientBuffers.from_buckets(self.model, buckets, communicator)
        links = StageLinks(self.model, communicator, self.monitor)
        self._executor = StageExecutor(
            model=self.model,
            loader=self._loader,
            assignment=assignment,
            communicator=communicator,
            links=links,
            gradients=self._gradients,
            monitor=self.monitor,
            values=self._values,
        )
        self._skipped_batches = resume.skipped_batches
        self._rank_names = resume.nodes or tuple(f"rank {rank}" for rank in range(communicator.size))
        self.evaluation, self._evaluated = None, resume.evaluated
        if self._held_out is not None:
            self._evaluator = EvaluationExecutor(
                model=self.model,
                held_out=self._held_out,
                loader=self._loader,
                world=world,
                communicator=communicator,
                links=links,
                monitor=self.monitor,
            )
        if assignment.rows and (assignment.is_first or assignment.is_last or self.model.needs_batch):
            self._loader.plan(self._keys(assignment))
        return EntryStats(
            bytes_moved=received_bytes,
            rendezvous_s=formed - started,
            state_s=time.monotonic() - formed,
        )

    def _layers_to_compare(self, world: WorldData) -> tuple[int, ...]:
        """Return the layers of which this rank and others have copies, under ZeRO-1 whole ones."""
        zero1 = self.data.zero1
        if self.data.compare_replicas_every < 1 or (zero1 and self._sharded):
            return ()
        return tuple(sorted(self.owned_layers & replicated_layers(world, whole=zero1)))

    def _make_room(self, resume: ResumeRank, assignment: RankAssignment) -> None:
        """Drop layers that are not complete, and park and drop layers as the plan says, before new state
        arrives.

        Where state is in parts, incomplete parameters may be filled from them, and are not dropped.
        """
        needed = frozenset(assignment.layers)
        dropped = frozenset(resume.dropped) - needed
        self.complete_layers -= dropped
        if self.sharding is not None:
            self.model.drop(dropped)
            self.sharding.make_room(resume.parked, dropped, stage_of(resume.world, resume.rank))
            give_back_memory()
            return
        self.parked.free(dropped)
        self.model.drop(self.model.held_layers - self.complete_layers)
        self.optimization.release_dropped()
        for layer in sorted(
            (frozenset(resume.parked) & self.complete_layers & self.model.held_layers) - needed
        ):
            self.monitor.tick()
            self.parked.park(layer)
        give_back_memory()
        for layer in sorted(needed & self.parked.layers):
            self.monitor.tick()
            self.parked.unpark(layer)

    def _provide(self, assignment: RankAssignment, world: WorldData) -> None:
        """Hold the initial values that this rank needs, and drop all others."""
        if not self.model.can_provide or self.committed_step > 0:
            return
        sent = {transfer.layer for transfer in world.transfers if transfer.source == assignment.rank}
        needed = sent if is_sharded(stage_of(world, assignment.rank)) else {*assignment.layers, *sent}
        self.model.drop(self.model.held_layers - needed)
        for layer in sorted(needed & self.complete_layers):
            self.monitor.tick()
            self.model.provide([layer])

    def _groups(self, world: WorldData, buckets: Collection[Bucket]) -> list[Members]:
        """Return the groups of ranks that will sum or gather tensors."""
        if self.sharding is None or not has_shards(world):
            return sorted({bucket.owners for bucket in buckets})
        groups = {
            cell.owners
            for vector in self.sharding.shape.vectors
            if vector.trained
            for cell in common_cells(world, vector.layers)
        }
        groups |= {
            replica_ranks(stage, rank)
            for p in world.pipelines
            for stage in p.stages
            if is_sharded(stage)
            for rank in stage.ranks[:: stage.parts]
        }
        return sorted(groups)

    def _edges(self, world: WorldData) -> frozenset[CommunicationEdge]:
        """Return which ranks will send to which others; a smaller microbatch may use other devices of a stage."""
        rows = {self.data.microbatch_rows}
        if self._held_out is not None and self._held_out.last_microbatch_rows:
            rows.add(self._held_out.last_microbatch_rows)
        coupled = self.model.couples_rows
        return frozenset().union(*(communication_edges(world, number, coupled=coupled) for number in rows))

    def _keys(self, assignment: RankAssignment) -> Iterator[MicrobatchKey]:
        """Yield, without end, the microbatches that this rank will read in the current generation. It must
        have rows.
        """
        first, evaluator, held_out = assignment.first_microbatch, self._evaluator, self._held_out
        numbers = range(first, first + assignment.microbatches)
        evaluated = self._evaluated
        for step in count(self.committed_step):
            if step > self.committed_step:
                batch = batch_of(step, self._skipped_batches)
                yield from (MicrobatchKey(batch, 0, number) for number in numbers)
            if evaluator is not None and held_out is not None and step > evaluated and held_out.is_due(step):
                for batch in range(held_out.batches):
                    yield from (
                        MicrobatchKey(step, batch + 1, first + own) for own in evaluator.microbatches(batch)
                    )

    # --- the user's hook ---------------------------------------------------------------------------

    def call_hook(self, step_s: float) -> None:
        """Call the hook for the step that was just committed, if this rank calls it.

        :raises TrainingError: the hook raised.
        """
        if self._hook is not None and self._calls_hook:
            assert self.vote is not None
            self._hook.call(self.committed_step, self.vote, step_s)

    def call_missed_hook(self) -> None:
        """Call the hook for the committed step, after ``enter``, if no rank of this group has called it.

        :raises TrainingError: the hook raised.
        :raises CommunicationError: the group was aborted, or a peer is lost.
        """
        hook, step = self._hook, self.committed_step
        if hook is None or step == 0:
            return
        [calls] = self._summed([float(hook.called_step == step)])
        if self._calls_hook and not calls:
            assert self.vote is not None
            hook.call(step, self.vote, None)

    # --- evaluation ------------------------------------------------------------------------------

    @property
    def evaluation_due(self) -> bool:
        """Whether the committed state must be evaluated before the next step."""
        step = self.committed_step
        return self._held_out is not None and self._held_out.is_due(step) and self._evaluated < step

    def evaluate(self, stop_requested: Callable[[], bool]) -> bool:
        """Evaluate the committed state on the held-out data set and set ``evaluation``.

        :param stop_requested: called once for each held-out batch, just before its sum.
        :returns: whether any rank requested a stop. There is then no result, unless it was the last batch.
        :raises CommunicationError: the group was aborted, or a peer is lost.
        :raises TrainingError: the user's code failed, or the weights of the loss have a negative sum.
        """
        evaluator, held_out = self._evaluator, self._held_out
        if evaluator is None or held_out is None:
            raise EngineError("no generation was entered, or the job has no held-out data set")
        names, started = self.model.loss.metric_names, time.monotonic()
        sums = [0.0] * (2 + 2 * len(names))
        with self.model.preserve_buffers(), preserve_generators(self.model.device):
            for batch in range(held_out.batches):
                totals = evaluator.run(self.committed_step, batch)
                took_s = time.monotonic() - started
                own = [stop_requested(), held_out.dataset_length, took_s, *totals.to_list(names)]
                stops, length, took_s, *more = self._summed(own)
                self._check_length(length, held_out)
                sums = [total + part for total, part in zip(sums, more, strict=True)]
                if stops and batch < held_out.batches - 1:
                    return True
        assert self._communicator is not None
        loss, weight, *metrics = sums
        _check_weight(weight, f"the evaluation after step {self.committed_step}")
        self.evaluation = Evaluation(
            loss=loss / weight if weight else math.nan,
            weight=weight,
            metrics=_means(names, metrics),
            took_s=took_s / self._communicator.size,
        )
        self._evaluated = self.committed_step
        return stops > 0

    def _check_length(self, total: float, held_out: HeldOutSampler) -> None:
        """Check that the held-out data set has the same length on all ranks.

        :raises TrainingError: the lengths differ.
        """
        assert self._communicator is not None
        if total != held_out.dataset_length * self._communicator.size:
            raise TrainingError(
                f"Training.evaluation has {held_out.dataset_length} samples here and a different number elsewhere: "
                f"{total / self._communicator.size:g} on average. Every trainer must have the same held-out "
                "data set; look for files that differ between hosts"
            )

    def _summed(self, numbers: list[float | Tensor]) -> list[float]:
        """Return the sums of ``numbers`` over all ranks. The host waits for the device once, for all of them."""
        assert self._communicator is not None
        self.monitor.tick()
        known = [0.0 if isinstance(number, Tensor) else number for number in numbers]
        ballot = torch.tensor(known, dtype=torch.float64, device=self.model.device)
        for index, number in enumerate(numbers):
            if isinstance(number, Tensor):
                ballot[index] = number
        pending = self._communicator.all_reduce(ballot, self._communicator.world)
        with self.monitor.idle("vote"):
            self._communicator.wait(pending)
        sums: list[float] = self.monitor.read_values(ballot)
        return sums

    # --- the step --------------------------------------------------------------------------------

    def step(
        self, stop_requested: Callable[[], bool], snapshot_requested: Callable[[], bool] = lambda: False
    ) -> StepResult:
        """Run one step, up to and including its commit.

        :param stop_requested: called once, just before VOTE, like ``snapshot_requested``.
        :raises CommunicationError: the group was aborted, or a peer is lost; ``ready_step`` says how far
            the step got.
        :raises TrainingError: the user's code failed, or the weights of the loss have a negative sum.
        """
        executor, gradients = self._executor, self._gradients
        if executor is None or gradients is None:
            raise EngineError("no generation was entered")
        started, began_s = time.monotonic(), time.time()
        self.monitor.begin_step()
        if self.monitor.flip_requested:
            self.monitor.flip_requested = False
            self._flip_bit()
        self._save_buffers()
        if self.sharding is not None:
            self.sharding.begin_step()
        scale = self.optimization.loss_scale
        loss_scale = 1.0 if scale is None else scale.value
        totals = executor.run(
            self.committed_step + 1,
            batch_of(self.committed_step + 1, self._skipped_batches),
            loss_scale / self._nominal_weight,
        )
        gradients.finish(self.monitor)
        self.ready_step = self.committed_step + 1
        vote, stop, snap = self._hold_vote(totals, loss_scale, stop_requested(), snapshot_requested())
        self.monitor.account_bubbles()
        bubble_s, sync_s = self.monitor.bubble_s, self.monitor.sync_s
        if self.snapshots is not None:
            self.snapshots.finish()
        with self.monitor.trace.span("apply"):
            digests = self._digest_replicas() if self._compare else {}
            self._apply(vote)
            diverged = self.sharding.check_replicas(self.committed_step) if self.sharding is not None else ()
        every = self.data.compare_replicas_every
        self._compare = bool(self._compared_layers) and (snap or self.committed_step % every == 0)
        step_s = time.monotonic() - started
        self.monitor.trace.add("step", began_s, began_s + step_s, self.committed_step)
        if self.snapshots is not None:
            self.snapshots.record_step(StepTimes(step_s=step_s, waits_s=bubble_s, sync_s=sync_s))
        return StepResult(
            vote=vote,
            stop_requested=stop,
            snapshot_requested=snap,
            step_s=step_s,
            bubble_s=bubble_s,
            microbatch_ms=executor.stopwatch.microbatch_ms(),
            diverged=diverged,
            digests=digests,
        )

    def begin_snapshot(self, generation: int) -> None:
        """Begin a snapshot after a step whose vote requested one; its state is copied during the next step."""
        assert self.snapshots is not None and self.vote is not None
        # From here on, bubbles belong to the next step.
        self.monitor.begin_step()
        with self.monitor.trace.span("snapshot"):
            self.snapshots.begin(generation, self.committed_step, self.vote)

    def _digest_replicas(self) -> dict[int, int]:
        """Return digests of the committed state of layers of which other ranks have copies, just before it is
        updated.

        A snapshot of that state has been copied by then, so a bit that flipped before it was copied is found.
        Under ZeRO-1 only the parameters are the same elsewhere.
        """
        found = {}
        for layer in self._compared_layers:
            self.monitor.tick()
            found[layer] = digest = StateDigest()
            parameters = (
                one.value.detach() for one in self.model.tensors_of(layer) if one.kind == "parameter"
            )
            for tensor in parameters if self.data.zero1 else self._changing_tensors(layer):
                digest.update(tensor)
        read_sums(list(found.values()), self.monitor.read_values)
        return {layer: int(digest) for layer, digest in found.items()}

    def _changing_tensors(self, layer: int) -> Iterator[Tensor]:
        """Yield the memory of this rank's parameters and optimizer state of a layer."""
        if self.sharding is None:
            yield from self.states.changing_tensors(layer)
            return
        tensors = [tensor for tensor in self.model.tensors_of(layer) if tensor.kind == "parameter"]
        yield from self.sharding.own_tensors([tensor.name for tensor in tensors])

    def _flip_bit(self) -> None:
        """Flip a bit of the first parameter here, as an injected fault."""
        for layer in sorted(self.owned_layers):
            for tensor in self._changing_tensors(layer):
                if tensor.is_floating_point() and tensor.numel():
                    flip_bit(tensor)
                    return

    def compute_digests(self) -> dict[int, str]:
        """Return digests of the parameters of each owned layer."""
        digests = {}
        for layer in sorted(self.owned_layers):
            self.monitor.tick()
            with self.model.whole_layer(layer), self.monitor.waiting_for_device():
                digests[layer] = self.states.digest(layer)
        return digests

    def _hold_vote(
        self, totals: StageTotals, scale: float, stop: bool, snap: bool
    ) -> tuple[Vote, bool, bool]:
        """Hold the VOTE: passing it proves that every rank of the world holds complete gradients.

        Losses and metrics are sums divided by sums of weights. Gradients are those of the sum of losses,
        times ``scale`` divided by the nominal weight (``_divisor``).

        :raises TrainingError: the sum of weights is negative.
        """
        assert self._gradients is not None
        squared, broken = self._gradients.squared_norm()
        names = self.model.loss.metric_names
        sums = self._summed([squared, broken, stop, snap, *totals.to_list(names)])
        total_squared, total_broken, stops, snaps, loss, weight, *metrics = sums
        _check_weight(weight, f"step {self.committed_step + 1}")
        # The sum of gradients is divided by the weight.
        overflowed = total_broken > 0 or not (math.isfinite(total_squared) and math.isfinite(weight))
        vote = Vote(
            loss=loss / weight if weight else 0.0,
            gradient_norm=math.sqrt(total_squared) / self._divisor(weight, scale),
            skipped=overflowed or weight == 0,
            weight=weight,
            loss_scale=scale,
            learning_rate=self.optimization.learning_rate(),
            metrics=_means(names, metrics),
            evaluation=self.evaluation,
            skipped_batches=self._skipped_batches,
            not_finite=self._find_not_finite() if overflowed else None,
        )
        return vote, stops > 0, snaps > 0

    def _find_not_finite(self) -> NotFinite | None:
        """Return the first value of the step that was not finite on any rank.

        This is a second round of a VOTE that skips the update: a rank passes the VOTE with it, so all votes of
        the step are equal.
        """
        assert self._gradients is not None and self._communicator is not None
        layers = {
            max(self.model.parameter_layers[name]) for name in self._gradients.names_not_finite(self.monitor)
        }
        own = self._values.find_first(self.monitor, layers)
        said: list[float | Tensor] = [0.0] * self._communicator.size
        said[self._communicator.rank] = float(own)
        codes = self._summed(said)
        first = min((code for code in codes if code), default=0)
        if not first:
            return None
        value, layer = self._values.meaning(int(first))
        nodes = {name for name, code in zip(self._rank_names, codes, strict=True) if code == first}
        return NotFinite(
            layer=layer, name=self.model.layer_name(layer), value=value, nodes=tuple(sorted(nodes))
        )

    def _divisor(self, weight: float, scale: float) -> float:
        """Return the number to divide the summed gradients by; exactly 1 for a mean over rows."""
        return (weight or 1.0) / self._nominal_weight * scale

    def _apply(self, vote: Vote, *, gather: bool = True) -> None:
        """Run APPLY: clip, update, and advance the schedule, which commits the step. Nothing interrupts this.

        Under ZeRO-1 the parameters of other owners are gathered after the commit if possible.

        :raises CommunicationError: they could not be gathered; the layers are not complete here.
        """
        assert self.ready_step is not None and self._gradients is not None
        self.monitor.tick()
        clip = self.data.clip_gradient_norm
        if not vote.skipped:
            factor = 1 / self._divisor(vote.weight, vote.loss_scale)
            if clip is not None:
                factor *= min(1.0, clip / (vote.gradient_norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
            if factor != 1:
                self._gradients.scale(factor)
        if self.sharding is not None:
            self.sharding.update(self.owned_layers, skipped=vote.skipped)
        else:
            self.optimization.step(self.owned_layers, skipped=vote.skipped)
        if self.optimization.loss_scale is not None and vote.weight:
            self.optimization.loss_scale.advance(overflowed=vote.skipped)
        self.committed_step, self.ready_step, self.vote = self.ready_step, None, vote
        self.evaluation = None
        self._buffers = []
        whole = frozenset() if self._sharded else self.owned_layers
        if self.model.held_layers != whole or self.complete_layers != whole:
            # At the first commit of a generation, layers that others own now become outdated here.
            self.complete_layers = set(whole)
            self.parked.free()
            self.model.drop(set(range(self.model.layer_count)) - whole)
            self.optimization.release_dropped()
            self.model.release_initial_values()
            give_back_memory()
        self.monitor.tick()
        if self.data.zero1 and self.sharding is not None and not vote.skipped:
            self.complete_layers = set()
            if gather:
                self.sharding.gather_parameters()
                self.complete_layers = set(whole)

    # --- undoing ---------------------------------------------------------------------------------

    def _save_buffers(self) -> None:
        """Save the running statistics, which COMPUTE changes: a step that is redone must not count its rows
        twice.
        """
        self._buffers = [
            (tensor, tensor.value.clone())
            for layer in sorted(self.owned_layers)
            for tensor in self.model.tensors_of(layer)
            if tensor.kind == "buffer"
        ]

    def _reset(self, step: int, vote: Vote | None, refilled_layers: frozenset[int] = frozenset()) -> None:
        """Release all state and move to ``step``; the memory of ``refilled_layers`` stays.

        Under ZeRO-1 no memory stays: an operation that gathered parameters in place may be stuck and still
        write into it.
        """
        self._discard()
        layers = frozenset(range(self.model.layer_count))
        self.parked.free()
        if self.sharding is not None:
            self.sharding.clear()
        self.model.drop(layers - refilled_layers if self.sharding is None else layers)
        self.optimization.release_dropped()
        self.complete_layers = set()
        self.committed_step, self.vote, self.evaluation = step, vote, None

    def _discard(self) -> None:
        """Discard the step in flight."""
        self.ready_step = None
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.value.copy_(value)  # A layer may have assigned another tensor to the attribute.
        self._buffers = []

    def _leave(self) -> None:
        """End the generation. The next one gets new buffers because a stuck thread may still write into these."""
        if self._gradients is not None:
            self._gradients.close()
        if self.sharding is not None:
            self.sharding.leave()
        self._communicator = self._gradients = self._executor = self._evaluator = None


def _check_weight(weight: float, where: str) -> None:
    """:raises TrainingError: the sum of the weights that the loss returned is negative."""
    if weight < 0:
        raise TrainingError(
            f"the weights of the loss in {where} have the sum {weight:g}; return (sum, weight) with a weight of at "
            "least 0, the number of rows or tokens that count"
        )


def _means(names: Sequence[str], sums: list[float]) -> dict[str, float]:
    """Return the mean of each metric.
    :param sums: sum and weight of each metric (``StageTotals.to_list``).
    """
    found = zip(names, sums[::2], sums[1::2], strict=True)
    return {name: total / weight for name, total, weight in found if weight}


def make_optimization(model: Model, data: TrainingData) -> Optimization:
    """Return an optimizer over parts of layers if the job needs it or may come to need it, otherwise one over
    whole layers.

    :raises TrainingError: the factory failed, the schedule is shorter than the job, or the job uses zero1 and the
        optimizer does not allow it.
    """
    optimization = _make_optimization(model, data)
    optimization.check_length(data.steps)
    return optimization


def _make_optimization(model: Model, data: TrainingData) -> Optimization:
    if data.zero1:
        return ShardedOptimization(model)
    if data.within_node == "replicate":
        return Optimization(model)
    try:
        return ShardedOptimization(model)
    except NotElementwiseError:
        return Optimization(model)


def make_held_out(training: Training, data: TrainingData) -> HeldOutSampler | None:
    """Return the schedule and sampling of evaluations, or ``None`` if the job makes none."""
    if data.evaluation_every_steps < 1 or training.evaluation is None:
        return None
    return HeldOutSampler(
        dataset_length=len(training.evaluation),
        global_batch=data.global_batch,
        microbatch_rows=data.microbatch_rows,
        steps=data.steps,
        every_steps=data.evaluation_every_steps,
        max_batches=data.evaluation_batches,
    )
