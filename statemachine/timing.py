"""All limits and periods of the machines in one place, with their defaults.

The order that must hold between them is documented with each value. ``Timing`` rejects a set that breaks
it, because a wrong order shows as a rare, mysterious recovery and never as an error.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Limits and periods, in seconds unless the name says otherwise.

    :raises ValueError: a value is not positive, or two values are in an order that cannot work.
    """

    # --- liveness (coordinator) ---
    heartbeat_s: float = 0.25
    """Period of a node's Heartbeat, and of the coordinator's check for silent nodes."""
    silence_s: float = 1.5
    """A node that was not heard from for this long is OFFLINE: its host hangs or is cut off."""
    hello_grace_s: float = 3.0
    """Time after the broker is available (again) before which no node is declared silent."""

    remove_offline_s: float = 86_400.0
    """A node that was not heard from for this long, and that the current job does not name, is removed. If
    more nodes are OFFLINE than are present, and more than a hundred, those that left first are removed
    sooner.
    """

    resend_s: float = 0.5
    """Time after which a message counts as lost: an order that a node's heartbeats do not acknowledge, or a
    report that they mention and that has not arrived. The order is then sent again, or the report
    requested, with this period until it arrives.
    """

    # --- reconfiguration (coordinator) ---
    quiesce_s: float = 5.0
    """A node that does not answer ``Quiesce(abort)`` for this long is fenced, also if its agent would find only
    later that a trainer hangs. Choose more than the longest single operation that a trainer cannot
    interrupt.
    """
    boundary_s: float = 10.0
    """``Quiesce(boundary)`` becomes an abort after this time plus ``boundary_steps``."""
    boundary_steps: float = 4.0
    """Number of steps that are added to ``boundary_s``."""
    resume_s: float = 60.0
    """Limit from Resume to the last Resumed: rendezvous and state transfer. It is only a backstop, since
    deaths and hangs are noticed by other means.
    """
    restore_s: float = 300.0
    """The same limit if the state comes from a snapshot or a checkpoint, through the network and from parity."""
    suspicion_s: float = 1.5
    """A trainer saw a connection to a peer break. If ``silence_s`` and this have passed and nothing was found
    dead, hung or silent, the connection alone was at fault, and the group forms again.
    """
    start_settle_s: float = 1.0
    """Time for which the first plan waits for nodes that are still preparing."""
    join_settle_s: float = 0.1
    """Time within which joins and drains share one reconfiguration."""
    lost_state_s: float = 30.0
    """Time for which the job stays PAUSED if only absent nodes, which are not provably dead, hold some state.
    After that it returns to a persistent checkpoint, or is FAILED. A checkpoint location that cannot be read is
    tried again for this long, too.
    """
    steps_request_s: float = 2.0
    """Longest time that one node may take to answer ``RequestSteps`` before another is asked."""
    raise_limit: int = 3
    """Number of errors after which the job fails: its code raised this often in a running group with no step
    committed in between, or in this many tries of one step; the same error on several nodes ends it
    sooner. (node) Trainers that ended this often while they built the model cannot build it.
    """

    # --- election (coordinators) ----
    leader_heartbeat_s: float = 0.5
    """Period of the leading coordinator's heartbeat."""
    leader_silence_s: float = 2.5
    """A leader that was not heard from for this long hangs or is cut off: a standby takes over. A leader that
    was killed is noticed at once, by its last will.
    """
    election_s: float = 0.5
    """A standby waits this long for each standby whose turn comes before its own, after each failed attempt,
    and once more if others are present, and no leader, when it comes.
    """
    lost_record_timeout_s: float = 30.0
    """Time that a coordinator that was absent lately, or was restarted and misses another one, waits for one
    that knows more, if the broker lost the record of the leader. It must be above ``leader_silence_s``.
    """
    leader_session_s: float = 3.0
    """Limit of a takeover attempt: to connect, and to read what the last leader left at the broker."""

    # --- snapshots (coordinator) ---
    snapshot_s: float = 60.0
    """A snapshot that is not complete everywhere within this time plus ``snapshot_steps`` after its order is
    abandoned. It is copied within a step; the limit is for slow nodes and lost messages.
    """
    snapshot_steps: float = 4.0
    """Number of steps that are added to ``snapshot_s``."""

    scrub_s: float = 600.0
    """(node) Time between two verifications of the retained snapshot, which find bits that changed in memory;
    the first one starts when the snapshot is complete everywhere. ``node.scrub_rate_mib_s`` determines how
    long one takes.
    """

    persist_s: float = 3600.0
    """A persistent checkpoint that is not written within this long after its order is abandoned. The disk and
    ``node.checkpoint_rate_mib_s`` determine how long it takes; the limit is for a disk that hangs.
    """
    checkpoint_location_s: float = 60.0
    """Longest time that the checkpoint location may take to answer the coordinator: to commit a checkpoint
    whose layers are written, or to find the newest one.
    """
    finish_s: float = 120.0
    """A job whose steps are done waits for the checkpoint of the last one for this time plus the time that its
    bytes take at ``finish_mib_s``, and for at most ``persist_s``. Then it ends without it.
    """
    finish_mib_s: float = 16.0
    """Rate in MiB/s at which the bytes of a checkpoint count for ``finish_s``. Lower it for a slower disk."""

    # --- stragglers (coordinator) ---
    straggler_speed: float = 0.67
    """A node that computes at less than this share of the others' speed is a straggler. Profiles of single
    layers are not exact, and a plan that reacts to noise would move state for nothing.
    """
    straggler_recovered_speed: float = 0.85
    """Share of the others' speed from which on a straggler counts as recovered. It must be above
    ``straggler_speed``, or a node would be both.
    """
    straggler_s: float = 5.0
    """Time for which a node must be slow, or fast again, before it is reported as such."""
    straggler_replan_s: float = 15.0
    """Time between two searches for a better plan because of speeds alone."""
    straggler_gain: float = 0.05
    """Share of a step that such a plan must save at least."""
    straggler_cost_s: float = 1.0
    """Cost of a stop at a boundary: such a plan must save more than this in all remaining steps."""

    # --- node agent ---
    hello_retry_s: float = 1.0
    """Period of Hello while the coordinator rejects this node."""
    stepped_s: float = 0.05
    """Steps that commit closer together than this share one ``Stepped`` message."""
    steps_remembered: int = 20_000
    """Committed steps that an agent remembers for ``RequestSteps``."""
    leave_s: float = 30.0
    """Time for which a node that received SIGTERM waits for ``Release`` before it leaves anyway."""
    kill_grace_s: float = 2.0
    """Time between SIGTERM and SIGKILL of a trainer when there is no hurry."""
    restart_backoff_s: float = 0.5
    """A trainer that fails again before it did any work is restarted after this delay, which doubles each time."""
    restart_backoff_max_s: float = 30.0
    """Longest delay before such a restart."""

    # --- hang detection (node agent) ---
    hang_check_s: float = 0.1
    """Period of the agent's check of its trainers."""
    hang_floor_s: float = 0.6
    """While steps commit, a trainer hangs if it sends no heartbeat, or makes no progress without waiting, for
    this time or for ``hang_steps``, whichever is longer. Time for which a silent trainer waits for a processor
    of its host does not count, up to ``idle_heartbeat_s``.
    """
    hang_steps: float = 4.0
    """Number of median steps that are compared with ``hang_floor_s``."""
    reading_s: float = 60.0
    """The same limit while a trainer reads samples: a file server that stalls must not end all trainers at once,
    and the state with them.
    """
    idle_heartbeat_s: float = 10.0
    """Time without a heartbeat after which a trainer hangs while there are no steps (model build, rendezvous,
    state transfer).
    """
    idle_progress_s: float = 60.0
    """Time without progress and without waiting after which a trainer hangs while there are no steps; also
    the limit of its start.
    """

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
                f"({self.leader_heartbeat_s}), or one late heartbeat would depose a leader"
            )
        if self.lost_record_timeout_s <= self.leader_silence_s:
            raise ValueError(
                f"timing: lost_record_timeout_s ({self.lost_record_timeout_s}) must be above leader_silence_s "
                f"({self.leader_silence_s}), or a coordinator with an older journal would not wait for a newer one"
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
        """Return the time for which a stepping trainer may make no progress."""
        return max(self.hang_floor_s, self.hang_steps * median_step_s)

    def boundary_limit_s(self, step_s: float) -> float:
        """Return the time in which the step in flight must reach its boundary."""
        return self.boundary_s + self.boundary_steps * step_s

    def snapshot_limit_s(self, step_s: float) -> float:
        """Return the time that a snapshot may take from its order until it is complete everywhere."""
        return self.snapshot_s + self.snapshot_steps * step_s

    def finish_limit_s(self, size_bytes: int) -> float:
        """Return the time for which a job waits for the checkpoint of its last step, given the size of the
        checkpoint.
        """
        return min(self.persist_s, self.finish_s + size_bytes / (self.finish_mib_s * 2**20))
