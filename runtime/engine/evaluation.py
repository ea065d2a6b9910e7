"""Evaluation of the committed state on the held-out data set, by the pipelines that train.

A held-out global batch is computed like a step without its backward pass: each pipeline takes its share of the
microbatches, forward only, in evaluation mode. Then all ranks meet in one sum, as in a VOTE: of loss, weight and
metrics, and of the wish to stop. So no rank is ahead of another by more than a batch, and whoever has passed the
last sum knows the same result as all others. Nothing of the training's state changes.
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
    """One rank's stage for one generation, forward only."""

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
        self._seats = {
            rows: rank_assignment(world, communicator.rank, rows, coupled=model.couples_rows)
            for rows in {held_out.microbatch_rows, held_out.last_microbatch_rows}
            if rows
        }

    def microbatches(self, batch: int) -> list[int]:
        """Return those of the pipeline's microbatches in which this rank has rows."""
        seat = self._seats[self._held_out.microbatch_rows]
        numbers = range(seat.microbatches)
        return [number for number in numbers if (own := self._seat(batch, number)) is not None and own.rows]

    def run(self, step: int, batch: int) -> StageTotals:
        """Compute this rank's part of held-out batch ``batch`` (from 0) with the state after ``step``.

        :raises CommunicationError: aborted, or a peer is lost.
        :raises TrainingError: the data set, the collate function or the loss is at fault.
        """
        totals = StageTotals()
        inputs: dict[int, tuple[Tensor, ...]] = {}
        outputs: dict[int, tuple[Tensor, ...]] = {}
        seat = self._seats[self._held_out.microbatch_rows]
        operations = forward_only(seat.stage, seat.stages, self.microbatches(batch))
        microbatches = StageMicrobatches(
            self._model,
            self._monitor,
            read=lambda microbatch: self._loader.load_held_out(
                step, batch, seat.first_microbatch + microbatch, self._communicator.check
            ),
            assignment=lambda microbatch: self._own(batch, microbatch),
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
        for microbatch in range(seat.microbatches):
            own = self._seat(batch, microbatch)
            if own is not None and not own.rows:
                self._model.join_gathers(seat.first_layer, seat.end_layer)
        return totals

    def _own(self, batch: int, microbatch: int) -> RankAssignment:
        seat = self._seat(batch, microbatch)
        assert seat is not None, "microbatches beyond the end are left out"
        return seat

    def _seat(self, batch: int, microbatch: int) -> RankAssignment | None:
        """Return this rank's part of a microbatch of its pipeline; ``None`` beyond the end of the data set."""
        whole = self._seats[self._held_out.microbatch_rows]
        rows = self._held_out.rows(batch, whole.first_microbatch + microbatch)
        return self._seats[rows] if rows else None
