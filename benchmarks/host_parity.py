"""Protection of FSDP2 shards among hosts: parity (aec) and copies (arc:1), compared in one run.

Four hosts are snapshot agents on this machine, each with its own memory and one rank of a real FSDP2 script.
For each protection, in alternating rounds, it measures

* memory: bytes that a host holds of other hosts' state for one protected step, together with its own state;
* snapshot: the time that ``snapshot()`` and the next update block the training thread;
* protection: the time from a complete snapshot to the moment when all hosts have it protected;
* restore: the time of ``restore()`` on the rank of a host that replaces a killed one, whose state is copied
  back or decoded, and on the slowest rank. The bytes are compared with those before.

All hosts share this machine's cores and its loopback network, so times are those of all hosts' work together.

    python -m benchmarks.host_parity [--mib 64] [--rounds 3]
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import Limit, Result, command_line, main, milliseconds
from runtime.wire.snapshot_agent_protocol import RETAINED_FILE

HOSTS = 4
STEPS = 6
LOST = 1
MEMORY_RATIO = 0.4
SNAPSHOT_RATIO = 1.25
"""Largest ratio of the shortest times of ``snapshot()``: other processes of the machine only add to them."""
WIDTH = 1024
NONE, COPIES, PARITY = "none", "arc:1", "aec"
AGENT = """
import asyncio, sys
from pathlib import Path
from ftd.config.daemon import load_daemon_config
from ftd.snapshots.snapshot_agent.daemon import SnapshotAgentDaemon
sys.exit(asyncio.run(SnapshotAgentDaemon(load_daemon_config(Path(sys.argv[1]))).run()))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Host:
    """A snapshot agent, whose memory is a directory."""

    def __init__(self, place: Path, name: str) -> None:
        self.memory = place / name
        self.memory.mkdir()
        config = place / f"{name}.toml"
        config.write_text(
            f'secret = "sesame"\n[node]\nname = "{name}"\nhost = "127.0.0.1"\n'
            f'snapshot_dir = "{self.memory}"\nsnapshot_port = {free_port()}\n'
        )
        config.chmod(0o600)
        with config.with_suffix(".log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", AGENT, str(config)], stdout=log, stderr=log
            )
        while not self.socket.exists():
            if self._process.poll() is not None:
                raise RuntimeError(config.with_suffix(".log").read_text())
            time.sleep(0.05)

    @property
    def socket(self) -> Path:
        return self.memory / "snapshot-agent.sock"

    def bytes_of(self, kind: str) -> int:
        """Return the bytes of one snapshot in the host's arenas of a kind: ``rank``, ``copy`` or ``parity``."""
        sizes: dict[Path, int] = {}
        for slot in self.memory.glob(f"*/bench/{kind}-*/slot-*"):
            sizes[slot.parent] = max(sizes.get(slot.parent, 0), slot.stat().st_size)
        return sum(sizes.values())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def lose(self) -> None:
        self.kill()
        shutil.rmtree(self.memory)


@contextmanager
def ranks_on(hosts: list[Host], protection: str, mib: int, mode: str) -> Iterator[list[dict[str, Any]]]:
    """Run a rank on each host and yield what each has measured, while all of them still run."""
    port = str(free_port())
    command = [sys.executable, "-m", "benchmarks.host_parity", "--rank", protection, mode, "--mib", str(mib)]
    processes = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"RANK": str(rank), "WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": "127.0.0.1"}
            | {"MASTER_PORT": port, "FTD_SNAPSHOT_AGENT": str(host.socket), "OMP_NUM_THREADS": "1"}
            | {"PLACE": str(host.memory / "alone")},
        )
        for rank, host in enumerate(hosts)
    ]
    try:
        lines = [process.stdout.readline() for process in processes if process.stdout is not None]
        if not all(lines):
            raise RuntimeError(f"a rank ended without a result ({protection}, {mode})")
        yield [json.loads(line) for line in lines]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_rank(protection: str, mode: str, mib: int) -> None:
    """Take protected snapshots, or restore; print what was measured, and wait to be killed."""
    import torch
    import torch.distributed as dist
    import xxhash
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from benchmarks.script_state import Light, timed
    from ftd import Snapshotter

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(1 if mode == "save" else 2)
    count = max(1, mib * HOSTS * (1 << 20) // (3 * 4 * WIDTH * WIDTH))
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = Light(list(model.parameters()))

    def digest() -> str:
        hasher = xxhash.xxh3_64()
        for parameter in model.parameters():
            for tensor in (parameter, *optimizer.state[parameter].values()):
                hasher.update(tensor.to_local().detach().numpy())
        return hasher.hexdigest()

    alone = os.environ["PLACE"]  # Without protection the agent's directory is not used.
    snapshots = Snapshotter("bench", protection=protection, directory=alone, model=model, optimizer=optimizer)
    found: dict[str, Any] = {}
    if mode == "save":
        snapshots.restore()
        calls, protected = [], []
        for step in range(1, STEPS + 1):
            found["digest"] = digest()
            call = timed(partial(snapshots.snapshot, step))
            time.sleep(mib / 250)  # There is time for the copy until the next update.
            calls.append(call + timed(optimizer.step))
            snapshots.wait()
            while protection != NONE and dist.get_rank() == 0 and (snapshots.protected_step or 0) < step:
                time.sleep(0.01)
            if protection != NONE and dist.get_rank() == 0:
                (job,) = Path(os.environ["FTD_SNAPSHOT_AGENT"]).parent.glob("*/bench")
                complete = (job / "rank-0" / f"step-{step:012d}.json").stat().st_mtime
                protected.append((job / RETAINED_FILE).stat().st_mtime - complete)
            dist.barrier()
        # The first snapshot allocates, and is examined as a whole.
        found |= {"calls": calls[2:], "protected": protected[2:]}
    else:
        found["restore"] = timed(snapshots.restore)
        found["digest"] = digest()
    print(json.dumps(found), flush=True)
    signal.pause()


def measure_once(protection: str, mib: int) -> dict[str, Any]:
    place = Path(tempfile.mkdtemp(prefix="ftd-parity-", dir="/dev/shm"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, place, ignore_errors=True)
        hosts = [Host(place, f"h{number}") for number in range(HOSTS)]

        def kill_all() -> None:
            for host in hosts:
                host.kill()

        stack.callback(kill_all)
        with ranks_on(hosts, protection, mib, "save") as saved:
            found: dict[str, Any] = {
                "own": [host.bytes_of("rank") for host in hosts],
                "others": [host.bytes_of("copy") + host.bytes_of("parity") for host in hosts],
                "calls": [call for rank in saved for call in rank["calls"]],
                "protected": saved[0]["protected"],
            }
        if protection != NONE:
            hosts[LOST].lose()
            hosts[LOST] = Host(place, "new")
            with ranks_on(hosts, protection, mib, "restore") as restored:
                found["restore"] = [rank["restore"] for rank in restored]
                if [rank["digest"] for rank in restored] != [rank["digest"] for rank in saved]:
                    raise RuntimeError(f"{protection}: the restored state differs")
    return found


def measure(options: Namespace) -> Result:
    result = Result(
        name="host_parity",
        what=f"FSDP2 on {HOSTS} hosts, {options.mib} MiB of state on each, {options.rounds} rounds",
        columns=(
            "protection",
            "others' state on a host, MiB",
            "of its own",
            "snapshot() blocks, ms",
            "protected after, ms",
            "restore() of the lost rank, ms",
            "of the slowest rank, ms",
        ),
    )
    runs: dict[str, list[dict[str, Any]]] = {NONE: [], COPIES: [], PARITY: []}
    for _ in range(options.rounds):
        for protection, some in runs.items():
            some.append(measure_once(protection, options.mib))
    figures: dict[str, dict[str, float]] = {}
    for protection, some in runs.items():
        others, own = max(max(run["others"]) for run in some), max(max(run["own"]) for run in some)
        calls = [call for run in some for call in run["calls"]]
        protected = [time_s for run in some for time_s in run["protected"]]
        lost = [run["restore"][LOST] for run in some if "restore" in run]
        slowest = [max(run["restore"]) for run in some if "restore" in run]
        figures[protection] = {"others": others, "call": min(calls)}
        result.rows.append(
            (
                protection,
                f"{others / (1 << 20):.1f}",
                f"{others / own:.2f}",
                milliseconds(calls),
                milliseconds(protected) if lost else "–",
                milliseconds(lost),
                milliseconds(slowest),
            )
        )
    result.data = {"runs": runs, "mib": options.mib}
    result.notes.append("times are minimum / median / maximum; all hosts and ranks share this machine")
    result.limits = [
        Limit(
            name="memory of parity by memory of copies",
            measured=figures[PARITY]["others"] / figures[COPIES]["others"],
            limit=MEMORY_RATIO,
        ),
        Limit(
            name="shortest snapshot() with parity by shortest with copies",
            measured=figures[PARITY]["call"] / figures[COPIES]["call"],
            limit=SNAPSHOT_RATIO,
        ),
    ]
    return result


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--mib", type=int, default=64, help="state of each rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--rank", nargs=2, metavar=("PROTECTION", "MODE"), help="used by the benchmark itself"
    )
    given = parser.parse_args()
    if given.rank:
        protection, mode = given.rank
        run_rank(protection, mode, given.mib)
    else:
        main(measure(given), given.out)
