"""Tests of ``ftd replay``: its results from files, and every wrong combination of options."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import replay_speed
from ftd.cli.main import app
from ftd.errors import ConfigurationError, ConfigurationErrors
from tests.helpers.harness import ROOT

RUNNER = CliRunner()
TRACE = ROOT / "benchmarks" / "traces" / "oobleck_fail_10m.csv"
MODEL = """
nodes = 16
duration_h = 6
[failures]
mean_h = 100
[repair]
mean_h = 1
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.toml"
    path.write_text(MODEL)
    return path


def replayed(*options: object) -> str:
    result = RUNNER.invoke(app, ["replay", *map(str, options)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.long
def test_a_trace_is_replayed_under_the_policies_that_are_named(tmp_path: Path) -> None:
    plot = tmp_path / "plot.html"
    options = ("bert-large", "--trace", TRACE, "--policy", "varuna", "--policy", "oobleck", "--plot", plot)
    document = json.loads(replayed(*options, "--json", "--price", 3, "--until", "1.5h"))
    assert [policy["policy"] for policy in document["policies"]] == ["ideal", "oobleck", "varuna"]
    assert document["trace"]["duration_s"] == 5400.0 and document["traces"] == 1
    assert document["price_per_node_hour"] == 3.0
    assert plot.read_text().startswith("<!doctype html>")


@pytest.mark.long
def test_published_throughput_and_parameters_change_the_result(tmp_path: Path) -> None:
    parameters = tmp_path / "mine.toml"
    parameters.write_text("[varuna]\nstart_s = 100.0\n")
    options = ("bert-large", "--trace", TRACE, "--policy", "varuna", "--json")
    common = json.loads(replayed(*options))
    slower = json.loads(replayed(*options, "--parameters", parameters))
    assert slower["parameters"] == "those of mine.toml"
    assert slower["policies"][1]["seconds"]["restarting"] > common["policies"][1]["seconds"]["restarting"]
    published = json.loads(replayed(*options, "--throughput", "published"))
    assert published["throughput"] == "published"
    assert published["policies"][1]["samples"] != common["policies"][1]["samples"]


def test_wrong_parameters_are_all_named_with_their_table(tmp_path: Path) -> None:
    parameters = tmp_path / "mine.toml"
    parameters.write_text("[ftd]\ndetect = 1\nquiesce_s = -1\n")
    with pytest.raises(ConfigurationErrors) as caught:
        replayed("gpt2", "--trace", TRACE, "--policy", "ftd", "--parameters", parameters)
    text = str(caught.value)
    assert f"{parameters}, [ftd]: quiesce_s: -1 is not allowed" in text
    assert f"{parameters}, [ftd]: detect: unknown field (did you mean 'detect_s'?)" in text


@pytest.mark.parametrize(
    ("policy", "key"),
    [("oobleck", "checkpoint_every_s"), ("checkpoint", "every_s"), ("bamboo", "checkpoint_every_s")],
)
def test_a_time_among_the_parameters_is_finite(policy: str, key: str, tmp_path: Path) -> None:
    parameters = tmp_path / "mine.toml"
    parameters.write_text(f"[{policy}]\n{key} = inf\n")
    with pytest.raises(ConfigurationError) as caught:
        replayed("gpt2", "--trace", TRACE, "--policy", policy, "--parameters", parameters)
    assert f"[{policy}]: {key}: inf is not allowed" in str(caught.value)


def test_an_unknown_protection_among_the_parameters_is_rejected(tmp_path: Path) -> None:
    parameters = tmp_path / "mine.toml"
    parameters.write_text('[ftd]\nprotection = "aec3"\n')
    with pytest.raises(ConfigurationError) as caught:
        replayed("gpt2", "--trace", TRACE, "--policy", "ftd", "--parameters", parameters)
    assert "[ftd]: protection: 'aec3' is not a protection scheme" in str(caught.value)


def test_a_trace_of_one_instant_needs_a_length(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("time_s,event,node\n0,add,a\n0,add,b\n")
    options = ("gpt2", "--trace", trace, "--policy", "ftd", "--json")
    with pytest.raises(ConfigurationError, match="records of one instant only") as caught:
        replayed(*options)
    assert "--until" in (caught.value.remedy or "")
    assert json.loads(replayed(*options, "--until", "1h"))["policies"][1]["samples"]["mean"] > 0


def test_a_seed_repeats_the_traces_of_a_failure_model(model: Path) -> None:
    options = ("gpt2", "--failures", model, "--policy", "varuna", "--repeat", 2, "--json")
    first = replayed(*options, "--seed", 5)
    assert first == replayed(*options, "--seed", 5) != replayed(*options)
    document = json.loads(first)
    assert document["traces"] == 2 and document["trace"]["initial_nodes"] == 16
    fewer = json.loads(replayed(*options, "--nodes", 8, "--until", "90min"))
    assert fewer["trace"]["initial_nodes"] == 8 and fewer["trace"]["duration_s"] == 5400.0


def test_the_table_says_that_it_is_simulated() -> None:
    text = replayed("gpt2", "--trace", TRACE, "--policy", "varuna")
    assert "Simulated" in text and "where the time went" in text


@pytest.mark.processes
def test_the_benchmark_measures_the_cpu_time_of_the_command() -> None:
    failures = replay_speed.FAILURE_MODEL.format(nodes=4, hours=1, mean_h=4, repair_h=0.2)
    assert 0.1 < replay_speed.replay_s("gpt2", failures, "--policy", "ftd") < replay_speed.LARGE_S


def test_names_are_listed() -> None:
    text = replayed("--list")
    assert "bert-large" in text and "varuna" in text and "lanl" in text


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ((), "--trace: a replay needs either a trace or a failure model"),
        (("--trace", TRACE, "--failures", "M"), "--trace: a replay needs either"),
        (("--trace", TRACE, "--seed", 1), "--seed: it belongs to --failures"),
        (("--trace", TRACE, "--repeat", 9), "--repeat: it belongs to --failures"),
        (("--failures", "M", "--format", "csv"), "--format: it belongs to --trace"),
        (("--failures", "M", "--system", "2"), "--system: it belongs to --trace"),
        (("--trace", TRACE, "--format", "xls"), "--format: the format 'xls' is unknown"),
        (("--trace", TRACE, "--nodes", 4), "the format csv has no option nodes"),
        (("--trace", "missing.csv"), "the file does not exist"),
        (("--trace", TRACE, "--until", "soon"), "--until: 'soon' is not a duration"),
        (("--trace", TRACE, "--until", "0h"), "--until: '0h' is not a duration"),
        (("--trace", TRACE, "--max-gap", "5min"), "and 300 s are accepted"),
        (("--failures", "M", "--max-gap", "1h"), "--max-gap: it belongs to --trace"),
        (("--trace", TRACE, "--price", -1), "--price: -1.0 is not a price"),
        (("--trace", TRACE, "--price", "nan"), "--price: nan is not a price"),
        (("--trace", TRACE, "--policy", "magic"), "there is no policy 'magic'"),
        (("--trace", TRACE, "--plot", "a.pdf"), "a.pdf has no supported suffix"),
        (("--trace", TRACE, "--profile", "p.json"), "a profile is not needed"),
        (("--trace", TRACE, "--parameters", "missing.toml"), "missing.toml does not exist"),
    ],
)
def test_a_wrong_combination_is_rejected(options: tuple[object, ...], complaint: str, model: Path) -> None:
    given = [model if option == "M" else option for option in options]
    with pytest.raises(ConfigurationError) as error:
        replayed("gpt2", *given)
    assert complaint in "\n".join(map(str, error.value.errors))


def test_an_unknown_job_and_one_that_does_not_fit_are_rejected(model: Path) -> None:
    with pytest.raises(ConfigurationError, match="neither a model card"):
        replayed("gpt9", "--trace", TRACE)
    with pytest.raises(ConfigurationError, match="needs at least"):
        replayed("llama2-34b", "--failures", model, "--nodes", 2)


@pytest.mark.processes
def test_a_wrong_option_is_reported_before_large_packages_are_loaded() -> None:
    code = (
        "import sys; from ftd.cli.main import app\n"
        "try: app(['replay', 'gpt2'], standalone_mode=False)\n"
        "except Exception: pass\n"
        "print({'matplotlib', 'torch', 'pyomo'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.long
def test_advice_for_a_failure_model_is_a_document(model: Path) -> None:
    options = ("gpt2", "--failures", model, "--repeat", 1, "--advise")
    document = json.loads(replayed(*options, "--json"))
    subjects = ["tolerate", "protection", "snapshots", "checkpoints", "spares"]
    assert [question["subject"] for question in document["questions"]] == subjects
    assert document["traces"] == 1 and document["nodes"] == 16
    with pytest.raises(ConfigurationError, match=r"--policy: advice replays the policy ftd"):
        replayed(*options, "--policy", "varuna")
