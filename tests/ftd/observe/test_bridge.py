"""The bridge from events to a webhook: a real broker, a real process, and an HTTP server that misbehaves."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import paho.mqtt.publish
import pytest
import structlog

from ftd.errors import ConfigurationError
from ftd.observe.bridge.alert import build_alert
from ftd.observe.bridge.daemon import CONNECT_S, Bridge
from ftd.observe.bridge.filters import parse_filter
from ftd.observe.bridge.webhook import DeadLetterFile, WebhookOptions
from ftd.transport.address import BrokerAddress, ClusterAddress
from ftd.transport.wire.catalogue import SEVERITIES
from ftd.transport.wire.contract_examples import DETAILS, envelope
from ftd.transport.wire.public import EventMessage, decode_json
from tests.helpers.brokers import RunningBroker
from tests.helpers.commands import ftd_here
from tests.helpers.waiting import PATIENCE_S, until

Json = dict[str, Any]
PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "recipes.md").read_text(encoding="utf-8")


def event(name: str, number: int = 0) -> Json:
    return {**envelope(name, DETAILS.get(name, {})), "id": f"e-{name}-{number}"}


def message(name: str, node: str | None = None) -> EventMessage:
    return decode_json(json.dumps({**event(name), "node": node}).encode(), EventMessage)  # type: ignore[no-any-return]


# --- the dead-letter file ------------------------------------------------------------------------------


def test_an_alert_that_a_full_disk_cuts_off_is_logged_and_leaves_the_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "dead.jsonl"
    file = DeadLetterFile(path)
    alerts = [build_alert(message("NodeLost", f"node-{number}"), "ftd") for number in range(3)]
    file.append(alerts[0], "rejected")
    real = os.write
    with monkeypatch.context() as full, structlog.testing.capture_logs() as logged:
        full.setattr(os, "write", lambda file, data: real(file, data[: len(data) // 2]))
        file.append(alerts[1], "rejected")
    assert [entry["event"] for entry in logged] == ["dead_letter_lost"]
    assert json.loads(logged[0]["line"])["body"] == alerts[1]
    file.append(alerts[2], "rejected")
    file.close()
    assert [json.loads(line)["body"] for line in path.read_text().splitlines()] == [alerts[0], alerts[2]]


# --- filters -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "node", "passes"),
    [
        ("", "StepCommitted", None, True),
        ("severity>=warning", "StepCommitted", None, False),
        ("severity>=warning", "NodeLost", "node-1", True),
        ("severity >= warning", "ClusterPaused", None, True),
        ("severity=info,critical", "NodeLost", "node-1", False),
        ("event=Node*,TrainerLost", "NodeLost", "node-1", True),
        ("event=Node*,TrainerLost", "ClusterPaused", None, False),
        ("event=Node* and node!=node-9", "NodeLost", "node-9", False),
        ("node=node-?", "NodeLost", "node-9", True),
        ("node=node-?", "ClusterPaused", None, False),
    ],
)
def test_filters(text: str, name: str, node: str | None, passes: bool) -> None:
    assert parse_filter(text).matches(message(name, node)) is passes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("severity", "'severity' is not a term"),
        ("severity>=warning or x=y", "not a term of a filter"),
        ("colour=red", "cannot filter by 'colour'; use event, node or severity"),
        ("severity=loud", "unknown severity 'loud'; use one of info, warning, error, critical"),
        ("event>=NodeLost", ">= needs severity"),
        ("severity>=info,error", ">= needs severity and a single value"),
        ("event=NodeLots", "no event is named 'NodeLots'"),
    ],
)
def test_a_malformed_filter_is_rejected(text: str, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(expected)):
        parse_filter(text)


def test_an_alert_has_all_fields_of_alertmanager() -> None:
    body = build_alert(message("NodeLost", "node-2"), "lab")
    [alert] = body["alerts"]
    assert alert["labels"] == {
        "alertname": "NodeLost", "severity": "warning", "cluster": "lab", "job": "ftd", "node": "node-2",
    }  # fmt: skip
    assert alert["status"] == body["status"] == "firing"
    assert alert["annotations"]["summary"] == "a sentence for people"
    assert json.loads(alert["annotations"]["details"])["how"] == "last_will"
    assert alert["fingerprint"] == "e-NodeLost-0"
    assert (body["version"], alert["startsAt"]) == ("4", "2026-05-04T12:00:05.003Z")
    assert SEVERITIES.index("warning") == 1
    without = msgspec.structs.replace(message("LeaderLost"), generation=None, step=None)
    [alert] = build_alert(without, "lab")["alerts"]
    assert not {"generation", "step"} & alert["annotations"].keys(), "what is not known is left out"


# --- a webhook, and the bridge as a process ------------------------------------------------------------


class Webhook:
    """An HTTP server that answers with the given status, or stalls if it is ``stall``."""

    def __init__(self) -> None:
        self.answer: int | str = 200
        self.taken: list[str] = []
        """Fingerprints of the alerts that it accepted."""
        self.attempts = 0
        self.headers: list[dict[str, str]] = []
        self.woken = threading.Event()
        webhook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                webhook.attempts += 1
                webhook.headers.append(dict(self.headers))
                if webhook.answer == "stall":
                    webhook.woken.wait(PATIENCE_S)
                    return
                if webhook.answer == 200:
                    webhook.taken.append(body["alerts"][0]["fingerprint"])
                self.send_response(int(webhook.answer))
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/alerts"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self._thread.start()

    def close(self) -> None:
        self.woken.set()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    made = Webhook()
    yield made
    made.close()


class BridgeProcess:
    def __init__(self, directory: Path, port: int, url: str, *more: str) -> None:
        self.letters = directory / "dead.jsonl"
        self.log = directory / "bridge.log"
        self.port = port
        command = [
            "--webhook",
            url,
            "--broker",
            f"mqtt://127.0.0.1:{port}",
            "--dead-letters",
            str(self.letters),
        ]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ftd.cli.main", "bridge", *command, *more],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        until(lambda: '"bridge_started"' in self.log.read_text(), describe=self.log.read_text)

    def send_events(self, *events: Json) -> None:
        paho.mqtt.publish.multiple(
            [("ftd/v2/ftd/events", json.dumps(one), 1, False) for one in events], "127.0.0.1", self.port
        )

    def dead_letters(self) -> list[tuple[str, str]]:
        """Return fingerprint and reason of each dead letter."""
        lines = [json.loads(line) for line in self.letters.read_text().splitlines()]
        return [(line["body"]["alerts"][0]["fingerprint"], line["reason"]) for line in lines]

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


LATER = re.findall(r"^```sh\n(jq -c .body.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
Start = Callable[..., BridgeProcess]


@pytest.fixture
def start(tmp_path: Path, mosquitto: RunningBroker, webhook: Webhook) -> Iterator[Start]:
    running: list[BridgeProcess] = []

    def begin(*more: str) -> BridgeProcess:
        running.append(BridgeProcess(tmp_path, mosquitto.port, webhook.url, *more))
        return running[-1]

    yield begin
    for one in running:
        one.process.kill()
        one.process.wait()


def test_matching_events_arrive_once_and_in_order_despite_a_failing_webhook(
    start: Start, webhook: Webhook, tmp_path: Path
) -> None:
    """The webhook answers 503, stalls, and comes back: all events arrive."""
    (tmp_path / "token").write_text("s3cret\n")
    (tmp_path / "token").chmod(0o600)
    token = ("--token-file", str(tmp_path / "token"))
    bridge = start(*token, "--filter", "severity>=warning", "--timeout-s", "0.5")
    webhook.answer = 503
    bridge.send_events(
        event("NodeLost", 1), event("StepCommitted", 1), event("NodeLost", 1), event("RolledBack", 1)
    )
    until(lambda: webhook.attempts >= 2, describe=bridge.log.read_text)
    webhook.answer = "stall"
    until(lambda: "no answer within 0.5 s" in bridge.log.read_text(), describe=bridge.log.read_text)
    webhook.answer = 200
    bridge.send_events(event("ClusterPaused", 1))
    wanted = ["e-NodeLost-1", "e-RolledBack-1", "e-ClusterPaused-1"]
    until(lambda: len(webhook.taken) >= 3, describe=bridge.log.read_text)
    assert webhook.taken == wanted
    assert webhook.headers[0]["Authorization"] == "Bearer s3cret"
    assert bridge.end() == 0
    assert bridge.dead_letters() == []


def test_rejected_and_overflowing_alerts_are_in_the_dead_letter_file(start: Start, webhook: Webhook) -> None:
    bridge = start("--queue", "1", "--finish-s", "0.2")
    webhook.answer = 400
    bridge.send_events(event("NodeLost", 1))
    until(lambda: len(bridge.dead_letters()) == 1, describe=bridge.log.read_text)
    assert bridge.dead_letters()[0] == ("e-NodeLost-1", "the webhook answered 400; attempts: 1")
    webhook.answer = "stall"
    bridge.send_events(event("NodeLost", 2))
    until(lambda: webhook.attempts == 2, describe=bridge.log.read_text)
    bridge.send_events(event("NodeLost", 3), event("NodeLost", 4))
    until(lambda: len(bridge.dead_letters()) == 2, describe=bridge.log.read_text)
    assert bridge.dead_letters()[1] == ("e-NodeLost-4", "the queue is full: 1 alerts wait for the webhook")
    assert bridge.end() == 1
    stopped = "the bridge was stopped before the webhook took it"
    assert bridge.dead_letters()[2:] == [("e-NodeLost-2", stopped), ("e-NodeLost-3", stopped)]


@pytest.mark.usefixtures("hangups_end_processes")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_signals_deliver_queued_alerts_first(how: signal.Signals, start: Start, webhook: Webhook) -> None:
    bridge = start("--finish-s", "30", "--retry-for-s", "60")
    webhook.answer = 503
    bridge.send_events(event("NodeLost", 1), event("NodeLost", 2))
    until(lambda: webhook.attempts >= 1, describe=bridge.log.read_text)
    bridge.process.send_signal(how)
    webhook.answer = 200
    assert bridge.process.wait(PATIENCE_S) == 0
    assert webhook.taken == ["e-NodeLost-1", "e-NodeLost-2"]


def test_a_signal_ends_the_wait_for_a_broker(tmp_path: Path) -> None:
    async def run() -> int:
        address = ClusterAddress(broker=BrokerAddress(host="127.0.0.1", port=9))
        options = WebhookOptions(url="http://x", dead_letters=tmp_path / "dead.jsonl")
        asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGTERM)
        return await Bridge(address, [], options, 0.1).run()

    assert asyncio.run(asyncio.wait_for(run(), CONNECT_S / 2)) == 0


def test_undeliverable_alerts_are_in_the_file_and_a_lost_broker_is_logged(
    start: Start, webhook: Webhook, mosquitto: RunningBroker
) -> None:
    bridge = start("--retry-for-s", "0")
    webhook.answer = 503
    bridge.send_events(event("NodeLost", 1))
    until(lambda: len(bridge.dead_letters()) == 1, describe=bridge.log.read_text)
    mosquitto.kill()
    mosquitto.start()
    until(lambda: '"events_missed"' in bridge.log.read_text(), describe=bridge.log.read_text)
    webhook.answer = 200
    bridge.send_events(event("NodeLost", 2))
    until(lambda: webhook.taken == ["e-NodeLost-2"], describe=bridge.log.read_text)
    assert bridge.end() == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--webhook", "ftp://x"], "--webhook: 'ftp://x' is not a valid URL"),
        (["--webhook", "http://x:99999/"], "--webhook: 'http://x:99999/' is not a valid URL"),
        (["--webhook", "http://x/a b"], "--webhook: 'http://x/a b' is not a valid URL"),
        (["--webhook", "http://x", "--filter", "severity=loud"], "unknown severity 'loud'"),
        (["--webhook", "http://x", "--token-file", "missing"], "--token-file: missing cannot be read"),
        (["--webhook", "http://x", "--dead-letters", "/proc/none/file"], "--dead-letters"),
        (["--webhook", "http://x", "--dead-letters", "/dev/null"], "does not answer"),
    ],
)
def test_bad_input_is_rejected_in_a_sentence(
    arguments: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ftd.observe.bridge.daemon.CONNECT_S", 0.5)
    code, _, err = ftd_here(
        "bridge", *arguments, "--broker", "mqtt://127.0.0.1:9", patch=monkeypatch, said=capsys
    )
    assert code in (2, 3)
    assert err.startswith("ftd: ") and expected in err


def test_the_recipe_in_the_documentation_works(start: Start, webhook: Webhook) -> None:
    """The test uses the recipe's own filters, with this webhook and this broker."""
    [command] = re.findall(r"^ftd bridge (.*)$", PAGE, re.MULTILINE)
    filters = re.findall(r"--filter '([^']+)'", command)
    assert re.sub(r"--filter '[^']+'", "", command).split() == ["--webhook", "http://127.0.0.1:9095/alerts"]
    bridge = start(*(word for text in filters for word in ("--filter", text)))
    bridge.send_events(event("StepCommitted"), event("RecoveryCompleted"), event("NodeLost"))
    until(lambda: len(webhook.taken) == 2, describe=bridge.log.read_text)
    assert webhook.taken == ["e-RecoveryCompleted-0", "e-NodeLost-0"]


@pytest.mark.processes
def test_dead_letters_are_posted_later(webhook: Webhook, tmp_path: Path) -> None:
    missing = [program for program in ("jq", "curl") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"{' and '.join(missing)} not installed (tools/install-mosquitto brings jq by apt)")
    letters = tmp_path / "ftd-dead-letters.jsonl"
    bodies = [build_alert(message(name), "lab") for name in ("NodeLost", "RolledBack")]
    letters.write_text("".join(json.dumps({"at": "", "reason": "", "body": body}) + "\n" for body in bodies))
    [command] = LATER
    command = command.replace("http://127.0.0.1:9095/alerts", webhook.url)
    subprocess.run(["bash", "-c", command], cwd=tmp_path, timeout=PATIENCE_S, check=True)
    assert webhook.taken == ["e-NodeLost-0", "e-RolledBack-0"]
    assert not (tmp_path / "still-dead.jsonl").exists()
