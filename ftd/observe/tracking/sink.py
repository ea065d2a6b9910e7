"""The interface of all sinks: TensorBoard, MLflow, Weights & Biases."""

from collections.abc import Sequence
from typing import Protocol

from ftd.observe.tracking.record import Cursor
from ftd.observe.tracking.rows import LoggedRow


class TrackingSink(Protocol):
    """One place that steps are logged to. After any exception it is tried again later, from ``set_job`` on."""

    name: str
    """As in ``[logging]``."""

    def follow(self, superseded: Sequence[int]) -> Cursor:
        """Open what is there, take back what was superseded, and return how far it has come.

        Called first, after every error, and whenever steps were superseded.

        :param superseded: steps from which on all earlier rows were taken back, in order.
        """
        ...

    def write(self, rows: Sequence[LoggedRow]) -> None:
        """Log rows after the cursor, ordered by step."""
        ...

    def close(self, outcome: str | None) -> None:
        """Leave everything where the next writer finds it.

        :param outcome: ``FINISHED`` or ``FAILED`` where the job is over; ``None``: it goes on.
        """
        ...
