"""The protocol between a node daemon and its zygote. The module does not import torch.

``python -m runtime.process.zygote --parent <pid of the daemon>`` exchanges these frames on its stdin and
stdout (stderr is for people). It sends ZygoteReady once, when torch is imported; then a Spawned for each
Spawn, and an Exited when that trainer ends, however it ends. A CheckDevice forks a process that tests a device:
DeviceCheckBegan, the process's own DeviceChecked unless it fails, and Exited follow. NotForked is the only answer to a
request for which the host has no process or no memory left. The zygote ends at the end of stdin, and the kernel then
ends its trainers.
"""

from runtime.wire.frames import Frame
from statemachine.messages.values import DeviceHealth, PlantedFault


class Spawn(Frame, frozen=True, kw_only=True):
    """Fork a trainer, which leads its own process group and connects to ``socket_path`` (Attached, Output)."""

    device: int
    socket_path: str
    environment: dict[str, str]
    """Variables in addition to the zygote's own environment (``CUDA_VISIBLE_DEVICES`` and the like)."""


class CheckDevice(Frame, frozen=True, kw_only=True):
    """Fork a process that tests a device and then ends."""

    number: int
    """Number of the health check that the test belongs to."""
    device: int
    environment: dict[str, str]
    """Variables in addition to the zygote's own environment."""
    planted: PlantedFault = ""


class ZygoteReady(Frame, frozen=True, kw_only=True):
    """The zygote has imported torch, which took ``import_s`` seconds."""

    pid: int
    import_s: float


class Spawned(Frame, frozen=True, kw_only=True):
    """A trainer was forked."""

    device: int
    pid: int
    """Process id, which is also the id of its process group: end it with ``os.killpg``."""


class Exited(Frame, frozen=True, kw_only=True):
    """A trainer has ended."""

    pid: int
    status: int
    """Exit code, or the negative number of the signal that ended it, as in ``subprocess``."""


class NotForked(Frame, frozen=True, kw_only=True):
    """A trainer, or a process that tests a device, could not be forked."""

    device: int
    check: int | None
    """Number of the health check that the test belongs to; ``None`` for a trainer."""
    reason: str


class DeviceCheckBegan(Frame, frozen=True, kw_only=True):
    """A process that tests a device was forked."""

    number: int
    device: int
    pid: int
    """Process id, which is also the id of its process group."""


class DeviceChecked(Frame, frozen=True, kw_only=True):
    """A device was tested. The forked process writes this frame itself, in one write."""

    number: int
    result: DeviceHealth


ZygoteRequest = Spawn | CheckDevice
ZygoteNotice = ZygoteReady | Spawned | NotForked | DeviceCheckBegan | DeviceChecked | Exited
