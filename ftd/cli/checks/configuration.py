"""Checks of ``ftd.toml`` and of the files that it names."""

from collections.abc import Iterator

from ftd.cli.checks.check_result import CheckResult, failed, ok
from ftd.config.daemon import DaemonConfig
from ftd.config.error_collector import ErrorCollector


def check_configuration(config: DaemonConfig, mistakes: ErrorCollector) -> Iterator[CheckResult]:
    """Yield a result for each error.

    :param mistakes: receives the error of a missing secret, which a node needs.
    """
    if not mistakes.affect("", "secret", "secret_file"):
        with mistakes.collect():
            config.require_secret()
    for mistake in mistakes.errors:
        detail = f"{mistake.field}: {mistake.problem}" if mistake.field else mistake.problem
        yield failed("configuration", detail, mistake.remedy or "correct it")
    if not mistakes.errors:
        yield ok("configuration", f"cluster {config.cluster}, node {config.node}")


def is_broker_known(mistakes: ErrorCollector) -> bool:
    """Return whether the broker can be checked: its address, credentials and the name of the cluster are valid."""
    return not mistakes.affect("", "cluster", "broker")
