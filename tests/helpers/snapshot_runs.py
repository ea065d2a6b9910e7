"""Runs that leave snapshots of several pipelines."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch

from runtime.engine.engine import Engine
from runtime.groups.communicator import Communicator
from runtime.layers.world import owners_of_layer
from runtime.monitoring.progress import ProgressMonitor
from runtime.snapshots.writer import SnapshotWriter
from runtime.zero.parts import initial_holdings
from statemachine.messages import trainer as p
from storage.buckets import derive_buckets
from tests.helpers.harness import formed_world, pipeline
from tests.helpers.snapshots import Layers

UNEQUAL = (
    pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=0, microbatches=2),
    pipeline((0, 1, [2]), (1, 4, [3]), first_microbatch=2, microbatches=1),
    pipeline((0, 4, [4]), first_microbatch=3, microbatches=1),
)


SEVERAL = (
    pipeline((0, 3, [0, 1]), (3, 4, [2]), first_microbatch=0, microbatches=2),
    pipeline((0, 4, [3, 4]), first_microbatch=2, microbatches=2),
)
"""Stages of two devices, and of one. Each stage is a node, which is named after its lowest rank."""


class Rank:
    """An engine in this process, with a snapshot writer."""

    def __init__(self, data: p.TrainingData, arena: Path, job_id: str = "job") -> None:
        with torch.random.fork_rng(devices=[]):
            self.engine = Engine(data, torch.device("cpu"), ProgressMonitor())
        self.reports: list[p.SnapshotReport] = []
        self.packed: Layers = {}
        self.engine.snapshots = SnapshotWriter(
            job_id=job_id,
            directory=arena,
            limit_bytes=None,
            states=self.engine.states,
            model=self.engine.model,
            sharding=self.engine.sharding,
            monitor=self.engine.monitor,
            report=self.reports.append,
        )

    def train(self, steps: int, snap_behind: int) -> None:
        engine = self.engine
        assert engine.snapshots is not None
        for _ in range(steps):
            result = engine.step(lambda: False, lambda: engine.committed_step + 1 == snap_behind)
            assert result.snapshot_requested == (engine.committed_step == snap_behind)
            if result.snapshot_requested:
                engine.begin_snapshot(1)
                for layer in sorted(engine.owned_layers if engine.sharding is None else ()):
                    header, payload = engine.states.pack(layer)
                    self.packed[layer] = header, payload.numpy().tobytes()
        engine.snapshots.close()


def run(
    data: p.TrainingData,
    pipelines: Sequence[p.WorldPipeline],
    scheme: str,
    arenas: Path,
    snap_behind: int = 2,
    place: Callable[[int], str] = lambda rank: f"device-{rank}",
) -> list[Rank]:
    """Run steps with snapshots.
    :param place: path of a rank's arena below ``arenas``.
    """
    size = sum(len(stage.ranks) for one in pipelines for stage in one.stages)
    ranks = [Rank(data, arenas / place(rank)) for rank in range(size)]
    world = p.WorldData(pipelines=tuple(pipelines), transfers=(), hosts=("127.0.0.1",) * size)
    stages = sorted(stage.ranks for one in pipelines for stage in one.stages)
    nodes = tuple(f"node-{min(stage)}" for stage in stages for _ in stage)
    if data.zero1 or data.within_node != "replicate":
        world = msgspec.structs.replace(world, held_parts=initial_holdings(world))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def work(rank: int, communicator: Communicator) -> None:
        resume = p.ResumeRank(
            generation=1,
            step=0,
            vote=None,
            rank=rank,
            world=world,
            rendezvous_host="",
            rendezvous_port=0,
            token="",
            nodes=nodes,
            protection=scheme,
        )
        ranks[rank].engine.commit_or_discard(0, None)
        ranks[rank].engine.enter(resume, communicator)
        ranks[rank].train(snap_behind + 1, snap_behind)

    model = ranks[0].engine.model
    buckets = derive_buckets(model.parameter_layers, owners_of_layer(world), model.parameter_sizes)
    groups = ranks[0].engine._groups(world, buckets)
    try:
        with formed_world(size, groups, timeout_s=60.0) as communicators, ThreadPoolExecutor(size) as pool:
            for communicator in communicators:
                communicator.form = lambda groups, talks: None  # type: ignore[method-assign]
            list(pool.map(work, range(size), communicators))
    finally:
        torch.set_num_threads(threads)
    return ranks
