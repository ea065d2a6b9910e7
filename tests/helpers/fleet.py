"""Engines of several ranks in one process, one thread each, over real gloo: tests can interrupt any phase of a
step.
"""

import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import torch

from runtime.engine.engine import Engine, StepResult
from runtime.groups.backends import make_communicator
from runtime.groups.communicator import CommunicationAborted, Communicator
from runtime.groups.store import Rendezvous
from runtime.monitoring.progress import ProgressMonitor
from statemachine.messages import trainer as p
from statemachine.messages.values import Evaluation, Vote
from tests.helpers.devices import BACKEND, DEVICE
from tests.helpers.harness import TOKEN, ServerThread
from tests.helpers.snapshots import Layers
from tests.helpers.waiting import PATIENCE_S
from tests.helpers.zero import Pipelines, held_of


class Fleet:
    """Engines in one process. ``engines`` are those that live, in the order of their ranks after ``enter`` was
    called.
    """

    def __init__(self, job: p.TrainingData, count: int, protection: str = "aor") -> None:
        self.job = job
        self.protection = protection
        self.engines: list[Engine] = []
        self.pipelines: Pipelines = ()
        self.generation = 0
        self.votes: dict[int, Vote] = {}
        """Votes by step."""
        self.restore = ""
        """Directory from which the next ``enter`` restores whole layers, at ``restore_step``."""
        self.restore_step = 0
        self.evaluated = 0
        """The newest step whose evaluation is known, for the next ``enter``."""
        self.evaluations: dict[int, Evaluation] = {}
        """Evaluations by the step whose state was evaluated."""
        self.parked: dict[int, tuple[int, ...]] = {}
        self.dropped: dict[int, tuple[int, ...]] = {}
        """Layers that each rank of the next ``enter`` parks and drops."""
        self.nodes: tuple[str, ...] = ()
        """Node of each rank for the next ``enter``; if empty, no snapshots are taken."""
        self.skipped_batches: tuple[int, ...] = ()
        """Batches that the sample order leaves out from the next ``enter`` on."""
        self._verified = False
        self._joined = 0
        self._communicators: dict[Engine, Communicator] = {}
        self._server = ServerThread()
        self._pool = ThreadPoolExecutor(16)
        self.join(count)

    @property
    def losses(self) -> dict[int, float]:
        return {step: vote.loss for step, vote in self.votes.items()}

    def join(self, count: int) -> list[Engine]:
        """Start engines. Only the first one of all compares the model's parts with the whole, as in a job."""
        new = []
        with torch.random.fork_rng(devices=[]):
            for _ in range(count):
                device = torch.device(DEVICE)
                if device.type == "cuda":
                    device = torch.device("cuda", self._joined % torch.cuda.device_count())
                new.append(Engine(self.job, device, ProgressMonitor(), verified=self._verified))
                self._verified = True
                self._joined += 1
        self.engines += new
        return new

    def enter(self, engines: Sequence[Engine], pipelines: Pipelines) -> int:
        """Continue these engines under a new plan, without the others. Return the step that they continue
        from.
        """
        reports = [report_of(engine) for engine in engines]
        best = max(reports, key=lambda report: report.committed_step)
        if self.restore:
            vote = Vote(loss=0.0, gradient_norm=0.0)
            best = msgspec.structs.replace(best, committed_step=self.restore_step, vote=vote)
        ranks = {engine: rank for rank, engine in enumerate(self.engines)}
        held: list[p.PartData] = []
        transfers: tuple[p.TransferData, ...] = ()
        if engines[0].sharding is not None:
            held = [
                part
                for rank, (engine, report) in enumerate(zip(engines, reports, strict=True))
                for part in held_of(
                    report,
                    rank,
                    best.committed_step,
                    self.pipelines,
                    ranks[engine],
                    zero1=self.job.zero1,
                )
                if part.layer not in self.dropped.get(rank, ())
            ]
        elif not self.restore:
            transfers = whole_layers(engines, best.committed_step, pipelines)
        self.generation += 1
        self.engines, self.pipelines = list(engines), pipelines
        world = p.WorldData(
            pipelines=pipelines,
            transfers=transfers,
            hosts=("127.0.0.1",) * len(engines),
            held_parts=tuple(held),
        )
        self.abort()
        before = list(self._communicators.values())
        self.each(lambda rank, engine: self._enter(rank, engine, world, best.committed_step, best.vote))
        for communicator in before:
            communicator.close()
        if best.vote is not None:
            self.votes[best.committed_step] = best.vote
        return best.committed_step

    def _enter(self, rank: int, engine: Engine, world: p.WorldData, step: int, vote: Vote | None) -> None:
        rendezvous = Rendezvous(
            host="127.0.0.1", port=self._server.port, token=TOKEN, generation=self.generation
        )
        communicator = make_communicator(BACKEND, rendezvous, rank, world.hosts, engine.model.runtime)
        self._communicators[engine] = communicator
        resume = p.ResumeRank(
            generation=self.generation,
            step=step,
            vote=vote,
            rank=rank,
            world=world,
            rendezvous_host="",
            rendezvous_port=0,
            token=TOKEN,
            nodes=self.nodes,
            protection=self.protection,
            restore=self.restore,
            skipped_batches=self.skipped_batches,
            evaluated=self.evaluated,
            parked=self.parked.get(rank, ()),
            dropped=self.dropped.get(rank, ()),
        )
        engine.commit_or_discard(step, vote)
        if self.restore:
            engine.restore(Path(self.restore), resume)
        engine.enter(resume, communicator)
        engine.call_missed_hook()

    def packed(self) -> Layers:
        """Return all layers as ranks own them whole, at the committed step."""
        found = {}
        for engine in self.engines:
            for layer in sorted(engine.owned_layers):
                header, payload = engine.states.pack(layer)
                found[layer] = header, payload.numpy().tobytes()
        return found

    def steps(self, count: int) -> list[StepResult]:
        """Make ``count`` steps on all ranks; return the results of the last one."""
        results: list[StepResult] = []
        for _ in range(count):
            if self.engines[0].evaluation_due:
                self.evaluate()
            results = self.each(lambda rank, engine: engine.step(lambda: False))
            self.votes[self.engines[0].committed_step] = results[0].vote
            for engine, result in zip(self.engines, results, strict=True):
                engine.call_hook(result.step_s)
        return results

    def evaluate(self, stop_requested: Callable[[], bool] = lambda: False) -> bool:
        """Evaluate the committed state on all ranks; return whether any rank wanted to stop."""
        stops = self.each(lambda rank, engine: engine.evaluate(stop_requested))
        result = self.engines[0].evaluation
        assert all(engine.evaluation == result for engine in self.engines), "all ranks know the same"
        assert len(set(stops)) == 1
        if result is not None:
            self.evaluations[self.engines[0].committed_step] = result
        return bool(stops[0])

    def broken_step(self) -> None:
        """Run a step in which a rank calls ``abort``, and which no rank finishes; but with ZeRO-1, once a rank
        that fails has committed the step, those that gather nothing from such ranks may finish it first.
        """
        before = self.engines[0].committed_step

        def run(rank: int, engine: Engine) -> bool:
            try:
                engine.step(lambda: False)
            except CommunicationAborted:
                return True
            return False

        aborted = self.each(run)
        failed = [engine for engine, one in zip(self.engines, aborted, strict=True) if one]
        decided = self.job.zero1 and any(engine.committed_step > before for engine in failed)
        assert all(aborted) or decided

    def abort(self) -> None:
        # After the error of one rank, others may still be entering.
        for communicator in list(self._communicators.values()):
            communicator.abort()

    def each(self, run: Callable[[int, Engine], Any]) -> list[Any]:
        """Call ``run`` for all ranks at once, each on its thread, and return the results.

        No garbage is collected meanwhile. torch reads the state of the process's generator while it holds a
        lock of its own. A collection that begins there releases the interpreter lock, and the rank that
        gets it waits for torch's lock.
        """

        def on_this_thread(rank: int, engine: Engine) -> Any:
            # Ranks that share a device would share autograd's thread for it, and wait there for each other.
            with torch.autograd.set_multithreading_enabled(False):
                return run(rank, engine)

        gc.disable()
        try:
            futures = [
                self._pool.submit(on_this_thread, rank, engine) for rank, engine in enumerate(self.engines)
            ]
            return [future.result(PATIENCE_S) for future in futures]
        finally:
            gc.enable()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
        for engine, communicator in list(self._communicators.items()):
            if engine.sharding is not None:
                engine.sharding.clear()
            communicator.close()
        self._pool.shutdown()
        self._server.close()


def whole_layers(engines: Sequence[Engine], step: int, pipelines: Pipelines) -> tuple[p.TransferData, ...]:
    """Return the transfers of layers that each rank must have and does not hold at ``step``."""
    held: list[set[int]] = []
    for engine in engines:
        if engine.committed_step == step:
            held.append(set(engine.complete_layers))
        else:
            held.append(set(engine.owned_layers) if engine.ready_step == step else set())
    wanted = {
        rank: range(stage.first_layer, stage.end_layer)
        for pipeline in pipelines
        for stage in pipeline.stages
        for rank in stage.ranks
    }
    return tuple(
        p.TransferData(layer=layer, source=next(s for s, has in enumerate(held) if layer in has), target=rank)
        for rank, layers in sorted(wanted.items())
        for layer in layers
        if layer not in held[rank]
    )


def report_of(engine: Engine) -> p.TrainerQuiesced:
    return p.TrainerQuiesced(
        generation=0,
        committed_step=engine.committed_step,
        ready_step=engine.ready_step,
        vote=engine.vote,
        held=tuple(sorted(engine.complete_layers)),
        parts=() if engine.sharding is None else engine.sharding.held_parts(),
        evaluation=engine.evaluation,
    )
