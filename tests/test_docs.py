"""Checks of the documentation against the code: examples run, names exist, and nothing is left out."""

import dataclasses
import re
import time
import tomllib
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from typer.main import get_command

import storage.errors
from ftd.cli.main import app
from ftd.config.daemon import parse_daemon_config
from ftd.config.daemon_file import DaemonFile, render_daemon_reference
from ftd.config.job import JobFile, load_job
from ftd.config.job_reference import job_tables, render_job_reference
from ftd.config.profile_document import LayerTimesFile, ProfileDocument
from ftd.config.profile_file import load_profile
from ftd.config.validation import convert, field_descriptions
from ftd.faults.chaos.expectations import TIERS, ExpectTable
from ftd.faults.chaos.scenario import FaultTable, ScenarioTable, parse_scenario
from ftd.faults.chaos.values import FAULTS, PHASES, ClusterSetup, Service
from runtime.training import StepInfo, load_training
from statemachine.messages.trainer import TrainingData
from statemachine.timing import Timing
from tests.helpers.kept_checkpoints import layer_state

ROOT = Path(__file__).parents[1]
PAGES = {p.name: p.read_text(encoding="utf-8") for p in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))}
SOURCES = "\n".join(
    p.read_text(encoding="utf-8")
    for room in ("statemachine", "ftd")
    for p in sorted((ROOT / room).rglob("*.py"))
    if "view" not in p.parts
)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)


def table_rows(page: str) -> dict[str, str]:
    """Return each row of a page's tables by its first cell without code marks."""
    rows = re.findall(r"^\| `([^`|]+)` \|(.*)$", PAGES[page], re.MULTILINE)
    return dict(rows)


def documented_events() -> dict[str, str]:
    return {
        name: row for name, row in table_rows("events.md").items() if re.fullmatch(r"([A-Z][a-z]+)+", name)
    }


def emitted_events() -> set[str]:
    called = re.findall(
        r'\b(?:emit|announce|_publish_event|end_job|change_interval)\(\s*(?:c,\s+\S+,\s+\S+,\s+)?"([A-Z]\w+)"',
        SOURCES,
    )
    return {*called, *re.findall(r'\bEmitEvent\([^)]*?name="([A-Z]\w+)"', SOURCES)}


def test_every_event_is_documented_and_every_documented_event_exists() -> None:
    emitted, documented = emitted_events(), set(documented_events())
    assert len(emitted) > 15
    assert emitted - documented == set()
    assert {name for name in documented if f'"{name}"' not in SOURCES} == set()


def test_every_topic_is_documented() -> None:
    from ftd.transport.wire.topics import Topics

    topics = Topics(cluster="c")
    names = [topics.cluster_state, topics.events, topics.request, topics.command]
    of_a_node = (topics.node_state, topics.node_signal, topics.node_command, topics.node_echo, topics.chaos)
    names += [topic("<node>") for topic in of_a_node]
    names.append(topics.trace("<node>"))
    names.append(topics.reply("<client>"))
    names += [
        topics.leader,
        topics.leader_heartbeat,
        topics.journal,
        topics.coordinator_peer("<incarnation>"),
    ]
    assert [n for n in names if n.removeprefix(f"{topics.root}/") not in table_rows("events.md")] == []


@pytest.mark.parametrize("number", range(len(blocks("events.md", "json"))))
def test_the_examples_of_states_and_events_are_json(number: int) -> None:
    example = msgspec.json.decode(blocks("events.md", "json")[number])
    assert len(example) >= 10


def kind_of(example: dict[str, Any]) -> str:
    if "fault" in example:
        return "scenario"
    return "job" if "steps" in example else "daemon"


EXAMPLES = ("training.md", "configuration.md", "two-hosts.md", "chaos.md")
"""Pages whose TOML examples are complete files."""


def toml_examples() -> list[tuple[str, str]]:
    return [(page, text) for page in EXAMPLES for text in blocks(page, "toml")]


@pytest.mark.parametrize(("page", "text"), toml_examples())
def test_the_configuration_examples_are_accepted(page: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3cret\n")
    (tmp_path / "secret").chmod(0o600)
    example = tomllib.loads(text)
    match kind_of(example):
        case "scenario":
            assert len(parse_scenario(example, page).faults) == len(example["fault"])
        case "job":
            assert convert(example, JobFile, where=page).training.global_batch > 0
        case _:
            config = parse_daemon_config(example, directory=tmp_path)
            assert config.require_secret() == "s3cret"
            assert config.broker.username == "ftd"


def test_the_examples_cover_all_three_kinds() -> None:
    kinds = [kind_of(tomllib.loads(text)) for _, text in toml_examples()]
    assert set(kinds) == {"scenario", "job", "daemon"}


def fields_of(kind: type[Any]) -> list[str]:
    found: list[str] = []
    for field in msgspec.structs.fields(kind):
        found.append(field.encode_name)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            found += fields_of(field.type)
    return found


def test_every_field_of_the_files_is_documented() -> None:
    page = PAGES["configuration.md"]
    job = [key.name for table in job_tables() for key in table.keys]
    fields = [*fields_of(DaemonFile), *job, *(t.name.rpartition(".")[2] for t in job_tables())]
    assert len(fields) > 20
    assert [f for f in fields if not re.search(rf"\b{f}\b", page)] == []


@pytest.mark.parametrize("kind", [ScenarioTable, FaultTable, ExpectTable, ClusterSetup])
def test_every_key_of_a_scenario_is_documented(kind: type[Any]) -> None:
    documented = table_rows("chaos.md")
    assert [f.encode_name for f in msgspec.structs.fields(kind) if f.encode_name not in documented] == []


def test_every_fault_is_documented_and_every_word_of_a_scenario() -> None:
    section = PAGES["chaos.md"].split("### Faults")[1].split("| key of a fault")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)[1:] == list(FAULTS)
    for word in (*PHASES, *TIERS, *get_args(Service)):
        assert f"`{word}`" in PAGES["chaos.md"]


def entries_of(kind: type[Any]) -> set[str]:
    """Return the names of all fields of a profile, at any depth."""
    definitions = msgspec.json.schema(kind)["$defs"].values()
    return {name for definition in definitions for name in definition["properties"]}


@pytest.mark.parametrize("kind", [ProfileDocument, LayerTimesFile])
def test_every_field_of_a_profile_is_documented(kind: type[Any]) -> None:
    names = entries_of(kind)
    assert len(names) >= 5
    assert [name for name in names if f"`{name}`" not in PAGES["profiles.md"]] == []


def test_the_profile_in_the_documentation_is_one(tmp_path: Path) -> None:
    (example,) = blocks("profiles.md", "json")
    (tmp_path / "example.json").write_text(example)
    assert load_profile(tmp_path / "example.json").stage_devices == (1, 2, 4)


def test_timings_are_described_in_one_place() -> None:
    assert not {field.name for field in dataclasses.fields(Timing)} & table_rows("configuration.md").keys()


def test_every_timing_has_a_description_of_its_own() -> None:
    """A description that two share would be wrong for one of them, in seconds or in steps."""
    assert field_descriptions(Timing, shared=False).keys() == field_descriptions(Timing).keys()


def test_the_reference_of_all_keys_is_the_schema_s() -> None:
    """If they differ, run ``ftd config reference > docs/reference/keys.md``."""
    assert PAGES["keys.md"] == f"{render_daemon_reference()}\n{render_job_reference()}"


def test_every_key_of_a_job_file_has_a_meaning_and_a_value_to_show() -> None:
    for table in job_tables():
        assert table.meaning
        for key in table.keys:
            shown = key.required or key.default is not None or key.example is not None or key.kind == "table"
            assert key.meaning and shown, f"{table.name}.{key.name}"


def test_the_training_function_of_the_documentation_is_one(tmp_path: Path) -> None:
    script, _ = blocks("training.md", "python")
    job = next(t for t in blocks("training.md", "toml") if "[training]" in t)
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "train.toml").write_text(job)
    loaded = load_job(tmp_path / "train.toml")
    training = load_training(msgspec.convert(loaded.training, TrainingData))
    rows, target = training.dataset[0]
    for layer in training.layers:
        rows = layer(rows)
    assert training.loss(rows[None], target[None]).ndim == 0


def test_the_hook_of_the_documentation_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    _, script = blocks("training.md", "python")
    names: dict[str, Any] = {}
    exec(script, names)
    info = StepInfo(
        step=200,
        loss=1.5,
        weight=32.0,
        gradient_norm=1.0,
        learning_rate=0.1,
        skipped=False,
        metrics={},
        step_s=None,
        samples_per_s=None,
        tokens_per_s=None,
    )
    names["on_step"](info)
    assert capsys.readouterr().out == "step 200: loss 1.5000\n"


def test_the_storage_library_of_the_documentation_is_the_library(tmp_path: Path) -> None:
    (script,) = (text for text in blocks("checkpoints.md", "python") if "CheckpointStore" in text)
    header, payload = layer_state(0)
    names: dict[str, Any] = {"time": time, "header": header, "payload": payload}
    exec(script.replace("/checkpoints/gpt", str(tmp_path)), names)
    assert names["payload"].tobytes() == payload.tobytes()
    errors = PAGES["checkpoints.md"].partition("storage/errors.py")[2].partition("After each of these")[0]
    assert all(hasattr(storage.errors, name) for name in re.findall(r"`(\w+Error)`", errors))


def diffs_of_scripts() -> list[tuple[str, str]]:
    """Return (file name, diff) of each section of the page for scripts that has an example."""
    sections = re.split(r"^## ", PAGES["scripts.md"], flags=re.MULTILINE)
    found = [
        (file, diff)
        for section in sections
        for file in re.findall(r"^\[(\w+\.py)\]\(\.\./\.\./examples/scripts/", section, re.MULTILINE)
        for diff in re.findall(r"^```diff\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    ]
    assert len(found) == 4
    return found


@pytest.mark.parametrize(("file", "diff"), diffs_of_scripts())
def test_the_diffs_for_scripts_are_those_of_the_examples(file: str, diff: str) -> None:
    """Without the lines that a diff adds, the example does not know ftd."""
    script = (ROOT / "examples" / "scripts" / file).read_text().replace("given.name", '"my-run"')
    lines = script.splitlines()
    added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    kept = [line[1:] for line in diff.splitlines() if line.startswith(" ")]
    assert [line for line in (*added, *kept) if line not in lines] == []
    rest = "\n".join(line for line in lines if line not in added).split('"""', 2)[2]
    assert not re.search(r"\bftd\b|\bprotect\(", rest)


def test_the_commands_of_the_first_pages_exist() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    used = re.findall(
        r"^(?:[AB]\$ )?ftd ([a-z]+)(.*?)(?:#.*)?$", PAGES["README.md"] + PAGES["overview.md"], re.MULTILINE
    )
    assert {name for name, _ in used} >= {"local", "top", "report", "submit", "node", "coordinator", "plan"}
    for name, rest in used:
        assert name in commands
        known = {option for parameter in commands[name].params for option in parameter.opts}
        given = set(re.findall(r"--[a-z-]+", rest))
        subcommands = getattr(commands[name], "commands", {})
        for sub in set(rest.split()) & set(subcommands):
            known |= {option for parameter in subcommands[sub].params for option in parameter.opts}
        assert given <= known, f"ftd {name}{rest}"


def test_commands_within_sentences_exist() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    written = [(page, text) for page in PAGES for text in re.findall(r"`ftd ([a-z][^`]*)`", PAGES[page])]
    assert len(written) > 100
    for page, text in written:
        name, *rest = text.split()
        assert name in commands, f"{page}: ftd {text}"
        command = commands[name]
        if rest and rest[0] in getattr(command, "commands", {}):
            command = command.commands[rest[0]]
        known = {
            option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        given = {word for word in re.findall(r"--[a-z-]+", text) if word != "--help"}
        assert given <= known, f"{page}: ftd {text}"


def path_of(page: str) -> Path:
    return ROOT / page if (ROOT / page).exists() else next((ROOT / "docs").rglob(page))


def links(page: str) -> list[tuple[Path, str]]:
    """Return the targets of links within the project: file, and the heading's anchor or an empty text."""
    made = []
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if "://" not in target:
            name, _, anchor = target.partition("#")
            made.append(((path_of(page).parent / name).resolve() if name else path_of(page), anchor))
    return made


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings, made as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {title.replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", sorted(PAGES))
def test_links_lead_somewhere(page: str) -> None:
    assert [str(file) for file, _ in links(page) if not file.exists()] == []
    dead = [f"{file.name}#{anchor}" for file, anchor in links(page) if anchor and anchor not in anchors(file)]
    assert dead == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached, new = {"README.md"}, ["README.md"]
    while new:
        found = {file.name for file, _ in links(new.pop()) if file.name in PAGES} - reached
        reached |= found
        new += found
    assert {page.name for page in (ROOT / "docs").rglob("*.md")} - reached == set()
