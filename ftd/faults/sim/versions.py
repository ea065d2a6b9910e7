"""All states that ever existed in the simulated world: the step of each, and the state that it was computed
from.
"""

from msgspec.structs import replace

from statemachine.messages.values import Evaluation, Vote


class Versions:
    """All state versions; version 0 is step 0."""

    def __init__(self) -> None:
        self.step = [0]
        self.parent = [0]
        self.generation = [0]
        """The generation of the group that computed each version."""
        self.evaluations: dict[tuple[int, int], Evaluation] = {}
        """Evaluations by the evaluated version and the generation of the group that evaluated it."""
        self._child: dict[tuple[int, int], int] = {}

    def child(self, version: int, generation: int) -> int:
        """Return the state one step later, computed with gradients of ``generation``'s group."""
        key = (version, generation)
        child = self._child.get(key)
        if child is None:
            child = self._child[key] = len(self.step)
            self.step.append(self.step[version] + 1)
            self.parent.append(version)
            self.generation.append(generation)
        return child

    def evaluation(self, version: int, generation: int) -> Evaluation:
        """Return the result of evaluating a version. It differs between groups, as rounding does."""
        found = Evaluation(loss=float(version), weight=float(generation), metrics={"right": 0.5}, took_s=1.0)
        return self.evaluations.setdefault((version, generation), found)

    def vote(self, version: int) -> Vote:
        """Return the vote that made a version, with the evaluation of the previous state if its group computed
        one.
        """
        made_by = self.parent[version], self.generation[version]
        return replace(vote_of(version), evaluation=self.evaluations.get(made_by))


def vote_of(version: int) -> Vote:
    """Return the one vote of a version. A survivor must receive all of its values unchanged."""
    return Vote(
        loss=float(version),
        gradient_norm=1.0,
        weight=8.0 + version % 5,
        loss_scale=2.0 ** (version % 7),
        learning_rate=1.0 / (1 + version),
        metrics={"version": float(version)},
    )
