"""``Training.on_step``: the user's hook, which rank 0 of a generation calls after each committed step.

Rank 0 votes on a step only after it has called the hook for the previous one. When a group forms, only the
committed step's call can therefore be missing, and the group sums up whether any of its ranks has made it.
"""

from collections.abc import Callable

from runtime.errors import TrainingError
from runtime.monitoring.progress import ProgressMonitor
from runtime.tracebacks import describe_error
from runtime.training import StepInfo
from statemachine.messages.values import Vote


class StepHook:
    """The hook as one rank calls it."""

    def __init__(self, hook: Callable[[StepInfo], object], rows: int, monitor: ProgressMonitor) -> None:
        """Create the hook's caller.
        :param rows: samples of a global batch.
        """
        self._hook, self._rows, self._monitor = hook, rows, monitor
        self.called_step = 0
        """The newest step that needs no call: this rank made it, or the state came from a snapshot."""

    def call(self, step: int, vote: Vote, step_s: float | None) -> None:
        """Call the hook for a committed step.

        :param step_s: duration of the step; ``None``: it is unknown.
        :raises TrainingError: the hook raised.
        """
        counts_tokens = vote.weight > self._rows
        info = StepInfo(
            step=step,
            loss=vote.loss,
            weight=vote.weight,
            gradient_norm=vote.gradient_norm,
            learning_rate=vote.learning_rate,
            skipped=vote.skipped,
            metrics=dict(vote.metrics),
            step_s=step_s,
            samples_per_s=self._rows / step_s if step_s else None,
            tokens_per_s=vote.weight / step_s if step_s and counts_tokens else None,
        )
        try:
            with self._monitor.reading_data():  # It may wait for a disk or a server without being hung.
                self._hook(info)
        except (Exception, SystemExit) as error:
            raise TrainingError(
                f"Training.on_step raised {describe_error(error)} for step {step}; the step is committed"
            ) from error
        self.called_step = step
