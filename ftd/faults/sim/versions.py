"""All states that there ever were, in the simulated world: which step each is, and of which it is made."""

from msgspec.structs import replace

from statemachine.messages.values import Evaluation, Vote


class Versions:
    """All states that ever were: version 0 is step 0."""

    def __init__(self) -> None:
        self.step = [0]
        self.parent = [0]
        self.generation = [0]
        """Of the group that made each of them."""
        self.evaluations: dict[tuple[int, int], Evaluation] = {}
        """By the version that was evaluated and the generation of the group that did."""
        self._child: dict[tuple[int, int], int] = {}

    def child(self, version: int, generation: int) -> int:
        """The state one step on, by gradients of ``generation``'s group."""
        key = (version, generation)
        child = self._child.get(key)
        if child is None:
            child = self._child[key] = len(self.step)
            self.step.append(self.step[version] + 1)
            self.parent.append(version)
            self.generation.append(generation)
        return child

    def evaluation(self, version: int, generation: int) -> Evaluation:
        """The result of evaluating a version: another one for each group, as rounding is."""
        found = Evaluation(loss=float(version), weight=float(generation), metrics={"right": 0.5}, took_s=1.0)
        return self.evaluations.setdefault((version, generation), found)

    def vote(self, version: int) -> Vote:
        """Return the vote that made a version: if its group evaluated the state before, with the result."""
        made_by = self.parent[version], self.generation[version]
        return replace(vote_of(version), evaluation=self.evaluations.get(made_by))


def vote_of(version: int) -> Vote:
    """Return the one vote of a version: whatever a survivor needs of it must arrive as it was said."""
    return Vote(
        loss=float(version),
        gradient_norm=1.0,
        weight=8.0 + version % 5,
        loss_scale=2.0 ** (version % 7),
        learning_rate=1.0 / (1 + version),
        metrics={"version": float(version)},
    )
