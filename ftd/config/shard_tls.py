"""TLS between snapshot servers: this node's certificate, and whom it believes."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from ftd.config.secrets import require_private
from ftd.config.tls import no_password, unusable
from ftd.errors import ConfigurationError

FIELDS = ("snapshot_tls_cert", "snapshot_tls_key", "snapshot_tls_ca")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTls:
    """PEM files."""

    cert: Path
    key: Path
    ca: Path

    def server_context(self) -> ssl.SSLContext:
        """:raises ConfigurationError: a file cannot be used."""
        require_private(self.key, "node.snapshot_tls_key")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.cert, self.key, password=no_password)
        except (OSError, ssl.SSLError) as error:
            raise unusable(self.cert, "node.snapshot_tls_cert", error) from None
        return context

    def client_context(self) -> ssl.SSLContext:
        """Believes the authorities in ``ca`` alone, and checks the name.

        :raises ConfigurationError: the file cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_verify_locations(self.ca)
        except (OSError, ssl.SSLError) as error:
            raise unusable(self.ca, "node.snapshot_tls_ca", error) from None
        return context


def shard_tls(cert: str | None, key: str | None, ca: str | None, directory: Path) -> ShardTls | None:
    """:raises ConfigurationError: some are there and others are not, or a file cannot be used."""
    written = dict(zip(FIELDS, (cert, key, ca), strict=True))
    missing = [name for name, path in written.items() if path is None]
    if len(missing) == len(FIELDS):
        return None
    if cert is None or key is None or ca is None:
        raise ConfigurationError(
            "a certificate, its key and the authority go together",
            field=f"node.{missing[0]}",
            remedy=f"name all of {', '.join(FIELDS)}, on every node, or none",
        )
    tls = ShardTls(cert=directory / cert, key=directory / key, ca=directory / ca)
    tls.server_context()  # Now, and not at the first snapshot.
    tls.client_context()
    return tls
