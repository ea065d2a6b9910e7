"""Checks every message that ftd publishes in this process against the contract's models, for every test.

Property tests use the same examples in every run, and fuzzing the same seeds; with ``FTD_FUZZ`` set both
are new each time. Examples have no deadline.
"""

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # Before torch is imported: its threads do not survive a fork.

import pytest
from hypothesis import HealthCheck, settings

from ftd.transport.wire import checking
from tests.helpers.scheduling import pytest_xdist_make_scheduler  # noqa: F401  # a hook

settings.register_profile(
    "steady",
    deadline=None,
    derandomize="FTD_FUZZ" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("steady")

SHARED_MEMORY = Path("/dev/shm")
LEAST_FREE_BYTES = 4 << 30
"""Free shared memory below which temporary files stay on the disk."""


def use_memory_for_temporary_files() -> None:
    """Put the temporary files of tests, and of the processes that they start, into memory, where no fsync
    waits for a disk. Tests of disk behaviour use ``/var/tmp``.
    """
    if "TMPDIR" in os.environ or not SHARED_MEMORY.is_dir():
        return
    if shutil.disk_usage(SHARED_MEMORY).free < LEAST_FREE_BYTES:
        return
    directory = SHARED_MEMORY / f"t{os.getuid()}"  # Short, because the paths of unix sockets begin with it.
    directory.mkdir(mode=0o700, exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)


use_memory_for_temporary_files()
# Every process that imports aiohttp reads the public root certificates, a tenth of a daemon's start, and no test
# connects to a server that they vouch for.
os.environ.setdefault("SSL_CERT_FILE", os.devnull)

SERVICES = (
    "tests/gpu/test_emulated_gpu.py",
    "tests/e2e/",
    "tests/security/",
    *(
        f"tests/ftd/{package}/"
        for package in ("cli", "coordinator", "local", "node", "snapshots", "transport")
    ),
)
"""Tests of running daemons, those that take long before the others. They come before all other tests: their waits leave
processor time to each other, and the short tests let the workers end at the same time.
"""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without the garbage collector: modules that are imported stay, and searching them for
    garbage takes a sixth of the time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


NOT_QUICK = ("e2e", "gpu", "runtime", "security")
"""Folders of tests that start processes, or import torch."""
STARTS = ("os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen")
"""Audit events of Python that start a process."""


class ProcessRefusal:
    """An audit hook that forbids quick tests to start processes, also when all tests run."""

    def __init__(self) -> None:
        self.active = False

    def __call__(self, event: str, _arguments: object) -> None:
        """:raises AssertionError: a quick test starts a process."""
        if self.active and event in STARTS:
            raise AssertionError("this test starts a process: mark it with pytest.mark.processes")


process_refusal = ProcessRefusal()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="leave out tests that start processes and tests that take long"
    )


def pytest_configure() -> None:
    sys.addaudithook(process_refusal)


def _may_be_quick(path: Path) -> bool:
    return path.relative_to(Path(__file__).parent).parts[:1] not in {(folder,) for folder in NOT_QUICK}


def _is_quick(item: pytest.Item) -> bool:
    marked = any(item.get_closest_marker(mark) for mark in ("processes", "long"))
    return _may_be_quick(item.path) and not marked


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the folders in which no test is quick."""
    return True if config.getoption("--quick") and not _may_be_quick(collection_path) else None


def _service_rank(item: pytest.Item) -> int:
    return next((rank for rank, part in enumerate(SERVICES) if item.nodeid.startswith(part)), len(SERVICES))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put tests of running daemons first, and select quick tests with ``--quick``."""
    items.sort(key=_service_rank)
    if not config.getoption("--quick"):
        return
    config.hook.pytest_deselected(items=[item for item in items if not _is_quick(item)])
    items[:] = filter(_is_quick, items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Refuse processes while a quick test runs."""
    process_refusal.active = _is_quick(item)
    try:
        return (yield)
    finally:
        process_refusal.active = False


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print why tests failed that ran once more, since the second run may pass and nobody can repeat the first."""
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"first run of {report.nodeid}")
        # A long traceback may be shortened by whatever keeps this output, in its middle or at its end.
        reason = getattr(report.longrepr, "reprcrash", None)
        terminalreporter.write_line(
            "" if reason is None else f"{reason.path}:{reason.lineno}: {reason.message}"
        )
        terminalreporter.write_line(report.longreprtext)
        for name, content in report.sections:
            terminalreporter.section(name, sep="-")
            terminalreporter.write_line(content)


@pytest.fixture
def hangups_end_processes() -> Iterator[None]:
    """Let SIGHUP end processes, also where all tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True)
def contract_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(problem: str) -> None:
        raise AssertionError(problem)

    monkeypatch.setattr(checking, "on_mismatch", fail)


@pytest.fixture(scope="session")
def zygote_server(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Generator[None, None, None]:
    """Let one process import torch for all nodes that tests of this worker start; quick tests start none."""
    if pytestconfig.getoption("--quick"):
        yield
        return
    from ftd.local.cluster import shared_environment
    from ftd.processes import die_with_parent, module_command
    from runtime.process.zygote_request import SERVER_VARIABLE, listen

    process_refusal.active = (
        False  # A quick test may be the first in a folder whose other tests need the server.
    )
    path = tmp_path_factory.mktemp("z") / "s"
    with listen(path) as listener:
        descriptor = listener.fileno()
        process = subprocess.Popen(
            module_command(
                "runtime.process.zygote_server", "--parent", str(os.getpid()), "--listener", str(descriptor)
            ),
            env={**os.environ, **shared_environment()},
            pass_fds=[descriptor],
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent(),  # noqa: PLW1509  # prctl and getppid take no locks
        )
    os.environ[SERVER_VARIABLE] = str(path)
    yield
    del os.environ[SERVER_VARIABLE]
    process.kill()
    process.wait()
