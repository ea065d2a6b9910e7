"""The driver of a cluster on this machine, with which ``ftd local``, scenarios and soaks start, follow and end
theirs.
"""

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from ftd.errors import ConfigurationError, PeerError
from ftd.faults.chaos.targets import read_layout
from ftd.local.child_processes import private_directory, shared_memory
from ftd.local.cluster import HUB, ClusterOptions, LocalCluster
from ftd.local.inject import LocalInjector
from ftd.local.mounts import mount_tmpfs
from ftd.local.namespaces import NamespaceNetwork
from ftd.observe.run_model import Fact, RunModel
from ftd.processes import read_tail
from ftd.transport.address import ClusterAddress
from ftd.transport.client import ClusterClient
from ftd.transport.wire.public import JobData, ReadmitRequest, StopRequest, SubmitRequest

REQUEST_S = 10.0
NODES_START_S = 60.0
_LOG_BYTES = 2000
_PROCESS_PERIOD_S = 0.1
"""Period in which the daemons that are waited for are checked."""


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
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        """Start broker and coordinators.

        :raises ConfigurationError: this machine cannot run such a cluster.
        :raises PeerError: the cluster did not start.
        """
        try:
            async with contextlib.AsyncExitStack() as undo:
                await self._start(undo)
                self._undo = undo.pop_all()
        except OSError as error:  # The disk is full, or its limits are reached.
            raise PeerError(
                f"the cluster cannot start: {error.strerror or error}: {error.filename or tempfile.gettempdir()} "
                "(make room there, or set TMPDIR to another directory)"
            ) from None
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._undo.aclose()

    async def _start(self, undo: contextlib.AsyncExitStack) -> None:
        options = self._options
        if self.logs is not None:
            _require_directory(self.logs)
        directory = undo.enter_context(private_directory())
        self.disk = directory / "disk"
        self.disk.mkdir()
        for place, size_mib, name in (
            (shared_memory(directory), options.memory_mib, options.memory_field),
            (self.disk, options.disk_mib, "cluster.disk_mib"),
        ):
            if size_mib is not None:
                undo.enter_context(mount_tmpfs(place, size_mib, name))
        network = undo.enter_context(NamespaceNetwork([HUB, *self.nodes])) if options.network else None
        self.cluster = LocalCluster(directory, options, network)
        self.cluster.on_node_started = self.run.on_daemon  # Its trainers are not up yet.
        self.cluster.processes.kept_logs = self.logs
        undo.push_async_callback(self._end)
        await self.cluster.start_broker()
        await self.cluster.start_coordinators()

    async def _end(self) -> None:
        await asyncio.shield(self.cluster.end())
        if self.logs is not None:
            try:
                shutil.copytree(self.cluster.processes.logs, self.logs, dirs_exist_ok=True)
            except OSError as error:
                # shutil.Error has a list of (source, destination, reason).
                why = error.strerror or error.args[0][0][2]
                raise PeerError(f"the logs cannot be written to {self.logs}: {why}") from None

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
                    await self.cluster.start_node(name)
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
        request = SubmitRequest(**self.client.envelope(), job=job)
        return (await self.client.request(request, timeout_s=timeout_s)).detail

    async def stop(self, job: str) -> None:
        """Stop a job.

        :raises RequestRejected: the job is not running.
        :raises Unreachable: no coordinator answers.
        """
        await self.client.request(StopRequest(**self.client.envelope(), job=job), timeout_s=REQUEST_S)

    async def readmit(self, node: str) -> None:
        """Readmit a node that was set aside.

        :raises RequestRejected: the node is not set aside.
        :raises Unreachable: no coordinator answers.
        """
        request = ReadmitRequest(**self.client.envelope(), node=node)
        await self.client.request(request, timeout_s=REQUEST_S)

    def injector(self, seed: int) -> LocalInjector:
        """Return an injector of faults into this cluster; see ``RemoteInjector`` for the seed."""
        return LocalInjector(self.client, self.cluster, layout=lambda: read_layout(self.state), seed=seed)

    # --- state of the processes -----------------------------------------------------------------------

    async def ready(self, limit_s: float = NODES_START_S) -> None:
        """Wait until the first nodes are healthy and have all their trainers.

        :raises PeerError: they are not in time; the error carries the end of the log of the first node
            that is not.
        """
        for name, why in (await self.await_nodes(limit_s, stop_at_first=True)).items():
            raise self.exit_error(name, why)

    async def await_nodes(
        self, limit_s: float = NODES_START_S, *, stop_at_first: bool = False
    ) -> dict[str, str]:
        """Wait until the first nodes are healthy and have all their trainers, except for those whose daemons
        have ended.

        :param stop_at_first: return as soon as a daemon has ended.
        :returns: the nodes that are not ready, each with the reason as a sentence.
        """
        processes = self.cluster.processes
        deadline = asyncio.get_running_loop().time() + limit_s
        while True:
            late = self.run.list_unready_nodes(self.nodes, self._options.devices_per_node)
            ended = {
                name: f"{name} has ended before it was ready"
                for name in late
                if name in processes.children and not processes.running(name)
            }
            left_s = deadline - asyncio.get_running_loop().time()
            if len(ended) == len(late) or (ended and stop_at_first):
                return ended
            if left_s <= 0:
                return {name: f"{name} was not ready within {limit_s:g} s" for name in late} | ended
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(left_s, _PROCESS_PERIOD_S))

    @property
    def healthy(self) -> bool:
        """Whether all nodes whose daemons run can take a job."""
        running = [name for name in self.cluster.nodes if self.cluster.processes.running(name)]
        return not self.run.list_unready_nodes(running, self._options.devices_per_node)

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


def _require_directory(logs: Path) -> None:
    """Create the directory for the logs, before an hour of training and not after it.

    :raises ConfigurationError: it cannot be created or written.
    """
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "it is a file" if isinstance(error, FileExistsError) else error.strerror
        raise ConfigurationError(
            f"the directory {logs} cannot be created: {why}",
            field="--logs",
            remedy="choose another directory",
        ) from None
    if not os.access(logs, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"{logs} cannot be written", field="--logs", remedy="choose another directory"
        )
