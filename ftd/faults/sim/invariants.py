"""What must hold after every event, whatever happens to the processes and the network."""

from collections.abc import Callable
from typing import Any

from ftd.faults.sim.arena import lacking
from ftd.faults.sim.checkpoint_store import SimCheckpointStore
from ftd.faults.sim.evaluations import EvaluationOracle
from ftd.faults.sim.journals import named, over
from ftd.faults.sim.node import SimNode
from ftd.faults.sim.oracle import OF_A_VOTE, JournalView, Oracle
from ftd.faults.sim.published_events import PublishedEvents
from ftd.faults.sim.trainers import SimGroups
from ftd.faults.sim.world import World
from ftd.transport.wire.checking import problem_of_details
from ftd.transport.wire.public import encode_json
from planner.values import ModelProfile, Plan, Policy
from statemachine.cluster.durable.records import assemble
from statemachine.cluster.machine import ClusterMachine
from statemachine.effects import EmitEvent, RecordSteps
from statemachine.election.leadership import Leader
from statemachine.messages.cluster import Command, Resume, RetainSnapshot
from statemachine.messages.common import Quiesce
from statemachine.messages.values import Checkpoint, Job

WRONG_CODE = "ValueError: the code is wrong"
"""What a trainer says where the job's own code raises."""


class Invariants(Oracle):
    """The world's truth, gathered where it happens; each method checks what has just become true."""

    def __init__(self, world: World, policy: Policy, profile: ModelProfile) -> None:
        super().__init__(world, policy, profile)
        self.nodes: dict[str, SimNode] = {}
        self.place = SimCheckpointStore(truth=self)
        self.groups = SimGroups(self)
        self.known = 0
        """The newest committed step that the coordinator ever knew of, for the present job."""
        self.on_failure: Callable[[str], None] = lambda reason: None
        self.announced: set[int] = set()
        """Generations that an event said have started."""
        self.telling = PublishedEvents(self)
        self.evaluations = EvaluationOracle(self, self.telling)
        self.reigned: dict[int, tuple[int, float]] = {}
        """Incarnation of who led first in each term, and since when."""
        self.next_to_tell = 1
        self.wrong_code = False
        self.unforced = False
        """The end of the newest journal was lost, once, with its host's power or the broker's memory."""
        self.resumed_job = False
        """A group of the present job was told to start."""
        self.replicated = (0, 0)
        """Position of the newest journal that was ever at the broker."""
        self.replicated_by = ""
        """The coordinator that published it."""

    def new_job(self, begin: Checkpoint | None, job: Job | None) -> None:
        """:param begin: what it goes on from."""
        self.evaluations.new_job(begin.step if begin is not None else 0, job.steps if job is not None else 0)
        self.told = {begin.step: int(begin.vote.loss)} if begin is not None else {}
        self.told_after.clear()
        self.newest_told = self.known = begin.step if begin is not None else 0
        self.next_to_tell = self.known + 1
        self.finished_job, self.failed_job = False, None
        self.resumed_job = False
        self.lineage, self.newest, self.groups.trained = 0, None, None

    # --- the coordinator -----------------------------------------------------------------------

    def coordinator_starts(self, machine: ClusterMachine) -> None:
        self.coordinator_stepped(machine)

    def reigns(self, leader: Leader, forgot_at: float) -> None:
        """Positions in journals begin with the term: what two wrote under one could not be told apart.

        :param forgot_at: when the broker last lost what says which terms were claimed.
        """
        first, at = self.reigned.setdefault(leader.term, (leader.incarnation, self.world.now))
        if first != leader.incarnation and at > forgot_at:
            self.broken(f"{leader.name} leads in term {leader.term}, in which another one led")

    def coordinator_stepped(self, machine: ClusterMachine) -> None:
        if machine.job_id != self.job_id:
            self.job_id = machine.job_id
            self.new_job(machine.checkpoint, machine.job)
        step = machine.committed_step
        if step < self.known:
            self.broken(f"the committed step went back from {self.known} to {step}")
        self.known = step

    def persisted(self, machine: JournalView) -> None:
        """What the journal says now; a rollback is in it, or never was."""
        if machine.job_id != self.job_id:
            self.job_id = machine.job_id
            self.new_job(machine.checkpoint, machine.job)
        self.keeps(machine)
        self.writing = machine.writing
        if machine.lineage == self.lineage:
            return
        self._rolls_back(machine)
        self.lineage, self.groups.trained = machine.lineage, None
        step = machine.committed_step
        if self.newest is None and machine.checkpoint is not None and machine.checkpoint.step == step:
            self.place.goes_back(machine.checkpoint)
        elif self.newest is None or step != self.newest.step:
            self.broken(f"rolled back to step {step}, of which no snapshot is complete")
            return
        self.known = step
        self.place.rolled_back(self.job_id or "", step)
        self.told = {number: version for number, version in self.told.items() if number <= step}
        self.newest_told = min(self.newest_told, step)
        self.next_to_tell = min(self.next_to_tell, step + 1)
        self.evaluations.rolled_back(step)

    def commands(self, command: Command, journal: dict[str, Any] | None) -> None:
        if isinstance(command, RetainSnapshot):
            durable = (journal or {}).get("snapshot")
            # It may name a newer one, whose own order follows: nothing goes but what is older than both.
            if durable is None or durable["step"] < command.step:
                self.broken(f"step {command.step} is to be kept, and the journal names {durable}")
        if not isinstance(command, Quiesce | Resume):
            return
        if isinstance(command, Resume):
            scheme = self.protected.setdefault(command.generation, command.protection)
            if scheme != command.protection:
                self.broken(
                    f"generation {command.generation} is told to protect by {scheme} and {command.protection}"
                )
        if journal is None or journal["generation"] < command.generation:
            self.broken(f"generation {command.generation} was published before it was persisted")
        if isinstance(command, Resume):
            self._resume_is_sound(command)

    def _resume_is_sound(self, resume: Resume) -> None:
        if resume.generation < self.newest_resume:
            self.broken(f"generation {resume.generation} is resumed after {self.newest_resume}")
        if resume.generation == self.newest_resume:
            return  # repeated for a node that may have missed it
        self.newest_resume = resume.generation
        self.resumed_job = True
        if resume.step < self.newest_told and not self._gone_with_power(resume.step):
            self.broken(f"a Resume at step {resume.step} after step {self.newest_told} was told as committed")
        self.plan_is_sound(resume.plan)

    def _gone_with_power(self, step: int) -> bool:
        """What was told and not forced to a disk only trainers knew, and those of them are gone, too."""
        if not self.unforced or self._is_known_by_a_trainer():
            return False
        self.known = self.newest_told = step
        self.told = {number: version for number, version in self.told.items() if number <= step}
        return True

    def plan_is_sound(self, plan: Plan) -> None:
        """Every pipeline owns every layer once; the pipelines split the global batch exactly."""
        expected = 0
        for pipeline in sorted(plan.pipelines, key=lambda p: p.first_microbatch):
            if pipeline.first_microbatch != expected or pipeline.microbatches < 1:
                self.broken(f"a sample is left out or used twice at microbatch {expected}")
            expected += pipeline.microbatches
            layers = [n for s in pipeline.stages for n in range(s.first_layer, s.end_layer)]
            if layers != list(range(self.layers)):
                self.broken(f"a pipeline owns layers {layers} of {self.layers}")
        if expected != self.policy.microbatches:
            self.broken(f"{expected} of {self.policy.microbatches} microbatches are computed")
        if len(set(plan.devices)) != len(plan.devices):
            self.broken("a device is in the plan twice")

    def public_event(self, event: EmitEvent) -> None:
        """What the world is told must be so, and as the contract has it."""
        if problem := problem_of_details(event.name, encode_json(event.details)):
            self.broken(problem)
        match event.name:
            case "GenerationStarted":
                assert event.generation is not None
                if event.generation in self.announced:
                    self.broken(f"generation {event.generation} was used twice")
                self.announced.add(event.generation)
            case "StepCommitted":
                self._told(event)
            case "Evaluated":
                self.evaluations.told(event)
            case "JobFinished":
                self.finished_job = True
                self.evaluations.finished()
                if self.newest_told < self.known:
                    self.broken(f"finished, but the world heard of step {self.newest_told} of {self.known}")
            case "JobFailed":
                self.failed_job = event.reason
                self.on_failure(event.reason)
                self._may_fail()
            case "RecoveryCompleted":
                self._switched(event.details["recovery"])
            case "CheckpointAbandoned":
                self.place.given_up(event)
            case "ReplicasDiverged":
                self.broken(f"replicas diverged: {event.details}")
            case _:
                pass

    def _switched(self, recovery: dict[str, Any]) -> None:
        """Another protection alone costs no step."""
        alone = recovery["cause"] == "protection_changed" and recovery["generations_tried"] == 1
        if alone and recovery["recomputed_steps"] + recovery["rolled_back_steps"]:
            self.broken("the protection is switched, and steps are done again")

    def _told(self, event: EmitEvent) -> None:
        step, version = event.step, int(event.details["loss"])
        assert step is not None
        self.same_vote({name: event.details[name] for name in OF_A_VOTE}, version)
        due = self.next_to_tell or min(self.newest_told + 1, step)
        if step < due:
            self.broken(f"StepCommitted {step} came where {due} was due")
        for missing in range(due, step):
            for node in self.nodes.values():
                # A node without the newest Resume is to be fenced, and what it knows with it.
                # So it is with one that has yet to go back to a snapshot.
                current = node.up and node.agent.generation >= self.newest_resume
                current = current and node.agent.lineage == self.lineage
                if current and node.agent.remembers(missing):
                    self.broken(f"StepCommitted {step} came where {due} was due, and {node.name} knows it")
        if step in self.told and self.told_after[step] == self.telling.losses:
            self.broken(f"StepCommitted {step} came twice")
        if self.told.setdefault(step, version) != version:
            self.broken(f"step {step} was told with version {self.told[step]} and again with {version}")
        if step - 1 in self.told and self.told[step - 1] != self.versions.parent[version]:
            self.broken(f"told step {step} does not continue told step {step - 1}")
        self.evaluations.step_told(step)
        self.told_after[step] = self.telling.losses
        self.newest_told = max(self.newest_told, step)
        self.next_to_tell = step + 1

    def recalled(self, effect: RecordSteps) -> None:
        """Steps that nodes remember are those that were reported."""
        for event in effect.steps:
            if event.name == "Evaluated":
                self.evaluations.recalled(event)
                continue
            step, version = event.step, int(event.details["loss"])
            assert step is not None
            self.same_vote({name: event.details[name] for name in OF_A_VOTE}, version)
            if self.told.get(step, version) != version:
                self.broken(
                    f"step {step} was told with version {self.told[step]} and is recalled as {version}"
                )

    # --- state that is given up -------------------------------------------------------------------

    def _may_fail(self) -> None:
        if self.resumed_job and not self._is_wrong_code(self.failed_job or ""):
            self._gives_up()  # Otherwise nobody could build it.

    def _is_wrong_code(self, reason: str) -> bool:
        """Return whether the job is given up as its code raised, and not for want of state."""
        if not reason.startswith("the job's code raised "):
            return False
        if not self.wrong_code or WRONG_CODE not in reason:
            self.broken(f"a node's own failure was taken for the job's: {reason}")
        return True

    def _rolls_back(self, machine: JournalView) -> None:
        """Nobody goes back while those who take part hold all layers of their newest step; nor, with replicas
        of all parts, when a group that trained lost one node."""
        live = [
            trainer
            for name in machine.members
            for trainer in self.nodes[name].trainers.values()
            if trainer.able and trainer.generation == machine.generation and trainer.lineage == self.lineage
        ]
        newest = max([self.known, *(trainer.committed for trainer in live)])
        ready = [t for t in live if t.ready == newest and t.gradients[0] == self.newest_resume]
        if not self.groups.lacking(live, newest, ready):
            self.broken(f"rolled back, and live trainers hold all layers of step {newest}")
        group = self.groups.trained
        if group is None or not group.sharded or "aor" not in group.resume.protection:
            return
        gone = {
            trainer.node.name
            for trainer in group.trained_by.values()
            if trainer.node.name not in machine.members or not trainer.able
        }
        if len(group.resume.plan.pipelines) > 1 and len(gone) < 2:
            self.broken(f"rolled back, and of a group with replicas only {sorted(gone)} are lost")

    def _is_known_by_a_trainer(self) -> bool:
        """Return whether a trainer is left that committed the newest step that was told."""
        trainers = [trainer for node in self.nodes.values() for trainer in node.trainers.values()]
        return any(trainer.alive and trainer.committed >= self.newest_told for trainer in trainers)

    def _gives_up(self) -> None:
        """State may be given up only when no trainer that counts holds some layer of the newest step.

        Those of a node one of whose trainers is dead or hangs do not count, since its agent ends them all;
        nor do those that missed the last Resume: the cluster went on without them, and whether they went
        another way behind their partition nobody can know.
        """
        counting = [
            trainer
            for node in self.nodes.values()
            if all(trainer.able for trainer in node.trainers.values())
            for trainer in node.trainers.values()
            if trainer.generation >= self.newest_resume and trainer.lineage == self.lineage
        ]
        if not self.groups.lacking(counting, self.known, [t for t in counting if t.ready == self.known]):
            self.broken("the job was given up while live trainers hold all of its state")
        if self.newest is not None:
            key = self.key_of(self.newest)
            up = {name: node for name, node in self.nodes.items() if node.up}
            there = {name for name, node in up.items() if node.arena.sound(key)}
            copied = {
                owner
                for owner, buddy in self.newest.replica_peers.items()
                if buddy in up and up[buddy].arena.copy(key, owner) is not None
            }
            if not any(lacking(group, there, copied) for group in self.newest.groups):
                self.broken(
                    f"the job was given up while {sorted(there)}, and buddies of {sorted(copied)}, hold the "
                    f"snapshot of {key.step}"
                )
        sound = [step for step, kept in self.place.kept.items() if not kept.damaged]
        if sound:
            self.broken(f"the job was given up while there are sound checkpoints of steps {sound}")

    def forgets(self, kept: dict[str, Any] | None, name: str) -> None:
        """At the broker: ``name`` is forgotten, whom the journal names no more, and who has nothing that nobody
        else has."""
        journal = assemble(kept) if kept is not None else None
        if journal is None or over(journal):
            return
        if name in named(journal):
            self.broken(f"{name} is forgotten, and the job's journal names it")
        if not self.resumed_job:
            return  # What there is is step 0, which anybody can make.
        counting = [
            trainer
            for node in self.nodes.values()
            for trainer in node.trainers.values()
            if trainer.able and trainer.generation >= self.newest_resume and trainer.lineage == self.lineage
        ]
        others = [trainer for trainer in counting if trainer.node.name != name]
        if self.groups.lacking(others, self.known) and not self.groups.lacking(counting, self.known):
            self.broken(f"{name} is forgotten, and holds what nobody else does")
