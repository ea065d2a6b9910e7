"""Measurements of torch.save, torch.distributed.checkpoint and DLRover with the same state, for
``benchmarks.snapshot``.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.script_state import SHM, state_of, timed

LOADS = ("torch.load shm", "DCP load shm", "torch.load disk", "DCP load disk")
SAVES = ("torch.save shm", "DCP save shm", "DCP async_save shm", "torch.save disk", "DCP save disk")
DLROVER_S = 300

State = dict[str, dict[str, torch.Tensor]]


def measure_peers(gib: float, disk: Path, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each of ``SAVES`` (of async_save: the seconds that it blocks) and ``LOADS``."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model, optimizer, _ = state_of(gib)
    parameters = dict(model.named_parameters())
    state: State = {"model": {k: p.detach() for k, p in parameters.items()}}
    state |= {str(i): dict(optimizer.state[p]) for i, p in enumerate(parameters.values())}
    found: dict[str, list[float]] = {}
    for where, place in (("shm", SHM), ("disk", disk)):
        folder = Path(tempfile.mkdtemp(dir=place))
        try:
            found |= _files(state, where, folder, repeats)
            if where == "shm":
                found["DCP async_save shm"] = _async_saves(state, folder, repeats)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return found


def _files(state: State, where: str, folder: Path, repeats: int) -> dict[str, list[float]]:
    file, tree = folder / "state.pt", folder / "dcp"
    found: dict[str, list[float]] = {}

    def load_into() -> None:
        loaded = torch.load(file, weights_only=True)
        for name, table in state.items():
            for key, tensor in table.items():
                tensor.copy_(loaded[name][key])

    def read(work: Callable[[], Any], files: Callable[[], Iterable[Path]]) -> list[float]:
        seconds = []
        for _ in range(repeats):
            for one in files():
                drop(one)
            seconds.append(timed(work))
        return seconds

    saves = repeats if where == "shm" else 1
    found[f"torch.save {where}"] = [timed(partial(torch.save, state, file)) for _ in range(saves)]
    found[f"torch.load {where}"] = read(load_into, partial(iter, [file]))
    file.unlink()
    found[f"DCP save {where}"] = [timed(partial(dcp.save, state, checkpoint_id=tree, no_dist=True))]
    load = partial(dcp.load, state, checkpoint_id=tree, no_dist=True)
    found[f"DCP load {where}"] = read(load, tree.iterdir)
    shutil.rmtree(tree)
    return found


def _async_saves(state: State, folder: Path, repeats: int) -> list[float]:
    calls = []
    for number in range(repeats):
        began = time.perf_counter()
        future: Any = dcp.async_save(state, checkpoint_id=folder / f"a{number}", no_dist=True)
        calls.append(time.perf_counter() - began)
        future.result()
        shutil.rmtree(folder / f"a{number}")
    return calls


def drop(file: Path) -> None:
    """Write the file to disk and drop its pages; in a memory file system this has no effect."""
    descriptor = os.open(file, os.O_RDONLY)
    with contextlib.suppress(OSError):
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def measure_dlrover(venv: Path, gib: float, rounds: int) -> dict[str, Any]:
    """Return the JSON that DLRover's worker prints, or ``problem`` with the reason if it fails."""
    command = [str(venv / "bin/python"), str(Path(__file__).parent / "peers/dlrover_worker.py"),
               "--gib", str(gib), "--rounds", str(rounds)]  # fmt: skip
    before = set(SHM.glob("ckpt_shm_*"))
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        # Its saver process inherits the output files and outlives it. So these are no pipes, and the
        # process group is killed.
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=errors,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            code = process.wait(DLROVER_S)
        except subprocess.TimeoutExpired:
            return {"problem": f"it did not end within {DLROVER_S} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for left in set(SHM.glob("ckpt_shm_*")) - before:
                left.unlink(missing_ok=True)
        output.seek(0)
        errors.seek(0)
        lines = [line for line in output if line.startswith('{"first_s"')]
        if not lines:
            return {"problem": (errors.read().strip().splitlines() or [f"exit code {code}"])[-1]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found
