"""All states that ever existed in the simulated world: the step of each, and the state that it was computed
from.
"""

from msgspec.structs import replace

from statemachine.messages.values import Evaluation, NotFinite, Vote, batch_of

PLACE = NotFinite(layer=0, name="layer 0", value="output", nodes=("node-0",))
"""The value that made some versions' updates void."""


class Versions:
    """All state versions; version 0 is step 0."""

    def __init__(self) -> None:
        self.step = [0]
        self.parent = [0]
        self.generation = [0]
        """The generation of the group that computed each version."""
        self.evaluations: dict[tuple[int, int], Evaluation] = {}
        """Evaluations by the evaluated version and the generation of the group that evaluated it."""
        self.sound: dict[int, int] = {}
        """The version that each corrupt one should be: a flipped bit makes another version of the same step."""
        self.batch = [0]
        """The batch on which each version was trained; it grows from a version to its children."""
        self.skipped_batches: dict[int, tuple[int, ...]] = {}
        """The batches that the sample order leaves out, by generation."""
        self._child: dict[tuple[int, int], int] = {}

    def child(self, version: int, generation: int) -> int:
        """Return the state one step later, computed with gradients of ``generation``'s group."""
        key = (version, generation)
        child = self._child.get(key)
        if child is None:
            child = self._child[key] = len(self.step)
            self.step.append(self.step[version] + 1)
            self.batch.append(batch_of(self.step[child], self.skipped_batches.get(generation, ())))
            self.parent.append(version)
            self.generation.append(generation)
            if version in self.sound:
                self.sound[child] = self.child(self.sound[version], generation)
        return child

    def corrupt(self, version: int) -> int:
        """Return another version of the same step: the given one with a flipped bit."""
        corrupt = len(self.step)
        for fact in (self.step, self.parent, self.generation, self.batch):
            fact.append(fact[version])
        self.sound[corrupt] = self.sound.get(version, version)
        return corrupt

    def evaluation(self, version: int, generation: int) -> Evaluation:
        """Return the result of evaluating a version. It differs between groups, as rounding does."""
        found = Evaluation(loss=float(version), weight=float(generation), metrics={"right": 0.5}, took_s=1.0)
        return self.evaluations.setdefault((version, generation), found)

    def vote(self, version: int) -> Vote:
        """Return the vote that made a version, with the evaluation of the previous state if its group computed
        one.
        """
        made_by = self.parent[version], self.generation[version]
        return replace(
            vote_of(version),
            evaluation=self.evaluations.get(made_by),
            skipped_batches=self.skipped_batches.get(self.generation[version], ()),
        )


def vote_of(version: int) -> Vote:
    """Return the one vote of a version. A survivor must receive all of its values unchanged."""
    return Vote(
        loss=float(version),
        gradient_norm=1.0,
        weight=8.0 + version % 5,
        skipped=version % 4 == 3,
        not_finite=PLACE if version % 8 == 3 else None,
        loss_scale=2.0 ** (version % 7),
        learning_rate=1.0 / (1 + version),
        metrics={"version": float(version)},
    )
