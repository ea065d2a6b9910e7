"""Choice of the communicator for a job's backend."""

from collections.abc import Sequence

from runtime.device import DeviceRuntime
from runtime.groups.communicator import MIN_GROUP_TIMEOUT_S, Communicator, SoloCommunicator
from runtime.groups.gloo import GlooCommunicator
from runtime.groups.nccl import NcclCommunicator
from runtime.groups.staged import StagedGlooCommunicator
from runtime.groups.store import Rendezvous


def make_communicator(
    backend: str,
    rendezvous: Rendezvous,
    rank: int,
    hosts: Sequence[str],
    runtime: DeviceRuntime,
    timeout_s: float = MIN_GROUP_TIMEOUT_S,
) -> Communicator:
    """Return the communicator for a job's ``backend``; it is not formed yet, but can already be aborted.

    :param hosts: address of each rank of the world, at which other ranks reach it.
    :param runtime: runtime of the device that tensors are on.
    :param timeout_s: timeout of each operation (``group_timeout_s``).
    """
    if len(hosts) == 1:
        return SoloCommunicator()
    if backend == "nccl":
        return NcclCommunicator(rendezvous, rank, len(hosts), runtime.device, timeout_s=timeout_s)
    if runtime.is_async:
        return StagedGlooCommunicator(rendezvous, rank, len(hosts), hosts[rank], runtime, timeout_s=timeout_s)
    return GlooCommunicator(rendezvous, rank, len(hosts), hosts[rank], timeout_s=timeout_s)
