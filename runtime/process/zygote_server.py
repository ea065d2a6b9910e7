"""A process that has imported torch and forks zygotes, for several nodes that share one machine.

The zygote of each node imports torch, which takes three to four seconds of CPU time. On a machine with the
nodes of a whole cluster, as under ``ftd local``, one process imports it for all of them:

    python -P -m runtime.process.zygote_server --parent PID --listener DESCRIPTOR

A daemon starts its zygote as always. If ``FTD_ZYGOTE_SERVER`` names the socket, that process does not import
torch but sends its standard streams and its ``Context`` over the socket (``runtime.process.zygote_request``).
The server forks a zygote with these streams and sends the exit status of it back. The started process ends with
the same status, so the daemon notices no difference.

A zygote ends when the process that asked for it ends, because its connection ends; and the kernel kills all
zygotes when the server ends, and the server when its own parent ends. The kernel fixes some properties of a
process when it starts, and libraries read some variables once. The server therefore rejects a request whose
``Context`` has other ``fixed`` properties, and the process then becomes a zygote itself. The zygote enters the
network namespace of the process that asked, unless the server may not do that and rejects such requests, too.
"""

import argparse
import contextlib
import gc
import os
import select
import signal
import socket
import sys
from dataclasses import dataclass, field
from functools import partial

import msgspec

from runtime.parent import die_with_parent, run_child
from runtime.process import zygote  # Sets the variables that zygotes set before they describe themselves.
from runtime.process.zygote_request import (
    MAX_CONTEXT_BYTES,
    Answer,
    Context,
    describe_context,
    enter_network,
    may_enter_networks,
    own_network,
)

_DESCRIPTORS = 4
"""Number of file descriptors of a request: standard streams and network namespace."""


@dataclass(slots=True)
class Server:
    """The state of the server: its sockets and its zygotes."""

    listener: socket.socket
    context: Context
    enters_networks: bool
    """Whether its zygotes may enter other network namespaces."""
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
                for pid, status in zygote.reap():
                    _answer(self.zygotes.pop(pid), status)
            if self.listener in readable:
                self.requests.append(self.listener.accept()[0])
            for connection in [one for one in self.requests if one in readable]:
                self.requests.remove(connection)
                self._take(connection, (wakeup_read, wakeup_write))

    def _take(self, connection: socket.socket, private: tuple[int, ...]) -> None:
        data, descriptors, _, _ = socket.recv_fds(connection, MAX_CONTEXT_BYTES, _DESCRIPTORS)
        try:
            asked = msgspec.msgpack.decode(data, type=Context)
        except msgspec.DecodeError:
            asked = None
        if asked is None or len(descriptors) != _DESCRIPTORS:
            _answer(connection, None)
        elif different := self._differences(asked):
            sys.stderr.write(f"a zygote imports torch itself, because it differs in {', '.join(different)}\n")
            _answer(connection, None)
        else:
            self._fork(asked, descriptors, connection, private)
        for descriptor in descriptors:
            os.close(descriptor)

    def _fork(
        self, asked: Context, descriptors: list[int], connection: socket.socket, private: tuple[int, ...]
    ) -> None:
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # The other zygotes must not end with this request.
            sys.stderr.write(
                f"a zygote imports torch itself, because it cannot be forked: {error.strerror}\n"
            )
            _answer(connection, None)
            return
        if pid == 0:
            for other in (self.listener, *self.requests, *self.zygotes.values()):
                other.close()
            for descriptor in private:
                os.close(descriptor)
            run_child(server, partial(become_zygote, asked, descriptors, connection, server))
        self.zygotes[pid] = connection

    def _differences(self, asked: Context) -> list[str]:
        """Return the names of the properties of a request that a forked zygote cannot have."""
        names = {name for name, _ in asked.fixed.items() ^ self.context.fixed.items()}
        if asked.network != self.context.network and not self.enters_networks:
            names.add("network namespace")
        return sorted(names)


def _answer(connection: socket.socket, status: int | None) -> None:
    with connection, contextlib.suppress(OSError):  # Whoever asked may have ended.
        connection.send(msgspec.msgpack.encode(Answer(status=status)), socket.MSG_NOSIGNAL)


def become_zygote(asked: Context, descriptors: list[int], connection: socket.socket, server: int) -> int:
    """Turn the forked child into a zygote with the context of the process that asked for it, and return its exit
    code.

    :param descriptors: its standard streams, and its network namespace.
    """
    *streams, network = descriptors
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        if asked.network != own_network():
            enter_network(network)
        os.close(network)
        os.environ.clear()
        os.environ.update(asked.environment)
        os.chdir(asked.directory)
        sys.path[:] = asked.search_path
        zygote.run(asked.modules, parent=server, lifeline=connection.detach())
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
            return 1
        return error.code or 0
    return 0


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
        context = describe_context([])
        import runtime.monitoring.device_check
        import runtime.process.trainer  # noqa: F401  # everything heavy is loaded before a fork

        gc.collect()
        gc.freeze()
        Server(listener, context, may_enter_networks()).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main())
