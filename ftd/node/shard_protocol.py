"""What snapshot servers and their clients say to each other: HTTP, three paths' worth of it.

    GET /v1/<job>/<step>             NodeManifest: what the node holds of a snapshot, verified just now
    GET /v1/<job>/<step>/<part>      its bytes; ``Range: bytes=a-b``, ``If-Match: "<digest of the part>"``

Every request carries ``Authorization: Bearer <token>``, derived from the cluster's secret, which itself goes
over no wire. A whole part is checked against its digest in the manifest. With ``Want-Digest`` an answer
carries the XXH3 digest of just its bytes, for those who want less. So what was overwritten in the middle of
a stream, or garbled, is noticed. ``If-Match`` ties a request to the snapshot whose manifest was read: a step
that was done again is another one.
"""

import hashlib
import hmac

import msgspec

from storage.manifest import Manifest

WANT_DIGEST_HEADER = "Want-Digest"
DIGEST_HEADER = "X-Ftd-Digest"
STREAM_BYTES = 1024 * 1024
"""Written to the socket at once."""


class NodeManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that one node holds of a snapshot: a manifest for each device that wrote one."""

    manifests: tuple[Manifest, ...]
    damaged: tuple[str, ...] = ()
    """Names of the parts whose bytes are not what was written."""


def bearer_token(secret: str) -> str:
    """The same on all nodes of a cluster; says nothing of the secret."""
    return hmac.new(secret.encode(), b"ftd snapshot server 1", hashlib.sha256).hexdigest()
