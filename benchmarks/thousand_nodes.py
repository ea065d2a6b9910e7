"""The coordinator with 1,000 nodes on one core: its load, its decision latency and its memory for each node.

    python -m benchmarks.thousand_nodes --singles 60 --bursts 3

mosquitto runs on the last core, the real ``ftd coordinator`` alone on core 0, and ``benchmarks.crowd`` in
the time that these two leave of both: 1,000 MQTT sessions, each with its last will, a heartbeat every
second, and a node's answers. Nodes are killed by closing their sockets, one at a time and 100 at once, each
time after a step was committed, at a random moment of the next one.

Four times are measured from the kill: until the coordinator ordered all nodes to stop (the loss is known);
until all nodes have reported and the step and the plan are decided (journaled, and being sent to the
nodes); until another client of the broker read that event, which is published after the command to all
nodes; and until the last node received the command. The first two are the events' own times, which are of
the same clock. Broker and crowd, which would be on other hosts, are part of these times, so the table also
has the CPU time of each. Load is CPU time of the coordinator's process over wall time while the job trains.

The templates for 1,000 nodes take a minute of CPU time; ``--plans DIR`` keeps them for the next run.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks.clusters import FTD
from benchmarks.common import Limit, Result, command_line, main
from benchmarks.crowd import STEP_S
from benchmarks.packets import (
    PUBLISH,
    Splitter,
    connect_packet,
    puback_packet,
    publish_packet,
    published,
    subscribe_packet,
)
from ftd.transport.mqtt.mosquitto import await_listening, free_port, mosquitto_command
from ftd.transport.wire.topics import Topics

CLUSTER = "crowd"
LAYERS = 24
MICROBATCHES = 4096
BURST = 100
SETTLE_S = 3.0
PATIENCE_S = 900.0
LOAD_LIMIT = 0.5
LATENCY_LIMIT_MS = 100.0
LAST = (os.cpu_count() or 1) - 1
"""Core of all processes that are pinned and are not the coordinator."""
PROCESSES = ("coordinator", "mosquitto", "crowd")


class Observer:
    """A client of the broker that records events with their times of arrival and sends requests."""

    def __init__(self, port: int, cluster: str) -> None:
        self.topics = Topics(cluster=cluster)
        self.events: list[tuple[float, dict[str, Any]]] = []
        self.decided: Callable[[], None] = lambda: None
        """Callback that runs as soon as a PlanChosen is read."""
        self.state_bytes = self.states = 0
        self._sock = socket.create_connection(("127.0.0.1", port))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.sendall(
            connect_packet("observer", keep_alive_s=0)
            + subscribe_packet(
                1, [self.topics.events, self.topics.cluster_state, self.topics.reply("observer")]
            )
        )
        threading.Thread(target=self._read, daemon=True).start()

    def request(self, **request: Any) -> None:
        payload = {"request": f"r{time.monotonic_ns()}", "reply": "observer", **request}
        packet = publish_packet(self.topics.request.encode(), json.dumps(payload).encode(), 1)
        self._sock.sendall(packet)

    def read(self, name: str, since: float = 0.0) -> list[tuple[float, dict[str, Any]]]:
        return [(at, event) for at, event in list(self.events) if at >= since and event["event"] == name]

    def _read(self) -> None:
        # This thread stands for another host and must not wait for processes that use this host's cores.
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        splitter = Splitter()
        while data := self._sock.recv(1 << 20):
            for first, body in splitter.feed(data):
                if first & 0xF0 != PUBLISH:
                    continue
                at = time.monotonic()
                topic, payload, _, number = published(first, body)
                if number:
                    self._sock.sendall(puback_packet(number))
                if topic.endswith("/events"):
                    if b'"event":"PlanChosen"' in payload[:200]:
                        self.decided()
                    self.events.append((at, json.loads(payload)))
                elif topic.endswith("/state"):
                    self.states, self.state_bytes = self.states + 1, len(payload)
                elif not json.loads(payload)["accepted"]:
                    raise SystemExit(f"request rejected: {payload!r}")


def cpu_ms(pid: int) -> float:
    """Return the CPU ms of all threads of a process, to the microsecond; ``stat`` has hundredths of a second."""
    spent = (int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(spent) / 1e6


def on_cores(first: int, last: int) -> list[str]:
    return ["taskset", "--cpu-list", f"{first}-{last}"]


class Crowd:
    """Process of ``benchmarks.crowd``, controlled by orders on its stdin."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, "-m", "benchmarks.crowd", str(port), CLUSTER]
        self._process = subprocess.Popen(
            [*on_cores(0, LAST), "nice", "-n", "19", *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def do(self, order: str, **rest: Any) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps({"do": order, **rest}).encode() + b"\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise RuntimeError("the crowd ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


class Bench:
    """All processes of the benchmark, and their measurements."""

    def __init__(self, directory: Path, arguments: argparse.Namespace) -> None:
        self.names = [f"node-{number:04d}" for number in range(arguments.nodes)]
        self._state = directory / "state"
        self._log: BinaryIO = (directory / "coordinator.log").open("wb")
        self._plans: Path | None = arguments.plans
        if self._plans is not None and self._plans.exists():
            shutil.copytree(self._plans, self._state / "plans")
        port = free_port()
        config = directory / "ftd.toml"
        config.write_text(
            f'cluster = "{CLUSTER}"\n[broker]\nurl = "mqtt://127.0.0.1:{port}"\n'
            f'[coordinator]\nstate_dir = "{self._state}"\n'
            "[timing]\nheartbeat_s = 1.0\nsilence_s = 10.0\nquiesce_s = 30.0\nhang_floor_s = 2.0\n"
        )
        self.broker = subprocess.Popen([*on_cores(LAST, LAST), *mosquitto_command(directory, port)])
        await_listening("127.0.0.1", port, 10.0)
        self.coordinator = subprocess.Popen(
            ["nice", "-n", "-15", *on_cores(0, 0), FTD, "coordinator", "--config", config],
            stderr=self._log, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.observer = Observer(port, CLUSTER)
        self.crowd = Crowd(port)
        self.pids = (self.coordinator.pid, self.broker.pid, self.crowd.pid)
        self.spent: list[float] = []
        """CPU ms of each of ``PROCESSES`` from the last kill until the decision was read."""
        self._chance = random.Random(0)

    def close(self) -> None:
        if self._plans is not None and (self._state / "plans").exists():
            shutil.copytree(self._state / "plans", self._plans, dirs_exist_ok=True)
        self.crowd.close()
        for process in (self.coordinator, self.broker):
            process.terminate()
            process.wait()
        self._log.close()

    # --- observation -------------------------------------------------------------------------------

    def wait(self, what: str, ready: Callable[[], bool]) -> None:
        """Wait until ``ready`` returns True.

        :raises RuntimeError: the coordinator ended, or PATIENCE_S passed.
        """
        end = time.monotonic() + PATIENCE_S
        while not ready():
            if time.monotonic() > end or self.coordinator.poll() is not None:
                raise RuntimeError(f"no {what}; see {self._log.name}")
            time.sleep(0.02)

    def rss_mib(self) -> float:
        status = Path(f"/proc/{self.coordinator.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def load(self, seconds: float) -> tuple[float, float]:
        """Return the CPU seconds per second of the coordinator and of the broker."""
        pids = (self.coordinator.pid, self.broker.pid)
        began, before = time.monotonic(), [cpu_ms(pid) / 1e3 for pid in pids]
        time.sleep(seconds)
        took = time.monotonic() - began
        after = [cpu_ms(pid) / 1e3 for pid in pids]
        return (after[0] - before[0]) / took, (after[1] - before[1]) / took

    def training(self) -> bool:
        return bool(self.crowd.do("look")["training"])

    # --- actions -----------------------------------------------------------------------------------

    def connect(self, names: list[str]) -> None:
        since = time.monotonic()
        self.crowd.do("come", names=names)
        self.wait("nodes", lambda: len(self.observer.read("NodeJoined", since)) >= len(names))

    def submit(self) -> None:
        layer = {
            "forward_ms": 5.0, "backward_ms": 10.0, "parameter_bytes": 10**8, "gradient_bytes": 10**8,
            "optimizer_bytes": 2 * 10**8, "activation_bytes": 10**7, "output_bytes": 10**6,
        }  # fmt: skip
        layers = [{**layer, "forward_ms": 5.0 + number % 7 / 10} for number in range(LAYERS)]
        training = {
            "function": "model.py:build", "path": "/nowhere", "seed": 1, "steps": 1_000_000,
            "global_batch": MICROBATCHES, "microbatch_rows": 1, "arguments": {"layers": LAYERS},
        }  # fmt: skip
        self.observer.request(
            do="submit",
            job={
                "name": "crowd",
                "steps": 1_000_000,
                "policy": {"global_batch": MICROBATCHES, "microbatch_rows": 1, "devices_per_node": 1},
                "training": training,
                "snapshot": {"every_steps": 5, "protection": "none"},
                "profile": {"layers": layers, "microbatch_rows": 1},
            },
        )
        self.observer.request(do="snapshot", every_steps=0)

    def kill(self, names: list[str]) -> tuple[list[dict[str, float]], int]:
        """Kill nodes and wait for the recovery.

        :returns: for each node the ms from the end of its session until all nodes were ordered to stop
            (``begun``), the plan was decided, read and received by all (``resumed``), with the CPU ms of
            the processes; and the number of generations that the recovery took.
        """
        before = [cpu_ms(pid) for pid in self.pids]

        def note() -> None:
            self.spent = [cpu_ms(pid) - was for pid, was in zip(self.pids, before, strict=True)]

        self.observer.decided = note
        closed: dict[str, float] = self.crowd.do("kill", names=names)["closed"]
        since = min(closed.values())
        self.wait("recovery", lambda: bool(self.observer.read("PlanChosen", since)) and self.training())
        self.wait_for_step()
        begun = self.observer.read("GenerationStarted", since)
        read, event = self.observer.read("PlanChosen", since)[-1]
        resumed = self.crowd.do("look")["resumed_at"][str(event["generation"])]
        return [
            {
                "begun": 1e3 * (begun[0][1]["monotonic"] - at),
                "decided": 1e3 * (event["monotonic"] - at),
                "read": 1e3 * (read - at),
                "resumed": 1e3 * (resumed - at),
                **dict(zip(PROCESSES, self.spent, strict=True)),
            }
            for at in closed.values()
        ], len(begun)

    def wait_for_step(self) -> None:
        """Wait until a step is committed, and then until a random moment of the next one."""
        time.sleep((1 + self._chance.random()) * STEP_S)
        self.wait("training", self.training)

    def reconnect(self, names: list[str]) -> None:
        """Connect nodes again and wait until a step is committed with all nodes in the plan."""
        since = time.monotonic()
        self.connect(names)
        self.wait("PlanChosen", lambda: bool(self.observer.read("PlanChosen", since)))
        self.wait_for_step()


@contextlib.contextmanager
def running(arguments: argparse.Namespace) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="ftd-crowd-", ignore_cleanup_errors=True) as directory:
        bench = Bench(Path(directory), arguments)
        try:
            yield bench
        except BaseException:
            shutil.copy(Path(directory) / "coordinator.log", "/tmp/ftd-crowd-coordinator.log")
            raise
        finally:
            bench.close()


def p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def measure(arguments: argparse.Namespace) -> Result:
    result = Result(
        name="thousand_nodes",
        what=f"The coordinator on one core with {arguments.nodes} nodes, each with a heartbeat every second",
        columns=("what", "measured"),
    )
    with running(arguments) as bench:
        memory(bench, result)
        start_job(bench, result)
        loads(bench, result, arguments.seconds)
        latencies(bench, result, arguments)
        result.rows.append(("memory at the end", f"{bench.rss_mib():.0f} MiB"))
        result.rows.append(("cluster state", f"{bench.observer.state_bytes / 1024:.0f} KiB"))
    return result


def memory(bench: Bench, result: Result) -> None:
    bench.wait("coordinator", lambda: bool(bench.observer.read("CoordinatorStarted")))
    time.sleep(SETTLE_S)
    before, there = bench.rss_mib(), 0
    result.rows.append(("memory without nodes", f"{before:.0f} MiB"))
    for nodes in (100, 500, 1000):
        if nodes <= len(bench.names):
            bench.connect(bench.names[there:nodes])
            there = nodes
            time.sleep(SETTLE_S)
            more = bench.rss_mib() - before
            each = 1024 * more / nodes
            result.rows.append((f"memory of {nodes} nodes", f"{more:.1f} MiB, {each:.1f} KiB each"))
            result.data[f"memory_kib_per_node_{nodes}"] = each
    if there < len(bench.names):
        bench.connect(bench.names[there:])


def start_job(bench: Bench, result: Result) -> None:
    began = time.monotonic()
    bench.submit()
    bench.wait("training", lambda: bool(bench.observer.read("TrainingResumed", began)))
    result.rows.append(("from ftd submit to training", f"{time.monotonic() - began:.1f} s"))
    plan = bench.observer.read("PlanChosen")[-1][1]
    result.notes.append(f"{len(plan['details']['pipelines'])} pipelines of {LAYERS} layers")
    # The other templates are computed at low priority.
    bench.wait("templates", lambda: not children(bench.coordinator.pid))
    time.sleep(SETTLE_S)


def children(pid: int) -> str:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().strip()


def loads(bench: Bench, result: Result, seconds: float) -> None:
    for what, every in (("snapshots off", 0), ("a snapshot every 5 steps", 5)):
        bench.observer.request(do="snapshot", every_steps=every)
        time.sleep(SETTLE_S)
        coordinator, broker = bench.load(seconds)
        result.rows.append((f"load, {what}", f"{coordinator:.1%} (mosquitto {broker:.1%})"))
        result.limits.append(Limit(name=f"load, {what}", measured=coordinator, limit=LOAD_LIMIT))
    bench.observer.request(do="snapshot", every_steps=0)
    result.rows.append(("memory while training", f"{bench.rss_mib():.0f} MiB"))


def latencies(bench: Bench, result: Result, arguments: argparse.Namespace) -> None:
    step = max(1, len(bench.names) // max(1, arguments.singles))
    singles = bench.names[3::step][: arguments.singles]
    before = bench.crowd.do("look")
    lost = [bench.kill([name]) for name in singles]
    after = bench.crowd.do("look")
    resumes = after["commands"].get("Resume", 0) - before["commands"].get("Resume", 0)
    size = (after["command_bytes"] - before["command_bytes"]) / max(1, resumes)
    result.rows.append(("commands of a recovery, each node", f"{size / 1024:.1f} KiB"))
    add_latencies(result, "one node", [times for each, _ in lost for times in each], [n for _, n in lost])
    burst = min(BURST, len(bench.names) // 4)
    several: list[dict[str, float]] = []
    generations = []
    absent = singles
    for number in range(arguments.bursts):
        if absent:
            bench.reconnect(absent)
        absent = bench.names[number + 1 :: len(bench.names) // burst][:burst]
        times, count = bench.kill(absent)
        several += times
        generations.append(count)
    add_latencies(result, f"{burst} at once", several, generations)


def add_latencies(result: Result, what: str, times: list[dict[str, float]], generations: list[int]) -> None:
    if not times:
        return
    for key, words in (
        ("begun", "all nodes ordered to stop"),
        ("decided", "decided"),
        ("read", "decision read by another client"),
        ("resumed", "all nodes ordered to resume"),
    ):
        values = [each[key] for each in times]
        row = f"{statistics.median(values):.0f} / {p99(values):.0f} / {max(values):.0f} ms"
        result.rows.append((f"{what} lost, {words}: p50 / p99 / max", row))
    spent = " / ".join(f"{statistics.median(each[name] for each in times):.0f}" for name in PROCESSES)
    result.rows.append(
        (f"{what} lost, CPU until the decision was read: {', '.join(PROCESSES)}", f"{spent} ms")
    )
    result.rows.append((f"{what} lost: generations", " ".join(map(str, sorted(set(generations))))))
    worst = p99([each["decided"] for each in times])
    result.limits.append(
        Limit(name=f"{what} lost: p99 ms to the decision", measured=worst, limit=LATENCY_LIMIT_MS)
    )
    result.data[what] = times


def pin_observer() -> None:
    """Pin the observer to the broker's core, at a priority above broker and crowd.

    It stands for another host: it must not disturb the coordinator, nor wait for broker or crowd. Its child
    processes do not inherit the priority.
    """
    os.sched_setaffinity(0, {LAST})
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--singles", type=int, default=60, help="nodes that are killed one after the other")
    parser.add_argument(
        "--bursts", type=int, default=3, help=f"number of times that {BURST} nodes are killed at once"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds over which the load is measured")
    parser.add_argument("--plans", type=Path, help="directory that keeps templates for the next run")
    parsed = parser.parse_args()
    pin_observer()
    main(measure(parsed), parsed.out)
