"""Checks of this host alone: memory, limits, ports, host names, Python packages, devices."""

import ipaddress
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ftd.cli.checks.check_result import CheckResult, failed, ok, warning
from ftd.config.daemon import DaemonConfig

SLOW_LOOKUP_S = 0.5
"""Duration of a name lookup that can stall a daemon."""
MIN_OPEN_FILES = 4096
TORCH_PROBE_TIMEOUT_S = 60.0
_GIB = 1 << 30

_PROBE = """
import json, torch
from runtime.monitoring.device_check import check_device
cuda = torch.cuda.is_available()
names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else []
gloo = torch.distributed.is_gloo_available()
found = [check_device(i, gpu=i) for i in range(len(names) or 1)]
wrong = [f"device {one.device}: {one.wrong}" for one in found if one.wrong]
print(json.dumps({"torch": torch.__version__, "devices": names, "gloo": gloo, "wrong": wrong}))
"""


def check_host(config: DaemonConfig) -> Iterator[CheckResult]:
    """Yield the results in order of importance, without that of host names, which needs a valid broker address."""
    yield check_memory(config)
    yield check_files()
    yield from check_ports(config)
    yield check_directory("state directory", config.state_dir)
    yield check_torch(config)


def check_memory(config: DaemonConfig) -> CheckResult:
    """Check the space for snapshots in the memory file system."""
    name = "snapshot memory"
    place = _nearest(config.snapshot_dir)
    usage = shutil.disk_usage(place)
    limit = config.snapshot_limit_bytes
    detail = f"{place}: {usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB free"
    kind = _file_system(place.resolve())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        remedy = "let this user write there, or set node.snapshot_dir to another directory"
        return failed(name, f"{detail}, on {kind}, but this user cannot write there", remedy)
    if limit is not None and limit > usage.total:
        remedy = "lower node.snapshot_limit_mib, or enlarge the file system: mount -o remount,size=…"
        detail = f"{detail}, but node.snapshot_limit_mib allows {limit / _GIB:.1f} GiB"
        return failed(name, detail, remedy)
    if kind not in ("tmpfs", "ramfs"):
        return warning(
            name, f"{detail}, on {kind}", "set node.snapshot_dir to a directory in /dev/shm: disks are slow"
        )
    return ok(name, detail)


def check_files() -> CheckResult:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:
        return warning(
            "open files",
            f"a process may open only {soft} files",
            f"run ulimit -n {16 * MIN_OPEN_FILES}, or set LimitNOFILE= in the unit",
        )
    return ok("open files", f"a process may open {soft} files")


def check_names(config: DaemonConfig) -> CheckResult:
    """Check the address that other nodes use for this host, and lookups that could stall: of the broker's name,
    and reverse of that address.
    """
    name = "names"
    began = time.monotonic()
    try:
        found = socket.getaddrinfo(config.broker.host, config.broker.port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        remedy = "correct broker.url, or this host's DNS"
        return failed(name, f"{config.broker.host} cannot be resolved: {error.strerror}", remedy)
    forwards_s = time.monotonic() - began
    began = time.monotonic()
    socket.getfqdn(config.host)
    backwards_s = time.monotonic() - began
    if max(forwards_s, backwards_s) > SLOW_LOOKUP_S:
        detail = (
            f"looking up {config.broker.host} took {forwards_s:.1f} s, and the reverse lookup of {config.host} "
            f"{backwards_s:.1f} s"
        )
        return warning(name, detail, "put the cluster's hosts into /etc/hosts, or repair this host's DNS")
    address = str(found[0][4][0])
    broker = (
        f"the broker's address {address} needs no lookup"
        if address == config.broker.host
        else f"the broker's name {config.broker.host} stands for {address}"
    )
    if not config.is_on_loopback:
        return ok(name, f"{broker}; other nodes reach this host at {config.host}")
    detail = f"{broker}; other nodes reach this node at {config.host} only if they run on this host, too"
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return ok(name, detail)
    return warning(name, detail, "set node.host to an address of this host that other hosts can reach")


def check_ports(config: DaemonConfig) -> Iterator[CheckResult]:
    """Check that the configured ports are free or used by a running daemon."""
    named = {"rendezvous_port": config.rendezvous_port, "snapshot_port": config.snapshot_port}
    for field, port in named.items():
        if not port:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError as error:
                remedy = f"choose another node.{field}, unless the node is already running"
                yield warning("ports", f"{port} ({field}): {error.strerror}", remedy)
            else:
                yield ok("ports", f"{port} ({field}) is free")


def check_directory(name: str, path: Path) -> CheckResult:
    """Check that a directory can be written, or created."""
    there = _nearest(path)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return failed(
            name, f"{there} cannot be written", "let this user write there, or name another directory"
        )
    missing = "" if there == path else "will be created, "
    return ok(name, f"{path}: {missing}{shutil.disk_usage(there).free / _GIB:.1f} GiB free")


def check_torch(config: DaemonConfig) -> CheckResult:
    """Check torch in a separate process, because daemons never load it."""
    name = "torch"
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=TORCH_PROBE_TIMEOUT_S,
            check=True,
        )
        found = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        detail = f"importing it and checking the devices takes more than {TORCH_PROBE_TIMEOUT_S:g} s"
        return failed(
            name, detail, f"see nvidia-smi, and how long this takes: {sys.executable} -c 'import torch'"
        )
    except (subprocess.SubprocessError, ValueError) as error:
        last = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
        remedy = f"install it; to see the error, run {sys.executable} -c 'import torch'"
        return failed(name, f"it cannot be imported: {' '.join(last)}", remedy)
    devices = found["devices"]
    detail = f"{found['torch']}, " + (
        f"{len(devices)} × {devices[0]}" if devices else "no GPU: trainers compute on the processor"
    )
    if devices and config.devices > len(devices):
        remedy = f"set node.devices = {len(devices)}"
        return failed(name, f"{detail}, but node.devices is {config.devices}", remedy)
    if found["wrong"]:
        remedy = "replace the device: a health check would set this node aside"
        return failed(name, f"{detail}, but {'; '.join(found['wrong'])}", remedy)
    if not found["gloo"]:
        return warning(name, f"{detail}, without gloo", 'set backend = "nccl" in job files')
    return ok(name, detail)


def _nearest(path: Path) -> Path:
    """Return ``path``, or the nearest directory above it that exists, as far as this user may see."""
    # Path.exists raises an error for what is in a directory of somebody else.
    return next(place for place in (path, *path.parents) if os.path.exists(place))  # noqa: PTH110


def _file_system(path: Path) -> str:
    """Return the type of the file system that holds ``path``."""
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text(errors="surrogateescape").splitlines():
        _, written, found, *_ = line.split(" ")
        where = re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), written)  # A space is \040.
        if Path(where) in (path, *path.parents) and len(where) >= len(best):
            best, kind = where, found
    return kind
