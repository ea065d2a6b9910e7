"""The zygote: a single-threaded process that has imported torch and forks trainers and tests of devices.

Importing torch takes 0.8 to 1.6 s, and transformers as long again. A fork of a process that has imported
them takes tens of milliseconds, so a crashed trainer is back well within a second. A fork copies only the
calling thread, so a lock held by any other thread would stay locked forever in the child. The zygote
therefore never starts a thread, and checks that there is only one.

The node daemon starts ``python -m runtime.process.zygote --parent PID``, writes ``ZygoteRequest`` to its stdin
and reads ``ZygoteNotice`` from its stdout (``runtime.wire.zygote_protocol``). Where the nodes of a cluster share a
machine, one process imports torch for all of their zygotes (``runtime.process.zygote_server``).

Nothing outlives its parent: the kernel kills the zygote when the daemon ends, and each trainer when the
zygote ends (PR_SET_PDEATHSIG), so SIGKILL of the daemon leaves no orphan process.
"""

import argparse
import contextlib
import faulthandler
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from runtime.parent import die_with_parent, run_child
from runtime.process.zygote_request import zygote_from_server
from runtime.wire.frames import Decoder, ProtocolError, encode
from runtime.wire.zygote_protocol import (
    CheckDevice,
    DeviceCheckBegan,
    DeviceChecked,
    Exited,
    NotForked,
    Spawn,
    Spawned,
    ZygoteNotice,
    ZygoteReady,
    ZygoteRequest,
)
from statemachine.messages.trainer import Output

for _library in ("OMP", "OPENBLAS", "MKL"):
    # Their thread pools would start at import. A trainer gets its parallelism from the stages.
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")


_PARTS = {
    "transformers": ("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama")
}
"""Further modules to load. transformers loads its submodules lazily; these contain most of what every model
needs.
"""


def main() -> int:
    """Serve until stdin ends.

    :raises SystemExit: code 2 if the daemon is already gone.
    """
    parser = argparse.ArgumentParser(
        prog="python -m runtime.process.zygote", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--parent", type=int, required=True, help="process id of the node daemon")
    parser.add_argument("--lifeline", type=int, help="file descriptor whose end ends the zygote")
    parser.add_argument("modules", nargs="*", help="modules to load besides torch")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The daemon handles Ctrl-C in a terminal.
    zygote_from_server(os.environ, arguments.modules)
    run(arguments.modules, parent=arguments.parent, lifeline=arguments.lifeline)
    return 0


def run(modules: list[str], *, parent: int, lifeline: int | None) -> None:
    """Load the modules and fork trainers on request, until stdin or the lifeline ends.

    :param parent: process id of the parent.
    :param lifeline: a file descriptor that ends with the process for which this one is the zygote, if that is
        not the parent.
    """
    notices = os.dup(1)
    os.dup2(2, 1)  # Output during the import of torch must not get between the frames.
    # A library that asks torch for GPUs while it is imported would initialise CUDA, which forks cannot use.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    started = time.monotonic()
    gc.disable()  # Everything that imports create stays: collecting meanwhile takes a sixth of the time.
    import runtime.monitoring.device_check
    import runtime.process.trainer  # noqa: F401  # the point of a zygote: everything heavy is loaded before a fork

    preload(parent, modules, notices, lifeline)
    gc.collect()
    gc.freeze()  # Children never visit these objects, which would copy their pages.
    notify(notices, ZygoteReady(pid=os.getpid(), import_s=time.monotonic() - started))
    serve(requests=0, notices=notices, lifeline=lifeline)


def preload(parent: int, modules: list[str], notices: int, lifeline: int | None) -> None:
    """Load the modules, except those that are not installed, fail, or start threads; log the latter two.

    A module that starts threads cannot be unloaded, so this process then starts again without it.
    """
    for module in modules:
        try:
            for part in (module, *_PARTS.get(module, ())):
                importlib.import_module(part)
        except (Exception, SystemExit) as error:
            if not (isinstance(error, ModuleNotFoundError) and error.name == module):
                sys.stderr.write(f"node.preload: {module}: {type(error).__name__}: {error}\n")
        if thread_count() > 1:
            sys.stderr.write(f"node.preload: {module} starts threads and is left out\n")
            sys.stderr.flush()
            os.dup2(notices, 1)
            others = [other for other in modules if other != module]
            command = [sys.executable, "-P", "-m", "runtime.process.zygote", "--parent", str(parent)]
            if lifeline is not None:
                os.set_inheritable(lifeline, True)
                command += ["--lifeline", str(lifeline)]
            os.execv(sys.executable, [*command, *others])


def thread_count() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def notify(descriptor: int, notice: ZygoteNotice) -> None:
    data = memoryview(encode(notice))
    while data:
        data = data[os.write(descriptor, data) :]


def serve(requests: int, notices: int, lifeline: int | None) -> None:
    """Fork on request, and report exits, until ``requests`` or ``lifeline`` ends."""
    wakeup_read, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    lifelines = () if lifeline is None else (lifeline,)
    private = (notices, wakeup_read, wakeup_write, *lifelines)
    decoder: Decoder[ZygoteRequest] = Decoder(ZygoteRequest)
    while True:
        readable, _, _ = select.select([requests, wakeup_read, *lifelines], [], [])
        if lifeline in readable:
            return
        if wakeup_read in readable:
            os.read(wakeup_read, 4096)
            for pid, status in reap():
                notify(notices, Exited(pid=pid, status=status))
        if requests in readable:
            data = os.read(requests, 65536)
            if not data:
                return
            try:
                asked = decoder.feed(data)
            except ProtocolError as error:
                raise SystemExit(f"zygote: {error}") from error
            for request in asked:
                _carry_out(request, notices, private)


def _carry_out(request: ZygoteRequest, notices: int, private: tuple[int, ...]) -> None:
    notify(notices, _fork_for(request, notices, private))


def _fork_for(request: ZygoteRequest, notices: int, private: tuple[int, ...]) -> ZygoteNotice:
    """Fork the process that is asked for, and return the notice about it.

    A host that has no process or memory left for it must not end this zygote, and with it all of its trainers.
    """
    check = request.number if isinstance(request, CheckDevice) else None
    try:
        match request:
            case Spawn():
                pid = fork(lambda: _run_trainer(request), private)
                return Spawned(device=request.device, pid=pid)
            case CheckDevice():
                answers = os.dup(notices)  # The child closes ``private``.
                try:
                    pid = fork(lambda: _check_device(request, answers), private)
                finally:
                    os.close(answers)
                return DeviceCheckBegan(number=request.number, device=request.device, pid=pid)
    except OSError as error:
        return NotForked(device=request.device, check=check, reason=error.strerror or str(error))


def reap() -> Iterator[tuple[int, int]]:
    """Yield the pid of every child process that has ended, and its exit code or the negative number of its signal."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def fork(run: Callable[[], int], private: tuple[int, ...]) -> int:
    """Fork a process that ends with the exit code of ``run``, and return its pid; the child never returns."""
    threads = thread_count()
    if threads != 1:
        raise RuntimeError(f"the zygote has {threads} threads; forking it now could deadlock the child")
    zygote = os.getpid()
    pid = os.fork()
    if pid == 0:
        run_child(zygote, partial(become_child, run, private))
    with contextlib.suppress(PermissionError, ProcessLookupError):  # It is already gone.
        # The child does the same. Whichever comes first, killpg works from the moment the notice is sent.
        os.setpgid(pid, pid)
    return pid


def become_child(run: Callable[[], int], private: tuple[int, ...]) -> int:
    """Drop the zygote's state in the forked child, and call ``run``."""
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for descriptor in (null, *private):
        os.close(descriptor)
    return run()


def _run_trainer(spawn: Spawn) -> int:
    """Train, with the output connected to the daemon."""
    os.environ.update(spawn.environment)
    connect_output(spawn)
    from runtime.process.trainer import run_trainer

    return run_trainer(spawn.socket_path, spawn.device)


def _check_device(request: CheckDevice, answers: int) -> int:
    """Test a device, and write the result in one piece, because the zygote writes to the same pipe."""
    os.environ.update(request.environment)
    from runtime.monitoring.device_check import check_device

    result = check_device(request.device, request.planted)
    os.write(answers, encode(DeviceChecked(number=request.number, result=result)))
    return 0


def connect_output(spawn: Spawn) -> None:
    """Connect stdout and stderr to the daemon, which keeps their tail for its events."""
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.connect(spawn.socket_path)
    stream.sendall(encode(Output(device=spawn.device, pid=os.getpid())))
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    stream.close()
    for text in (sys.stdout, sys.stderr):
        reconfigure = getattr(text, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True)
    faulthandler.enable()  # A crash in native code prints a traceback for the event that reports the exit.


if __name__ == "__main__":
    sys.exit(main())
