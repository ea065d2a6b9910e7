"""Messages that occur in both protocols: between trainer and node, and between node and coordinator.

A node forwards ``Quiesce`` to its trainers. ``Prepared``, ``Resumed`` and ``Finished`` of a trainer are
about its device; those of a node summarise what its trainers reported. A node forwards all others to the
coordinator unchanged.
"""

from msgspec import Struct, field

from planner.values import ModelProfile
from statemachine.messages.values import Counter, Duration, Evaluation, QuiesceMode


class Message(Struct, frozen=True, kw_only=True, tag=True):
    """Base class of all messages of a protocol. On the wire, its field ``type`` holds the name of the class."""


class Quiesce(Message, frozen=True, kw_only=True):
    """Order to enter ``generation``: stop in this mode and report; idle trainers stop at once. A higher
    generation supersedes it.
    """

    generation: Counter
    mode: QuiesceMode


class Prepared(Message, frozen=True, kw_only=True):
    """Report that the job is built: the trainers are idle and ready for a Quiesce."""

    job_id: str
    profile: ModelProfile | None
    """The model's profile, if ``Prepare`` asked for it."""


class Resumed(Message, frozen=True, kw_only=True):
    """Report that the trainers met the others under ``generation`` and hold their layers at the resume step."""

    generation: Counter
    bytes_moved: Counter
    """Bytes that these trainers received."""
    rendezvous_s: Duration
    state_s: Duration


class SnapshotStarted(Message, frozen=True, kw_only=True):
    """Report that the VOTE of ``step`` passed with the snapshot flag: copying of the state after that step is
    about to begin.

    Every rank sends it; the node sends it once.
    """

    generation: Counter
    step: Counter


class SnapshotFailed(Message, frozen=True, kw_only=True):
    """Report that this node has no snapshot of ``step``, or its replica peer has no copy of it. Earlier
    snapshots stay, and training continues.
    """

    generation: Counter
    step: Counter
    detail: str


class PeerSuspected(Message, frozen=True, kw_only=True):
    """A hint that a trainer here saw a connection to a peer break."""

    generation: Counter
    detail: str


class OptimizerReplicaDiverged(Message, frozen=True, kw_only=True):
    """Report that a replica here (AOR) differed from its owner's part after ``step`` and was replaced by it."""

    generation: Counter
    step: Counter
    layer: Counter
    detail: str


class ReplicaDigests(Message, frozen=True, kw_only=True):
    """Digests of the state after ``step`` on one device, of its layers of which other devices have copies."""

    generation: Counter
    step: Counter
    device: Counter
    kind: str
    """Kind of the device. Devices of one kind round equally, so their copies are equal bit for bit."""
    digests: dict[int, int] = field(default_factory=dict)
    """Digest of 64 bits over parameters and optimizer state, without buffers, by layer."""


class Finished(Message, frozen=True, kw_only=True):
    """Report that all steps are done."""

    generation: Counter
    step: Counter
    digests: dict[int, str] = field(default_factory=dict)
    """Hex digest of the parameters of each layer that is held here."""
    kind: str = ""
    """Kind of the devices, as in ``ReplicaDigests``; empty: unknown, so the digests are not compared."""
    evaluation: Evaluation | None = None
    """Evaluation of the state after the last step, if the group evaluated it."""
