"""Coordinators of two versions in one cluster, as real processes: none leads from a journal that it cannot
read.
"""

import asyncio
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import ftd
from ftd.cli.checks.cluster import check_cluster
from ftd.config.daemon import load_daemon_config
from ftd.coordinator.journal import Journal
from ftd.coordinator.leadership import Takeover
from ftd.coordinator.ports import Program
from ftd.driver import SystemClock
from ftd.errors import JournalError
from ftd.transport.address import BrokerAddress, ClusterAddress
from ftd.transport.client import ClusterClient
from ftd.transport.wire.coordinator_messages import JournalCopy
from ftd.transport.wire.public import StatusRequest
from statemachine.cluster.durable import durable
from statemachine.cluster.machine import ClusterMachine
from statemachine.messages.values import PROTOCOL
from statemachine.timing import Timing
from tests.helpers.brokers import RunningBroker
from tests.helpers.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[3]
OLD, NEW = durable.SCHEMA, durable.SCHEMA + 1
PROGRAM = Program(version=ftd.__version__, schema=OLD)
OF_SCHEMA = """
import importlib.metadata, sys
schema, known = int(sys.argv.pop(1)), importlib.metadata.version
importlib.metadata.version = lambda name: f"{schema}.0" if name == "ftd" else known(name)
from statemachine.cluster.durable import durable
durable.SCHEMA = schema
from ftd.cli.main import main
main()
"""
"""An ``ftd`` of a version that writes this schema, and reads schemas since ``durable.OLDEST``."""


class Host:
    """The host of a coordinator, on which one version of ftd after another is installed."""

    def __init__(self, directory: Path, name: str, port: int) -> None:
        self.name, self.log, self.config = name, directory / f"{name}.log", directory / f"{name}.toml"
        self.journal = directory / f"state-{name}" / "journal.sqlite"
        self.config.write_text(
            f'cluster = "t"\n[broker]\nurl = "mqtt://127.0.0.1:{port}"\n[dashboard]\nlisten = ""\n'
            f'[coordinator]\nname = "{name}"\nstate_dir = "state-{name}"\n'
            "[timing]\nleader_silence_s = 60.0\nlost_record_timeout_s = 61.0\n"
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, schema: int) -> None:
        with self.log.open("wb") as log:
            command = [sys.executable, "-c", OF_SCHEMA, str(schema), "coordinator"]
            self.process = subprocess.Popen(
                [*command, "--config", str(self.config)], stdout=log, stderr=log, cwd=ROOT
            )

    def ends(self) -> int:
        assert self.process is not None
        return self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@pytest.fixture
def hosts(tmp_path: Path, mosquitto: RunningBroker) -> Iterator[tuple[Host, Host]]:
    made = Host(tmp_path, "anna", mosquitto.port), Host(tmp_path, "bert", mosquitto.port)
    yield made
    for host in made:
        host.kill()
        assert "Traceback" not in host.said, host.said


class StateRecorder:
    """A client that records what the cluster publishes."""

    def __init__(self, client: ClusterClient, states: list[dict[str, Any]], hosts: tuple[Host, ...]) -> None:
        self.client, self.states, self.hosts = client, states, hosts
        self.events: list[dict[str, Any]] = []

    async def follow(self) -> None:
        async for event in self.client.events():
            self.events.append(event)

    async def until(self, holds: Callable[[dict[str, Any]], Any], what: str) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while not (self.states and holds(self.states[-1])):
            said = [host.said for host in self.hosts]
            assert time.monotonic() < deadline, f"{what}: {self.states[-1:]} {said}"
            await asyncio.sleep(0.05)
        return self.states[-1]

    async def event_named(self, name: str) -> dict[str, Any]:
        await self.until(lambda _: any(event["event"] == name for event in self.events), name)
        return next(event for event in self.events if event["event"] == name)


def test_an_upgrade_host_by_host_and_an_old_version_that_is_left(
    hosts: tuple[Host, Host], mosquitto: RunningBroker
) -> None:
    """The new version takes over from the old one, but never the old one from the new one."""
    anna, bert = hosts
    address = ClusterAddress(broker=BrokerAddress(host="127.0.0.1", port=mosquitto.port), cluster="t")

    async def scene() -> None:
        states: list[dict[str, Any]] = []
        async with ClusterClient(address, listen=True, on_state=states.append) as client:
            look = StateRecorder(client, states, hosts)
            following = asyncio.ensure_future(look.follow())
            anna.start(OLD)
            await look.until(lambda s: s.get("leader") == "anna", "the old version leads")
            bert.start(NEW)
            await look.until(lambda s: s.get("standbys") == ["bert"], "the new one reads what it writes")
            anna.kill()
            await look.until(lambda s: s.get("leader") == "bert", "and takes over")

            anna.start(OLD)
            state = await look.until(lambda s: s.get("ineligible"), "the old one stands aside")
            assert state["standbys"] == [] and f"schema {NEW}" in state["ineligible"]["anna"]
            assert (await look.event_named("StandbyIneligible"))["details"]["coordinator"] == "anna"
            found = [finding async for finding in check_cluster(load_daemon_config(bert.config))]
            [standby] = [finding for finding in found if finding.check == "standby"]
            assert standby.verdict == "warning" and "anna cannot take over" in standby.detail

            bert.kill()
            state = await look.until(
                lambda s: "anna must not" in s.get("reason", ""), "it says why nobody leads"
            )
            assert state["phase"] == "UNREACHABLE" and "install the same" in state["reason"]
            assert (await look.event_named("TakeoverRejected"))["severity"] == "critical"
            assert anna.process is not None and anna.process.poll() is None
            anna.kill()
            anna.start(NEW)
            await look.until(lambda s: s.get("leader") == "anna", "its journal is still good for the new one")
            envelope = client.envelope()
            await client.request(StatusRequest(request=envelope["request"], reply=envelope["reply"]))
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    asyncio.run(scene())
    anna.kill()
    before = rows(anna.journal)
    anna.start(OLD)
    assert anna.ends() == 1 and f"schema {NEW}" in anna.said and "--reset" in anna.said
    assert rows(anna.journal) == before


def rows(journal: Path) -> list[Any]:
    with sqlite3.connect(f"file:{journal}?mode=ro", uri=True) as known:
        return known.execute("SELECT value FROM state").fetchall()


def copy_of(position: tuple[int, int], schema: int, protocol: int, state: bytes = b"") -> JournalCopy:
    return JournalCopy(
        term=position[0], serial=position[1], wall_s=0.0, monotonic_s=0.0, version="9.9", schema=schema,
        protocol=protocol, state=state or msgspec.msgpack.encode(ClusterMachine(Timing()).durable_state()),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "protocol", "says"), [(NEW, PROTOCOL, f"schema {NEW}"), (OLD, PROTOCOL + 1, "protocol")]
)
def test_ineligibility_outlives_the_process_and_ends_with_a_newer_journal(
    tmp_path: Path, schema: int, protocol: int, says: str
) -> None:
    def opened(*, reset: bool = False) -> tuple[Journal, Takeover]:
        journal = Journal(tmp_path)
        return journal, Takeover(Timing(), journal, SystemClock(), PROGRAM, reset=reset)

    journal, takeover = opened()
    assert takeover.save_copy(copy_of((1, 1), OLD, PROTOCOL)) == takeover.ineligible == ""
    assert says in takeover.save_copy(copy_of((1, 2), schema, protocol))
    assert says in takeover.check(copy_of((1, 3), schema, protocol))
    assert journal.position == (1, 1)
    journal.close()

    journal, takeover = opened()
    assert says in takeover.ineligible and "9.9" in takeover.ineligible
    assert takeover.save_copy(copy_of((1, 1), OLD, PROTOCOL)) == ""  # The takeover has this one already.
    assert says in takeover.ineligible
    assert takeover.save_copy(copy_of((2, 1), OLD, PROTOCOL)) == takeover.ineligible == ""
    assert "cannot be read" in takeover.check(
        copy_of((3, 1), OLD, PROTOCOL, msgspec.msgpack.encode({"schema": OLD}))
    )
    assert takeover.check(copy_of((3, 1), OLD, PROTOCOL)) == takeover.check(None) == ""
    takeover.save_copy(copy_of((4, 1), schema, protocol))
    journal.close()

    journal, takeover = opened(reset=True)  # A coordinator that discards the job need not read anything.
    assert takeover.ineligible == takeover.check(copy_of((5, 1), schema, protocol)) == ""
    assert takeover.begin(copy_of((5, 1), schema, protocol), 0).effects == []
    assert says in takeover.save_copy(copy_of((6, 1), schema, protocol))
    journal.close()


def test_a_lead_does_not_begin_from_a_journal_that_only_the_broker_holds(tmp_path: Path) -> None:
    """The broker may lose it while the disk has no room: the generation that it announces would be used twice."""
    journal = Journal(tmp_path)
    takeover = Takeover(Timing(), journal, SystemClock(), PROGRAM, reset=False)
    takeover.begin(copy_of((1, 1), OLD, PROTOCOL), 0)
    assert journal.position == (1, 1) and journal.load() is not None
    journal._db.execute("PRAGMA query_only = ON")
    with pytest.raises(JournalError, match="cannot be written"):
        takeover.begin(copy_of((1, 2), OLD, PROTOCOL), 0)
    journal.close()


def test_a_journal_of_another_schema_is_an_error_that_names_both(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.save(msgspec.msgpack.encode({"schema": NEW}), forced=True)
    with pytest.raises(JournalError, match=f"schema {NEW}, and this program reads .*{OLD}.*--reset"):
        Takeover(Timing(), journal, SystemClock(), PROGRAM, reset=False)
    journal.close()
