"""The planner's errors. Each says what is wrong, with the numbers, and what would work.

PlanningError(ValueError)
├── InfeasibleError      no cluster of this shape can run the job: the user must change something
├── BatchError           the batch cannot be distributed; carries the nearest batches that can
├── TooFewNodesError     not now: carries how many nodes are needed
├── StateLostError       no live device holds some layers: carries which
├── RestoreError         what was precomputed does not belong to this job
└── SolverError          the integer program of a batch distribution was not solved
"""


class PlanningError(ValueError):
    """No plan can be made from this input."""


class InfeasibleError(PlanningError):
    """The job cannot run on this shape of cluster, however many nodes are healthy."""


class BatchError(PlanningError):
    """The global batch cannot be distributed; ``nearest`` lists global batches that can."""

    def __init__(self, message: str, nearest: tuple[int, ...]) -> None:
        super().__init__(message)
        self.nearest = nearest


class TooFewNodesError(PlanningError):
    """Fewer nodes are usable than the smallest allowed instantiation needs."""

    def __init__(self, message: str, needed: int, present: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.present = present


class StateLostError(PlanningError):
    """Some layers are held complete by no usable device."""

    def __init__(self, message: str, layers: tuple[int, ...]) -> None:
        super().__init__(message)
        self.layers = layers


class RestoreError(PlanningError):
    """The stored templates or instantiations do not fit the job; compute them again."""


class SolverError(PlanningError):
    """The integer program of a batch distribution was not solved; the exact method needs no solver."""
