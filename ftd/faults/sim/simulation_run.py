"""One seed: draw a cluster and its faults, let them happen, heal, and require that the job is done."""

import traceback
from dataclasses import dataclass

from ftd.faults.sim import drawing, upgrade_faults
from ftd.faults.sim.removed_nodes import RemovedNodesCheck
from ftd.faults.sim.simulation import SeedOverrides, Simulation
from ftd.faults.sim.world import InvariantViolation
from statemachine.messages.values import Job

CHAOS_S = 16.0
"""Faults begin in this time; each lasts as long as it lasts, until the healing."""
HEAL_S = 24.0
PATIENCE_S = 150.0
"""After the healing the job must be done within this time. One whose state is lost is given up
``lost_state_s`` after the last node came back, and the next one takes as long again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedResult:
    seed: int
    violation: str | None
    """What broke, or ``None``."""
    events: int
    virtual_s: float
    trace: tuple[str, ...]
    faults: tuple[str, ...]

    @property
    def replay(self) -> str:
        """The one line that shows this run again."""
        return f"ftd sim --seed {self.seed} --trace"


class SimulationRun(Simulation):
    """A simulation from its beginning to its end: a user submits jobs, faults strike, and all of them heal."""

    def begin(self) -> None:
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
        """The user submits the job, and again when there was nobody to take it."""
        open_here = self.coordinator.leading and self.coordinator.heard
        if not open_here or (self.checkpoint.url and (self.place.closed or self.place.hangs_s)):
            self.world.call_later(0.7, self.submit)
            return
        self.jobs += 1
        steps = self.world.rng.randrange(12, 30)
        if self.invariants.failed_job is not None:
            self.place.remove_damaged()
        begin = self.place.newest() if self.checkpoint.url else None
        self.job = Job(
            job_id=f"job-{self.jobs}",
            name="job",
            steps=steps + (begin.step if begin is not None else 0),
            policy=self.policy,
            snapshot=self.snapshot,
            checkpoint=self.checkpoint,
            training={"evaluation_every_steps": self.invariants.evaluations.every_steps},
        )
        self.coordinator.submit(self.job, begin)
        self.world.call_later(1.0, self.look, self.job)

    def look(self, job: Job) -> None:
        """Is the job over? A user whose job ended before the healing submits another."""
        machine = self.coordinator.machine
        state = str(machine.phase)
        if not self.coordinator.leading or state not in ("FINISHED", "FAILED", "WAITING"):
            pass
        elif self.job_is_unknown(job):
            self.submit()
            return
        elif state == "FINISHED" and self.healed and not self.left_out():
            self.world.done = True
            return
        elif state == "FINISHED" and self.healed:
            pass  # They are waited for.
        elif state in ("FINISHED", "FAILED"):
            if self.healed or self.world.chance(0.5):
                self.submit()
                return
            self.world.done = state == "FINISHED" and self.world.chance(0.5)
        self.world.call_later(1.0, self.look, job)

    def left_out(self) -> list[str]:
        """Nodes that are there and do not belong to the cluster."""
        listed = self.coordinator.machine.public_state()["nodes"]
        there = {name for name, node in listed.items() if node["state"] != "OFFLINE"}
        return [node.name for node in self.nodes.values() if node.up and node.name not in there]

    def job_is_unknown(self, job: Job) -> bool:
        """The coordinator was killed before it journaled the job: the user has no answer and asks again."""
        known = self.coordinator.machine.public_state()["job"]
        return known is None or known["id"] != job.job_id

    def heal(self) -> None:
        """From here on nothing goes wrong any more."""
        self.healed = True
        self.log("healed")
        for coordinator in self.coordinators:
            coordinator.crash_after = None
            coordinator.thinks_s = coordinator.disk.full_until = 0.0
        self.network.duplicates = self.network.slow = 0.0
        self.network.lines.clear()
        self.network.apart.clear()
        self.network.start_broker()
        self.place.opens()
        for name in list(self.network.links):
            self.network.heal(name)
        upgrade_faults.finish(self)
        for coordinator in self.coordinators:
            coordinator.thaw()
            coordinator.restart()
        for node in self.nodes.values():
            node.eased()
            self.revive(node)
            for trainer in list(node.trainers.values()):
                if trainer.frozen or trainer.asleep:
                    node.fail_trainer(trainer.device, "exited")
        # Nodes that were drained or asked to leave, too, come back to work in the end.
        self.world.call_later(25.0, self._replace_drained)

    def _replace_drained(self) -> None:
        for name, state in self.coordinator.machine.public_state()["nodes"].items():
            if state["draining"]:
                self.nodes[name].crash()
                self.world.call_later(0.5, self.revive, self.nodes[name])
        for node in self.nodes.values():
            self.world.call_later(1.0, self.revive, node)

    def finish(self) -> None:
        """:raises Violation: an invariant broke, or the job was not done in time after the healing."""
        self.begin()
        try:
            self.world.run(HEAL_S + PATIENCE_S)
        finally:
            leader = self.coordinator
            for coordinator in self.coordinators:
                coordinator.loop.kill()
        if not self.world.done:
            state = leader.machine.public_state()
            raise InvariantViolation(
                f"no progress after the healing: {state['phase']} at step {state['step']}, "
                f"generation {state['generation']}, waiting for {state['waiting_for'] or 'nothing'}, "
                f"without {self.left_out() or 'nobody'}"
            )
        self.invariants.telling.complete()


def run_seed(seed: int, *, tracing: bool = False, overrides: SeedOverrides | None = None) -> SeedResult:
    """Run one seed to its end."""
    simulation = SimulationRun(seed, tracing=tracing, leaning=overrides)
    violation: str | None = None
    try:
        simulation.finish()
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
