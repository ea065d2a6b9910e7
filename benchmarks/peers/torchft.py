"""Recovery of torchft from ``kill -9`` of one replica, to compare with ftd's (``benchmarks.recovery --peer``).

A lighthouse and N replicas train the same model with the same global batch on this machine. "As shipped"
leaves every timeout at its default; "tuned" takes the shortest timeouts that recover reliably here:
heartbeat timeout 0.5 s, process group 2 s, join 1 s.
"""

import os
import queue
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    name: str
    lighthouse: tuple[str, ...]
    timeout_s: float


AS_SHIPPED = Settings(name="torchft as shipped", lighthouse=(), timeout_s=60.0)
TUNED = Settings(
    name="torchft tuned by hand",
    lighthouse=("--heartbeat_timeout_ms", "500", "--join_timeout_ms", "1000", "--quorum_tick_ms", "50"),
    timeout_s=2.0,
)


@dataclass(slots=True)
class Replica:
    """A worker process and the reader of its STEP lines."""

    process: subprocess.Popen[str]
    steps: "queue.SimpleQueue[tuple[int, float]]" = field(default_factory=queue.SimpleQueue)

    def follow(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("STEP "):
                _, step, at = line.split()
                self.steps.put((int(step), float(at)))

    def next_step_after(self, moment: float, within_s: float) -> float | None:
        """Return the time of the first step committed after ``moment`` (both monotonic seconds), or ``None``."""
        deadline = time.monotonic() + within_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                _, at = self.steps.get(timeout=left)
            except queue.Empty:
                return None
            if at > moment:
                return at
        return None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Cluster:
    """A lighthouse and its replicas; ``close`` ends every process that this object started."""

    def __init__(self, venv: Path, training: Path, replicas: int, settings: Settings) -> None:
        self._venv = venv
        self._training = training
        self._count = replicas
        self._settings = settings
        port = free_port()
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
        }
        self._lighthouse = subprocess.Popen(
            [venv / "bin/torchft_lighthouse", "--bind", f"127.0.0.1:{port}", "--min_replicas", "1",
             *settings.lighthouse],
            env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(1.0)
        self.replicas = [self.start(index) for index in range(replicas)]

    def start(self, index: int) -> Replica:
        process = subprocess.Popen(
            [self._venv / "bin/python", "-m", "benchmarks.peers.torchft_worker",
             "--training", self._training, "--replica", str(index), "--replicas", str(self._count),
             "--timeout-s", str(self._settings.timeout_s)],
            env=self._environment, cwd=REPOSITORY, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        replica = Replica(process)
        threading.Thread(target=replica.follow, daemon=True).start()
        return replica

    def close(self) -> None:
        for process in [replica.process for replica in self.replicas] + [self._lighthouse]:
            process.kill()
            process.wait()


def recoveries(venv: Path, training: Path, replicas: int, kills: int, settings: Settings) -> list[float]:
    """Return the milliseconds from each ``kill -9`` to the next step that a survivor committed.

    A recovery that takes more than two minutes is missing in the list, which is then shorter.
    """
    cluster = Cluster(venv, training, replicas, settings)
    try:
        observer = cluster.replicas[0]
        if observer.next_step_after(time.monotonic() + 10, within_s=180) is None:
            return []
        measured = []
        for kill in range(kills):
            victim = 1 + kill % (replicas - 1)
            moment = time.monotonic()
            cluster.replicas[victim].process.send_signal(signal.SIGKILL)
            cluster.replicas[victim].process.wait()
            back = observer.next_step_after(moment, within_s=120)
            if back is not None:
                measured.append((back - moment) * 1000)
            cluster.replicas[victim] = cluster.start(victim)
            settled = cluster.replicas[victim].next_step_after(time.monotonic(), within_s=60)
            observer.next_step_after((settled or time.monotonic()) + 1.5, within_s=30)
        return measured
    finally:
        cluster.close()
