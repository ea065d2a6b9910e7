"""Checks against the cluster: broker, credentials, rights, the coordinator's version and clock."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from importlib.metadata import version

from ftd.cli.checks.check_result import CheckResult, failed, ok, warning
from ftd.config.daemon import DaemonConfig
from ftd.errors import UnreachableError, WireError
from ftd.observe.view.text import ineligible_words
from ftd.transport.mqtt.session import MqttSession
from ftd.transport.wire.public import decode_json
from ftd.transport.wire.topics import Topics

BROKER_TIMEOUT_S = 5.0
ECHO_TIMEOUT_S = 3.0
STATE_TIMEOUT_S = 3.0
"""How long the coordinator may take to say something: while it trains it does so twice a second."""
MAX_SKEW_S = 2.0
"""Clocks that differ more make logs of several hosts hard to read; nothing else depends on them."""


async def check_cluster(config: DaemonConfig) -> AsyncIterator[CheckResult]:
    """As this node would see it, without disturbing one of its name that is running."""
    probe = _Probe(config)
    task = asyncio.create_task(probe.session.run())
    try:
        try:
            await probe.session.wait_connected(BROKER_TIMEOUT_S)
        except UnreachableError as error:
            yield failed("broker", str(error), "start it, or correct [broker] in ftd.toml")
            return
        encrypted = "by TLS" if config.broker.tls else "not encrypted"
        user = config.broker.username or "anonymous"
        yield ok("broker", f"{config.broker.url} lets us in as {user}, {encrypted}")
        yield await probe.check_rights()
        async for finding in probe.check_coordinator():
            yield finding
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class _Probe:
    def __init__(self, config: DaemonConfig) -> None:
        self._config = config
        self._topics = Topics(cluster=config.cluster)
        self._word = secrets.token_bytes(8)
        self._heard = asyncio.Event()
        self._spoke = asyncio.Event()
        self._fresh = asyncio.Event()
        self._state: dict[str, object] = {}
        self._skew_s = 0.0
        self.session = MqttSession(
            config.broker,
            client_id=f"ftd-doctor-{secrets.token_hex(4)}",
            subscriptions=(self._topics.node_echo(config.node), self._topics.cluster_state),
            on_message=self._on_message,
        )

    def _on_message(self, topic: str, payload: bytes, retained: bool) -> None:
        if topic == self._topics.node_echo(self._config.node):
            if payload == self._word:
                self._heard.set()
            return
        try:
            self._state = decode_json(payload, dict)
        except WireError:
            return
        self._spoke.set()
        with contextlib.suppress(ValueError):
            if not retained:
                said = datetime.fromisoformat(str(self._state.get("at")))
                self._skew_s = (datetime.now(UTC) - said).total_seconds()
                self._fresh.set()

    async def check_rights(self) -> CheckResult:
        """Say a word to ourselves: what an ACL forbids is dropped silently."""
        self.session.publish(self._topics.node_echo(self._config.node), self._word)
        try:
            await asyncio.wait_for(self._heard.wait(), ECHO_TIMEOUT_S)
        except TimeoutError:
            user = self._config.broker.username or "anonymous"
            detail = f"{user} may not write or read the topics of {self._config.node}"
            return failed("rights", detail, "the node's own user and password; an ACL made by ftd acl")
        return ok("rights", f"may write and read the topics of {self._config.node}")

    async def check_coordinator(self) -> AsyncIterator[CheckResult]:
        try:
            await asyncio.wait_for(self._spoke.wait(), STATE_TIMEOUT_S)
        except TimeoutError:
            detail = f"nothing is known of one for cluster {self._config.cluster!r}"
            yield warning("coordinator", detail, "start it, or correct cluster in ftd.toml")
            return
        phase, theirs = self._state.get("phase"), self._state.get("version")
        if phase == "UNREACHABLE":
            reason = str(self._state.get("reason") or "it was here and is gone")
            yield warning("coordinator", reason, "start it: ftd coordinator")
            return
        yield ok("coordinator", f"it is here, the cluster is {phase}")
        for sentence in ineligible_words(self._state):
            yield warning("standby", sentence, "the same version of ftd on all coordinators' hosts")
        mine = version("ftd")
        if theirs != mine:
            yield warning(
                "version", f"{mine} here, {theirs or 'an older one'} there", "the same on all hosts"
            )
        else:
            yield ok("version", f"{mine} here and there")
        yield await self._check_clock()

    async def _check_clock(self) -> CheckResult:
        try:
            await asyncio.wait_for(self._fresh.wait(), STATE_TIMEOUT_S)
        except TimeoutError:
            return ok("clock", "not compared: the coordinator has nothing to say while no job runs")
        if abs(self._skew_s) > MAX_SKEW_S:
            detail = f"{self._skew_s:+.1f} s against the coordinator's"
            return warning("clock", detail, "run a time service (chrony, systemd-timesyncd) on both")
        return ok("clock", f"within {MAX_SKEW_S:g} s of the coordinator's")
