"""Renders the run model as one frame of the live view."""

import math
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ftd.observe.run_model import (
    EvaluatedFact,
    JobEndedFact,
    JobSubmittedFact,
    RolledBackFact,
    RunModel,
    StepCommittedFact,
)
from ftd.observe.view.blocks import PipelineBars, node_table
from ftd.observe.view.lines import event_line
from ftd.observe.view.live.chart import EVALUATION_MARK, EVALUATION_STYLE, LossHistory, loss_chart
from ftd.observe.view.live.row_budget import allocate_rows
from ftd.observe.view.text import (
    PHASE_STYLES,
    QUIET_EVENTS,
    ROUTINE_EVENTS,
    JsonMap,
    NodeColours,
    format_clock,
    format_duration,
    format_number,
    format_share,
    ineligible_words,
    leader_words,
    learning_rate_words,
    metrics_words,
    planning_words,
    plural,
    startup_of,
    startup_words,
    throughput_words,
    waiting_words,
)

QUIET_S = 5.0
"""Silence after which the live view warns; during training the coordinator publishes twice a second."""
MAX_WARNING_LINES = 4
"""Largest number of lines of a warning."""
MAX_DRAWN = 1000
"""Number of newest changes and evaluations that are drawn."""
_BAR_WIDTH = 20
_ACTIVE_PHASES = ("RUNNING", "QUIESCING", "RECOVERING")
_PHASES_OF_ENDS = {"JobFinished": "FINISHED", "JobStopped": "FINISHED", "JobFailed": "FAILED"}


class LiveFrame:
    """A collector of states and events; ``draw`` returns a frame, ``progress_line`` a line for a log."""

    def __init__(self, total_steps: int | None) -> None:
        self._total_steps = total_steps
        self._run = RunModel(most=MAX_DRAWN)
        self._events: deque[JsonMap] = deque(maxlen=200)
        self._losses = LossHistory()
        """The losses of the present job."""
        self._colours = NodeColours()
        self._several_coordinators = False
        """Whether there is, or was, more than one coordinator."""
        self._away_since = ""
        """Time of day at which the broker was lost; empty while it is connected."""
        self._end: JsonMap = {}
        """Fields of the state that the job's end has changed, until a state arrives that says so."""

    @property
    def has_state(self) -> bool:
        """Whether a state has arrived, so that there is progress to show."""
        return bool(self._state)

    @property
    def step(self) -> int:
        """The newest step that an event or a state contained."""
        return max(self._run.step, int(self._state.get("step") or 0))

    @property
    def _state(self) -> JsonMap:
        return {**self._run.state, **self._end} if self._end else self._run.state

    @property
    def total_steps(self) -> int | None:
        job = self._state.get("job")
        return int(job["steps"]) if job else self._total_steps

    def on_state(self, state: JsonMap) -> None:
        before = self._run.job.id
        self._end = {}
        self._run.on_state(state)
        if before not in (None, self._run.job.id):
            self._losses = LossHistory()
        self._several_coordinators = self._several_coordinators or bool(
            state.get("standbys") or state.get("ineligible")
        )
        for name in sorted(state.get("nodes") or ()):
            self._colours.of(name)

    def on_broker(self, *, connected: bool) -> None:
        """Record that the connection to the broker was made or lost."""
        self._away_since = "" if connected else format_clock(datetime.now(UTC).isoformat()).partition(".")[0]

    def on_event(self, event: JsonMap) -> None:
        """Add an event: steps go into the chart, other events into the list."""
        fact = self._run.on_event(event)
        if fact is None:
            return
        match fact:
            case JobSubmittedFact():
                self._losses = LossHistory()
                self._end = {}
            case StepCommittedFact(fresh=True, loss=loss):
                self._losses.add(fact.step, math.nan if loss is None else loss)
            case RolledBackFact():
                self._losses.truncate(fact.to_step)
            case JobEndedFact():
                phase = _PHASES_OF_ENDS[fact.event]
                self._end = {
                    "phase": phase,
                    "outcome": event.get("reason"),
                    "startup": None,
                    "waiting_for": "",
                }
        self._several_coordinators = self._several_coordinators or fact.event == "LeaderElected"
        if fact.event not in QUIET_EVENTS:
            self._list_event(event)

    def _list_event(self, event: JsonMap) -> None:
        """Add an event to the list. Of routine events, only the newest one after other events stays."""
        if event.get("event") in ROUTINE_EVENTS:
            for index in range(len(self._events) - 1, -1, -1):
                listed = self._events[index].get("event")
                if listed == event.get("event"):
                    del self._events[index]
                if listed not in ROUTINE_EVENTS or listed == event.get("event"):
                    break
        self._events.append(event)

    @property
    def _evaluations(self) -> list[EvaluatedFact]:
        return self._run.exclude_undone(self._run.evaluations)

    def progress_line(self) -> str:
        """Return the progress of the run as a line for a log."""
        clock = format_clock(datetime.now(UTC).isoformat())
        if startup := startup_of(self._state):
            share = float(startup["share"])
            bar = "=" * int(share * _BAR_WIDTH)
            return f"{clock}  start-up    [{bar:-<{_BAR_WIDTH}}] {share:4.0%}  {startup_words(self._state)}"
        total = self.total_steps
        phase = self._state.get("phase", "WAITING")
        outcome = self._outcome()
        nodes: dict[str, JsonMap] = self._state.get("nodes") or {}
        at_work = sum(1 for n in nodes.values() if n.get("in_plan"))
        parts = [
            clock,
            f"{'progress':<10}",
            f"step {self.step}" + (f"/{total}" if total else ""),
            f"loss {format_number(self._current_loss())}",
            self._throughput() or "– samples/s",
            f"{phase}, {outcome or plural(at_work, 'node') + ' at work'}",
        ]
        waiting = waiting_words(self._state)
        if self._state.get("phase") == "UNREACHABLE":
            waiting = f"waiting for a coordinator: {self._state['reason']}"
        planning = planning_words(self._state)
        parts[-1] += (f", {waiting}" if waiting else "") + (f", {planning}" if planning else "")
        return "  ".join(parts)

    @property
    def progress_key(self) -> tuple[int, str]:
        """Value that changes when a new progress line is worth printing."""
        return self.step, planning_words(self._state) + startup_words(self._state) + self._outcome()

    def draw(self, width: int, height: int, *, quiet_s: float = 0.0) -> RenderableType:
        """Return a frame for a terminal of this size; a narrow one has its boxes below each other.

        :param quiet_s: seconds since the last message.
        """
        wide = width >= 96
        pipelines = self._state.get("pipelines") or ()
        known = len(self._state.get("nodes") or ())
        warning = Text(self._warning(quiet_s), style="yellow")
        most = max(1, min(MAX_WARNING_LINES, height - 9))
        lines = list(warning.wrap(Console(width=width), width - 4))[:most] if warning else []
        rows = allocate_rows(height - len(lines), wide=wide, nodes=known, pipelines=len(pipelines))
        fewer = allocate_rows(height - len(lines) - 1, wide=wide, nodes=known, pipelines=len(pipelines))
        learning_row: tuple[Text, ...] = ()
        if fewer.chart and (learning_row := self._learning_row(wide=wide)):
            rows = fewer
        parts: list[RenderableType] = [self._headline(learning_row, lines, width)]
        nodes = node_table(self._state, self._colours, most=rows.nodes) if rows.nodes else None
        if wide and nodes is not None and rows.chart:
            left = min(max(44, width * 9 // 20), 60)
            middle = Table.grid(expand=True)
            middle.add_column(width=left)
            middle.add_column(ratio=1)
            chart = self._chart_box(width - left, rows.chart, rows.middle)
            middle.add_row(_box(nodes, "nodes", rows.middle), chart)
            parts.append(middle)
        elif nodes is not None:
            parts.append(_box(nodes, "nodes"))
            if rows.chart:
                parts.append(self._chart_box(width, rows.chart))
        if rows.pipelines:
            over = self._state.get("phase") in ("FINISHED", "FAILED")
            bars: RenderableType = PipelineBars(pipelines, self._colours, most=rows.pipelines)
            parts.append(_box(Text("none: the job has ended", style="dim") if over else bars, "pipelines"))
        parts.append(self._event_box(rows.events))
        return Group(*parts)

    def _headline(self, learning_row: Sequence[Text], warning: Sequence[Text], width: int) -> RenderableType:
        phase = str(self._state.get("phase") or "WAITING")
        style = PHASE_STYLES.get(phase, "white")
        job: JsonMap = self._state.get("job") or {}
        batch = f"global batch {job['global_batch']}" if "global_batch" in job else ""
        total = self.total_steps
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(width=13)
        grid.add_column(width=17 if self.step else 21)
        grid.add_column(ratio=1)
        grid.add_column(justify="right")
        share = self.step / total if total else 0.0
        progress = Table.grid(expand=True)
        progress.add_column(ratio=1)
        what, done, of_all = f"step {self.step}" + (f"/{total}" if total else ""), self.step, total
        if startup := startup_of(self._state):
            what, share = f"start-up {startup['number']}/{startup['stages']}", float(startup["share"])
            done, of_all = round(1000 * share), 1000
        progress.add_row(
            ProgressBar(total=of_all or 1, completed=done, complete_style=style, finished_style=style)
        )
        grid.add_row(
            Text(phase, style=f"{style} reverse" if phase != "RUNNING" else f"bold {style}"),
            Text(what, style="bold", no_wrap=True),
            progress,
            Text(f"{format_share(share):>4}  {self._time_left(total)}"),
        )
        grid.add_row(
            Text(f"generation {self._state.get('generation', 0)}", style="dim"),
            Text.assemble(("loss ", "dim"), (format_number(self._current_loss()), "bold")),
            self._speed(),
            Text(self._learning_rate() if not learning_row and self._learning_rate() else batch, style="dim"),
        )
        if learning_row:
            grid.add_row("", *learning_row)
        title = f"[bold]ftd[/] · {job['name']}" if job.get("name") else "[bold]ftd[/]"
        return Panel(
            Group(grid, *warning),
            title=title,
            title_align="left",
            subtitle=leader_words(self._state, width - 6) if self._several_coordinators else None,
            border_style=style,
        )

    def _current_loss(self) -> float | None:
        """Return the loss of the step that is shown: a state may arrive before the event of its step."""
        newest = self._run.newest_step
        return newest.loss if newest is not None and newest.step == self.step else self._state.get("loss")

    def _warning(self, quiet_s: float) -> str:
        """Return why the cluster does not train, or does not send messages; empty if all is well."""
        phase = self._state.get("phase")
        if self._away_since:
            since = self._away_since
            return f"the broker is unreachable: this is the state at {since}; training continues without it"
        if quiet_s > QUIET_S and phase in _ACTIVE_PHASES:
            age = f"{quiet_s:.0f} s" if quiet_s < 60 else format_duration(quiet_s)
            return f"no message for {age}: is the broker down?"
        if phase == "UNREACHABLE":
            reason = self._state.get("reason") or "it is not connected"
            return f"no coordinator: {reason}; training continues without it"
        if phase == "FAILED" or (phase == "FINISHED" and self.step < (self.total_steps or 0)):
            return self._outcome()
        return "\n".join(filter(None, [waiting_words(self._state), *ineligible_words(self._state)]))

    def _outcome(self) -> str:
        """Return how the job ended, in one line; empty while it runs."""
        return " ".join(str(self._state.get("outcome") or "").split())

    def _throughput(self) -> str:
        """Return the throughput, in tokens if the loss has some; empty while nothing is computed."""
        samples_per_s, newest = self._state.get("samples_per_s"), self._run.newest_step
        return (
            throughput_words(newest.tokens_per_s if newest else None, samples_per_s) if samples_per_s else ""
        )

    def _speed(self) -> Text:
        throughput, step_s = self._throughput(), self._state.get("step_s")
        if not throughput or not step_s:
            return Text("")
        value, unit = throughput.split()
        return _one_line(Text.assemble((value, "bold"), (f" {unit}, ", "dim"), format_duration(step_s)))

    def _learning_rate(self, name: str = "lr") -> str:
        newest = self._run.newest_step
        value = learning_rate_words(newest.learning_rate if newest else None)
        return f"{name} {value}" if value else ""

    def _learning_row(self, *, wide: bool) -> tuple[Text, ...]:
        """Return the newest evaluation and the learning rate; empty if neither is known."""
        rate = self._learning_rate("learning rate" if wide else "lr")
        loss = position = Text("")
        if evaluations := self._evaluations:
            newest = evaluations[-1]
            loss = Text.assemble(("held out ", "dim"), (format_number(newest.loss), "bold"))
            where_text = f"{'after ' if wide else ''}step {newest.step}"
            texts = filter(None, [where_text, metrics_words(newest.metrics)])
            position = _one_line(Text(", ".join(texts), style="dim"))
        return (loss, position, Text(rate, style="dim")) if rate or evaluations else ()

    def _time_left(self, total: int | None) -> str:
        step_s = self._state.get("step_s")
        if not total or not step_s or self._state.get("phase") != "RUNNING":
            return ""
        return f"{format_duration((total - self.step) * step_s)} left"

    def _chart_box(self, width: int, rows: int, height: int | None = None) -> RenderableType:
        changes = [one.recovery for one in self._run.recoveries.values()]
        failed = [recovery.step for recovery in changes if recovery.failure]
        others = [recovery.step for recovery in changes if not recovery.failure]
        evaluations = self._evaluations
        chart = loss_chart(
            self._losses,
            width=max(1, width - 4),
            height=rows,
            failures=failed,
            changes=others,
            evaluations=[(one.step, one.loss) for one in evaluations],
        )
        legend = Text(no_wrap=True, overflow="ellipsis")
        values = self._losses.values
        if values:
            legend.append(f"{format_number(values[0], 2)} → {format_number(values[-1], 2)}", style="dim")
            legend.append("   █", style="red").append(f" {plural(len(failed), 'failure')}", style="dim")
            legend.append("   █", style="green").append(
                f" {plural(len(others), 'other change')}", style="dim"
            )
            if evaluations:
                held_out = f" held out {format_number(evaluations[-1].loss, 2)}"
                legend.append(f"   {EVALUATION_MARK}", style=EVALUATION_STYLE).append(held_out, style="dim")
        return _box(Group(chart, legend), "loss", height)

    def _event_box(self, rows: int) -> RenderableType:
        newest = list(self._events)[-rows:]
        lines: list[RenderableType] = [event_line(e) for e in newest]
        return _box(Group(*lines) if lines else Text("nothing has happened yet", style="dim"), "events")


def _box(content: RenderableType, title: str, height: int | None = None) -> Panel:
    return Panel(
        content, title=f"[dim]{title}[/]", title_align="left", border_style="bright_black", height=height
    )


def _one_line(text: Text) -> Text:
    """Cut the text off at the edge of a narrow terminal."""
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
