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
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_SHOWN_LINES = 12
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Recoveries:
    """Milliseconds from each kill to the next step, and why there are fewer of them than kills."""

    milliseconds: list[float]
    error: str = ""
    """Last lines that the processes wrote to stderr; empty if all kills were recovered from."""


@dataclass(slots=True)
class Replica:
    """A worker process and the reader of its STEP lines."""

    process: subprocess.Popen[str]
    errors: Path
    """File with its stderr."""
    steps: "queue.SimpleQueue[tuple[int, float]]" = field(default_factory=queue.SimpleQueue)

    def follow(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("STEP "):
                _, step, at = line.split()
                self.steps.put((int(step), float(at)))

    def next_step_after(self, moment: float, within_s: float) -> float | None:
        """Return the time of the first step committed after ``moment`` (both monotonic seconds); ``None`` if there
        is none in time, or the process has ended.
        """
        deadline = time.monotonic() + within_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                _, at = self.steps.get(timeout=min(left, 1.0))
            except queue.Empty:
                if self.process.poll() is not None:
                    return None
                continue
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
        self._directory = tempfile.TemporaryDirectory(prefix="ftd-torchft-")
        self._started = 0
        port = free_port()
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
        }
        self._lighthouse_errors = Path(self._directory.name) / "lighthouse"
        with self._lighthouse_errors.open("wb") as errors:
            self._lighthouse = subprocess.Popen(
                [venv / "bin/torchft_lighthouse", "--bind", f"127.0.0.1:{port}", "--min_replicas", "1",
                 *settings.lighthouse],
                env=self._environment, stdout=subprocess.DEVNULL, stderr=errors,
            )  # fmt: skip
        time.sleep(1.0)
        self.replicas = [self.start(index) for index in range(replicas)]

    def start(self, index: int) -> Replica:
        self._started += 1
        path = Path(self._directory.name) / f"replica-{index}-{self._started}"
        with path.open("wb") as errors:
            process = subprocess.Popen(
                [self._venv / "bin/python", "-m", "benchmarks.peers.torchft_worker",
                 "--training", self._training, "--replica", str(index), "--replicas", str(self._count),
                 "--timeout-s", str(self._settings.timeout_s)],
                env=self._environment, cwd=REPOSITORY, text=True, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        replica = Replica(process, path)
        threading.Thread(target=replica.follow, daemon=True).start()
        return replica

    def close(self) -> None:
        for process in [replica.process for replica in self.replicas] + [self._lighthouse]:
            process.kill()
            process.wait()
        self._directory.cleanup()

    def describe_failure(self, what: str) -> str:
        """Return ``what`` with the exit code and the end of the stderr of each process that has ended, or of all
        if none has.
        """
        named = [("lighthouse", self._lighthouse, self._lighthouse_errors)] + [
            (f"replica {index}", replica.process, replica.errors)
            for index, replica in enumerate(self.replicas)
        ]
        ended = [one for one in named if one[1].poll() is not None]
        return "\n".join([what, *(line for one in ended or named for line in _describe(*one))])


def _describe(
    name: str, process: "subprocess.Popen[str] | subprocess.Popen[bytes]", errors: Path
) -> list[str]:
    code = process.poll()
    state = "runs" if code is None else f"ended with {code}"
    return [f"{name} {state}; the end of its stderr:", *_last_lines(errors.read_text(errors="replace"))]


def _last_lines(text: str) -> Sequence[str]:
    return [f"    {line}" for line in text.strip().splitlines()[-_SHOWN_LINES:]]


def find_problem(venv: Path) -> str:
    """Return why an environment cannot run the workers, with the last lines of its error; empty if it can."""
    command = [venv / "bin/python", "-c", "import benchmarks.peers.torchft_worker"]
    try:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(
            command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
    except OSError as error:
        return f"it is no virtual environment: {error.strerror}"
    return "\n".join(["it cannot run torchft:", *_last_lines(done.stderr)]) if done.returncode else ""


def recoveries(venv: Path, training: Path, replicas: int, kills: int, settings: Settings) -> Recoveries:
    """Return the milliseconds from each ``kill -9`` to the next step that a survivor committed.

    A recovery that takes more than two minutes is missing in the list, and the error says what the processes
    wrote.
    """
    cluster = Cluster(venv, training, replicas, settings)
    try:
        observer = cluster.replicas[0]
        if observer.next_step_after(time.monotonic() + 10, within_s=180) is None:
            return Recoveries(milliseconds=[], error=cluster.describe_failure("no step was committed"))
        measured, error = [], ""
        for kill in range(kills):
            victim = 1 + kill % (replicas - 1)
            moment = time.monotonic()
            cluster.replicas[victim].process.send_signal(signal.SIGKILL)
            cluster.replicas[victim].process.wait()
            back = observer.next_step_after(moment, within_s=120)
            if back is not None:
                measured.append((back - moment) * 1000)
            else:
                error = cluster.describe_failure(f"no step followed kill {kill + 1}")
            cluster.replicas[victim] = cluster.start(victim)
            settled = cluster.replicas[victim].next_step_after(time.monotonic(), within_s=60)
            observer.next_step_after((settled or time.monotonic()) + 1.5, within_s=30)
        return Recoveries(milliseconds=measured, error=error)
    finally:
        cluster.close()
