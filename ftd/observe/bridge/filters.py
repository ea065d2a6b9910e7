"""Filters of ``ftd bridge``: ``severity>=warning and event=Node*,Trainer* and node!=node-9``.

A filter consists of terms joined by ``and``. ``event`` and ``node`` are compared with shell patterns (``*``
and ``?``), of which any may match if there are several, separated by commas. ``severity`` is compared with
one name, by equality or by rank. An event without a node has an empty node name.
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
    """Terms that must all match; a filter without terms matches every event."""

    terms: tuple[_Term, ...] = ()

    def matches(self, event: EventMessage) -> bool:
        return all(term.matches(event) for term in self.terms)


def parse_filter(text: str) -> EventFilter:
    """Parse a filter.

    :raises ConfigurationError: the text is no filter; the message says what is wrong and gives an example.
    """
    if not text.strip():
        return EventFilter()
    return EventFilter(terms=tuple(_term(part) for part in re.split(r"\s+and\s+", text.strip())))


def _term(text: str) -> _Term:
    found = _TERM.fullmatch(text)
    if found is None:
        raise ConfigurationError(f"{text!r} is not a term of a filter", field=_OPTION, remedy=_REMEDY)
    field, operator, values = found[1], found[2], tuple(found[3].split(","))
    if field not in ("event", "node", "severity"):
        problem = f"cannot filter by {field!r}; use event, node or severity"
        raise ConfigurationError(problem, field=_OPTION, remedy=_REMEDY)
    if operator == ">=" and (field != "severity" or len(values) != 1):
        raise ConfigurationError(
            f"{text!r}: >= needs severity and a single value", field=_OPTION, remedy=_REMEDY
        )
    for value in values:
        if field == "severity" and value not in SEVERITIES:
            problem = f"unknown severity {value!r}; use one of {', '.join(SEVERITIES)}"
            raise ConfigurationError(problem, field=_OPTION, remedy=_REMEDY)
        if field == "event" and not any(fnmatchcase(name, value) for name in EVENTS):
            problem = f"no event is named {value!r} (docs/reference/events.md has them all)"
            raise ConfigurationError(problem, field=_OPTION, remedy=_REMEDY)
    return _Term(field=field, operator=operator, values=values)
