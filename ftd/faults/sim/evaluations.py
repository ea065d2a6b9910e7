"""The check of evaluations: each one that is due is reported once, with a result that a group really computed
for that state.
"""

from ftd.faults.sim.oracle import Oracle
from ftd.faults.sim.published_events import PublishedEvents
from statemachine.effects import EmitEvent


class EvaluationOracle:
    """The oracle of what was published about the current job's evaluations."""

    def __init__(self, oracle: Oracle, published_events: PublishedEvents) -> None:
        self._oracle, self._published_events = oracle, published_events
        self.every_steps = 0
        """The interval of evaluations for all jobs of this world; 0 means never."""
        self.steps = 0
        """The number of steps of the current job."""
        self._first = 0
        """The step after which the current job began."""
        self._published: dict[int, int] = {}
        """Number of losses of the newest journal at the time when a step's evaluation was published, by step."""

    def new_job(self, begin: int, steps: int) -> None:
        self._first, self.steps = begin, steps
        self._published.clear()

    def rolled_back(self, step: int) -> None:
        """Forget what came after ``step``, which was undone. The job may return to before its first step, if the
        checkpoint with which it began cannot be read any more.
        """
        self._first = min(self._first, step)
        self._published = {number: after for number, after in self._published.items() if number <= step}

    def on_published(self, event: EmitEvent) -> None:
        """Check an ``Evaluated`` event."""
        oracle, step = self._oracle, event.step
        assert step is not None
        if not self._due(step):
            oracle.violated(f"step {step} was evaluated although no evaluation was due")
        if self._published.get(step) == self._published_events.journal_losses:
            oracle.violated(f"Evaluated {step} was published twice")
        self.recalled(event)
        self._published[step] = self._published_events.journal_losses

    def recalled(self, event: EmitEvent) -> None:
        """Check a result that was published, or that a node remembers."""
        oracle, step, details = self._oracle, event.step, event.details
        assert step is not None
        version, generation = int(details["loss"]), int(details["weight"])
        if (version, generation) not in oracle.versions.evaluations:
            oracle.violated(f"Evaluated {step} has a result that no group computed: {details}")
        if oracle.published.get(step, version) != version:
            oracle.violated(f"Evaluated {step} belongs to another state than StepCommitted {step}")

    def on_step_published(self, step: int) -> None:
        """Check at a ``StepCommitted`` that the evaluation due before it was published."""
        before, oracle = step - 1, self._oracle
        seen = oracle.published_after.get(before) == self._published_events.journal_losses
        if seen and self._due(before) and before not in self._published:
            oracle.violated(f"StepCommitted {step} was published, but Evaluated {before} was not")

    def finished(self) -> None:
        """Check at ``JobFinished`` that the last evaluation was published."""
        seen = self._oracle.published_after.get(self.steps) == self._published_events.journal_losses
        if seen and self._due(self.steps) and self.steps not in self._published:
            self._oracle.violated(f"the job is finished, but Evaluated {self.steps} was not published")

    def _due(self, step: int) -> bool:
        if self.every_steps < 1 or step <= self._first:
            return False
        return step % self.every_steps == 0 or step == self.steps
