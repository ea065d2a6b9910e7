"""A node and a coordinator for tests: real trainers from a real zygote, controlled frame by frame.

``Cluster`` exchanges ``statemachine.messages.trainer`` over unix sockets as a node daemon does, runs the
rendezvous server, and offers what the tests need: fork, prepare, quiesce, resume, wait for steps, kill.
"""

import asyncio
import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from ftd.local.cluster import shared_environment
from ftd.node.rendezvous import RendezvousServer
from runtime.groups.gloo import GlooCommunicator
from runtime.groups.store import Rendezvous
from runtime.wire import frames
from runtime.wire import zygote_protocol as z
from statemachine.messages import trainer as p
from statemachine.messages.common import Prepared, Quiesce, Resumed
from statemachine.messages.values import Vote
from tests.helpers.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a token for tests"

FrameType = TypeVar("FrameType", bound=frames.Frame)


class ServerThread:
    """A rendezvous server with its own event loop."""

    def __init__(self, token: str = TOKEN) -> None:
        self._loop = asyncio.new_event_loop()
        self.server = RendezvousServer(token)
        self._loop.run_until_complete(self.server.start())
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self.server.port

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.close(), self._loop).result(PATIENCE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def formed_world(
    size: int, groups: Sequence[tuple[int, ...]] = (), timeout_s: float = PATIENCE_S
) -> Iterator[list[GlooCommunicator]]:
    """Return formed communicators of all ranks, in this process."""
    with ServerThread() as server:
        rendezvous = Rendezvous(host="127.0.0.1", port=server.port, token=TOKEN, generation=1)
        ranks = [GlooCommunicator(rendezvous, r, size, "127.0.0.1", timeout_s=timeout_s) for r in range(size)]
        with ThreadPoolExecutor(size) as pool:
            list(pool.map(lambda communicator: communicator.form(groups), ranks))
        try:
            yield ranks
        finally:
            for communicator in ranks:
                communicator.abort()
                communicator.close()


class TrainerHandle:
    """One trainer process, as its node sees it."""

    def __init__(self, attached: p.Attached, connection: socket.socket, decoder: frames.Decoder[Any]) -> None:
        self.device = attached.device
        self.pid = attached.pid
        self.output = bytearray()
        self._connection = connection
        self._decoder = decoder
        self._condition = threading.Condition()
        self._frames: list[frames.Frame] = []
        self.last_beat: p.TrainerHeartbeat | None = None
        self.gone = False
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, frame: frames.Frame) -> None:
        self._connection.sendall(frames.encode(frame))

    def take(self, kind: type[FrameType], timeout_s: float = PATIENCE_S, **fields: object) -> FrameType:
        """Wait for the first frame of ``kind`` with these fields; remove it and older ones of its kind."""

        def find() -> FrameType | None:
            for frame in self._frames:
                if isinstance(frame, kind) and all(getattr(frame, k) == v for k, v in fields.items()):
                    return frame
            return None

        deadline = time.monotonic() + timeout_s
        with self._condition:
            while (found := find()) is None:
                raised = [f for f in self._frames if isinstance(f, p.Raised)]
                if raised:
                    raise AssertionError(f"trainer {self.device}: {raised[0].detail}")
                left_s = deadline - time.monotonic()
                if self.gone or left_s <= 0:
                    state = "gone" if self.gone else "silent"
                    raise AssertionError(
                        f"no {kind.__name__} {fields} from trainer {self.device} ({state}); frames "
                        f"{self._frames[-5:]}, output: {self.output.decode(errors='replace')}"
                    )
                self._condition.wait(left_s)
            position = self._frames.index(found)
            self._frames = [f for i, f in enumerate(self._frames) if i > position or not isinstance(f, kind)]
        return found

    def sent(self, kind: type[frames.Frame], **fields: object) -> bool:
        """Return whether such a frame has arrived and was not taken, without waiting."""
        with self._condition:
            return any(
                isinstance(frame, kind) and all(getattr(frame, k) == v for k, v in fields.items())
                for frame in self._frames
            )

    def losses(self) -> dict[int, float]:
        """Return the losses of all steps reported and not taken, without waiting."""
        with self._condition:
            return {f.step: f.vote.loss for f in self._frames if isinstance(f, p.TrainerStepped)}

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.killpg(self.pid, number)

    def close(self) -> None:
        """Close the connection, whereupon the trainer ends itself."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self) -> None:
        frames: list[Any] = self._decoder.feed(b"")
        while True:
            with self._condition:
                for frame in frames:
                    if isinstance(frame, p.TrainerHeartbeat):
                        self.last_beat = frame
                    else:
                        self._frames.append(frame)
                self._condition.notify_all()
            try:
                data = self._connection.recv(1 << 20)
            except OSError:
                data = b""
            if not data:
                with self._condition:
                    self.gone = True
                    self._condition.notify_all()
                return
            frames = self._decoder.feed(data)


class Cluster:
    """A zygote with its trainers: ``with Cluster() as cluster: a, b = cluster.fork(2)`` …"""

    def __init__(self, *preload: str, path: Path = ROOT) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="ftd-test-")
        self._path = str(Path(self._directory.name) / "node.sock")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self._path)
        self._listener.listen(64)
        self._arrivals: queue.SimpleQueue[TrainerHandle] = queue.SimpleQueue()
        self._outputs: dict[int, bytearray] = {}
        self._notices: queue.SimpleQueue[z.ZygoteReady | z.Spawned | z.Exited] = queue.SimpleQueue()
        self.exited: dict[int, int] = {}
        self._devices = 0
        self.trainers: list[TrainerHandle] = []
        self.generation = 0
        self.rendezvous = ServerThread()
        self.zygote = subprocess.Popen(
            [sys.executable, "-m", "runtime.process.zygote", "--parent", str(os.getpid()), *preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, **shared_environment(), "PYTHONPATH": f"{ROOT}:{path}"},
        )
        threading.Thread(target=self._accept, daemon=True).start()
        threading.Thread(target=self._read_notices, daemon=True).start()
        assert isinstance(self._notices.get(timeout=PATIENCE_S), z.ZygoteReady)

    # --- processes -----------------------------------------------------------------------------

    def fork(self, count: int, environment: dict[str, str] | None = None) -> list[TrainerHandle]:
        """Fork trainers and wait until they are connected."""
        assert self.zygote.stdin is not None
        for _ in range(count):
            spawn = z.Spawn(device=self._devices, socket_path=self._path, environment=environment or {})
            self.zygote.stdin.write(frames.encode(spawn))
            self._devices += 1
        self.zygote.stdin.flush()
        new = [self._arrivals.get(timeout=PATIENCE_S) for _ in range(count)]
        new.sort(key=lambda trainer: trainer.device)
        self.trainers += new
        return new

    def wait_exit(self, pid: int, timeout_s: float = PATIENCE_S) -> int:
        deadline = time.monotonic() + timeout_s
        while pid not in self.exited:
            notice = self._notices.get(timeout=max(0.001, deadline - time.monotonic()))
            if isinstance(notice, z.Exited):
                self.exited[notice.pid] = notice.status
        return self.exited[pid]

    # --- generations -------------------------------------------------------------------------------

    def prepare(
        self,
        trainers: Sequence[TrainerHandle],
        data: p.TrainingData,
        profile: bool = False,
        arenas: Path | None = None,
        arena_limit_bytes: int | None = None,
    ) -> None:
        """Prepare trainers.
        :param arenas: directory of snapshots, which are written to its ``device-<d>``.
        """
        for trainer in trainers:
            arena = "" if arenas is None else str(arenas / f"device-{trainer.device}")
            trainer.send(
                p.PrepareJob(
                    job_id="job",
                    training=data,
                    profile=profile,
                    arena=arena,
                    arena_limit_bytes=arena_limit_bytes,
                )
            )
        for trainer in trainers:
            trainer.take(Prepared)

    def quiesce(self, trainers: Sequence[TrainerHandle], mode: str = "abort") -> list[p.TrainerQuiesced]:
        """Quiesce trainers for the next generation."""
        self.generation += 1
        for trainer in trainers:
            trainer.send(Quiesce(generation=self.generation, mode=mode))
        return [trainer.take(p.TrainerQuiesced, generation=self.generation) for trainer in trainers]

    def resume(
        self,
        ranks: Sequence[TrainerHandle],
        pipelines: Sequence[p.WorldPipeline],
        step: int,
        vote: Vote | None = None,
        transfers: Sequence[p.TransferData] = (),
        **snapshots: Any,
    ) -> None:
        """Send Resume: ``ranks[r]`` becomes rank r.
        :param snapshots: further fields of Resume.
        """
        for rank, trainer in enumerate(ranks):
            frame = self.resume_frame(rank, len(ranks), pipelines, step, vote, transfers)
            trainer.send(msgspec.structs.replace(frame, **snapshots))

    def resume_frame(
        self,
        rank: int,
        size: int,
        pipelines: Sequence[p.WorldPipeline],
        step: int,
        vote: Vote | None = None,
        transfers: Sequence[p.TransferData] = (),
    ) -> p.ResumeRank:
        return p.ResumeRank(
            generation=self.generation,
            step=step,
            vote=vote,
            rank=rank,
            world=p.WorldData(
                pipelines=tuple(pipelines), transfers=tuple(transfers), hosts=("127.0.0.1",) * size
            ),
            rendezvous_host="127.0.0.1",
            rendezvous_port=self.rendezvous.port,
            token=TOKEN,
        )

    def resumed(self, ranks: Sequence[TrainerHandle]) -> list[Resumed]:
        return [trainer.take(Resumed, generation=self.generation) for trainer in ranks]

    # --- helpers -----------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        head = _read_exactly(connection, 4)
        frame = head + _read_exactly(connection, int.from_bytes(head, "big"))
        greeting = frames.Decoder[Any](p.FirstFrame).feed(frame)[0]
        output = self._outputs.setdefault(greeting.pid, bytearray())
        if isinstance(greeting, p.Attached):
            trainer = TrainerHandle(greeting, connection, frames.Decoder[Any](p.Report))
            trainer.output = output
            self._arrivals.put(trainer)
            return
        with connection:
            while data := connection.recv(65536):
                output += data

    def _read_notices(self) -> None:
        assert self.zygote.stdout is not None
        decoder: frames.Decoder[Any] = frames.Decoder(z.ZygoteNotice)
        while data := os.read(self.zygote.stdout.fileno(), 65536):
            for notice in decoder.feed(data):
                self._notices.put(notice)

    def close(self) -> None:
        assert self.zygote.stdin is not None and self.zygote.stdout is not None
        self.zygote.stdin.close()
        self.zygote.wait(PATIENCE_S)
        self.zygote.stdout.close()
        self._listener.close()
        for trainer in self.trainers:
            trainer.close()
        self.rendezvous.close()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("closed in the middle of a frame")
        data += part
    return data


def pipeline(
    *stages: tuple[int, int, Sequence[int]], first_microbatch: int, microbatches: int, sharded: bool = False
) -> p.WorldPipeline:
    """Return a pipeline, as in ``pipeline((0, 2, [0]), (2, 5, [1, 2]), first_microbatch=0, microbatches=3)``.

    :param sharded: whether stages of several ranks shard.
    """
    return p.WorldPipeline(
        stages=tuple(
            p.WorldStage(
                first_layer=a, end_layer=b, ranks=tuple(r), within="shard" if sharded else "replicate"
            )
            for a, b, r in stages
        ),
        first_microbatch=first_microbatch,
        microbatches=microbatches,
    )
