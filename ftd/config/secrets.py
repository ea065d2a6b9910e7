"""Reads files that hold secrets, and rejects them if other users of the host could read them."""

import shlex
import stat
from pathlib import Path

from ftd.errors import ConfigurationError

MAX_SECRET_BYTES = 64 * 1024


def secret_or_file(
    secret: str | None, file: str | None, field: str, directory: Path
) -> tuple[str | None, str]:
    """Return a secret that is written in a key or in the file that a second key names, and the key that it is from.

    :param field: the key of the secret; that of the file has the ending ``_file``.
    :param directory: directory where relative paths begin.
    :raises ConfigurationError: both keys are given, or see ``read_secret``.
    """
    if file is None:
        return secret, field
    if secret is not None:
        name = field.rpartition(".")[2]
        raise ConfigurationError(
            f"both {name} and {name}_file are given", field=field, remedy="keep one of them"
        )
    return read_secret(directory / file, f"{field}_file"), f"{field}_file"


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
            remedy=f"run chmod o= {shlex.quote(str(path))}; if strangers have accounts on this host, also change "
            "the secret",
        )
