"""Files that hold secrets: read whole, and refused where others on the host could read them, too."""

import stat
from pathlib import Path

from ftd.errors import ConfigurationError

MAX_SECRET_BYTES = 64 * 1024


def read_secret(path: Path, field: str) -> str:
    """The file's only line.

    :raises ConfigurationError: missing, unreadable, empty, of several lines, or open to everybody.
    """
    try:
        require_private(path, field)
        with path.open(encoding="utf-8") as file:
            secret = file.read(MAX_SECRET_BYTES + 1).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}",
            field=field,
            remedy="check the path, and that this user may read it",
        ) from None
    if not secret:
        raise ConfigurationError(f"{path} is empty", field=field, remedy="put a random line in it")
    if len(secret) > MAX_SECRET_BYTES or "\n" in secret:
        raise ConfigurationError(f"{path} holds more than one line", field=field, remedy="one line, no more")
    return secret


def require_private(path: Path, field: str) -> None:
    """:raises ConfigurationError: everybody on this host may read or change the file, or it is not there."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error.strerror}", field=field, remedy="check the path"
        ) from None
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigurationError(
            f"{path} can be read or changed by everybody on this host (mode {mode:04o})",
            field=field,
            remedy=f"chmod 600 {path}, and a new secret if strangers have accounts here",
        )
