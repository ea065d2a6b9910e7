"""What was precomputed, kept on disk for the next start of the same job on as many nodes.

A file is named by the hash of all inputs, the planner's own code among them, so no other job and no other
version of ftd reads it. Profiles that are measured at each start differ in their noise and never find theirs;
a profile from a file (``planner.profile``) does, and so does a coordinator that restarts, since its journal
has the profile. Whatever is wrong with a file, it is computed anew.
"""

import contextlib
import hashlib
import os
from functools import cache
from pathlib import Path

import msgspec
import structlog

import planner
from ftd.coordinator.plan_worker import PrecomputeRequest

_log = structlog.get_logger("ftd.planning")

MAX_FILES = 32
MAX_FILE_BYTES = 256 * 1024 * 1024
_SUFFIX = ".plan"
_MAGIC = b"ftd plans 1\n"
_DIGEST_BYTES = 32


class PlanCache:
    """A directory of files; every error is logged and counted, and none is raised."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.hits = self.misses = self.discarded = 0
        """``discarded``: files that were there and not to be trusted."""

    def key(self, work: PrecomputeRequest) -> str:
        """Of everything that the answer depends on. ``present`` is not: it is only about the order."""
        inputs = (_code_of_the_planner(), work.profile, work.policy, work.max_nodes)
        return hashlib.sha256(msgspec.msgpack.encode(inputs)).hexdigest()

    def read(self, key: str) -> bytes | None:
        """What ``write`` was given under this key; ``None`` where there is nothing that can be trusted."""
        path = self._path(key)
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
            content = path.read_bytes()
            if not content.startswith(_MAGIC):
                raise ValueError("it is not of this program")
            start = len(_MAGIC) + _DIGEST_BYTES
            precomputed = content[start:]
            if _digest(key, precomputed) != content[len(_MAGIC) : start]:
                raise ValueError("its checksum is wrong")
        except FileNotFoundError:
            self.misses += 1
            return None
        except (OSError, ValueError) as error:
            self.discard(key, str(error))
            return None
        self.hits += 1
        with contextlib.suppress(OSError):
            os.utime(path)  # The newest are kept.
        return precomputed

    def discard(self, key: str, why: str) -> None:
        """A file that cannot be used: out of the way with it."""
        self.discarded += 1
        _log.warning("refuse", path=str(self._path(key)), why=why, refused=self.discarded)
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def write(self, key: str, precomputed: bytes) -> None:
        """Keep it: as a whole or not at all, and only the newest files."""
        path = self._path(key)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            try:
                beside.write_bytes(_MAGIC + _digest(key, precomputed) + precomputed)
                beside.replace(path)
            finally:
                beside.unlink(missing_ok=True)
            for old in self._oldest_first()[:-MAX_FILES]:
                old.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("write", path=str(path), why=str(error))

    def _oldest_first(self) -> list[Path]:
        return sorted(self._directory.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}{_SUFFIX}"


def _digest(key: str, precomputed: bytes) -> bytes:
    """Over the name, too: a file that was renamed answers another question."""
    return hashlib.sha256(key.encode() + precomputed).digest()


@cache
def _code_of_the_planner() -> str:
    """A planner that was changed must not find what it would have answered before."""
    return code_digest(Path(planner.__file__).parent)


def code_digest(package: Path) -> str:
    """A digest of all modules of a package, those of its subpackages included."""
    code = hashlib.sha256()
    for module in sorted(package.rglob("*.py")):
        code.update(str(module.relative_to(package)).encode() + b"\0" + module.read_bytes() + b"\0")
    return code.hexdigest()
