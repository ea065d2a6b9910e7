"""The protocol between a node daemon and its zygote. The module does not import torch.

``python -m runtime.process.zygote --parent <pid of the daemon>`` exchanges these frames on its stdin and
stdout (stderr is for people). It sends ZygoteReady once, when torch is imported; then a Spawned for each
Spawn, and an Exited when that trainer ends, however it ends. The zygote ends at the end of stdin, and the
kernel then ends its trainers.
"""

from runtime.wire.frames import Frame


class Spawn(Frame, frozen=True, kw_only=True):
    """Fork a trainer, which leads its own process group and connects to ``socket_path`` (Attached, Output)."""

    device: int
    socket_path: str
    environment: dict[str, str]
    """Variables in addition to the zygote's own environment (``CUDA_VISIBLE_DEVICES`` and the like)."""


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


ZygoteNotice = ZygoteReady | Spawned | Exited
