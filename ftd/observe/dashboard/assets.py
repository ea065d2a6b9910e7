"""The page's files, compressed once, and plotly's JavaScript from its wheel, compressed on first use."""

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

PAGE = Path(__file__).parent / "page"
PLOTLY = f"plotly-{version('plotly')}.js"
"""The name contains the version, so that browsers may cache the file without end."""
_TYPES = {".js": "text/javascript", ".html": "text/html", ".css": "text/css", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """A file with its response headers."""

    kind: str
    packed: bytes
    """Content, compressed by gzip."""
    tag: str
    """ETag of the content: a browser with the same tag need not fetch it again."""


@cache
def load_pages() -> dict[str, Asset]:
    """Return all files in ``page/`` by name."""
    return {path.name: _asset(path.name, path.read_bytes()) for path in sorted(PAGE.iterdir())}


@cache
def load_plotly() -> Asset:
    """Return plotly's JavaScript, 1.5 MB compressed.

    :raises OSError: plotly is not installed completely.
    """
    spec = find_spec("plotly")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("plotly is not installed")
    return _asset(PLOTLY, (Path(spec.origin).parent / "package_data" / "plotly.min.js").read_bytes())


def _asset(name: str, content: bytes) -> Asset:
    return Asset(
        kind=_TYPES[Path(name).suffix],
        packed=gzip.compress(content, 6, mtime=0),
        tag=f'"{hashlib.sha256(content).hexdigest()[:24]}"',
    )
