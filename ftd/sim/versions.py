"""All states that there ever were, in the simulated world: which step each is, and of which it is made."""


class Versions:
    """All states that ever were: version 0 is step 0."""

    def __init__(self) -> None:
        self.step = [0]
        self.parent = [0]
        self._child: dict[tuple[int, int], int] = {}

    def child(self, version: int, generation: int) -> int:
        """The state one step on, by gradients of ``generation``'s group."""
        key = (version, generation)
        child = self._child.get(key)
        if child is None:
            child = self._child[key] = len(self.step)
            self.step.append(self.step[version] + 1)
            self.parent.append(version)
        return child
