"""Follows the pages about several hosts to the letter, with their files and commands; each host is a directory
here.
"""

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftd.local.cluster import free_port
from ftd.transport.mqtt.mosquitto import find_mosquitto
from tests.helpers.docs_pages import ALL, ROOT, blocks
from tests.helpers.docs_reader import ELSEWHERE, Reader
from tests.helpers.playground import write_job
from tests.helpers.waiting import PATIENCE_S, until

TWO_HOSTS = (ROOT / "docs" / "tutorials" / "two-hosts.md").read_text()


@pytest.fixture
def hosts() -> Iterator[dict[str, Reader]]:
    """Yield hosts A and B, each with its own home and its own directories for sockets and snapshots."""
    with tempfile.TemporaryDirectory(prefix="h-") as name:  # Short, because unix sockets are in it.
        made = {}
        for letter in "AB":
            place = Path(name) / letter
            place.mkdir()
            made[letter] = Reader(place, "")
            made[letter].environment["PYTHONPATH"] = str(ROOT)
        try:
            yield made
        finally:
            for reader in made.values():
                reader.end()


def block(first: str) -> str:
    """Return the page's block that begins with this text."""
    [found] = [b for b in re.findall(r"^```\w*\n(.*?)^```", TWO_HOSTS, re.M | re.S) if b.startswith(first)]
    return str(found)


def test_every_command_of_several_hosts_is_run_here() -> None:
    of_hosts = {command for _, command in ALL if re.search(ELSEWHERE, command)}
    prompted = {command for page in ("overview.md", "two-hosts.md") for _, command in prompts(page)}
    rest = of_hosts - prompted
    assert prompts("overview.md")[:3] == prompts("two-hosts.md")
    assert all(re.match(r"ftd submit train|curl .*9641|ftd node --snap|torchrun|export ", c) for c in rest), (
        rest
    )


def prompts(page: str) -> list[tuple[str, str]]:
    """Return (host, command) pairs."""
    return re.findall(r"^([AB])\$ (.*)$", next((ROOT / "docs").rglob(page)).read_text(), re.M)


def test_two_hosts_train_as_the_page_says(hosts: dict[str, Reader], tmp_path: Path) -> None:
    if find_mosquitto() is None or shutil.which("mosquitto_passwd") is None:
        pytest.skip("mosquitto is not installed")
    port = free_port()
    broker(hosts["A"], port)
    # Second step: the same file with another [node] table, and the same secret next to it.
    [secret] = re.findall(r"`(head -c [^`]+)`", TWO_HOSTS)
    config = block("cluster =").replace("10.0.0.1:1883", f"127.0.0.1:{port}").replace("10.0.0.1", "127.0.0.1")
    config = re.sub(
        r"(?m)^rendezvous_port = .*\n", "", config
    )  # Two nodes on one machine cannot use the same port.
    metrics_port = free_port()
    for letter, reader in hosts.items():
        text = config.replace('"host-a" ', f'"host-{letter.lower()}" ')
        text += f'snapshot_dir = "{reader.place}/memory"\nmetrics_token_file = "token"\n'
        text += f"metrics_port = {metrics_port}\n" if letter == "A" else ""
        (reader.place / "ftd.toml").write_text(text)
        (reader.place / "token").write_text("open-sesame\n")
        (reader.place / "token").chmod(0o600)
        assert reader.run([("two-hosts.md", secret)]) == []
    shutil.copy(hosts["A"].place / "secret", hosts["B"].place / "secret")
    write_job(hosts["A"].place, delay_s=0.005).rename(hosts["A"].place / "train.toml")

    for letter, command in prompts("two-hosts.md"):
        hosts[letter].begin(command)
    status = "ftd status --json --config ftd.toml"
    until(
        lambda: len(answer(hosts["A"], status).get("nodes", {})) == 2,
        describe=lambda: said(hosts),
        every_s=0.2,
    )
    [submitting] = [
        b for b in blocks(ROOT / "docs" / "tutorials" / "two-hosts.md") if b.startswith("ftd submit")
    ]
    assert hosts["A"].run([("two-hosts.md", line) for line in submitting.splitlines()]) == []
    until(
        lambda: all(n["in_plan"] for n in answer(hosts["A"], status)["nodes"].values()),
        describe=lambda: said(hosts),
        every_s=0.2,
    )
    [(page, metrics)] = [(page, command) for page, command in ALL if "host-a:9641" in command]
    asked = metrics.replace("host-a:9641", f"127.0.0.1:{metrics_port}")
    assert hosts["A"].run([(page, f"{asked} | grep -c ^ftd_")]) == []
    # Fifth step: without a job, the nodes have nothing to hand over.
    assert hosts["A"].run([("two-hosts.md", "ftd stop tiny --config ftd.toml")]) == []
    for daemon in ("ftd node", "ftd coordinator"):
        ending = [p for r in hosts.values() for c, p, _ in r.background if c.startswith(daemon)]
        for process in ending:
            process.terminate()
        assert {process.wait(PATIENCE_S) for process in ending} == {0}, said(hosts)


def broker(host: Reader, port: int) -> None:
    """Take the first step: use the page's file and user, with a free port and a directory of this test."""
    [password] = [line for line in block("sudo mosquitto_passwd").splitlines() if "mosquitto_passwd" in line]
    [(_, file)] = re.findall(r"(-c) (\S+)", password)
    assert host.run([("two-hosts.md", password.replace("sudo ", "").replace(file, "ftd.passwd"))]) == []
    text = block("# /etc/mosquitto").replace("listener 1883 0.0.0.0", f"listener {port} 127.0.0.1")
    # With the user line, mosquitto keeps its user.
    text = text.replace(file, str(host.place / "ftd.passwd")) + "user root\n"
    (host.place / "mosquitto.conf").write_text(text)
    host.begin(f"exec {find_mosquitto()} -c mosquitto.conf")


def answer(host: Reader, command: str) -> dict[str, dict[str, dict[str, object]]]:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=host.place,
        env=host.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return json.loads(done.stdout) if done.returncode == 0 else {}


def said(hosts: dict[str, Reader]) -> str:
    """Return all output: after the error that counts, torchrun may print at length that its peer left first."""
    return "\n".join(f"{k}$ {c}\n{f.read_text()}" for k, r in hosts.items() for c, _, f in r.background)


def test_a_script_on_two_hosts_is_protected_as_the_page_says(hosts: dict[str, Reader]) -> None:
    page = [command for name, command in ALL if name == "snapshotter.md"]
    [snapshot_agent] = [command for command in page if "--snapshots-only" in command]
    [export] = [command for command in page if command.startswith("export TORCH")]
    [script] = [command for command in page if command.startswith("torchrun")]
    port = free_port()
    agents = []
    for letter, host in hosts.items():
        (host.place / "ftd.toml").write_text(
            f'secret = "s"\n[node]\nname = "{letter}"\nhost = "127.0.0.1"\nsnapshot_dir = "memory"\n'
        )
        (host.place / "ftd.toml").chmod(0o600)
        shutil.copytree(ROOT / "examples" / "scripts", host.place / "examples" / "scripts")
        host.begin(snapshot_agent)
        # Two hosts listen at the same path; two directories of one host cannot: set where the snapshot
        # agent listens.
        host.environment |= {
            "FTD_SNAPSHOT_AGENT": str(host.place / "memory" / "snapshot-agent.sock"),
            "FIRST": "127.0.0.1",
        }
        until(
            (host.place / "memory" / "snapshot-agent.sock").exists, describe=lambda: said(hosts), every_s=0.2
        )
    # A lookup of a host's name may take long or fail.
    once = (
        script.replace("29400", str(port)).replace(" --max", " --local-addr 127.0.0.1 --max") + " --steps 12"
    )
    for host in hosts.values():
        agents.append(host.begin(f"{export}\n{once}"))
    codes = [agent.wait(PATIENCE_S) for agent in agents]
    assert codes == [0, 0], said(hosts)
    printed = re.findall(r"^([01]) 12 \d", said(hosts), re.M)
    assert sorted(printed) == ["0", "1"], said(hosts)
    assert "needs a snapshot agent" not in said(hosts)
