"""Texts, number formats, symbols and colours that all views share.

Pipelines have the form of the public JSON: ``{"stages": [{"first_layer", "end_layer", "devices"}],
"microbatches"}``, with devices named ``node/index``.
"""

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
    "NodeQuarantined": ("✖", "bold red"),
    "QuarantineSkipped": ("▲", "yellow"),
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
    "LossSpiked": ("▲", "yellow"),
    "StragglerDetected": ("▲", "yellow"),
    "MessageRejected": ("▲", "yellow"),
    "NodeJoined": ("✚", "bold green"),
    "NodeRecovered": ("✚", "green"),
    "NodeReadmitted": ("✚", "green"),
    "StragglerRecovered": ("✚", "green"),
    "RecoveryCompleted": ("✔", "bold green"),
    "JobFinished": ("✔", "bold green"),
    "BrokerRestored": ("✔", "green"),
    "LeaderElected": ("✔", "green"),
}
"""Symbol and style of an event; all others have a dim dot."""

QUIET_EVENTS = frozenset({"StepCommitted", "MessageIgnored"})
"""Events that are too frequent to be listed."""

ROUTINE_EVENTS = frozenset(
    {
        "Evaluated",
        "SnapshotCompleted",
        "SnapshotIntervalChosen",
        "CheckpointStarted",
        "CheckpointCompleted",
        "CheckpointIntervalChosen",
        "CheckpointExported",
    }
)
"""Events that recur while all is well."""

TIER_WORDS = {
    "replica": "live replicas, and AOR replicas of the optimizer state of lost owners",
    "memory": "a snapshot in the nodes' memory",
    "decoded": "a snapshot in the nodes' memory, with lost parts decoded",
    "buddy": "a snapshot in the nodes' memory, with lost parts from replica peers",
    "persistent": "a persistent checkpoint",
}
"""Source of the state, if it did not come only from live replicas."""

CAUSE_WORDS = {
    "start": "started",
    "node_lost": "lost",
    "trainer_lost": "lost a trainer",
    "connection_lost": "lost a connection",
    "corruption": "had silent corruption",
    "node_joined": "joined",
    "node_returned": "came back",
    "node_drained": "drained",
    "speed_changed": "changed speed",
    "protection_changed": "changed its protection",
    "resumed": "ended the pause",
    "loss_spike": "had a spike of the loss",
}
"""Predicates of sentences about the nodes of a recovery, or about the cluster."""

HOW_WORDS = {
    "last_will": "last will",
    "no_answer": "no answer",
    "goodbye": "left",
    "exited": "process exit",
    "raised": "exception",
    "hung": "no progress",
    "peer": "a peer's report",
}

LOG_TITLES = {"TrainerLost": "full output", "NodeLost": "its log"}
"""Title of the log that the event of a loss names: a trainer's output is in the log of its node."""

CHANGE_WORDS = {
    "prepared": "once the job was built there",
    "request": "as requested",
    "measured": "as measured",
}
"""Circumstances of a change that nobody had to notice, since it is no failure, by ``detected_how``."""

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
    """A colour for each node that stays the same for the whole run, even after the node is lost."""

    def __init__(self) -> None:
        self._given: dict[str, str] = {}

    def of(self, node: str) -> str:
        return self._given.setdefault(node, _NODE_COLOURS[len(self._given) % len(_NODE_COLOURS)])


def event_words(name: str) -> str:
    """Return an event's name as words: ``NodeLost`` → ``node lost``."""
    return re.sub(r"(?<!^)(?=[A-Z])", " ", name).lower()


def how_words(how: str | None) -> str:
    """Return how a failure was noticed; ``–`` if unknown, or if there was none."""
    return HOW_WORDS.get(how, how.replace("_", " ")) if how and how not in CHANGE_WORDS else "–"


def notice_words(how: str | None) -> str:
    """Return how a failure was noticed, or how a change came about, as the end of a sentence with its
    punctuation; empty if unknown.
    """
    if how in CHANGE_WORDS:
        return f", {CHANGE_WORDS[how]}"
    return f"; noticed by: {how_words(how)}" if how else ""


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {nouns or noun + 's'}"


def startup_of(state: JsonMap) -> JsonMap | None:
    """Return the progress of the start; ``None`` if nothing is starting, or nobody coordinates it."""
    return state.get("startup") if state.get("phase") != "UNREACHABLE" else None


def startup_words(state: JsonMap) -> str:
    """Return how far the start of the nodes or of a job is; empty if nothing is starting."""
    startup = startup_of(state)
    return f"{startup['text']} (stage {startup['number']} of {startup['stages']})" if startup else ""


def waiting_words(state: JsonMap) -> str:
    """Return how far the start is, what the cluster waits for, or the reason of a pause; empty if it does not
    wait.
    """
    if startup := startup_words(state):
        return startup
    waiting = str(state.get("waiting_for") or "")
    return waiting if state.get("phase") == "PAUSED" or not waiting else f"waiting for {waiting}"


def drain_words(state: JsonMap) -> list[str]:
    """Return a sentence for each node that is to leave and has to stay for now."""
    nodes: JsonMap = state.get("nodes") or {}
    waiting = {
        name: node["drain_waits"]
        for name, node in nodes.items()
        if node.get("drain_waits") and node["state"] != "OFFLINE"
    }
    return [f"{name} waits until a plan without it exists: {reason}" for name, reason in waiting.items()]


def aside_words(state: JsonMap) -> list[str]:
    """Return a sentence for each node that is set aside: why, and how it is readmitted."""
    nodes: JsonMap = state.get("nodes") or {}
    aside = {name: node["quarantine"] for name, node in nodes.items() if node.get("quarantine")}
    return [f"{name}: {one['reason']}; to readmit it: {one['readmit']}" for name, one in aside.items()]


def planning_words(state: JsonMap) -> str:
    """Return how many of the plans for all numbers of nodes are ready; empty when all are."""
    planning: JsonMap | None = state.get("planning")
    return f"planning {planning['done']} of {planning['total']}" if planning else ""


def leader_words(state: JsonMap, most: int = 10_000) -> str:
    """Return which coordinator leads and which would follow; empty if none leads.

    :param most: largest number of characters; if names do not fit, their number replaces them.
    """
    if not (leader := state.get("leader")):
        return ""
    standbys = [str(name) for name in state.get("standbys") or ()]
    followers = f"standing by: {', '.join(standbys)}" if standbys else "no standby"
    ineligible = state.get("ineligible") or {}
    others = f"; ineligible: {', '.join(map(str, ineligible))}" if ineligible else ""
    text = f"{leader} leads, {followers}{others}"
    if len(text) > most:
        text = f"{leader} leads, standing by: {len(standbys)}"
        text += f"; ineligible: {len(ineligible)}" if ineligible else ""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def ineligible_words(state: JsonMap) -> list[str]:
    """Return a sentence for each coordinator that is present but ineligible to lead."""
    return [f"{name} cannot take over: {why}" for name, why in (state.get("ineligible") or {}).items()]


def layer_range(first_layer: int, end_layer: int) -> str:
    """Return the half-open range with both ends included: ``0–3``."""
    return str(first_layer) if end_layer - first_layer == 1 else f"{first_layer}–{end_layer - 1}"


def format_size(size_bytes: float) -> str:
    """Return a size such as ``0 B``, ``640 KiB``, ``3.2 MiB``."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        # The limits are where the rounded numbers reach the next form.
        if value < 1023.5:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_duration(value_s: float) -> str:
    """Return a duration such as ``98 ms``, ``1.24 s``, ``12.4 s``, ``2:05``, ``3:04:05``."""
    # The limits are where the rounded numbers reach the next form.
    if value_s < 0.9995:
        return f"{value_s * 1000:.0f} ms"
    if value_s < 59.95:
        return f"{value_s:.2f} s" if value_s < 9.995 else f"{value_s:.1f} s"
    minutes, seconds = divmod(round(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def format_number(value: float | None, digits: int = 4) -> str:
    """Return a loss or a metric with so many decimal places, such as ``2.5000``, or ``4e-05`` if that would leave fewer
    than two digits of it, or ``1.2e+12`` from a billion on; ``–`` for ``None``, and ``nan`` or ``inf`` if it is not
    finite.
    """
    if value is None:
        return "–"
    if 0 < abs(value) < 10.0 ** (1 - digits) or abs(value) >= 1e9:
        return f"{value:.{digits - 1}g}"
    return f"{value:.{digits}f}"


def format_rate(value: float | None) -> str:
    """Return a rate per second such as ``0.52``, ``7.3``, ``320``, ``51,200``; ``–`` for ``None``."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def format_share(share: float) -> str:
    """Return a share such as ``75%``; only all of it is ``100%``."""
    return f"{share if share >= 1 else min(share, 0.99):.0%}"


def throughput_words(tokens_per_s: float | None, samples_per_s: float | None) -> str:
    """Return the throughput, such as ``51,200 tokens/s``; in samples if the loss has no tokens; empty if
    unknown.
    """
    if tokens_per_s:
        return f"{format_rate(tokens_per_s)} tokens/s"
    return f"{format_rate(samples_per_s)} samples/s" if samples_per_s else ""


def learning_rate_words(value: float | None) -> str:
    """Return a learning rate such as ``0.003``, ``3e-05``; empty if it is unknown, which events encode as 0."""
    return f"{value:.3g}" if value else ""


def metrics_words(metrics: Mapping[str, float | None] | None) -> str:
    """Return metrics such as ``accuracy 0.2500, f1 0.3000``; empty if there are none."""
    return ", ".join(f"{name} {format_number(value)}" for name, value in (metrics or {}).items())


def format_clock(at: str | None) -> str:
    """Return the local wall-clock time of an ISO-8601 timestamp, to the millisecond."""
    if not at:
        return "--:--:--.---"
    moment = datetime.fromisoformat(at).astimezone()
    return f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03}"


def single_device(pipelines: Iterable[JsonMap]) -> bool:
    """Return whether every node in use has one device; names then omit ``/0``."""
    return all(d.endswith("/0") for p in pipelines for s in p["stages"] for d in s["devices"])


def device_names(devices: Sequence[str], *, short: bool) -> str:
    """Return the names of devices by node: ``node-0`` (short), ``node-0/1``, ``node-0/0,1``."""
    by_node: dict[str, list[str]] = {}
    for device in devices:
        node, _, index = device.rpartition("/")
        by_node.setdefault(node, []).append(index)
    if short:
        return " ".join(by_node)
    return " ".join(f"{node}/{','.join(indices)}" for node, indices in by_node.items())


def stage_node(stage: JsonMap) -> str:
    """Return the node whose devices run this stage; a stage never spans nodes."""
    return str(stage["devices"][0]).rpartition("/")[0]


def pipeline_name(index: int) -> str:
    """Return the pipeline's letter: A, B, …, Z, then A1, B1, …."""
    letter = chr(ord("A") + index % 26)
    return letter if index < 26 else f"{letter}{index // 26}"
