"""Checks of ``ftd.toml`` and of the files that it names."""

from collections.abc import Iterator

from ftd.cli.checks.check_result import CheckResult, failed, ok, warning
from ftd.config.daemon import DaemonConfig
from ftd.config.error_collector import ErrorCollector


def check_configuration(
    config: DaemonConfig, collector: ErrorCollector, *, given: bool = True
) -> Iterator[CheckResult]:
    """Yield a result for each error.

    :param given: whether the user named a file.
    :param collector: receives the error of a missing secret, which a node needs.
    """
    if not collector.affect("", "secret", "secret_file"):
        with collector.collect():
            config.require_secret()
    if not given:
        detail = "no file was given: these are checks of defaults and of variables FTD_…"
        remedy = (
            "give --config ftd.toml, of which ftd install node --dry-run shows a sample; for a cluster of ftd "
            "local use ftd status"
        )
        yield warning("configuration", detail, remedy)
    for error in collector.errors:
        detail = f"{error.field}: {error.problem}" if error.field else error.problem
        yield failed("configuration", detail, error.remedy or "correct it")
    if not collector.errors:
        yield ok("configuration", f"cluster {config.cluster}, node {config.node}")


def is_broker_known(collector: ErrorCollector) -> bool:
    """Return whether the broker can be checked: its address, credentials and the name of the cluster are valid."""
    return not collector.affect("", "cluster", "broker")
