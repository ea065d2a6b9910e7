"""Which communicator a job's backend is."""

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
    """The communicator for a job's ``backend``; not yet formed, but it can already be aborted.

    :param hosts: for each rank of the world the address that it is reached at.
    :param runtime: of the device that tensors are on.
    :param timeout_s: of each operation (``group_timeout_s``).
    """
    if len(hosts) == 1:
        return SoloCommunicator()
    if backend == "nccl":
        return NcclCommunicator(rendezvous, rank, len(hosts), runtime.device, timeout_s=timeout_s)
    if runtime.is_async:
        return StagedGlooCommunicator(rendezvous, rank, len(hosts), hosts[rank], runtime, timeout_s=timeout_s)
    return GlooCommunicator(rendezvous, rank, len(hosts), hosts[rank], timeout_s=timeout_s)
