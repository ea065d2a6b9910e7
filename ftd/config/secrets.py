"""Reads files that hold secrets, and rejects them if other users of the host could read them."""

import stat
from pathlib import Path

from ftd.errors import ConfigurationError

MAX_SECRET_BYTES = 64 * 1024


def read_secret(path: Path, field: str) -> str:
    """Return the only line of the file.

    :raises ConfigurationError: it is missing, unreadable or empty, has several lines, or everybody can read
        it.
    """
    try:
        require_private(path, field)
        with path.open(encoding="utf-8") as file:
            secret = file.read(MAX_SECRET_BYTES + 1).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}",
            field=field,
            remedy="check the path and the permissions of this user",
        ) from None
    if not secret:
        raise ConfigurationError(f"{path} is empty", field=field, remedy="write one random line into it")
    if len(secret) > MAX_SECRET_BYTES or "\n" in secret:
        raise ConfigurationError(
            f"{path} has more than one line", field=field, remedy="write a single line into it"
        )
    return secret


def require_private(path: Path, field: str) -> None:
    """Check that others cannot access a file.

    :raises ConfigurationError: everybody on this host may read or change the file, or it does not exist.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error.strerror}", field=field, remedy="check the path"
        ) from None
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigurationError(
            f"everybody on this host can read or change {path} (mode {mode:04o})",
            field=field,
            remedy=f"run chmod 600 {path}; if strangers have accounts on this host, also change the secret",
        )
