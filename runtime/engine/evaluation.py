"""Evaluation of the committed state on the held-out data set, by the pipelines that train.

A held-out global batch is computed like a step without its backward pass: each pipeline takes its share of
the microbatches, forward only, in evaluation mode. All ranks then sum loss, weight, metrics and the wish to
stop, as in a VOTE. No rank is therefore ahead of another by more than a batch, and all ranks that have
passed the last sum know the same result. Nothing in the training state changes.
"""

from torch import Tensor

from runtime.data.held_out import HeldOutSampler
from runtime.data.loader import BatchLoader
from runtime.engine.links import StageLinks
from runtime.engine.microbatches import StageMicrobatches, StageTotals
from runtime.engine.schedule import AwaitReceived, Forward, ReceiveActivation, SendActivation, forward_only
from runtime.groups.communicator import Communicator
from runtime.layers.model import Model
from runtime.layers.world import RankAssignment, rank_assignment
from runtime.monitoring.progress import ProgressMonitor
from runtime.monitoring.stopwatch import Stopwatch
from statemachine.messages.trainer import WorldData


class EvaluationExecutor:
    """The evaluation of one rank's stage in one generation."""

    def __init__(
        self,
        *,
        model: Model,
        held_out: HeldOutSampler,
        loader: BatchLoader,
        world: WorldData,
        communicator: Communicator,
        links: StageLinks,
        monitor: ProgressMonitor,
    ) -> None:
        self._model = model
        self._held_out = held_out
        self._loader = loader
        self._communicator = communicator
        self._links = links
        self._monitor = monitor
        self._stopwatch = Stopwatch(model.runtime, monitor)
        self._assignments = {
            rows: rank_assignment(world, communicator.rank, rows, coupled=model.couples_rows)
            for rows in {held_out.microbatch_rows, held_out.last_microbatch_rows}
            if rows
        }

    def microbatches(self, batch: int) -> list[int]:
        """Return the pipeline's microbatches in which this rank has rows."""
        return [number for number, own in self._assignments_of(batch).items() if own.rows]

    def run(self, step: int, batch: int) -> StageTotals:
        """Compute this rank's part of held-out batch ``batch`` (from 0) with the state after ``step``.

        :raises CommunicationError: the group was aborted, or a peer is lost.
        :raises TrainingError: the data set, the collate function or the loss failed.
        """
        totals = StageTotals()
        inputs: dict[int, tuple[Tensor, ...]] = {}
        outputs: dict[int, tuple[Tensor, ...]] = {}
        assignment = self._assignments[self._held_out.microbatch_rows]
        assignments = self._assignments_of(batch)
        operations = forward_only(assignment.stage, assignment.stages, self.microbatches(batch))
        microbatches = StageMicrobatches(
            self._model,
            self._monitor,
            read=lambda microbatch: self._loader.load(
                step, assignment.first_microbatch + microbatch, self._communicator.check, batch=batch + 1
            ),
            assignment=assignments.__getitem__,
            step=self._held_out.pseudo_step(batch),
            rows=self._held_out.microbatch_rows,
        )
        self._stopwatch.begin_step()
        self._links.begin((o for o in operations if isinstance(o, ReceiveActivation)), microbatches)
        for operation in operations:
            self._communicator.check()
            self._monitor.tick()
            match operation:
                case AwaitReceived(microbatch=microbatch):
                    self._links.await_sent(microbatch)
                case ReceiveActivation(microbatch=microbatch):
                    inputs[microbatch] = self._links.receive()
                case Forward(microbatch=microbatch):
                    received = inputs.pop(microbatch, ())
                    outputs[microbatch] = microbatches.forward(
                        microbatch, received, totals, self._stopwatch, train=False
                    )
                case SendActivation(microbatch=microbatch):
                    self._links.send_activation(microbatch, outputs.pop(microbatch))
        # The last microbatch of a data set may have fewer rows than the stage has devices.
        for own in assignments.values():
            if not own.rows:
                self._model.join_gathers(own.first_layer, own.end_layer)
        return totals

    def _assignments_of(self, batch: int) -> dict[int, RankAssignment]:
        """Return this rank's assignment for each microbatch of its pipeline that is not beyond the end of the
        data set.
        """
        whole = self._assignments[self._held_out.microbatch_rows]
        rows = {n: self._held_out.rows(batch, whole.first_microbatch + n) for n in range(whole.microbatches)}
        return {number: self._assignments[count] for number, count in rows.items() if count}
