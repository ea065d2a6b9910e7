"""Every evaluation that is due is reported once, with a result that a group of that state really had."""

from ftd.faults.sim.oracle import Oracle
from ftd.faults.sim.published_events import PublishedEvents
from statemachine.effects import EmitEvent


class EvaluationOracle:
    """What the world was told of the present job's evaluations."""

    def __init__(self, truth: Oracle, telling: PublishedEvents) -> None:
        self._truth, self._telling = truth, telling
        self.every_steps = 0
        """Of all jobs of this world; 0: they evaluate nothing."""
        self.steps = 0
        """Of the present job."""
        self._first = 0
        """The step that it began after."""
        self._told: dict[int, int] = {}
        """By step: after how many losses of the newest journal it was reported."""

    def new_job(self, begin: int, steps: int) -> None:
        self._first, self.steps = begin, steps
        self._told.clear()

    def rolled_back(self, step: int) -> None:
        """What came after ``step`` never was."""
        self._told = {number: after for number, after in self._told.items() if number <= step}

    def told(self, event: EmitEvent) -> None:
        """``Evaluated`` was reported."""
        truth, step = self._truth, event.step
        assert step is not None
        if not self._due(step):
            truth.broken(f"step {step} was evaluated, and that was not due")
        if self._told.get(step) == self._telling.losses:
            truth.broken(f"Evaluated {step} came twice")
        self.recalled(event)
        self._told[step] = self._telling.losses

    def recalled(self, event: EmitEvent) -> None:
        """A result was reported, or a node remembers it."""
        truth, step, details = self._truth, event.step, event.details
        assert step is not None
        version, generation = int(details["loss"]), int(details["weight"])
        if (version, generation) not in truth.versions.evaluations:
            truth.broken(f"Evaluated {step} says what no group found: {details}")
        if truth.told.get(step, version) != version:
            truth.broken(f"Evaluated {step} is of another state than StepCommitted {step}")

    def step_told(self, step: int) -> None:
        """``StepCommitted`` was reported: nobody commits a step before the evaluation that is due is done."""
        before, truth = step - 1, self._truth
        seen = truth.told_after.get(before) == self._telling.losses
        if seen and self._due(before) and before not in self._told:
            truth.broken(f"StepCommitted {step} came, and Evaluated {before} did not")

    def finished(self) -> None:
        """``JobFinished`` was reported."""
        seen = self._truth.told_after.get(self.steps) == self._telling.losses
        if seen and self._due(self.steps) and self.steps not in self._told:
            self._truth.broken(f"the job is finished, and Evaluated {self.steps} did not come")

    def _due(self, step: int) -> bool:
        if self.every_steps < 1 or step <= self._first:
            return False
        return step % self.every_steps == 0 or step == self.steps
