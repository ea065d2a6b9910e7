"""Every kind of message is lost, duplicated and delayed once in a run that has all of them, and training never
gets stuck.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from ftd.faults.chaos.scenario import load_scenario
from ftd.faults.sim.network import TOPICS, SimConnection
from ftd.faults.sim.scenario import ScenarioSimulation
from ftd.faults.sim.scenario_setup import make_scenario_setup
from ftd.transport.wire.codec import decode_from_node, decode_to_node, decode_to_nodes
from statemachine.effects import EmitEvent

Fate = Literal["lost", "repeated", "late"]

EXAMPLES = Path(__file__).parents[2] / "examples"
SCENARIO = """
[cluster]
job = "{job}"
nodes = 5
steps = 100
devices_per_node = 2
[cluster.override.snapshot]
every_steps = 5
[cluster.override.checkpoint]
url = "/kept"
every_steps = 20
[[fault]]
at_step = 12
do = "kill"
node = "node-2"
target = "trainer"
device = 0
[[fault]]
at_step = 40
do = "term"
node = "node-3"
[[fault]]
at_step = 60
do = "kill"
node = "node-1"
[expect]
events = ["JobFinished"]
no_events = ["JobFailed"]
"""
COST_S = 2.0
LATE_S = 1.0
KINDS = (
    "Hello", "Heartbeat", "Prepared", "Quiesced", "Resumed", "Stepped", "TrainerLost", "Finished", "Leaving",
    "SnapshotStarted", "SnapshotCompleted", "LayersPersisted", "Prepare", "Quiesce", "Resume", "Stop", "Release",
    "TakeSnapshot", "RetainSnapshot", "Persist",
)  # fmt: skip


class Run:
    """One run of the scenario.

    :param meddle: returns what happens to a message of the given kind.
    """

    def __init__(self, directory: Path, choose_fate: Callable[[str], Fate | None]) -> None:
        path = directory / "scenario.toml"
        path.write_text(SCENARIO.format(job=EXAMPLES / "chaos-job.toml"))
        scenario = load_scenario(path)
        self.world = ScenarioSimulation(
            scenario, make_scenario_setup(scenario, None, None, path.name), seed=4
        )
        self.seen: dict[str, int] = {}
        self.commits: list[float] = []
        self.ended = ""
        self._choose_fate = choose_fate
        network = self.world.network
        self._pass = network._pass
        network._pass = self._pass_on  # type: ignore[method-assign]
        real_on_event = self.world.on_event

        def on_event(effect: EmitEvent) -> None:
            if effect.name == "StepCommitted":
                self.commits.append(self.world.world.now)
            if effect.name in ("JobFinished", "JobFailed"):
                self.ended = effect.name
            real_on_event(effect)

        self.world.on_event = on_event  # type: ignore[method-assign]
        for coordinator in self.world.coordinators:
            coordinator.on_event = on_event
        self.world.run()

    def _pass_on(self, sender: str, to: SimConnection, topic: str, payload: bytes, retained: bool) -> None:
        """Pass a message on, or not, as its fate says."""
        kind = kind_of(to, topic, payload)
        if kind is not None:
            self.seen[kind] = self.seen.get(kind, 0) + 1
            match self._choose_fate(kind):
                case "lost":
                    return
                case "repeated":
                    self._pass(sender, to, topic, payload, retained)
                case "late":
                    self.world.world.call_later(LATE_S, self._pass, sender, to, topic, payload, retained)
                    return
        self._pass(sender, to, topic, payload, retained)

    @property
    def longest_gap_s(self) -> float:
        """The longest time between two commits."""
        return max(later - earlier for earlier, later in zip(self.commits, self.commits[1:], strict=False))


def kind_of(to: SimConnection, topic: str, payload: bytes) -> str | None:
    """Return the kind of a node's signal or of a command to a node; ``None`` for any other message."""
    if topic == TOPICS.command:
        return type(decode_to_nodes(payload).command).__name__ if to.is_node else None
    node = TOPICS.node_of(topic)
    if node is not None and topic == TOPICS.node_command(node):
        return type(decode_to_node(payload).command).__name__
    if node is not None and topic == TOPICS.node_signal(node):
        return type(decode_from_node(payload).signal).__name__
    return None


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("life"), lambda kind: None)
    assert run.ended == "JobFinished"
    return run


def test_the_run_has_messages_of_every_kind(undisturbed: Run) -> None:
    assert set(KINDS) <= set(undisturbed.seen), set(KINDS) - set(undisturbed.seen)


class Once:
    """A fault injector that changes one message of a kind, the one with this number."""

    def __init__(self, kind: str, fate: Fate, number: int) -> None:
        self._kind, self._fate, self._number = kind, fate, number
        self._seen = 0

    def __call__(self, kind: str) -> Fate | None:
        if kind != self._kind:
            return None
        self._seen += 1
        return self._fate if self._seen == self._number else None


def cost_s(run: Run, undisturbed: Run) -> float:
    """Return how much longer the job took, or how much longer the longest time without a commit was, whichever
    is more.
    """
    longer = run.world.world.now - undisturbed.world.world.now
    return max(longer, run.longest_gap_s - undisturbed.longest_gap_s)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_duplicated_or_late_message_costs_little(kind: str, undisturbed: Run, tmp_path: Path) -> None:
    count = undisturbed.seen[kind]
    numbers = sorted({1, count // 2 + 1, count})
    cases: list[tuple[Fate, int]] = [("lost", number) for number in numbers]
    cases += [("repeated", numbers[0]), ("late", numbers[-1])]
    for fate, number in cases:
        run = Run(tmp_path, Once(kind, fate, number))
        assert run.ended == "JobFinished", (fate, number, run.world.ended_by)
        assert cost_s(run, undisturbed) <= COST_S, (fate, number)


def test_lost_messages_are_found_by_acknowledgements(
    undisturbed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("statemachine.cluster.signals.take_acknowledgement", lambda c, node, signal: None)
    run = Run(tmp_path, Once("Resume", "lost", 1))
    assert cost_s(run, undisturbed) > 10 * COST_S
