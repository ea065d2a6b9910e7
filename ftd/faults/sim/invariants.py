"""The invariants that must hold after every event, whatever happens to the processes and the network."""

from collections.abc import Callable
from typing import Any

from ftd.faults.sim.arena import is_unrecoverable
from ftd.faults.sim.checkpoint_store import SimCheckpointStore
from ftd.faults.sim.evaluations import EvaluationOracle
from ftd.faults.sim.journals import incarnations, is_job_over, named_nodes
from ftd.faults.sim.node import SimNode
from ftd.faults.sim.oracle import JournalView, Oracle
from ftd.faults.sim.published_events import PublishedEvents
from ftd.faults.sim.trainers import SimGroups, SimTrainer
from ftd.faults.sim.world import World
from ftd.transport.wire.checking import problem_of_details
from ftd.transport.wire.public import EventMessage, encode_json
from planner.values import ModelProfile, Plan, Policy
from statemachine.cluster.durable.records import assemble
from statemachine.cluster.machine import ClusterMachine
from statemachine.cluster.skipped_updates import is_counted
from statemachine.effects import EmitEvent, RecordSteps
from statemachine.election.leadership import Leader
from statemachine.messages.cluster import Command, Resume, RetainSnapshot
from statemachine.messages.common import Quiesce
from statemachine.messages.values import RECOVERY_PHASES, CheckpointRecord, Divergence, Job

WRONG_CODE = "ValueError: the code is wrong"
"""The output of a trainer whose job code raises."""


class Invariants(Oracle):
    """The world's oracle with the checks against nodes and published messages. Each method checks what has
    just become true.
    """

    def __init__(self, world: World, policy: Policy, profile: ModelProfile) -> None:
        super().__init__(world, policy, profile)
        self.nodes: dict[str, SimNode] = {}
        self.checkpoint_store = SimCheckpointStore(oracle=self)
        self.groups = SimGroups(self)
        self.known_step = 0
        """The newest committed step of the current job that the coordinator ever knew."""
        self.on_failure: Callable[[str], None] = lambda reason: None
        self.announced: set[int] = set()
        """Generations that were announced by an event."""
        self.leaving: set[str] = set()
        """Nodes that were promised to leave the plan, until an event takes that back or they are gone."""
        self.published_events = PublishedEvents(self)
        self.evaluations = EvaluationOracle(self, self.published_events)
        self.first_leaders: dict[int, tuple[int, float]] = {}
        """Incarnation of each term's first leader, and the time."""
        self.next_to_publish = 1
        self.first_step = 0
        """The step from which the current job began, or an earlier one to which it returned."""
        self.wrong_code = False
        self.spike_lineage = 0
        """Lineage that began with the last spike of the loss that was undone."""
        self.journal_tail_lost = False
        """Whether the end of the newest journal was ever lost with its host's power or the broker's memory."""
        self.resumed_job = False
        """Whether a group of the current job was ordered to start."""
        self.replicated = (0, 0)
        """The position of the newest journal that was ever at the broker."""
        self.replicated_by = ""
        """The coordinator that published it."""
        self.led_last = ""
        """The coordinator that began to lead last, or whose journal reached the broker since."""

    @property
    def trainers(self) -> list[SimTrainer]:
        """The trainers of all nodes."""
        return [trainer for node in self.nodes.values() for trainer in node.trainers.values()]

    def _notice_job(self, job: Job | None, begin: CheckpointRecord | None) -> None:
        """Forget what was published of the last job, if there is a new one now.

        :param begin: its newest checkpoint.
        """
        job_id = job.job_id if job is not None else None
        if job_id == self.job_id:
            return
        self.job_id = job_id
        first = begin.step if begin is not None else 0
        self.evaluations.new_job(first, job.steps if job is not None else 0)
        self.published = {first: int(begin.vote.loss)} if begin is not None else {}
        self.published_after.clear()
        self.first_step = self.newest_published = self.known_step = first
        self.next_to_publish = first + 1
        self.finished_job, self.failed_job, self.resumed_job = False, None, False
        self.lineage, self.newest, self.groups.trained = 0, None, None
        self.diverged = None

    # --- the coordinator -----------------------------------------------------------------------

    def check_retained(self, machine: JournalView) -> None:
        before = self.newest
        super().check_retained(machine)
        if self.newest is None or self.newest == before:
            return
        key = self.key_of(self.newest)
        for node in self.nodes.values():
            for shard in node.arena.parts(key).values():
                if not self.versions.sound.keys().isdisjoint(shard.layers.values()):
                    self.violated(
                        f"the snapshot of step {key.step} counts, but {node.name} wrote a flipped bit"
                    )

    def check_leader(self, leader: Leader, lost_state_at: float) -> None:
        """Check that each term has one leader. Positions in journals begin with the term, so two writers
        under one term could not be distinguished.

        :param lost_state_at: last time at which the broker lost the record of which terms were claimed.
        """
        first, at = self.first_leaders.setdefault(leader.term, (leader.incarnation, self.world.now))
        if first != leader.incarnation and at > lost_state_at:
            self.violated(f"{leader.name} leads in term {leader.term}, in which another coordinator led")

    def check_progress(self, machine: ClusterMachine) -> None:
        cluster = machine.cluster
        self._notice_job(cluster.job, cluster.checkpoints.newest)
        step = cluster.progress.known_step
        if step < self.known_step:
            self.violated(f"the committed step went back from {self.known_step} to {step}")
        self.known_step = step

    def on_journal(self, machine: JournalView) -> None:
        """Take a published journal. A rollback that is not in it has never happened."""
        self._notice_job(machine.job, machine.checkpoint)
        self.check_retained(machine)
        self.writing, self.skipped_updates = machine.writing, machine.skipped_updates
        spiked = machine.skipped_batches != self.skipped_batches
        self.skipped_batches = machine.skipped_batches
        if machine.lineage == self.lineage:
            self.diverged = machine.diverged
            return
        if self.diverged is not None:
            self._check_undone(self.diverged, machine.committed_step)
        elif not spiked:
            self._check_rollback_needed(machine)
        self.diverged = None
        if spiked:
            self.spike_lineage = machine.lineage
        self.lineage, self.groups.trained = machine.lineage, None
        step = machine.committed_step
        if self.newest is None and machine.checkpoint is not None and machine.checkpoint.step == step:
            self.checkpoint_store.check_rollback(machine.checkpoint)
        elif self.newest is None or step != self.newest.step:
            self.violated(f"rolled back to step {step}, which has no complete snapshot")
            return
        self.known_step = step
        self.checkpoint_store.rolled_back(self.job_id or "", step)
        self._undo_published(step)

    def _undo_published(self, step: int) -> None:
        """Forget the published steps after ``step``, which were undone."""
        self.published = {number: version for number, version in self.published.items() if number <= step}
        self.newest_published = min(self.newest_published, step)
        self.first_step = min(self.first_step, step)
        self.next_to_publish = min(self.next_to_publish, step + 1)
        self.evaluations.rolled_back(step)

    def check_command(self, command: Command, journal: dict[str, Any] | None, *, heard: bool) -> None:
        """Check a command to nodes.

        :param heard: whether the coordinator that sent it has all reports that nodes could not send for a while.
        """
        if isinstance(command, RetainSnapshot):
            durable = (journal or {}).get("snapshot")
            # The journal may name a newer one, whose own order follows: only what is older than both is
            # dropped.
            if durable is None or durable["step"] < command.step:
                self.violated(f"step {command.step} is to be retained, but the journal names {durable}")
        if not isinstance(command, Quiesce | Resume):
            return
        if isinstance(command, Resume):
            scheme = self.protections.setdefault(command.generation, command.protection)
            if scheme != command.protection:
                self.violated(
                    f"generation {command.generation} gets the protections {scheme} and {command.protection}"
                )
        if journal is None or journal["generation"] < command.generation:
            self.violated(f"generation {command.generation} was published before it was persisted")
            return
        if isinstance(command, Resume):
            self._check_resume(command, journal, heard)

    def _check_resume(self, resume: Resume, journal: dict[str, Any], heard: bool) -> None:
        if resume.generation < self.newest_resume:
            self.violated(f"generation {resume.generation} is resumed after {self.newest_resume}")
        if resume.generation == self.newest_resume:
            return  # Repeated for a node that may have missed it.
        self.newest_resume = resume.generation
        self.resumed_job = True
        if self.diverged is not None and resume.lineage != resume.generation:
            self.violated(f"generation {resume.generation} goes on with state of which the copies differ")
        if resume.step < self.newest_published and not self._is_lost_with_power(resume.step):
            self.violated(
                f"a Resume at step {resume.step} after step {self.newest_published} was published as committed"
            )
        self.check_plan(resume.plan)
        known = incarnations(journal)  # The coordinator may not have heard of a newer one yet.
        for name in resume.plan.nodes:
            if heard and self.wrong_devices.get(name, 0) == known.get(name):
                self.violated(f"the plan uses {name}, whose health check found a wrong product")

    def _is_lost_with_power(self, step: int) -> bool:
        """Return whether the power loss explains a lower step: only trainers knew what was not forced, and
        they are gone, too.
        """
        if not self.journal_tail_lost or self._is_known_by_a_trainer():
            return False
        self.known_step = self.newest_published = step
        self.published = {number: version for number, version in self.published.items() if number <= step}
        return True

    def check_plan(self, plan: Plan) -> None:
        """Check that every pipeline owns every layer once, and that the pipelines split the global batch
        exactly.
        """
        expected = 0
        for pipeline in sorted(plan.pipelines, key=lambda p: p.first_microbatch):
            if pipeline.first_microbatch != expected or pipeline.microbatches < 1:
                self.violated(f"a sample is left out or used twice at microbatch {expected}")
            expected += pipeline.microbatches
            layers = [n for s in pipeline.stages for n in range(s.first_layer, s.end_layer)]
            if layers != list(range(self.layers)):
                self.violated(f"a pipeline owns layers {layers} of {self.layers}")
        if expected != self.policy.microbatches:
            self.violated(f"{expected} of {self.policy.microbatches} microbatches are computed")
        if len(set(plan.devices)) != len(plan.devices):
            self.violated("a device is in the plan twice")

    def check_details(self, event: EmitEvent | EventMessage) -> None:
        """Check that an event follows the contract."""
        name = event.name if isinstance(event, EmitEvent) else event.event
        if problem := problem_of_details(name, encode_json(event.details)):
            self.violated(problem)

    def check_event(self, event: EmitEvent) -> None:
        """Check that a published event is true and follows the contract."""
        self.check_details(event)
        match event.name:
            case "GenerationStarted":
                assert event.generation is not None
                if event.generation in self.announced:
                    self.violated(f"generation {event.generation} was used twice")
                self.announced.add(event.generation)
            case "StepCommitted":
                self._check_step_published(event)
            case "Evaluated":
                self.evaluations.on_published(event)
            case "RolledBack":
                # If the leader was cut off, the undone steps are published after the journal, and before this.
                assert event.step is not None
                self._undo_published(event.step)
            case "JobFinished":
                self.finished_job = True
                self._check_skipped_updates()
                self.evaluations.finished()
                if self.newest_published < self.known_step:
                    self.violated(
                        f"finished, but the newest published step is {self.newest_published} of {self.known_step}"
                    )
            case "JobFailed":
                self.failed_job = event.reason
                self.on_failure(event.reason)
                self._check_failure()
            case "NodeDraining":
                self.leaving.add(event.node or "")
            case "NodeDrainWaiting" | "NodeDrainCancelled" | "NodeReleased" | "NodeLost" | "NodeJoined":
                self.leaving.discard(event.node or "")
            case "NodeDrainRefused":
                if event.node in self.leaving:
                    self.violated(f"a drain of {event.node} was refused after it was promised")
            case "PlanChosen":
                if used := self.leaving & _nodes_of(event.details["pipelines"]):
                    self.violated(f"{sorted(used)} were to leave, and the plan uses them")
            case "NodeReadmitted" | "QuarantineSkipped" | "NodeRemoved":
                # A quarantine ends with the removal of a node that was absent for long.
                self.wrong_devices.pop(event.node or "", None)
            case "RecoveryCompleted":
                self._check_protection_switch(event)
                self._check_phases(event.details["recovery"])
                self._check_drained(event)
            case "CheckpointAbandoned":
                self.checkpoint_store.on_abandoned(event)
            case "ReplicasDiverged":
                if not self.flips:
                    self.violated(f"replicas diverged: {event.details}")
            case _:
                pass

    def _check_drained(self, event: EmitEvent) -> None:
        """Check that the plan does without the nodes that are said to be drained."""
        said = (
            event.reason.partition("without ")[2].partition(", which")[0].replace(" and ", ", ").split(", ")
        )
        used = _nodes_of(event.details["recovery"]["pipelines_after"])
        if "drained" in event.reason and used.intersection(said):
            self.violated(f"{event.reason}, and the plan uses them")

    def _check_skipped_updates(self) -> None:
        """Check that the journal counts the skipped updates of the published steps, if all were published."""
        steps = sorted(self.published)
        if steps != list(range(steps[0], steps[-1] + 1)) or steps[-1] != self.newest_published:
            return
        begin = self.first_step
        counted = [n for n, v in self.published.items() if n > begin and is_counted(self.versions.vote(v))]
        if steps[0] <= begin + 1 and len(counted) != self.skipped_updates:
            self.violated(f"steps {counted} updated nothing, and the journal counts {self.skipped_updates}")

    def _check_protection_switch(self, event: EmitEvent) -> None:
        """Check that a mere change of the protection costs no step, unless a spike is undone at that boundary."""
        recovery = event.details["recovery"]
        alone = recovery["cause"] == "protection_changed" and recovery["generations_tried"] == 1
        alone = alone and recovery["generation"] != self.spike_lineage
        if alone and recovery["recomputed_steps"] + recovery["rolled_back_steps"]:
            self.violated("the protection is switched, but steps are computed again")

    def _check_phases(self, recovery: dict[str, Any]) -> None:
        """Check that the phases of a recovery add up to its duration."""
        phases_us = [round(1e3 * (recovery[name] or 0.0)) for name in RECOVERY_PHASES.values()]
        if min(phases_us) < 0 or sum(phases_us) != round(1e3 * recovery["total_ms"]):
            self.violated(f"a recovery's phases do not add up to its duration: {recovery}")

    def _check_step_published(self, event: EmitEvent) -> None:
        step, version = event.step, int(event.details["loss"])
        assert step is not None
        self.check_vote(event.details, version)
        due = self.next_to_publish or min(self.newest_published + 1, step)
        if step < due:
            self.violated(f"StepCommitted {step} was published where {due} was due")
        for missing in range(due, step):
            for node in self.nodes.values():
                # A node without the newest Resume will be fenced, and what it knows is dropped. The same
                # holds for a node that has yet to roll back to a snapshot.
                current = node.up and node.agent.generation >= self.newest_resume
                current = current and node.agent.lineage == self.lineage
                if current and missing in node.agent.history:
                    self.violated(
                        f"StepCommitted {step} was published where {due} was due, and {node.name} knows that step"
                    )
        if step in self.published and self.published_after[step] == self.published_events.journal_losses:
            self.violated(f"StepCommitted {step} was published twice")
        if self.published.setdefault(step, version) != version:
            self.violated(
                f"step {step} was published with version {self.published[step]} and again with {version}"
            )
        if step - 1 in self.published and self.published[step - 1] != self.versions.parent[version]:
            self.violated(f"published step {step} does not continue published step {step - 1}")
        self.evaluations.on_step_published(step)
        self.published_after[step] = self.published_events.journal_losses
        self.newest_published = max(self.newest_published, step)
        self.next_to_publish = step + 1

    def check_recalled(self, effect: RecordSteps) -> None:
        """Check that steps that nodes remember equal those that were published."""
        for event in effect.steps:
            if event.name == "Evaluated":
                self.evaluations.recalled(event)
                continue
            step, version = event.step, int(event.details["loss"])
            assert step is not None
            self.check_vote(event.details, version)
            if self.published.get(step, version) != version:
                self.violated(
                    f"step {step} was published with version {self.published[step]} and is recalled as {version}"
                )

    # --- abandoned state ---------------------------------------------------------------------------

    def _check_failure(self) -> None:
        repeated = self.diverged is not None and "again after" in (self.failed_job or "")
        if self.resumed_job and not repeated and not self._is_wrong_code(self.failed_job or ""):
            self._check_abandoned()  # Otherwise nobody could build it.

    def _is_wrong_code(self, reason: str) -> bool:
        """Return whether the job failed because its code raised, and not because state was lost."""
        if not reason.startswith("the job's code raised "):
            return False
        if not self.wrong_code or WRONG_CODE not in reason:
            self.violated(f"a node's own failure counts as the job's: {reason}")
        return True

    def _check_undone(self, diverged: Divergence, step: int) -> None:
        """Check that a rollback since copies differ returns to a step before a bit flipped."""
        since = self.flips.get(diverged.generation)
        if since is None:
            self.violated(f"copies of layers were found to differ, but no bit flipped: {diverged}")
        elif step > since:
            self.violated(f"the job returns to step {step}, but a bit flipped after step {since}")

    def _check_rollback_needed(self, machine: JournalView) -> None:
        """Check that a rollback is necessary.

        It is not while the members hold all layers of their newest step; nor, with replicas of all parts,
        when a group that trained has lost only one node.
        """
        live = [
            trainer
            for name in machine.members
            for trainer in self.nodes[name].trainers.values()
            if trainer.responsive
            and trainer.generation == machine.generation
            and trainer.lineage == self.lineage
        ]
        newest = max([self.known_step, *(trainer.committed for trainer in live)])
        ready = [t for t in live if t.ready == newest and t.gradients[0] == self.newest_resume]
        if not self.groups.missing_layers(live, newest, ready):
            self.violated(f"rolled back although live trainers hold all layers of step {newest}")
        group = self.groups.trained
        if group is None or not group.sharded or "aor" not in group.resume.protection:
            return
        lost_nodes = {
            trainer.node.name
            for trainer in group.trained_by.values()
            if trainer.node.name not in machine.members or not trainer.responsive
        }
        if len(group.resume.plan.pipelines) > 1 and len(lost_nodes) < 2:
            self.violated(f"rolled back although a group with replicas has lost only {sorted(lost_nodes)}")

    def _is_known_by_a_trainer(self) -> bool:
        """Return whether a running trainer has committed the newest published step."""
        return any(trainer.alive and trainer.committed >= self.newest_published for trainer in self.trainers)

    def _knows_last_resume(self, trainer: SimTrainer) -> bool:
        """Return whether a trainer took the last Resume, or was stopped for a later generation, with the same past."""
        missed = trainer.phase == "quiesced" and trainer.generation == self.newest_resume
        return trainer.generation >= self.newest_resume and not missed and trainer.lineage == self.lineage

    def _check_abandoned(self) -> None:
        """Check that state is abandoned only when no trainer that counts holds some layer of the newest step.

        Trainers of a node with a dead or hanging trainer do not count, since the agent ends them all. Nor
        do those that missed the last Resume: the cluster went on without them, and nobody can know whether
        they took another path in their partition.
        """
        counting = [
            trainer
            for node in self.nodes.values()
            if all(trainer.responsive for trainer in node.trainers.values())
            for trainer in node.trainers.values()
            if self._knows_last_resume(trainer)
        ]
        if self.diverged is None and not self.groups.missing_layers(
            counting, self.known_step, [t for t in counting if t.ready == self.known_step]
        ):
            self.violated("the job failed while live trainers hold all of its state")
        if self.newest is not None:
            key = self.key_of(self.newest)
            up = {name: node for name, node in self.nodes.items() if node.up}
            there = {name for name, node in up.items() if node.arena.is_intact(key)}
            copied = {
                owner
                for owner, peer in self.newest.replica_peers.items()
                if peer in up and up[peer].arena.copy(key, owner) is not None
            }
            if not any(
                is_unrecoverable(group, there, copied=bool(group.replica_peer) and group.owners[0] in copied)
                for group in self.newest.groups
            ):
                self.violated(
                    f"the job failed while {sorted(there)}, and replica peers of {sorted(copied)}, hold the "
                    f"snapshot of {key.step}"
                )
        intact = [step for step, stored in self.checkpoint_store.checkpoints.items() if not stored.corrupt]
        if intact:
            self.violated(f"the job failed while there are intact checkpoints of steps {intact}")

    def check_removal(self, stored_state: dict[str, Any] | None, name: str) -> None:
        """Check the removal of ``name`` at the broker: the journal no longer names it, and it holds nothing
        that nobody else has.
        """
        journal = assemble(stored_state) if stored_state is not None else None
        if journal is None or is_job_over(journal):
            return
        if name in named_nodes(journal):
            self.violated(f"{name} is removed, but the job's journal names it")
        if not self.known_step:
            return  # The state is that of step 0, which every new trainer builds.
        counting = [t for t in self.trainers if t.responsive and self._knows_last_resume(t)]
        others = [trainer for trainer in counting if trainer.node.name != name]
        if self.groups.missing_layers(others, self.known_step) and not self.groups.missing_layers(
            counting, self.known_step
        ):
            self.violated(f"{name} is removed, but holds what nobody else does")


def _nodes_of(pipelines: list[dict[str, Any]]) -> set[str]:
    """Return the nodes of pipelines as events describe them."""
    stages = [stage for pipeline in pipelines for stage in pipeline["stages"]]
    return {device.split("/")[0] for stage in stages for device in stage["devices"]}
