"""A node daemon without processes, driven by hand around the real agent machine."""

from typing import Any

from planner.values import Device, PipelinePlacement, Plan, StagePlacement
from statemachine.agent.events import (
    AgentStarted,
    CommandArrived,
    TrainerConnected,
    TrainerReported,
)
from statemachine.agent.machine import AgentMachine
from statemachine.effects import (
    SendSignal,
)
from statemachine.events import BrokerConnected
from statemachine.messages import trainer
from statemachine.messages.cluster import (
    Command,
    Prepare,
    Resume,
    ToNode,
)
from statemachine.messages.common import Prepared, Quiesce, Resumed
from statemachine.messages.values import TrainerState
from statemachine.timing import Timing
from tests.helpers.transcripts import PROFILE, Script, facts, job, report, vote


def plan(*nodes: str, devices: int = 1) -> Plan:
    pipelines = tuple(
        PipelinePlacement(
            stages=(
                StagePlacement(
                    first_layer=0,
                    end_layer=4,
                    devices=tuple(Device(node=node, index=d) for d in range(devices)),
                ),
            ),
            first_microbatch=6 * number,
            microbatches=6,
            estimated_s=1.0,
        )
        for number, node in enumerate(nodes)
    )
    return Plan(pipelines=pipelines, transfers=(), method="initial", reason="", estimated_iteration_s=1.0)


class Daemon(Script):
    """The agent of node ``a``, incarnation 7, started and connected."""

    def __init__(self, devices: int = 1) -> None:
        super().__init__(AgentMachine("a", Timing()))
        self.devices = devices
        self.feed(AgentStarted, incarnation=7, facts=facts(devices))
        self.feed(BrokerConnected)

    def order(self, command: Command, incarnation: int = 7) -> None:
        self.feed(
            CommandArrived, message=ToNode(node="a", incarnation=incarnation, command=command, cause="c")
        )

    def up(self, first_pid: int = 50) -> None:
        for device in range(self.devices):
            self.feed(TrainerConnected, device=device, pid=first_pid + device)

    def prepared(self, profile: bool = False) -> None:
        """Go from a started daemon to a built job."""
        self.up()
        self.order(Prepare(job=job(), profile=profile))
        for device in range(self.devices):
            self.feed(
                TrainerReported,
                device=device,
                report=Prepared(job_id="job-1", profile=PROFILE if profile and device == 0 else None),
            )

    def quiesced(self, generation: int, step: int = 0, mode: str = "abort") -> None:
        self.order(Quiesce(generation=generation, mode="boundary" if mode == "boundary" else "abort"))
        for device in range(self.devices):
            self.answered(generation, step, device)

    def answered(self, generation: int, step: int, device: int = 0) -> None:
        """Return a trainer's answer to a Quiesce."""
        values = {name: getattr(report(step), name) for name in TrainerState.__struct_fields__}
        self.feed(
            TrainerReported, device=device, report=trainer.TrainerQuiesced(generation=generation, **values)
        )

    def resume(self, generation: int, step: int, *nodes: str, **others: Any) -> Resume:
        return Resume(
            generation=generation,
            job_id="job-1",
            step=step,
            vote=vote(step) if step else None,
            plan=plan(*(nodes or ("a", "b")), devices=self.devices),
            hosts={},
            rendezvous="h:1",
            **others,
        )

    def training(self, generation: int = 1, step: int = 0) -> None:
        """Go from a built job to a running group."""
        self.quiesced(generation, step)
        self.order(self.resume(generation, step))
        for device in range(self.devices):
            self.feed(
                TrainerReported,
                device=device,
                report=Resumed(
                    generation=generation, bytes_moved=10, rendezvous_s=0.1 * (device + 1), state_s=0.2
                ),
            )

    def stepped(self, step: int, device: int = 0, generation: int = 1) -> None:
        self.feed(
            TrainerReported,
            device=device,
            report=trainer.TrainerStepped(
                generation=generation, step=step, vote=vote(step), step_s=0.1, bubble_s=0.0
            ),
        )

    def heartbeat(
        self, device: int = 0, progress: int = 1, waiting: bool = False, reading: bool = False
    ) -> None:
        self.feed(
            TrainerReported,
            device=device,
            report=trainer.TrainerHeartbeat(progress=progress, waiting=waiting, reading=reading),
        )

    def signals(self, kind: type[Any] | None = None) -> list[Any]:
        said = [effect.signal for effect in self.all(SendSignal)]
        return said if kind is None else [signal for signal in said if isinstance(signal, kind)]
