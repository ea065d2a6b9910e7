"""Trainers whose devices are late at random."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from runtime.engine.engine import Engine
from runtime.monitoring.progress import ProgressMonitor
from runtime.snapshots.writer import SnapshotWriter
from statemachine.messages import trainer as p
from tests.helpers.fleet import Fleet
from tests.helpers.harness import pipeline
from tests.helpers.late_device import LateRuntime
from tests.helpers.runtime_support import data_for, script
from tests.helpers.snapshots import Layers, assembled, kept_parts

TWO = (
    pipeline((0, 2, [0]), (2, 4, [1]), first_microbatch=0, microbatches=2),
    pipeline((0, 4, [2]), first_microbatch=2, microbatches=2),
)


TURNED = (
    pipeline((0, 4, [0]), first_microbatch=0, microbatches=2),
    pipeline((0, 2, [1]), (2, 4, [2]), first_microbatch=2, microbatches=2),
)


class LateFleet(Fleet):
    """A fleet in which each engine has its own late device, and an arena for snapshots."""

    def __init__(self, job: p.TrainingData, arenas: Path, make: Callable[[int], LateRuntime]) -> None:
        self._arenas, self._make = arenas, make
        self.hold_s = 0.02
        """Delay of the device at each update, in seconds."""
        super().__init__(job, 3, "aec")
        self.nodes = ("a", "b", "c")

    def join(self, count: int) -> list[Engine]:
        new = []
        for number in range(count):
            runtime = self._make(number)
            with torch.random.fork_rng(devices=[]), runtime.computing():
                engine = Engine(self.job, runtime.device, ProgressMonitor(), runtime=runtime)
            engine.snapshots = SnapshotWriter(
                job_id="job",
                directory=self._arenas / f"device-{number}",
                limit_bytes=None,
                states=engine.states,
                model=engine.model,
                sharding=engine.sharding,
                monitor=engine.monitor,
                report=lambda _: None,
                hash_threads=2,
            )
            engine.optimization.step = self._delayed(runtime, engine.optimization.step)  # type: ignore[method-assign]
            new.append(engine)
        self.engines += new
        return new

    def _delayed(self, runtime: LateRuntime, update: Callable[..., None]) -> Callable[..., None]:
        """Delay an update on the device: a reader that does not wait for it sees the earlier state."""

        def held(*arguments: Any, **named: Any) -> None:
            hold_s = self.hold_s
            runtime.default.give(lambda: time.sleep(hold_s))
            update(*arguments, **named)

        return held

    def each(self, run: Callable[[int, Engine], Any]) -> list[Any]:
        def given(rank: int, engine: Engine) -> Any:
            runtime = engine.model.runtime
            assert isinstance(runtime, LateRuntime)
            with runtime.computing():
                return run(rank, engine)

        return super().each(given)

    def close_snapshots(self) -> None:
        for engine in self.engines:
            assert engine.snapshots is not None
            engine.snapshots.close()


LAYERS = """
    def middle():
        return nn.Sequential(nn.Linear(24, 24), nn.GELU())

    def build():
        first, last = nn.Sequential(nn.Linear(3, 24), nn.GELU()), nn.Linear(24, 1)
        return Training(layers=[first, middle(), middle(), last], dataset=Rows(),
            loss=lambda output, target: functional.mse_loss(output, target),
            metrics=lambda output, batch: {"largest": output.max()},
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9))
    """


def job(directory: Path) -> p.TrainingData:
    where = script(directory, LAYERS).parent
    return data_for("mine.py:build", where, steps=6, global_batch=8, microbatch_rows=2)


def snapshot_with_replicas(fleet: LateFleet, arenas: Path) -> list[Layers]:
    """Return the layers of a snapshot after step 2: of the owners' parts, and without each device."""
    with fleet:
        fleet.nodes, fleet.protection = ("a", "b", "c"), "arc:1+aor"
        fleet.enter(fleet.engines, TWO)
        fleet.steps(2)
        fleet.each(lambda rank, engine: engine.begin_snapshot(1))
        fleet.steps(2)
        fleet.close_snapshots()
    kept = kept_parts(arenas, 2)
    return [assembled(kept, lost) for lost in (None, 0, 1, 2)]
