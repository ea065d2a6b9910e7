"""Checks of ``ftd.toml`` and of what it names."""

from collections.abc import Iterator

from ftd.cli.checks.check_result import CheckResult, failed, ok
from ftd.config.daemon import DaemonConfig
from ftd.config.error_collector import ErrorCollector


def check_configuration(config: DaemonConfig, mistakes: ErrorCollector) -> Iterator[CheckResult]:
    """A line for each mistake. :param mistakes: gets that a node needs the secret, if there is none."""
    if not mistakes.affect("", "secret", "secret_file"):
        with mistakes.collect():
            config.require_secret()
    for mistake in mistakes.errors:
        detail = f"{mistake.field}: {mistake.problem}" if mistake.field else mistake.problem
        yield failed("configuration", detail, mistake.remedy or "correct it")
    if not mistakes.errors:
        yield ok("configuration", f"cluster {config.cluster}, node {config.node}")


def is_broker_known(mistakes: ErrorCollector) -> bool:
    """Whether to ask it makes sense: what says where it is, how to get in and which cluster is sound."""
    return not mistakes.affect("", "cluster", "broker")
