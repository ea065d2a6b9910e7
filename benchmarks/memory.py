"""Peak memory of each trainer from the start of a job to its end: the measurement of the model, training, and
reconfigurations by a join, and by the losses and returns of two trainers and of a node.

    python -m benchmarks.memory                        # a llama of about 200 million parameters, four nodes
    python -m benchmarks.memory --steps-between 6

A trainer should need memory for its own stage, not for the whole model: what the plan states for its
parameters, gradients, optimizer state, and the activations of the microbatches in flight, as a profile made
here measures them. The job is planned for devices that hold a third of the model, so that four or five
nodes form one pipeline. While state moves, a device has old layers next to its new stage; the plan bounds
both together by the memory of a device.

The memory of a trainer before it knows of a job, which is code of Python, torch and transformers, is its
*base*. Snapshots and parked layers are shared memory of the node, not of the device, and are reported
separately. The memory of each process is read every 10 ms. A node whose state has no second copy cannot be
drained, so no node leaves.
"""

import argparse
import asyncio
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.clusters import REPOSITORY
from benchmarks.common import Limit, Result, command_line, main
from ftd.config.job import load_job_data
from ftd.local.cluster import ClusterOptions
from ftd.local.driver import LocalDriver
from ftd.transport.wire.public import JobData
from planner.stages.memory import MemoryModel
from planner.values import Mode, ModelProfile, Policy
from runtime.layers.model import Model
from runtime.profiling.layer_profile import profile_model as measure_model
from runtime.training import load_training
from statemachine.messages.trainer import TrainingData

JOBS = REPOSITORY / "benchmarks/jobs"
HIDDEN, LAYERS, VOCABULARY, LENGTH = 1024, 11, 32000, 32
GLOBAL_BATCH, MICROBATCH = 4, 1
DEVICE_MIB = 1150
NODES = 4
STEPS_BETWEEN = 3
SNAPSHOT_STEPS = 2
RECONFIGURATIONS = 5
LIMIT = 1.35
PLAN_LIMIT = 0.15
"""Largest allowed relative error of the plan."""
READY_S = 120.0
LIMIT_S = 2400.0
_SAMPLE_S = 0.01
_TRAINING_COMMITS = 3
"""Commits of a plan from which on the memory between the second commit and the next plan is compared."""
_MIB = 1024 * 1024
_STATUS = re.compile(r"^(RssAnon|RssFile|RssShmem):\s+(\d+)", re.MULTILINE)


def parameters_of(first_layer: int, end_layer: int) -> int:
    """Return the number of parameters of a stage: embeddings are layer 0, norm and head the last layer."""
    block = 4 * HIDDEN**2 + 3 * HIDDEN * (HIDDEN * 8 // 3 // 64 * 64) + 2 * HIDDEN
    sizes = [VOCABULARY * HIDDEN, *[block] * LAYERS, HIDDEN + VOCABULARY * HIDDEN]
    return sum(sizes[first_layer:end_layer])


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory of a process at a moment, in MiB."""

    at_s: float
    private_mib: float
    """Private memory, and files that are mapped: code."""
    shared_mib: float


def sample(pid: int) -> Sample | None:
    """Return the memory of a process now, ``None`` if it has ended."""
    try:
        found = {
            name: int(kib) / 1024 for name, kib in _STATUS.findall(Path(f"/proc/{pid}/status").read_text())
        }
    except OSError:
        return None
    if len(found) < 3:
        return None
    return Sample(time.monotonic(), found["RssAnon"] + found["RssFile"], found["RssShmem"])


@dataclass(slots=True)
class Trainers:
    """The trainers of all nodes, whose memory a thread samples until ``stop``."""

    node_of: dict[int, str] = field(default_factory=dict)
    """Node by process id, also of processes that have ended."""
    samples: dict[int, list[Sample]] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            for pid in list(self.node_of):
                if (taken := sample(pid)) is not None:
                    self.samples.setdefault(pid, []).append(taken)

    def stop(self) -> None:
        self._stop.set()

    def pid_of(self, node: str) -> int:
        """Return the process id of the newest trainer of a node."""
        return next(pid for pid in reversed(self.node_of) if self.node_of[pid] == node)

    def peak(self, node: str, start_s: float, end_s: float) -> Sample | None:
        """Return the sample with the most private memory of a node's trainers in a period."""
        taken = (
            one
            for pid, name in self.node_of.items()
            if name == node
            for one in self.samples.get(pid, [])
            if start_s <= one.at_s < end_s
        )
        return max(taken, key=lambda one: one.private_mib, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPeriod:
    """A period of a run under one plan, from the order to stop for it to the order to stop for the next one."""

    began_s: float
    ended_s: float
    commits_s: tuple[float, ...]
    """Times of its committed steps. At the first one, trainers drop what others own now."""
    stages: dict[str, tuple[int, int, int]]
    """First layer, end layer and number of later stages of each node."""


class Run:
    """One run of the job on a cluster, with its faults.

    :param steps_between: steps from a completed reconfiguration to the next fault.
    """

    def __init__(self, steps_between: int) -> None:
        self.trainers = Trainers()
        self.events: list[dict[str, Any]] = []
        self._steps_between = steps_between
        self._generation = 0
        """The newest generation whose steps were awaited."""
        self._changed = asyncio.Event()
        self._driver: LocalDriver

    async def execute(self, job: JobData) -> None:
        """Run the job, with its faults, to its end."""
        names = [f"node-{index}" for index in range(NODES)]
        options = ClusterOptions(broker="mosquitto", preload=("transformers",), quarantine=False)
        async with (
            asyncio.timeout(LIMIT_S),
            LocalDriver(options, names) as self._driver,
            self._driver.connected(on_event=self._on_event, on_state=lambda _: self._changed.set()),
        ):
            await self._driver.ready(READY_S)
            await self._driver.submit(job)
            await self._reconfigured("training begins", NODES)
            await self._disturb()
            await self._driver.stop(job.name)
            await self._until(lambda: bool(self.named("JobStopped")), "the end")

    async def _disturb(self) -> None:
        """Cause the reconfigurations one after the other."""
        driver = self._driver
        await driver.cluster.start_node("node-4")
        await self._reconfigured("a node has joined", 5)
        for node in ("node-1", "node-3"):
            os.kill(self.trainers.pid_of(node), signal.SIGKILL)
            await self._reconfigured("a trainer was lost and is back", 5)
        await driver.cluster.kill("node-2")
        await driver.cluster.start_node("node-2")
        await self._reconfigured("a node was lost and is back", 5)

    async def _reconfigured(self, what: str, nodes: int) -> None:
        """Wait until a later generation trains on this number of nodes."""
        await self._until(lambda: self._generation_on(nodes) > self._generation, what)
        self._generation = self._generation_on(nodes)
        await self._train()

    def _generation_on(self, nodes: int) -> int:
        """Return the generation that trains on this number of nodes, -1 if there is none."""
        state = self._driver.state
        if state.get("phase") != "RUNNING" or sum(n["in_plan"] for n in state["nodes"].values()) != nodes:
            return -1
        return int(state["generation"])

    async def _train(self) -> None:
        """Wait until training has made some further steps."""
        before = len(self.named("StepCommitted"))
        await self._until(
            lambda: len(self.named("StepCommitted")) >= before + self._steps_between, "further steps"
        )

    async def _until(self, holds: Callable[[], bool], what: str) -> None:
        while not holds():
            if ended := self.named("JobFailed"):
                raise RuntimeError(f"while waiting for {what}: {ended[0]['reason']}")
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), 0.5)
            except TimeoutError:
                continue

    def _on_event(self, event: dict[str, Any], _: object) -> None:
        if event["event"] == "TrainerStarted":
            self.trainers.node_of[event["details"]["pid"]] = event["node"]
        self.events.append(event)
        self._changed.set()

    def named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]

    def periods(self) -> list[PlanPeriod]:
        """Return the periods between plans under which steps were committed."""
        found: list[PlanPeriod] = []
        began_s = self.named("JobSubmitted")[0]["monotonic"]
        commits_s: list[float] = []
        stages: dict[str, tuple[int, int, int]] = {}
        for event in self.events:
            match event["event"]:
                case "GenerationStarted" | "JobStopped" if commits_s:
                    found.append(
                        PlanPeriod(
                            began_s=began_s,
                            ended_s=event["monotonic"],
                            commits_s=tuple(commits_s),
                            stages=stages,
                        )
                    )
                    began_s, commits_s = event["monotonic"], []
                case "PlanChosen":
                    [pipeline] = event["details"]["pipelines"]
                    count = len(pipeline["stages"])
                    stages = {
                        device.partition("/")[0]: (
                            stage["first_layer"],
                            stage["end_layer"],
                            count - 1 - number,
                        )
                        for number, stage in enumerate(pipeline["stages"])
                        for device in stage["devices"]
                    }
                    commits_s = []  # The last step before a boundary is committed after the order to stop.
                case "StepCommitted":
                    commits_s.append(event["monotonic"])
        return found


def job_file(directory: Path) -> Path:
    text = (JOBS / "llama.toml").read_text()
    for old, new in (
        ("llama.py:build", f"{JOBS}/llama.py:build"),
        ("failures = 1", "failures = 0"),
        ("steps = 30", "steps = 100000"),
        ("global_batch = 8", f"global_batch = {GLOBAL_BATCH}"),
        ("microbatch = 2", f"microbatch = {MICROBATCH}"),
        (
            "seed = 1",
            f"seed = 1\narguments = {{ hidden = {HIDDEN}, layers = {LAYERS}, vocabulary = {VOCABULARY}, "
            f"length = {LENGTH} }}",
        ),
    ):
        text = text.replace(old, new)
    path = directory / "llama.toml"
    path.write_text(
        f"{text}\n[planner]\ndevice_memory_mib = {DEVICE_MIB}\n"
        f'[snapshot]\nevery_steps = {SNAPSHOT_STEPS}\nprotection = "none"\n'
    )
    return path


def measured_profile(job: JobData) -> ModelProfile:
    """Return a profile that is made now."""
    training = msgspec.convert(job.training, TrainingData)
    model = Model(load_training(training), training, verified=True)
    measured = measure_model(model, training, devices_per_node=1)
    return msgspec.convert(msgspec.to_builtins(measured.profile), ModelProfile)


def measure(steps_between: int) -> Result:
    with tempfile.TemporaryDirectory(prefix="ftd-memory-") as directory:
        job = load_job_data(job_file(Path(directory)))
        run = Run(steps_between)
        sampling = threading.Thread(target=run.trainers.run, daemon=True)
        sampling.start()
        began = time.monotonic()
        try:
            asyncio.run(run.execute(job))
        finally:
            run.trainers.stop()
            sampling.join()
        took_s = time.monotonic() - began
        profile = measured_profile(job)
    policy = Policy(global_batch=job.policy.global_batch, microbatch_rows=job.policy.microbatch_rows)
    return tabulated(run, figures(run, MemoryModel(profile, policy), profile), took_s)


@dataclass(slots=True)
class NodeFigures:
    """Planned and measured memory of one node, in MiB without the base."""

    base_mib: float
    stage: str = ""
    """Layers of its largest stage."""
    state_mib: float = 0.0
    activations_mib: float = 0.0
    planned_mib: float = 0.0
    """State, activations and working memory of its largest stage."""
    changing_mib: float = 0.0
    """The most memory planned while old layers are next to a new stage."""
    peak_mib: float = 0.0
    shared_mib: float = 0.0
    errors: list[float] = field(default_factory=list)
    """Relative errors of the plan while the node trains, one for each plan."""


def figures(run: Run, memory: MemoryModel, profile: ModelProfile) -> dict[str, NodeFigures]:
    """Compare the planned memory of each node with the measured one."""
    found: dict[str, NodeFigures] = {}
    old: dict[str, tuple[int, int]] = {}
    for period in run.periods():
        for node, (first, end, later) in period.stages.items():
            needed = memory.breakdown(first, end, 1, later, Mode("none"))
            if node not in found:
                bases = [
                    t[0].private_mib
                    for p, t in run.trainers.samples.items()
                    if run.trainers.node_of[p] == node
                ]
                found[node] = NodeFigures(base_mib=max(bases))
            one = found[node]
            planned_mib = needed.total / _MIB
            if planned_mib > one.planned_mib:
                one.stage, one.planned_mib = f"{first} to {end - 1}", planned_mib
                one.activations_mib = needed.activations / _MIB
                one.state_mib = (needed.parameters + needed.gradients + needed.optimizer) / _MIB
            kept = set(range(*old.get(node, (0, 0)))) - set(range(first, end))
            with_old_mib = planned_mib + sum(profile.layers[layer].state_bytes for layer in kept) / _MIB
            one.changing_mib = max(one.changing_mib, min(with_old_mib, DEVICE_MIB))
            old[node] = first, end
            whole = run.trainers.peak(node, period.began_s, period.ended_s)
            if whole is not None:
                one.peak_mib = max(one.peak_mib, whole.private_mib - one.base_mib)
                one.shared_mib = max(one.shared_mib, whole.shared_mib)
            if len(period.commits_s) >= _TRAINING_COMMITS:
                trained = run.trainers.peak(node, period.commits_s[1], period.ended_s)
                if trained is not None:
                    one.errors.append((trained.private_mib - one.base_mib) / planned_mib - 1)
    return found


def tabulated(run: Run, nodes: dict[str, NodeFigures], took_s: float) -> Result:
    reconfigurations = len(run.periods()) - 1
    result = Result(
        name="memory",
        what=f"A llama of {parameters_of(0, LAYERS + 2) / 1e6:.0f} million parameters in one pipeline of {NODES} or "
        f"{NODES + 1} nodes, {len(run.named('StepCommitted'))} steps, {reconfigurations} reconfigurations, "
        f"{took_s:.0f} s; MiB of each node's trainers, peaks without the base",
        columns=(
            "node", "base", "largest stage", "state", "activations", "planned", "with old layers", "peak",
            "peak / (state + activations)", "error of the plan", "shared",
        ),
    )  # fmt: skip
    ratios = []
    for node, one in sorted(nodes.items()):
        ratios.append(one.peak_mib / (one.state_mib + one.activations_mib))
        errors = f"{min(one.errors):+.1%} to {max(one.errors):+.1%}" if one.errors else "–"
        megabytes = (one.state_mib, one.activations_mib, one.planned_mib, one.changing_mib, one.peak_mib)
        result.rows.append(
            (
                node, f"{one.base_mib:.0f}", one.stage, *(f"{mib:.0f}" for mib in megabytes), f"{ratios[-1]:.2f}",
                errors, f"{one.shared_mib:.0f}",
            )
        )  # fmt: skip
        result.data[node] = {**asdict(one), "ratio": ratios[-1]}
    error = max(abs(error) for one in nodes.values() for error in one.errors)
    result.limits = [
        Limit(
            name="peak over the largest stage's state and activations, worst",
            measured=max(ratios),
            limit=LIMIT,
        ),
        Limit(name="error of the plan for a stage that trains, worst", measured=error, limit=PLAN_LIMIT),
        Limit(name="reconfigurations", measured=reconfigurations, limit=RECONFIGURATIONS, at_least=True),
    ]
    return result


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--steps-between", type=int, default=STEPS_BETWEEN)
    return parser.parse_args()


if __name__ == "__main__":
    given = parse()
    main(measure(given.steps_between), given.out)
