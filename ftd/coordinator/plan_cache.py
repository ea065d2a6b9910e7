"""A cache on disk for precomputed plans, used by the next start of the same job on as many nodes.

A file's name is the hash of all inputs, including the planner's own code, so no other job and no other
version of ftd reads it. Profiles that are measured at each start differ in their noise, so they never
match. A profile from a file (``planner.profile``) does match, and so does a coordinator that restarts,
since its journal has the profile. If anything is wrong with a file, its content is computed again.
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
from storage.atomic import atomic_file

_log = structlog.get_logger("ftd.planning")

MAX_FILES = 32
MAX_FILE_BYTES = 256 * 1024 * 1024
_SUFFIX = ".plan"
_MAGIC = b"ftd plans 1\n"
_DIGEST_BYTES = 32


class PlanCache:
    """A directory of files. Errors are logged and counted, and none is raised."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.hits = self.misses = self.discarded = 0
        """``discarded`` counts files that could not be trusted."""

    def key(self, work: PrecomputeRequest) -> str:
        """Return a hash of everything that the result depends on. ``present`` is left out: it affects only the
        order.
        """
        inputs = (_planner_code_digest(), work.profile, work.policy, work.max_nodes)
        return hashlib.sha256(msgspec.msgpack.encode(inputs)).hexdigest()

    def read(self, key: str) -> bytes | None:
        """Return what ``write`` stored under this key, or ``None`` if nothing there can be trusted."""
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
            os.utime(path)  # The files that were used last are retained.
        return precomputed

    def discard(self, key: str, why: str) -> None:
        """Remove a file that cannot be used."""
        self.discarded += 1
        _log.warning("file_discarded", path=str(self._path(key)), why=why, discarded=self.discarded)
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def write(self, key: str, precomputed: bytes) -> None:
        """Store the result atomically, and remove all but the newest files."""
        path = self._path(key)
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with atomic_file(path) as draft:
                draft.write_bytes(_MAGIC + _digest(key, precomputed) + precomputed)
            for old in self._oldest_first()[:-MAX_FILES]:
                old.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("write_failed", path=str(path), why=str(error))

    def _oldest_first(self) -> list[Path]:
        return sorted(self._directory.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}{_SUFFIX}"


def _digest(key: str, precomputed: bytes) -> bytes:
    """Return a digest of the content and the key, so that a renamed file is not accepted."""
    return hashlib.sha256(key.encode() + precomputed).digest()


@cache
def _planner_code_digest() -> str:
    """Return a digest of the planner's code: after a change, earlier results must not be found."""
    return code_digest(Path(planner.__file__).parent)


def code_digest(package: Path) -> str:
    """Return a digest of all modules of a package and its subpackages."""
    code = hashlib.sha256()
    for module in sorted(package.rglob("*.py")):
        code.update(str(module.relative_to(package)).encode() + b"\0" + module.read_bytes() + b"\0")
    return code.hexdigest()
