"""ftd.toml and finding the cluster: what is accepted, and that every error names field and remedy."""

import json
import os
import re
import socket
from dataclasses import fields
from pathlib import Path

import pytest

from ftd.config.address import BrokerAddress, parse_broker
from ftd.config.daemon import daemon_config, load_daemon_config, way_to
from ftd.config.locate import find_cluster, local_file
from ftd.errors import ConfigurationError
from statemachine.timing import Timing


@pytest.fixture(autouse=True)
def _private_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    for name in ("FTD_BROKER", "FTD_CLUSTER", "STATE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    config = daemon_config({}, directory=tmp_path)
    assert config.cluster == "ftd"
    assert config.broker == BrokerAddress(host="127.0.0.1", port=1883)
    assert config.node == socket.gethostname().split(".")[0]
    assert config.host == "127.0.0.1"
    assert not config.chaos
    assert config.timing == Timing()
    assert config.state_dir == tmp_path / "state" / "ftd" / "ftd"


def test_a_full_file_is_read_and_relative_paths_start_at_it(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("sesame\n")
    path = tmp_path / "ftd.toml"
    path.write_text(
        'cluster = "lab"\nsecret_file = "secret"\n'
        '[broker]\nurl = "mqtt://broker.example:1999"\nusername = "u"\npassword = "p"\n'
        '[node]\nname = "n1"\ndevices = 8\nhost = "10.0.0.1"\nrendezvous_port = 4000\nchaos = true\n'
        'runtime_dir = "run"\n'
        'snapshot_dir = "memory"\nsnapshot_limit_mib = 3\nsnapshot_port = 4001\nsnapshot_rate_mib_s = 2\n'
        "checkpoint_rate_mib_s = 5\n"
        '[coordinator]\nstate_dir = "journal"\n'
        "[timing]\nsilence_s = 3\nsteps_kept = 50\n"
    )
    config = load_daemon_config(path)
    assert config.broker == BrokerAddress(host="broker.example", port=1999, username="u", password="p")
    assert (config.cluster, config.node, config.devices, config.host) == ("lab", "n1", 8, "10.0.0.1")
    assert (config.rendezvous_port, config.chaos) == (4000, True)
    assert config.runtime_dir == tmp_path / "run"
    assert config.state_dir == tmp_path / "journal"
    assert config.snapshot_dir == tmp_path / "memory" / "lab-n1"
    assert (config.snapshot_limit_bytes, config.snapshot_port) == (3 << 20, 4001)
    assert (config.snapshot_rate_bytes_s, config.checkpoint_rate_bytes_s) == (2 << 20, 5 << 20)
    assert config.require_secret() == "sesame"
    assert config.timing.silence_s == 3.0
    assert config.timing.steps_kept == 50


@pytest.mark.parametrize(
    ("content", "field", "says"),
    [
        ({"clusster": "x"}, "clusster", "did you mean 'cluster'"),
        ({"broker": {"uri": "mqtt://a"}}, "broker.uri", "did you mean 'url'"),
        ({"broker": {"url": "http://a"}}, "broker.url", "mqtt://host:port"),
        ({"broker": {"url": "mqtt://a:99999"}}, "broker.url", "mqtt://host:port"),
        ({"broker": {"url": "mqtt://"}}, "broker.url", "mqtt://host:port"),
        ({"broker": {"password": "p"}}, "broker.password", "username"),
        ({"broker": 3}, "broker", "Expected `object`"),
        ({"node": {"devices": "two"}}, "node.devices", "Expected `int`"),
        ({"node": {"devices": 0}}, "node.devices", "above 0"),
        ({"node": {"name": "a/b"}}, "node.name", "letters"),
        ({"node": {"name": ""}}, "node.name", "letters"),
        ({"node": {"rendezvous_port": 70000}}, "node.rendezvous_port", "65535"),
        ({"node": {"snapshot_port": -1}}, "node.snapshot_port", "65535"),
        ({"node": {"snapshot_limit_mib": 0}}, "node.snapshot_limit_mib", "above 0"),
        ({"node": {"snapshot_rate_mib_s": -3}}, "node.snapshot_rate_mib_s", "above 0"),
        ({"node": {"checkpoint_rate_mib_s": 0}}, "node.checkpoint_rate_mib_s", "above 0"),
        ({"node": {"device": 2}}, "node.device", "did you mean 'devices'"),
        ({"cluster": "+"}, "cluster", "letters"),
        ({"coordinator": {"state": "x"}}, "coordinator.state", "state_dir"),
        ({"secret": "a", "secret_file": "b"}, "secret", "keep one"),
        ({"secret_file": "missing"}, "secret_file", "cannot be read"),
        ({"timing": {"silence": 1}}, "timing.silence", "did you mean 'silence_s'"),
        ({"timing": {"silence_s": -1}}, "timing.silence_s", "above 0"),
        ({"timing": {"silence_s": "1"}}, "timing", "Expected"),
        ({"timing": {"raise_limit": 1.5}}, "timing.raise_limit", "whole number"),
        ({"timing": {"silence_s": 0.1}}, "timing", "heartbeat_s"),
    ],
)
def test_every_mistake_names_its_field_and_the_remedy(
    tmp_path: Path, content: dict[str, object], field: str, says: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        daemon_config(content, directory=tmp_path)
    assert field in str(caught.value)
    assert says in str(caught.value)
    assert caught.value.exit_code == 2


def test_every_timing_field_can_be_set(tmp_path: Path) -> None:
    values = {f.name: getattr(Timing(), f.name) for f in fields(Timing)}
    assert daemon_config({"timing": values}, directory=tmp_path).timing == Timing()


def test_a_node_needs_the_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"secret: .*secret_file"):
        daemon_config({}, directory=tmp_path).require_secret()


@pytest.mark.parametrize("content", ["a = ", "\x00"])
def test_a_file_that_is_no_toml(tmp_path: Path, content: str) -> None:
    path = tmp_path / "ftd.toml"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=r"ftd\.toml is not valid TOML"):
        load_daemon_config(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        load_daemon_config(tmp_path / "ftd.toml")
    with pytest.raises(ConfigurationError, match="directory"):
        load_daemon_config(tmp_path)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("mqtt://h", BrokerAddress(host="h")),
        ("h:77", BrokerAddress(host="h", port=77)),
        ("mqtt://[::1]:5", BrokerAddress(host="::1", port=5)),
        ("mqtt://u:p%40@h", BrokerAddress(host="h", username="u", password="p@")),
    ],
)
def test_broker_addresses(url: str, address: BrokerAddress) -> None:
    assert parse_broker(url) == address
    assert parse_broker(address.url).host == address.host
    assert "p@" not in address.url


def test_the_way_to_an_unknown_broker_is_loopback() -> None:
    assert way_to(BrokerAddress(host="no-such-host.invalid")) == "127.0.0.1"


def test_options_win_over_the_environment_and_that_over_the_local_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match=r"--broker .*--config.*FTD_BROKER"):
        find_cluster()
    local_file().write_text(
        json.dumps({"broker": "mqtt://127.0.0.1:7", "cluster": "local", "pid": os.getpid()})
    )
    assert find_cluster().broker.port == 7
    assert find_cluster().cluster == "local"
    config = tmp_path / "ftd.toml"
    config.write_text('cluster = "filed"\n[broker]\nurl = "mqtt://h:8"\n')
    assert find_cluster(config=config).cluster == "filed"
    monkeypatch.setenv("FTD_BROKER", "mqtt://h:9")
    assert find_cluster().broker.port == 9
    assert find_cluster(config=config).broker.port == 8
    assert find_cluster("mqtt://h:10", "named", config).broker.port == 10
    assert find_cluster("mqtt://h:10", "named", config).cluster == "named"
    with pytest.raises(ConfigurationError, match="--cluster"):
        find_cluster("mqtt://h:10", "a/b")


def test_the_file_of_a_killed_local_cluster_does_not_count() -> None:
    local_file().write_text(json.dumps({"broker": "mqtt://h:7", "cluster": "c", "pid": 2**22 + 1}))
    with pytest.raises(ConfigurationError):
        find_cluster()


def test_the_commented_sample_names_real_fields(tmp_path: Path) -> None:
    """As it is, and with everything uncommented."""
    text = (Path(__file__).resolve().parents[2] / "examples" / "ftd.toml").read_text()
    (tmp_path / "secret").write_text("sesame")
    for content in (text, re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE)):
        (tmp_path / "ftd.toml").write_text(content)
        assert load_daemon_config(tmp_path / "ftd.toml").cluster == "ftd"
