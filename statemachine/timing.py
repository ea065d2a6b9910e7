"""Every limit and period of the machines in one place, with the defaults that a user gets.

The order that must hold between them is documented with each value; ``Timing`` refuses a set that breaks
it, because a wrong order shows as a rare, mysterious recovery and never as an error.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds unless the name says otherwise.

    :raises ValueError: a value is not positive, or two values are in an order that cannot work.
    """

    # --- liveness (coordinator) ---
    heartbeat_s: float = 0.25
    """Period of a node's Heartbeat, and of the coordinator's look at who is silent."""
    silence_s: float = 1.5
    """A node not heard from for this long is OFFLINE: its host hangs or is cut off."""
    hello_grace_s: float = 3.0
    """After the broker came (back): nobody is declared silent before this has passed."""

    remove_offline_s: float = 86_400.0
    """A node that was not heard of for so long, and that the job under way does not name, is forgotten; where
    more are OFFLINE than are here, and more than a hundred, those that went first go sooner."""

    resend_s: float = 0.5
    """An order that a node's heartbeats do not acknowledge, or a report that they mention and that has not
    arrived, was lost when this has passed: the order is sent again, the report asked for. Until it is there,
    this is the period."""

    # --- reconfiguration (coordinator) ---
    quiesce_s: float = 5.0
    """A node that does not answer ``Quiesce(abort)`` for this long is fenced. Above the longest single
    operation that a trainer cannot interrupt, and above the agent's hang detection."""
    boundary_s: float = 10.0
    boundary_steps: float = 4.0
    """``Quiesce(boundary)`` becomes an abort after ``boundary_s`` plus this many steps."""
    resume_s: float = 60.0
    """From Resume to the last Resumed: rendezvous and state transfer. Only a backstop, since deaths and
    hangs are noticed by other means."""
    restore_s: float = 300.0
    """The same where the state comes from a snapshot, through the network and from parity."""
    suspicion_s: float = 1.5
    """A trainer saw a connection to a peer break. When ``silence_s`` and this have passed and nothing was
    found dead, hung or silent, the connection alone was at fault, and the group forms anew."""
    start_settle_s: float = 1.0
    """How long the first plan waits for nodes that are still preparing."""
    join_settle_s: float = 0.1
    """Joins and drains that come closer together than this share one reconfiguration."""
    lost_state_s: float = 30.0
    """State that only absent (not provably dead) nodes hold: PAUSED for this long, then back to a
    persistent checkpoint, or FAILED."""
    steps_request_s: float = 2.0
    """How long one node may take to answer ``RequestSteps`` before another is asked."""
    raise_limit: int = 3
    """The job fails when its code raised this often in a running group with no step committed between, or in
    this many tries of one step; the same error on several nodes ends it sooner. (node)
    Trainers that ended this often while they built the model cannot build it."""

    # --- who leads (coordinators) ---
    leader_heartbeat_s: float = 0.5
    """The leading coordinator says that it is there."""
    leader_silence_s: float = 2.5
    """A leader not heard from for this long hangs or is cut off: a standby takes over. One that was killed is
    noticed at once, by its last will."""
    election_s: float = 0.5
    """A standby waits so long for each one that stands before it to take over, and behind each attempt."""
    lost_record_timeout_s: float = 30.0
    """Where the broker forgot who leads, a coordinator that was not there lately waits so long for one that
    knows more. Above ``leader_silence_s``."""
    leader_session_s: float = 3.0
    """How long taking over may take: to connect, and to read what the last leader left at the broker."""

    # --- snapshots (coordinator) ---
    snapshot_s: float = 60.0
    snapshot_steps: float = 4.0
    """A snapshot that is not complete everywhere ``snapshot_s`` plus this many steps after its order is given
    up. It is copied within a step; this is for nodes that are slow, and for messages that are lost."""

    scrub_s: float = 600.0
    """(node) Between two readings of the kept snapshot, which find bits that changed in memory; the first
    comes when it is complete everywhere. One takes what ``node.scrub_rate_mib_s`` makes it take."""

    persist_s: float = 3600.0
    """A persistent checkpoint that is not written so long after its order is given up. It takes what the disk
    and ``node.checkpoint_rate_mib_s`` take; this is for a disk that hangs."""
    checkpoint_location_s: float = 60.0
    """How long the place of checkpoints may take to answer the coordinator: to commit one whose layers are
    written, or to say which is the newest."""
    finish_s: float = 120.0
    finish_mib_s: float = 16.0
    """A job whose steps are done waits for the checkpoint of the last one for ``finish_s`` plus what its
    bytes take at this many MiB/s, and never longer than ``persist_s``. Then it ends without."""

    # --- stragglers (coordinator) ---
    straggler_speed: float = 0.67
    """A node that computes at less than this part of the others' speed is a straggler. Profiles of single
    layers are not exact, and a plan made for noise would move state for nothing."""
    straggler_recovered_speed: float = 0.85
    """From this part of the others' speed on, a straggler is one no more. Above ``straggler_speed``, or it
    would be both."""
    straggler_s: float = 5.0
    """How long a node must be slow, or quick again, to be called so."""
    straggler_replan_s: float = 15.0
    """Between two looks for a better plan for the sake of speeds alone."""
    straggler_gain: float = 0.05
    """Such a plan must save at least this part of a step …"""
    straggler_cost_s: float = 1.0
    """… and this much in all the steps that are left: what a stop at a boundary costs."""

    # --- node agent ---
    hello_retry_s: float = 1.0
    """Period of Hello while the coordinator rejects this node."""
    stepped_s: float = 0.05
    """Steps that commit closer together than this share one ``Stepped`` message."""
    steps_remembered: int = 20_000
    """Committed steps that an agent remembers for ``RequestSteps``."""
    leave_s: float = 30.0
    """How long a node that got SIGTERM waits for ``Release`` before it goes anyway."""
    kill_grace_s: float = 2.0
    """Between SIGTERM and SIGKILL of a trainer when there is no hurry."""
    restart_backoff_s: float = 0.5
    restart_backoff_max_s: float = 30.0
    """A trainer that fails again before it did any work is restarted after a delay that doubles."""

    # --- hang detection (node agent) ---
    hang_check_s: float = 0.1
    """Period of the agent's look at its trainers."""
    hang_floor_s: float = 0.6
    hang_steps: float = 4.0
    """While steps commit: no beat, or no progress without waiting, for max(floor, this many median steps).
    What a silent trainer waits for a processor of its host does not count, up to ``idle_heartbeat_s``."""
    reading_s: float = 60.0
    """… but for this long while it reads samples: a file server that stalls must not end all trainers at
    once, and the state with them."""
    idle_heartbeat_s: float = 10.0
    """Without steps (model build, rendezvous, state transfer): no beat for this long is a hang."""
    idle_progress_s: float = 60.0
    """Without steps: no progress (and not waiting) for this long is a hang; also a trainer's start."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) <= 0:
                raise ValueError(f"timing: {name} must be positive, not {getattr(self, name)}")
        if self.silence_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"timing: silence_s ({self.silence_s}) must be at least twice heartbeat_s "
                f"({self.heartbeat_s}), or one late heartbeat would take a node down"
            )
        if self.leader_silence_s < 2 * self.leader_heartbeat_s:
            raise ValueError(
                f"timing: leader_silence_s ({self.leader_silence_s}) must be at least twice leader_heartbeat_s "
                f"({self.leader_heartbeat_s}), or one late beat would depose a leader"
            )
        if not self.straggler_speed < self.straggler_recovered_speed <= 1:
            raise ValueError(
                f"timing: straggler_recovered_speed ({self.straggler_recovered_speed}) must be above "
                f"straggler_speed ({self.straggler_speed}) and at most 1"
            )
        if self.hello_retry_s > self.silence_s:
            raise ValueError(
                f"timing: hello_retry_s ({self.hello_retry_s}) must not exceed silence_s ({self.silence_s})"
            )

    def hang_s(self, median_step_s: float) -> float:
        """How long a stepping trainer may stand still."""
        return max(self.hang_floor_s, self.hang_steps * median_step_s)

    def boundary_limit_s(self, step_s: float) -> float:
        """How long the step in flight may take to reach its boundary."""
        return self.boundary_s + self.boundary_steps * step_s

    def snapshot_limit_s(self, step_s: float) -> float:
        """How long a snapshot may take from its order until it is complete everywhere."""
        return self.snapshot_s + self.snapshot_steps * step_s

    def finish_limit_s(self, size_bytes: int) -> float:
        """How long a job may wait for the checkpoint of its last step, which is so large."""
        return min(self.persist_s, self.finish_s + size_bytes / (self.finish_mib_s * 2**20))
