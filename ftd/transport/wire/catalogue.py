"""Every event that there is: how grave it is, and what its ``details`` hold."""

from typing import Literal

from ftd.transport.wire import event_details as e
from ftd.transport.wire import snapshot_details as s
from ftd.transport.wire.event_details import Details

Severity = Literal["info", "warning", "error", "critical"]
"""Nothing to do; something failed and was dealt with; something was lost and wants a look; training stands
still until somebody acts."""

SEVERITIES: tuple[Severity, ...] = ("info", "warning", "error", "critical")
"""By rising gravity."""

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
        e.NodeDraining,
        e.NodeReleased,
        e.NodeRemoved,
        e.PeerSuspected,
        s.SnapshotCompleted,
        s.SnapshotIntervalChosen,
        s.ProtectionChanged,
        s.CheckpointStarted,
        s.CheckpointCompleted,
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
        e.TrainerLost,
        e.StragglerDetected,
        e.NodeRejected,
        e.NodeFenced,
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
"""By nodes, and by who injects faults; all others are the coordinator's, and nobody else is believed."""

_SEVERITY_OF: dict[str, Severity] = {
    kind.__name__: severity for severity, kinds in _BY_SEVERITY.items() for kind in kinds
}


def severity_of(event: str) -> Severity:
    """``warning`` for an event that is not in the catalogue: somebody should look."""
    return _SEVERITY_OF.get(event, "warning")
