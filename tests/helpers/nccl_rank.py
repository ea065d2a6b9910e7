"""One rank of a world over NCCL, on its own GPU, which prints the results of every operation as JSON.

python -m tests.helpers.nccl_rank PORT RANK SIZE
"""

import json
import sys

import torch

from runtime.groups.nccl import NcclCommunicator
from runtime.groups.store import Rendezvous
from tests.helpers.gpu_support import CudaComputing
from tests.helpers.harness import TOKEN
from tests.helpers.staged import run_operations


def main() -> None:
    port, rank, size = map(int, sys.argv[1:])
    where = Rendezvous(host="127.0.0.1", port=port, token=TOKEN, generation=1)
    runtime = CudaComputing(rank)
    runtime.prepare_thread()
    world = tuple(range(size))
    with runtime.computing(), NcclCommunicator(where, rank, size, runtime.device) as one:
        if size == 1:
            one.form([])
            ones = torch.ones(4)
            one._groups["state", True].allreduce([ones]).wait()
            print(json.dumps([runtime.values(ones)]))
            return
        one.form([], [("activation", source, (source + 1) % size) for source in world])
        print(json.dumps(run_operations(one, runtime)))
        one.wait(one.all_reduce(torch.zeros(1), world))


if __name__ == "__main__":
    main()
