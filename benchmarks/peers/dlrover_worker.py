"""Timings of DLRover's in-memory flash checkpoint of the same state (``benchmarks.snapshot --peer``).

It runs in a separate environment with ``dlrover==0.6.1`` and torch, and uses nothing of ftd. Without its
launcher DLRover starts its saver process itself, which is all that memory checkpoints need. It prints JSON:
the seconds for which ``save_checkpoint`` to memory blocks, with the first call separate, and the seconds of
``load_checkpoint`` with a copy into the existing tensors.

    <venv>/bin/python benchmarks/peers/dlrover_worker.py --gib 1 --rounds 6
"""

import argparse
import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

WIDTH = 1024
SHM = Path("/dev/shm")


def state_of(gib: float) -> dict[str, dict[str, torch.Tensor]]:
    """Return a model's and Adam's state as in ``benchmarks.snapshot``."""
    matrices = round(gib * 1024**3 / (3 * 4 * WIDTH * WIDTH))
    kinds = ("model", "exp_avg", "exp_avg_sq")
    return {kind: {str(i): torch.randn(WIDTH, WIDTH) for i in range(matrices)} for kind in kinds}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--gib", type=float, default=1)
    options.add_argument("--rounds", type=int, default=6)
    given = options.parse_args()
    torch.set_num_threads(1)
    from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    before = set(SHM.glob("ckpt_shm_*"))
    folder = tempfile.mkdtemp(prefix="ftd-dlrover-")
    checkpointer = DdpCheckpointer(folder)
    state = state_of(given.gib)
    saves, loads = [], []
    try:
        for step in range(1, given.rounds + 2):
            began = time.perf_counter()
            saved = checkpointer.save_checkpoint(
                step, state, f"{folder}/{step}.pt", storage_type=StorageType.MEMORY
            )
            saves.append(time.perf_counter() - began)
            assert saved is not False, "it was skipped"
        for _ in range(3):
            began = time.perf_counter()
            loaded = checkpointer.load_checkpoint()
            for kind, table in state.items():
                for name, tensor in table.items():
                    tensor.copy_(loaded[kind][name])
            loads.append(time.perf_counter() - began)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"first_s": saves[:1], "save_s": saves[1:], "load_s": loads}), flush=True)
    with contextlib.suppress(Exception):
        checkpointer.close()
    saver = getattr(getattr(checkpointer, "_engine", None), "saver_proc", None)
    if saver is not None:
        saver.kill()
    for left in set(SHM.glob("ckpt_shm_*")) - before:
        left.unlink()  # Its memory stays allocated until the file is removed.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
