"""The pages for users, and the commands in them."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [
        *(ROOT / f"{name}.md" for name in ("README", "SECURITY", "CONTRIBUTING")),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
PROGRAMS = (
    "ftd", "make", "curl", "sudo", "mosquitto_sub", "jq", "python", "source", "for", "kubectl", "sbatch",
    "torchrun", "export", "head", "squeue", "scancel", "git", "pip",
)  # fmt: skip


def is_commands(language: str, text: str) -> bool:
    if language in ("sh", "bash", "console"):
        return True
    first = next((line for line in text.splitlines() if line.strip()), "")
    word = re.sub(r"^([A-Z]?\$ )", "", first).split(" ")[0]
    return not language and word in PROGRAMS


def blocks(page: Path) -> list[str]:
    """Return the page's blocks of commands; where prompts separate commands from their output, only the
    commands.
    """
    found = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    made = []
    for language, text in found:
        if is_commands(language, text):
            prompted = re.findall(r"^[A-Z]?\$ (.*\n)", text, re.MULTILINE)
            made.append("".join(prompted) or text)
    return made


def commands(block: str) -> Iterator[str]:
    """Yield each command without its comment; a loop, or lines joined by a backslash, are one command."""
    joined = block.replace("\\\n", " ")
    if re.match(r"(for|while|if)\b", block) or re.search(r"^\s+\S", joined, re.M) or "| while" in joined:
        yield joined
        return
    for line in joined.splitlines():
        if command := re.sub(r"(^|\s+)# .*$", "", line).strip():
            yield command


ALL = [(page.name, command) for page in PAGES for block in blocks(page) for command in commands(block)]
