"""A process that has imported torch and forks zygotes, for several nodes that share one machine.

The zygote of each node imports torch, which takes three to four seconds of CPU time. On a machine with the
nodes of a whole cluster, as under ``ftd local``, one process imports it for all of them:

    python -P -m runtime.process.zygote_server --parent PID --listener DESCRIPTOR

A daemon starts its zygote as always. If ``FTD_ZYGOTE_SERVER`` names the socket, that process does not import
torch but sends its standard streams and its ``Context`` over the socket (``zygote_from_server``). The server
forks a zygote with these streams and sends the exit status of it back. The started process ends with the
same status, so the daemon notices no difference.

A zygote ends when the process that asked for it ends, because its connection ends; and the kernel kills all
zygotes when the server ends, and the server when its own parent ends. The kernel fixes some properties of a
process when it starts, and libraries read some variables once. The server therefore rejects a request whose
``Context`` has other ``fixed`` properties, and the process then becomes a zygote itself.
"""

import argparse
import contextlib
import gc
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec

from runtime.parent import die_with_parent

SERVER_VARIABLE = "FTD_ZYGOTE_SERVER"
"""Environment variable with the path of the server's socket."""
MAX_CONTEXT_BYTES = 1 << 20
_NAMESPACES = ("net", "mnt", "pid", "ipc", "user")
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
        environment={name: value for name, value in os.environ.items() if name != SERVER_VARIABLE},
        directory=str(Path.cwd()),
        search_path=sys.path,
        modules=modules,
    )


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
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stream:
        try:
            stream.connect(path)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_CONTEXT_BYTES)
            socket.send_fds(stream, [msgspec.msgpack.encode(describe_context(modules))], [0, 1, 2])
            data = stream.recv(MAX_CONTEXT_BYTES)
        except OSError as error:
            sys.stderr.write(f"${SERVER_VARIABLE}: {path}: {error.strerror}\n")
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


@dataclass(slots=True)
class Server:
    """The state of the server: its sockets and its zygotes."""

    listener: socket.socket
    context: Context
    requests: list[socket.socket] = field(default_factory=list)
    """Connections whose request has not come yet."""
    zygotes: dict[int, socket.socket] = field(default_factory=dict)
    """Process id of each zygote → connection of the process that asked for it."""

    def serve(self) -> None:
        """Fork a zygote for each request, and report the end of each."""
        wakeup_read, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        while True:
            sockets: list[socket.socket | int] = [self.listener, wakeup_read, *self.requests]
            readable, _, _ = select.select(sockets, [], [])
            if wakeup_read in readable:
                os.read(wakeup_read, 4096)
                self._reap()
            if self.listener in readable:
                self.requests.append(self.listener.accept()[0])
            for connection in [one for one in self.requests if one in readable]:
                self.requests.remove(connection)
                self._take(connection, (wakeup_read, wakeup_write))

    def _take(self, connection: socket.socket, private: tuple[int, ...]) -> None:
        data, streams, _, _ = socket.recv_fds(connection, MAX_CONTEXT_BYTES, 3)
        try:
            asked = msgspec.msgpack.decode(data, type=Context)
        except msgspec.DecodeError:
            asked = None
        if asked is None or len(streams) != 3:
            _answer(connection, None)
        elif different := asked.fixed.items() ^ self.context.fixed.items():
            names = ", ".join(sorted({name for name, _ in different}))
            sys.stderr.write(f"a zygote imports torch itself, because it differs in {names}\n")
            _answer(connection, None)
        else:
            server = os.getpid()
            pid = os.fork()
            if pid == 0:
                for other in (self.listener, *self.requests, *self.zygotes.values()):
                    other.close()
                for descriptor in private:
                    os.close(descriptor)
                become_zygote(asked, streams, connection, server)
            self.zygotes[pid] = connection
        for descriptor in streams:
            os.close(descriptor)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            _answer(self.zygotes.pop(pid), os.waitstatus_to_exitcode(status))


def _answer(connection: socket.socket, status: int | None) -> None:
    with connection, contextlib.suppress(OSError):  # Whoever asked may have ended.
        connection.send(msgspec.msgpack.encode(Answer(status=status)), socket.MSG_NOSIGNAL)


def become_zygote(asked: Context, streams: list[int], connection: socket.socket, server: int) -> NoReturn:
    """Turn the forked child into a zygote with the context and streams of the process that asked for it."""
    from runtime.process import zygote

    code = 1
    try:
        die_with_parent(server)
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.environ.clear()
        os.environ.update(asked.environment)
        os.chdir(asked.directory)
        sys.path[:] = asked.search_path
        zygote.run(asked.modules, parent=server, lifeline=connection.detach())
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    except BaseException:  # After any error, the child must not return into the server's loop.
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> int:
    """Serve until this process is killed.

    :raises SystemExit: code 2 if the parent is already gone.
    """
    parser = argparse.ArgumentParser(
        prog="python -m runtime.process.zygote_server", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--parent", type=int, required=True, help="process id of the process that started it")
    parser.add_argument(
        "--listener", type=int, required=True, help="file descriptor of the socket (``listen``)"
    )
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=arguments.listener) as listener:
        gc.disable()
        import runtime.process.zygote  # sets the variables that zygotes set before they describe themselves

        context = describe_context([])
        import runtime.monitoring.device_check
        import runtime.process.trainer  # noqa: F401  # everything heavy is loaded before a fork

        gc.collect()
        gc.freeze()
        Server(listener, context).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
