"""Renders one event on one line, for the live view, ``ftd events`` and ``ftd story``."""

from typing import Any

from rich.text import Text

from ftd.observe.run_model import START
from ftd.observe.view.text import (
    EVENT_MARKS,
    LOG_TITLES,
    JsonMap,
    event_words,
    format_clock,
    format_duration,
    format_number,
    format_size,
    learning_rate_words,
    throughput_words,
)


def event_line(event: JsonMap, *, with_clock: bool = True) -> Text:
    """Return a coloured line such as ``12:00:01.123  ✖ node lost  node-2  last will after 3 ms``."""
    name = str(event.get("event", "?"))
    mark, style = EVENT_MARKS.get(name, ("·", "dim"))
    line = Text(no_wrap=True, overflow="ellipsis")
    if with_clock:
        line.append(f"{format_clock(event.get('at'))}  ", style="dim")
    line.append(f"{mark} {event_title(event)}", style=style)
    if event.get("node"):
        line.append(f"  {event['node']}", style="bold")
    if suffix := event_text(name, event):
        line.append(f"  {suffix}")
    return line


def event_title(event: JsonMap) -> str:
    """Return an event's name as words; the first plan of a job takes the path of a recovery, and is none."""
    name, details = str(event.get("event", "?")), event.get("details")
    recovery = details.get("recovery") if isinstance(details, dict) else None
    first = name == "RecoveryCompleted" and isinstance(recovery, dict) and recovery.get("cause") == START
    return "training started" if first else event_words(name)


def plain_event(event: JsonMap) -> str:
    """Return a line for a log or a pipe: without colours and symbols, and with the step in a fixed column."""
    name = str(event.get("event", "?"))
    step = event.get("step")
    where = f"step {step}" if step is not None else ""
    parts = [format_clock(event.get("at")), f"{where:<10}", name]
    if event.get("node"):
        parts.append(str(event["node"]))
    suffix = event_text(name, event)
    return " ".join(parts) + (f": {suffix}" if suffix else "")


def event_text(name: str, event: JsonMap) -> str:
    """Return the event's reason on one line; for a step and a recovery, include the numbers."""
    details: dict[str, Any] = event.get("details") or {}
    if name == "StepCommitted":
        speed = throughput_words(details.get("tokens_per_s"), details.get("samples_per_s"))
        learning_rate = learning_rate_words(details.get("learning_rate"))
        parts = [
            f"step {event.get('step')}  loss {format_number(details.get('loss'))}",
            speed,
            f"learning rate {learning_rate}" if learning_rate else "",
            "skipped" if details.get("skipped") else "",
        ]
        return ", ".join(filter(None, parts))
    reason = " ".join(str(event.get("reason") or "").split())
    if name in LOG_TITLES and details.get("log"):
        reason += f" ({LOG_TITLES[name]}: {details['log']} on {details.get('host')})"
    recovery: JsonMap | None = details.get("recovery")
    if name == "RecoveryCompleted" and recovery:
        reason += (
            f" ({format_duration(recovery['total_ms'] / 1000)}, {format_size(recovery['bytes_moved'])} moved)"
        )
    return reason
