"""The progress of a cluster from the start of its nodes to the first step of a job, for people who wait for it."""

from dataclasses import dataclass

from statemachine.cluster.phases import Planning, Quiescing, Resuming, Running, Waiting
from statemachine.cluster.quarantine import describe_aside
from statemachine.cluster.state import Cluster
from statemachine.messages.values import BuildProgress, BuildStage, StartupStage


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """The current stage, and how far it is."""

    stage: StartupStage
    done: int = 0
    total: int = 0
    """Number of nodes or layers in total; 0: unknown."""
    node: str | None = None
    """Node that builds or measures the model."""
    doing: BuildStage | None = None
    """Part of the preparation that this node has reached, if it is known."""


def describe_startup(c: Cluster) -> Startup | None:
    """Return the progress of the start; ``None`` if no job is starting and all nodes have their trainers."""
    match c.state:
        case Waiting():
            return _before_the_first_plan(c)
        case Quiescing() | Planning() as state if state.recovery.cause == "start":
            return Startup(stage=StartupStage.FORMING, total=len(state.expected))
        case Resuming(recovery=recovery) as group if recovery.cause == "start":
            resumed = sum(1 for name in group.planned if name in group.resumed)
            return Startup(stage=StartupStage.FORMING, done=resumed, total=len(group.planned))
        case Running(recovery=recovery) if recovery is not None and recovery.cause == "start":
            return Startup(stage=StartupStage.FIRST_STEP, total=1)
        case _:
            return None


def _before_the_first_plan(c: Cluster) -> Startup | None:
    alive = [node for node in c.alive() if not node.released and node.quarantine is None]
    starting = sum(1 for node in alive if is_starting(node.building))
    if c.job is not None and not alive and describe_aside(c):
        return None  # Nothing progresses: the job waits until a node is readmitted or another one joins.
    if c.job is None or not alive:
        return Startup(stage=StartupStage.NODES, done=len(alive) - starting, total=len(alive))
    if c.profiled is None:
        if not c.profiler:
            return None
        progress = c.nodes[c.profiler].building
        if progress is None or is_starting(progress):
            return Startup(stage=StartupStage.BUILDING, node=c.profiler)
        measuring = progress.stage is BuildStage.MEASURING
        return Startup(
            stage=StartupStage.MEASURING if measuring else StartupStage.BUILDING,
            done=progress.done,
            total=progress.total,
            node=c.profiler,
            doing=progress.stage,
        )
    if not c.templates_ready:
        return Startup(stage=StartupStage.PLANNING)
    prepared = sum(1 for node in alive if node.prepared)
    return Startup(stage=StartupStage.PREPARING, done=prepared, total=len(alive))


def is_starting(progress: BuildProgress | None) -> bool:
    """Return whether a node with this progress still starts its trainers."""
    return progress is not None and progress.stage is BuildStage.STARTING
