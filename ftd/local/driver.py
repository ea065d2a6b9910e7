"""The driver of a cluster on this machine, with which ``ftd local``, scenarios and soaks start, follow and end
theirs.
"""

import asyncio
import contextlib
import dataclasses
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from ftd.errors import PeerError
from ftd.local.child_processes import private_directory, shared_memory
from ftd.local.cluster import HUB, ClusterOptions, LocalCluster
from ftd.local.mounts import mount_tmpfs
from ftd.local.namespaces import NamespaceNetwork
from ftd.observe.run_model import Fact, RunModel
from ftd.processes import read_tail
from ftd.transport.address import ClusterAddress
from ftd.transport.client import ClusterClient
from ftd.transport.wire.public import JobData, StopRequest, SubmitRequest

REQUEST_S = 10.0
NODES_START_S = 60.0
_LOG_BYTES = 2000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterResources:
    """Resources that a cluster has for itself on this machine."""

    memory_mib: int | None = None
    """The memory for the snapshots of all nodes together; ``None`` means all that this machine has."""
    disk_mib: int | None = None
    """The size of the file system ``LocalDriver.disk``; ``None`` means all that this machine has."""
    network: bool = False
    """Whether broker and coordinators share a network of their own, and each node has one."""
    memory_field: str = "cluster.memory_mib"
    """The name of ``memory_mib`` in error messages."""


class LocalDriver:
    """The driver that starts, follows and ends a local cluster: ``async with LocalDriver(options, names) as
    driver, driver.connected(...)``.

    Broker and coordinators run inside the first block, nodes inside the second one. Afterwards nothing is
    left.

    :param logs: the directory for the logs of all processes; it may be set until the first block ends.
    """

    def __init__(
        self,
        options: ClusterOptions,
        nodes: Sequence[str],
        *,
        resources: ClusterResources | None = None,
        logs: Path | None = None,
    ) -> None:
        self.nodes = tuple(nodes)
        """The nodes that the cluster starts with."""
        self.logs = logs
        self.run = RunModel()
        """The model of what was observed of the cluster."""
        self.cluster: LocalCluster
        """The cluster's processes; available inside the first block."""
        self.client: ClusterClient
        self.following: asyncio.Task[None]
        """The task that follows the events. It never ends by itself, and fails when the events cannot be
        followed any more.
        """
        self.disk: Path
        """A directory for checkpoints."""
        self._options = options
        self._resources = resources or ClusterResources()
        self._devices = options.devices_per_node
        self._changed = asyncio.Event()
        self._undo = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Start broker and coordinators.

        :raises ConfigurationError: this machine cannot run such a cluster.
        :raises PeerError: the cluster did not start.
        """
        try:
            await self._start()
        except BaseException:
            await self._undo.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._undo.aclose()

    async def _start(self) -> None:
        undo, resources, options = self._undo, self._resources, self._options
        directory = undo.enter_context(private_directory())
        self.disk = directory / "disk"
        self.disk.mkdir()
        for place, size_mib, name in (
            (shared_memory(directory), resources.memory_mib, resources.memory_field),
            (self.disk, resources.disk_mib, "cluster.disk_mib"),
        ):
            if size_mib is not None:
                undo.enter_context(mount_tmpfs(place, size_mib, name))
        if resources.network:
            options = dataclasses.replace(
                options, network=undo.enter_context(NamespaceNetwork([HUB, *self.nodes]))
            )
        self.cluster = LocalCluster(directory, options)
        undo.push_async_callback(self._end)
        await self.cluster.start_broker()
        await self.cluster.start_coordinators()

    async def _end(self) -> None:
        await asyncio.shield(self.cluster.end())
        if self.logs is not None:
            shutil.copytree(self.cluster.processes.logs, self.logs, dirs_exist_ok=True)

    @contextlib.asynccontextmanager
    async def connected(
        self,
        *,
        on_event: Callable[[dict[str, Any], Fact | None], None],
        on_state: Callable[[dict[str, Any]], None],
        on_node: Callable[[str, str], None] | None = None,
        on_broker: Callable[[bool], None] | None = None,
    ) -> AsyncIterator[None]:
        """Follow the cluster, and run its nodes, for as long as the block runs.

        :param on_event: takes every event with its meaning; see ``RunModel.on_event``.
        """

        def take_state(state: dict[str, Any]) -> None:
            self.run.on_state(state)
            self._changed.set()
            on_state(state)

        async def follow() -> None:
            async for event in self.client.events():
                fact = self.run.on_event(event)
                self._changed.set()
                on_event(event, fact)

        async with ClusterClient(
            self.address, listen=True, on_state=take_state, on_node=on_node, on_broker=on_broker
        ) as self.client:
            self.following = asyncio.ensure_future(follow())
            try:
                for name in self.nodes:
                    await self.start_node(name)
                yield
            finally:
                self.following.cancel()
                await asyncio.gather(self.following, return_exceptions=True)

    # --- requests ------------------------------------------------------------------------------------

    @property
    def address(self) -> ClusterAddress:
        """The address at which clients find the cluster."""
        return ClusterAddress(broker=self.cluster.broker, cluster=self._options.cluster)

    @property
    def state(self) -> Mapping[str, Any]:
        """The cluster's newest published state."""
        return self.run.state

    async def submit(self, job: JobData, timeout_s: float = REQUEST_S) -> str:
        """Submit a job and return its id.

        :raises RequestRejected: the job cannot run.
        :raises Unreachable: no coordinator answers.
        """
        request = SubmitRequest(**self._envelope(), job=job)
        return (await self.client.request(request, timeout_s=timeout_s)).detail

    async def stop(self, job: str) -> None:
        """Stop a job.

        :raises RequestRejected: the job is not running.
        :raises Unreachable: no coordinator answers.
        """
        await self.client.request(StopRequest(**self._envelope(), job=job), timeout_s=REQUEST_S)

    def _envelope(self) -> dict[str, Any]:
        envelope = self.client.envelope()
        return {"request": envelope["request"], "reply": envelope["reply"]}

    async def start_node(self, name: str) -> None:
        """Start the daemon of a node, known or new.

        :raises PeerError: it is running already.
        """
        self.on_start(name, (await self.cluster.start_node(name)).pid)

    def on_start(self, name: str, pid: int) -> None:
        """Note that a daemon was started, so its trainers are not up yet."""
        self.run.on_daemon(name, pid)

    # --- state of the processes -----------------------------------------------------------------------

    async def ready(self, limit_s: float = NODES_START_S) -> None:
        """Wait until the first nodes are healthy and have all their trainers.

        :raises PeerError: they are not in time; the error carries the end of the log of the first node
            that is not.
        """
        try:
            async with asyncio.timeout(limit_s):
                while self.run.list_unready_nodes(self.nodes, self._devices):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            # The message may have arrived together with the timeout.
            if late := self.run.list_unready_nodes(self.nodes, self._devices):
                raise self.exit_error(late[0], f"{late[0]} was not ready within {limit_s:g} s") from None

    @property
    def healthy(self) -> bool:
        """Whether all nodes whose daemons run can take a job."""
        running = [name for name in self.cluster.nodes if self.cluster.processes.running(name)]
        return not self.run.list_unready_nodes(running, self._devices)

    def ended_services(self, absent: set[str]) -> list[str]:
        """Return which of the broker and the coordinators have ended, except those in ``absent``, which are
        away on purpose.
        """
        self.cluster.processes.reap_adopted()
        return [
            name
            for name in self.cluster.central_services
            if not self.cluster.processes.running(name) and name not in absent
        ]

    def exit_error(self, name: str, what: str) -> PeerError:
        """Return an error about a process that carries the end of its log."""
        output = read_tail(self.cluster.processes.logs / f"{name}.log", _LOG_BYTES)
        return PeerError(f"{what}; the end of its log:\n{output}" if output else what)

    async def run_guarded(self, work: Awaitable[Any], *guards: asyncio.Future[None]) -> None:
        """Await ``work``. An error of a guard, or of the task that follows the events, ends it."""
        task = asyncio.ensure_future(work)
        watched_futures = (self.following, *guards)
        try:
            await asyncio.wait([task, *watched_futures], return_when=asyncio.FIRST_COMPLETED)
            for guard in watched_futures:
                if guard.done():
                    guard.result()
            await task
        finally:
            task.cancel()
