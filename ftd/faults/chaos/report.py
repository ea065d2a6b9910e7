"""The result of a scenario as lines for people, and as JSON and JUnit XML for machines."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree

from ftd.faults.chaos.player import ScenarioResult

_EVENT_FIELDS = ("event", "node", "generation", "step", "reason")
_HIDDEN_EVENTS = ("TrainerStarted", "MessageIgnored")
_XML_FORBIDDEN = {code: None for code in (*range(9), 11, 12, *range(14, 32))}


def render_text(played: ScenarioResult) -> str:
    """Return one line for each fault and expectation: whether it was met, and the measured value."""
    lines = []
    for verdict in played.verdicts:
        of = f"{verdict.fault_id}: " if verdict.fault_id else ""
        lines.append(f"{'✓' if verdict.met else '✗'} {of}{verdict.description}: {verdict.measured}")
    met = sum(verdict.met for verdict in played.verdicts)
    simulated = played.simulated
    if simulated is not None:
        lines += [f"– {fault}: left out: {why}" for fault, why in simulated.skipped]
        lines += [f"✗ {problem}" for problem in simulated.problems]
    clock = " of virtual time" if simulated is not None else ""
    lines.append(
        f"{'passed' if played.met else 'FAILED'} {_name(played)}: {met} of {len(played.verdicts)} met "
        f"in {played.took_s:.1f} s{clock}, ended by: {played.ended_by}"
    )
    return "\n".join(lines)


def build_document(played: ScenarioResult) -> dict[str, Any]:
    """Return everything that was found, and the events that it was found from."""
    record = played.record
    return {
        "scenario": played.scenario.name,
        "purpose": played.scenario.purpose,
        "seed": played.scenario.seed,
        "simulated": None if played.simulated is None else asdict(played.simulated),
        "met": played.met,
        "took_s": round(played.took_s, 3),
        "ended_by": played.ended_by,
        "steps": record.commits,
        "faults": [
            {
                "id": one.fault.id,
                "description": str(one.fault),
                "at_s": round(one.at_s, 3),
                "nodes": list(one.nodes),
                "problem": one.problem,
            }
            for one in record.injected.values()
        ],
        "expectations": [
            {
                "fault": one.fault_id,
                "description": one.description,
                "met": one.met,
                "measured": one.measured,
            }
            for one in played.verdicts
        ],
        "events": [
            {"at_s": round(at_s, 3), **{key: e.get(key) for key in _EVENT_FIELDS}}
            for at_s, e in record.events
        ],
    }


def render_junit(all_played: Sequence[ScenarioResult]) -> bytes:
    """Return one suite for each scenario, with one case for each fault and each expectation."""
    root = ElementTree.Element("testsuites")
    for played in all_played:
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=_name(played),
            failures=str(sum(not verdict.met for verdict in played.verdicts)),
            time=f"{played.took_s:.3f}",
        )
        problems = played.simulated.problems if played.simulated is not None else ()
        skipped = played.simulated.skipped if played.simulated is not None else ()
        suite.set("tests", str(len(played.verdicts) + len(problems) + len(skipped)))
        _add_special_cases(suite, "error", [("invariants", problem) for problem in problems])
        _add_special_cases(suite, "skipped", skipped)
        for verdict in played.verdicts:
            owner = f"{_name(played)}.{verdict.fault_id}" if verdict.fault_id else _name(played)
            case = ElementTree.SubElement(
                suite, "testcase", classname=_printable(owner), name=_printable(verdict.description), time="0"
            )
            if not verdict.met:
                failure = ElementTree.SubElement(case, "failure", message=_printable(verdict.measured))
                failure.text = _printable(f"{verdict.description}: {verdict.measured}")
        ElementTree.SubElement(suite, "system-out").text = _printable("\n".join(_event_lines(played)))
    ElementTree.indent(root)
    written: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return written + b"\n"


def _add_special_cases(suite: ElementTree.Element, kind: str, cases: Sequence[tuple[str, str]]) -> None:
    """Add cases that neither passed nor failed, with the reason."""
    suite.set({"error": "errors"}.get(kind, kind), str(len(cases)))
    for what, why in cases:
        attributes = {"classname": suite.get("name", ""), "name": _printable(what), "time": "0"}
        case = ElementTree.SubElement(suite, "testcase", attributes)
        ElementTree.SubElement(case, kind, message=_printable(why))


def _name(played: ScenarioResult) -> str:
    """Return the scenario's name, marked so that nobody takes a simulated result for a real one."""
    simulated = played.simulated
    return played.scenario.name + (f" (simulated, seed {simulated.seed})" if simulated is not None else "")


def encode_documents(all_played: Iterable[ScenarioResult]) -> bytes:
    """Return the JSON file: a list with one entry for each scenario."""
    return json.dumps([build_document(played) for played in all_played], indent=1).encode() + b"\n"


def _event_lines(played: ScenarioResult) -> list[str]:
    return [
        f"{at_s:8.2f} s {e['event']} {e.get('node') or ''} {e.get('reason') or ''}".rstrip()
        for at_s, e in played.record.events
        if e["event"] not in _HIDDEN_EVENTS
    ]


def _printable(text: str) -> str:
    """Remove control characters, which XML does not allow and which a trainer's last output may contain."""
    return text.translate(_XML_FORBIDDEN)
