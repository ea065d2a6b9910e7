"""Tests of profile files: what is written is read back, and every other file is an error that names the field."""

import copy
import json
import math
import os
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftd.config.profile_document import SCHEMA, ProfileDocument
from ftd.config.profile_file import (
    MAX_FILE_BYTES,
    load_document,
    load_profile,
    save_profile,
)
from ftd.errors import ConfigurationError
from ftd.observe.view.schema import schema_of
from planner.stages.costs import StageCosts
from planner.values import LayerProfile, Link, ModelProfile, Policy, Recomputation, SplitTime, TensorSplit
from tests.helpers.profile_files import profile_document

DOCS = Path(__file__).parents[3] / "docs" / "reference"

Tree = dict[str, Any]


def timed_tree() -> Tree:
    """Return bare layer times of three layers, as multiples of 1/1024 ms."""
    return {
        "kind": "nonuniform",
        "layers": [
            {
                "forward_ms": forward / 1024,
                "backward_ms": 2 * forward / 1024 + 1 / 1024,
                "allreduce_in_node_ms": {"1": 0.0, "2": 43 / 1024, "4": 63 / 1024, "8": 74 / 1024},
            }
            for forward in (247, 1031, 997)
        ],
    }


def spread(median: float) -> Tree:
    return {
        "repeats": 5,
        "minimum_ms": 0.9 * median,
        "lower_quartile_ms": 0.95 * median,
        "median_ms": median,
        "upper_quartile_ms": 1.1 * median,
        "maximum_ms": 1.3 * median,
    }


def own_tree() -> Tree:
    """Return a file that sets every field."""
    return {
        "schema": SCHEMA,
        "microbatch_rows": 4,
        "device_memory_bytes": 8_000_000,
        "stage_devices": [1, 2, 4],
        "flops": 3.5e9,
        "device_peak_flops": 989e12,
        "layers": [
            {
                "name": name,
                "forward_ms": 1.5,
                "backward_ms": 3.0,
                "parameter_bytes": 100,
                "gradient_bytes": 100,
                "optimizer_bytes": 200,
                "activation_bytes": 64,
                "output_bytes": 32,
                "working_bytes": 40,
                "buffer_bytes": 30,
                "full": {"activation_bytes": 32, "recompute_ms": 1.4},
                "selective": {"activation_bytes": 48, "recompute_ms": 0.25},
                "tensor": {
                    "parameter_bytes": 90,
                    "column_bytes": 40,
                    "activation_bytes": 20,
                    "forward_bytes": 32,
                    "forward_exchanges": 2,
                    "backward_bytes": 64,
                    "backward_exchanges": 2,
                },
                "split": [
                    {"devices": 2, "forward_ms": 0.8, "backward_ms": 1.6, "activation_bytes": 40},
                    {"devices": 4, "forward_ms": 0.5, "backward_ms": 0.9, "activation_bytes": None},
                ],
                "measured": [{"rows": 4, "forward": spread(1.5), "backward": spread(3.0)}],
            }
            for name in ("embedding", "block", "head")
        ],
        "link": {"latency_ms": 0.05, "bytes_per_s": 2e9},
        "ring": {"latency_ms": 0.07, "bytes_per_s": 1.5e9},
        "inner": {"latency_ms": 0.02, "bytes_per_s": 9e9},
        "shard_problem": "its optimizer Muon is not known to update each element by itself",
        "tensor_problem": "there is dropout after block.up",
        "tensor_counts": [["block.up.out_features", 12]],
        "network": {
            "where": "processes of one host, gloo over loopback",
            "point_to_point": [{"size_bytes": 1024, "time": spread(0.05)}],
            "all_reduce": [{"members": 2, "size_bytes": 1024, "time": spread(0.2)}],
            "link_error": 0.04,
            "ring_error": 0.1,
        },
        "provenance": {
            "job": "gpt",
            "device": "a CPU",
            "torch_version": "2.13.0",
            "ftd_version": "0.1.0",
            "date": "2026-01-02T03:04:05+00:00",
            "measured": ["layers"],
            "stated": [],
        },
    }


def written(directory: Path, tree: Any) -> Path:
    path = directory / "profile.json"
    path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return path


def message_for(path: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_profile(path)
    return str(caught.value)


# --- what is read ----------------------------------------------------------------------------


def test_a_file_becomes_a_profile(tmp_path: Path) -> None:
    profile = load_profile(written(tmp_path, own_tree()))
    layer = LayerProfile(
        forward_ms=1.5,
        backward_ms=3.0,
        parameter_bytes=100,
        gradient_bytes=100,
        optimizer_bytes=200,
        activation_bytes=64,
        output_bytes=32,
        working_bytes=40,
        buffer_bytes=30,
        full=Recomputation(activation_bytes=32, recompute_ms=1.4),
        selective=Recomputation(activation_bytes=48, recompute_ms=0.25),
        tensor=TensorSplit(
            parameter_bytes=90,
            column_bytes=40,
            activation_bytes=20,
            forward_bytes=32,
            forward_exchanges=2,
            backward_bytes=64,
            backward_exchanges=2,
        ),
        split=(
            SplitTime(devices=2, forward_ms=0.8, backward_ms=1.6, activation_bytes=40),
            SplitTime(devices=4, forward_ms=0.5, backward_ms=0.9),
        ),
    )
    assert profile == ModelProfile(
        layers=(layer, layer, layer),
        microbatch_rows=4,
        device_memory_bytes=8_000_000,
        stage_devices=(1, 2, 4),
        flops=3.5e9,
        device_peak_flops=989e12,
        link=Link(latency_ms=0.05, bytes_per_s=2e9),
        ring=Link(latency_ms=0.07, bytes_per_s=1.5e9),
        inner=Link(latency_ms=0.02, bytes_per_s=9e9),
        shard_problem="its optimizer Muon is not known to update each element by itself",
        tensor_problem="there is dropout after block.up",
        tensor_counts=(("block.up.out_features", 12),),
    )


def test_omitted_fields_have_their_defaults(tmp_path: Path) -> None:
    tree = own_tree()
    optional = (
        "device_memory_bytes",
        "stage_devices",
        "flops",
        "device_peak_flops",
        "link",
        "ring",
        "inner",
        "shard_problem",
        "network",
    )
    for name in (*optional, "provenance"):
        del tree[name]
    for layer in tree["layers"]:
        del layer["name"], layer["split"], layer["measured"]
    profile = load_profile(written(tmp_path, tree))
    assert profile.device_memory_bytes is None and profile.stage_devices is None
    assert profile.link == profile.ring == Link()
    assert profile.inner is None and profile.shard_problem is None
    assert all(layer.split == () for layer in profile.layers)


def test_a_ring_that_was_not_measured_equals_the_link(tmp_path: Path) -> None:
    tree = own_tree()
    del tree["ring"]
    profile = load_profile(written(tmp_path, tree))
    assert profile.ring == profile.link == Link(latency_ms=0.05, bytes_per_s=2e9)


def test_a_saved_document_is_read_back(tmp_path: Path) -> None:
    document = load_document(written(tmp_path, own_tree()))
    assert isinstance(document, ProfileDocument)
    path = tmp_path / "saved.json"
    save_profile(path, document)
    assert load_document(path) == document
    assert json.loads(path.read_text()) == own_tree()
    assert [p.name for p in tmp_path.iterdir() if p.name not in ("profile.json", "saved.json")] == []


def test_a_profile_of_the_planner_survives_the_file(tmp_path: Path) -> None:
    for tree in (own_tree(), timed_tree()):
        profile = load_profile(written(tmp_path, tree))
        save_profile(tmp_path / "again.json", profile_document(profile))
        assert load_profile(tmp_path / "again.json") == profile


def test_saving_where_nothing_can_be_written_is_an_error(tmp_path: Path) -> None:
    document = msgspec.convert(own_tree(), ProfileDocument)
    (tmp_path / "taken").mkdir()
    for path in (tmp_path / "gone" / "x.json", tmp_path / "taken"):
        with pytest.raises(ConfigurationError, match="cannot be written"):
            save_profile(path, document)
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_the_schema_is_the_one_in_the_documentation() -> None:
    assert (DOCS / "profile.schema.json").read_bytes() == schema_of(ProfileDocument)


# --- bare layer times --------------------------------------------------------------------------


def test_costs_of_bare_layer_times_are_exact(tmp_path: Path) -> None:
    tree = timed_tree()
    profile = load_profile(written(tmp_path, tree))
    assert profile.stage_devices == (1, 2, 4, 8)
    assert profile.microbatch_rows == 1 and profile.device_memory_bytes is None
    policy = Policy(devices_per_node=8, tolerate=0, global_batch=16, microbatch_rows=1, objective="paper")
    costs = StageCosts(profile, policy)
    for devices in (1, 2, 4, 8):
        for first in range(3):
            for end in range(first + 1, 4):
                exact = Fraction(0)
                for layer in tree["layers"][first:end]:
                    work = Fraction(layer["forward_ms"]) + Fraction(layer["backward_ms"])
                    extra = Fraction(layer["allreduce_in_node_ms"][str(devices)])
                    exact += work / devices + (2 * extra if devices > 1 else 0)
                assert Fraction(float(costs.time_ms[0, devices, first, end])) == exact
    assert not costs.link_ms.any()
    assert costs.memory.limit_bytes is None


def test_bare_layer_times_may_list_any_numbers_of_devices(tmp_path: Path) -> None:
    tree = timed_tree()
    for layer in tree["layers"]:
        layer["allreduce_in_node_ms"] = {"3": 0.25, "1": 0}
    profile = load_profile(written(tmp_path, tree))
    assert profile.stage_devices == (1, 3)
    (split,) = profile.layers[0].split
    assert split == SplitTime(devices=3, forward_ms=247 / 1024 / 3 + 0.25, backward_ms=495 / 1024 / 3 + 0.25)


def drop_a_count(tree: Tree) -> None:
    del tree["layers"][1]["allreduce_in_node_ms"]["4"]


def drop_one_device(tree: Tree) -> None:
    for layer in tree["layers"]:
        del layer["allreduce_in_node_ms"]["1"]


def put_timed(name: str, value: Any) -> Callable[[Tree], None]:
    return lambda tree: tree["layers"][2]["allreduce_in_node_ms"].update({name: value})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (drop_a_count, "layers[1].allreduce_in_node_ms: lists 1, 2, 8 devices, layer 0 lists 1, 2, 4, 8"),
        (drop_one_device, 'layers[0].allreduce_in_node_ms: required, but missing: "1"'),
        (put_timed("16", 0.5), "layers[2].allreduce_in_node_ms: lists 1, 2, 4, 8, 16 devices"),
        (put_timed("two", 0.5), 'layers[2].allreduce_in_node_ms: "two" is not a number of devices'),
        (put_timed("02", 0.5), 'layers[2].allreduce_in_node_ms: "02" is not a number of devices'),
        (put_timed("9999", 0.5), 'layers[2].allreduce_in_node_ms: "9999" is not a number of devices'),
        (put_timed("2", -0.5), "layers[2].allreduce_in_node_ms.2: -0.5 is not allowed"),
        (put_timed("2", math.nan), "layers[2].allreduce_in_node_ms.2: NaN is not allowed"),
        (put_timed("2", "0.5"), 'layers[2].allreduce_in_node_ms.2: "0.5" is not allowed'),
        (put_timed("2", True), "layers[2].allreduce_in_node_ms.2: true is not allowed"),
        (put_timed("2", {}), "layers[2].allreduce_in_node_ms.2: an object is not allowed"),
        (lambda t: t["layers"].clear(), "layers: Expected `array` of length >= 1"),
        (lambda t: t.pop("kind"), "kind: required, but missing"),
        (lambda t: t.pop("layers"), "layers: required, but missing"),
        (lambda t: t.update(nodes=3), "nodes: unknown field"),
        (lambda t: t["layers"][0].update(forward=3), "layers[0].forward: unknown field"),
        (lambda t: t["layers"][0].update(forward_ms=-1), "layers[0].forward_ms: -1 is not allowed"),
        (lambda t: t["layers"][0].pop("backward_ms"), "layers[0].backward_ms: required, but missing"),
        (
            lambda t: [layer.update(forward_ms=0, backward_ms=0) for layer in t["layers"]],
            "layers: all layers take 0 ms",
        ),
    ],
)
def test_errors_name_wrong_bare_layer_times(tmp_path: Path, change: Callable[[Tree], Any], says: str) -> None:
    tree = timed_tree()
    change(tree)
    assert says in message_for(written(tmp_path, tree))


# --- what is rejected ---------------------------------------------------------------------------


def layer(number: int, **fields: Any) -> Callable[[Tree], None]:
    return lambda tree: tree["layers"][number].update(fields)


def split(number: int, **fields: Any) -> Callable[[Tree], None]:
    return lambda tree: tree["layers"][1]["split"][number].update(fields)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (layer(1, forward_ms=-0.5), "layers[1].forward_ms: -0.5 is not allowed: expected `float` >= 0.0"),
        (layer(1, forward_ms=math.nan), "layers[1].forward_ms: NaN is not allowed"),
        (layer(1, forward_ms=math.inf), "layers[1].forward_ms: Infinity is not allowed"),
        (layer(1, forward_ms="1.5"), 'layers[1].forward_ms: "1.5" is not allowed'),
        (layer(1, forward_ms=None), "layers[1].forward_ms: null is not allowed"),
        (layer(1, forward_ms=1e300), "layers[1].forward_ms: 1e+300 is not allowed"),
        (
            layer(1, forward_ms=9.5),
            "layers[1].forward_ms: 9.5 is not allowed (write a value between 1.35 and 1.95",
        ),
        (layer(1, parameter_bytes=1.5), "layers[1].parameter_bytes: 1.5 is not allowed"),
        (layer(1, parameter_bytes=2**70), "layers[1].parameter_bytes: 1180591620717411303424 is not"),
        (layer(1, output_byte=3), "layers[1].output_byte: unknown field (did you mean 'output_bytes'?)"),
        (lambda t: t["layers"][2].pop("gradient_bytes"), "layers[2].gradient_bytes: required, but missing"),
        (split(0, devices=8), "layers[1].split: 4 comes after 8"),
        (split(1, devices=2), "layers[1].split: 2 comes after 2"),
        (split(1, devices=3), "layers[1].split[1].devices: 3 is not allowed (write one of stage_devices"),
        (split(0, devices=1), "layers[1].split[0].devices: 1 is not allowed"),
        (split(0, device=1), "layers[1].split[0].device: unknown field (did you mean 'devices'?)"),
        (
            lambda t: (t.update(stage_devices=None), split(1, devices=5)(t)),
            "layers[1].split[1].devices: 5 is not allowed (write at most microbatch_rows, 4",
        ),
        (
            lambda t: t.update(stage_devices=[1, 2, 4, 8]),
            "layers[0].split: the time on 8 devices is missing, and 4 rows cannot be split",
        ),
        (lambda t: t.update(stage_devices=[]), "stage_devices: Expected `array` of length >= 1"),
        (lambda t: t.update(stage_devices=[2, 1]), "stage_devices: 1 comes after 2"),
        (lambda t: t.update(stage_devices=[0, 1]), "stage_devices[0]: 0 is not allowed"),
        (lambda t: t.update(layers=[]), "layers: Expected `array` of length >= 1"),
        (lambda t: t.update(layers=t["layers"] * 400), "layers: Expected `array` of length <= 1000"),
        (lambda t: t.update(layers=3), "layers: 3 is not allowed"),
        (lambda t: t.update(layers={}), "layers: expected a list, got a table"),
        (lambda t: t.update(microbatch_rows=0), "microbatch_rows: 0 is not allowed"),
        (lambda t: t.update(device_memory_bytes=0), "device_memory_bytes: 0 is not allowed"),
        (lambda t: t["link"].update(bytes_per_s=0), "link.bytes_per_s: 0 is not allowed"),
        (lambda t: t["ring"].update(latency_ms=-1), "ring.latency_ms: -1 is not allowed"),
        (lambda t: t["ring"].update(delay=1), "ring.delay: unknown field"),
        (
            lambda t: t["network"]["all_reduce"][0]["time"].update(median_ms=7),
            "network.all_reduce[0].time.upper_quartile_ms:",
        ),
        (lambda t: t["network"]["all_reduce"][0].update(members=1), "network.all_reduce[0].members: 1 is"),
        (
            lambda t: t.update(schema="ftd-profile/2"),
            "schema: this profile has version 2, but this version of ftd reads up",
        ),
        (lambda t: t.update(schema="ftd-profile/0"), 'schema: "ftd-profile/0" is not known'),
        (lambda t: t.update(schema=1), "schema: 1 is not known"),
        (lambda t: t.pop("schema"), "schema: required, but missing"),
        (lambda t: t["provenance"].update(device="\ud800"), "provenance.device: '\\ud800' is not valid text"),
        (lambda t: t.update({"\ud800": 1}), "'\\ud800' is not valid text"),
    ],
)
def test_errors_name_wrong_entries(tmp_path: Path, change: Callable[[Tree], Any], says: str) -> None:
    tree = own_tree()
    change(tree)
    text = message_for(written(tmp_path, tree))
    assert text.startswith("profile.json: ")
    assert says in text
    assert text.endswith(")"), "the message has a remedy"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not valid JSON"),
        ("nul", "is not valid JSON"),
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"x": ' + "9" * 10_000 + "}", "is not valid JSON"),
        ("[]", "a profile is a JSON object, but this is a list"),
        ("3", "a profile is a JSON object, but this is 3"),
        ("{}", "schema: required, but missing"),
        ('{"schema": "ftd-profile/1", "schema": "ftd-profile/1"}', "schema: the key appears twice"),
        ('{"layers": [{"a": {"b": 1, "c": 2, "b": 1}}]}', "layers[0].a.b: the key appears twice"),
        ('{"schema": "ftd-profile/1", "layers": 1e999}', "layers: Infinity is not allowed"),
    ],
)
def test_content_that_is_not_a_profile_is_rejected(tmp_path: Path, text: str, says: str) -> None:
    assert says in message_for(written(tmp_path, text))


def test_paths_that_are_not_files_are_rejected(tmp_path: Path) -> None:
    assert "does not exist" in message_for(tmp_path / "gone.json")
    assert "is a directory" in message_for(tmp_path)
    assert "not a regular file" in message_for(Path(os.devnull))
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert "not a regular file" in message_for(fifo)
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00\x01")
    assert "is not valid JSON" in message_for(binary)
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    assert "is larger than" in message_for(large)


# --- fuzz --------------------------------------------------------------------------------------

ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    2,
    2**31,
    2**63,
    10**400,
    0.0,
    -0.0,
    1e-320,
    1e308,
    math.nan,
    math.inf,
]
ODD += ["", "1", "ftd-profile/1", "x" * 2000, "\ud800", [], {}, [[]], {"1": 0.0}, [None], {"": None}]
NAMES = ["schema", "kind", "layers", "split", "devices", "forward_ms", "allreduce_in_node_ms", "1", "3", ""]
# Copies, because a later change may modify what an earlier one inserted.
odd = st.sampled_from(ODD).map(copy.deepcopy) | st.floats() | st.integers() | st.text(max_size=5)


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    """Draw a valid file with a few of its entries replaced, removed, added or moved."""
    tree: Any = copy.deepcopy(draw(st.sampled_from([own_tree(), timed_tree()])))
    for _ in range(draw(st.integers(1, 3))):
        place = tree
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(place[key], dict | list) and draw(st.integers(0, 3)):
                place = place[key]
                continue
            match draw(st.sampled_from(["replace", "remove", "add", "move"])):
                case "replace":
                    place[key] = draw(odd)
                case "remove":
                    del place[key]
                case "move" if isinstance(place, dict):
                    place[draw(st.sampled_from(NAMES))] = place.pop(key)
                case _ if isinstance(place, dict):
                    place[draw(st.sampled_from(NAMES) | st.text(max_size=3))] = draw(odd)
                case _:
                    place.append(draw(odd))
            break
    return tree


def usable(profile: ModelProfile) -> None:
    """Check that the planner can use the profile: everything that it sums is finite."""
    assert profile.layers and profile.microbatch_rows >= 1
    rows = profile.microbatch_rows
    policy = Policy(tolerate=0, global_batch=4 * rows, microbatch_rows=rows)
    if profile.stage_devices is None or 1 in profile.stage_devices:
        whole_ms = StageCosts(profile, policy).time_ms[0, 1, 0, len(profile.layers)]
        assert 0 < whole_ms < math.inf
    for entry in profile.layers:
        for times in entry.split:
            assert 0 <= times.forward_ms < math.inf and 0 <= times.backward_ms < math.inf


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutated())
@pytest.mark.long
def test_a_file_is_a_profile_or_a_configuration_error(tmp_path: Path, tree: Any) -> None:
    path = written(tmp_path, tree)
    try:
        profile = load_profile(path)
    except ConfigurationError as error:
        assert error.remedy and (error.field or "not valid JSON" in error.problem)
        str(error).encode(errors="surrogateescape")
    else:
        usable(profile)
        save_profile(tmp_path / "again.json", profile_document(profile))
        assert load_profile(tmp_path / "again.json") == profile


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
@pytest.mark.long
def test_broken_bytes_are_a_profile_or_a_configuration_error(tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(json.dumps(data.draw(st.sampled_from([own_tree(), timed_tree()]))).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(raw) - 1))
        raw[position : position + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=2))
    path = tmp_path / "profile.json"
    path.write_bytes(bytes(raw))
    try:
        usable(load_profile(path))
    except ConfigurationError as error:
        assert error.remedy
