"""Tests of ``ftd plan``: its JSON, known optima, plots, and every kind of bad input."""

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ftd.cli.main import app
from ftd.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "how-to" / "planning.md").read_text(encoding="utf-8")
RUNNER = CliRunner()


def layer(forward_ms: float, backward_ms: float, **more: Any) -> dict[str, Any]:
    return {
        "forward_ms": forward_ms,
        "backward_ms": backward_ms,
        "allreduce_in_node_ms": {"1": 0.0, "2": 0.0625, "4": 0.125, "8": 0.1875},
        **more,
    }


def bare(*times: float) -> dict[str, Any]:
    return {"kind": "test", "layers": [layer(time / 4, 3 * time / 4) for time in times]}


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "bare.json"
    path.write_text(json.dumps(bare(4, 1, 3, 2, 2, 5, 1, 4)))
    return path


def ftd(*arguments: object) -> str:
    """Return standard output; exceptions are not caught."""
    done = RUNNER.invoke(app, ["plan", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def planned(*arguments: object) -> Any:
    return json.loads(ftd(*arguments, "--json"))


def error_of(*arguments: object) -> str:
    """Return the message of the error."""
    with pytest.raises(ConfigurationError) as caught:
        ftd(*arguments)
    return str(caught.value)


def test_the_contract_of_the_json(profile: Path) -> None:
    result = planned("--profile", profile, "--nodes", 5, "--gpus-per-node", 2, "--microbatches", 20)
    assert result["schema"] == 2 and 0 < result["planning_s"] < 60
    assert [row["nodes"] for row in result["templates"]] == [1, 2, 3, 4, 5]
    for row in result["templates"]:
        stages = row["stages"]
        assert [stage[0] for stage in stages] == [0, *(stage[1] for stage in stages[:-1])]
        assert stages[-1][1] == 8 and sum(stage[2] for stage in stages) == 2 * row["nodes"]
        assert 0 < row["lower_bound_ms"] <= row["objective_ms"]
        assert row["proved_optimal"] == (row["lower_bound_ms"] == row["objective_ms"])
        assert len(row["stage_costs"]) == len(stages)
    chosen = result["instantiation"]
    assert sum(one["nodes"] for one in chosen["pipelines"]) == 5 and chosen["idle_nodes"] == 0
    assert sum(one["microbatches"] for one in chosen["pipelines"]) == 20 == result["microbatches"]
    assert max(one["step_ms"] for one in chosen["pipelines"]) == chosen["iteration_ms"]
    assert (result["objective"], result["split"], result["tolerate"]) == ("iteration", "any", 0)
    assert result["memory_limit_bytes"] is None
    assert "comparison" not in result and "batch_check" not in result


def test_every_field_of_the_json_is_documented(profile: Path) -> None:
    options = ("--profile", profile, "--nodes", 3, "--gpus-per-node", 2, "--compare", "--check")
    missing = {name for name in names_in(planned(*options)) if f"`{name}`" not in PAGE}
    assert not missing


def names_in(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(names_in, value.values()))
    return set().union(*map(names_in, value)) if isinstance(value, list) else set()


def test_every_option_is_documented() -> None:
    done = RUNNER.invoke(app, ["plan", "--help"], env={"COLUMNS": "200"})
    options = set(re.findall(r"--[a-z-]+", done.output)) - {"--help"}
    assert len(options) > 12
    assert {option for option in options if f"`{option}" not in PAGE} == set()


def test_the_examples_in_the_documentation_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    Path("layers.json").write_text(example)
    commands = re.findall(r"^ftd plan (--profile .*?)(?:  +#.*)?$", PAGE, re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        assert ftd(*shlex.split(command)), command
    assert Path("plan.html").read_text().startswith("<!doctype html>")


KNOWN = [
    ([30.0, 23, 6, 51, 1], 3, 1, 646.0),
    ([1.0] * 8, 8, 1, (8 + 31 + 1) * 1.0),
]
"""A counterexample; and equal stages, with the formula 8·t + (3·8 + 7 − 1)·t + t, k* = 7."""


@pytest.mark.parametrize(("times", "nodes", "gpus", "optimum_ms"), KNOWN[:1])
@pytest.mark.parametrize("split", ["any", "aligned"])
def test_known_optima(
    tmp_path: Path, times: list[float], nodes: int, gpus: int, optimum_ms: float, split: str
) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps(bare(*times)))
    options = ("--nodes", nodes, "--gpus-per-node", gpus, "--template-nodes", nodes)
    result = planned("--profile", path, *options, "--objective", "paper", "--split", split)
    (row,) = result["templates"]
    assert row["objective_ms"] == row["lower_bound_ms"] == optimum_ms and row["proved_optimal"] is True


def test_a_single_template_equals_that_among_all(profile: Path) -> None:
    options = ("--profile", profile, "--nodes", 4, "--gpus-per-node", 4, "--objective", "paper")
    every, alone = planned(*options), planned(*options, "--template-nodes", 3)
    assert [row["nodes"] for row in alone["templates"]] == [3]
    same = ("objective_ms", "stages", "proved_optimal")
    assert [alone["templates"][0][k] for k in same] == [every["templates"][2][k] for k in same]
    assert alone["instantiation"]["idle_nodes"] == 1
    assert [one["nodes"] for one in alone["instantiation"]["pipelines"]] == [3]


def test_alignment_does_not_improve_the_objective(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(json.dumps(bare(1, 8, 1)))
    options = ("--profile", path, "--nodes", 1, "--gpus-per-node", 4, "--objective", "paper")
    anyhow, aligned = planned(*options), planned(*options, "--split", "aligned")
    assert anyhow["templates"][0]["objective_ms"] <= aligned["templates"][0]["objective_ms"]
    for first, _, gpus in aligned["templates"][0]["stages"]:
        assert first >= 0 and gpus in {1, 2, 4}
    assert aligned["split"] == "aligned"


def test_the_paper_plan_is_compared_by_iteration_time(profile: Path) -> None:
    options = ("--profile", profile, "--nodes", 4, "--gpus-per-node", 2, "--tolerate", 1)
    result = planned(*options, "--compare")
    paper = planned(*options, "--objective", "paper")
    assert result["comparison"]["objective"] == "paper"
    assert result["comparison"]["iteration_ms"] == paper["instantiation"]["iteration_ms"]
    assert len(result["instantiation"]["pipelines"]) >= 2
    page = ftd(*options)
    assert "the paper's plan would take" in page and "Objectives" not in ftd(*options, "--no-compare")


def test_the_batch_distribution_is_checked_on_demand(profile: Path) -> None:
    options = ("--profile", profile, "--nodes", 5, "--tolerate", 1, "--microbatches", 9)
    assert planned(*options, "--check")["batch_check"]["agrees"] is True
    assert "checked against the integer program" in ftd(*options, "--check")


def test_memory_and_checkpointing(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    one = {"forward_ms": 1.0, "backward_ms": 2.0, "parameter_bytes": 100, "gradient_bytes": 100}
    one |= {"optimizer_bytes": 200, "activation_bytes": 400, "output_bytes": 10}
    path.write_text(json.dumps({"schema": "ftd-profile/1", "microbatch_rows": 2, "layers": [one] * 4}))
    options = ("--profile", path, "--nodes", 4, "--microbatches", 8)
    free, limited = planned(*options), planned(*options, "--memory", "3000")
    assert [row["nodes"] for row in free["templates"]] == [1, 2, 3, 4]
    assert limited["memory_limit_bytes"] == 3000 and limited["templates"][0]["nodes"] > 1
    assert all(row["memory_bytes"] <= 3000 for row in limited["templates"])
    kept = planned(*options, "--memory", "3000", "--activation-checkpointing", "full")
    assert kept["templates"][0]["nodes"] < limited["templates"][0]["nodes"]
    assert {cost["recompute"] for cost in kept["templates"][0]["stage_costs"]} == {"full"}
    message = error_of(*options, "--memory", "1000B")
    assert "needs 800.0" not in message and "1000 bytes" in message
    assert "or --activation-checkpointing auto, which fits on 4 nodes" in message
    message = error_of(*options, "--memory", "1000B", "--activation-checkpointing", "selective")
    assert "--activation-checkpointing selective, and layers[0].selective is missing" in message


def test_stages_that_recompute_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    one = {"forward_ms": 1.0, "backward_ms": 2.0, "parameter_bytes": 100, "gradient_bytes": 100}
    one |= {"optimizer_bytes": 200, "activation_bytes": 400, "output_bytes": 10}
    one |= {"selective": {"activation_bytes": 150, "recompute_ms": 0.2}}
    path.write_text(json.dumps({"schema": "ftd-profile/1", "microbatch_rows": 2, "layers": [one] * 4}))
    options = ("--profile", path, "--nodes", 4, "--microbatches", 8, "--template-nodes", 4)
    plot = tmp_path / "plan.html"
    result = planned(*options, "--memory", "1500", "--activation-checkpointing", "auto", "--plot", plot)
    assert result["activation_checkpointing"] == "auto"
    ways = [cost["recompute"] for cost in result["templates"][0]["stage_costs"]]
    assert ways == ["selective", "selective", "none", "none"]
    shown = ftd(*options, "--memory", "1500", "--activation-checkpointing", "auto")
    assert "recompute" in shown and "selective" in shown
    assert "recompute" not in ftd(*options, "--memory", "1500000", "--activation-checkpointing", "auto")
    page = plot.read_text()
    assert (
        "<th>recompute</th>" in page.replace(' class="left"', "") and "layer 0 · recompute selective" in page
    )


def test_stages_that_are_sharded_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    one = {"forward_ms": 1.0, "backward_ms": 2.0, "parameter_bytes": 100, "gradient_bytes": 100}
    one |= {"optimizer_bytes": 800, "activation_bytes": 40, "output_bytes": 10}
    tree = {"schema": "ftd-profile/1", "microbatch_rows": 2, "stage_devices": [2], "layers": [one] * 4}
    tree |= {"inner": {"latency_ms": 0.1, "bytes_per_s": 1e6}}
    path.write_text(json.dumps(tree))
    options = ("--profile", path, "--nodes", 1, "--gpus-per-node", 2, "--microbatches", 8)
    plot = tmp_path / "plan.html"
    result = planned(*options, "--memory", "2600B", "--plot", plot)
    assert result["within_node"] == "auto"
    (cost,) = result["templates"][0]["stage_costs"]
    assert (cost["within"], cost["memory_bytes"]) == ("shard", 4 * 500 + 300 + 4 * 20)
    # Four layers gather 50 bytes from the other device, 0.15 ms each: once forward, and backward with gradients.
    assert cost["forward_ms"] == pytest.approx(4 * (0.5 + 0.15))
    assert cost["backward_ms"] == pytest.approx(4 * (1.0 + 0.3))
    shown = ftd(*options, "--memory", "2600B")
    assert "1×2 sharded" in shown and "2, sharded" in shown and "buffers" not in shown
    partly = {**one, "buffer_bytes": 70}
    path.write_text(json.dumps(tree | {"layers": [partly] * 4}))
    costs = planned(*options, "--within-node", "shard")["templates"][0]["stage_costs"]
    assert [cost["undivided_bytes"] for cost in costs] == [4 * 70]
    assert "buffers are whole on each device: up to 280 B" in ftd(*options, "--within-node", "shard")
    path.write_text(json.dumps(tree))
    page = plot.read_text()
    assert "layers 0–3 · 2 GPUs, sharded" in page and "<td>2, sharded</td>" in page.replace(
        ' class="left"', ""
    )
    assert "sharded" not in ftd(*options, "--memory", "5000B")
    assert "sharded" in ftd(*options, "--memory", "5000B", "--within-node", "shard")
    message = error_of(*options, "--memory", "2600B", "--within-node", "replicate")
    assert message.endswith("start 2 nodes, or use --within-node auto")
    path.write_text(json.dumps(tree | {"shard_problem": "its optimizer Muon looks across elements"}))
    message = error_of(*options, "--within-node", "shard")
    assert "--within-node shard, and this job cannot have shards: its optimizer Muon looks" in message


@pytest.mark.parametrize("kind", ["svg", "png", "html"])
def test_pictures(profile: Path, tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"plan.{kind}"
    options = ("--profile", profile, "--nodes", 4, "--gpus-per-node", 2, "--plot", path)
    json.loads(ftd(*options, "--json"))
    assert path.stat().st_size > 5_000


def test_a_thousand_nodes(profile: Path) -> None:
    result = planned("--profile", profile, "--nodes", 1000, "--microbatches", 500)
    chosen = result["instantiation"]
    assert sum(one["microbatches"] for one in chosen["pipelines"]) == 500
    assert sum(one["nodes"] for one in chosen["pipelines"]) + chosen["idle_nodes"] == 1000


BAD = [
    ((), "--profile: there is neither a profile nor a job to plan for (give --profile FILE"),
    (("--profile", "gone.json"), "gone.json does not exist"),
    (
        ("--profile", "P", "--plot", "plan.pdf"),
        "--plot: plan.pdf has no supported suffix (end it in .svg, .png or",
    ),
    (
        ("--profile", "P", "--memory", "lots"),
        "--memory: 'lots' is not a size (write for example 80GiB",
    ),
    (("--profile", "P", "--memory", "0"), "--memory: '0' is not a size"),
    (("--profile", "P", "--tolerate", 3), "--tolerate: tolerating 3 failures takes 4 pipelines"),
    (("--profile", "P", "--tolerate", 1, "--microbatches", 1), "--microbatches: 1 cannot be distributed"),
    (("--profile", "P", "--gpus-per-node", 3), "--gpus-per-node is 3"),
    (("--profile", "P", "--gpus-per-node", 6), "use 4 or 8 devices per node"),
    (("--profile", "P", "--template-nodes", 4), "--template-nodes: there are only 3 nodes"),
    (("--profile", "P", "--tolerate", 2, "--template-nodes", 2), "the largest that works has 1 nodes"),
    (("gone.toml",), "gone.toml does not exist"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD)
def test_bad_input_names_the_option_and_what_works(
    profile: Path, arguments: tuple[object, ...], says: str
) -> None:
    given = [profile if argument == "P" else argument for argument in arguments]
    assert says in error_of("--nodes", 3, *given)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--nodes", "0"], "--nodes"),
        (["--nodes", "1000000000"], "--nodes"),
        (["--nodes", "3", "--gpus-per-node", "0"], "--gpus-per-node"),
        (["--nodes", "3", "--devices-per-node", "100000"], "--gpus-per-node"),
        (["--nodes", "3", "--microbatches", "0"], "--microbatches"),
        (["--nodes", "3", "--microbatches", "10000000000"], "--microbatches"),
        (["--nodes", "3", "--tolerate", "-1"], "--tolerate"),
        (["--nodes", "3", "--template-nodes", "0"], "--template-nodes"),
        (["--nodes", "3", "--objective", "best"], "--objective"),
        (["--nodes", "3", "--split", "some"], "--split"),
        (["--nodes", "x"], "--nodes"),
    ],
)
def test_options_out_of_range_are_usage_errors(profile: Path, arguments: list[str], option: str) -> None:
    done = RUNNER.invoke(app, ["plan", "--profile", str(profile), *arguments])
    assert done.exit_code == 2 and option in done.output


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"forward_ms": -1.0}, "layers[1].forward_ms"),
        ({"backward_ms": math.nan}, "layers[1].backward_ms"),
        ({"backward_ms": math.inf}, "layers[1].backward_ms"),
        ({"forward_ms": None}, "layers[1].forward_ms"),
        ({"forward_ms": "fast"}, "layers[1].forward_ms"),
        ({"allreduce_in_node_ms": {"1": 0.0, "2": -1.0}}, "layers[1].allreduce_in_node_ms"),
    ],
)
def test_bad_entries_of_a_profile_are_named(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    document = bare(1, 2, 3)
    document["layers"][1] |= change
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(document))
    message = error_of("--profile", path, "--nodes", 2)
    assert "bad.json" in message and says in message


def test_profiles_without_a_possible_plan_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"kind": "empty", "layers": []}))
    assert "bad.json" in error_of("--profile", path, "--nodes", 2)
    path.write_text(json.dumps(bare(1e308, 1e308, 1e308)))
    assert "bad.json" in error_of("--profile", path, "--nodes", 2)
    one_layer = {"kind": "x", "layers": [layer(1, 1, allreduce_in_node_ms={"1": 0.0})]}
    path.write_text(json.dumps(one_layer))
    message = error_of("--profile", path, "--nodes", 2, "--gpus-per-node", 4)
    assert "fewer devices per node" in message or "cannot" in message


number = st.one_of(
    st.integers(-2, 12), st.sampled_from([0, 1, 2, 4, 8, 10**9, 10**30, "x", "", "1.5", "nan", "1e3"])
)
entry = st.one_of(
    st.floats(0, 9),
    st.integers(0, 5),
    st.sampled_from([-1.0, math.nan, math.inf, None, "1", 1e308, 0.0, 1e-300]),
)
mostly = st.one_of(st.floats(0, 9), st.floats(0, 9), st.floats(0, 9), st.floats(0, 9), entry)
option = st.one_of(
    st.tuples(st.sampled_from(["--gpus-per-node", "--devices-per-node"]), number),
    st.tuples(st.sampled_from(["--template-nodes", "--microbatches", "--tolerate"]), number),
    st.tuples(st.just("--objective"), st.sampled_from(["paper", "iteration", "other"])),
    st.tuples(st.just("--split"), st.sampled_from(["any", "aligned", ""])),
    st.tuples(st.just("--memory"), st.sampled_from(["1", "1e3", "80GiB", "-1", "9" * 40, "5 XB", "12MiB"])),
)


@given(
    layers=st.lists(st.tuples(mostly, mostly), max_size=6),
    nodes=number,
    options=st.lists(option, max_size=4, unique_by=lambda pair: pair[0]),
    form=st.sampled_from(["--json", "--compare"]),
)
@settings(
    max_examples=120,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@pytest.mark.long
def test_any_input_gives_a_plan_or_a_usage_error(
    tmp_path: Path,
    layers: list[tuple[Any, Any]],
    nodes: object,
    options: list[tuple[str, object]],
    form: str,
) -> None:
    path = tmp_path / "fuzzed.json"
    path.write_text(json.dumps({"kind": "fuzzed", "layers": [layer(*times) for times in layers]}))
    arguments = [str(word) for pair in options for word in pair]
    done = RUNNER.invoke(app, ["plan", "--profile", str(path), "--nodes", str(nodes), *arguments, form])
    if done.exception is None:
        assert done.exit_code == 0 and done.stdout
        if form == "--json":
            result = json.loads(done.stdout, parse_constant=pytest.fail)
            assert all(row["objective_ms"] >= 0 for row in result["templates"])
        return
    assert isinstance(done.exception, ConfigurationError | SystemExit), repr(done.exception)
    assert (getattr(done.exception, "code", None) or getattr(done.exception, "exit_code", None)) == 2


JOB = """
name = "small"
steps = 1
[training]
function = "train.py:build"
global_batch = 24
microbatch = 2
[tolerance]
failures = 2
[planner]
objective = "paper"
split = "aligned"
"""


def test_a_job_with_a_profile_needs_no_model(profile: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('never imported')\n")
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    options = ("--nodes", 6, "--gpus-per-node", 2)
    result = planned(job, "--profile", profile, *options)
    asked = (
        "microbatches",
        "microbatch_rows",
        "tolerate",
        "objective",
        "split",
        "batch_objective",
        "batch_solver",
    )
    assert [result[name] for name in asked] == [12, 2, 2, "paper", "aligned", "minmax", "exact"]
    assert len(result["instantiation"]["pipelines"]) >= 3
    job.write_text(f'{JOB}profile = "bare.json"\nbatch_objective = "variance"\n')
    named = planned(job, *options)
    assert named["templates"] == result["templates"] and named["batch_objective"] == "variance"
    changed = ("--tolerate", 0, "--objective", "iteration", "--split", "any", "--microbatches", 7)
    result = planned(
        job, *options, *changed, "--batch-objective", "minmax", "--batch-solver", "pyomo", "--check"
    )
    assert [result[name] for name in asked] == [7, 2, 0, "iteration", "any", "minmax", "pyomo"]
    assert result["batch_check"]["agrees"]
    assert "tolerance.failures = 2" in error_of(job, "--nodes", 2)
    assert error_of(job, "--nodes", 2, "--tolerate", 2).startswith("--tolerate")


@pytest.mark.processes
def test_json_output_loads_no_unneeded_modules(profile: Path) -> None:
    script = "import sys; from ftd.cli.main import app\napp(sys.argv[1:], standalone_mode=False)\n"
    script += "print(*(name.split('.')[0] for name in sys.modules), file=sys.stderr)"
    arguments = ["plan", "--profile", str(profile), "--nodes", "3", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=240,
    )
    assert json.loads(done.stdout)["nodes"] == 3
    assert not {"matplotlib", "pyomo", "scipy", "rich", "torch", "structlog"} & set(done.stderr.split())


def test_stages_that_are_tensor_parallel_are_shown(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    one = {"forward_ms": 1.0, "backward_ms": 2.0, "parameter_bytes": 100, "gradient_bytes": 100}
    one |= {"optimizer_bytes": 800, "activation_bytes": 40, "output_bytes": 10}
    names = ("parameter", "column", "activation", "forward", "backward")
    one["tensor"] = {f"{name}_bytes": 0 for name in names} | {"forward_exchanges": 0, "backward_exchanges": 0}
    tree = {"schema": "ftd-profile/1", "microbatch_rows": 4, "stage_devices": [2], "layers": [one] * 4}
    tree["tensor_counts"] = [["the number of attention heads of blocks.*", 6]]
    path.write_text(json.dumps(tree))
    options = ("--profile", path, "--nodes", 1, "--microbatches", 8, "--within-node", "tensor")
    plot = tmp_path / "plan.html"
    result = planned(*options, "--gpus-per-node", 2, "--plot", plot)
    (cost,) = result["templates"][0]["stage_costs"]
    assert (result["within_node"], cost["within"]) == ("tensor", "tensor")
    shown = ftd(*options, "--gpus-per-node", 2)
    assert "1×2 tensor-parallel" in shown and "2, tensor-parallel" in shown
    assert "layers 0–3 · 2 GPUs, tensor-parallel" in plot.read_text()
    path.write_text(json.dumps(tree | {"stage_devices": [4]}))
    result = planned(*options, "--gpus-per-node", 4, "--plot", plot)
    (cost,) = result["templates"][0]["stage_costs"]
    assert (cost["within"], cost["replicas"]) == ("tensor", 2)
    shown = ftd(*options, "--gpus-per-node", 4)
    assert "1×4 tensor-parallel in 2 replicas" in shown and "4, tensor-parallel in 2 replicas" in shown
    assert "4 GPUs, tensor-parallel in 2 replicas" in plot.read_text()
    tree["tensor_counts"] = [["the number of attention heads of blocks.*", 5]]
    path.write_text(json.dumps(tree | {"stage_devices": [4]}))
    message = error_of(*options, "--gpus-per-node", 4)
    assert "the number of attention heads of blocks.* is 5, which 4 devices do not divide" in message
