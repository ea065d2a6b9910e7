"""A whole cluster on this machine: broker, coordinators and node daemons as real processes."""

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ftd.config.job_reference import to_toml
from ftd.errors import PeerError, UnreachableError
from ftd.local.child_processes import ChildProcess, ChildProcesses, shared_memory
from ftd.local.namespaces import NamespaceNetwork
from ftd.processes import module_command, read_tail
from ftd.transport.address import BrokerAddress, parse_broker
from ftd.transport.mqtt.embedded import await_ready, embedded_command
from ftd.transport.mqtt.mosquitto import await_listening, free_port, mosquitto_command
from runtime.process.zygote_request import SERVER_VARIABLE, listen
from runtime.streaming_stores import streaming_environment

BROKER = "broker"
COORDINATOR = "coordinator"
HUB = "hub"
RELAY = "relay"
ZYGOTES = "zygotes"
"""The name of the process that imports torch for all nodes."""
BROKER_START_S = 20.0
_BROKER_PERIOD_S = 0.2
HOST = "127.0.0.1"
LOGGED_S = 90.0
"""Longest time that a coordinator may take to complete its logs."""
_MIN_SPEED = 0.25
"""The value of ``health.min_speed``: the nodes share the host's cores, so more of a speed is due to chance than on
hosts of their own.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The kind of cluster to start. Networks, memory and disks of its own are what ``LocalDriver`` provides."""

    devices_per_node: int = 1
    broker: str = "embedded"
    """``embedded``, ``mosquitto``, or the address of a broker that runs already."""
    cluster: str = "local"
    dashboard: bool = False
    """Whether each coordinator serves its dashboard, on a free port of its own."""
    coordinators: int = 1
    """Number of coordinators; one leads, the others are standbys."""
    preload: tuple[str, ...] = ()
    """The value of ``node.preload``. It is empty by default, since the daemons start with the job; a job that
    needs modules names them.
    """
    expected_nodes: int = 0
    """The value of ``coordinator.expected_nodes``."""
    timing: dict[str, float] = field(default_factory=dict)
    """Overrides of ``statemachine.timing.Timing``."""
    quarantine: bool = True
    """Whether nodes that fail repeatedly are set aside."""
    network: bool = False
    """Whether broker and coordinators share a network of their own, and each node has one. This requires mosquitto."""
    memory_mib: int | None = None
    """The memory for the snapshots of all nodes together; ``None`` means all that this machine has."""
    memory_field: str = "cluster.memory_mib"
    """The name of ``memory_mib`` in error messages."""
    disk_mib: int | None = None
    """The size of the file system ``LocalDriver.disk``; ``None`` means all that this machine has."""


class LocalCluster:
    """The processes of a cluster, which it starts and restarts. All of its files are under ``directory``.

    :param network: the network to place the processes in: broker and coordinators on its host ``hub``, each
        node on a host of its own.
    """

    def __init__(
        self, directory: Path, options: ClusterOptions, network: NamespaceNetwork | None = None
    ) -> None:
        self.options, self.network = options, network
        self.directory = directory
        self.processes = ChildProcesses(logs=directory / "logs", environment=shared_environment())
        self._secret = secrets.token_hex(16)
        self._address: BrokerAddress | None = None
        self._node_names: list[str] = []
        self.on_node_started: Callable[[str, int], None] = lambda name, pid: None
        """Callback for each start of a node's daemon, with its name and process id."""
        self._pages = {name: f"{HOST}:{free_port()}" for name in self.coordinators if options.dashboard}

    @property
    def dashboards(self) -> dict[str, str]:
        """The URL of each coordinator's dashboard. Each shows the whole cluster, whichever coordinator leads.
        The result is empty if there is none.
        """
        return {name: f"http://{page}/" for name, page in self._pages.items()}

    @property
    def broker(self) -> BrokerAddress:
        """The address at which this process reaches the broker; the same after a restart."""
        if self._address is None:
            raise PeerError("the broker was not started")
        return self._address

    @property
    def _broker_url(self) -> str:
        """The address at which the cluster's processes reach the broker."""
        if self.network is None:
            return self.broker.url
        return f"mqtt://{self.network.address(HUB)}:{self.broker.port}"

    @property
    def owns_broker(self) -> bool:
        return self.options.broker in ("embedded", "mosquitto")

    @property
    def central_services(self) -> tuple[str, ...]:
        """The processes without which nobody can follow the cluster: coordinators, and the broker if it is
        ours.
        """
        return (BROKER, *self.coordinators) if self.owns_broker else self.coordinators

    @property
    def coordinators(self) -> tuple[str, ...]:
        """The names of the coordinators, which are also the names of their processes."""
        others = range(2, self.options.coordinators + 1)
        return (COORDINATOR, *(f"{COORDINATOR}-{number}" for number in others))

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of all nodes that were ever started, in that order."""
        return tuple(self._node_names)

    async def start_broker(self) -> None:
        """Start the broker, or start it again on the same port, and return when it listens.

        :raises ConfigurationError: mosquitto is requested and not installed, or the address is not valid.
        :raises PeerError: the broker did not start; the error carries the end of its output.
        """
        if not self.owns_broker:
            self._address = parse_broker(self.options.broker, "--broker")
            return
        port = self._address.port if self._address else free_port()
        ready = self.directory / "broker.ready"
        ready.unlink(missing_ok=True)
        embedded = self.options.broker == "embedded"
        host = HOST if self.network is None else "0.0.0.0"
        command = embedded_command(ready, port) if embedded else mosquitto_command(self.directory, port, host)
        child = await self.processes.start(BROKER, self._placed(HUB, command))
        await self._reach(port)
        self._address = BrokerAddress(host=HOST, port=port)

        def wait(timeout_s: float) -> None:
            if embedded:
                await_ready(ready, timeout_s)
            else:
                await_listening(HOST, port, timeout_s)

        listening = asyncio.ensure_future(_repeat(wait, BROKER_START_S))
        ended = asyncio.ensure_future(child.process.wait())
        await asyncio.wait([listening, ended], return_when=asyncio.FIRST_COMPLETED)
        if not listening.done():
            listening.cancel()
            raise PeerError(f"the broker ended with {child.process.returncode}: {read_tail(child.log, 2000)}")
        ended.cancel()
        await listening

    async def _reach(self, port: int) -> None:
        """Make the broker of the other network reachable on the same port of this machine's loopback
        interface.
        """
        if self.network is None or self.processes.running(RELAY):
            return
        listening = socket.create_server((HOST, port))
        try:
            command = module_command("ftd.local.relay", str(listening.fileno()), HOST, str(port))
            await self.processes.start(RELAY, self._placed(HUB, command), inherit=[listening.fileno()])
        finally:
            listening.close()

    def _placed(self, host: str, command: list[str]) -> list[str]:
        if self.network is None:
            return command
        self.network.add(host)
        return self.network.command(host, *command)

    async def start_coordinators(self) -> None:
        """Start all coordinators."""
        for name in self.coordinators:
            await self.start_coordinator(name)

    async def start_coordinator(self, name: str = COORDINATOR) -> ChildProcess:
        """Start a coordinator, or start it again with the same journal and the same dashboard address."""
        page = self._pages.get(name, "")
        tables = (
            f'[coordinator]\nname = "{name}"\nstate_dir = "{self.directory / f"state-{name}"}"\n'
            f"expected_nodes = {self.options.expected_nodes}\n"
            f'[dashboard]\nlisten = "{page}"\n'
        )
        config = self._write(name, tables)
        command = module_command("ftd.cli.main", "coordinator", "--config", str(config))
        return await self.processes.start(name, self._placed(HUB, command))

    async def start_node(self, name: str, devices: int | None = None) -> ChildProcess:
        """Start the daemon of a node, known or new.

        :param devices: the number of devices, if it differs from the other nodes'.
        :raises PeerError: the daemon is running already.
        """
        if name in (BROKER, *self.coordinators, RELAY, HUB, ZYGOTES):
            raise PeerError(f"{name!r} is not free as a node's name here")
        await self._start_zygote_server()
        child = await self.processes.start(name, self.node_command(name, devices))
        if name not in self._node_names:
            self._node_names.append(name)
        self.on_node_started(name, child.pid)
        return child

    async def _start_zygote_server(self) -> None:
        """Start the process that imports torch for all nodes, unless it runs or this process has been given one."""
        if self.processes.running(ZYGOTES) or SERVER_VARIABLE in os.environ:
            return
        path = self.directory / f"{ZYGOTES}.sock"
        with listen(path) as listener:
            descriptor = listener.fileno()
            arguments = ("--parent", str(os.getpid()), "--listener", str(descriptor))
            command = module_command("runtime.process.zygote_server", *arguments)
            await self.processes.start(ZYGOTES, command, inherit=[descriptor])
        self.processes.environment[SERVER_VARIABLE] = str(path)

    def node_command(self, name: str, devices: int | None = None) -> list[str]:
        """Return the command that runs the daemon of ``name``."""
        runtime = self.directory / "run" / name
        host = HOST
        if self.network is not None:
            self.network.add(name)
            host = self.network.address(name)
        table = (
            f'[node]\nname = "{name}"\nhost = "{host}"\n'
            f"devices = {devices or self.options.devices_per_node}\n"
            f'chaos = true\nruntime_dir = "{runtime}"\nsnapshot_dir = "{shared_memory(self.directory)}"\n'
            f"preload = {list(self.options.preload)}\n"
        )
        config = self._write(name, table)
        return self._placed(name, module_command("ftd.cli.main", "node", "--config", str(config)))

    def pid(self, name: str) -> int:
        """Return the process id of a running process.

        :raises PeerError: it is not running.
        """
        if not self.processes.running(name):
            raise PeerError(f"{name} is not running")
        return self.processes.children[name].pid

    async def kill(self, name: str) -> None:
        """SIGKILL the broker, a coordinator or a node's daemon, whose trainers die with it.

        :raises PeerError: it is not running.
        """
        self.pid(name)
        await self.processes.kill(name)

    async def restart(self, name: str) -> int:
        """Start the broker, a coordinator or a node's daemon again, and return its pid.

        :raises PeerError: it is running already, or did not start.
        """
        if name == BROKER:
            await self.start_broker()
        elif name in self.coordinators:
            await self.start_coordinator(name)
        else:
            await self.start_node(name)
        return self.pid(name)

    async def freeze(self, name: str, for_s: float) -> None:
        """SIGSTOP a process, and SIGCONT it after ``for_s``, also if this call is cancelled.

        :raises PeerError: the process is not running, or ended meanwhile.
        """
        pid = self.pid(name)
        try:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(for_s)
        except ProcessLookupError:
            raise PeerError(f"the {name} has ended") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    async def stop_coordinators(self) -> None:
        """Ask the coordinators to end, so that what they log about a job is complete."""
        await self.processes.terminate(self.coordinators, grace_s=LOGGED_S)

    async def end(self) -> None:
        """End every process and free the shared memory."""
        await self.processes.end()
        shutil.rmtree(shared_memory(self.directory), ignore_errors=True)

    def _write(self, name: str, tables: str) -> Path:
        timing = "".join(f"{key} = {value}\n" for key, value in self.options.timing.items())
        quarantine = "" if self.options.quarantine else "[quarantine]\nfailures = 0\n"
        path = self.directory / f"{name}.toml"
        path.write_text(
            f'cluster = "{self.options.cluster}"\nsecret = "{self._secret}"\n'
            f'[broker]\nurl = "{self._broker_url}"\n{_credentials(self.broker)}'
            f"{quarantine}[health]\nmin_speed = {_MIN_SPEED}\n[timing]\n{timing}{tables}"
        )
        path.chmod(0o600)
        return path


async def _repeat(wait: Callable[[float], None], limit_s: float) -> None:
    """Call a function that waits for at most its argument, in seconds, until it succeeds. Nobody can cancel a thread,
    so Ctrl-C takes effect between the calls.

    :raises UnreachableError: it did not succeed within ``limit_s``.
    """
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return await asyncio.to_thread(wait, _BROKER_PERIOD_S)
        except UnreachableError:
            if time.monotonic() > deadline:
                raise


def _credentials(broker: BrokerAddress) -> str:
    if broker.username is None:
        return ""
    return f"username = {to_toml(broker.username)}\npassword = {to_toml(broker.password or '')}\n"


def shared_environment() -> dict[str, str]:
    """Return one thread per process, since all share this machine's cores, and the settings with which nodes
    copy under systemd.
    """
    return {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | streaming_environment(os.environ)
