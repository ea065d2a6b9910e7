"""Zygotes that a server forks, with real processes."""

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from runtime.process.zygote import preload, serve
from runtime.process.zygote_request import (
    SERVER_VARIABLE,
    Answer,
    describe_context,
    listen,
    zygote_from_server,
)
from runtime.process.zygote_server import Server, become_zygote
from runtime.wire.frames import Decoder, encode
from runtime.wire.zygote_protocol import CheckDevice, NotForked, Spawn, ZygoteNotice, ZygoteReady
from tests.helpers.waiting import PATIENCE_S, until


class Asked:
    """A process that asked the server for a zygote."""

    def __init__(self, path: Path, *modules: str, prefix: tuple[str, ...] = (), **environment: str) -> None:
        command = [sys.executable, "-m", "runtime.process.zygote", "--parent", str(os.getpid()), *modules]
        self.process = subprocess.Popen(
            [*prefix, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, SERVER_VARIABLE: str(path), **environment},
        )
        assert self.process.stdout is not None
        decoder: Decoder[ZygoteNotice] = Decoder(ZygoteNotice)
        notice = next(iter(decoder.feed(os.read(self.process.stdout.fileno(), 4096))), None)
        assert isinstance(notice, ZygoteReady)
        self.zygote = notice.pid

    def end(self) -> tuple[int, str]:
        """Return the exit status and what was written to stderr."""
        _, stderr = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, stderr.decode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the path of a server's socket."""
    path = tmp_path_factory.mktemp("z") / "s"
    with serving(path):
        yield path


def serving(path: Path, prefix: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    with listen(path) as listener:
        arguments = ["--parent", str(os.getpid()), "--listener", str(listener.fileno())]
        return Ended(
            [*prefix, sys.executable, "-P", "-m", "runtime.process.zygote_server", *arguments],
            pass_fds=[listener.fileno()],
        )


class Ended(subprocess.Popen[bytes]):
    """A process that ends with its block."""

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.wait()


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def text(pid: int, file: str) -> str:
    return Path(f"/proc/{pid}/{file}").read_bytes().replace(b"\0", b"\n").decode()


def test_a_zygote_has_the_environment_of_the_process_that_asked(server: Path) -> None:
    asked = Asked(server, "calendar", PYTHONPATH=str(Path.cwd()), LANG="xx")
    assert asked.zygote != asked.process.pid
    asked.process.stdin.close()  # type: ignore[union-attr]
    until(lambda: gone(asked.zygote))
    asked.process.stdin = None
    assert asked.end() == (0, "")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_the_process_that_asked_ends_as_its_zygote_does(server: Path, number: signal.Signals) -> None:
    asked = Asked(server)
    os.kill(asked.zygote, number)
    assert asked.end()[0] == -number


def test_a_zygote_ends_with_the_process_that_asked(server: Path) -> None:
    """The next request is served."""
    asked = Asked(server)
    asked.process.kill()
    until(lambda: gone(asked.zygote))
    asked.end()
    again = Asked(server)
    assert not gone(again.zygote)
    again.process.kill()
    again.end()


def test_a_module_that_starts_threads_is_left_out_and_the_zygote_still_ends(
    server: Path, tmp_path: Path
) -> None:
    (tmp_path / "threads_at_import.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    asked = Asked(server, "threads_at_import", PYTHONPATH=f"{Path.cwd()}:{tmp_path}")
    assert asked.zygote != asked.process.pid
    asked.process.kill()
    until(lambda: gone(asked.zygote))
    assert "threads_at_import starts threads and is left out" in asked.end()[1]


def test_a_module_that_ends_its_process_when_it_is_imported_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ends_at_import.py").write_text("import sys\nsys.exit()\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("runtime.process.zygote.thread_count", lambda: 1)
    preload(os.getppid(), ["ends_at_import"], notices=1, lifeline=None)
    assert "node.preload: ends_at_import: SystemExit" in capsys.readouterr().err


def test_a_process_with_other_settings_of_the_c_library_is_its_own_zygote(server: Path) -> None:
    asked = Asked(server, MALLOC_ARENA_MAX="1")
    assert asked.zygote == asked.process.pid
    asked.process.kill()
    asked.end()


def test_a_process_whose_environment_is_not_utf8_is_its_own_zygote(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(os.environ, "LATIN", os.fsdecode(b"caf\xe9"))
    with listen(tmp_path / "s"):
        zygote_from_server({SERVER_VARIABLE: str(tmp_path / "s")}, [])
    assert "not valid UTF-8" in capsys.readouterr().err


def test_a_socket_with_too_long_a_path_is_named_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    path = f"/{'a' * 200}"
    zygote_from_server({SERVER_VARIABLE: path}, [])
    assert capsys.readouterr().err == f"${SERVER_VARIABLE}: {path}: AF_UNIX path too long\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_zygote_is_in_the_network_of_the_process_that_asked(server: Path) -> None:
    asked = Asked(server, prefix=("unshare", "--net"))
    assert asked.zygote != asked.process.pid
    networks = {pid: Path(f"/proc/{pid}/ns/net").readlink() for pid in (asked.zygote, asked.process.pid)}
    assert len(set(networks.values())) == 1
    assert networks[asked.zygote] != Path("/proc/self/ns/net").readlink()
    asked.process.kill()
    asked.end()


@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_process_in_a_network_that_the_server_may_not_enter_is_its_own_zygote(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with serving(path, prefix=("setpriv", "--bounding-set=-sys_admin", "--inh-caps=-all")):
        asked = Asked(path, prefix=("unshare", "--net"))
        assert asked.zygote == asked.process.pid
        asked.process.kill()
        asked.end()


def test_a_request_that_nobody_understands_harms_nothing(server: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(str(server))
        stranger.send(b"\xc1 no context")
        assert stranger.recv(100)
    asked = Asked(server)
    assert asked.zygote != asked.process.pid
    asked.process.kill()
    asked.end()


def test_a_server_that_cannot_fork_rejects_the_request_and_keeps_its_other_zygotes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", fork)
    context = describe_context([])
    asking, connection = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with asking, socket.socket() as listener:
        socket.send_fds(asking, [msgspec.msgpack.encode(context)], [0, 1, 2, listener.fileno()])
        server = Server(listener, context, enters_networks=False)
        server._take(connection, ())
        assert msgspec.msgpack.decode(asking.recv(100), type=Answer) == Answer(status=None)
        assert server.zygotes == {}


@pytest.mark.parametrize(("code", "status"), [(None, 0), (0, 0), (3, 3), ("a reason", 1)])
def test_a_zygote_ends_with_the_status_that_python_gives_an_exit(
    monkeypatch: pytest.MonkeyPatch, code: int | str | None, status: int
) -> None:
    def leave() -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setattr(os, "setsid", leave)
    with socket.socket() as connection:
        assert become_zygote(describe_context([]), [0, 1, 2, 3], connection, os.getpid()) == status


def test_the_end_of_the_server_ends_its_zygotes_and_later_ones_import_torch_themselves(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    with serving(path) as process:
        asked = Asked(path)
        process.kill()
    until(lambda: gone(asked.zygote))
    status, stderr = asked.end()
    assert status == 1 and "has ended" in stderr
    alone = Asked(path)
    assert alone.zygote == alone.process.pid
    alone.process.kill()
    assert "Connection refused" in alone.end()[1]


def test_a_zygote_that_cannot_fork_says_so_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end its trainers otherwise."""

    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    requests_read, requests_write = os.pipe()
    notices_read, notices_write = os.pipe()
    monkeypatch.setattr("runtime.process.zygote.thread_count", lambda: 1)
    monkeypatch.setattr(os, "fork", refuse)
    handler = signal.getsignal(signal.SIGCHLD)
    os.write(requests_write, encode(Spawn(device=1, socket_path="s", environment={})))
    os.write(requests_write, encode(CheckDevice(number=7, device=2, environment={})))
    os.close(requests_write)
    try:
        serve(requests_read, notices_write, None)
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, handler)
    decoder: Decoder[ZygoteNotice] = Decoder(ZygoteNotice)
    reason = "Resource temporarily unavailable"
    assert decoder.feed(os.read(notices_read, 4096)) == [
        NotForked(device=1, check=None, reason=reason),
        NotForked(device=2, check=7, reason=reason),
    ]
    for descriptor in (requests_read, notices_read, notices_write):
        os.close(descriptor)
