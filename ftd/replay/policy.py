"""The interface between the replay and a recovery policy.

The replay owns the clock and the account of time; a policy only says what each change of the cluster costs
and how the job runs afterwards. For every change the replay calls ``RecoveryPolicy.change`` and receives a
``Reaction``: pauses, each in one category, and then the way of running (``Running``) until the next change.
Iterations are whole: an iteration in flight when its work is lost is computed again.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

Category = Literal[
    "computing",
    "redone",
    "stalled",
    "detecting",
    "planning",
    "moving",
    "restarting",
    "waiting",
    "reduced",
]
"""Use of a second of wall time. The categories exclude each other and add up to the wall time.

``computing``: iterations that count, at the speed that all present nodes allow; ``redone``: work that was lost;
``stalled``: training waits for a snapshot or a checkpoint; ``detecting``: nobody has noticed the failure yet;
``planning``: survivors stop and a plan is made; ``moving``: state is transferred or loaded; ``restarting``:
processes start and groups form; ``waiting``: there are too few nodes; ``reduced``: the part of running time
that is lost because the policy runs slower than the present nodes allow.
"""

CATEGORIES: tuple[Category, ...] = get_args(Category)

Undo = Literal["nothing", "iteration", "checkpoint"]
"""Work that a reaction loses: nothing; the iteration in flight; or all iterations since the newest checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A time in which no iteration runs."""

    category: Category
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """Checkpoints that a policy takes while it runs."""

    every_iterations: int
    stall_s: float
    """Time for which each checkpoint stops training."""
    write_s: float = 0.0
    """Time after the stall until the checkpoint can be used; a failure before that falls back to the previous
    one.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The way in which the job runs until the next change."""

    iteration_s: float
    samples: float
    """Samples of one iteration."""
    efficiency: float = 1.0
    """Throughput as a share, from 0 to 1, of what the present nodes allow without failures."""
    checkpoints: Checkpoints | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaction:
    """The answer of a policy to a change of the cluster. It replaces what is left of the previous reaction."""

    pauses: tuple[Pause, ...] = ()
    running: Running | None
    """``None``: the job waits for nodes after the pauses."""
    undo: Undo = "nothing"
    """Work that is lost when the pauses begin."""
    kept_share: float = 0.0
    """Share of an iteration, from 0 to 1, that need not be computed again although ``undo`` is ``iteration``."""
    keep_iterations: int | None = None
    """Number of iterations that are kept if more than ``undo`` says is lost, as in a return to a snapshot that
    the policy knows of; ``None``: no more is lost.
    """
    after_s: float = 0.0
    """Time for which the job runs on as before until the pauses begin, for example to the end of the iteration
    in flight. The work lost is determined then.
    """
    saved_s: float | None = None
    """Time after the pauses begin at which a checkpoint of all iterations so far is complete; ``None``: no
    checkpoint is taken in them.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the cluster, as a policy sees it."""

    at_s: float
    nodes: tuple[str, ...]
    """Nodes that are present after the change, in the order in which they came."""
    removed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    """Nodes that announce their removal, ``notice_s`` before it. They are still in ``nodes``."""
    notice_s: float = 0.0
    until_s: float
    """Time of the next change, or the end of the trace."""
    running: bool
    """Whether iterations ran when the change came; otherwise the job paused or waited."""
    boundary_s: float = 0.0
    """Time until the iteration in flight ends; 0 if none is in flight."""
    iterations: int = 0
    """Iterations that count so far."""


class PolicyExcluded(Exception):
    """The job or the trace violates an assumption of a policy. ``str()`` says which, as a clause for a table."""


class RecoveryPolicy(ABC):
    """A model of how one system trains through failures. An instance replays one trace."""

    name: ClassVar[str]
    """Name that users give, for example ``varuna``."""
    wake_at_s: float | None = None
    """Time at which the policy wants to react again although nothing changes, for example when a new node is
    ready. The replay then calls ``change`` without nodes that came or went. ``None``: not before the next change.
    """

    @abstractmethod
    def start(self, nodes: Sequence[str]) -> Reaction:
        """Return how the job runs on the first nodes, without the costs of the start itself."""

    @abstractmethod
    def change(self, change: Change) -> Reaction | None:
        """Return the reaction to a change; ``None`` if the job goes on as before, pauses included."""
