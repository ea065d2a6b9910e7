"""Messages that both protocols have: trainer and node, and node and coordinator.

A node sends ``Quiesce`` on to its trainers. ``Prepared``, ``Resumed`` and ``Finished`` of a trainer are about its
device; those of a node sum up what its trainers reported. The others a node sends on to the coordinator as they are.
"""

from msgspec import field

from planner.values import ModelProfile
from statemachine.messages.base import Message
from statemachine.messages.values import Evaluation, QuiesceMode


class Quiesce(Message, frozen=True, kw_only=True):
    """Enter ``generation``: stop in this mode and report, idle trainers at once. A higher one supersedes."""

    generation: int
    mode: QuiesceMode


class Prepared(Message, frozen=True, kw_only=True):
    """The job is built; the trainers are idle, ready for a Quiesce."""

    job_id: str
    profile: ModelProfile | None
    """Present when ``PrepareJob`` asked for it."""


class Resumed(Message, frozen=True, kw_only=True):
    """The trainers met the others under ``generation`` and hold their layers at the resume step."""

    generation: int
    bytes_moved: int
    """Received by these trainers."""
    rendezvous_s: float
    state_s: float


class SnapshotStarted(Message, frozen=True, kw_only=True):
    """The VOTE of ``step`` passed with a flag: the copying of the state after it is about to begin.

    Sent by every rank; by the node once.
    """

    generation: int
    step: int


class SnapshotFailed(Message, frozen=True, kw_only=True):
    """There is no snapshot of ``step`` here, or this node's buddy has no copy of it. The ones before stay, and
    training goes on."""

    generation: int
    step: int
    detail: str


class PeerSuspected(Message, frozen=True, kw_only=True):
    """A hint: a trainer here saw a connection to a peer break."""

    generation: int
    detail: str


class OptimizerReplicaDiverged(Message, frozen=True, kw_only=True):
    """A replica here (AOR) differed from its owner's part after ``step``; it was made again."""

    generation: int
    step: int
    layer: int
    detail: str


class Finished(Message, frozen=True, kw_only=True):
    """All steps are done."""

    generation: int
    step: int
    digests: dict[int, str] = field(default_factory=dict)
    """Hex digest of the parameters of each layer that is held here."""
    evaluation: Evaluation | None = None
    """Evaluation of the state after the last step, if the group evaluated it."""
