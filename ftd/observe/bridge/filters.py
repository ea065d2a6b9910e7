"""Which events are handed on: ``severity>=warning and event=Node*,Trainer* and node!=node-9``.

Terms joined by ``and``. ``event`` and ``node`` are compared with patterns (``*`` and ``?``), any of those
with commas between them; ``severity`` with one word, or by rank. An event without a node has the empty name.
"""

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ftd.errors import ConfigurationError
from ftd.transport.wire.catalogue import EVENTS, SEVERITIES
from ftd.transport.wire.public import EventMessage

_TERM = re.compile(r"\s*(\w+)\s*(>=|!=|=)\s*([^\s=<>!]+)\s*")
_REMEDY = "for example: severity>=warning and event=Node*,TrainerLost and node!=node-9"
_OPTION = "--filter"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Term:
    field: str
    operator: str
    values: tuple[str, ...]

    def matches(self, event: EventMessage) -> bool:
        if self.operator == ">=":
            return SEVERITIES.index(event.severity) >= SEVERITIES.index(self.values[0])
        words = {"event": event.event, "node": event.node or "", "severity": event.severity}
        found = any(fnmatchcase(words[self.field], value) for value in self.values)
        return found is (self.operator == "=")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """All of its terms must hold; one without terms lets everything through."""

    terms: tuple[_Term, ...] = ()

    def matches(self, event: EventMessage) -> bool:
        return all(term.matches(event) for term in self.terms)


def parse_filter(text: str) -> EventFilter:
    """:raises ConfigurationError: names what is wrong, and what would do."""
    if not text.strip():
        return EventFilter()
    return EventFilter(terms=tuple(_term(part) for part in re.split(r"\s+and\s+", text.strip())))


def _term(text: str) -> _Term:
    found = _TERM.fullmatch(text)
    if found is None:
        raise ConfigurationError(f"{text!r} is no term of a filter", field=_OPTION, remedy=_REMEDY)
    field, operator, values = found[1], found[2], tuple(found[3].split(","))
    if field not in ("event", "node", "severity"):
        problem = f"{field!r} cannot be filtered by; event, node and severity can"
        raise ConfigurationError(problem, field=_OPTION, remedy=_REMEDY)
    if operator == ">=" and (field != "severity" or len(values) != 1):
        raise ConfigurationError(
            f"{text!r}: >= goes with severity and one word", field=_OPTION, remedy=_REMEDY
        )
    for value in values:
        if field == "severity" and value not in SEVERITIES:
            problem = f"there is no severity {value!r}; there are {', '.join(SEVERITIES)}"
            raise ConfigurationError(problem, field=_OPTION, remedy=_REMEDY)
        if field == "event" and not any(fnmatchcase(name, value) for name in EVENTS):
            problem = f"no event is named {value!r} (docs/reference/events.md has them all)"
            raise ConfigurationError(problem, field=_OPTION, remedy=_REMEDY)
    return _Term(field=field, operator=operator, values=values)
