"""What a check found."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of ``ftd doctor``."""

    check: str
    verdict: Verdict
    detail: str
    remedy: str = ""


def ok(check: str, detail: str) -> Finding:
    return Finding(check=check, verdict="ok", detail=detail)


def warning(check: str, detail: str, remedy: str) -> Finding:
    """Works, but not well, or not known."""
    return Finding(check=check, verdict="warning", detail=detail, remedy=remedy)


def failed(check: str, detail: str, remedy: str) -> Finding:
    """A daemon would not work here."""
    return Finding(check=check, verdict="failed", detail=detail, remedy=remedy)
