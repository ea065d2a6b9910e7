"""Results of the checks of ``ftd doctor``."""

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
    """Return a result for something that works badly, or is not known to work."""
    return CheckResult(check=check, verdict="warning", detail=detail, remedy=remedy)


def failed(check: str, detail: str, remedy: str) -> CheckResult:
    """Return a result for something that keeps a daemon from working."""
    return CheckResult(check=check, verdict="failed", detail=detail, remedy=remedy)
