"""Tests of examples/kubernetes: the schema is valid, and the pods' commands, files and variables form a cluster."""

import base64
import importlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ftd.transport.mqtt.mosquitto import await_listening, find_mosquitto, free_port
from tests.helpers.waiting import PATIENCE_S

HERE = Path(__file__).parents[2] / "examples" / "kubernetes"
BIN = Path(sys.executable).parent
HOSTS = ("host-a", "host-b")
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("FTD_")} | {
    "PATH": f"{BIN}:{os.environ['PATH']}"
}
Json = dict[str, Any]

needs_tools = pytest.mark.skipif(
    find_mosquitto() is None or shutil.which("mosquitto_passwd") is None or shutil.which("openssl") is None,
    reason="mosquitto or openssl is not installed",
)


def documents(path: Path) -> list[Json]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


MANIFEST = documents(HERE / "ftd.yaml")


@pytest.mark.parametrize("document", MANIFEST, ids=lambda d: f"{d['kind']}-{d['metadata']['name']}")
def test_kubernetes_knows_every_field(document: Json) -> None:
    validator = importlib.import_module("kubernetes_validate")
    validator.validate(document, "1.31", strict=True)


def test_the_schema_check_finds_an_unknown_field() -> None:
    validator = importlib.import_module("kubernetes_validate")
    invalid = MANIFEST[-1] | {"spec": MANIFEST[-1]["spec"] | {"updateStratgy": {}}}
    with pytest.raises(validator.ValidationError):
        validator.validate(invalid, "1.31", strict=True)


def test_services_set_no_variables_with_our_prefix() -> None:
    """Kubernetes derives ``FTD_BROKER_PORT`` from a service ``ftd-broker``, and a daemon would reject that
    variable.
    """
    specs = [d["spec"]["template"]["spec"] for d in MANIFEST if d["kind"] in ("Deployment", "DaemonSet")]
    assert [spec["enableServiceLinks"] for spec in specs] == [False] * 3


class Pod:
    """First container of a pod, run as a process: mounts are files below a directory, ports are free ones."""

    def __init__(
        self, root: Path, spec: Json, sources: dict[str, dict[str, bytes]], facts: dict[str, str]
    ) -> None:
        container = spec["containers"][0]
        self.root, self.container = root, container
        self.environment = {
            entry["name"]: entry.get("value") or facts[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            for entry in container.get("env", [])
        }
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        self.places = sorted(
            (mount["mountPath"] for mount in container["volumeMounts"]), key=len, reverse=True
        )
        self.ports: dict[str, str] = {}
        for mount in container["volumeMounts"]:
            self._mount(mount, volumes[mount["name"]], sources)

    def _mount(self, mount: Json, volume: Json, sources: dict[str, dict[str, bytes]]) -> None:
        target = self.root / mount["mountPath"].lstrip("/")
        source = volume.get("configMap", {}).get("name") or volume.get("secret", {}).get("secretName")
        if source is None:
            target.mkdir(parents=True, exist_ok=True)
            return
        expression = mount.get("subPathExpr", "")
        sub_path = mount.get("subPath") or re.sub(
            r"\$\((\w+)\)", lambda found: self.environment[found[1]], expression
        )
        files = {target: sources[source][sub_path]} if sub_path else {}
        files = files or {target / name: content for name, content in sources[source].items()}
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.moved(content.decode()).encode())
            path.chmod(volume.get("secret", {}).get("defaultMode", 0o644))

    def moved(self, text: str) -> str:
        """Return ``text`` with the pod's paths moved below our directory, and its ports replaced by free ones."""
        places = "|".join(map(re.escape, self.places))
        text = re.sub(rf"(?<![\w/])(?:{places})\b", lambda found: f"{self.root}{found[0]}", text)
        ports = r"(?:(?<=port = )|(?<=127\.0\.0\.1:)|(?<=listener ))\d+"
        return re.sub(ports, lambda found: self.ports.setdefault(found[0], str(free_port())), text)

    def command(self, command: list[str]) -> list[str]:
        words = [self.moved(word) for word in command]
        if words[0] == "mosquitto":
            words[0] = str(find_mosquitto())
        return words

    def start(self, **more: str) -> subprocess.Popen[bytes]:
        environment = ENVIRONMENT | self.environment | more
        return subprocess.Popen(self.command(self.container["command"]), env=environment)

    def alive(self) -> bool:
        command = self.command(self.container["livenessProbe"]["exec"]["command"])
        return (
            subprocess.run(command, env=ENVIRONMENT, capture_output=True, check=False, timeout=240).returncode
            == 0
        )


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in reversed(started):  # The broker was started first and ends last.
        process.terminate()
        process.wait(timeout=PATIENCE_S)


def sources_of(directory: Path) -> dict[str, dict[str, bytes]]:
    """Return the content of the ConfigMaps, and of the Secrets that ``make-secrets`` writes."""
    made = subprocess.run(
        [HERE / "make-secrets", *HOSTS], cwd=directory, env=ENVIRONMENT, capture_output=True, check=False
    )
    assert made.returncode == 0, made.stderr
    assert (directory / "secrets.yaml").stat().st_mode & 0o077 == 0
    secrets = documents(directory / "secrets.yaml")
    return {
        **{
            d["metadata"]["name"]: {k: v.encode() for k, v in d["data"].items()}
            for d in MANIFEST
            if d["kind"] == "ConfigMap"
        },
        **{d["metadata"]["name"]: {k: base64.b64decode(v) for k, v in d["data"].items()} for d in secrets},
    }


@pytest.mark.processes
@needs_tools
def test_the_pods_form_a_cluster(
    tmp_path_factory: pytest.TempPathFactory, processes: list[subprocess.Popen[bytes]]
) -> None:
    tmp_path = tmp_path_factory.mktemp("pods")  # The path must be short, because it holds unix sockets.
    sources = sources_of(tmp_path)
    specs = {
        d["metadata"]["name"]: d["spec"]["template"]["spec"]
        for d in MANIFEST
        if "template" in d.get("spec", {})
    }

    broker = Pod(tmp_path / "broker", specs["mosquitto"], sources, {})
    with (broker.root / "mosquitto/config/mosquitto.conf").open("a") as conf:
        # mosquitto drops the privileges of root, and could then not read the test's directory.
        conf.write("user root\n")
    processes.append(broker.start())
    (port,) = broker.ports.values()
    await_listening("127.0.0.1", int(port), PATIENCE_S)
    url = f"mqtts://localhost:{port}"

    pods = [Pod(tmp_path / "coordinator", specs["coordinator"], sources, {})]
    for host in HOSTS:
        facts = {"spec.nodeName": host, "status.hostIP": "127.0.0.1"}
        pods.append(Pod(tmp_path / host, specs["node"], sources, facts))
        assert (pods[-1].root / "etc/ftd/password").read_bytes() == sources["ftd-passwords"][host]
    processes.extend(pod.start(FTD_BROKER=url) for pod in pods)

    operator = tmp_path / "operator"
    operator.write_bytes(sources["ftd-passwords"]["operator"])
    operator.chmod(0o600)
    config = tmp_path / "ftd.toml"
    config.write_text(
        f'[broker]\nurl = "{url}"\nca_file = "coordinator/etc/ftd/cluster/ca.pem"\n'
        f'username = "operator"\npassword_file = "{operator}"\n'
    )
    deadline, seen = time.monotonic() + PATIENCE_S, ""
    while not all(f"{host}" in seen for host in HOSTS) or "HEALTHY" not in seen:
        assert time.monotonic() < deadline, seen
        status = subprocess.run(
            ["ftd", "status", "--config", str(config)],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
        )
        seen = status.stdout + status.stderr
        time.sleep(0.2)
    assert [pod.alive() for pod in pods] == [True] * 3
    assert [process.poll() for process in processes] == [None] * 4
