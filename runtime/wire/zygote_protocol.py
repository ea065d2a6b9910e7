"""What a node daemon and its zygote say to each other. No torch in here.

``python -m runtime.process.zygote --parent <pid of the daemon>`` speaks these frames over its stdin and
stdout (stderr is for people). Order: Warm once, when torch is imported; then per Spawn a Spawned, and an
Exited when that trainer ends, however it ends. End of stdin ends the zygote, and the kernel its trainers.
"""

from runtime.wire.frames import Frame


class Spawn(Frame, frozen=True, kw_only=True):
    """Fork a trainer. It leads its own process group and connects to ``socket_path`` (Attached, Output)."""

    device: int
    socket_path: str
    environment: dict[str, str]
    """Added to the zygote's own environment (``CUDA_VISIBLE_DEVICES`` and the like)."""


class ZygoteReady(Frame, frozen=True, kw_only=True):
    pid: int
    import_s: float


class Spawned(Frame, frozen=True, kw_only=True):
    device: int
    pid: int
    """Also the id of its process group: end it with ``os.killpg``."""


class Exited(Frame, frozen=True, kw_only=True):
    pid: int
    status: int
    """Exit code, or the negative number of the signal that ended it, as ``subprocess`` counts."""


ZygoteNotice = ZygoteReady | Spawned | Exited
