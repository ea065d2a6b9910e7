"""A simulated host: processes of the real ``Node`` run on it one after the other, with simulated trainers."""

import asyncio
import math
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from ftd.config.daemon import DaemonConfig, parse_daemon_config
from ftd.faults.sim.checkpoint_store import SimCheckpointStore
from ftd.faults.sim.host import SimHost, StepTiming
from ftd.faults.sim.network import COMMAND, TOPICS, SimNetwork
from ftd.faults.sim.process import ProcessLoop, SimClock
from ftd.faults.sim.session import SimTransport
from ftd.faults.sim.snapshot_storage import SimSnapshotStorage
from ftd.faults.sim.trainer_processes import SimTrainers
from ftd.faults.sim.trainers import SimGroups, SimTrainer
from ftd.node.message_faults import LinkFaults
from ftd.node.node import Node
from ftd.node.ports import NodeObserver, Ports, TrainerProcess
from ftd.transport.ports import BrokerSession
from ftd.transport.wire.codec import decode_to_nodes
from ftd.transport.wire.public import encode_json
from statemachine.agent.events import CommandArrived, HealthCheckEnded
from statemachine.agent.state import Agent
from statemachine.effects import Effect, EmitEvent, ResumeTrainer, RunHealthCheck, StopHealthCheck
from statemachine.events import Event
from statemachine.messages.cluster import Fence, ToNode
from statemachine.messages.trainer import Report
from statemachine.messages.values import FailureCause, HealthReport, NodeFacts, PlantedFault
from statemachine.timing import Timing

_TEST_LIMIT_S = 2.0
"""Time after which the test of a device that hangs is ended."""


class SimNode(SimHost):
    """One host. When its daemon is killed, its trainers die, and everything but the snapshots in memory is lost."""

    def __init__(
        self,
        groups: SimGroups,
        network: SimNetwork,
        checkpoint_store: SimCheckpointStore,
        nodes: Mapping[str, "SimNode"],
        name: str,
        devices: int,
        step_timing: StepTiming,
    ) -> None:
        super().__init__(groups.oracle, network, checkpoint_store, nodes, name, step_timing)
        self.groups, self.devices = groups, devices
        self.clock = SimClock(self.world)
        self.loop.alive = False
        self.process: _Process | None = None
        """The newest process of the daemon, alive or not."""
        self.crash_after: int | None = None
        """Number of effects after which the daemon is killed in the middle of carrying them out."""
        self.serving_since = math.inf
        """Time from which on the daemon handles events; before that it looks through its memory."""
        self.removed_at: float | None = None
        """Time at which the host was removed for good."""
        self.trainers: dict[int, SimTrainer] = {}
        self._check: RunHealthCheck | None = None
        """The newest health check, unless it was stopped."""
        self.on_effect: Callable[[Effect], None] = lambda effect: None
        """Callback for each effect of the agent machine, before it is carried out."""
        self.on_event: Callable[[EmitEvent], None] = lambda event: None
        """Callback for each event of the daemon."""

    # --- the daemon ------------------------------------------------------------------------------

    @property
    def incarnation(self) -> int:
        return self.process.incarnation if self.process is not None else 0

    @property
    def agent(self) -> Agent:
        """The state of the agent machine of the newest process."""
        if self.process is None:
            return Agent(name=self.name, timing=self.world.timing)
        return self.process.machine.agent

    @property
    def copies_job(self) -> str | None:
        return self.process.storage.copies_job if self.up and self.process is not None else None

    def on_copies_changed(self) -> None:
        if self.process is not None:
            self.loop.enter(self.process.storage.on_copies_changed)

    def deliver(self, trainer: TrainerProcess, report: Report) -> None:
        if self.process is not None:
            self.loop.enter(self.process.supervisor.on_report, trainer, report)

    def start(self) -> None:
        self.serving_since, self.crash_after = math.inf, None
        self.trainers = {}
        self.resumes.clear()
        loop = self.loop = ProcessLoop(self.world)
        loop.enter(self._begin, loop)

    def _begin(self, loop: ProcessLoop) -> None:
        self.process = process = _Process(self, loop)
        task = loop.create_task(process.serve())
        task.add_done_callback(partial(self._ended, loop))

    def _ended(self, loop: ProcessLoop, done: "asyncio.Task[None]") -> None:
        """Note that the daemon left by itself."""
        if not loop.alive or done.cancelled():
            return
        if (error := done.exception()) is not None:
            self.world.fail(error if isinstance(error, Exception) else RuntimeError(str(error)))
        self.crash()

    def crash(self, *, host: bool = False) -> None:
        """SIGKILL the daemon, with which its trainers die, or lose the whole host with its memory."""
        if host:
            self.arena.clear()
        if not self.up or self.process is None:
            return
        self.loop.kill()
        self.process.trainers.kill_all()
        self.arena.persisting = None
        self.network.drop(self.name)

    def signal(self, number: int) -> None:
        """Send a signal to the daemon."""
        match number:
            case signal.SIGKILL:
                self.crash()
            case signal.SIGSTOP:
                self.loop.freeze()
            case signal.SIGCONT:
                self.loop.thaw()

    def clear_faults(self) -> None:
        """Clear every fault of this host."""
        self.reconnect()
        self.restore_speed()
        self.failing_builds = 0
        self.device_fault = ""
        self.crash_after = None
        self.max_scan_s = self.max_read_s = self.max_send_s = 0.0
        self.loop.thaw()
        if self.process is not None:
            self.loop.enter(self.process.chaos.message_faults.end)
            self.plant_bad_device("", range(self.devices), 0.0)

    def terminate(self) -> None:
        if self.process is not None:
            self.loop.enter(self.process.leave, "SIGTERM")

    def disconnect(self, for_s: float) -> None:
        """Cut the connection to the broker, and stay away."""
        if self.process is not None:
            self.loop.enter(self.process.disconnect, for_s)

    def lose_messages(self, faults: LinkFaults, for_s: float) -> None:
        """Lose, repeat and delay some of the messages from and to this node."""
        process, seed = self.process, self.world.seed
        if process is not None:
            self.loop.enter(lambda: process.chaos.message_faults.begin(faults, seed=seed, for_s=for_s))

    @property
    def has_message_faults(self) -> bool:
        """Return whether messages to or from this node may be lost, repeated or late."""
        return self.process is not None and self.process.chaos.message_faults.is_faulty

    def plant_bad_device(self, how: PlantedFault, devices: Sequence[int], for_s: float) -> None:
        """Let the daemon plant a fault in its tests of these devices."""
        if self.process is not None:
            self.loop.enter(self.process.supervisor.health.plant, how, devices, for_s)

    def request_fault(self, **fields: Any) -> None:
        """Ask the daemon over the broker to inject a fault into itself."""
        request = f"request-{self.world.next_serial()}"
        payload = encode_json({"request": request, "reply": "user", **fields})
        self.network.publish_as_client(TOPICS.chaos(self.name), payload)

    def fail_trainer(self, device: int, cause: FailureCause, words: str = "") -> None:
        """End a trainer process; the daemon notices a little later."""
        trainer = self.trainers.get(device)
        if trainer is not None and self.process is not None:
            self.process.trainers.fail(trainer, cause, words or f"simulated in {_in_letters(trainer.pid)}")

    # --- what the simulator looks at ---------------------------------------------------------------

    def watch(self, loop: ProcessLoop, it: Event | Effect) -> None:
        """Observe every event before it is handled, and every effect before it is carried out."""
        if not loop.alive:
            return
        if self.world.tracing:
            self.world.note(self.name, f"  → {it}" if isinstance(it, Effect) else it)
        if isinstance(it, Effect):
            if self.crash_after is not None:
                self.crash_after -= 1
                if self.crash_after < 0:
                    # A trainer that reports something, and brings this about, still returns from its call.
                    loop.freeze()
                    self.world.call_later(0.0, self.crash)
                    raise asyncio.CancelledError
            if isinstance(it, ResumeTrainer):
                self.resumes[it.resume.generation] = it.resume
            elif isinstance(it, RunHealthCheck):
                self._check = it
            elif isinstance(it, StopHealthCheck):
                self._check = None
            self.on_effect(it)
        elif isinstance(it, CommandArrived):
            # Its injector may hold messages back that it sent before, and let them go later.
            if isinstance(it.message.command, Fence) and not self.has_message_faults:
                self.oracle.on_fenced(self.name, it.message.incarnation)
        elif isinstance(it, HealthCheckEnded):
            self._checked(it.report)

    def _checked(self, report: HealthReport) -> None:
        """Report a wrong product to the oracle, if a check found it that the node has to pass before it takes
        part. Only checks that the coordinator orders test links.
        """
        check, self._check = self._check, None
        if check is None or check.number != report.number or check.peers:
            return
        if any(device.wrong for device in report.devices):
            self.oracle.on_wrong_device(self.name, self.agent.incarnation)

    def session(self, loop: ProcessLoop, **parameters: Any) -> BrokerSession:
        """Return a session that checks which commands to several nodes the daemon takes."""
        on_message = parameters["on_message"]

        def check(topic: str, payload: bytes, retained: bool) -> None:
            if topic != COMMAND or retained or self.has_message_faults:
                on_message(topic, payload, retained)
                return
            before = self._taken()
            on_message(topic, payload, retained)
            taken = self._taken() > before
            self.oracle.check_addressed(self.name, self.incarnation, decoded(payload), taken=taken)

        parameters["on_message"] = check
        return SimTransport(loop, self.network, self.name).session(**parameters)

    def _taken(self) -> int:
        return self.process.commands if self.process is not None else 0


class _Process(Node):
    """The real node with hooks that observe it and change nothing."""

    def __init__(self, of: SimNode, loop: ProcessLoop) -> None:
        self._of = of
        self.commands = 0
        """Number of commands that were addressed to this incarnation."""
        self.storage = SimSnapshotStorage(of)
        self.trainers = SimTrainers(of, of.groups, loop, of.trainers, of.signal)
        facts = NodeFacts(
            devices=of.devices,
            host=f"host-{of.name}",
            rendezvous_port=7000,
            chaos_allowed=True,
            snapshot_port=self.storage.port,
            checks_health=of.world.checks_health,
        )
        ports = Ports(
            clock=of.clock,
            open_session=partial(of.session, loop),
            processes=self.trainers,
            trainers=self.trainers,
            snapshots=self.storage,
            facts=lambda: facts,
            observer=NodeObserver(on_event=lambda event: of.on_event(event)),  # noqa: PLW0108  # it is set later
        )
        super().__init__(
            _config(of.name, of.devices, of.world.timing),
            ports,
            watch=partial(of.watch, loop),
            cause_suffix=of.name,
        )

    async def serve(self) -> None:
        """Serve until the node has left. A process that is killed releases nothing."""
        await self.start()
        await self.introduce()
        self._of.serving_since = self._of.world.now
        await self.run()
        await self.close()

    def on_command(self, message: ToNode) -> None:
        self.commands += 1
        super().on_command(message)


def _in_letters(number: int) -> str:
    """Return a number in letters, since errors that differ in digits at most count as the same one."""
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


decoded = lru_cache(maxsize=64)(decode_to_nodes)
"""Function that decodes a command to several nodes, once for all of them."""


@lru_cache(maxsize=256)
def _config(name: str, devices: int, timing: Timing) -> DaemonConfig:
    return replace(_any_config(), node=name, devices=devices, host=f"host-{name}", timing=timing)


@lru_cache(maxsize=1)
def _any_config() -> DaemonConfig:
    node = {"name": "node", "chaos": True}
    health = {"limit_s": _TEST_LIMIT_S}
    data = {"cluster": TOPICS.cluster, "secret": "simulated", "node": node, "health": health}
    return parse_daemon_config(data, directory=Path("/simulated"))
