"""The run of one seed: it draws a cluster and its faults, lets them happen, heals them, and requires that the
job finishes.
"""

import traceback
from dataclasses import dataclass

from ftd.faults.sim import drawing, upgrade_faults
from ftd.faults.sim.removed_nodes import RemovedNodesCheck
from ftd.faults.sim.simulation import SeedOverrides, Simulation
from ftd.faults.sim.world import InvariantViolation
from ftd.garbage import rare_collections
from statemachine.cluster.quarantine import HEALTH_CAUSES, WRONG_RESULTS
from statemachine.messages.values import Job

CHAOS_S = 16.0
"""Faults begin within this time; they last until they end by themselves or are healed."""
HEAL_S = 24.0
PATIENCE_S = 165.0
"""Time after the healing within which the job must finish. If its state is lost, it fails ``lost_state_s``
after the last node came back, and the next job takes as long again.
"""

_READMIT_S = 5.0
"""Time between two looks of a user at the nodes that are set aside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedResult:
    seed: int
    violation: str | None
    """The violated invariant, or ``None``."""
    events: int
    virtual_s: float
    trace: tuple[str, ...]
    faults: tuple[str, ...]


class SimulationRun(Simulation):
    """A simulation run from start to end: a user submits jobs, faults are injected, and all of them heal."""

    def start(self) -> None:
        world = self.world
        for coordinator in self.coordinators:
            coordinator.start()
        for _ in range(world.rng.randint(*self.shape.nodes)):
            self.add_node()
        world.call_later(world.between(0.1, 1.0), self.submit)
        drawing.draw(self, CHAOS_S)
        RemovedNodesCheck(self)
        world.call_later(HEAL_S, self.heal)

    def submit(self) -> None:
        """Submit the job as a user, and try again later if nobody can take it."""
        open_here = self.coordinator.leading and self.coordinator.reaches_broker
        if not open_here or (
            self.checkpoint.url and (self.checkpoint_store.unavailable or self.checkpoint_store.hangs_for_s)
        ):
            self.world.call_later(0.7, self.submit)
            return
        self.jobs += 1
        steps = self.world.rng.randrange(12, 30)
        if self.invariants.failed_job is not None:
            self.checkpoint_store.remove_corrupt()
        begin = self.checkpoint_store.newest() if self.checkpoint.url else None
        steps += begin.step if begin is not None else 0
        self.job = Job(
            job_id=f"job-{self.jobs}",
            name="job",
            steps=steps,
            policy=self.policy,
            snapshot=self.snapshot,
            checkpoint=self.checkpoint,
            updates=self.updates,
            training={
                "function": "simulated:train",
                "path": "/simulated",
                "steps": steps,
                "global_batch": self.policy.global_batch,
                "microbatch_rows": self.policy.microbatch_rows,
                "zero1": self.policy.zero1,
                "evaluation_every_steps": self.invariants.evaluations.every_steps,
                "compare_replicas_every": self.compare_replicas_every,
            },
            compare_replicas_every=self.compare_replicas_every,
        )
        self.coordinator.submit(self.job, begin)
        self.world.call_later(1.0, self.check_job, self.job)

    def check_job(self, job: Job) -> None:
        """Check whether the job is over. A user whose job ended before the healing submits another one."""
        machine = self.coordinator.machine
        state = str(machine.phase)
        if not self.coordinator.leading or state not in ("FINISHED", "FAILED", "WAITING"):
            pass
        elif self.job_is_unknown(job):
            self.submit()
            return
        elif state == "FINISHED" and self.healed and not self.missing_nodes():
            self.world.done = True
            return
        elif state == "FINISHED" and self.healed:
            pass  # The run waits for them.
        elif state in ("FINISHED", "FAILED"):
            if self.healed or self.world.chance(0.5):
                self.submit()
                return
            self.world.done = state == "FINISHED" and self.world.chance(0.5)
        self.world.call_later(1.0, self.check_job, job)

    def missing_nodes(self) -> list[str]:
        """Return the running nodes that do not belong to the cluster."""
        listed = self.coordinator.machine.public_state()["nodes"]
        there = {name for name, node in listed.items() if node["state"] != "OFFLINE"}
        return [node.name for node in self.nodes.values() if node.up and node.name not in there]

    def job_is_unknown(self, job: Job) -> bool:
        """Return whether the coordinator was killed before it journaled the job, so that the user gets no
        answer and asks again.
        """
        known = self.coordinator.machine.public_state()["job"]
        return known is None or known["id"] != job.job_id

    def heal(self) -> None:
        """End all faults. From here on nothing goes wrong any more."""
        self.healed = True
        self.log("healed")
        for coordinator in self.coordinators:
            coordinator.crash_after = None
            coordinator.max_planning_s = coordinator.disk.full_until = 0.0
        self.network.duplicate_probability = self.network.slow_probability = 0.0
        self.network.partitioned_pairs.clear()
        self.network.start_broker()
        self.checkpoint_store.reopen()
        for name in list(self.network.links):
            self.network.heal(name)
        upgrade_faults.finish(self)
        for coordinator in self.coordinators:
            coordinator.loop.thaw()
            coordinator.restart()
        for node in self.nodes.values():
            node.clear_faults()
            self.start_if_down(node)
            for trainer in list(node.trainers.values()):
                if trainer.frozen or trainer.asleep:
                    node.fail_trainer(trainer.device, "exited")
        # Nodes that were drained or asked to leave also return in the end.
        self.world.call_later(25.0, self._restart_drained)
        self.world.call_later(25.0, self._readmit_repaired)
        if self.snapshot.every_steps:
            self.world.call_later(25.0, self._resume_snapshots)

    def _resume_snapshots(self) -> None:
        """Switch snapshots on again, if a request switched them off: a job whose loss spikes goes back further each
        time.
        """
        job = self.coordinator.machine.job
        if job is not None and job.snapshot.paused:
            self.coordinator.request_snapshots(every_steps=self.snapshot.every_steps)

    def _restart_drained(self) -> None:
        for name, state in self.coordinator.machine.public_state()["nodes"].items():
            if state["draining"]:
                self.nodes[name].crash()
                self.world.call_later(0.5, self.start_if_down, self.nodes[name])
        for node in self.nodes.values():
            self.world.call_later(1.0, self.start_if_down, node)

    def _readmit_repaired(self) -> None:
        """Readmit the nodes that were set aside for wrong or slow results, as a user does who has repaired their
        devices.
        """
        for name, state in self.coordinator.machine.public_state()["nodes"].items():
            aside = state["quarantine"]
            if aside is not None and aside["cause"] in HEALTH_CAUSES | WRONG_RESULTS:
                self.coordinator.readmit(name)
        self.world.call_later(_READMIT_S, self._readmit_repaired)

    def run_to_end(self) -> None:
        """Run to the end.

        :raises InvariantViolation: an invariant does not hold, or the job was not done in time after the
            healing.
        """
        self.start()
        try:
            self.world.run(HEAL_S + PATIENCE_S)
            if self.invariants.skipped_batches and not self.world.done:
                self.world.run(
                    HEAL_S + 2 * PATIENCE_S
                )  # Each spike of the loss makes the job redo many steps.
            if self.world.done and self.healed:
                for node in self.nodes.values():
                    self.broker_checks.check_state(node)
        finally:
            leader = self.coordinator
            self.end()
        if not self.world.done:
            state = leader.machine.public_state()
            raise InvariantViolation(
                f"no progress after the healing: {state['phase']} at step {state['step']}, "
                f"generation {state['generation']}, waiting for {state['waiting_for'] or 'nothing'}, "
                f"without {self.missing_nodes() or 'nobody'}"
            )
        self.invariants.published_events.check_complete()


def run_seed(seed: int, *, tracing: bool = False, overrides: SeedOverrides | None = None) -> SeedResult:
    """Run one seed to its end."""
    simulation = SimulationRun(seed, tracing=tracing, overrides=overrides)
    violation: str | None = None
    try:
        with rare_collections():
            simulation.run_to_end()
    except InvariantViolation as error:
        violation = str(error)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        violation = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
    world = simulation.world
    return SeedResult(
        seed=seed,
        violation=violation,
        events=world.events,
        virtual_s=world.now,
        trace=tuple(world.lines),
        faults=tuple(simulation.faults),
    )
