"""The injector of a soak: it injects the drawn faults into a local cluster, and restarts what it took away."""

import asyncio
import contextlib
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftd.errors import FtdError, PeerError
from ftd.faults.chaos.inject import RemoteInjector
from ftd.faults.chaos.targets import read_layout
from ftd.faults.chaos.values import AfterTime, Fault, NamedNodes, Process
from ftd.local.cluster import BROKER, LocalCluster
from ftd.local.soak.draw import CENTRAL_FAULTS, IMPAIRING, DrawnFault
from ftd.local.soak.monitor import SoakMonitor
from ftd.local.soak.report import FaultRecord
from ftd.processes import child_pids, read_tail
from ftd.tasks import cancel_all, start_task
from ftd.transport.client import ClusterClient
from ftd.transport.wire.public import NodeFault

_GOOD_STATES = frozenset({"HEALTHY", "SNAP", "COMPLETED"})
_SETTLED_S = 1.0
"""Time for which a node must be healthy to count as recovered."""
_ORPHAN_S = 5.0
"""Longest time for which a process may outlive its killed parent."""
_LEAVE_S = 60.0
"""Longest time that a node may take to leave after it was asked to."""
_LATE_S = 2.0
"""The longest delay of a message in a lossy session that loses everything; in proportion for others."""
_LEADER_SHARE = 0.75
"""The share of coordinator faults that target the leader if there are standbys."""
_REQUESTS: dict[str, tuple[NodeFault, Process]] = {
    "kill_trainer": ("kill", "trainer"),
    "term": ("term", "node"),
    "stop": ("stop", "node"),
    "stop_trainer": ("stop", "trainer"),
    "hang": ("hang", "trainer"),
    "raise": ("raise", "trainer"),
    "slow": ("slow", "trainer"),
    "disconnect": ("disconnect", "node"),
    "lossy": ("lossy", "node"),
    "flip": ("flip", "trainer"),
    "fill_memory": ("fill_memory", "node"),
}
"""Faults that a node injects into itself when it is asked over MQTT."""


class SoakInjector:
    """The injector of a soak's faults, which keeps track of the nodes that may be targeted now.

    :param tolerate: the maximum number of nodes that are impaired at once, unless ``beyond``.
    :param seed: the seed of lossy sessions.
    :param memory_mib: the size of the file system that may be filled, if there is one.
    """

    def __init__(
        self,
        client: ClusterClient,
        cluster: LocalCluster,
        monitor: SoakMonitor,
        *,
        tolerate: int,
        beyond: bool,
        seed: int,
        memory_mib: int | None = None,
    ) -> None:
        self._memory_mib = memory_mib
        self._cluster, self._monitor = cluster, monitor
        self._tolerate, self._beyond = tolerate, beyond
        self._remote = RemoteInjector(client, layout=lambda: read_layout(monitor.state), seed=seed)
        self.injected: list[FaultRecord] = []
        self._away: set[str] = set()
        """Processes that were ended on purpose."""
        self._impaired: dict[str, float] = {}
        """Impaired nodes, with the time at which their fault is over."""
        self._well_since: dict[str, float] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._orphans: dict[int, float] = {}
        self._own_children = child_pids()
        """Child processes that existed before the soak."""
        self._updated_at_s = 0.0

    # --- state of the cluster ----------------------------------------------------------------------

    def update(self, at_s: float) -> None:
        """Note which nodes have recovered, which processes ended by themselves, and which outlived their
        parents.
        """
        self._updated_at_s = at_s
        for name in list(self._impaired):
            if at_s >= self._impaired[name] and self._is_well(name):
                since = self._well_since.setdefault(name, at_s)
                if at_s - since >= _SETTLED_S:
                    del self._impaired[name], self._well_since[name]
            else:
                self._well_since.pop(name, None)
        self._monitor.excused |= len(self._impaired) > self._tolerate
        for name in (*self._cluster.central_services, *self._cluster.nodes):
            if name not in self._away and not self._cluster.processes.running(name):
                self._away.add(name)
                child = self._cluster.processes.children[name]
                output = read_tail(child.log, 1500)
                self._monitor.add_violation(
                    at_s, "process", f"{name} ended by itself with {child.process.returncode}: {output}"
                )
        self._check_orphans(at_s)

    def _node(self, name: str) -> Mapping[str, Any]:
        """Return the state of a node; empty if the cluster does not know it."""
        return (self._monitor.state.get("nodes") or {}).get(name) or {}

    def _is_well(self, name: str) -> bool:
        node = self._node(name)
        up = self._cluster.processes.running(name) and node.get("state") in _GOOD_STATES
        idle_job = self._monitor.job is None or bool(self._monitor.ended)
        trains = self._monitor.state.get("phase") == "RUNNING" and bool(node.get("in_plan"))
        return up and (idle_job or trains)

    def _check_orphans(self, at_s: float) -> None:
        """Report orphans of killed nodes that are still running. This process adopts them; the kernel should
        end them at once.
        """
        self._orphans = {pid: self._orphans.get(pid, at_s) for pid in self._adopted()}
        for pid, since in self._orphans.items():
            if at_s - since > _ORPHAN_S:
                self._own_children.add(pid)
                self._monitor.add_violation(
                    at_s, "left_over", f"process {pid} outlived its node: {_command(pid)}"
                )

    def may_inject(self, drawn: DrawnFault) -> bool:
        """Return whether the losses that the job tolerates leave room for this fault."""
        free = len(self._impaired) < self._tolerate
        return free or self._beyond or drawn.do not in IMPAIRING

    @property
    def all_recovered(self) -> bool:
        """Whether no fault is under way and all nodes are healthy."""
        up = all(self._node(name).get("state") in _GOOD_STATES for name in self._cluster.nodes)
        return not self._running and not self._impaired and up

    # --- injecting ---------------------------------------------------------------------------------

    def inject(self, drawn: DrawnFault, at_s: float) -> None:
        """Begin to inject a fault; a task does the rest."""
        able = [
            name
            for name in self._cluster.nodes
            if self._cluster.processes.running(name) and name not in self._away and name not in self._impaired
        ]
        node = drawn.choose_node(able)
        if node is None and drawn.do not in CENTRAL_FAULTS:
            self._record(drawn, None, at_s, "no node is available")
            return
        until_s = at_s + drawn.for_s
        if node is not None and drawn.do in IMPAIRING:
            self._impaired[node] = until_s
        self._monitor.on_injected(node, drawn.do, until_s)
        start_task(self._carry_out(drawn, node, at_s), self._running)

    async def _carry_out(self, drawn: DrawnFault, node: str | None, at_s: float) -> None:
        problem = ""
        try:
            match drawn.do:
                case "kill_broker":
                    await self._kill_service(BROKER, drawn.for_s)
                case "kill_coordinator":
                    await self._kill_service(self._choose_coordinator(drawn), drawn.for_s)
                case "stop_coordinator":
                    await self._freeze(self._choose_coordinator(drawn), drawn.for_s)
                case "kill":
                    await self._kill(str(node), drawn.for_s)
                case "term":
                    await self._terminate(drawn, str(node))
                case _:
                    await self._request(drawn, str(node))
        except FtdError as error:
            problem = str(error)
        except (
            Exception
        ) as error:  # Nobody awaits this task: an error that is not reported here would be lost.
            problem = f"{type(error).__name__}: {error}"
            self._monitor.add_violation(
                at_s, "injection", f"{drawn.do} of {node or 'the cluster'} failed: {problem}"
            )
        self._record(drawn, node, at_s, problem)

    def _record(self, drawn: DrawnFault, node: str | None, at_s: float, problem: str) -> None:
        self.injected.append(
            FaultRecord(
                number=drawn.number,
                at_s=round(at_s, 3),
                fault=drawn.do,
                node=node,
                for_s=drawn.for_s,
                factor=drawn.factor,
                problem=problem,
            )
        )

    def _choose_coordinator(self, drawn: DrawnFault) -> str:
        """Return the targeted coordinator: mostly the leader."""
        names = self._cluster.coordinators
        leader = read_layout(self._monitor.state).leader
        return leader if leader in names and drawn.position < _LEADER_SHARE else names[-1]

    async def _kill_service(self, name: str, for_s: float) -> None:
        if name in self._away:
            raise PeerError(f"the {name} is away already")
        await self._kill(name, for_s)

    async def _freeze(self, name: str, for_s: float) -> None:
        if name in self._away:
            raise PeerError(f"the {name} is away")
        await self._cluster.freeze(name, for_s)

    async def _kill(self, name: str, for_s: float) -> None:
        """SIGKILL the broker, a coordinator or a node's daemon (its zygote and trainers die with it), and
        restart it later.
        """
        self._away.add(name)
        try:
            await self._cluster.kill(name)
        except FtdError:  # It ended by itself just then, which ``update`` reports.
            self._away.discard(name)
            raise
        await asyncio.sleep(for_s)
        await self._restart(name)

    async def _terminate(self, drawn: DrawnFault, node: str) -> None:
        """Ask a node to leave, and start it again later."""
        self._away.add(node)
        try:
            await self._request(drawn, node)
            await asyncio.wait_for(self._cluster.processes.children[node].process.wait(), _LEAVE_S)
        except TimeoutError:
            self._away.discard(node)
            raise PeerError(f"{node} did not leave within {_LEAVE_S:g} s") from None
        except FtdError:
            self._away.discard(node)
            raise
        await asyncio.sleep(drawn.for_s)
        await self._restart(node)

    async def _restart(self, name: str) -> None:
        try:
            await self._cluster.restart(name)
        except FtdError as error:
            self._monitor.add_violation(self._updated_at_s, "process", f"{name} did not come back: {error}")
        else:
            self._away.discard(name)

    async def _request(self, drawn: DrawnFault, node: str) -> None:
        do, process = _REQUESTS[drawn.do]
        lost = drawn.factor if do == "lossy" else 0.0
        fault = Fault(
            id=f"soak-{drawn.number}",
            trigger=AfterTime(delay_s=0.0),
            do=do,
            target=NamedNodes(names=(node,)),
            process=process,
            for_s=drawn.for_s or None,
            factor=drawn.factor if do == "slow" else None,
            size_mib=self._memory_mib if do == "fill_memory" else None,
            drop=lost,
            duplicate=lost,
            late_s=round(_LATE_S * lost, 3),
        )
        await self._remote.inject(fault)

    async def finish(self, within_s: float) -> None:
        """Wait for the faults that are under way."""
        if self._running:
            await asyncio.wait(set(self._running), timeout=within_s)

    async def cancel(self) -> None:
        """Stop injecting."""
        await cancel_all(self._running)

    # --- the end -----------------------------------------------------------------------------------

    async def end_nodes(self, at_s: float, grace_s: float) -> None:
        """Send SIGTERM to all nodes. Each must end by itself and leave no process."""
        fleet = self._cluster.processes
        for name in self._cluster.nodes:
            self._monitor.on_injected(name, "end", at_s + grace_s)
        names = [name for name in self._cluster.nodes if fleet.running(name)]
        self._away.update(self._cluster.nodes)
        await fleet.terminate(names, grace_s)
        for name in names:
            code = fleet.children[name].process.returncode
            joined = self._node(name).get("state") in _GOOD_STATES
            # A node that has just been started may not handle signals yet.
            if code != 0 and (joined or code != -signal.SIGTERM):
                ending = "had to be killed" if code == -9 else f"ended with {code}"
                self._monitor.add_violation(
                    at_s, "left_over", f"{name} {ending}, {grace_s:g} s after SIGTERM"
                )
        deadline = asyncio.get_running_loop().time() + _ORPHAN_S
        while left := self._adopted():
            if asyncio.get_running_loop().time() > deadline:
                what = "; ".join(f"{pid}: {_command(pid)}" for pid in sorted(left))
                self._monitor.add_violation(at_s, "left_over", f"processes outlived all nodes: {what}")
                return
            await asyncio.sleep(0.05)

    def _adopted(self) -> set[int]:
        self._cluster.processes.reap_adopted()
        return child_pids() - {c.pid for c in self._cluster.processes.children.values()} - self._own_children


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        output = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        return output.decode(errors="replace").strip()[:200]
    return "already ended"
