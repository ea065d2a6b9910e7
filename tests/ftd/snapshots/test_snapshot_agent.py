"""Protection of scripts' snapshots: agents are killed and their memory removed, and the state is restored.

A host is an agent with a directory of its own; its ranks are processes that know only its socket.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftd.config.daemon import load_daemon_config
from ftd.errors import ConfigurationError
from ftd.snapshots.snapshot_agent.daemon import SnapshotAgentDaemon
from runtime.wire.snapshot_agent_protocol import read_retained
from tests.helpers.forks import Forked, Zygote

ROOT = Path(__file__).parents[3]

SCRIPT = """
import logging, os, sys, time
import torch, torch.distributed as dist, xxhash
from ftd import Snapshotter
logging.basicConfig(level=logging.WARNING, format="# %(message)s", stream=sys.stdout)
kind, protection, last, pause_s = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
rank = int(os.environ.get("RANK", "0"))
if kind != "single":
    dist.init_process_group("gloo")
torch.manual_seed(rank if kind == "single" else 3)
width = int(os.environ.get("WIDTH", "96"))
model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 3))
if kind == "ddp":
    net = torch.nn.parallel.DistributedDataParallel(model)
elif kind == "fsdp":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    net = fully_shard(torch.nn.Sequential(model[0], torch.nn.Tanh(), model[2]),
                      mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
else:
    net = model
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
torch.manual_seed(100 + rank)
progress = {"rank": rank, "sum": 0.0}
snapshots = Snapshotter("job", protection=protection, directory=os.environ["PLACE"],
                        model=net, optimizer=optimizer, progress=progress)
start = snapshots.restore() or 0
def state():
    kept = [*net.state_dict().values(), torch.get_rng_state()]
    kept += [value for p in net.parameters() for _, value in sorted(optimizer.state[p].items())]
    digest = xxhash.xxh3_64(repr(progress).encode())
    for value in kept:
        value = value.to_local() if hasattr(value, "to_local") else value
        digest.update(value.detach().contiguous().numpy())
    return digest.hexdigest()
print(f"after {rank} {start}", flush=True)
print(f"state {rank} {start} {state()}", flush=True)
def total():
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    moments = [optimizer.state[p]["exp_avg"] for p in net.parameters() if optimizer.state[p]]
    whole += [m.full_tensor() if hasattr(m, "full_tensor") else m for m in moments]
    return f"{sum(w.detach().double().square().sum().item() for w in whole):.12e}"
print(f"total {rank} {start} {total()}", flush=True)
assert progress["rank"] in (0, rank)
for step in range(start + 1, last + 1):
    optimizer.zero_grad()
    loss = net(torch.randn(6, 8)).square().sum()
    loss.backward()
    optimizer.step()
    progress["sum"] += loss.item()
    print(f"state {rank} {step} {state()}", flush=True)
    print(f"total {rank} {step} {total()}", flush=True)
    snapshots.snapshot(step)
    if pause_s:
        time.sleep(pause_s)
        snapshots.wait()
        print(f"protected {rank} {snapshots.protected_step or 0}", flush=True)
if "remove" in sys.argv:
    if dist.is_initialized():
        dist.barrier()
    snapshots.remove()
snapshots.close()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_socket_that_cannot_be_replaced_is_an_error_of_the_configuration() -> None:
    """It may be that of another user's agent in a directory that both can write to."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        config = Path(place, "agent.toml")
        config.write_text(
            f'secret = "sesame"\n[node]\nname = "a"\nhost = "127.0.0.1"\nsnapshot_dir = "{place}"\n'
        )
        config.chmod(0o600)
        Path(place, "snapshot-agent.sock").mkdir()  # Not even root can unlink it.
        with pytest.raises(
            ConfigurationError, match=r"node.snapshot_dir: .*snapshot-agent.sock: Is a directory"
        ):
            asyncio.run(SnapshotAgentDaemon(load_daemon_config(config)).run())


AGENT = """
import asyncio, sys
from pathlib import Path
from ftd.config.daemon import load_daemon_config
from ftd.snapshots.snapshot_agent.daemon import SnapshotAgentDaemon
sys.exit(asyncio.run(SnapshotAgentDaemon(load_daemon_config(Path(sys.argv[1]))).run()))
"""


class Host:
    """A snapshot agent, whose memory is a directory."""

    def __init__(
        self,
        zygote: Zygote,
        place: Path,
        name: str,
        *,
        secret: str = "sesame",
        peers: tuple[str, ...] = (),
        rate_mib_s: int | None = None,
    ) -> None:
        self._zygote, self.name, self.memory = zygote, name, place / name
        self.memory.mkdir()
        self.address = f"127.0.0.1:{free_port()}"
        self.config = place / f"{name}.toml"
        self.config.write_text(
            f'secret = "{secret}"\n[node]\nname = "{name}"\nhost = "127.0.0.1"\n'
            f'snapshot_dir = "{self.memory}"\nsnapshot_port = {self.address.rpartition(":")[2]}\n'
            f"snapshot_peers = {json.dumps(peers)}\n"
            + (f"snapshot_rate_mib_s = {rate_mib_s}\n" if rate_mib_s else "")
        )
        self.config.chmod(0o600)
        self.start()

    @property
    def socket(self) -> Path:
        return self.memory / "snapshot-agent.sock"

    def start(self) -> None:
        self.process = self._zygote.start(AGENT, self.config.with_suffix(".log"), str(self.config))
        while True:
            with socket.socket(socket.AF_UNIX) as probe:
                try:
                    probe.connect(str(self.socket))
                    return
                except OSError:
                    assert self.process.alive, self.process.text
                    time.sleep(0.02)

    def lose(self) -> None:
        """Kill the host and remove its memory."""
        self.process.kill()
        shutil.rmtree(self.memory)

    @property
    def protected_step(self) -> int:
        kept = [read_retained(job).common for job in self.memory.glob("*/job")]
        return max((key[1] for key in kept if key is not None), default=0)

    @property
    def parity_steps(self) -> set[int]:
        """Steps of which the host holds its parity."""
        return {int(path.stem[5:]) for path in self.memory.glob("*/job/parity-*/step-*.json")}

    def manifests(self) -> list[str]:
        return sorted(f"{p.parent.name}/{p.name}" for p in self.memory.glob("*/job/*/step-*.json"))


class Ranks:
    """One process for each named host, as torchrun starts them."""

    def __init__(self, zygote: Zygote, hosts: list[Host], code: str, *arguments: str) -> None:
        port = str(free_port())
        out = hosts[0].config.parent
        self.processes: list[Forked] = []
        for rank, host in enumerate(hosts):
            self.processes.append(
                zygote.start(
                    code,
                    out / f"out-{port}-{rank}",
                    *arguments,
                    RANK=str(rank),
                    WORLD_SIZE=str(len(hosts)),
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=port,
                    FTD_SNAPSHOT_AGENT=str(host.socket),
                    PLACE=str(out / "alone"),
                    WIDTH=os.environ.get("WIDTH", "96"),
                )
            )

    def until_protected(self, step: int) -> None:
        while not any(int(s) >= step for s in re.findall(r"^protected 0 (\d+)", self.text, re.MULTILINE)):
            assert all(process.alive for process in self.processes), self.text
            time.sleep(0.02)

    def kill(self) -> "Ranks":
        for process in self.processes:
            process.kill()
        return self

    def finish(self) -> "Ranks":
        while any(process.alive for process in self.processes):
            codes = [process.wait() for process in self.processes if not process.alive]
            if any(codes):
                self.kill()
            time.sleep(0.02)
        assert not any(process.wait() for process in self.processes), self.text
        return self

    @property
    def text(self) -> str:
        return "".join(process.text for process in self.processes)

    @property
    def restored_steps(self) -> set[int]:
        return {int(step) for step in re.findall(r"^after \d+ (\d+)", self.text, re.MULTILINE)}

    @property
    def states(self) -> dict[tuple[int, int], str]:
        """Return (rank, step) → digest of the rank's whole state after that step."""
        found = re.findall(r"^state (\d+) (\d+) (\S+)$", self.text, re.MULTILINE)
        return {(int(rank), int(step)): digest for rank, step, digest in found}

    @property
    def sums(self) -> dict[tuple[int, int], str]:
        """Return (rank, step) → sum of squares of all parameters and moments, which sharding does not change."""
        found = re.findall(r"^total (\d+) (\d+) (\S+)$", self.text, re.MULTILINE)
        return {(int(rank), int(step)): total for rank, step, total in found}

    @property
    def losses(self) -> dict[tuple[int, int], str]:
        """Return (rank, step) → loss, as the example scripts print them."""
        found = re.findall(r"^(\d+) (\d+) (\d+\.\d{9})$", self.text, re.MULTILINE)
        return {(int(rank), int(step)): loss for rank, step, loss in found}

    @property
    def last_step(self) -> int:
        return max(step for _, step in self.states)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def place() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ftd-keep-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


class World:
    """Hosts and what runs on them; ends with the test."""

    def __init__(self, zygote: Zygote, place: Path) -> None:
        self._zygote, self._place = zygote, place
        self._hosts: list[Host] = []
        self._ranks: list[Ranks] = []

    def host(self, name: str, **options: Any) -> Host:
        self._hosts.append(Host(self._zygote, self._place, name, **options))
        return self._hosts[-1]

    def ranks(self, hosts: list[Host], kind: str, protection: str, last: int, *more: str) -> Ranks:
        return self.start(hosts, SCRIPT, kind, protection, str(last), *(more or ("0",)))

    def start(self, hosts: list[Host], code: str, *arguments: str) -> Ranks:
        self._ranks.append(Ranks(self._zygote, hosts, code, *arguments))
        return self._ranks[-1]

    def close(self) -> None:
        for ranks in self._ranks:
            ranks.kill()
        for host in self._hosts:
            host.process.kill()


@pytest.fixture
def world(zygote: Zygote, place: Path) -> Iterator[World]:
    made = World(zygote, place)
    yield made
    made.close()


def went_on_exactly(first: Ranks, second: Ranks) -> None:
    """Check that the second run began with the first run's bytes of that step, on every rank."""
    (restored,) = second.restored_steps
    assert restored >= max(map(int, re.findall(r"protected \d+ (\d+)", first.text))) >= 1
    ranks = range(len(second.processes))
    assert [second.states[rank, restored] for rank in ranks] == [
        first.states[rank, restored] for rank in ranks
    ]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "protection", "count", "lost"),
    [
        ("ddp", "aec", 3, [1]),
        ("ddp", "aec2", 3, [0, 2]),
        ("fsdp", "arc:1", 2, [0]),
        ("fsdp", "aec", 4, [1]),
    ],
)
def test_training_survives_lost_hosts(
    world: World, kind: str, protection: str, count: int, lost: list[int]
) -> None:
    hosts = [world.host(f"h{i}") for i in range(count)]
    first = world.ranks(hosts, kind, protection, 100, "0.05")
    first.until_protected(3)
    first.kill()
    for number in lost:
        hosts[number].lose()
        hosts[number] = world.host(f"n{number}")
    second = world.ranks(hosts, kind, protection, first.last_step + 2, "0.05", "remove").finish()
    assert not any(host.manifests() for host in hosts)
    went_on_exactly(first, second)


@pytest.mark.processes
def test_a_loop_over_a_protected_loader_survives_a_lost_host_with_the_same_losses(world: World) -> None:
    """``protect`` alone, with parity among hosts: an epoch has 5 steps, and a host is lost in the second."""
    script = str(ROOT / "examples" / "scripts" / "ddp_loader.py")
    code = f"import runpy; runpy.run_path({script!r}, run_name='__main__')"
    hosts = [world.host(f"h{i}") for i in range(2)]

    def run(name: str, pause_s: str) -> Ranks:
        arguments = ("--name", name, "--epochs", "3", "--pause-s", pause_s, "--protection", "aec")
        return world.start(hosts, code, *arguments)

    first = run("job", "0.1")
    while hosts[0].protected_step < 7:
        assert all(process.alive for process in first.processes), first.text
        time.sleep(0.02)
    first.kill()
    hosts[1].lose()
    hosts[1] = world.host("n1")
    second, whole = run("job", "0").finish(), run("other", "0").finish()
    assert min(step for _, step in second.losses) >= 8
    assert first.losses.items() | second.losses.items() == whole.losses.items()
    assert len(whole.losses) == 30


@pytest.mark.processes
@pytest.mark.parametrize("lost", [2, 3])
def test_a_host_is_killed_while_parity_is_computed(
    world: World, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host 3 takes seconds for its parity. If it is lost, the others have the whole parity of the newest step; if
    another one is lost, the step before it is restored.
    """
    monkeypatch.setenv("WIDTH", "40000")
    hosts = [world.host(f"h{i}", rate_mib_s=1 if i == 3 else None) for i in range(4)]
    first = world.ranks(hosts, "fsdp", "aec", 100, "0.05")
    first.until_protected(1)
    while not min(max(host.parity_steps) for host in hosts[:3]) > max(hosts[3].parity_steps):
        assert all(process.alive for process in first.processes), first.text
        time.sleep(0.005)
    hosts[3].process.kill()
    hosts[lost].process.kill()
    first.kill()
    common = set.intersection(*(host.parity_steps for host in hosts if host is not hosts[lost]))
    assert lost == 2 or max(common) > max(hosts[3].parity_steps)
    hosts[lost].lose()
    hosts[3].start() if lost != 3 else None
    hosts[lost] = world.host("new")
    second = world.ranks(hosts, "fsdp", "aec", max(common) + 1, "0", "remove").finish()
    assert second.restored_steps == {max(common)}
    assert all(second.states[r, max(common)] == first.states[r, max(common)] for r in range(4))


@pytest.mark.processes
def test_a_single_process_is_copied_to_a_configured_peer(world: World) -> None:
    buddy = world.host("buddy")
    host = world.host("h0", peers=(buddy.address,))
    first = world.ranks([host], "single", "buddy", 100, "0.05")
    first.until_protected(2)
    buddy.process.kill()
    buddy.start()  # It loads its copies and accepts new ones.
    first.until_protected(max(map(int, re.findall(r"protected 0 (\d+)", first.text))) + 2)
    first.kill()
    host.lose()
    host = world.host("n0", peers=(buddy.address,))
    second = world.ranks([host], "single", "buddy", first.last_step + 2, "0.05", "remove").finish()
    assert not buddy.manifests() and not host.manifests()
    went_on_exactly(first, second)


@pytest.mark.processes
def test_fewer_ranks_on_fewer_hosts_restore_replicated_and_sharded_state(world: World) -> None:
    hosts = [world.host(f"h{i}") for i in range(2)]
    for kind in ("ddp", "fsdp"):
        first = world.ranks(hosts, kind, "arc:1", 100, "0.05")
        first.until_protected(3)
        first.kill()
        if kind == "fsdp":
            hosts[1].lose()  # Rank 0 takes the other shard from its copy.
            hosts.pop()
        second = world.ranks(hosts[:1], kind, "arc:1", 100, "0.05")
        second.until_protected(first.last_step + 1)
        second.kill()
        (restored,) = second.restored_steps
        assert restored >= 3
        assert second.sums[0, restored] == first.sums[0, restored]
        world.ranks(hosts, kind, "arc:1", 1, "0", "remove").finish()


@pytest.mark.processes
def test_training_goes_on_without_a_valid_token_or_an_agent(world: World) -> None:
    hosts = [world.host("h0"), world.host("h1", secret="other")]
    ranks = world.ranks(hosts, "fsdp", "buddy", 4, "0.05")
    while "rejects our token" not in hosts[0].process.text:
        time.sleep(0.02)
    assert ranks.finish().last_step == 4
    hosts[1].lose()
    alone = world.ranks([hosts[1]], "single", "aec", 3).finish()
    assert alone.text.count("needs a snapshot agent on each host") == 1
    assert world.ranks([hosts[1]], "single", "aec", 4).finish().restored_steps == {3}


class Agent:
    """torchrun on one host, in a process group of its own."""

    def __init__(self, host: Host, port: int, *, first: bool) -> None:
        self.log = host.config.with_suffix(".torchrun")
        conf = (
            f"is_host={str(first).lower()},keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=1"
        )
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job"]
        command += ["--rdzv-conf", conf, "--local-addr", "127.0.0.1", "--max-restarts", "9"]
        command += ["--monitor-interval", "0.1", str(ROOT / "examples" / "scripts" / "ddp.py")]
        command += ["--name", "job", "--steps", "40", "--pause-s", "0.1", "--protection", "aec"]
        environment = {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "FTD_SNAPSHOT_AGENT": str(host.socket),
        }
        self.process = subprocess.Popen(
            command,
            env=os.environ | environment | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def kill(self) -> None:
        """Kill it with its workers, which have sessions of their own."""
        for pid in [*map(int, re.findall(r"is process (\d+)", self.text)), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    @property
    def text(self) -> str:
        return self.log.read_text()

    @property
    def losses(self) -> set[tuple[str, str, str]]:
        """Return rank, step and loss of each step."""
        return set(re.findall(r"^(\d+) (\d+) (\d+\.\d{9})$", self.text, re.MULTILINE))


@pytest.mark.processes
def test_torchrun_on_two_hosts_survives_the_loss_of_one(world: World) -> None:
    port = free_port()
    hosts = [world.host("h0"), world.host("h1")]
    agents = [Agent(host, port, first=host is hosts[0]) for host in hosts]
    lost = agents[1]
    try:
        while hosts[0].protected_step < 5:
            assert all(agent.process.poll() is None for agent in agents), agents[0].text + agents[1].text
            time.sleep(0.02)
        agents[1].kill()
        hosts[1].lose()
        agents[1] = Agent(world.host("n1"), port, first=False)
        assert [agent.process.wait() for agent in agents] == [0, 0], agents[0].text + agents[1].text
    finally:
        for agent in agents:
            agent.kill()
    restored = set(re.findall(r"resumes after step (\d+)", agents[1].text))
    assert restored and all(int(step) >= 5 for step in restored)
    # Repeated steps have the same losses as before, so each rank has one loss for each step.
    all_losses = lost.losses | agents[0].losses | agents[1].losses
    assert sorted((int(rank), int(step)) for rank, step, _ in all_losses) == [
        (rank, step) for rank in (0, 1) for step in range(1, 41)
    ]
