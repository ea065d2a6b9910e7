"""What a check found."""

from dataclasses import dataclass
from typing import Literal

CheckStatus = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One line of ``ftd doctor``."""

    check: str
    verdict: CheckStatus
    detail: str
    remedy: str = ""


def ok(check: str, detail: str) -> CheckResult:
    return CheckResult(check=check, verdict="ok", detail=detail)


def warning(check: str, detail: str, remedy: str) -> CheckResult:
    """Works, but not well, or not known."""
    return CheckResult(check=check, verdict="warning", detail=detail, remedy=remedy)


def failed(check: str, detail: str, remedy: str) -> CheckResult:
    """A daemon would not work here."""
    return CheckResult(check=check, verdict="failed", detail=detail, remedy=remedy)
