"""TLS for connections to a broker: contexts, and explanations of what went wrong."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from ftd.config.secrets import require_private
from ftd.errors import ConfigurationError
from ftd.transport.address import Tls


def tls_context(tls: Tls) -> ssl.SSLContext:
    """Return a client's context: TLS 1.2 or newer, with checks of certificate and host name.

    :raises ConfigurationError: a file is missing, unreadable, or not what it should be.
    """
    try:
        context = ssl.create_default_context(cafile=str(tls.ca_file) if tls.ca_file else None)
    except (OSError, ssl.SSLError) as error:
        raise unusable_file_error(tls.ca_file, "broker.ca_file", error) from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if tls.cert_file is not None and tls.key_file is not None:
        require_private(tls.key_file, "broker.key_file")
        try:
            context.load_cert_chain(tls.cert_file, tls.key_file, password=reject_passphrase)
        except (OSError, ssl.SSLError) as error:
            raise unusable_file_error(tls.cert_file, "broker.cert_file", error) from None
    return context


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFields:
    """Names of configuration fields in remedies."""

    name: str = "broker.url"
    """Field with the expected host name."""
    ca: str = "broker.ca_file"
    certificate: str = "the broker's certificate"


BROKER = TlsFields()


def describe_tls_error(error: BaseException, fields: TlsFields = BROKER) -> str:
    """Return why no connection was made, with the remedy if one is likely."""
    match _origin(error):
        case ssl.SSLCertVerificationError(verify_message=message):
            return f"its certificate is rejected: {message}{_remedy(message, fields)}"
        case ssl.SSLError(reason=reason):
            return f"no TLS connection: {(reason or str(error)).replace('_', ' ').lower()}"
        case _:
            return str(error) or type(error).__name__


def _origin(error: BaseException) -> BaseException:
    """Return TLS's own error if a library wrapped it in another one."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, ssl.SSLError):
            return inner
        inner = inner.__cause__ or inner.__context__
    return error


def _remedy(message: str, fields: TlsFields) -> str:
    if "expired" in message:
        return f" (renew {fields.certificate}; or is this host's clock wrong?)"
    if "not yet valid" in message:
        return " (is this host's clock wrong?)"
    if "ismatch" in message:
        return f" (use the name that the certificate is for in {fields.name}, or a certificate for this name)"
    if "self-signed" in message or "local issuer" in message:
        return f" (name the certificate of its authority in {fields.ca})"
    return ""


def reject_passphrase() -> str:
    """Raise instead of asking on the terminal, for which a daemon would wait forever."""
    raise ssl.SSLError("the key is encrypted with a passphrase; use one without")


def unusable_file_error(path: Path | None, field: str, error: Exception) -> ConfigurationError:
    reason = getattr(error, "strerror", None) or str(error)
    return ConfigurationError(
        f"{path} cannot be used: {reason}", field=field, remedy="name a PEM file that this user may read"
    )
