"""Protection of snapshots: groups, guarantees and bytes computed by hand, and the output of ``ftd plan``."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec import structs
from rich.console import Console
from typer.testing import CliRunner

from ftd.cli.main import app
from ftd.coordinator.protection_choice import _fullest_bytes
from ftd.errors import ConfigurationError
from ftd.observe.view.protection import render_protection
from ftd.snapshots.protection import describe_protection, stated_guarantee
from planner.pipelines.instantiation import Instantiation
from planner.preview import Preview
from planner.stages.costs import StageCosts
from planner.values import (
    Device,
    LayerProfile,
    ModelProfile,
    PipelinePlacement,
    Plan,
    Policy,
    StagePlacement,
    StageTemplate,
    Template,
)
from statemachine.cluster.snapshots.snapshots import groups_of
from storage.codes import make_code

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "how-to" / "planning.md").read_text(encoding="utf-8")
RUNNER = CliRunner()
LARGE = ((0, 1, 0), (1, 4, 1))
SMALL = ((0, 2, 0), (2, 4, 0))
"""First layer, end layer and node of each stage, in the templates of two nodes and of one."""


def seen(*sizes: int, states: tuple[int, ...]) -> Preview:
    """Return a preview with pipelines of these sizes; a third of a layer's state is parameters."""
    profile = ModelProfile(
        microbatch_rows=1,
        layers=tuple(
            LayerProfile(
                forward_ms=1.0,
                backward_ms=2.0,
                parameter_bytes=size // 3,
                gradient_bytes=size // 3,
                optimizer_bytes=size - size // 3,
                activation_bytes=7,
                output_bytes=7,
            )
            for size in states
        ),
    )
    templates = {
        nodes: Template(
            nodes=nodes,
            stages=tuple(
                StageTemplate(first_layer=first, end_layer=end, node_offset=node, devices=1)
                for first, end, node in stages
            ),
            objective_ms=1.0,
            lower_bound_ms=1.0,
        )
        for nodes, stages in ((1, SMALL), (2, LARGE))
    }
    ones = (1,) * len(sizes)
    return Preview(
        nodes=sum(sizes),
        costs=StageCosts(profile, Policy(devices_per_node=2, global_batch=8, microbatch_rows=1)),
        templates=templates,
        planned_microbatches={1: 1, 2: 1},
        instantiation=Instantiation(sizes=sizes, microbatches=ones, pipeline_ms=(1.0,) * len(sizes)),
    )


TWO = (128, 256, 384, 512)
THREE = (384, 768, 384, 1152)


@pytest.mark.parametrize(
    ("sizes", "states", "scheme", "guarantee", "overhead", "node_bytes"),
    [
        # Groups of 128, 256 and 896 bytes. Two owners' parity is a copy, so the small pipeline's node has
        # all.
        ((2, 1), TWO, "aec", 1, 1.0, 128 + 256 + 896),
        ((2, 1), TWO, "none", 0, 0.0, 64 + 128 + 448),
        # Groups of 128 and 1152 bytes; the second node of each pipeline is the fullest.
        ((2, 2), TWO, "aec", 1, 1.0, 1152),
        # Groups of 384, 768 and 1536 bytes in six cells, of which each owner holds two and a parity.
        ((2, 2, 1), THREE, "aec", 1, 0.5, 192 + 384 + 768),
        ((2, 2, 1), THREE, "arc:1", 1, 1.0, 2 * (128 + 256 + 512)),
        ((2, 2, 1), THREE, "aec2", 2, 2.0, 384 + 768 + 1536),
        # One owner, whose segment is everything.
        ((1,), TWO, "aec2+arc:3", 0, 0.0, 128 + 256 + 896),
        # Without another node, or with two pipelines, there is no replica peer.
        ((1,), TWO, "aec+buddy", 0, 0.0, 128 + 256 + 896),
        ((2, 1), TWO, "aec+buddy", 1, 1.0, 128 + 256 + 896),
        # Two nodes hold each other's copy: 128 and 1152 bytes.
        ((2,), TWO, "aec+buddy", 1, 1.0, 128 + 1152),
        ((2,), TWO, "aec", 0, 0.0, 1152),
    ],
)
def test_values_by_hand(
    sizes: tuple[int, ...],
    states: tuple[int, ...],
    scheme: str,
    guarantee: int,
    overhead: float,
    node_bytes: int,
) -> None:
    preview = seen(*sizes, states=states)
    result = describe_protection(preview, preview.costs.profile.layers, scheme)
    assert (result.guarantee, result.overhead, result.node_bytes) == (guarantee, overhead, node_bytes)
    assert (result.arena_bytes, result.arena_peak_bytes) == (2 * node_bytes, 3 * node_bytes)
    assert {(group.owners, group.guarantee) for group in result.groups} == {(len(sizes), guarantee)}
    assert [group.bucket_bytes for group in result.groups] == [
        sum(states[group.first_layer : group.end_layer]) for group in result.groups
    ]


@pytest.mark.parametrize(
    ("sizes", "host", "sharded", "dearer"),
    [((1, 1), 1500, 3500, True), ((1, 1, 1), 1000, 2667, False), ((1,), None, None, False)],
)
def test_memory_of_replicas(
    sizes: tuple[int, ...], host: int | None, sharded: int | None, dearer: bool
) -> None:
    """The layers have 1000 bytes of parameters and 2000 bytes of state."""
    preview = seen(*sizes, states=(3000, 0, 0, 0))
    layers = preview.costs.profile.layers
    kept = describe_protection(preview, layers, "aor").replicas
    found = (
        (kept.host_bytes, kept.sharded_bytes, kept.whole_bytes) if kept is not None else (None, None, None)
    )
    assert found == (host, sharded, None if host is None else 3000)
    out = io.StringIO()
    Console(file=out, width=300).print(render_protection(describe_protection(preview, layers, "aor")))
    text = out.getvalue()
    assert ("set zero1 = false" in text, "aor: any node" in text) == (dearer, host is not None)
    assert describe_protection(preview, layers, "none").replicas is None


@pytest.mark.parametrize("within", ["replicate", "shard", "tensor"])
@pytest.mark.parametrize("sizes", [(2, 1), (2, 2), (2, 2, 1), (1,)])
def test_the_groups_are_those_of_a_real_plan(
    sizes: tuple[int, ...], within: Literal["replicate", "shard", "tensor"]
) -> None:
    """The first stage of a large pipeline has two devices."""
    preview = seen(*sizes, states=TWO)
    large = preview.templates[2]
    first = structs.replace(large.stages[0], devices=2, within=within)
    several = {**preview.templates, 2: structs.replace(large, stages=(first, *large.stages[1:]))}
    preview = replace(preview, templates=several)
    pipelines = tuple(
        PipelinePlacement(
            stages=tuple(
                StagePlacement(
                    first_layer=stage.first_layer,
                    end_layer=stage.end_layer,
                    devices=tuple(
                        Device(node=f"n{number}-{stage.node_offset}", index=2 * index + device)
                        for device in range(stage.devices)
                    ),
                    within=stage.within,
                )
                for index, stage in enumerate(preview.templates[size].stages)
            ),
            first_microbatch=0,
            microbatches=1,
            estimated_s=1.0,
        )
        for number, size in enumerate(sizes)
    )
    plan = Plan(pipelines=pipelines, transfers=(), method="initial", reason="", estimated_iteration_s=1.0)
    real = [(g.first_layer, g.end_layer, len(g.owners), g.whole) for g in groups_of(plan, "aec")]
    result = describe_protection(preview, preview.costs.profile.layers, "aec")
    assert [(g.first_layer, g.end_layer, g.owners, g.whole) for g in result.groups] == real
    assert any(g.whole for g in result.groups) == (within != "replicate" and 2 in sizes)
    owners = len(sizes)
    assert all(g.guarantee == (owners - 1 if g.whole else min(1, owners - 1)) for g in result.groups)
    assert result.node_bytes == _fullest_bytes(plan, preview.costs.profile.layers, "aec", zero1=False)


@pytest.mark.parametrize(
    "scheme", ["none", "arc:1", "arc:9", "aec", "aec2", "aec+arc:2", "aec+aec2", "buddy+aec"]
)
def test_the_stated_guarantee_equals_the_computed_one(scheme: str) -> None:
    for owners in range(1, 6):
        assert stated_guarantee(scheme, owners) == make_code(scheme, owners).guarantee


def write_profile(path: Path, **changes: int) -> Path:
    one = {"forward_ms": 1.0, "backward_ms": 2.0, "parameter_bytes": 1000, "gradient_bytes": 1000}
    one |= {"optimizer_bytes": 2000, "activation_bytes": 400, "output_bytes": 10} | changes
    path.write_text(json.dumps({"schema": "ftd-profile/1", "microbatch_rows": 2, "layers": [one] * 2}))
    return path


def ftd(*arguments: object) -> str:
    done = RUNNER.invoke(app, ["plan", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def protection_in(*arguments: object) -> Any:
    return json.loads(ftd(*arguments, "--json")).get("protection")


def test_the_json_and_the_table(tmp_path: Path) -> None:
    alone = ("--profile", write_profile(tmp_path / "p.json"), "--nodes", 3, "--template-nodes", 1)
    assert protection_in(*alone) is None and "Snapshots" not in ftd(*alone)
    result = protection_in(*alone, "--protection", "aec")
    # 6,000 bytes in six cells of 1,024 bytes, of which each of three owners holds three.
    assert result == {
        "scheme": "aec",
        "reason": "",
        "guarantee": 1,
        "overhead": 0.5,
        "node_bytes": 3072,
        "arena_bytes": 6144,
        "arena_peak_bytes": 9216,
        "replicas": None,
        "buddy": False,
        "groups": [
            {
                "first_layer": 0,
                "end_layer": 2,
                "owners": 3,
                "bucket_bytes": 6000,
                "guarantee": 1,
                "whole": False,
            }
        ],
    }
    assert not {name for name in (*result, *result["groups"][0]) if f"`{name}`" not in PAGE}
    auto = protection_in(*alone, "--protection", "auto")
    assert auto["scheme"] == "aec" and auto["reason"].startswith("aec: any 1 of 3 owners may be lost")
    assert "chosen: aec: any 1 of 3" in ftd(*alone, "--protection", "auto")
    page = ftd(*alone, "--protection", "aec")
    assert "aec, 1 group of 3 owners" in page and "any 1 node of a group may be lost" in page
    assert "3.0 KiB for each snapshot on the fullest node; its arenas take 6.0 KiB, and 9.0 KiB while" in page
    assert "50.0% more than unprotected" in page
    assert "no node of a group may be lost" in ftd(*alone, "--protection", "none")
    single = ("--profile", tmp_path / "p.json", "--nodes", 1, "--protection", "arc:2")
    assert "layers 0–1 have one owner: no redundancy without the scheme buddy" in ftd(*single)
    single = (*single[:-1], "aec+buddy")
    assert "there is no other node: unprotected" in ftd(*single)
    two = ("--profile", tmp_path / "p.json", "--nodes", 2, "--template-nodes", 2, "--protection", "buddy")
    page = ftd(*two)
    assert "its replica peer, the next node, has a copy" in page and "owner or its peer" in page


def test_without_bytes_there_is_only_the_guarantee(tmp_path: Path) -> None:
    profile = write_profile(tmp_path / "p.json", parameter_bytes=0, optimizer_bytes=0)
    options = ("--profile", profile, "--nodes", 4, "--template-nodes", 1, "--protection", "aec2")
    result = protection_in(*options)
    assert (result["guarantee"], result["node_bytes"], result["arena_bytes"]) == (2, None, None)
    assert result["groups"][0]["bucket_bytes"] is None
    page = ftd(*options)
    assert "any 2 nodes of a group may be lost" in page and "arenas" not in page


def test_a_job_says_how_its_snapshots_are_protected(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('never imported')\n")
    job, profile = tmp_path / "job.toml", write_profile(tmp_path / "p.json")
    text = 'name = "small"\nsteps = 1\n[training]\nfunction = "train.py:build"\nglobal_batch = 40\n'
    text += 'microbatch = 2\n[snapshot]\nprotection = "aec2"\n'
    options = (job, "--profile", profile, "--nodes", 4, "--template-nodes", 1)
    job.write_text(text)
    assert protection_in(*options) is None
    job.write_text(f"{text}every_steps = 5\n")
    assert protection_in(*options)["scheme"] == "aec2"
    assert protection_in(*options, "--protection", "none")["scheme"] == "none"
    with pytest.raises(
        ConfigurationError, match=r"^snapshot\.protection: aec2 is for groups of up to 16 owners, not 17"
    ):
        ftd(job, "--profile", profile, "--nodes", 17, "--template-nodes", 1)


@pytest.mark.parametrize(
    ("nodes", "scheme", "says"),
    [
        (3, "raid", "--protection: 'raid' is not a protection scheme; use none, arc:k"),
        (3, "none+aec", "--protection: 'none+aec': none cannot be combined"),
        (17, "arc:1+aec2", "--protection: aec2 is for groups of up to 16 owners, not 17 (give another"),
        (5000, "aec", "--protection: aec is too much to work out for groups of 5000 owners"),
    ],
)
def test_bad_schemes_name_the_option(tmp_path: Path, nodes: int, scheme: str, says: str) -> None:
    profile = write_profile(tmp_path / "p.json")
    with pytest.raises(ConfigurationError) as caught:
        ftd("--profile", profile, "--nodes", nodes, "--template-nodes", 1, "--protection", scheme)
    assert str(caught.value).startswith(says)
