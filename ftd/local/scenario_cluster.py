"""A local cluster on which scenarios are played one after another, each from a clean start."""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgspec

from ftd.config.job import load_job_data
from ftd.errors import ConfigurationError, FtdError, PeerError
from ftd.faults.chaos.inject import require_known_nodes
from ftd.faults.chaos.player import ScenarioPlayer, ScenarioResult
from ftd.faults.chaos.values import CentralService, ClusterSetup, SameLosses, Scenario
from ftd.local.cluster import ClusterOptions
from ftd.local.driver import NODES_START_S, LocalDriver
from ftd.local.mounts import mount_tmpfs
from ftd.local.namespaces import unavailable_reason
from ftd.observe.run_model import Fact, JobEndedFact, RecoveryCompletedFact
from ftd.transport.wire.public import JobData
from statemachine.cluster.quarantine import HEALTH_CAUSES

START_S = 120.0
"""Longest time from the submission of the job until training begins."""
LEAVE_S = 10.0
STOP_S = 10.0
_GAP_EVENTS = 200
DISK = "{disk}"
Report = Callable[[str], None]


def cluster_key(setup: ClusterSetup) -> ClusterSetup:
    """Return a key that is equal for scenarios that can share a cluster; their jobs may differ."""
    return msgspec.structs.replace(setup, job="", steps=None, override={})


def require_setup(scenario: Scenario) -> ClusterSetup:
    """Return the scenario's cluster setup.

    :raises ConfigurationError: the scenario has no ``[cluster]``, or a fault that this cluster cannot have.
    """
    if scenario.cluster is None:
        raise ConfigurationError(
            f"{scenario.name} has no [cluster]",
            field="--local",
            remedy="add [cluster] with job and nodes, or run it against a cluster that runs",
        )
    setup = scenario.cluster
    for fault in scenario.faults:
        if fault.do == "cut" and not setup.network:
            raise ConfigurationError(
                f"{fault.id}: cut needs nodes with networks of their own",
                field=scenario.name,
                remedy="write network = true under [cluster]",
            )
        if fault.do == "fill_disk" and setup.disk_mib is None:
            raise ConfigurationError(
                f"{fault.id}: fill_disk needs a disk that may be filled",
                field=scenario.name,
                remedy='write disk_mib under [cluster], and url = "{disk}/…" as override.checkpoint of it',
            )
    return setup


def missing_requirement(setup: ClusterSetup) -> str:
    """Return what this machine lacks for such a cluster, or an empty string if it can run it."""
    if setup.network and (reason := unavailable_reason()):
        return reason
    if setup.memory_mib is not None or setup.disk_mib is not None:
        try:
            with tempfile.TemporaryDirectory() as name, mount_tmpfs(Path(name), 1, "memory_mib"):
                return ""
        except ConfigurationError as error:
            return str(error)
    return ""


class ScenarioCluster:
    """A local cluster for scenarios: ``async with ScenarioCluster(setup, report=print) as cluster``. Nothing
    is left afterwards.
    """

    def __init__(self, setup: ClusterSetup, *, report: Report, logs: Path | None = None) -> None:
        """:param report: takes a line for the user.
        :param logs: the directory for the logs of all processes.
        """
        self._setup = setup
        self._report = report
        options = ClusterOptions(
            devices_per_node=setup.devices_per_node,
            broker=setup.broker,
            timing=setup.timing,
            coordinators=setup.coordinators,
            network=setup.network,
            memory_mib=setup.memory_mib,
            disk_mib=setup.disk_mib,
        )
        nodes = [f"node-{index}" for index in range(setup.nodes)]
        self._driver = LocalDriver(options, nodes, logs=logs)
        self._player: ScenarioPlayer | None = None
        self._started = asyncio.Event()
        self._ended = asyncio.Event()
        self._state_changed = asyncio.Event()
        self._baselines: dict[bytes, dict[int, float]] = {}

    async def __aenter__(self) -> Self:
        """Start the cluster.

        :raises FtdError: it did not start.
        """
        if reason := missing_requirement(self._setup):
            raise ConfigurationError(reason, field="cluster")
        async with contextlib.AsyncExitStack() as undo:
            await undo.enter_async_context(self._driver)
            await undo.enter_async_context(
                self._driver.connected(
                    on_event=self._on_event, on_state=self._on_state, on_node=self._on_node
                )
            )
            self._undo = undo.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._undo.aclose()

    # --- playing -----------------------------------------------------------------------------------

    async def play(self, scenario: Scenario) -> ScenarioResult:
        """Clean the cluster up, train, and play the scenario.

        :raises ConfigurationError: the scenario does not fit this cluster, or its job is wrong.
        :raises FtdError: the cluster could not be cleaned up, or a node would reject a fault.
        """
        setup = require_setup(scenario)
        driver = self._driver
        require_known_nodes(scenario, driver.nodes, scenario.name)
        override = _replace_disk(setup.override, str(driver.disk))
        job = load_job_data(Path(setup.job), steps=setup.steps, override=override)
        baseline = await self._baseline(scenario, job)
        await self._clean_up()
        injector = driver.injector(scenario.seed)
        await injector.check(scenario)
        player = ScenarioPlayer(scenario, inject=injector.inject, report=self._report, baseline=baseline)
        player.on_state(dict(driver.state))
        try:
            await self._train(job)
            self._player = player
            player.start()
            played = asyncio.ensure_future(player.wait_for_result())
            try:
                while not played.done():
                    await asyncio.wait([played], timeout=0.5)
                    for name in driver.ended_services(injector.absent):
                        raise driver.exit_error(name, f"{name} has ended")
                    await self._fill_gaps(player)
                return played.result()
            finally:
                played.cancel()
        finally:
            self._player = None

    async def _fill_gaps(self, player: ScenarioPlayer) -> None:
        """Take from the coordinator's journal the events that were published while the broker was away."""
        if any(
            one.fault.target == CentralService(service="broker") for one in player.record.injected.values()
        ):
            with contextlib.suppress(FtdError):  # Nobody answers while the broker is away.
                for event in await self._driver.client.history(newest=_GAP_EVENTS):
                    player.on_missed_event(event)

    async def _baseline(self, scenario: Scenario, job: JobData) -> dict[int, float]:
        """Return the losses of the same job without faults if the scenario compares them. They are measured
        once.
        """
        if not any(isinstance(one, SameLosses) for one in _all_expectations(scenario)):
            return {}
        key = repr((job.training, job.policy)).encode()
        if len(self._baselines.get(key, {})) < job.steps:
            await self._clean_up()
            self._report(f"          {job.steps} steps without faults, for comparison")
            await self._train(job)
            try:
                async with asyncio.timeout(scenario.limit_s):
                    await self._ended.wait()
            except TimeoutError:
                raise PeerError(
                    f"without any fault the job did not end within limit_s = {scenario.limit_s:g} s, {job.steps} steps "
                    "for comparison (give fewer steps under [cluster], or a greater limit_s)"
                ) from None
            losses = {
                step.step: step.loss for step in self._driver.run.steps.values() if step.loss is not None
            }
            self._baselines[key] = losses
            if len(losses) < job.steps:
                raise PeerError(f"without any fault {len(losses)} of {job.steps} steps were committed")
        return self._baselines[key]

    async def _train(self, job: JobData) -> None:
        """Submit the job, and return when training has begun.

        :raises PeerError: training does not begin, or the job ends before.
        :raises RequestRejected: the job cannot run.
        """
        self._started.clear()
        self._ended.clear()
        submitted = await self._driver.submit(job)
        try:
            async with asyncio.timeout(START_S):
                while not self._started.is_set():
                    state = self._driver.state
                    if (state.get("job") or {}).get("id") == submitted and state.get("phase") == "FAILED":
                        raise PeerError(f"the job failed before its first step: {state.get('outcome')}")
                    self._state_changed.clear()
                    await self._state_changed.wait()
        except TimeoutError:
            waiting = self._driver.state.get("waiting_for")
            raise PeerError(f"the job did not begin within {START_S:g} s; it waits for {waiting}") from None

    # --- cleaning up ---------------------------------------------------------------------------------

    async def _clean_up(self) -> None:
        """Remove what the last scenario left: its job, files on the disk, nodes that it started; start nodes that
        are missing, and readmit those that were set aside.
        """
        driver, state = self._driver, self._driver.state
        if state.get("job") and state.get("phase") not in ("FINISHED", "FAILED"):
            with contextlib.suppress(FtdError):  # It may have ended at this moment.
                await driver.stop(state["job"]["id"])
                # Wait for its end, which must not be taken for the next job's. A killed broker may have
                # lost the event.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), STOP_S)
        for path in driver.disk.iterdir():
            shutil.rmtree(path, ignore_errors=True)
        extra = [name for name in driver.cluster.nodes if name not in driver.nodes]
        await driver.cluster.processes.terminate(extra, grace_s=LEAVE_S)
        driver.cluster.processes.reap_adopted()
        for name in driver.nodes:
            if not driver.cluster.processes.running(name):
                await driver.cluster.start_node(name)
        await driver.ready()
        aside = {name: node for name, node in driver.state["nodes"].items() if node["quarantine"] is not None}
        for name in aside:
            await driver.readmit(name)
        for name, node in aside.items():
            if node["quarantine"]["cause"] in HEALTH_CAUSES:
                await self._await_check(name, node["health"])

    async def _await_check(self, name: str, before: Any) -> None:
        """Wait until a node that was readmitted has passed the health check that it needs for it.

        :param before: the result of its last check.
        :raises PeerError: it does not pass.
        """
        try:
            async with asyncio.timeout(NODES_START_S):
                while self._driver.state["nodes"][name]["health"] == before:
                    self._state_changed.clear()
                    await self._state_changed.wait()
        except TimeoutError:
            raise PeerError(f"{name} made no health check within {NODES_START_S:g} s") from None
        if aside := self._driver.state["nodes"][name]["quarantine"]:
            raise PeerError(f"{name} cannot be readmitted: {aside['reason']}")

    # --- events and states ---------------------------------------------------------------------------

    def _on_event(self, event: dict[str, Any], fact: Fact | None) -> None:
        if self._player is not None:
            self._player.on_event(event)
        if isinstance(fact, RecoveryCompletedFact):  # The first recovery is the start: a step is committed.
            self._started.set()
            self._state_changed.set()
        elif isinstance(fact, JobEndedFact):
            self._ended.set()

    def _on_state(self, state: dict[str, Any]) -> None:
        self._state_changed.set()
        if self._player is not None:
            self._player.on_state(state)

    def _on_node(self, node: str, state: str) -> None:
        if self._player is not None:
            self._player.on_node(node, state)


def _all_expectations(scenario: Scenario) -> tuple[Any, ...]:
    return (*scenario.expect, *(one for fault in scenario.faults for one in fault.expect))


def _replace_disk(value: Any, disk: str) -> Any:
    match value:
        case dict():
            return {key: _replace_disk(inner, disk) for key, inner in value.items()}
        case str():
            return value.replace(DISK, disk)
        case _:
            return value
