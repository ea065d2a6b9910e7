"""The cluster's phases (design §3): one declared table, and the pairs that must never happen."""

from enum import StrEnum

from statemachine.messages.values import ClusterPhase


class PhaseEvent(StrEnum):
    JOB_ACCEPTED = "JOB_ACCEPTED"
    GENERATION_STARTED = "GENERATION_STARTED"
    REPORTS_COMPLETED = "REPORTS_COMPLETED"
    GROUP_RESUMED = "GROUP_RESUMED"
    NODES_LACKED = "NODES_LACKED"
    JOB_ENDED = "JOB_ENDED"
    """Finished, or stopped by a user."""
    JOB_BROKE = "JOB_BROKE"


_P = ClusterPhase
_E = PhaseEvent

TABLE: dict[tuple[ClusterPhase, PhaseEvent], ClusterPhase] = {
    (_P.WAITING, _E.JOB_ACCEPTED): _P.WAITING,
    (_P.WAITING, _E.GENERATION_STARTED): _P.QUIESCING,
    (_P.WAITING, _E.JOB_ENDED): _P.FINISHED,
    (_P.WAITING, _E.JOB_BROKE): _P.FAILED,
    (_P.RUNNING, _E.GENERATION_STARTED): _P.QUIESCING,
    (_P.RUNNING, _E.JOB_ENDED): _P.FINISHED,
    (_P.RUNNING, _E.JOB_BROKE): _P.FAILED,
    (_P.QUIESCING, _E.GENERATION_STARTED): _P.QUIESCING,
    (_P.QUIESCING, _E.REPORTS_COMPLETED): _P.RECOVERING,
    (_P.QUIESCING, _E.NODES_LACKED): _P.PAUSED,
    (_P.QUIESCING, _E.JOB_ENDED): _P.FINISHED,
    (_P.QUIESCING, _E.JOB_BROKE): _P.FAILED,
    (_P.RECOVERING, _E.GENERATION_STARTED): _P.QUIESCING,
    (_P.RECOVERING, _E.GROUP_RESUMED): _P.RUNNING,
    (_P.RECOVERING, _E.NODES_LACKED): _P.PAUSED,
    (_P.RECOVERING, _E.JOB_ENDED): _P.FINISHED,
    (_P.RECOVERING, _E.JOB_BROKE): _P.FAILED,
    (_P.PAUSED, _E.GENERATION_STARTED): _P.QUIESCING,
    (_P.PAUSED, _E.JOB_ENDED): _P.FINISHED,
    (_P.PAUSED, _E.JOB_BROKE): _P.FAILED,
    (_P.FINISHED, _E.JOB_ACCEPTED): _P.WAITING,
    (_P.FAILED, _E.JOB_ACCEPTED): _P.WAITING,
}

IMPOSSIBLE: frozenset[tuple[ClusterPhase, PhaseEvent]] = frozenset(
    {
        # A job is accepted only when none is under way.
        (_P.RUNNING, _E.JOB_ACCEPTED),
        (_P.QUIESCING, _E.JOB_ACCEPTED),
        (_P.RECOVERING, _E.JOB_ACCEPTED),
        (_P.PAUSED, _E.JOB_ACCEPTED),
        # Reports belong to QUIESCING, a group to RECOVERING.
        (_P.WAITING, _E.REPORTS_COMPLETED),
        (_P.RUNNING, _E.REPORTS_COMPLETED),
        (_P.RECOVERING, _E.REPORTS_COMPLETED),
        (_P.PAUSED, _E.REPORTS_COMPLETED),
        (_P.WAITING, _E.GROUP_RESUMED),
        (_P.RUNNING, _E.GROUP_RESUMED),
        (_P.QUIESCING, _E.GROUP_RESUMED),
        (_P.PAUSED, _E.GROUP_RESUMED),
        # Whether nodes lack shows only when a generation is made.
        (_P.WAITING, _E.NODES_LACKED),
        (_P.RUNNING, _E.NODES_LACKED),
        (_P.PAUSED, _E.NODES_LACKED),
        # Nothing happens to a job that is over.
        (_P.FINISHED, _E.GENERATION_STARTED),
        (_P.FINISHED, _E.REPORTS_COMPLETED),
        (_P.FINISHED, _E.GROUP_RESUMED),
        (_P.FINISHED, _E.NODES_LACKED),
        (_P.FINISHED, _E.JOB_ENDED),
        (_P.FINISHED, _E.JOB_BROKE),
        (_P.FAILED, _E.GENERATION_STARTED),
        (_P.FAILED, _E.REPORTS_COMPLETED),
        (_P.FAILED, _E.GROUP_RESUMED),
        (_P.FAILED, _E.NODES_LACKED),
        (_P.FAILED, _E.JOB_ENDED),
        (_P.FAILED, _E.JOB_BROKE),
    }
)

OVER = frozenset({_P.FINISHED, _P.FAILED})
CHANGING = frozenset({_P.QUIESCING, _P.RECOVERING})


class MachineError(RuntimeError):
    """A bug in the machine itself: a pair that the table calls impossible has happened."""


def next_phase(phase: ClusterPhase, event: PhaseEvent) -> ClusterPhase:
    """:raises MachineError: this event cannot happen in this phase."""
    try:
        return TABLE[phase, event]
    except KeyError:
        raise MachineError(f"{event} cannot happen in phase {phase}") from None
