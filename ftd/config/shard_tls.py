"""TLS between snapshot servers: this node's certificate, and the authorities that it trusts."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from ftd.config.secrets import require_private
from ftd.errors import ConfigurationError, IncompleteError
from ftd.transport.tls import reject_passphrase, unusable_file_error

FIELDS = ("snapshot_tls_cert", "snapshot_tls_key", "snapshot_tls_ca")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTls:
    """PEM files of one node."""

    cert: Path
    key: Path
    ca: Path

    def server_context(self) -> ssl.SSLContext:
        """Return a context that presents the certificate in the file at the time of each connection.

        A renewable certificate therefore needs no restart.

        :raises ConfigurationError: a file cannot be used.
        """
        context, renewable = self._served(), _RenewableContext(self)

        def show(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
            connection.context = renewable.newest(connection.context)

        context.sni_callback = show
        return context

    def _served(self) -> ssl.SSLContext:
        require_private(self.key, "node.snapshot_tls_key")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.cert, self.key, password=reject_passphrase)
        except (OSError, ssl.SSLError) as error:
            raise unusable_file_error(self.cert, "node.snapshot_tls_cert", error) from None
        return context

    def client_context(self) -> ssl.SSLContext:
        """Return a context that trusts only the authorities in ``ca`` and checks host names.

        :raises ConfigurationError: the file cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_verify_locations(self.ca)
        except (OSError, ssl.SSLError) as error:
            raise unusable_file_error(self.ca, "node.snapshot_tls_ca", error) from None
        return context


@dataclass(slots=True)
class _RenewableContext:
    """Context of the files as they are now, or the previous one while they cannot be used."""

    tls: ShardTls
    _context: ssl.SSLContext | None = None
    _last_versions: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        self._last_versions = self._file_versions()

    def newest(self, first: ssl.SSLContext) -> ssl.SSLContext:
        versions = self._file_versions()
        if versions != self._last_versions:
            self._last_versions = versions
            import structlog  # Commands read the configuration as well, and should start without structlog.

            log = structlog.get_logger("ftd.tls")
            try:
                self._context = self.tls._served()
                log.info("certificate_renewed", cert=str(self.tls.cert))
            except (
                ConfigurationError
            ) as error:  # Perhaps only one file is written yet; the next change retries.
                log.warning("certificate_not_renewed", cert=str(self.tls.cert), reason=str(error))
        return self._context or first

    def _file_versions(self) -> tuple[tuple[int, int], ...] | None:
        try:
            stats = [path.stat() for path in (self.tls.cert, self.tls.key)]
        except OSError:
            return None
        return tuple((stat.st_mtime_ns, stat.st_ino) for stat in stats)


def shard_tls(cert: str | None, key: str | None, ca: str | None, directory: Path) -> ShardTls | None:
    """Return the TLS files of this node, or None if none are configured.

    :raises ConfigurationError: only some are configured, or a file cannot be used.
    """
    written = dict(zip(FIELDS, (cert, key, ca), strict=True))
    missing = [name for name, path in written.items() if path is None]
    if len(missing) == len(FIELDS):
        return None
    if cert is None or key is None or ca is None:
        raise IncompleteError(
            "a certificate, its key and the authority go together",
            field=f"node.{missing[0]}",
            remedy=f"set all of {', '.join(FIELDS)} on every node, or none of them",
        )
    tls = ShardTls(cert=directory / cert, key=directory / key, ca=directory / ca)
    tls.server_context()  # Reports unusable files now instead of at the first snapshot.
    tls.client_context()
    return tls
