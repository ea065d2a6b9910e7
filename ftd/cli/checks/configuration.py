"""Checks of ``ftd.toml`` and of what it names."""

from collections.abc import Iterator

from ftd.cli.checks.finding import Finding, failed, ok
from ftd.config.daemon import DaemonConfig
from ftd.config.mistakes import Mistakes


def check_configuration(config: DaemonConfig, mistakes: Mistakes) -> Iterator[Finding]:
    """A line for each mistake. :param mistakes: gets that a node needs the secret, if there is none."""
    if not mistakes.concern("", "secret", "secret_file"):
        with mistakes.noted():
            config.require_secret()
    for mistake in mistakes.found:
        detail = f"{mistake.field}: {mistake.problem}" if mistake.field else mistake.problem
        yield failed("configuration", detail, mistake.remedy or "correct it")
    if not mistakes.found:
        yield ok("configuration", f"cluster {config.cluster}, node {config.node}")


def broker_is_known(mistakes: Mistakes) -> bool:
    """Whether to ask it makes sense: what says where it is, how to get in and which cluster is sound."""
    return not mistakes.concern("", "cluster", "broker")
