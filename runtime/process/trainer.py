"""The trainer: the process that trains on one device, and the loop of its main thread.

The zygote forks it (``run_trainer``), and its node sends it instructions
(``statemachine.messages.trainer``). Being stopped by a failure elsewhere is normal: the main thread returns
from wherever it was, keeps its state, reports, and waits for the next generation in the same process.
"""

import gc
import sys
import time
from pathlib import Path
from typing import Literal

import torch
from msgspec.structs import replace

from planner.values import ModelProfile
from runtime.allocator import bound_memory, give_back_memory
from runtime.description import describe
from runtime.engine.engine import Engine, StepResult
from runtime.engine.memory import (
    check_planned_memory,
    explain_out_of_memory,
    is_out_of_memory,
    usable_memory_bytes,
)
from runtime.engine.staged_state import StagingCorruptedError
from runtime.errors import TrainingError
from runtime.groups.backends import make_communicator
from runtime.groups.communicator import (
    CommunicationAborted,
    Communicator,
    GroupError,
    PeerLost,
    group_timeout_s,
)
from runtime.groups.store import Rendezvous
from runtime.layers.digests import device_kind
from runtime.layers.state import StateError
from runtime.monitoring.progress import ProgressMonitor
from runtime.process.node_connection import Mailbox, NodeConnection
from runtime.profiling.layer_profile import profile_model
from runtime.snapshots.writer import SnapshotWriter, usable_hash_threads
from runtime.tracebacks import user_traceback
from runtime.training import torch_device
from statemachine.messages.common import (
    Finished,
    OptimizerReplicaDiverged,
    PeerSuspected,
    Prepared,
    Quiesce,
    ReplicaDigests,
    Resumed,
    SnapshotFailed,
    SnapshotStarted,
)
from statemachine.messages.trainer import (
    ModelDescribed,
    PrepareJob,
    Raised,
    ResumeRank,
    StagingCorrupted,
    StartSnapshot,
    TrainerQuiesced,
    TrainerStepped,
)
from statemachine.messages.values import BuildStage
from storage.description import encode_description


class _DifferentModelError(RuntimeError):
    """Staged state that belongs to a different model."""


class Trainer:
    """The main loop of a trainer.
    :param device: index of the device within the node.
    """

    def __init__(self, socket_path: str, device: int) -> None:
        self._device = device
        self._monitor = ProgressMonitor()
        self._mailbox = Mailbox(self._monitor)
        self._link = NodeConnection(socket_path, device, self._mailbox, self._monitor)
        self._engine: Engine | None = None
        self._communicator: Communicator | None = None
        self._expired = 0
        """Number of groups whose timeout was too short for a step; see ``group_timeout_s``."""
        self._progress_at = 0.0
        """Time when the current group last committed a step, or began to form."""

    def run(self) -> int:
        """Serve until the process is ended; return an exit code only after an error."""
        where: Literal["prepare", "restore", "training"] = "prepare"
        try:
            while True:
                instruction = self._mailbox.next()
                where = "prepare" if isinstance(instruction, PrepareJob) else "training"
                match instruction:
                    case PrepareJob():
                        self._prepare(instruction)
                    case Quiesce():
                        self._report(instruction)
                    case ResumeRank():
                        self._resume(instruction)
                    case StartSnapshot():
                        self._take_last_snapshot(instruction)
        except (TrainingError, GroupError) as error:
            self._link.send(Raised(where=where, detail=str(error)))
        except _DifferentModelError as error:
            self._link.send(Raised(where="restore", detail=str(error)))
        except (Exception, SystemExit) as error:  # A layer, a loss or an optimizer may call ``sys.exit``.
            self._link.send(Raised(where=where, detail=self._describe_error(error)))
        return 1

    def _describe_error(self, error: BaseException) -> str:
        """Return the user's traceback, or the breakdown of memory if memory was exhausted."""
        engine = self._engine
        if engine is None or not is_out_of_memory(error):
            return user_traceback(error)
        layers = engine.owned_layers or range(engine.model.layer_count)
        rows = engine.data.microbatch_rows
        return explain_out_of_memory(error, engine.model, engine.optimization, layers, rows)

    def _prepare(self, prepare: PrepareJob) -> None:
        self._monitor.tick()
        data = prepare.training
        device = torch_device(data)
        memory_bytes = usable_memory_bytes(device, prepare.memory_limit_bytes)
        check_planned_memory(self._device, memory_bytes, prepare.planned_memory_bytes)
        # One trainer of the cluster measures and verifies the model; the others do not wait for it.
        verified = not prepare.profile and not data.profile_given
        engine = Engine(data, device, self._monitor, verified=verified)
        self._monitor.tick()
        engine.warm_up()
        self._set_up_snapshots(engine, prepare)
        profile = self._profile(engine, prepare, memory_bytes) if prepare.profile else None
        if self._engine is not None:
            self._engine.close()
        self._engine = engine
        # A full collection visits all objects of torch and the model, which takes 0.3 s. A recovery must
        # not pay for that, and these objects stay anyway.
        gc.collect()
        gc.freeze()
        # Memory that checking and measuring the model used would otherwise stay with this process.
        give_back_memory()
        self._monitor.set_build_progress(None)
        if prepare.describe:
            self._describe(engine, prepare.job_id)
        self._link.send(Prepared(job_id=prepare.job_id, profile=profile))

    def _describe(self, engine: Engine, job_id: str) -> None:
        """Send the description of the model. Training does not depend on it, so after any error, which is
        printed, an empty one is sent.
        """
        try:
            description = encode_description(
                describe(engine.model.root_module, engine.model.training.files_from)
            )
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            sys.stderr.write(f"checkpoints of this job keep no configuration of the model: {reason}\n")
            description = b""
        self._link.send(ModelDescribed(job_id=job_id, description=description))

    def _set_up_snapshots(self, engine: Engine, prepare: PrepareJob) -> None:
        """Write snapshots into the node's arena for this device, if there is one."""
        self._mailbox.snapshots = None
        if self._engine is not None and self._engine.snapshots is not None:
            self._engine.snapshots.close()
        if self._engine is not None and self._engine.sharding is not None:
            self._engine.sharding.clear()
        if not prepare.arena:
            return
        engine.snapshots = self._mailbox.snapshots = SnapshotWriter(
            job_id=prepare.job_id,
            directory=Path(prepare.arena),
            limit_bytes=prepare.arena_limit_bytes,
            states=engine.states,
            model=engine.model,
            sharding=engine.sharding,
            monitor=self._monitor,
            report=self._link.send,
            hash_threads=usable_hash_threads(prepare.devices_per_node),
        )

    def _profile(self, engine: Engine, prepare: PrepareJob, memory_bytes: int | None) -> ModelProfile:
        self._monitor.set_build_progress(BuildStage.MEASURING)
        measured = profile_model(
            engine.model,
            prepare.training,
            devices_per_node=prepare.devices_per_node,
            # A large model takes longer than the timeout of a hang, so each layer counts as progress.
            progress=lambda done, total: self._monitor.set_build_progress(BuildStage.MEASURING, done, total),
        )
        return replace(measured.profile, device_memory_bytes=memory_bytes)

    def _report(self, quiesce: Quiesce) -> None:
        engine = self._engine
        if engine is None:
            report = TrainerQuiesced(
                generation=quiesce.generation, committed_step=0, ready_step=None, vote=None, held=()
            )
        else:
            report = TrainerQuiesced(
                generation=quiesce.generation,
                committed_step=engine.committed_step,
                ready_step=engine.ready_step,
                vote=engine.vote,
                held=tuple(sorted(engine.complete_layers)),
                lineage=engine.lineage,
                parts=() if engine.sharding is None else engine.sharding.held_parts(),
                evaluation=engine.evaluation,
            )
            if engine.snapshots is not None:
                engine.snapshots.hurry()
        self._link.send(report)

    def _resume(self, resume: ResumeRank) -> None:
        """Train under a generation until it is stopped, broken, or the last step is committed."""
        engine = self._engine
        if engine is None:
            raise RuntimeError("received a Resume before any Prepare")
        self._close()  # All ranks have reported since, so none needs the old groups any more.
        again = engine.stage_layers(resume) if resume.restore else frozenset()
        engine.commit_or_discard(resume.step, resume.vote, resume.lineage, again)
        if resume.rank < 0:
            return
        if resume.restore:
            try:
                engine.restore(Path(resume.restore), resume)
            except StateError as error:
                raise _DifferentModelError(str(error)) from error
            except StagingCorruptedError as error:
                self._link.send(
                    StagingCorrupted(generation=resume.generation, part=error.part, detail=str(error))
                )
                return
        rendezvous = Rendezvous(
            host=resume.rendezvous_host,
            port=resume.rendezvous_port,
            token=resume.token,
            generation=resume.generation,
        )
        self._communicator = make_communicator(
            engine.data.backend,
            rendezvous,
            resume.rank,
            resume.world.hosts,
            engine.model.runtime,
            group_timeout_s(resume.world.step_s, self._expired),
        )
        self._progress_at = time.monotonic()
        try:
            self._mailbox.attach(self._communicator)
            self._train(engine, resume, self._communicator)
        except (CommunicationAborted, PeerLost) as error:
            self._close()
            self._note_expired(resume)
            if isinstance(error, PeerLost):
                self._link.send(PeerSuspected(generation=resume.generation, detail=str(error)))

    def _note_expired(self, resume: ResumeRank) -> None:
        """Count a group whose step was not over when the timeout expired.

        The first operation to expire ends the group for all ranks. Each rank therefore uses the time since
        the last commit, which is the same for all, instead of its own error: otherwise the timeouts would
        differ, and the shortest one counts.
        """
        if time.monotonic() - self._progress_at >= 0.9 * group_timeout_s(resume.world.step_s, 0):
            self._expired += 1

    def _train(self, engine: Engine, resume: ResumeRank, communicator: Communicator) -> None:
        """Train in a group until the job is done or a stop is requested.

        :raises CommunicationError: the control plane, or the failure of a peer, stopped it.
        """
        generation = resume.generation
        entered = engine.enter(resume, communicator)
        self._link.send(
            Resumed(
                generation=generation,
                bytes_moved=entered.bytes_moved,
                rendezvous_s=entered.rendezvous_s,
                state_s=entered.state_s,
            )
        )
        try:
            engine.call_missed_hook()
            while True:
                if engine.evaluation_due and engine.evaluate(lambda: self._mailbox.stop_requested):
                    return
                if engine.committed_step >= engine.data.steps:
                    break
                self._monitor.trace.begin_step(engine.committed_step + 1)
                result = engine.step(lambda: self._mailbox.stop_requested, self._mailbox.take_snapshot_order)
                self._progress_at = time.monotonic()
                self._report_digests(generation, engine, result)
                self._link.send(
                    TrainerStepped(
                        generation=generation,
                        step=engine.committed_step,
                        vote=result.vote,
                        step_s=result.step_s,
                        bubble_s=result.bubble_s,
                        microbatch_ms=result.microbatch_ms,
                    )
                )
                engine.call_hook(result.step_s)
                self._report_divergence(generation, engine, result)
                if result.snapshot_requested:
                    self._begin_snapshot(engine, generation)
                self._report_trace(engine, resume)
                if result.stop_requested:
                    return
        finally:
            self._report_trace(engine, resume, over=True)
        self._link.send(
            Finished(
                generation=generation,
                step=engine.committed_step,
                digests=engine.compute_digests(),
                kind=device_kind(engine.model.device),
                evaluation=engine.evaluation,
            )
        )

    def _report_digests(self, generation: int, engine: Engine, result: StepResult) -> None:
        if result.digests:
            self._link.send(
                ReplicaDigests(
                    generation=generation,
                    step=engine.committed_step - 1,
                    device=self._device,
                    kind=device_kind(engine.model.device),
                    digests=result.digests,
                )
            )

    def _report_divergence(self, generation: int, engine: Engine, result: StepResult) -> None:
        for one in result.diverged:
            self._link.send(
                OptimizerReplicaDiverged(
                    generation=generation, step=engine.committed_step, layer=one.layer, detail=one.detail
                )
            )

    def _report_trace(self, engine: Engine, resume: ResumeRank, *, over: bool = False) -> None:
        traced = self._monitor.trace.end_step(
            resume.generation, resume.rank, engine.committed_step, over=over
        )
        if traced is not None:
            self._link.send(traced)

    def _begin_snapshot(self, engine: Engine, generation: int) -> None:
        """Begin a snapshot after ``Stepped`` was sent, so that a receiver of the snapshot's completion knows
        its step.
        """
        step = engine.committed_step
        self._link.send(SnapshotStarted(generation=generation, step=step))
        if engine.snapshots is None:
            detail = "this trainer was given no memory for snapshots"
            self._link.send(SnapshotFailed(generation=generation, step=step, detail=detail))
        else:
            engine.begin_snapshot(generation)

    def _take_last_snapshot(self, snap: StartSnapshot) -> None:
        """Take the snapshot of the last step, which no later step can overlap."""
        engine = self._engine
        if engine is not None and engine.owned_layers and engine.committed_step >= engine.data.steps:
            self._begin_snapshot(engine, snap.generation)
            if engine.snapshots is not None:
                engine.snapshots.finish()

    def _close(self) -> None:
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None


def run_trainer(socket_path: str, device: int) -> int:
    """Run the trainer of ``device`` in this process; return its exit code after an error."""
    gc.enable()
    bound_memory()
    torch.set_num_threads(1)
    return Trainer(socket_path, device).run()
