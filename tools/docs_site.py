"""Hooks of the documentation site (``mkdocs.yml``): pages outside ``docs`` belong to it too.

The pages link to each other by relative paths that hold in the source tree. Pages and examples outside ``docs`` appear
in the site below ``project/``, and links to them are rewritten while a page is rendered. A link to a directory leads to
its README, or is plain text where it has none.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PROJECT = "project"
LINK = re.compile(
    r"(?P<open>!?\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\()(?P<target>(?![a-z]+:)[^)\s#]+)(?P<anchor>#[^)\s]*)?\)"
)
"""A link or image whose target is a file or directory of the project, with or without an anchor in it."""
FIRST_PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")


def site_path(path: str) -> str:
    """Return where a file of the source tree is in the site's sources."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{PROJECT}/{path}"


def source_path(uri: str) -> str:
    """Return where a file of the site's sources is in the source tree."""
    return uri.removeprefix(f"{PROJECT}/") if uri.startswith(f"{PROJECT}/") else f"docs/{uri}"


def resolve(page: str, target: str) -> str | None:
    """Return the file of the source tree to which a link of ``page`` leads in the site, or ``None`` for a
    directory without a README. The site's first page stands for the README of the project.
    """
    path = os.path.normpath(os.path.join(os.path.dirname(page), target))  # noqa: PTH118, PTH120
    if (ROOT / path).is_dir():
        path = os.path.normpath(f"{path}/README.md")
        if not (ROOT / path).is_file():
            return None
    return "docs/index.md" if path == "README.md" else path


def rewrite(markdown: str, page: str) -> str:
    """Return a page's text with links that hold in the site."""

    def replace(match: re.Match[str]) -> str:
        found = resolve(page, match["target"])
        if found is None:
            return match["text"]
        start = os.path.dirname(site_path(page))  # noqa: PTH120
        return f"{match['open']}{os.path.relpath(site_path(found), start)}{match['anchor'] or ''})"

    parts = re.split(r"(^```.*?^```[^\n]*$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else LINK.sub(replace, part) for part in parts)


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside ``docs`` that pages link to, and those that these link to."""
    waiting = [*FIRST_PAGES, *(source_path(file.src_uri) for file in files.documentation_pages())]
    known: set[str] = set()
    while waiting:
        page = waiting.pop()
        if page in known or not (ROOT / page).is_file():
            continue
        known.add(page)
        if not page.startswith("docs/"):
            files.append(File.generated(config, site_path(page), abs_src_path=str(ROOT / page)))
        if page.endswith(".md"):
            links = LINK.finditer((ROOT / page).read_text(encoding="utf-8"))
            waiting += filter(None, (resolve(page, link["target"]) for link in links))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite a page's links before it is rendered."""
    del config, files
    return rewrite(markdown, source_path(page.file.src_uri))
