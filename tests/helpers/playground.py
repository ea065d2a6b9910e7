"""Real clusters for tests: mosquitto, coordinator, node daemons and trainers as processes on this machine.

The cluster runs on an event loop in its own thread, so that plain tests can use one cluster after another.
A node needs seconds to start, because it imports torch; therefore tests share a cluster and restore its
order.
"""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ftd.config.job import load_job_data
from ftd.errors import FtdError
from ftd.faults.chaos.scenario import parse_scenario
from ftd.faults.chaos.scheduler import FaultScheduler
from ftd.faults.chaos.targets import read_layout
from ftd.faults.chaos.values import Fault
from ftd.local.child_processes import private_directory, shared_memory
from ftd.local.cluster import ClusterOptions, LocalCluster
from ftd.local.inject import LocalInjector
from ftd.processes import read_tail
from ftd.transport.address import ClusterAddress
from ftd.transport.client import ClusterClient
from ftd.transport.wire.public import DrainRequest, JobData, ReadmitRequest, StopRequest, SubmitRequest
from statemachine.messages.trainer import TrainingData
from tests.helpers.contract_witness import ContractWitness
from tests.helpers.devices import BACKEND, DEVICE
from tests.helpers.waiting import PATIENCE_S

RELATIVE = 1e-9
"""Largest relative error of a loss."""
SILENCE_S = 3.0
"""Timeout of a silent process: twice the usual one, because a busy machine delays processes that are alive."""
HALF_A_REPLICA_MIB = {1: 0.3, 2: 0.19}
"""Devices of a node → memory of each in MiB, such that two nodes hold the test job's six layers and one does
not.
"""
FROZEN = "tied = true\nfrozen = true"
"""Arguments of the test job: two layers share a weight, and only biases are trained."""
PROFILE_FILE = "profile.json"
"""Name of a test job's saved profile, next to its job file."""
HOME = ("node-0", "node-1", "node-2", "node-3")
Json = dict[str, Any]
T = TypeVar("T")


@dataclass(slots=True)
class Run:
    """A job and its events."""

    job: JobData
    events: list[Json] = field(default_factory=list)

    @property
    def losses(self) -> dict[int, float]:
        """Loss of each committed step."""
        return {e["step"]: e["details"]["loss"] for e in self.named("StepCommitted")}

    @property
    def recoveries(self) -> list[Json]:
        return [e["details"]["recovery"] for e in self.named("RecoveryCompleted")]

    def named(self, name: str, node: str | None = None) -> list[Json]:
        return [e for e in self.events if e["event"] == name and node in (None, e["node"])]

    def recovery(self, cause: str) -> Json:
        found = [r for r in self.recoveries if r["cause"] == cause]
        assert found, f"no recovery from {cause}: {[r['cause'] for r in self.recoveries]}"
        return found[-1]


class Playground:
    """A cluster and its client, controlled from a plain thread."""

    def __init__(self, directory: Path, home: tuple[str, ...], options: ClusterOptions) -> None:
        self.home = home
        """The nodes that are up at the start of each test."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="playground")
        self._thread.start()
        self.state: Json = {}
        self.run: Run | None = None
        self.pids: dict[tuple[str, int], int] = {}
        """(node, device) → process id of its present trainer."""
        self._news = asyncio.Condition()
        self.cluster = self.on_loop(self._make(directory, options))

    async def _make(self, directory: Path, options: ClusterOptions) -> LocalCluster:
        return LocalCluster(directory, options)

    def on_loop(self, work: Coroutine[Any, Any, T], limit_s: float = PATIENCE_S) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(limit_s)

    # --- life ------------------------------------------------------------------------------------

    def open(self) -> None:
        self.on_loop(self._open())

    async def _open(self) -> None:
        await self.cluster.start_broker()
        await self.cluster.start_coordinators()
        address = ClusterAddress(broker=self.cluster.broker, cluster=self.cluster.options.cluster)
        self.client = ClusterClient(address, listen=True, on_state=self._on_state, on_node=self._on_node)
        await self.client.__aenter__()
        self._injector = LocalInjector(self.client, self.cluster, layout=lambda: read_layout(self.state))
        self._failures: list[str] = []
        self._conductor: FaultScheduler | None = None
        self._following = asyncio.ensure_future(self._follow())
        self.witness = ContractWitness(self.cluster.broker, self.cluster.options.cluster)
        self._witnessing = asyncio.ensure_future(self.witness.session.run())

    def close(self) -> None:
        async def end() -> None:
            for task in (self._following, self._witnessing):
                task.cancel()
            await asyncio.gather(self._following, self._witnessing, return_exceptions=True)
            await self.client.__aexit__()
            await self.cluster.end()

        self.on_loop(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _follow(self) -> None:
        async for event in self.client.events():
            if event["event"] == "TrainerStarted":
                self.pids[event["node"], event["details"]["device"]] = event["details"]["pid"]
            if self.run is not None:
                self.run.events.append(event)
            if self._conductor is not None:
                self._conductor.on_event(event)
            await self._tell()

    def _on_state(self, state: Json) -> None:
        self.state = state
        self._loop.create_task(self._tell())

    def _on_node(self, node: str, state: str) -> None:
        if self._conductor is not None:
            self._conductor.on_node(node, state)

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    # --- waiting -----------------------------------------------------------------------------------

    def until(self, holds: Callable[[], Any], what: str, limit_s: float = PATIENCE_S) -> None:
        """Wait until ``holds()`` is true; check at each message, and at least twice a second."""

        async def wait() -> None:
            deadline = time.monotonic() + limit_s
            while not holds():
                if time.monotonic() > deadline:
                    raise AssertionError(f"not within {limit_s:g} s: {what}\n{self.describe()}")
                async with self._news:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._news.wait(), 0.5)

        self.on_loop(wait(), limit_s + 10)

    def until_event(self, name: str, node: str | None = None, times: int = 1) -> Json:
        """Return the ``times``-th event of this name since the job was submitted; wait for it."""
        run = self._current
        self.until(lambda: len(run.named(name, node)) >= times, f"{name} {node or ''} × {times}")
        return run.named(name, node)[times - 1]

    def until_recovery(self, cause: str) -> Json:
        """Return the first recovery from this cause; wait for it."""
        run = self._current
        self.until(lambda: any(r["cause"] == cause for r in run.recoveries), f"recovery from {cause}")
        return run.recovery(cause)

    def until_step(self, step: int) -> None:
        run = self._current
        self.until(lambda: max(run.losses, default=0) >= step, f"step {step}")

    @property
    def devices(self) -> int:
        """Number of devices of a node whose configuration gives no other."""
        return self.cluster.options.devices_per_node

    @property
    def healthy(self) -> set[str]:
        """Nodes that are present; empty while any of them is not healthy."""
        here = {
            n: node["state"] for n, node in self.state.get("nodes", {}).items() if node["state"] != "OFFLINE"
        }
        return set(here) if set(here.values()) <= {"HEALTHY"} else set()

    @property
    def snapshot_directory(self) -> Path:
        """Directory with the snapshots of all nodes."""
        return shared_memory(self.cluster.directory)

    def further(self, steps: int = 5) -> None:
        """Wait until training has made this many more steps."""
        self.until_step(max(self._current.losses, default=0) + steps)

    def until_planned(self, nodes: Sequence[str]) -> None:
        """Wait until all these nodes, and no others, are in the plan that trains."""
        self.until(
            lambda: (
                self.state.get("phase") == "RUNNING"
                and {name for name, node in self.state["nodes"].items() if node["in_plan"]} == set(nodes)
            ),
            f"{', '.join(nodes)} train",
        )

    def until_standby(self) -> None:
        """Wait until one coordinator leads and another one stands by."""
        self.until(lambda: len(self.state.get("standbys", [])) == 1, "one stands by")

    def until_phase(self, phase: str) -> None:
        self.until(lambda: self.state.get("phase") == phase, f"phase {phase}")

    @property
    def _current(self) -> Run:
        assert self.run is not None
        return self.run

    def describe(self) -> str:
        """Return the known state, for the message of a failing test."""
        events = [] if self.run is None else self.run.events
        lines = [
            f"{e['monotonic']:.3f} {e['event']} {e['node'] or ''} g{e['generation']} step {e['step']} "
            f"{e['reason'][:300]}"
            for e in events
            if e["event"] != "StepCommitted"
        ]
        nodes = {name: node["state"] for name, node in self.state.get("nodes", {}).items()}
        head = f"phase {self.state.get('phase')} waiting for {self.state.get('waiting_for')!r} nodes {nodes}"
        tails = {name: read_tail(child.log, 1500) for name, child in self.cluster.processes.children.items()}
        logs = "\n".join(f"--- {name}\n{text}" for name, text in tails.items() if text)
        return "\n".join([head, *lines[-60:], logs])

    # --- acting ------------------------------------------------------------------------------------

    def submit(self, job: JobData) -> Run:
        """Submit a job, and wait for its first committed step."""
        run = self.offer(job)
        self.until_step(1)
        return run

    def offer(self, job: JobData) -> Run:
        """Submit a job without waiting for a step."""
        self.run = Run(job)
        envelope = self.client.envelope()
        request = SubmitRequest(request=envelope["request"], reply=envelope["reply"], job=job)
        self.on_loop(self.client.request(request))
        return self.run

    def finish(self) -> Run:
        """Wait until the job ends successfully."""
        self.until(
            lambda: self._current.named("JobFinished") or self._current.named("JobFailed"), "the job's end"
        )
        assert self._current.named("JobFinished"), self.describe()
        return self._leave()

    def stop_job(self) -> Run:
        """Stop the job."""
        envelope = self.client.envelope()
        name = self._current.job.name
        request = StopRequest(request=envelope["request"], reply=envelope["reply"], job=name)
        self.on_loop(self.client.request(request))
        self.until_event("JobStopped")
        return self._leave()

    def _leave(self) -> Run:
        # The state is published a moment after the events.
        self.until(lambda: self.state.get("phase") in ("FINISHED", "FAILED"), "the state shows the end")
        run = self._current
        self._conductor = None
        assert self._failures == []
        return run

    def drain(self, node: str, **how: bool) -> str:
        """Request a drain, and return its outcome.

        :raises RequestRejected: there is no plan without the node.
        """
        envelope = self.client.envelope()
        request = DrainRequest(request=envelope["request"], reply=envelope["reply"], node=node, **how)
        outcome: str = self.on_loop(self.client.request(request)).outcome
        return outcome

    def readmit(self, node: str) -> str:
        """Readmit a node that was set aside, and return the answer."""
        envelope = self.client.envelope()
        request = ReadmitRequest(request=envelope["request"], reply=envelope["reply"], node=node)
        return self.on_loop(self.client.request(request)).detail

    def inject(self, **fault: Any) -> None:
        """Inject a fault now; ``fault`` has the fields of a scenario's ``[[fault]]`` without a trigger."""
        [parsed] = parse_scenario({"fault": [{"after_s": 0, **fault}]}, "test").faults
        self.on_loop(self._injector.inject(parsed))

    def kill_later(self, pid: int, after_s: float) -> None:
        """Send SIGKILL to a process later, when the broker that would carry the order is down."""
        self._loop.call_soon_threadsafe(self._loop.call_later, after_s, os.kill, pid, signal.SIGKILL)

    def publish(self, topic: str, payload: bytes) -> None:
        self.witness.excuse(topic, payload)

        async def send() -> None:
            self.client.publish(topic, payload)

        self.on_loop(send())

    def fill_gaps(self) -> None:
        """Add the events that were lost while the broker was down, from the coordinator's journal."""
        run = self._current
        since = run.events[0]["monotonic"]

        async def fetch() -> None:
            known = {(e["event"], e["cause"], e["monotonic"]) for e in run.events if "cause" in e}
            for event in await self.client.history():
                identity = (event["event"], event["cause"], event["monotonic"])
                if event["monotonic"] >= since and identity not in known:
                    run.events.append(event)
            for row in await self.client.history(what="steps"):
                if row["job"] == self.state["job"]["id"] and row["step"] not in run.losses:
                    run.events.append({**row, "event": "StepCommitted", "node": None})

        self.on_loop(fetch())

    def until_journaled(self, holds: Callable[[], Any], what: str) -> None:
        """Wait for something that is published while the broker cannot be reached: the journal has it in any
        case.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, f"not in the journal: {what}\n{self.describe()}"
            with contextlib.suppress(FtdError):  # Nobody answers while the broker is down.
                self.fill_gaps()

    def play(self, *faults: Json) -> None:
        """Inject these faults at their triggers, from now on."""

        async def begin() -> None:
            scenario = parse_scenario({"fault": list(faults)}, "test")
            self._conductor = FaultScheduler(scenario, inject=self._injector.inject, on_failure=self._failed)
            self._conductor.start()

        self.on_loop(begin())

    def _failed(self, fault: Fault, error: FtdError) -> None:
        self._failures.append(f"{fault}: {error}")

    # --- order ---------------------------------------------------------------------------------------

    def tidy(self) -> None:
        """Restore order after any test: no job, and exactly the home nodes up with idle trainers."""
        self._conductor = None
        self._failures.clear()
        with contextlib.suppress(FtdError):
            if self.state.get("job") and self.state["phase"] not in ("FINISHED", "FAILED"):
                self.stop_job()
        self.run = None
        for name in self.cluster.central_services:
            assert self.cluster.processes.running(name), f"{name} is gone\n{self.describe()}"
        strangers = [
            n for n in self.cluster.nodes if n not in self.home and self.cluster.processes.running(n)
        ]
        self.on_loop(self.cluster.processes.terminate(strangers, grace_s=10.0))
        for name in self.home:
            if not self.cluster.processes.running(name):
                for device in range(self.devices):
                    self.pids.pop((name, device), None)
                self.on_loop(self.cluster.start_node(name))
        self.until(self._in_order, "home nodes healthy, others gone")

    def _in_order(self) -> bool:
        warm = all((name, device) in self.pids for name in self.home for device in range(self.devices))
        return warm and self.healthy == set(self.home)

    def contract_is_kept(self) -> None:
        """Check that all messages so far conform to the contract for other tools."""
        problems = self.witness.problems()
        assert problems == [], "\n".join(problems[:20])


def nodes_of(pipelines: list[Json]) -> list[int]:
    """Return how many nodes each of the pipelines has, ascending."""
    found = [{d.rpartition("/")[0] for stage in p["stages"] for d in stage["devices"]} for p in pipelines]
    return sorted(map(len, found))


@contextlib.contextmanager
def playground(
    nodes: int = len(HOME), environment: dict[str, str] | None = None, **options: Any
) -> Iterator[Playground]:
    """Start a cluster and its home nodes; remove everything at the end, however the test ends.

    :param environment: additional environment variables of the cluster's processes.
    :param options: those of ``ClusterOptions`` that differ from what tests usually need.
    """
    with private_directory() as directory:
        timing = {"silence_s": SILENCE_S, **options.pop("timing", {})}
        made = ClusterOptions(**{"broker": "mosquitto", "timing": timing, **options})
        ground = Playground(directory, HOME[:nodes], made)
        ground.cluster.processes.environment |= environment or {}
        try:
            ground.open()
            for name in ground.home:
                ground.on_loop(ground.cluster.start_node(name))
            yield ground
        finally:
            ground.close()


JOB = """
name = "tiny"
steps = {steps}
[training]
function = "{here}/tiny.py:build"
global_batch = 16
microbatch = 2
seed = 3
precision = "float64"
clip_gradient_norm = 0.5
backend = "{backend}"
device = "{device}"
[training.arguments]
delay_s = {delay_s}
{arguments}
[tolerance]
failures = {failures}
minimum = "{minimum}"
[planner]
within_node = "{within_node}"
{memory}
{profile}
{tables}
"""


def write_job(
    directory: Path,
    *,
    steps: int = 100_000,
    delay_s: float = 0.005,
    devices: int = 2,
    two_node_replicas: bool = False,
    within_node: str = "auto",
    stage_devices: int | None = None,
    failures: int = 1,
    minimum: str = "one_replica",
    arguments: str = "",
    tables: str = "",
) -> Path:
    """Write the test job to a file.

    :param delay_s: delay of each layer. Without it steps would use all processors, which other tests need, and
        nodes that start.
    :param within_node: how devices of a stage share its work.
    :param stage_devices: devices of every stage. Default: two with a given ``within_node``, else as the planner
        chooses from layer times that a node measures, which vary with the load of the machine.
    :param two_node_replicas: a copy of the model needs two nodes with this number of ``devices``.
    """
    if stage_devices is None and within_node != "auto":
        stage_devices = 2
    text = JOB.format(
        steps=steps,
        here=Path(__file__).parent,
        backend=BACKEND,
        device=DEVICE,
        delay_s=delay_s,
        arguments=f"{arguments}\nsplit = true" if within_node == "tensor" else arguments,
        tables=tables,
        failures=failures,
        minimum=minimum,
        memory=f"device_memory_mib = {HALF_A_REPLICA_MIB[devices]}" if two_node_replicas else "",
        profile=f'profile = "{write_profile(directory, within_node, stage_devices)}"'
        if stage_devices
        else "",
        within_node=within_node,
    )
    path = directory / "job.toml"
    path.write_text(text)
    return path


def write_profile(directory: Path, within_node: str, stage_devices: int) -> Path:
    """Write a profile of the test job that knows stages of this number of devices only."""
    size = (48 * 48 + 48) * 8
    layer = {
        "forward_ms": 3.0,
        "backward_ms": 1.0,
        "parameter_bytes": size,
        "gradient_bytes": size,
        "optimizer_bytes": 2 * size,
        "activation_bytes": 4096,
        "output_bytes": 2 * 48 * 8,
    }
    split = {
        "parameter_bytes": size,
        "column_bytes": 0,
        "activation_bytes": 0,
        "forward_bytes": 2 * 48 * 8,
        "forward_exchanges": 1,
        "backward_bytes": 2 * 48 * 8,
        "backward_exchanges": 1,
    }
    inner = {**layer, "tensor": split} if within_node == "tensor" else layer
    layers = [layer, *[inner] * 4, layer]
    document = {
        "schema": "ftd-profile/1",
        "microbatch_rows": 2,
        "layers": layers,
        "stage_devices": [stage_devices],
    }
    path = directory / PROFILE_FILE
    path.write_bytes(msgspec.json.encode(document))
    return path


def tiny_job(directory: Path, **options: Any) -> JobData:
    """Return the test job as a client submits it."""
    return load_job_data(write_job(directory, **options))


def training_data(job: JobData) -> TrainingData:
    return msgspec.convert(job.training, TrainingData)
