"""``ftd sim --scenario``: a scenario that is played in the simulator and judged like a real one.

State machines and planner are the production ones, with production timing; time is virtual.
"""

import traceback
from collections.abc import Mapping
from functools import partial
from typing import Any

from msgspec.structs import replace

from ftd.coordinator.coordinator import STATE_PERIOD_S
from ftd.errors import PeerError
from ftd.faults.chaos.end_condition import EndCondition
from ftd.faults.chaos.player import ScenarioResult, SimulationDetails
from ftd.faults.chaos.record import ScenarioRecord
from ftd.faults.chaos.scheduler import FaultTriggers
from ftd.faults.chaos.targets import ClusterLayout, read_layout, resolve_targets
from ftd.faults.chaos.values import AfterTime, CentralService, Fault, Scenario
from ftd.faults.chaos.verdicts import judge
from ftd.faults.sim.cluster import SimCluster
from ftd.faults.sim.host import StepTiming
from ftd.faults.sim.scenario_faults import inject_into_node, inject_into_service
from ftd.faults.sim.scenario_setup import STEP_S, ScenarioSetup
from ftd.faults.sim.world import InvariantViolation, World
from ftd.transport.wire.catalogue import severity_of
from statemachine.effects import Effect, EmitEvent, PublishNode
from statemachine.messages.values import CheckpointPolicy

SUBMIT_S = 2.0
"""Time at which the job is submitted; the nodes and their trainers are up by then."""
START_S = 60.0
"""Longest time until training begins."""
_CHECK_PERIOD_S = 0.1
_AT = "2000-01-01T00:00:00.000Z"


class ScenarioSimulation(SimCluster):
    """One scenario on one simulated cluster.

    The seed draws what no scenario says (message delays, which process is first); the same seed always
    gives the same run.
    """

    def __init__(
        self, scenario: Scenario, setting: ScenarioSetup, seed: int, *, tracing: bool = False
    ) -> None:
        self.scenario, self.setting = scenario, setting
        world = World(seed, tracing=tracing, timing=setting.timing)
        world.checks_health = True
        super().__init__(
            world,
            setting.job.policy,
            setting.profile,
            setting.coordinators,
            step_timing=StepTiming(step_s=STEP_S, imbalance=0.3, commit_spread_s=0.01),
            state_period_s=STATE_PERIOD_S,
        )
        # A step's loss is the number of updates in its state; in an undisturbed run it equals the step.
        self.record = ScenarioRecord(baseline={step: float(step) for step in range(1, setting.job.steps + 1)})
        self._cues = FaultTriggers(scenario)
        for coordinator in self.coordinators:
            coordinator.on_state, coordinator.on_event = self.on_state, self.on_event
        self.layout = ClusterLayout(pipelines=(), alive=())
        self.begun_s: float | None = None
        self.ended_by = ""
        """Reason for which observing stopped."""
        self._pending = 0
        """The number of faults that are due and not injected yet."""
        self._ending = EndCondition(scenario, self.record)
        self._serial = 0

    @property
    def now_s(self) -> float:
        """Seconds since the scenario's start."""
        return self.world.now - (self.begun_s or 0.0)

    # --- running -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the scenario.

        :raises InvariantViolation: an invariant of the simulator does not hold.
        """
        world, setting = self.world, self.setting
        for coordinator in self.coordinators:
            coordinator.start()
        for name in setting.nodes:
            self.start(name)
        job = setting.job
        if job.checkpoint.url:  # Nothing is really written.
            job = replace(job, checkpoint=replace(job.checkpoint, url="/simulated"))
        else:
            job = replace(job, checkpoint=CheckpointPolicy())
        world.call_later(SUBMIT_S, lambda: self.coordinator.submit(job, None))
        world.call_later(SUBMIT_S, self._check)
        try:
            world.run(SUBMIT_S + START_S + self.scenario.limit_s)
        finally:
            self.end()

    def start(self, name: str) -> None:
        """Start the daemon of a node, known or new.

        :raises PeerError: it is running already.
        """
        node = self.nodes.get(name)
        if node is None:
            node = self.make_node(name)
            node.on_effect, node.on_event = partial(self._on_effect, name), self.on_event
        elif node.up:
            raise PeerError(f"{name} is running already")
        self.world.call_later(self.world.between(0.0, 0.3), self.start_if_down, node)

    # --- events and states --------------------------------------------------------------------------

    def on_event(self, effect: EmitEvent) -> None:
        """Record an event as subscribers receive it. The scenario starts when the job's first step is
        committed.
        """
        details = dict(effect.details)
        if effect.name == "StepCommitted":
            details["loss"] = float(self.versions.step[int(details["loss"])])
        self._tell(replace(effect, details=details))
        if effect.name == "RecoveryCompleted" and self.begun_s is None:
            self._begin()

    def _tell(self, effect: EmitEvent) -> None:
        if self.begun_s is None:
            return
        self._serial += 1
        event = {
            "event": effect.name,
            "id": f"e-{self._serial:016x}",
            "severity": severity_of(effect.name),
            "node": effect.node,
            "generation": effect.generation,
            "step": effect.step,
            "reason": effect.reason,
            "at": _AT,
            "monotonic": self.world.now,
            "cause": f"c-{self._serial}",
            "details": effect.details,
        }
        self.record.on_event(event, self.now_s)
        self._due(self._cues.on_event(event))

    def _on_effect(self, node: str, effect: Effect) -> None:
        if isinstance(effect, PublishNode):
            self._due(self._cues.on_node(node, str(effect.state)))

    def on_state(self, state: Mapping[str, Any]) -> None:
        """Take the cluster's state, which determines the nodes of roles."""
        self.layout = read_layout(state)
        self.record.on_state(state)

    def _check(self) -> None:
        """Check every ``_CHECK_PERIOD_S`` whether the scenario is over."""
        if self.begun_s is not None:
            injecting, waiting = self._pending > 0, bool(self._cues.waiting)
            self.ended_by = self._ending.end_reason(self.now_s, injecting=injecting, waiting=waiting)
        self.world.done = bool(self.ended_by)
        self.world.call_later(_CHECK_PERIOD_S, self._check)

    # --- faults ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start the scenario's clock when training begins."""
        self.begun_s = self.world.now
        for fault in self._cues.waiting:
            if isinstance(fault.trigger, AfterTime):
                self.world.call_later(fault.trigger.delay_s, self._on_time, fault.trigger.delay_s)

    def _on_time(self, elapsed_s: float) -> None:
        self._due(self._cues.on_time(elapsed_s))

    def _due(self, faults: list[Fault]) -> None:
        for fault in faults:
            self._pending += 1
            self.world.call_later(fault.delay_s, self._inject, fault)

    def _inject(self, fault: Fault) -> None:
        self._pending -= 1
        if self.world.tracing:
            self.world.note("FAULT", fault)
        injected = self.record.on_injected(fault, self.now_s)
        injected.over_at_s = self.now_s + fault.duration_s
        try:
            injected.nodes = self._carry_out(fault)
        except PeerError as error:
            injected.problem = str(error)
            return
        if fault.do != "start":
            node = injected.nodes[0] if len(injected.nodes) == 1 else None
            details = {"fault": fault.do, "at": self.world.now, "target": str(fault.target)}
            self._tell(
                EmitEvent(
                    cause="", name="ChaosInjected", reason=str(fault.trigger), node=node, details=details
                )
            )
        self._due(self._cues.on_injected(fault))

    def _carry_out(self, fault: Fault) -> tuple[str, ...]:
        """Inject a fault now, and return the targeted nodes.

        :raises PeerError: no node has the targeted role, or the fault is not possible at the moment.
        """
        if isinstance(fault.target, CentralService):
            inject_into_service(self, fault, fault.target.service)
            return ()
        names = resolve_targets(fault, self.layout, self.scenario.seed)
        for name in names:
            if fault.do == "start":
                self.start(name)
            else:
                inject_into_node(self, fault, name)
        return names


def play_simulated(
    scenario: Scenario,
    setting: ScenarioSetup,
    seed: int,
    *,
    skipped: tuple[tuple[str, str], ...] = (),
    tracing: bool = False,
) -> tuple[ScenarioResult, tuple[str, ...]]:
    """Play a scenario once, and return its result and the trace.

    :param skipped: id and reason of each fault of the file that was left out of ``scenario``, for reports.
    """
    world = ScenarioSimulation(scenario, setting, seed, tracing=tracing)
    problems: list[str] = []
    try:
        world.run()
    except InvariantViolation as error:
        problems.append(f"an invariant was violated {error}")
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        problems.append(f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})")
    if world.begun_s is None and not problems:
        state = world.coordinator.machine.public_state()
        problems.append(
            f"training did not begin: {state['outcome'] or state['waiting_for'] or state['phase']}"
        )
    played = ScenarioResult(
        scenario=scenario,
        verdicts=judge(scenario, world.record),
        record=world.record,
        took_s=world.now_s,
        ended_by=problems[0] if problems else world.ended_by,
        simulated=SimulationDetails(seed=seed, skipped=skipped, problems=tuple(problems)),
    )
    return played, tuple(world.world.lines)
