"""Access control of the dashboard: a token, or on loopback nothing for users of this host.

A browser sends the token once, in the login form, and gets a cookie that is derived from it. The token is
therefore neither in a URL nor in the browser's storage, and the cookie outlives a restart of the
coordinator. Tools send ``Authorization: Bearer``. On loopback, where no token is required, a request must
name this host: this rejects foreign pages whose name was made to resolve to this host (DNS rebinding).
"""

import hashlib
import hmac
from collections.abc import Mapping

from aiohttp import web

from ftd.config.dashboard import DashboardAddress, is_loopback

COOKIE_AGE_S = 30 * 24 * 3600

HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of every response. Inline styles are allowed because plotly writes style attributes; scripts come
only from this server.
"""


class DashboardAccess:
    """The access rules of one dashboard."""

    def __init__(self, address: DashboardAddress, cluster: str) -> None:
        self._token = None if address.token is None else address.token.encode()
        self._hosts = {address.host.lower(), "localhost"}
        digest = hashlib.sha256(f"ftd dashboard {cluster}".encode()).digest()
        self._pass = hmac.new(self._token or b"", digest, hashlib.sha256).hexdigest()
        self._cookie = f"ftd_{hashlib.sha256(cluster.encode()).hexdigest()[:12]}_{address.port}"
        """Browsers keep cookies by host, not by port, so the name contains the cluster and the port."""

    @property
    def requires_token(self) -> bool:
        """Whether a token is required."""
        return self._token is not None

    def allows(self, request: web.Request) -> bool:
        """Return whether a request may be served. Tokens are compared in constant time."""
        if self._token is None:
            return self._names_this_host(request.headers.get("Host", ""))
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        if hmac.compare_digest(given, b"Bearer " + self._token):
            return True
        cookie = request.cookies.get(self._cookie, "")
        return hmac.compare_digest(cookie.encode("utf-8", "surrogateescape"), self._pass.encode())

    def is_token(self, token: str) -> bool:
        """Return whether this is the configured token."""
        if self._token is None:
            return False
        return hmac.compare_digest(token.strip().encode("utf-8", "surrogateescape"), self._token)

    def set_cookie(self, answer: web.StreamResponse, *, secure: bool) -> None:
        """Give the browser its cookie.
        :param secure: whether the browser came by HTTPS, through a proxy.
        """
        answer.set_cookie(
            self._cookie,
            self._pass,
            max_age=COOKIE_AGE_S,
            httponly=True,
            samesite="Strict",
            secure=secure,
            path="/",
        )

    def _names_this_host(self, host: str) -> bool:
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        name = name.strip("[]").lower()
        return name in self._hosts or is_loopback(name)
