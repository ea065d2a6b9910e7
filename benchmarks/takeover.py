"""Time from a signal to the leading coordinator until its standby leads, and until it answers a client.

    python -m benchmarks.takeover --times 10

``kill`` is SIGKILL, which the broker reports by the last will; ``stop`` is SIGSTOP, which is detected as
silence (``timing.leader_silence_s``, 2.5 s). It uses real processes, mosquitto and default settings. Before
the next signal, the coordinator that got the previous one runs again as a standby.
"""

import argparse
import asyncio
import contextlib
import os
import signal
import time
from typing import Any

from benchmarks.common import Limit, Result, Summary, command_line, main
from ftd.errors import UnreachableError
from ftd.local.child_processes import private_directory
from ftd.local.cluster import ClusterOptions, LocalCluster
from ftd.transport.address import ClusterAddress
from ftd.transport.client import ClusterClient
from ftd.transport.wire.public import StatusRequest
from statemachine.timing import Timing

PATIENCE_S = 60.0
ASK_S = 0.1
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
STEPPED_DOWN = "stepped_down"
"""Log event of a coordinator that has lost the leadership."""
MARGIN_S = 1.0
"""Largest allowed time of a takeover beyond the wait that the settings require."""


class Pair:
    """Two coordinators and a client."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.state: dict[str, Any] = {}
        self.elected: asyncio.Queue[float] = asyncio.Queue()

    def on_state(self, state: dict[str, Any]) -> None:
        self.state = state

    async def follow(self, client: ClusterClient) -> None:
        async for event in client.events():
            if event["event"] == "LeaderElected":
                self.elected.put_nowait(time.monotonic())

    async def wait_for_standby(self) -> str:
        """Wait until one coordinator leads and the other one is its standby; return the leader's name."""
        deadline = time.monotonic() + PATIENCE_S
        while not (self.state.get("leader") and self.state.get("standbys")):
            if time.monotonic() > deadline:
                raise RuntimeError(f"no leader with a standby within {PATIENCE_S:g} s: {self.state}")
            await asyncio.sleep(0.02)
        return str(self.state["leader"])

    async def signal_leader(self, client: ClusterClient, what: str) -> tuple[float, float]:
        """Send the signal to the leader; return the seconds until LeaderElected, and until the first answer."""
        leader = await self.wait_for_standby()
        pid = self.cluster.pid(leader)
        began = time.monotonic()
        os.kill(pid, SIGNALS[what])
        elected_at, answered_at = await asyncio.gather(
            asyncio.wait_for(self.elected.get(), PATIENCE_S), self.wait_for_answer(client)
        )
        if what == "stop":
            log = self.cluster.processes.children[leader].log
            before = log.read_text().count(STEPPED_DOWN)
            os.kill(pid, signal.SIGCONT)
            deadline = time.monotonic() + PATIENCE_S
            while log.read_text().count(STEPPED_DOWN) == before:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{leader} did not log that it stepped down")
                await asyncio.sleep(0.05)
        else:
            self.state = {}
            await self.cluster.processes.children[leader].process.wait()
            await self.cluster.start_coordinator(leader)
        return elected_at - began, answered_at - began

    async def wait_for_answer(self, client: ClusterClient) -> float:
        while True:
            envelope = client.envelope()
            with contextlib.suppress(UnreachableError):
                request = StatusRequest(request=envelope["request"], reply=envelope["reply"])
                await client.request(request, timeout_s=ASK_S)
                return time.monotonic()


async def measure(times: int) -> Result:
    result = Result(
        name="takeover",
        what=f"Milliseconds from the signal, {times} times each: minimum / median / maximum",
        columns=("leader", "standby elected", "next request accepted"),
    )
    waits_s = {"kill": 0.0, "stop": Timing().leader_silence_s}
    with private_directory() as directory:
        cluster = LocalCluster(directory, ClusterOptions(broker="mosquitto", coordinators=2))
        try:
            await cluster.start_broker()
            await cluster.start_coordinators()
            pair = Pair(cluster)
            address = ClusterAddress(broker=cluster.broker, cluster=cluster.options.cluster)
            async with ClusterClient(address, listen=True, on_state=pair.on_state) as client:
                following = asyncio.ensure_future(pair.follow(client))
                for what in SIGNALS:
                    found = [await pair.signal_leader(client, what) for _ in range(times)]
                    elected, answered = (
                        Summary(values=tuple(1000 * value for value in column))
                        for column in zip(*found, strict=True)
                    )
                    result.rows.append((what, str(elected), str(answered)))
                    result.data[what] = {"elected_ms": elected.values, "answered_ms": answered.values}
                    limit_ms = 1000 * (waits_s[what] + MARGIN_S)
                    name = f"{what}: next request accepted, median, ms"
                    result.limits.append(Limit(name=name, measured=answered.median, limit=limit_ms))
                following.cancel()
        finally:
            await cluster.end()
    return result


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--times", type=int, default=10)
    return parser.parse_args()


if __name__ == "__main__":
    parsed = parse()
    main(asyncio.run(measure(parsed.times)), parsed.out)
