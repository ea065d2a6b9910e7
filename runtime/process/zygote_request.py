"""The request of a process that is to become a zygote to ``runtime.process.zygote_server``, and its answer."""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import msgspec

SERVER_VARIABLE = "FTD_ZYGOTE_SERVER"
"""Environment variable with the path of the server's socket."""
MAX_CONTEXT_BYTES = 1 << 20
_NAMESPACES = ("mnt", "pid", "ipc", "user")
_NETWORK = "/proc/self/ns/net"
_CLONE_NEWNET = 0x40000000
_LIMITS = ("RLIMIT_AS", "RLIMIT_DATA", "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_CORE", "RLIMIT_MEMLOCK")
_READ_AT_START = (
    "GLIBC_",
    "LD_",
    "MALLOC_",
    "PYTHON",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "KMP_",
    "TORCH_",
    "CUDA_",
)
_APPLIED = ("PYTHONPATH",)
"""Variables that begin like those of ``_READ_AT_START`` but can be applied later."""


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """The circumstances of a process that a zygote takes over from the one that asks for it."""

    fixed: dict[str, str]
    """Properties that a running process cannot change, or that libraries have read."""
    network: str
    """Network namespace. Only a privileged server can let a zygote enter another one than its own."""
    environment: dict[str, str]
    directory: str
    search_path: list[str]
    modules: list[str]
    """Modules to load besides torch."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a request."""

    status: int | None
    """The zygote's exit code, or the negative number of the signal that ended it; ``None`` if it was not
    forked.
    """


def describe_context(modules: list[str]) -> Context:
    """Return the context of this process."""
    fixed = {"user": f"{os.getresuid()} {os.getresgid()} {sorted(os.getgroups())}"}
    fixed |= {f"{name} namespace": str(Path(f"/proc/self/ns/{name}").readlink()) for name in _NAMESPACES}
    fixed |= {name: str(resource.getrlimit(getattr(resource, name))) for name in _LIMITS}
    fixed |= {"cgroup": Path("/proc/self/cgroup").read_text(), "python": sys.executable}
    fixed |= {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_READ_AT_START) and name not in _APPLIED
    }
    return Context(
        fixed=fixed,
        network=own_network(),
        environment={name: value for name, value in os.environ.items() if name != SERVER_VARIABLE},
        directory=str(Path.cwd()),
        search_path=sys.path,
        modules=modules,
    )


def own_network() -> str:
    """Return the network namespace of this process."""
    return str(Path(_NETWORK).readlink())


def enter_network(namespace: int) -> None:
    """Move this process, which has one thread, into a network namespace.

    :param namespace: a file descriptor of the namespace.
    :raises OSError: this process may not do that.
    """
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def may_enter_networks() -> bool:
    """Return whether this process may enter network namespaces."""
    with Path(_NETWORK).open("rb") as own, contextlib.suppress(OSError):
        enter_network(own.fileno())
        return True
    return False


def listen(path: Path) -> socket.socket:
    """Return the socket of a server. Requests wait in it until the server has imported torch.

    :raises OSError: the path is too long or not writable.
    """
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(1024)
    return listener


def zygote_from_server(environment: Mapping[str, str], modules: list[str]) -> None:
    """Let the server named in ``environment`` fork the zygote, and end with its exit status.

    Return if there is no server or it rejects the request: this process then has to become the zygote.
    """
    path = environment.get(SERVER_VARIABLE)
    if not path:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stream, Path(_NETWORK).open("rb") as network:
        try:
            stream.connect(path)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_CONTEXT_BYTES)
            request = msgspec.msgpack.encode(describe_context(modules))
            socket.send_fds(stream, [request], [0, 1, 2, network.fileno()])
            data = stream.recv(MAX_CONTEXT_BYTES)
        except OSError as error:
            sys.stderr.write(f"${SERVER_VARIABLE}: {path}: {error.strerror or error}\n")
            return
        except UnicodeEncodeError:
            sys.stderr.write(
                "a zygote imports torch itself, because its environment or directory is not valid UTF-8\n"
            )
            return
    if not data:
        raise SystemExit(f"the server of zygotes at {path} has ended")
    status = msgspec.msgpack.decode(data, type=Answer).status
    if status is not None:
        end_with(status)


def end_with(status: int) -> NoReturn:
    """End this process as the one with this status ended: by the same signal, or with the same code."""
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -status)
    os._exit(status if status >= 0 else 128 - status)
