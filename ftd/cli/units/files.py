"""Writes the files of ``ftd install``, and lists what to do next."""

import shlex
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

from ftd.cli.units.units import InstallPaths, Role, sysusers_text, tmpfiles_text, unit_name, unit_text
from ftd.errors import ConfigurationError
from storage.atomic import atomic_file

Outcome = Literal["written", "unchanged", "kept"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledFile:
    path: Path
    text: str
    mode: int = 0o644
    keep: bool = False
    """Whether an existing file stays unchanged, because it belongs to the user."""


def files_for(role: Role, layout: InstallPaths) -> tuple[InstalledFile, ...]:
    """Return all files with their final paths."""
    return (
        InstalledFile(path=Path("/etc/systemd/system") / unit_name(role), text=unit_text(role, layout)),
        InstalledFile(path=Path("/etc/sysusers.d/ftd.conf"), text=sysusers_text()),
        InstalledFile(path=Path("/etc/tmpfiles.d/ftd.conf"), text=tmpfiles_text(layout.config)),
        InstalledFile(path=layout.config, text=sample_config(), mode=0o640, keep=True),
    )


def sample_config() -> str:
    """Return a commented ftd.toml for a host."""
    return resources.files("ftd.cli.units").joinpath("ftd.toml").read_text(encoding="utf-8")


def write_files(files: tuple[InstalledFile, ...], root: Path) -> Iterator[tuple[Path, Outcome]]:
    """Write the files below ``root`` one by one, each atomically.

    :raises ConfigurationError: a file cannot be written; those before it have been.
    """
    for file in files:
        path = root / file.path.relative_to(file.path.anchor)  # The anchor of //etc/ftd/ftd.toml is //.
        yield path, _write(file, path)


def _write(file: InstalledFile, path: Path) -> Outcome:
    try:
        if path.exists():
            if file.keep:
                return "kept"
            if path.read_text(encoding="utf-8") == file.text:
                return "unchanged"
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as draft:
            draft.write_text(file.text, encoding="utf-8")
            draft.chmod(file.mode)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        remedy = "run the command as root, or add --dry-run to see what would be written"
        raise ConfigurationError(f"{path} cannot be written: {reason}", remedy=remedy) from None
    return "written"


def hidden_from_others(executable: Path) -> Path | None:
    """Return the first directory on the way to ``executable`` that other users cannot enter, or the file itself."""
    for path in (*reversed(executable.parents), executable):
        if not path.stat().st_mode & stat.S_IXOTH:
            return path
    return None


def next_steps(role: Role, config: Path) -> tuple[str, ...]:
    """Return the commands to run next, in order."""
    secret = shlex.quote(str(config.with_name("secret")))  # The name in the sample configuration.
    written = shlex.quote(str(config))
    return (
        "systemd-sysusers",
        "systemd-tmpfiles --create",
        f"head -c 24 /dev/urandom | base64 | install -m 640 -g ftd /dev/stdin {secret}  "
        "# on one host; copy it to the others",
        f"${{EDITOR:-vi}} {written}",
        f"ftd config check --config {written}{' --node' if role == 'node' else ''}",
        "systemctl daemon-reload",
        f"systemctl enable --now {unit_name(role)}",
    )
