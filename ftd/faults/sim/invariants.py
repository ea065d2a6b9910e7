"""What must hold after every event, whatever happens to the processes and the network."""

from collections.abc import Callable
from typing import Any

from ftd.faults.sim import bugs, losses
from ftd.faults.sim.evaluations import EvaluationTruth
from ftd.faults.sim.group import Group
from ftd.faults.sim.kept import SnapshotTruth
from ftd.faults.sim.place import SimPlace
from ftd.faults.sim.telling import Telling
from ftd.faults.sim.trainers import SimTrainer
from ftd.faults.sim.versions import Versions, vote_of
from ftd.faults.sim.world import World
from ftd.transport.wire.checking import problem_of_details
from ftd.transport.wire.public import encode_json
from planner.changes.parts import incomplete
from planner.values import ModelProfile, Plan, Policy
from statemachine.cluster.machine import ClusterMachine
from statemachine.effects import EmitEvent, RecordSteps
from statemachine.election.leadership import Leader
from statemachine.messages.cluster import Command, KeepSnapshot, Resume, ToNodes
from statemachine.messages.common import Quiesce
from statemachine.messages.values import Checkpoint, Job, Vote

_OF_A_VOTE = ("gradient_norm", "skipped", "weight", "loss_scale", "learning_rate", "metrics")


class Invariants(SnapshotTruth):
    """The world's truth, gathered where it happens; each method checks what has just become true."""

    def __init__(self, world: World, versions: Versions, policy: Policy, profile: ModelProfile) -> None:
        super().__init__(world, versions)
        self.policy, self.profile = policy, profile
        self.layers = len(profile.layers)
        self.nodes: dict[str, Any] = {}
        self.coordinators: list[Any] = []
        self.place = SimPlace(invariants=self)
        self.groups: dict[int, Group] = {}
        self.newest_told = 0
        self.known = 0
        """The newest committed step that the coordinator ever knew of, for the present job."""
        self.newest_resume = 0
        self.on_commit: Callable[[], None] = lambda: None
        """Called when a rank commits: a moment at which faults like to come."""
        self.on_failure: Callable[[str], None] = lambda reason: None
        self.announced: set[int] = set()
        """Generations that an event said have started."""
        self.out: dict[str, set[int]] = {}
        """Incarnations per node that obeyed a Fence."""
        self.telling = Telling(self)
        self.evaluations = EvaluationTruth(self)
        self.reigned: dict[int, tuple[int, float]] = {}
        """Incarnation of who led first in each term, and since when."""
        self.told_after: dict[int, int] = {}
        """So many losses of the newest journal each step was told."""
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
        self.trained: Group | None = None
        """The last group that passed a VOTE, since when everybody in it has what it is to keep."""

    def new_job(self, begin: Checkpoint | None, job: Job | None) -> None:
        """:param begin: what it goes on from."""
        self.evaluations.new_job(begin.step if begin is not None else 0, job.steps if job is not None else 0)
        self.told = {begin.step: int(begin.vote.loss)} if begin is not None else {}
        self.told_after.clear()
        self.newest_told = self.known = begin.step if begin is not None else 0
        self.next_to_tell = self.known + 1
        self.finished_job, self.failed_job = False, None
        self.resumed_job = False
        self.lineage, self.newest, self.trained = 0, None, None

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

    def persisted(self, machine: losses.Written) -> None:
        """What the journal says now; a rollback is in it, or never was."""
        if machine.job_id != self.job_id:
            self.job_id = machine.job_id
            self.new_job(machine.checkpoint, machine.job)
        self._keeps(machine)
        self.place.writing = machine.writing
        if machine.lineage == self.lineage:
            return
        losses.rolls_back(self, machine)
        self.lineage, self.trained = machine.lineage, None
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
        if isinstance(command, KeepSnapshot):
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
        if not self.unforced or not losses.forgotten(self):
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
            case "CheckpointGivenUp":
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
        self._same_vote({name: event.details[name] for name in _OF_A_VOTE}, version)
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
            self._same_vote({name: event.details[name] for name in _OF_A_VOTE}, version)
            if self.told.get(step, version) != version:
                self.broken(
                    f"step {step} was told with version {self.told[step]} and is recalled as {version}"
                )

    def resumes_from(self, vote: Vote | None) -> None:
        """A trainer takes the state of a step over from others: with it, all that the step's vote says."""
        if vote is not None:
            self._same_vote({name: getattr(vote, name) for name in _OF_A_VOTE}, int(vote.loss))

    def _same_vote(self, said: dict[str, Any], version: int) -> None:
        vote = vote_of(version)
        for name, value in said.items():
            if value != getattr(vote, name):
                self.broken(
                    f"{name} of version {version} is {value}, and the vote said {getattr(vote, name)}"
                )

    def _may_fail(self) -> None:
        if self.resumed_job and not bugs.explains(self, self.failed_job or ""):
            losses.gives_up(self)  # Otherwise nobody could build it.

    # --- nodes ----------------------------------------------------------------------------------

    def fenced(self, name: str, incarnation: int) -> None:
        self.out.setdefault(name, set()).add(incarnation)

    def heard(self, name: str, incarnation: int, message: ToNodes, *, taken: bool) -> None:
        """What is for several nodes is taken by those that are meant, as they are now."""
        if taken != (message.receivers.get(name) == incarnation):
            self.broken(f"{name} {'takes' if taken else 'misses'} a command: {message}")

    def signals(self, name: str, incarnation: int) -> None:
        if incarnation in self.out.get(name, ()):
            self.broken(f"{name} speaks under incarnation {incarnation} after it was fenced")

    # --- trainers ---------------------------------------------------------------------------------

    def resumes(self, trainer: SimTrainer, resume: Resume) -> None:
        """A trainer that obeys a Resume never loses a step that it committed."""
        if trainer.committed > resume.step and trainer.lineage == resume.lineage:
            self.broken(
                f"{trainer.node.name}/{trainer.device} committed step {trainer.committed} and is told to "
                f"resume at {resume.step}"
            )

    def group(self, world: World, resume: Resume, trainer: SimTrainer) -> Group:
        """The one group of this generation."""
        group = self.groups.get(resume.generation)
        if group is None:
            group = self.groups[resume.generation] = Group(world, resume, self)
        elif group.resume.plan != resume.plan or group.resume.step != resume.step:
            self.broken(f"generation {resume.generation} has two plans")
        elif group.resume.evaluated != resume.evaluated:
            self.broken(f"ranks of generation {resume.generation} do not agree what is evaluated")
        return group

    def forms(self, group: Group) -> None:
        """All members are at the same generation and step, and what they hold is the same state."""
        step = group.resume.step
        versions = set()
        for rank, member in group.members.items():
            if member.generation != group.generation or member.committed != step:
                self.broken(
                    f"rank {rank} meets generation {group.generation} at step {step} with generation "
                    f"{member.generation} and step {member.committed}"
                )
            of_member = (*member.layers.values(), *member.parts.values())
            versions |= {v for v in of_member if self.versions.step[v] == step}
        if len(versions) > 1:
            self.broken(f"generation {group.generation} starts from different states of step {step}")
        lacking = losses.lacking(self, group.members.values(), step)
        if lacking:
            self.broken(f"generation {group.generation} starts without all of layers {sorted(lacking)}")
        told = self.told.get(step)
        if group.resume.lineage < self.lineage:
            return  # An order from before a rollback, to nodes that the cluster went on without.
        if told is not None and versions and told not in versions:
            self.broken(f"generation {group.generation} starts from another step {step} than was told")

    def moves(self, group: Group, layer: int, source: SimTrainer) -> None:
        version = source.layers.get(layer)
        if version is None or self.versions.step[version] != group.resume.step:
            self.broken(
                f"{source.node.name}/{source.device} is to send layer {layer} of step {group.resume.step} "
                f"and does not hold it"
            )

    def moves_parts(self, group: Group, layer: int, sources: list[SimTrainer]) -> int:
        """The senders have all of the layer among them, of one version, which this is."""
        step, found = group.resume.step, [s.parts.items() for s in sources]
        now = [[p for p, v in of if p.layer == layer and self.versions.step[v] == step] for of in found]
        if layer in incomplete(now, self.layers):
            names = [f"{source.node.name}/{source.device}" for source in sources]
            self.broken(f"{names} are to send all of layer {layer} of step {step} and do not have it")
        versions = {v for of in found for p, v in of if p.layer == layer and self.versions.step[v] == step}
        if len(versions) > 1:
            self.broken(f"layer {layer} of step {step} is put together from different states")
        return versions.pop()

    def trains(self, group: Group) -> None:
        """Everybody is at the first VOTE of a group."""
        self.trained = group

    def starts(self, group: Group, member: SimTrainer) -> None:
        """A rank that begins to compute holds every layer it owns at the resume step."""
        for part in group.kept[member.rank]:
            version = member.parts.get(part)
            if version is None or self.versions.step[version] != group.resume.step:
                self.broken(f"rank {member.rank} starts without {part} of step {group.resume.step}")
        for layer in group.owned[member.rank]:
            version = member.layers.get(layer)
            if version is None or self.versions.step[version] != group.resume.step:
                self.broken(f"rank {member.rank} starts without layer {layer} of step {group.resume.step}")
        if member.layers:
            member.version = member.layers[min(group.owned[member.rank])]

    def commits(self, trainer: SimTrainer, group: Group) -> None:
        self.on_commit()
        self._commits(trainer, group)

    def _commits(self, trainer: SimTrainer, group: Group) -> None:
        """A step that the world was told of is never committed differently.

        A whole group behind a partition may go on for a while after the cluster gave it up; nobody hears
        of what it commits, and ``forms`` sees to it that none of it comes back.
        """
        told = self.told.get(trainer.committed) if group.generation == self.newest_resume else None
        if told is not None and told != trainer.version:
            self.broken(
                f"step {trainer.committed} was committed again by generation {group.generation}, differently"
            )
        if set(trainer.parts) != set(group.kept[trainer.rank]):
            self.broken(f"rank {trainer.rank} committed without all that it keeps")
        if not group.sharded:
            self.gathered(trainer, group)

    def gathered(self, trainer: SimTrainer, group: Group) -> None:
        if set(trainer.layers) != set(group.owned[trainer.rank]):
            self.broken(f"rank {trainer.rank} committed without all of its layers")
