"""The catalogue of all events: their severity and the struct of their ``details``."""

from typing import Literal

from ftd.transport.wire import event_details as e
from ftd.transport.wire import snapshot_details as s
from ftd.transport.wire.event_details import Details

Severity = Literal["info", "warning", "error", "critical"]
"""info: nothing to do; warning: something failed and was handled; error: something was lost and should be
examined; critical: training stands still until somebody acts.
"""

SEVERITIES: tuple[Severity, ...] = ("info", "warning", "error", "critical")
"""All severities, the mildest first."""

_BY_SEVERITY: dict[Severity, tuple[type[Details], ...]] = {
    "info": (
        e.JobSubmitted,
        e.JobPrepared,
        e.StepCommitted,
        e.Evaluated,
        e.JobFinished,
        e.JobStopped,
        e.NodeJoined,
        e.TrainerStarted,
        e.NodeRecovered,
        e.StragglerRecovered,
        e.NodeReadmitted,
        e.HealthCheckPassed,
        e.NodeDraining,
        e.NodeDrainCancelled,
        e.NodeReleased,
        e.NodeRemoved,
        e.PeerSuspected,
        s.SnapshotCompleted,
        s.SnapshotIntervalChosen,
        s.ProtectionChanged,
        s.CheckpointStarted,
        s.CheckpointCompleted,
        s.CheckpointIntervalChosen,
        s.CheckpointExported,
        s.JobResumed,
        e.GenerationStarted,
        e.Quiesced,
        e.PlanChosen,
        e.ReplanSkipped,
        e.TrainingResumed,
        e.RecoveryCompleted,
        e.CoordinatorStarted,
        e.LeaderElected,
        e.BrokerRestored,
        e.MessageIgnored,
    ),
    "warning": (
        e.NodeLost,
        e.UpdateSkipped,
        e.LossSpiked,
        e.TrainerLost,
        e.StragglerDetected,
        e.NodeRejected,
        e.NodeFenced,
        e.NodeDrainWaiting,
        e.NodeDrainRefused,
        e.QuarantineSkipped,
        s.ShardRepaired,
        s.SnapshotAbandoned,
        s.CheckpointSkipped,
        e.ChaosInjected,
        e.ChaosRejected,
        e.LeaderLost,
        e.StandbyIneligible,
        e.BrokerLost,
        e.LoggingFailed,
        e.MessageRejected,
    ),
    "error": (
        e.NodeQuarantined,
        e.ReplicasDiverged,
        s.ShardCorrupted,
        s.OptimizerReplicaDiverged,
        s.SnapshotsUnavailable,
        s.RolledBack,
        s.RestoreFailed,
        s.CheckpointAbandoned,
        s.CheckpointExportFailed,
    ),
    "critical": (e.JobFailed, e.ClusterPaused, e.TakeoverRejected),
}

EVENTS: dict[str, type[Details]] = {kind.__name__: kind for kinds in _BY_SEVERITY.values() for kind in kinds}

EVENTS_OF_OTHERS = frozenset(
    kind.__name__
    for kind in (
        e.TrainerStarted,
        e.ChaosInjected,
        e.ChaosRejected,
        e.MessageIgnored,
        e.MessageRejected,
        s.ShardCorrupted,
        s.ShardRepaired,
        s.SnapshotsUnavailable,
    )
)
"""Events that nodes or fault injectors publish. All others come from the coordinator, and are accepted from
nobody else.
"""

_SEVERITY_OF: dict[str, Severity] = {
    kind.__name__: severity for severity, kinds in _BY_SEVERITY.items() for kind in kinds
}


def severity_of(event: str) -> Severity:
    """Return an event's severity; ``warning`` for an event that is not in the catalogue, so that somebody
    looks at it.
    """
    return _SEVERITY_OF.get(event, "warning")
