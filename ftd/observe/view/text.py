"""The words, numbers, symbols and colours that all views share.

Pipelines come as the public JSON has them: ``{"stages": [{"first_layer", "end_layer", "devices"}],
"microbatches"}`` with devices named ``node/index``.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

JsonMap = Mapping[str, Any]

PHASE_STYLES = {
    "WAITING": "cyan",
    "RUNNING": "green",
    "QUIESCING": "yellow",
    "RECOVERING": "magenta",
    "PAUSED": "bold yellow",
    "FINISHED": "bold green",
    "FAILED": "bold red",
    "UNREACHABLE": "bold red",
}

NODE_MARKS = {
    "HEALTHY": ("●", "green"),
    "SNAP": ("◍", "cyan"),
    "COMPLETED": ("◉", "blue"),
    "UNHEALTHY": ("▲", "yellow"),
    "OFFLINE": ("✖", "red"),
}

EVENT_MARKS = {
    "NodeLost": ("✖", "bold red"),
    "TrainerLost": ("✖", "red"),
    "NodeFenced": ("✖", "red"),
    "NodeRejected": ("✖", "yellow"),
    "JobFailed": ("✖", "bold red"),
    "TakeoverRejected": ("✖", "bold red"),
    "ReplicasDiverged": ("✖", "bold red"),
    "ChaosInjected": ("↯", "bold yellow"),
    "ChaosRejected": ("↯", "yellow"),
    "BrokerLost": ("▲", "yellow"),
    "LeaderLost": ("▲", "yellow"),
    "StandbyIneligible": ("▲", "yellow"),
    "ClusterPaused": ("▮", "bold yellow"),
    "PeerSuspected": ("▲", "yellow"),
    "OptimizerReplicaDiverged": ("▲", "yellow"),
    "UpdateSkipped": ("▲", "yellow"),
    "StragglerDetected": ("▲", "yellow"),
    "MessageRejected": ("▲", "yellow"),
    "NodeJoined": ("✚", "bold green"),
    "NodeRecovered": ("✚", "green"),
    "StragglerRecovered": ("✚", "green"),
    "RecoveryCompleted": ("✔", "bold green"),
    "JobFinished": ("✔", "bold green"),
    "BrokerRestored": ("✔", "green"),
    "LeaderElected": ("✔", "green"),
}
"""Every other event gets a dim dot."""

QUIET_EVENTS = frozenset({"StepCommitted", "MessageIgnored"})
"""Too many to list one by one where people look."""

ROUTINE_EVENTS = frozenset(
    {
        "Evaluated",
        "SnapshotCompleted",
        "SnapshotIntervalChosen",
        "CheckpointStarted",
        "CheckpointCompleted",
        "CheckpointExported",
    }
)
"""What comes again and again while all is well."""

TIER_WORDS = {
    "replica": "live replicas, of optimizer state also from those of lost owners",
    "memory": "a snapshot in the nodes' memory",
    "decoded": "a snapshot in the nodes' memory, parts of it decoded",
    "buddy": "a snapshot in the nodes' memory, parts of it from copies at buddies",
    "persistent": "a persistent checkpoint",
}
"""Where state came from, if not from live replicas alone."""

CAUSE_WORDS = {
    "start": "started",
    "node_lost": "lost",
    "trainer_lost": "lost a trainer",
    "connection_lost": "a connection broke",
    "node_joined": "joined",
    "node_returned": "came back",
    "node_drained": "drained",
    "speed_changed": "changed speed",
    "protection_changed": "another protection",
    "resumed": "enough nodes again",
}

HOW_WORDS = {
    "last_will": "last will",
    "no_answer": "no answer",
    "goodbye": "said goodbye",
    "exited": "process exit",
    "raised": "exception",
    "hung": "no progress",
    "peer": "a peer's word",
}

_NODE_COLOURS = (
    "#5fafff",
    "#ffaf5f",
    "#87d787",
    "#d787d7",
    "#d7d75f",
    "#5fd7d7",
    "#ff8787",
    "#afafff",
    "#d7af87",
    "#87d7af",
    "#ff87d7",
    "#bcbcbc",
)


class NodeColours:
    """A colour for each node that stays its own for the whole run, also after the node is gone."""

    def __init__(self) -> None:
        self._given: dict[str, str] = {}

    def of(self, node: str) -> str:
        return self._given.setdefault(node, _NODE_COLOURS[len(self._given) % len(_NODE_COLOURS)])


def event_words(name: str) -> str:
    """``NodeLost`` → ``node lost``."""
    return re.sub(r"(?<!^)(?=[A-Z])", " ", name).lower()


def how_words(how: str | None) -> str:
    """How a failure was noticed, for people; ``–`` where nobody said."""
    return HOW_WORDS.get(how, how.replace("_", " ")) if how else "–"


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {nouns or noun + 's'}"


def waiting_words(state: JsonMap) -> str:
    """What has to happen next: of a pause, why there is one; empty while nothing is waited for."""
    waiting = str(state.get("waiting_for") or "")
    return waiting if state.get("phase") == "PAUSED" or not waiting else f"waiting for {waiting}"


def planning_words(state: JsonMap) -> str:
    """How far the coordinator is with the plans for all numbers of nodes; empty when it is done."""
    planning: JsonMap | None = state.get("planning")
    return f"planning {planning['done']} of {planning['total']}" if planning else ""


def leader_words(state: JsonMap, most: int = 10_000) -> str:
    """Which coordinator leads, and who would next; empty where nobody does.

    :param most: characters; where names do not fit, numbers stand for them.
    """
    if not (leader := state.get("leader")):
        return ""
    standbys = [str(name) for name in state.get("standbys") or ()]
    behind = f"standing by: {', '.join(standbys)}" if standbys else "nobody stands by"
    ineligible = state.get("ineligible") or {}
    beside = f"; not able to take over: {', '.join(map(str, ineligible))}" if ineligible else ""
    told = f"{leader} leads, {behind}{beside}"
    if len(told) > most:
        told = f"{leader} leads, standing by: {len(standbys)}"
        told += f"; not able to take over: {len(ineligible)}" if ineligible else ""
    return told if len(told) <= most else f"{told[: most - 1]}…"


def ineligible_words(state: JsonMap) -> list[str]:
    """A sentence for each coordinator that is there and would not take over."""
    return [f"{name} will not take over: {why}" for name, why in (state.get("ineligible") or {}).items()]


def layer_range(first_layer: int, end_layer: int) -> str:
    """The half-open range as people read it, both ends included: ``0–3``."""
    return str(first_layer) if end_layer - first_layer == 1 else f"{first_layer}–{end_layer - 1}"


def format_size(size_bytes: float) -> str:
    """``0 B``, ``640 KiB``, ``3.2 MiB``."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_milliseconds(value_ms: float | None) -> str:
    """For a column headed ``ms``: whole from 10 on, one decimal below, ``–`` where unknown."""
    if value_ms is None:
        return "–"
    return f"{value_ms:.0f}" if value_ms >= 9.95 else f"{value_ms:.1f}"


def format_duration(value_s: float) -> str:
    """``98 ms``, ``1.24 s``, ``12.4 s``, ``2:05``, ``3:04:05``."""
    if value_s < 1:
        return f"{value_s * 1000:.0f} ms"
    if value_s < 60:
        return f"{value_s:.2f} s" if value_s < 10 else f"{value_s:.1f} s"
    minutes, seconds = divmod(round(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def format_number(value: float | None, digits: int = 4) -> str:
    """A loss or a rate; ``–`` where there is none (yet) and the word itself where it is not finite."""
    if value is None:
        return "–"
    return f"{value:.{digits}f}" if math.isfinite(value) else str(value)


def format_rate(value: float) -> str:
    """Something per second: ``0.52``, ``7.3``, ``320``, ``51,200``."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def throughput_words(tokens_per_s: float | None, samples_per_s: float | None) -> str:
    """``51,200 tokens/s``; samples where the loss has no tokens, and nothing where neither is known."""
    if tokens_per_s:
        return f"{format_rate(tokens_per_s)} tokens/s"
    return f"{format_rate(samples_per_s)} samples/s" if samples_per_s else ""


def learning_rate_words(value: float | None) -> str:
    """``0.003``, ``3e-05``; empty where it is unknown, which events call 0."""
    return f"{value:.3g}" if value else ""


def metrics_words(metrics: Mapping[str, float | None] | None) -> str:
    """``accuracy 0.2500, f1 0.3000``; empty where there are none."""
    return ", ".join(f"{name} {format_number(value)}" for name, value in (metrics or {}).items())


def format_clock(at: str | None) -> str:
    """The local wall-clock time of an ISO-8601 stamp, to the millisecond."""
    if not at:
        return "--:--:--.---"
    moment = datetime.fromisoformat(at).astimezone()
    return f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03}"


def single_device(pipelines: Iterable[JsonMap]) -> bool:
    """True where every node in use shows one device: then ``/0`` says nothing and is left out."""
    return all(d.endswith("/0") for p in pipelines for s in p["stages"] for d in s["devices"])


def device_names(devices: Sequence[str], *, short: bool) -> str:
    """``node-0`` (short), ``node-0/1``, ``node-0/0,1``."""
    by_node: dict[str, list[str]] = {}
    for device in devices:
        node, _, index = device.rpartition("/")
        by_node.setdefault(node, []).append(index)
    if short:
        return " ".join(by_node)
    return " ".join(f"{node}/{','.join(indices)}" for node, indices in by_node.items())


def stage_node(stage: JsonMap) -> str:
    """The node whose devices run this stage (a stage never spans nodes)."""
    return str(stage["devices"][0]).rpartition("/")[0]


def pipeline_name(index: int) -> str:
    """A, B, …, Z, then A1, B1, …: short enough for a column."""
    letter = chr(ord("A") + index % 26)
    return letter if index < 26 else f"{letter}{index // 26}"
