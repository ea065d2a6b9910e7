"""Checks of ``ftd.toml`` and of the files that it names."""

from collections.abc import Iterator

from ftd.cli.checks.check_result import CheckResult, failed, ok
from ftd.config.daemon import DaemonConfig
from ftd.config.error_collector import ErrorCollector


def check_configuration(config: DaemonConfig, collector: ErrorCollector) -> Iterator[CheckResult]:
    """Yield a result for each error.

    :param collector: receives the error of a missing secret, which a node needs.
    """
    if not collector.affect("", "secret", "secret_file"):
        with collector.collect():
            config.require_secret()
    for error in collector.errors:
        detail = f"{error.field}: {error.problem}" if error.field else error.problem
        yield failed("configuration", detail, error.remedy or "correct it")
    if not collector.errors:
        yield ok("configuration", f"cluster {config.cluster}, node {config.node}")


def is_broker_known(collector: ErrorCollector) -> bool:
    """Return whether the broker can be checked: its address, credentials and the name of the cluster are valid."""
    return not collector.affect("", "cluster", "broker")
