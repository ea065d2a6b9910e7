"""Checks against the cluster: broker, credentials, rights, and the coordinator's version and clock."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import ftd
from ftd.cli.checks.check_result import CheckResult, failed, ok, warning
from ftd.config.daemon import DaemonConfig
from ftd.errors import UnreachableError, WireError
from ftd.observe.view.text import ineligible_words
from ftd.transport.mqtt.session import MqttSession
from ftd.transport.wire.codec import MAX_COMMAND_BYTES
from ftd.transport.wire.public import decode_json
from ftd.transport.wire.topics import Topics

BROKER_TIMEOUT_S = 5.0
ECHO_TIMEOUT_S = 3.0
STATE_TIMEOUT_S = 3.0
"""Timeout for a message of the coordinator, which publishes twice a second during training."""
MAX_SKEW_S = 2.0
"""Clock difference above which logs of several hosts are hard to read; nothing else depends on clocks."""


async def check_cluster(config: DaemonConfig) -> AsyncIterator[CheckResult]:
    """Check the cluster as this node would see it, without disturbing a running node of the same name."""
    probe = _Probe(config)
    task = asyncio.create_task(probe.session.run())
    try:
        try:
            await probe.session.wait_connected(BROKER_TIMEOUT_S)
        except UnreachableError as error:
            yield failed("broker", str(error), "start the broker, or correct [broker] in ftd.toml")
            return
        encrypted = "encrypted by TLS" if config.broker.tls else "not encrypted"
        user = config.broker.username or "anonymous"
        yield ok("broker", f"{config.broker.url} accepts the user {user}; the connection is {encrypted}")
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
        self._token = secrets.token_bytes(8)
        self._echoed = asyncio.Event()
        self._received = asyncio.Event()
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
            if payload == self._token:
                self._echoed.set()
            return
        try:
            self._state = decode_json(payload, dict, MAX_COMMAND_BYTES)
        except WireError:
            return
        self._received.set()
        with contextlib.suppress(ValueError):
            if not retained:
                published_at = datetime.fromisoformat(str(self._state.get("at")))
                self._skew_s = (datetime.now(UTC) - published_at).total_seconds()
                self._fresh.set()

    async def check_rights(self) -> CheckResult:
        """Publish a token to this node's own echo topic: the broker silently drops what an ACL forbids."""
        self.session.publish(self._topics.node_echo(self._config.node), self._token)
        try:
            await asyncio.wait_for(self._echoed.wait(), ECHO_TIMEOUT_S)
        except TimeoutError:
            user = self._config.broker.username or "anonymous"
            detail = f"{user} may not write or read the topics of {self._config.node}"
            remedy = "use the node's own user and password, and an ACL made by ftd acl"
            return failed("rights", detail, remedy)
        return ok("rights", f"this user may write and read the topics of {self._config.node}")

    async def check_coordinator(self) -> AsyncIterator[CheckResult]:
        try:
            await asyncio.wait_for(self._received.wait(), STATE_TIMEOUT_S)
        except TimeoutError:
            detail = f"no coordinator has published a state for the cluster {self._config.cluster!r}"
            yield warning("coordinator", detail, "start it, or correct the key cluster in ftd.toml")
            return
        phase, theirs = self._state.get("phase"), self._state.get("version")
        if phase == "UNREACHABLE":
            reason = str(self._state.get("reason") or "it is not connected any more")
            yield warning("coordinator", reason, "start it: ftd coordinator")
            return
        yield ok("coordinator", f"it is connected, and the cluster is {phase}")
        for sentence in ineligible_words(self._state):
            yield warning(
                "standby", sentence, "install the same version of ftd on the hosts of all coordinators"
            )
        mine = ftd.__version__
        if theirs != mine:
            yield warning(
                "version",
                f"{mine} on this host, {theirs or 'an older version'} at the coordinator",
                "install the same version on all hosts",
            )
        else:
            yield ok("version", f"{mine}, as at the coordinator")
        yield await self._check_clock()

    async def _check_clock(self) -> CheckResult:
        try:
            await asyncio.wait_for(self._fresh.wait(), STATE_TIMEOUT_S)
        except TimeoutError:
            detail = f"not compared: the coordinator published nothing within {STATE_TIMEOUT_S:g} s"
            if self._state.get("phase") != "RUNNING":
                return ok("clock", f"{detail}, as is usual while nothing trains")
            return warning(
                "clock", f"{detail}, although a job runs", "see whether the coordinator hangs: ftd status"
            )
        if abs(self._skew_s) > MAX_SKEW_S:
            detail = f"{self._skew_s:+.1f} s relative to the coordinator's clock"
            return warning("clock", detail, "run a time service (chrony, systemd-timesyncd) on both hosts")
        return ok("clock", f"within {MAX_SKEW_S:g} s of the coordinator's clock")
