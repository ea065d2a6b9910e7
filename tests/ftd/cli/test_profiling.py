"""Tests of profiling: fits, the document, the tables, and the command on a real model."""

import asyncio
import os
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from ftd.cli.main import app
from ftd.cli.profiling.document import build_profile_document
from ftd.cli.profiling.network import fit_link, fit_ring
from ftd.cli.profiling.process import run_measurement
from ftd.config.profile_document import ProfileDocument
from ftd.config.profile_file import load_document, load_profile, model_profile, save_profile
from ftd.errors import InternalError
from ftd.observe.view.profile import format_spread, render_profile
from planner.stages.costs import StageCosts
from planner.values import LayerProfile, Link, ModelProfile, Policy, SplitTime
from runtime.wire.measurement import (
    AllReduceTiming,
    LayerMeasurements,
    LinkMeasurements,
    PointToPointTiming,
    RowTimings,
    TimingSpread,
    spread_of,
)

ROOT = Path(__file__).resolve().parents[3]
SIZES = (1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22)


def always(time_ms: float) -> TimingSpread:
    return spread_of([time_ms / 1e3] * 3)


def links_of(link: Link, ring: Link, factor: float = 1.0) -> LinkMeasurements:
    """Return measurements of a network with exactly these links; every other one is ``factor`` slower."""
    reduced = [(members, size) for members in (2, 3, 4) for size in SIZES]
    return LinkMeasurements(
        where="an invented network",
        sent=tuple(
            PointToPointTiming(size_bytes=size, time=always(link.time_ms(size) * factor ** (n % 2)))
            for n, size in enumerate(SIZES)
        ),
        reduced=tuple(
            AllReduceTiming(
                members=members,
                size_bytes=size,
                time=always(2 * (members - 1) * ring.time_ms(size / members) * factor ** (n % 2)),
            )
            for n, (members, size) in enumerate(reduced)
        ),
    )


def layers_of(rows: int = 4) -> LayerMeasurements:
    def part(count: int, time_ms: float) -> RowTimings:
        return RowTimings(rows=count, forward=always(time_ms), backward=always(2 * time_ms))

    layer = LayerProfile(
        forward_ms=always(1.25).median_ms,
        backward_ms=always(2.5).median_ms,
        parameter_bytes=4096,
        gradient_bytes=2048,
        optimizer_bytes=8192,
        activation_bytes=512,
        output_bytes=64,
        split=(SplitTime(devices=2, forward_ms=0.75, backward_ms=1.5),),
    )
    return LayerMeasurements(
        profile=ModelProfile(layers=(layer, layer), microbatch_rows=rows, device_memory_bytes=None),
        names=("Linear", "Head"),
        rows=((part(4, 1.25), part(2, 0.75)),) * 2,
        unmeasured=("layer 1 raised ValueError on 1 rows: too few",),
        device="a CPU, 1 thread",
        torch_version="2.13.0",
    )


# --- fits --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "link", [Link(latency_ms=0.05, bytes_per_s=3e9), Link(latency_ms=8.0, bytes_per_s=1e7)]
)
@pytest.mark.parametrize(
    "ring", [Link(latency_ms=0.4, bytes_per_s=1.2e9), Link(latency_ms=0.0, bytes_per_s=1e8)]
)
def test_the_fit_recovers_a_linear_model(link: Link, ring: Link) -> None:
    measured = links_of(link, ring)
    for fit, true in ((fit_link(measured), link), (fit_ring(measured), ring)):
        assert fit.link.latency_ms == pytest.approx(true.latency_ms, rel=1e-4, abs=1e-6)
        assert fit.link.bytes_per_s == pytest.approx(true.bytes_per_s, rel=1e-4)
        assert fit.error == pytest.approx(0.0, abs=1e-4)


def test_the_error_of_a_fit_is_its_typical_deviation() -> None:
    true = Link(latency_ms=0.05, bytes_per_s=3e9)
    fit = fit_ring(links_of(true, true, factor=1.5))
    assert 0.15 < fit.error < 0.25
    assert true.bytes_per_s / 1.5 < fit.link.bytes_per_s < true.bytes_per_s


def test_one_outlier_does_not_dominate_the_fit() -> None:
    true = Link(latency_ms=0.05, bytes_per_s=3e9)
    for factor in (0.5, 2.0):
        sent = list(links_of(true, true).sent)
        sent[2] = PointToPointTiming(size_bytes=SIZES[2], time=always(true.time_ms(SIZES[2]) * factor))
        fit = fit_link(LinkMeasurements(where="", sent=tuple(sent), reduced=()))
        for size in SIZES:
            assert 0.6 < fit.link.time_ms(size) / true.time_ms(size) < 1.7


def test_the_fit_of_a_flat_measurement_has_a_finite_bandwidth() -> None:
    flat = LinkMeasurements(
        where="",
        sent=tuple(PointToPointTiming(size_bytes=size, time=always(2.0)) for size in SIZES),
        reduced=(),
    )
    fit = fit_link(flat)
    assert fit.link.latency_ms == pytest.approx(2.0, rel=0.01)
    assert fit.link.bytes_per_s == pytest.approx(100 * SIZES[-1] / 2e-3)
    assert fit.error < 0.01


def test_falling_times_give_no_negative_latency_or_bandwidth() -> None:
    odd = LinkMeasurements(
        where="",
        sent=tuple(
            PointToPointTiming(size_bytes=size, time=always(5.0 / (n + 1))) for n, size in enumerate(SIZES)
        ),
        reduced=(),
    )
    fit = fit_link(odd)
    assert fit.link.latency_ms >= 0 and fit.link.bytes_per_s > 0 and fit.error > 0.1


# --- the document and its tables -----------------------------------------------------------------


def test_measurements_become_a_file_that_loads(tmp_path: Path) -> None:
    link, ring = Link(latency_ms=0.05, bytes_per_s=3e9), Link(latency_ms=0.4, bytes_per_s=1.2e9)
    document = build_profile_document("gpt", layers_of(), links_of(link, ring), 3)
    save_profile(tmp_path / "p.json", document)
    assert load_document(tmp_path / "p.json") == document
    profile = load_profile(tmp_path / "p.json")
    assert profile == model_profile(document)
    assert profile.link.bytes_per_s == pytest.approx(3e9) and profile.ring.latency_ms == pytest.approx(0.4)
    assert profile.inner == profile.ring, "all of it was measured on one host"
    assert [s.devices for s in profile.layers[0].split] == [2]
    assert document.layers[1].name == "Head"
    assert [entry.rows for entry in document.layers[0].measured] == [4, 2]
    origin = document.provenance
    assert origin is not None and origin.job == "gpt" and origin.torch_version == "2.13.0"
    measured = "\n".join(origin.measured)
    assert "with 4 and 2 rows" in measured and "an invented network" in measured
    stated = "\n".join(origin.stated)
    assert "more than 3 devices, d, takes ⌈4 / d⌉ / 4" in stated
    assert "layer 1 raised ValueError on 1 rows" in stated
    assert "a stage of shards also takes the time to gather and reduce, computed from" in stated


@pytest.mark.parametrize("links", [None, LinkMeasurements(where="nowhere", sent=(), reduced=())])
def test_a_network_that_was_not_measured_has_the_default(links: LinkMeasurements | None) -> None:
    document = build_profile_document("gpt", layers_of(), links, 1)
    assert document.link is document.ring is document.network is None
    assert model_profile(document).link == Link() == Link(latency_ms=0.1, bytes_per_s=1e9)
    assert document.provenance is not None
    assert "0.1 ms and 1e9 bytes per second" in document.provenance.stated[-1]
    assert any("several devices, d, takes ⌈4 / d⌉ / 4" in line for line in document.provenance.stated)


def shown(document: ProfileDocument) -> str:
    console = Console(width=120, no_color=True)
    with console.capture() as capture:
        console.print(render_profile(document))
    return capture.get()


def test_the_tables_show_times_with_their_spread_and_bytes() -> None:
    link, ring = Link(latency_ms=0.05, bytes_per_s=3e9), Link(latency_ms=0.4, bytes_per_s=1.2e9)
    page = shown(build_profile_document("gpt", layers_of(), links_of(link, ring), 2))
    row, stages = [line.split() for line in page.splitlines() if line.startswith("1 Head")]
    assert " ".join(row) == "1 Head 1.25 ± 0.00 2.50 ± 0.00 4.0 KiB 8.0 KiB 512 B 64 B"
    assert " ".join(stages) == "1 Head 3.750 2.250" and "1 device 2 devices" in page
    assert "all-reduce of 4" in page and "link 0.050 ms + 3 GB/s, off by 0%" in page
    without = shown(build_profile_document("gpt", layers_of(), None, 1))
    assert "Network" not in without and "the network was not measured" in without


def test_a_spread_is_shown_as_median_and_half_of_the_interquartile_range() -> None:
    document = build_profile_document("gpt", layers_of(), None, 1)
    entry = document.layers[0].measured[0].forward
    wide = msgspec.structs.replace(entry, lower_quartile_ms=0.75, median_ms=1.0, upper_quartile_ms=1.75)
    assert format_spread(wide) == "1.00 ± 0.50"
    assert format_spread(msgspec.structs.replace(wide, median_ms=0.99)) == "0.990 ± 0.500"


# --- processes ---------------------------------------------------------------------------------


def measure(order: bytes, timeout_s: float | None = None) -> LayerMeasurements:
    return asyncio.run(
        run_measurement(
            "runtime.profiling.layer_profile",
            order=order,
            answer=LayerMeasurements,
            on_progress=lambda done, total: None,
            timeout_s=timeout_s,
        )
    )


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.mark.processes
def test_a_process_that_takes_too_long_is_ended() -> None:
    before = children()
    with pytest.raises(InternalError, match=r"did not answer within 0\.05 s"):
        measure(b"{}", timeout_s=0.05)
    assert children() <= before


# --- the command -------------------------------------------------------------------------------


def test_the_next_command_can_be_run_for_a_path_with_spaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measured(*_: object, **__: object) -> ProfileDocument:
        return build_profile_document("tiny", layers_of(), None, 1)

    monkeypatch.setattr("ftd.cli.profile._measured", measured)
    job = tmp_path / "job.toml"
    job.write_text('name = "tiny"\nsteps = 2\n[training]\nfunction = "some.module:build"\n')
    path = tmp_path / "my profiles" / "tiny.json"
    path.parent.mkdir()
    result = CliRunner().invoke(app, ["profile", str(job), "--output", str(path)])
    assert result.exit_code == 0, result.output
    command = result.output.rpartition("next: ")[2]
    assert shlex.split(command) == ["ftd", "plan", "--profile", str(path), "--nodes", "4"]


def ftd(*arguments: str, directory: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "ftd.cli.main", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=directory,
        env={**os.environ, "COLUMNS": "200", "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.processes
def test_a_job_is_profiled_and_the_planner_accepts_the_file(tmp_path: Path) -> None:
    job = str(ROOT / "examples" / "mlp.toml")
    done = ftd("profile", job, "--devices-per-node", "2", directory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "4 Linear" in done.stdout and "all-reduce of 3" in done.stdout
    assert "wrote mlp.profile.json" in done.stdout
    assert "⌈4 / d⌉ / 4" in done.stdout, "the model for numbers that were not measured"
    document = load_document(tmp_path / "mlp.profile.json")
    assert isinstance(document, ProfileDocument)
    assert [layer.name for layer in document.layers] == ["Sequential"] * 4 + ["Linear"]
    assert [layer.parameter_bytes for layer in document.layers] == [768, 8448, 8448, 8448, 792]
    assert all([s.devices for s in layer.split] == [2] for layer in document.layers)
    assert document.link is not None and document.ring is not None
    network = document.network
    assert network is not None and network.where == "4 processes of one host, gloo over loopback"
    assert {entry.members for entry in network.all_reduce} == {2, 3, 4}
    assert len(network.point_to_point) >= 2 and all(e.time.repeats >= 3 for e in network.all_reduce)
    assert 0 <= network.link_error < 100 and document.ring.bytes_per_s > 1e5
    profile = load_profile(tmp_path / "mlp.profile.json")
    policy = Policy(devices_per_node=2, global_batch=48, microbatch_rows=4)
    two_ms = StageCosts(profile, policy).time_ms[0, 2, 0, 5]
    assert two_ms == pytest.approx(sum(s.forward_ms + s.backward_ms for e in profile.layers for s in e.split))


@pytest.mark.processes
def test_the_network_may_be_left_out(tmp_path: Path) -> None:
    job = str(ROOT / "examples" / "mlp.toml")
    done = ftd("profile", job, "--no-network", "--output", "here.json", directory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "all-reduce" not in done.stdout and "the network was not measured" in done.stdout
    assert load_profile(tmp_path / "here.json").link == Link()
    assert [path.name for path in tmp_path.iterdir()] == ["here.json"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("gone.toml",), "gone.toml does not exist"),
        ((str(ROOT / "examples" / "mlp.toml"), "--output", "."), "--output: . is a directory"),
        (
            (str(ROOT / "examples" / "mlp.toml"), "--output", "a/b.json"),
            "--output: the directory a does not exist",
        ),
        ((str(ROOT / "examples" / "mlp.toml"), "--devices-per-node", "0"), "--devices-per-node"),
    ],
)
def test_errors_are_reported_before_anything_is_measured(
    tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    done = ftd("profile", *arguments, directory=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr and "Traceback" not in done.stderr


@pytest.mark.processes
def test_an_error_of_the_training_function_is_reported(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def build(): raise RuntimeError('no data')\n")
    (tmp_path / "job.toml").write_text(
        'name = "x"\nsteps = 1\n[training]\nfunction = "train.py:build"\nglobal_batch = 8\nmicrobatch = 4\n'
    )
    done = ftd("profile", "job.toml", directory=tmp_path)
    assert done.returncode == 2
    assert "no data" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "x.profile.json").exists()


@pytest.mark.processes
def test_a_device_that_is_not_there_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    job = (ROOT / "examples" / "mlp.toml").read_text().replace("[training]", '[training]\ndevice = "cuda"')
    (tmp_path / "job.toml").write_text(job)
    (tmp_path / "mlp.py").write_text((ROOT / "examples" / "mlp.py").read_text())
    done = ftd("profile", "job.toml", directory=tmp_path)
    assert done.returncode == 2
    assert 'device "cuda" needs a CUDA device' in done.stderr and "Traceback" not in done.stderr
