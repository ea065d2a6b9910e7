"""The contract for other tools: generated from the models, equal to the documentation, and compatible."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from ftd.cli.main import app
from ftd.transport.wire import checking
from ftd.transport.wire.catalogue import EVENTS, SEVERITIES, severity_of
from ftd.transport.wire.compatibility import breaking_changes
from ftd.transport.wire.contract import encode_contract
from ftd.transport.wire.contract_examples import DETAILS, EXAMPLES
from ftd.transport.wire.contract_file import FILE, read_shipped_contract
from ftd.transport.wire.event_details import Details
from ftd.transport.wire.public import (
    AnyRequest,
    ChaosRequest,
    EventMessage,
    TraceRequest,
    decode_json,
    event_message,
)
from statemachine.effects import EmitEvent
from tests.helpers.contract_schemas import document, problem_of, validator

Json = dict[str, Any]
RELEASED = Path(__file__).with_name("contract-2.0.0.json")
PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "events.md").read_text(encoding="utf-8")
WRITE = "python -m ftd.transport.wire.contract writes ftd/transport/wire/asyncapi.json"


def test_the_shipped_contract_is_made_of_the_models() -> None:
    assert read_shipped_contract() == encode_contract(), WRITE


def test_the_command_prints_it(tmp_path: Path) -> None:
    printed = CliRunner().invoke(app, ["contract"])
    assert printed.exit_code == 0
    assert printed.output.encode() == FILE.read_bytes()
    kept = tmp_path / "kept.json"
    kept.write_text(printed.output)
    assert CliRunner().invoke(app, ["contract", "--against", str(kept)]).exit_code == 0


ALLOWED_BREAKS: set[str] = set()
"""Breaking changes since the released contract that were made on purpose."""


def test_the_released_contract_is_not_broken() -> None:
    problems = breaking_changes(msgspec.json.decode(RELEASED.read_bytes()), document())
    assert set(problems) == ALLOWED_BREAKS, "this breaks subscribers; keep it, or begin ftd/v3"


@pytest.mark.parametrize("name", EVENTS)
def test_every_event_has_an_example_that_its_schema_accepts(name: str) -> None:
    message = document()["components"]["messages"][name]
    for example in message["examples"]:
        payload = msgspec.json.encode(example["payload"])
        assert problem_of("ftd/v2/lab/events", payload) is None
        assert checking.problem_of_details(name, msgspec.json.encode(DETAILS.get(name, {}))) is None
        assert decode_json(payload, EventMessage).event == name


def test_the_other_messages_have_examples_that_we_can_decode() -> None:
    for name, example in EXAMPLES.items():
        validator(name)(example)
        if name.endswith("Request"):
            into: Any = {"ChaosRequest": ChaosRequest, "TraceRequest": TraceRequest}.get(name, AnyRequest)
            decode_json(msgspec.json.encode(example), into)
    checking.encode_state(
        EXAMPLES["ClusterState"]
    )  # It raises in tests if the state is not as its model says.


def test_a_schema_rejects_other_messages() -> None:
    example = copy.deepcopy(document()["components"]["messages"]["NodeLost"]["examples"][0]["payload"])
    example["details"]["how"] = 3
    assert "how" in str(problem_of("ftd/v2/lab/events", msgspec.json.encode(example)))
    assert "Nothing" in str(problem_of("ftd/v2/lab/events", b'{"event": "Nothing"}'))
    assert problem_of("ftd/v2/lab/else", b"{}") is not None


def every_reference(value: Any) -> list[str]:
    if isinstance(value, dict):
        found = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return found + [one for below in value.values() for one in every_reference(below)]
    return [one for below in value for one in every_reference(below)] if isinstance(value, list) else []


def test_every_reference_can_be_resolved() -> None:
    references = every_reference(document())
    assert len(references) > 100
    for reference in set(references):
        at: Any = document()
        for level in reference.removeprefix("#/").split("/"):
            at = at[level]


def test_descriptions_come_from_the_models() -> None:
    schemas = document()["components"]["schemas"]
    assert (
        "below 1 while the node is a straggler."
        in schemas["NodeSummary"]["properties"]["speed"]["description"]
    )
    assert schemas["StragglerRecovered"]["properties"]["speed"]["description"].startswith("Speed relative")
    assert "additionalProperties" not in schemas["NodeLost"]
    assert schemas["StopRequest"]["additionalProperties"] is False


# --- agreement with docs/reference/events.md -------------------------------------------------------------------


def documented() -> dict[str, list[str]]:
    rows = re.findall(r"^\| `([A-Z]\w+)` \|(.*)\|$", PAGE, re.MULTILINE)
    return {name: [cell.strip() for cell in row.split(" | ")] for name, row in rows}


def test_the_page_has_the_same_events_with_the_same_severities() -> None:
    page = {name: cells[0] for name, cells in documented().items()}
    assert page == {name: severity_of(name) for name in EVENTS}
    assert set(page.values()) == set(SEVERITIES)


def fields(kind: type[Details]) -> list[str]:
    return [f.name for f in msgspec.structs.fields(kind) if f.name != "suppressed"]


@pytest.mark.parametrize("name", EVENTS)
def test_the_page_has_every_field(name: str) -> None:
    said = documented()[name][-1]
    if "the same" in said or "as `RolledBack`" in said:
        return
    assert [field for field in fields(EVENTS[name]) if f"`{field}`" not in said] == []


# --- the edge ------------------------------------------------------------------------------------------


def event(name: str, **details: Any) -> EventMessage:
    effect = EmitEvent(cause="c-1", name=name, reason="r", node="n", details=details)
    return event_message(effect, monotonic=1.0)


def test_an_event_has_a_unique_id_and_the_severity_of_its_name() -> None:
    first, second = event("ClusterPaused"), event("ClusterPaused")
    assert first.id != second.id
    assert first.severity == "critical"
    assert event("SomethingNew").severity == "warning"


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (event("NodeFenced", incarnation="x"), "incarnation"),
        (event("NodeFenced", incarnation=1, colour="red"), "colour"),
        (event("NodeFenced"), "incarnation"),
        (event("SomethingNew"), "SomethingNew"),
    ],
)
def test_a_mismatch_is_logged_and_published_nevertheless(
    message: EventMessage, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError, match=says):
        checking.encode_event(message)
    problems: list[str] = []
    monkeypatch.setattr(checking, "on_mismatch", problems.append)
    assert decode_json(checking.encode_event(message), EventMessage) == message
    assert len(problems) == 1


def test_an_invalid_state_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match="step"):
        checking.encode_state({**EXAMPLES["ClusterState"], "step": "ten"})
    problems: list[str] = []
    monkeypatch.setattr(checking, "on_mismatch", problems.append)
    assert b'"ten"' in checking.encode_state({**EXAMPLES["ClusterState"], "step": "ten"})
    assert len(problems) == 1


# --- compatibility -------------------------------------------------------------------------------------


def schema(contract: Json, name: str) -> Json:
    return dict.__getitem__(contract["components"]["schemas"], name)  # type: ignore[no-any-return]


def no_events(c: Json) -> None:
    del c["channels"]["events"]


def no_node_lost(c: Json) -> None:
    del c["channels"]["events"]["messages"]["NodeLost"]


def no_how(c: Json) -> None:
    del schema(c, "NodeLost")["properties"]["how"]


def how_is_a_number(c: Json) -> None:
    schema(c, "NodeLost")["properties"]["how"] = {"type": "integer"}


def step_may_be_null(c: Json) -> None:
    schema(c, "ClusterState")["properties"]["step"] = {"anyOf": [{"type": "integer"}, {"type": "null"}]}


def how_may_be_missing(c: Json) -> None:
    schema(c, "NodeLost")["required"].remove("how")


def never_silence(c: Json) -> None:
    schema(c, "NodeLost")["properties"]["how"]["enum"].remove("silence")


def tame_severity(c: Json) -> None:
    payload = c["components"]["messages"]["ClusterPaused"]["payload"]
    payload["allOf"][1]["properties"]["severity"]["const"] = "info"


def no_snapshot_bytes(c: Json) -> None:
    del schema(c, "SnapshotState")["properties"]["size_bytes"]


def no_devices_of_a_stage(c: Json) -> None:
    del schema(c, "StageData")["properties"]["devices"]


def no_node_speed(c: Json) -> None:
    del schema(c, "NodeSummary")["properties"]["speed"]


def drain_needs_a_reason(c: Json) -> None:
    drain = schema(c, "DrainRequest")
    drain["properties"]["why"] = {"type": "string"}
    drain["required"].append("why")


def drain_without_node(c: Json) -> None:
    del schema(c, "DrainRequest")["properties"]["node"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (no_events, "the topic ftd/v2/{cluster}/events was removed: subscribers receive nothing"),
        (no_node_lost, "NodeLost on ftd/v2/{cluster}/events was removed"),
        (no_how, "NodeLost.details.how was removed: subscribers that read it find nothing"),
        (how_is_a_number, "NodeLost.details.how was string and may now be integer"),
        (step_may_be_null, "ClusterState.step was integer and may now be null"),
        (how_may_be_missing, "NodeLost.details.how may now be missing"),
        (never_silence, "NodeLost.details.how is never 'silence' any more"),
        (tame_severity, "ClusterPaused.severity is never 'critical' any more"),
        (no_snapshot_bytes, "ClusterState.snapshot.size_bytes was removed"),
        (no_devices_of_a_stage, "PlanChosen.details.pipelines[].stages[].devices was removed"),
        (no_node_speed, "ClusterState.nodes[].speed was removed"),
        (drain_needs_a_reason, "DrainRequest.why must now be given: requests without it are rejected"),
        (drain_without_node, "DrainRequest.node was removed: requests with it are rejected"),
    ],
)
def test_breaking_changes_are_reported(change: Callable[[Json], None], says: str) -> None:
    changed = copy.deepcopy(document())
    change(changed)
    problems = breaking_changes(document(), changed)
    assert [problem for problem in problems if problem.startswith(says)], problems


def test_additions_break_nobody() -> None:
    """In the opposite direction, only the removal of what was added breaks clients."""
    earlier = copy.deepcopy(document())
    for change in (no_node_lost, no_snapshot_bytes, no_devices_of_a_stage, no_node_speed):
        change(earlier)
    schema(earlier, "EventMessage")["properties"].pop("id")
    assert breaking_changes(earlier, document()) == []
    assert breaking_changes(document(), document()) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "truncated"),
        ("[]", "parts of one are missing"),
        ("{}", "parts of one are missing"),
        ('{"asyncapi": "2.6.0"}', "no AsyncAPI 3 document"),
        ('{"asyncapi": "3.0.0"}', "parts of one are missing"),
    ],
)
def test_a_file_that_is_no_contract_is_rejected(tmp_path: Path, text: str, why: str) -> None:
    from ftd.errors import ConfigurationError
    from ftd.transport.wire.contract_file import read_contract

    (tmp_path / "kept.json").write_text(text)
    with pytest.raises(ConfigurationError, match=f"is no contract of ftd: .*{why}"):
        read_contract(tmp_path / "kept.json")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_contract(tmp_path / "missing.json")
