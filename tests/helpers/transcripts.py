"""Script that drives a machine by hand and records its events and effects as a transcript that people can
read.

The transcripts are in ``golden/`` and are compared word for word; ``FTD_REWRITE_GOLDEN=1`` rewrites them
(then read the difference).
"""

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from ftd.coordinator.plan_answer import answer_question
from planner.planner import Planner
from planner.values import Device, LayerProfile, ModelProfile, Plan, Policy
from statemachine.agent.events import TrainerReported
from statemachine.agent.machine import AgentMachine
from statemachine.cluster.machine import ClusterMachine
from statemachine.effects import (
    BroadcastCommand,
    CancelTimer,
    CheckDrain,
    ComputePlan,
    Effect,
    EmitEvent,
    InstructTrainer,
    PersistState,
    PublishCluster,
    SendCommand,
    SetTimer,
)
from statemachine.election.machine import ElectionMachine
from statemachine.events import (
    BrokerConnected,
    DrainChecked,
    PlanReady,
    SignalArrived,
    SubmitRequested,
    TemplatesReady,
    TimerFired,
)
from statemachine.messages import trainer
from statemachine.messages.cluster import (
    Acknowledgement,
    FromNode,
    Heartbeat,
    Hello,
    Quiesced,
    Signal,
    Stepped,
    ToNode,
    TrainerLost,
)
from statemachine.messages.common import Prepared, Resumed
from statemachine.messages.values import (
    RECOVERY_PHASES,
    CommittedStep,
    DeviceHealth,
    DeviceReport,
    HealthReport,
    Job,
    NodeActivity,
    NodeFacts,
    ProtectionRequest,
    SnapshotPolicy,
    TrainerState,
    UpdatePolicy,
    Vote,
)
from statemachine.timing import Timing

GOLDEN = Path(__file__).parents[1] / "statemachine" / "golden"
LAYERS = 4
HIDDEN = {"at", "cause", "facts", "training", "policy", "bubble_s", "acknowledgement"}
PLAIN = {
    "lineage", "retained_step", "corrupt_step", "protection", "snapshots", "failed", "lost_layers", "tier",
    "replica_peer", "replica_peers", "owner", "copied", "held_parts", "evaluation", "evaluated", "building",
    "in_memory", "outcome", "when_possible", "cancel", "skipped_batches", "repairs", "health",
}  # fmt: skip
"""Fields that are shown only if they differ from their default."""
QUIET = {"PublishCluster", "PersistState", "PublishNode"}

PROFILE = ModelProfile(
    layers=tuple(
        LayerProfile(
            forward_ms=10.0,
            backward_ms=20.0,
            parameter_bytes=2000,
            gradient_bytes=2000,
            optimizer_bytes=4000,
            activation_bytes=1000,
            output_bytes=500,
        )
        for _ in range(LAYERS)
    ),
    microbatch_rows=2,
)
POLICY = Policy(global_batch=24, microbatch_rows=2, tolerate=1, device_memory_bytes=30_000)
"""Policy under which two nodes hold one replica."""


def job(
    job_id: str = "job-1",
    steps: int = 10,
    policy: Policy = POLICY,
    snapshot: SnapshotPolicy = SnapshotPolicy(),  # noqa: B008
    updates: UpdatePolicy = UpdatePolicy(),  # noqa: B008
) -> Job:
    return Job(job_id=job_id, name="tiny", steps=steps, policy=policy, snapshot=snapshot, updates=updates)


def facts(devices: int = 1, host: str = "10.0.0.1") -> NodeFacts:
    return NodeFacts(devices=devices, host=host, rendezvous_port=7000)


def health_report(number: int, compute_gflops: float = 100.0, **found: Any) -> HealthReport:
    """Return the result of a health check of a node with one device."""
    device = DeviceHealth(device=0, kind="H100", compute_gflops=compute_gflops, **found)
    return HealthReport(number=number, devices=(device,))


def vote(step: int) -> Vote:
    return Vote(loss=1 / step, gradient_norm=1.0)


def committed(step: int) -> CommittedStep:
    return CommittedStep(step=step, vote=vote(step))


def report(
    step: int = 0, *, ready: bool = False, held: tuple[int, ...] | None = None, lineage: int = 0
) -> DeviceReport:
    return DeviceReport(
        device=0,
        committed_step=step,
        ready_step=step + 1 if ready else None,
        vote=vote(step) if step else None,
        held=tuple(range(LAYERS)) if held is None else held,
        lineage=lineage,
    )


def short(value: Any) -> str:
    match value:
        case Job():
            return value.job_id
        case ModelProfile():
            return "measured"
        case Plan():
            return f"{value.method}[{'; '.join(_pipeline(p) for p in value.pipelines)}]" + (
                f" moving {len(value.transfers)}" if value.transfers else ""
            )
        case Device():
            return f"{value.node}/{value.index}"
        case Vote():
            return f"{value.loss:.3g}"
        case ProtectionRequest():
            return value.scheme or "auto"
        case CommittedStep():
            return f"{value.step}:{value.vote.loss:.3g}"
        case DeviceReport():
            ready = f" ready {value.ready_step}" if value.ready_step is not None else ""
            return f"<{value.device} at {value.committed_step}{ready} holds {short(value.held)}>"
        case HealthReport():
            found = [one.wrong or one.failed or f"{one.compute_gflops:g} GFLOP/s" for one in value.devices]
            return f"<{value.number}: {', '.join(found)}>"
        case EmitEvent():
            return _event(value)
        case FromNode():
            return f"{value.node} says {short(value.signal)}"
        case TrainerReported():
            return _report(value)
        case InstructTrainer():
            inner = short(value.instruction).replace("(", f"(device={value.device}, ", 1)
            return f"Trainer{inner}"
        case Enum():
            return str(value.value)
        case dict():
            return "{" + ", ".join(f"{short(k)}: {short(v)}" for k, v in value.items()) + "}"
        case frozenset():
            return short(tuple(sorted(value)))
        case tuple() | list():
            if value and all(isinstance(v, int) for v in value):
                return ",".join(str(v) for v in value)
            return "(" + " ".join(short(v) for v in value) + ")"
        case float():
            return f"{value:g}"
        case _ if isinstance(value, msgspec.Struct) or dataclasses.is_dataclass(value):
            inner = ", ".join(
                f"{f.name}={short(getattr(value, f.name))}"
                for f in _fields(value)
                if getattr(value, f.name) is not None
                and not (f.name in PLAIN and getattr(value, f.name) in (f.default, {}))
                and (f.name not in HIDDEN or (f.name == "cause" and isinstance(value, TrainerLost)))
            )
            return f"{type(value).__name__}({inner})"
        case _:
            return str(value)


def _report(event: TrainerReported) -> str:
    match event.report:
        case trainer.TrainerQuiesced(generation=generation) as state:
            fields = {name: getattr(state, name) for name in TrainerState.__struct_fields__}
            state_of = DeviceReport(device=event.device, **fields)
            return f"TrainerQuiesced(generation={generation}, report={short(state_of)})"
        case report:
            return f"Trainer{short(report).replace('(', f'(device={event.device}, ', 1)}"


def _fields(value: Any) -> Iterable[Any]:
    return msgspec.structs.fields(value) if isinstance(value, msgspec.Struct) else dataclasses.fields(value)


def _event(event: EmitEvent) -> str:
    """Return an event without the planner's words, which tests of the planner cover."""
    match event.name:
        case "PlanChosen":
            return f"EVENT PlanChosen: {event.details['method']}"
        case "RecoveryCompleted":
            recovery = event.details["recovery"]
            shown = ("cause", "nodes", *RECOVERY_PHASES.values(), "total_ms", "recomputed_steps")
            return f"EVENT RecoveryCompleted: {', '.join(f'{k} {short(recovery[k])}' for k in shown)}"
        case _:
            return f"EVENT {event.name} (generation {event.generation}, step {event.step}): {event.reason}"


def _pipeline(pipeline: Any) -> str:
    stages = " ".join(
        f"{s.first_layer}-{s.end_layer - 1}@{'+'.join(short(d) for d in s.devices)}" for s in pipeline.stages
    )
    return f"{stages} x{pipeline.microbatches}"


class Script:
    """Script that feeds one machine and records the transcript."""

    def __init__(self, machine: ClusterMachine | AgentMachine | ElectionMachine) -> None:
        self.machine: Any = machine
        self.now = 0.0
        self.lines: list[str] = []
        self.last: list[Effect] = []
        self.due: dict[str, float] = {}
        """Time at which each timer of the machine is due."""

    def failure(self, row: str, *description: str) -> None:
        """Begin the transcript of a row of the failure table in ARCHITECTURE.md with its heading.

        :param row: first cell of the row.
        """
        self.lines = [f"# Failure: {row}", *(f"# {line}" for line in description)]

    def write(self, line: str) -> None:
        """Append a line; the lines of a traceback in it become one."""
        self.lines.append(
            " | ".join(part.strip() if number else part for number, part in enumerate(line.split("\n")))
        )

    def note(self, text: str) -> None:
        self.lines.append(f"\n# {text}")

    def feed(self, kind: Any, **values: Any) -> list[Effect]:
        event = kind(at=self.now, cause="test", **values)
        if isinstance(event, TimerFired):
            self.due.pop(event.name, None)
        self.write(f"> {self.now:g} {short(event)}")
        return self.took(self.machine.step(event))

    def feed_quietly(self, kind: Any, **values: Any) -> None:
        """Feed an event, and record it only if it has effects that are recorded."""
        before = len(self.lines)
        self.feed(kind, **values)
        if len(self.lines) == before + 1:
            self.lines.pop()

    def took(self, effects: list[Effect]) -> list[Effect]:
        self.last = effects
        for effect in effects:
            if isinstance(effect, SetTimer):
                self.due[effect.name] = round(self.now + effect.delay_s, 6)
            elif isinstance(effect, CancelTimer):
                self.due.pop(effect.name, None)
            if type(effect).__name__ in QUIET or (isinstance(effect, SetTimer) and effect.cause == "clock"):
                continue
            self.write(f"    {short(effect)}")
        return effects

    def wait(self, seconds: float) -> None:
        self.now = round(self.now + seconds, 6)

    def fire(self, name: str, after_s: float = 0.0) -> list[Effect]:
        self.wait(after_s)
        return self.feed(TimerFired, name=name)

    def pass_time(self, seconds: float) -> None:
        """Fire every timer that is due in this time, at its time."""
        end = round(self.now + seconds, 6)
        while (at := min(self.due.values(), default=math.inf)) <= end:
            self.now = max(self.now, at)
            self.feed_quietly(TimerFired, name=min(self.due, key=lambda name: self.due[name]))
        self.now = end

    def all(self, kind: type[Any]) -> list[Any]:
        return [effect for effect in self.last if isinstance(effect, kind)]

    def commands(self, kind: type[Any] = object) -> list[ToNode]:
        """Return the commands of this kind among the last effects, as each receiver gets them."""
        found: list[ToNode] = []
        for effect in self.last:
            match effect:
                case SendCommand():
                    found.append(effect.message)
                case BroadcastCommand(receivers=receivers, command=command, cause=cause):
                    found += [
                        ToNode(node=node, incarnation=incarnation, command=command, cause=cause)
                        for node, incarnation in receivers.items()
                    ]
                case _:
                    pass
        return [to_one for to_one in found if isinstance(to_one.command, kind)]

    def one(self, kind: type[Any]) -> Any:
        found = self.all(kind)
        assert len(found) == 1, f"{len(found)} {kind.__name__} in {[short(e) for e in self.last]}"
        return found[0]

    def compare(self, name: str) -> None:
        """Compare the transcript with ``golden/name.txt``."""
        text = "\n".join(self.lines).strip() + "\n"
        path = GOLDEN / f"{name}.txt"
        if os.environ.get("FTD_REWRITE_GOLDEN") == "1":
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")


class Coordination(Script):
    """Script of a cluster machine with hand-fed nodes and the real planner."""

    def __init__(self, machine: ClusterMachine | None = None) -> None:
        super().__init__(machine if machine is not None else ClusterMachine(Timing()))
        self.incarnations: dict[str, int] = {}
        self.planner = Planner(PROFILE, POLICY)

    def feed(self, kind: Any, **values: Any) -> list[Effect]:
        """Feed an event, and check that everything it changes is published or stored as it must be."""
        before = self._lasting()
        effects = super().feed(kind, **values)
        kinds = {type(effect) for effect in effects}
        for effect, then, now in zip((PublishCluster, PersistState), before, self._lasting(), strict=True):
            changed = [key for key in now if then.get(key) != now[key]]
            assert effect in kinds or not changed, f"{effect.__name__} is missing after a change of {changed}"
        return effects

    def _lasting(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the published state that must be current at once, and the durable state that must survive a
        crash.

        Steps, hosts, and what is waited for are published with the next change. Nodes are asked again for
        reports and facts.
        """
        seen = self.machine.public_state()
        later = {"step", "loss", "step_s", "samples_per_s", "waiting_for", "snapshot"}
        shown = {key: value for key, value in seen.items() if key not in later}
        shown["nodes"] = {
            name: {key: value for key, value in node.items() if key not in ("step", "host")}
            for name, node in seen["nodes"].items()
        }
        stored = self.machine.durable_state()
        again = {"nodes", "hosts", "held", "snapshot_last_order_step"}
        lasting = {key: value for key, value in stored.items() if key not in again}
        if attempt := stored.get("attempt"):
            lasting["attempt"] = {key: value for key, value in attempt.items() if key != "sources"}
        return shown, lasting

    def check_drain(self) -> list[Effect]:
        """Answer the machine's question about a drain as the real planner does."""
        asked: CheckDrain = self.one(CheckDrain)
        answer = answer_question(asked, self.planner, Planner.plan, lambda: self.now)
        return self.feed(
            DrainChecked, generation=answer.generation, nodes=answer.nodes, problem=answer.problem
        )

    def say(self, node: str, signal: Signal, incarnation: int | None = None) -> list[Effect]:
        number = self.incarnations[node] if incarnation is None else incarnation
        return self.feed(SignalArrived, message=FromNode(node=node, incarnation=number, signal=signal))

    def hello(self, node: str, incarnation: int, **says: Any) -> list[Effect]:
        self.incarnations[node] = incarnation
        values = {"facts": facts(), "job_id": None, "prepared": False, "generation": 0, "training": False}
        return self.say(node, Hello(**{**values, **says}))

    def quiesced(self, node: str, generation: int, *reports: DeviceReport) -> list[Effect]:
        return self.say(node, Quiesced(generation=generation, reports=reports))

    def resumed(self, node: str, generation: int) -> list[Effect]:
        return self.say(node, Resumed(generation=generation, bytes_moved=0, rendezvous_s=0.01, state_s=0.02))

    def stepped(self, node: str, generation: int, *steps: int) -> list[Effect]:
        signal = Stepped(generation=generation, steps=tuple(committed(s) for s in steps), step_s=0.1)
        return self.say(node, signal)

    def acknowledge(
        self, node: str, generation: int = 1, activity: NodeActivity = NodeActivity.TRAINING, **said: Any
    ) -> list[Any]:
        """Send heartbeats with this acknowledgement until a lost message would have been repeated.

        :returns: the commands to this node that follow.
        """
        found: list[Any] = []
        acknowledgement = Acknowledgement(activity=activity, job_id="job-1", **said)
        for _ in range(5):
            heartbeat = Heartbeat(
                generation=generation, committed=committed(1), acknowledgement=acknowledgement
            )
            for other in self.incarnations.keys() - {node}:
                self.say(other, Heartbeat(generation=generation, committed=committed(1)))
            for effects in (self.say(node, heartbeat), self.fire("tick", Timing().heartbeat_s)):
                self.last = effects
                found += [one.command for one in self.commands() if one.node == node]
        return found

    def heartbeats_for(self, seconds: float, heartbeats: Mapping[str, Heartbeat]) -> None:
        """Let time pass in which these nodes, and no others, send these heartbeats."""
        self.lines.append(f"... {seconds:g} s pass, with heartbeats of {', '.join(heartbeats) or 'no node'}")
        period_s, before = Timing().heartbeat_s, self.now
        for number in range(1, math.floor(seconds / period_s) + 1):
            self.pass_time(round(before + number * period_s - self.now, 6))
            for node, heartbeat in heartbeats.items():
                message = FromNode(node=node, incarnation=self.incarnations[node], signal=heartbeat)
                self.feed_quietly(SignalArrived, message=message)
        self.pass_time(round(before + seconds - self.now, 6))

    def states(self) -> None:
        """Record the states of the cluster and of its nodes, as outside tools see them."""
        seen = self.machine.public_state()
        nodes = ", ".join(f"{name} {node['state']}" for name, node in seen["nodes"].items())
        self.write(f"= {seen['phase']}, generation {seen['generation']}, step {seen['step']}: {nodes}")
        if seen["waiting_for"]:
            self.write(f"= waiting for: {seen['waiting_for']}")
        if seen["outcome"]:
            self.write(f"= outcome: {seen['outcome']}")

    def plan(self) -> list[Effect]:
        """Answer the ComputePlan among the last effects."""
        asked: ComputePlan = self.one(ComputePlan)
        return self.feed(PlanReady, generation=asked.generation, plan=self.planner.plan(asked.situation))

    def running(
        self, nodes: int = 4, steps: int = 10, profile: ModelProfile = PROFILE, **job_values: Any
    ) -> None:
        """Bring the job to its first step on node-0 … in generation 1."""
        self.feed(BrokerConnected)
        names = [f"node-{n}" for n in range(nodes)]
        for number, name in enumerate(names):
            self.hello(name, 100 + number)
        self.feed(SubmitRequested, request="r", job=job(steps=steps, **job_values))
        for number, name in enumerate(names):
            self.say(name, Prepared(job_id="job-1", profile=profile if number == 0 else None))
        self.feed(TemplatesReady, job_id="job-1")
        for name in names:
            self.quiesced(name, 1, report())
        self.plan()
        for name in names:
            self.resumed(name, 1)
        self.wait(0.1)
        self.stepped("node-0", 1, 1)
        self.lines.clear()
