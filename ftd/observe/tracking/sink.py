"""The interface of all sinks: TensorBoard, MLflow, Weights & Biases."""

from collections.abc import Sequence
from typing import Protocol

from ftd.observe.tracking.record import Cursor
from ftd.observe.tracking.rows import LoggedRow


class TrackingSink(Protocol):
    """One place that steps are logged to. After an exception the writer tries again, beginning with
    ``reopen``.
    """

    def reopen(self, superseded: Sequence[int]) -> Cursor:
        """Open the existing logs, take back superseded rows, and return how far the sink has come.

        The writer calls this first, after each error, and after each supersession.

        :param superseded: steps from which on all earlier rows were taken back, in the order of the
            rollbacks.
        """
        ...

    def write(self, rows: Sequence[LoggedRow]) -> None:
        """Log rows after the cursor, ordered by step."""
        ...

    def close(self, outcome: str | None) -> None:
        """Close the logs so that the next writer can continue them.

        :param outcome: ``FINISHED`` or ``FAILED`` if the job has ended, else ``None``.
        """
        ...
