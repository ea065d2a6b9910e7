"""Tests of ftd.toml and of finding the cluster: accepted values, and errors that name the field and the remedy."""

import contextlib
import json
import math
import os
import re
import socket
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest

from ftd.config import clusters
from ftd.config.clusters import find_cluster, register_cluster
from ftd.config.daemon import (
    examine_daemon_config,
    list_effective_settings,
    load_daemon_config,
    local_address_toward,
    parse_daemon_config,
)
from ftd.config.daemon_file import daemon_keys, daemon_schema, environment_variable
from ftd.errors import ConfigurationError
from ftd.transport.address import BrokerAddress, Tls, hide_password, parse_broker, user_runtime_dir
from statemachine.timing import Timing


@pytest.fixture(autouse=True)
def _clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    for name in [name for name in os.environ if name.startswith("FTD_") or name == "STATE_DIRECTORY"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def write_secret(path: Path, secret: str) -> None:
    path.write_text(secret)
    path.chmod(0o600)


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    config = parse_daemon_config({}, directory=tmp_path)
    assert config.cluster == "ftd"
    assert config.broker == BrokerAddress(host="127.0.0.1", port=1883)
    assert config.node == socket.gethostname().split(".")[0]
    assert config.host == "127.0.0.1"
    assert not config.chaos
    assert config.timing == Timing()
    assert config.state_dir == tmp_path / "state" / "ftd" / "ftd"


def test_a_full_file_is_read_and_relative_paths_start_at_it(tmp_path: Path) -> None:
    write_secret(tmp_path / "secret", "sesame\n")
    path = tmp_path / "ftd.toml"
    path.write_text(
        'cluster = "lab"\nsecret_file = "secret"\n'
        '[broker]\nurl = "mqtt://broker.example:1999"\nusername = "u"\npassword = "p"\n'
        '[node]\nname = "n1"\ndevices = 8\nhost = "10.0.0.1"\nrendezvous_port = 4000\nchaos = true\n'
        'runtime_dir = "run"\npreload = ["transformers", "peft"]\ncompile_cache_dir = "made"\n'
        'snapshot_dir = "memory"\nsnapshot_limit_mib = 3\nsnapshot_port = 4001\nsnapshot_rate_mib_s = 2\n'
        "checkpoint_rate_mib_s = 5\ndevice_memory_mib = 1.5\n"
        '[coordinator]\nstate_dir = "journal"\n'
        "[timing]\nsilence_s = 3\nsteps_remembered = 50\n"
    )
    with pytest.raises(ConfigurationError, match=r"broker\.password: everybody .*ftd\.toml .*chmod o="):
        load_daemon_config(path)
    path.chmod(0o600)
    config = load_daemon_config(path)
    assert config.broker == BrokerAddress(host="broker.example", port=1999, username="u", password="p")
    assert (config.cluster, config.node, config.devices, config.host) == ("lab", "n1", 8, "10.0.0.1")
    assert (config.rendezvous_port, config.chaos) == (4000, True)
    assert config.runtime_dir == tmp_path / "run"
    assert config.preload == ("transformers", "peft")
    assert config.compile_cache_dir == tmp_path / "made"
    assert config.state_dir == tmp_path / "journal"
    assert config.snapshot_dir == tmp_path / "memory" / "lab-n1"
    assert (config.snapshot_limit_bytes, config.snapshot_port) == (3 << 20, 4001)
    assert (config.snapshot_rate_bytes_s, config.checkpoint_rate_bytes_s) == (2 << 20, 5 << 20)
    assert config.device_memory_bytes == 3 << 19
    assert config.require_secret() == "sesame"
    assert config.timing.silence_s == 3.0
    assert config.timing.steps_remembered == 50


@pytest.mark.parametrize(
    ("content", "field", "says"),
    [
        ({"clusster": "x"}, "clusster", "did you mean 'cluster'"),
        ({"broker": {"uri": "mqtt://a"}}, "broker.uri", "did you mean 'url'"),
        ({"broker": {"url": "http://a"}}, "broker.url", "mqtt://host:port"),
        ({"broker": {"url": "mqtt://a:99999"}}, "broker.url", "mqtt://host:port"),
        ({"broker": {"url": "mqtt://"}}, "broker.url", "mqtt://host:port"),
        ({"broker": {"password": "p"}}, "broker.password", "username"),
        ({"broker": {"password": "p", "password_file": "f", "username": "u"}}, "broker.password", "keep one"),
        ({"broker": {"username": "u", "password_file": "missing"}}, "broker.password_file", "cannot be read"),
        ({"broker": {"ca_file": "ca.pem"}}, "broker.ca_file", "mqtts://host:8883"),
        ({"broker": {"url": "mqtts://h", "ca_file": "ca.pem"}}, "broker.ca_file", "PEM"),
        ({"broker": {"url": "mqtts://h", "cert_file": "c.pem"}}, "broker.cert_file", "go together"),
        (
            {"broker": {"url": "mqtts://h", "cert_file": "c", "key_file": "k"}},
            "broker.key_file",
            "check the path",
        ),
        ({"broker": 3}, "broker", "expected a table"),
        ({"node": {"devices": "two"}}, "node.devices", "expected a whole number, got text"),
        ({"node": {"devices": 0}}, "node.devices", "above 0"),
        ({"node": {"name": "a/b"}}, "node.name", "letters"),
        ({"node": {"name": ""}}, "node.name", "letters"),
        ({"broker": {"url": "mqtt://a..b"}}, "broker.url", "mqtt://host:port"),
        ({"node": {"host": "a..b"}}, "node.host", "address"),
        ({"coordinator": {"metrics_host": "a..b"}}, "coordinator.metrics_host", "address"),
        ({"node": {"snapshot_peers": ["a..b:7130"]}}, "node.snapshot_peers", "host-b:7130"),
        ({"dashboard": {"listen": "a..b:9650"}}, "dashboard.listen", "127.0.0.1:9650"),
        ({"node": {"rendezvous_port": 70000}}, "node.rendezvous_port", "65535"),
        ({"node": {"snapshot_port": -1}}, "node.snapshot_port", "65535"),
        ({"node": {"snapshot_port": 7000, "rendezvous_port": 7000}}, "node.snapshot_port", "another port"),
        ({"node": {"snapshot_limit_mib": 0}}, "node.snapshot_limit_mib", "above 0"),
        ({"node": {"snapshot_limit_mib": 2**62}}, "node.snapshot_limit_mib", "from 0.001 to 2^42"),
        ({"node": {"device_memory_mib": 1e305}}, "node.device_memory_mib", "from 0.001 to 2^42"),
        ({"node": {"device_memory_mib": 1e-9}}, "node.device_memory_mib", "from 0.001 to 2^42"),
        ({"node": {"snapshot_rate_mib_s": -3}}, "node.snapshot_rate_mib_s", "above 0"),
        ({"node": {"checkpoint_rate_mib_s": 0}}, "node.checkpoint_rate_mib_s", "above 0"),
        ({"node": {"device": 2}}, "node.device", "did you mean 'devices'"),
        ({"cluster": "+"}, "cluster", "letters"),
        ({"coordinator": {"state": "x"}}, "coordinator.state", "state_dir"),
        ({"secret": "a", "secret_file": "b"}, "secret", "keep one"),
        ({"secret_file": "missing"}, "secret_file", "cannot be read"),
        ({"health": {"every_s": -1.0}}, "health.every_s", "-1.0 is negative (write 0 or more)"),
        ({"health": {"every_s": math.nan}}, "health.every_s", "nan is not allowed (write 0 or more)"),
        ({"health": {"every_s": math.inf}}, "health.every_s", "inf is not allowed (write 0 or more)"),
        ({"timing": {"silence": 1}}, "timing.silence", "did you mean 'silence_s'"),
        ({"timing": {"silence_s": -1}}, "timing.silence_s", "above 0"),
        ({"timing": {"silence_s": "1"}}, "timing.silence_s", "expected a number, got text"),
        ({"timing": {"raise_limit": 1.5}}, "timing.raise_limit", "whole number"),
        ({"timing": {"silence_s": 0.1}}, "timing", "heartbeat_s"),
    ],
)
def test_every_error_names_its_field_and_the_remedy(
    tmp_path: Path, content: dict[str, object], field: str, says: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_daemon_config(content, directory=tmp_path)
    assert field in str(caught.value)
    assert says in str(caught.value)
    assert caught.value.exit_code == 2


def test_all_errors_are_reported_together(tmp_path: Path) -> None:
    """A key that only seems to be missing, because another key of its table is misspelled, is not reported."""
    path = tmp_path / "ftd.toml"
    path.write_text(
        'clustre = "lab"\nsecret_file = "gone"\n'
        '[broker]\nurl = "http://a"\nusrname = "u"\npassword = "p"\n'
        '[node]\nname = "a/b"\nsnapshot_limit_mib = "8"\n'
        "[timing]\nsilence = 3\nheartbeat_s = -1\n"
        '[dashboard]\nlisten = "0.0.0.0:9650"\n'
    )
    path.chmod(0o600)
    environment = {"FTD_NODE_DEVICES": "0", "FTD_NODE_DEVICE": "2", "FTD_COORDINATOR_PRIORITY": "first"}
    with pytest.raises(ConfigurationError) as caught:
        load_daemon_config(path, environment=environment)
    remedies = {error.field: error.remedy for error in caught.value.errors}
    assert set(remedies) == {
        "$FTD_COORDINATOR_PRIORITY",
        "$FTD_NODE_DEVICE",
        "$FTD_NODE_DEVICES (node.devices)",
        "ftd.toml: broker.url",
        "ftd.toml: broker.usrname",
        "ftd.toml: clustre",
        "ftd.toml: dashboard.token_file",
        "ftd.toml: node.name",
        "ftd.toml: node.snapshot_limit_mib",
        "ftd.toml: secret_file",
        "ftd.toml: timing.heartbeat_s",
        "ftd.toml: timing.silence",
    }
    assert remedies["ftd.toml: broker.usrname"] == "did you mean 'username'?"
    assert all(str(error) in str(caught.value) for error in caught.value.errors)
    config, collector = examine_daemon_config(path, environment=environment)
    assert (config.cluster, config.devices, config.timing) == ("ftd", 1, Timing())
    assert collector.affect("broker") and collector.affect("") and not collector.affect("coordinator.state")


def test_a_runtime_directory_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigurationError, match=r"\$XDG_RUNTIME_DIR: .* cannot be made"):
        parse_daemon_config({}, directory=tmp_path)


def test_every_timing_field_can_be_set(tmp_path: Path) -> None:
    values = {f.name: getattr(Timing(), f.name) for f in fields(Timing)}
    assert parse_daemon_config({"timing": values}, directory=tmp_path).timing == Timing()


def test_a_node_needs_the_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"secret: .*secret_file"):
        parse_daemon_config({}, directory=tmp_path).require_secret()


def test_a_text_that_ends_early_for_the_operating_system_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "ftd.toml"
    path.write_text('[node]\nlabels = ["/run/a\\u0000b"]\n')
    with pytest.raises(ConfigurationError, match=r"ftd\.toml has a text with \\u0000"):
        load_daemon_config(path)


@pytest.mark.parametrize("content", ["a = ", "\x00"])
def test_a_file_that_is_not_toml_is_rejected(tmp_path: Path, content: str) -> None:
    path = tmp_path / "ftd.toml"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=r"ftd\.toml is not valid TOML"):
        load_daemon_config(path)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        load_daemon_config(tmp_path / "ftd.toml")
    with pytest.raises(ConfigurationError, match="directory"):
        load_daemon_config(tmp_path)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("mqtt://h", BrokerAddress(host="h")),
        ("h:77", BrokerAddress(host="h", port=77)),
        ("mqtts://h", BrokerAddress(host="h", port=8883, tls=Tls())),
        ("mqtt://[::1]:5", BrokerAddress(host="::1", port=5)),
        ("mqtt://u:p%40@h", BrokerAddress(host="h", username="u", password="p@")),
    ],
)
def test_broker_addresses(url: str, address: BrokerAddress) -> None:
    assert parse_broker(url) == address
    assert parse_broker(address.url).host == address.host
    assert "p@" not in address.url


@pytest.mark.parametrize(
    "url", ["mqtt://h:0", "h:0", "mqtt://h:65536", "mqtt://h#1", "mqtt://u#x@h", "mqtt://h/a"]
)
def test_a_broker_address_with_an_impossible_part_is_rejected(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"broker\.url: .*write mqtt://host:port"):
        parse_broker(url)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("mqtts://alice:sesame@host:99999", "mqtts://alice:(hidden)@host:99999' is no broker address"),
        ("http://alice:sesame@host", "http://alice:(hidden)@host' is no broker address"),
        ("mqtt://alice:sesame[@host", "alice:(hidden)@host' is no broker address"),
        ("alice:sesame@host:0", "'alice:(hidden)@host:0'"),
        (
            "mqtts://alice:sesame/a//b+=@host",
            "mqtts://alice:(hidden)@host' is no broker address (write / ? # of",
        ),
    ],
)
def test_an_error_in_a_url_does_not_show_its_password(url: str, says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_broker(url)
    assert says in str(caught.value) and "sesame" not in str(caught.value)
    assert hide_password("mqtt://alice@host:1883") == "mqtt://alice@host:1883"


@pytest.mark.parametrize(
    ("host", "listening"),
    [
        ("fd00::7", "::"),
        ("::1", "::1"),
        ("10.0.0.7", "0.0.0.0"),
        ("host-a", "0.0.0.0"),
        ("localhost", "localhost"),
    ],
)
def test_a_node_listens_where_its_host_is(tmp_path: Path, host: str, listening: str) -> None:
    assert parse_daemon_config({"node": {"host": host}}, directory=tmp_path).listening_host == listening


@pytest.mark.parametrize("key", ["host", "metrics_host"])
@pytest.mark.parametrize("host", ["[fd00::7]", "10.0.0.7:7700", "http://host-a", "host a", "fd00::x"])
def test_what_is_no_host_is_rejected(tmp_path: Path, key: str, host: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"node\.{key}: .* is not a valid host \(write a host name or"
    ):
        parse_daemon_config({"node": {key: host}}, directory=tmp_path)


def test_a_user_without_a_home_directory_needs_two_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HOME", "STATE_DIRECTORY", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(ConfigurationError) as caught:
        parse_daemon_config({"node": {"runtime_dir": "run"}}, directory=tmp_path)
    assert [error.field for error in caught.value.errors] == [
        "ftd.toml: node.compile_cache_dir",
        "ftd.toml: coordinator.state_dir",
    ]
    given = {"node": {"runtime_dir": "run", "compile_cache_dir": "c"}, "coordinator": {"state_dir": "s"}}
    assert parse_daemon_config(given, directory=tmp_path).state_dir == tmp_path / "s"


def test_the_local_address_toward_an_unknown_broker_is_loopback() -> None:
    assert local_address_toward(BrokerAddress(host="no-such-host.invalid")) == "127.0.0.1"


def test_options_take_precedence_over_the_environment_and_local_clusters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match=r"--broker .*--config.*FTD_BROKER"):
        find_cluster()
    with register_cluster("local", Path("gpt.toml")) as local, local.publish_broker("mqtt://127.0.0.1:7"):
        assert find_cluster().broker.port == 7
        assert find_cluster().cluster == "local"
        monkeypatch.setenv("FTD_CLUSTER", "local")
        assert find_cluster().cluster == "local"
        monkeypatch.setenv("FTD_CLUSTER", "ours")
        with pytest.raises(
            ConfigurationError, match=r"FTD_CLUSTER: no local cluster has the name 'ours'.*local"
        ):
            find_cluster()
        assert find_cluster("mqtt://h:10").cluster == "ours"
    monkeypatch.delenv("FTD_CLUSTER")
    config = tmp_path / "ftd.toml"
    config.write_text('cluster = "filed"\n[broker]\nurl = "mqtt://h:8"\n')
    assert find_cluster(config=config).cluster == "filed"
    monkeypatch.setenv("FTD_BROKER", "mqtt://h:9")
    assert find_cluster().broker.port == 9
    assert find_cluster(config=config).broker.port == 9  # The precedence is that of the daemons.
    assert find_cluster(config=config).cluster == "filed"
    assert find_cluster("mqtt://h:10", "named", config).broker.port == 10
    assert find_cluster("mqtt://h:10", "named", config).cluster == "named"
    with pytest.raises(ConfigurationError, match="--cluster"):
        find_cluster("mqtt://h:10", "a/b")


def test_the_address_of_its_broker_names_a_local_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        register_cluster(None, Path("gpt.toml")) as first,
        first.publish_broker("mqtt://127.0.0.1:7"),
        register_cluster(None, Path("mlp.toml")) as second,
        second.publish_broker("mqtt://127.0.0.1:8"),
    ):
        assert find_cluster("mqtt://127.0.0.1:8").cluster == second.cluster == "ftd-2"
        assert find_cluster("mqtt://127.0.0.1:8", "ftd").cluster == "ftd"
        assert find_cluster("mqtt://127.0.0.1:9").cluster == "ftd"
        monkeypatch.setenv("FTD_BROKER", "mqtt://127.0.0.1:8")
        assert find_cluster().cluster == "ftd-2"
        with second.publish_broker("mqtt://127.0.0.1:7"):
            assert find_cluster("mqtt://127.0.0.1:7").cluster == "ftd"


def test_a_command_must_name_one_of_several_local_clusters() -> None:
    with (
        register_cluster(None, Path("gpt.toml")) as first,
        first.publish_broker("mqtt://127.0.0.1:7"),
        register_cluster(None, Path("mlp.toml")) as second,
    ):
        assert (first.cluster, second.cluster) == ("ftd", "ftd-2")
        assert find_cluster().broker.port == 7  # The second has no broker yet.
        with second.publish_broker("mqtt://127.0.0.1:8"):
            with pytest.raises(
                ConfigurationError, match=r"ftd \(gpt.toml, .*ftd-2 \(mlp.toml, .*--cluster NAME"
            ):
                find_cluster()
            assert find_cluster(cluster="ftd").broker.port == 7
            assert find_cluster(cluster="ftd-2").broker.port == 8
            with pytest.raises(
                ConfigurationError, match=r"no local cluster has the name 'ftd-3'.*ftd-2 \(mlp.toml"
            ):
                find_cluster(cluster="ftd-3")
            with pytest.raises(
                ConfigurationError, match="--cluster: a local cluster with this name is already running"
            ):
                register_cluster("ftd-2", Path("gpt.toml")).__enter__()
        assert find_cluster().broker.port == 7
    with pytest.raises(ConfigurationError, match="no ftd local is running"):
        find_cluster()


def test_a_command_waits_for_a_local_cluster_that_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    with register_cluster(None, Path("gpt.toml")) as starting, contextlib.ExitStack() as published:
        enter = partial(published.enter_context, starting.publish_broker("mqtt://127.0.0.1:7"))
        monkeypatch.setattr(clusters.time, "sleep", lambda _: enter())
        assert find_cluster().broker.port == 7
    with register_cluster(None, Path("gpt.toml")):
        monkeypatch.setattr(clusters, "_START_S", -1.0)
        with pytest.raises(ConfigurationError, match=r"starts or ends, and has no broker: ftd \(gpt.toml"):
            find_cluster()


@pytest.mark.parametrize("pid", [2**22 + 1, os.getpid()], ids=["ended", "pid of a later process"])
def test_the_file_of_a_killed_local_cluster_is_ignored(tmp_path: Path, pid: int) -> None:
    stale = user_runtime_dir() / "local-ftd.json"
    content = {"broker": "mqtt://h:7", "cluster": "ftd", "job": "gpt.toml", "pid": pid, "started": 1}
    stale.write_text(json.dumps(content))
    (user_runtime_dir() / "local-torn.json").write_text("{")
    with pytest.raises(ConfigurationError, match="no ftd local is running"):
        find_cluster()
    assert stale.exists()  # Commands do not remove it.
    with register_cluster(None, Path("mlp.toml")) as local, local.publish_broker("mqtt://127.0.0.1:8"):
        assert local.cluster == "ftd"
        assert find_cluster().broker.port == 8
        assert [path.name for path in user_runtime_dir().iterdir()] == ["local-ftd.json"]
    assert not stale.exists()


def test_the_commented_sample_names_real_fields(tmp_path: Path) -> None:
    """Check the file as it is, and with everything uncommented."""
    text = (Path(__file__).resolve().parents[3] / "examples" / "ftd.toml").read_text()
    write_secret(tmp_path / "secret", "sesame")
    for content in (text, re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE)):
        write_secret(tmp_path / "ftd.toml", content)  # It also contains a password.
        assert load_daemon_config(tmp_path / "ftd.toml").cluster == "ftd"


def test_a_password_in_the_url_of_the_broker_is_a_secret(tmp_path: Path) -> None:
    path = tmp_path / "ftd.toml"
    write_secret(path, '[broker]\nurl = "mqtts://alice:sesame%40@h:9"\n')
    assert load_daemon_config(path, environment={}).broker.password == "sesame@"
    environments: tuple[dict[str, str], ...] = ({}, {"FTD_BROKER": "mqtt://alice:sesame@h"})
    for environment in environments:
        url = next(s.shown for s in list_effective_settings(path, environment) if s.key.name == "broker.url")
        assert "sesame" not in url and "//alice:(hidden)@h" in url
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match=r"broker\.url: everybody on this host can read"):
        load_daemon_config(path, environment={})
    path.write_text('[broker]\nurl = "mqtts://alice@h:9"\n')
    [shown] = [s.shown for s in list_effective_settings(path, {}) if s.key.name == "broker.url"]
    assert shown == "mqtts://alice@h:9"


# --- the environment -----------------------------------------------------------------------------


def test_the_environment_takes_precedence_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "ftd.toml"
    path.write_text('cluster = "lab"\n[node]\ndevices = 2\nchaos = false\n')
    environment = {
        "FTD_NODE_DEVICES": "8",
        "FTD_NODE_CHAOS": "true",
        "FTD_BROKER": "mqtt://h:9",
        "FTD_TIMING_SILENCE_S": "2.5",
        "FTD_SECRET": "sesame",
        "FTD_NODE_PRELOAD": "",
        "FTD_NODE_SNAPSHOT_PEERS": "host-b:7130, [::1]:7131",
        "FTDX": "not ours",
    }
    config = load_daemon_config(path, environment=environment)
    assert (config.cluster, config.devices, config.chaos, config.broker.port) == ("lab", 8, True, 9)
    assert (config.timing.silence_s, config.secret) == (2.5, "sesame")
    assert (config.preload, config.snapshot_peers) == ((), ("host-b:7130", "[::1]:7131"))
    shown = {s.key.name: s for s in list_effective_settings(path, environment)}
    assert (shown["node.devices"].shown, shown["node.devices"].origin) == (8, "$FTD_NODE_DEVICES")
    assert (shown["cluster"].origin, shown["node.name"].origin) == ("ftd.toml", "default")
    assert shown["secret"].shown == "(hidden)"


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("FTD_NODE_DEVICE", "2", "FTD_NODE_DEVICES"),
        ("FTD_TIMING_SILENCE", "2", "FTD_TIMING_SILENCE_S"),
        ("FTD_NODE_DEVICES", "two", "$FTD_NODE_DEVICES: 'two': expected a whole number, got text"),
        ("FTD_NODE_DEVICES", "0", "node.devices"),
        ("FTD_BROKER", "http://h", "mqtt://host:port"),
    ],
)
def test_errors_name_the_wrong_variable(tmp_path: Path, variable: str, value: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        load_daemon_config(None, environment={variable: value})


def test_every_key_has_a_description_a_variable_and_a_schema_entry() -> None:
    made = daemon_schema()
    variables = [environment_variable(key.name) for key in daemon_keys().values()]
    assert len(set(variables)) == len(variables) > 40
    assert [key.name for key in daemon_keys().values() if not key.meaning] == []
    tables = {"": "DaemonFile", "timing": "Timing"} | {
        name: entry["$ref"].rpartition("/")[2]
        for name, entry in made["$defs"]["DaemonFile"]["properties"].items()
        if "$ref" in entry
    }
    for key in daemon_keys().values():
        table, _, name = key.name.rpartition(".")
        assert made["$defs"][tables[table]]["properties"][name]["description"] == key.meaning


# --- secrets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602])
def test_a_secret_that_everybody_can_read_is_rejected(tmp_path: Path, mode: int) -> None:
    write_secret(tmp_path / "secret", "sesame\n")
    assert parse_daemon_config({"secret_file": "secret"}, directory=tmp_path).secret == "sesame"
    (tmp_path / "secret").chmod(mode)
    with pytest.raises(ConfigurationError, match="chmod o="):
        parse_daemon_config({"secret_file": "secret"}, directory=tmp_path)


def test_the_remedy_for_a_public_secret_leaves_the_group_of_a_service_its_right(tmp_path: Path) -> None:
    place = tmp_path / "my ftd"
    place.mkdir()
    write_secret(place / "secret", "sesame\n")
    (place / "secret").chmod(0o644)
    with pytest.raises(ConfigurationError) as caught:
        parse_daemon_config({"secret_file": "secret"}, directory=place)
    assert f"(run chmod o= '{place / 'secret'}'; if" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n", b"two\nlines\n", b"\xff\xfe", b"x" * 100_000])
def test_a_file_without_a_valid_secret_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "secret").write_bytes(content)
    (tmp_path / "secret").chmod(0o600)
    with pytest.raises(ConfigurationError, match="secret_file"):
        parse_daemon_config({"secret_file": "secret"}, directory=tmp_path)


def test_a_password_from_a_file_is_never_shown(tmp_path: Path) -> None:
    write_secret(tmp_path / "password", "pass-word\n")
    table = {"url": "mqtt://h", "username": "u", "password_file": "password"}
    config = parse_daemon_config({"broker": table}, directory=tmp_path)
    assert config.broker.password == "pass-word"
    assert "pass-word" not in repr(config) + config.broker.url
