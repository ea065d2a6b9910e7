"""Renders ``ftd status``: the cluster's retained public state on one page."""

from datetime import datetime

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ftd.observe.view.blocks import PipelineBars, node_table
from ftd.observe.view.text import (
    PHASE_STYLES,
    JsonMap,
    NodeColours,
    aside_words,
    drain_words,
    format_duration,
    format_number,
    format_rate,
    format_share,
    format_size,
    ineligible_words,
    leader_words,
    plural,
    startup_of,
    startup_words,
    waiting_words,
)

_MEANINGS = {
    "WAITING": "no job is running",
    "RUNNING": "training",
    "QUIESCING": "stopping for a new plan",
    "RECOVERING": "starting under a new plan",
    "PAUSED": "training waits; the nodes keep the state that they hold",
    "FINISHED": "all steps are done",
    "FAILED": "the job cannot continue",
    "UNREACHABLE": "no coordinator; training continues without it",
}
_BAR_WIDTH = 24
MOST = 10_000
"""A status page shows everything, unlike the live view, which must fit a screen."""


def render_status(state: JsonMap) -> RenderableType:
    """Return phase, job, nodes and pipelines."""
    phase = str(state.get("phase", "WAITING"))
    colours = NodeColours()
    table = node_table(state, colours, most=MOST)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    grid.add_row(
        "cluster",
        Text.assemble((phase, PHASE_STYLES.get(phase, "white")), f"  {_meaning(state, phase)}"),
    )
    if startup := startup_of(state):
        grid.add_row("start-up", _bar(float(startup["share"])).append(f" {startup_words(state)}"))
    elif waiting := waiting_words(state):
        head, _, why = waiting.partition(" ") if phase != "PAUSED" else ("reason", "", waiting)
        grid.add_row(head, Text(why, style="yellow"))
    if planning := state.get("planning"):
        done, total = int(planning["done"]), int(planning["total"])
        bar = _bar(done / max(total, 1))
        grid.add_row("planning", bar.append(f" {done} of {total} numbers of nodes"))
    job = state.get("job")
    if job:
        grid.add_row("job", f"{job['name']} ({job['id']}), global batch {job['global_batch']}")
        grid.add_row("step", _step(state, job["steps"]))
    elif not startup:
        grid.add_row("job", Text("none; submit one with: ftd submit JOB.toml", style="dim"))
    if state.get("generation") is not None:
        grid.add_row("plan", f"generation {state['generation']}")
    if leader := leader_words(state):
        grid.add_row("coordinator", leader)
    for sentence in ineligible_words(state):
        grid.add_row("", Text(sentence, style="yellow"))
    for number, sentence in enumerate(drain_words(state)):
        grid.add_row("" if number else "drain", Text(sentence, style="yellow"))
    for number, sentence in enumerate(aside_words(state)):
        grid.add_row("" if number else "set aside", Text(sentence, style="red"))
    if snapshot := state.get("snapshot"):
        grid.add_row("snapshot", _snapshot(state, snapshot))
    if checkpoint := state.get("checkpoint"):
        grid.add_row("checkpoint", _checkpoint(checkpoint))
    parts: list[RenderableType] = [grid]
    if state.get("nodes"):
        parts += ["", table]
    if state.get("pipelines"):
        parts += ["", PipelineBars(state["pipelines"], colours, most=MOST)]
    return Group(*parts)


def _meaning(state: JsonMap, phase: str) -> str:
    """Return what the phase means; for a finished or failed job and for a missing coordinator, also why."""
    meaning = _MEANINGS.get(phase, "")
    if startup_of(state):
        return "the job is starting" if state.get("job") else "the nodes are starting"
    if phase == "WAITING" and state.get("job"):
        return "the job has not started yet"
    if reason := str(state.get("outcome") or state.get("reason") or ""):
        return {
            "FINISHED": reason,
            "FAILED": f"{meaning}: {_without_traceback(state, reason)}",
            "UNREACHABLE": f"{reason}; {meaning}",
        }.get(phase, meaning)
    return meaning


def _without_traceback(state: JsonMap, reason: str) -> str:
    line, _, more = reason.partition("\n")
    name = (state.get("job") or {}).get("name", "JOB")
    return f"{line}\n(ftd report {name} shows the rest)" if more.strip() else line


def _bar(share: float) -> Text:
    filled = int(share * _BAR_WIDTH)
    return Text.assemble(("━" * filled, "green"), ("─" * (_BAR_WIDTH - filled), "dim"), f" {share:4.0%}")


def _snapshot(state: JsonMap, snapshot: JsonMap) -> str:
    """Return a text such as ``step 40, 12 s old, aec, on 4 nodes``, and how many of its parts are lost."""
    age_s = (datetime.fromisoformat(state["at"]) - datetime.fromisoformat(snapshot["at"])).total_seconds()
    owners, present = int(snapshot["owners"]), int(snapshot["present"])
    words = f"step {snapshot['step']}, {format_duration(max(0.0, age_s))} old, {snapshot['protection']}, "
    lost = f" ({owners - present} lost)" if present < owners else ""
    return f"{words}on {plural(owners, 'node')}{lost}"


def _checkpoint(checkpoint: JsonMap) -> str:
    """Return a text such as ``step 1000, 1.2 GiB, in /checkpoints/gpt, one every 500 steps (auto); writing step
    2000``.
    """
    step, writing = checkpoint["step"], checkpoint["writing_step"]
    newest = "none yet" if step is None else f"step {step}, {format_size(checkpoint['size_bytes'])}"
    every = f", one every {checkpoint['every_steps']} steps (auto)" if checkpoint.get("auto_interval") else ""
    words = f"{newest}, in {checkpoint['url']}{every}"
    return words + (f"; writing step {writing}" if writing is not None else "")


def _step(state: JsonMap, total: int) -> str:
    step = int(state.get("step") or 0)
    words = f"{step} of {total} ({format_share(step / total)}), loss {format_number(state.get('loss'))}"
    rate, step_s = state.get("samples_per_s"), state.get("step_s")
    if rate and step_s:
        words += f", {format_rate(rate)} samples/s, {format_duration(step_s)} a step"
    return words
