"""The simulator: invariants hold for all seeds, runs are repeatable, and violations are reported."""

import gc
import json
import os
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from ftd.cli.main import app
from ftd.faults.sim import simulation_run
from ftd.faults.sim.drawing import RARE_FAULTS
from ftd.faults.sim.faults import corrupt_parameter
from ftd.faults.sim.invariants import WRONG_CODE
from ftd.faults.sim.simulation import SHAPES, Fault, SeedOverrides, Simulation
from ftd.faults.sim.simulation_run import SimulationRun, run_seed
from statemachine.cluster import health
from statemachine.cluster.machine import ClusterMachine
from statemachine.effects import EmitEvent
from statemachine.events import TimerFired

SEEDS = 100
TIERS = {"memory", "decoded", "buddy", "persistent"}
EVENTS = {
    "SnapshotCompleted", "SnapshotAbandoned", "RolledBack",
    "SnapshotIntervalChosen", "ProtectionChanged", "CheckpointIntervalChosen",
    "NodeDraining", "NodeDrainWaiting", "NodeDrainRefused", "NodeDrainCancelled",
    "StragglerDetected", "StragglerRecovered", "ReplanSkipped",
    "NodeRejected", "NodeFenced", "NodeReleased", "ClusterPaused", "JobFailed", "BrokerLost",
}  # fmt: skip
CAUSES = {
    "start", "node_lost", "trainer_lost", "node_joined", "node_returned", "node_drained", "resumed",
    "connection_lost", "speed_changed", "protection_changed",
}  # fmt: skip


def test_flipped_bits_are_found_and_undone() -> None:
    """The invariants check that no job goes on with corrupt state, and that snapshots that count have none. Bits
    flip after some snapshots, also when all other faults are over.
    """
    undone = 0
    for seed in range(10):
        simulation = SimulationRun(
            seed, overrides=SeedOverrides(corruption=True, zero1=False, protection="aec")
        )
        snapshots: list[int | None] = []

        def seen(
            event: EmitEvent,
            check=simulation.invariants.check_event,  # type: ignore[no-untyped-def]
            simulation: SimulationRun = simulation,
            snapshots: list[int | None] = snapshots,
        ) -> None:
            nonlocal undone
            undone += event.name == "RolledBack" and "wrong gradients" in event.reason
            if event.name == "SnapshotCompleted":
                snapshots.append(event.step)
                if len(snapshots) in (2, 4):
                    simulation.world.call_later(simulation.step_timing.step_s, corrupt_parameter, simulation)
            check(event)

        simulation.invariants.check_event = seen  # type: ignore[method-assign]
        simulation.run_to_end()
    assert undone >= 5


def test_equal_seeds_give_equal_traces() -> None:
    first, again = run_seed(7, tracing=True), run_seed(7, tracing=True)
    assert first.trace == again.trace
    assert len(first.trace) > 500
    assert run_seed(8, tracing=True).trace != first.trace


def test_a_run_does_not_depend_on_earlier_runs_or_string_hashes() -> None:
    """The runs are repeated in another process: nothing may depend on the order of a set or on a cache."""
    code = "from ftd.faults.sim.simulation_run import run_seed; import hashlib; " + (
        "lines = [line for seed in (10, 12) for line in run_seed(seed, tracing=True).trace]; "
        "print(hashlib.sha256('\\n'.join(lines).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_a_world_is_freed_after_its_run() -> None:
    """Hundreds of seeds run in one process. Some of these have no plan for the nodes that are left."""
    worlds = []
    for seed in range(6):
        simulation = SimulationRun(seed)
        worlds.append(weakref.ref(simulation.world))
        simulation.run_to_end()
        del simulation
    gc.collect()
    assert not any(world() for world in worlds)


def test_invariants_hold_for_many_seeds_that_cover_all_faults_causes_and_tiers() -> None:
    """Faults of every kind happen, and recoveries of every cause, in every kind of cluster."""
    broken: list[tuple[str, str]] = []
    names: Counter[str] = Counter()
    causes: Counter[str] = Counter()
    decisions: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    tiers: set[str] = set()
    shapes = set()
    for seed in range(5 * SEEDS):
        if seed >= SEEDS and tiers == TIERS and causes.keys() >= CAUSES and names.keys() >= EVENTS:
            break  # Whether a seed has what is rare changes with everything that is drawn.
        simulation = SimulationRun(seed)
        shapes.add(simulation.shape)

        def seen(event: EmitEvent, check=simulation.invariants.check_event) -> None:  # type: ignore[no-untyped-def]
            names[event.name] += 1
            if event.name == "RecoveryCompleted":
                causes[event.details["recovery"]["cause"]] += 1
            elif event.name == "RolledBack":
                tiers.add(event.details["tier"])
            elif event.name == "Quiesced":
                decisions[event.details["decision"]] += 1
            check(event)

        simulation.invariants.check_event = seen  # type: ignore[method-assign]
        try:
            simulation.run_to_end()
        except Exception as error:
            broken.append((f"ftd sim --seed {seed} --trace", f"{type(error).__name__}: {error}"))
        faults.update(line.split()[1] for line in simulation.faults)
    assert broken == []
    assert shapes == set(SHAPES)
    assert causes.keys() - {"corruption", "loss_spike"} == CAUSES  # Few seeds have these; others test them.
    assert set(decisions) == {"start", "boundary", "redo", "roll_forward"}
    assert {
        "crash",
        "trainer",
        "cut",
        "reset",
        "freeze",
        "the",
        "drain",
        "terminate",
        "restart",
        "slow",
        "protect",
        "snapshots",
        "corrupt",
    } <= set(faults)
    assert tiers == TIERS
    assert names.keys() >= EVENTS


def test_all_rare_faults_are_injected() -> None:
    injected: Counter[str] = Counter()
    for seed in range(SEEDS):
        simulation = SimulationRun(seed, overrides=SeedOverrides(rare_faults=True))

        def inject(fault: Fault, real: Callable[[Fault], None] = simulation.inject) -> None:
            injected[fault.__name__] += 1
            real(fault)

        simulation.inject = inject  # type: ignore[method-assign]
        simulation.run_to_end()
        if {fault.__name__ for fault in RARE_FAULTS} <= set(injected):
            return
    raise AssertionError(f"{SEEDS} seeds did not meet all: {injected}")


def test_a_node_that_raises_again_and_again_is_set_aside_and_readmitted() -> None:
    seen_events: Counter[tuple[str, str]] = Counter()
    for seed in range(SEEDS):
        simulation = SimulationRun(seed, overrides=SeedOverrides(bad_node=True))

        def seen(event: EmitEvent, check: Callable[..., None] = simulation.invariants.check_event) -> None:
            seen_events[event.name, str(event.details.get("by", ""))] += 1
            check(event)

        simulation.invariants.check_event = seen  # type: ignore[method-assign]
        simulation.run_to_end()
        if (
            seen_events["NodeQuarantined", ""]
            and seen_events["NodeReadmitted", "user"]
            and seen_events["NodeReadmitted", "need"]
        ):
            return
    raise AssertionError(f"{SEEDS} seeds did not meet all: {seen_events}")


def test_nodes_with_wrong_slow_and_hung_devices_are_set_aside_and_readmitted() -> None:
    seen_events: Counter[tuple[str, str]] = Counter()
    for seed in range(SEEDS):
        simulation = SimulationRun(seed, overrides=SeedOverrides(bad_devices=True))

        def seen(event: EmitEvent, check: Callable[..., None] = simulation.invariants.check_event) -> None:
            seen_events[event.name, str(event.details.get("cause", ""))] += 1
            check(event)

        simulation.invariants.check_event = seen  # type: ignore[method-assign]
        simulation.run_to_end()
        if all(
            seen_events[name, cause]
            for name in ("NodeQuarantined", "NodeReadmitted")
            for cause in ("wrong_device", "slow_device")
        ):
            return
    raise AssertionError(f"{SEEDS} seeds did not meet all: {seen_events}")


def test_a_plan_with_a_wrong_device_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "quarantine_node", lambda *_, **__: False)
    found = (run_seed(seed, overrides=SeedOverrides(bad_devices=True)).violation for seed in range(SEEDS))
    assert any("whose health check found a wrong product" in (violation or "") for violation in found)


def test_a_machine_that_does_nothing_makes_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClusterMachine, "steps", lambda self, events, bug: [])
    violation = run_seed(3).violation
    assert violation is not None
    assert violation.startswith("no progress after the healing: WAITING")


def test_an_exception_in_a_machine_is_a_violation_with_its_location(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(self: ClusterMachine, events: list[object], bug: object) -> list[object]:
        if any(isinstance(event, TimerFired) for event in events):
            raise ZeroDivisionError("planted")
        return real(self, events, bug)  # type: ignore[arg-type,return-value]

    real = ClusterMachine.steps
    monkeypatch.setattr(ClusterMachine, "steps", steps)
    violation = run_seed(0).violation
    assert violation is not None
    assert violation.startswith("ZeroDivisionError: planted (")


# --- the command -----------------------------------------------------------------------------------------


def test_one_seed_on_the_command_line() -> None:
    done = CliRunner().invoke(app, ["sim", "--seed", "5"])
    assert done.exit_code == 0
    assert "every invariant held" in done.output
    traced = CliRunner().invoke(app, ["sim", "--seed", "5", "--trace"])
    assert "FAULT" in traced.output
    assert "SendCommand" in traced.output


def test_many_seeds_on_the_command_line() -> None:
    done = CliRunner().invoke(app, ["sim", "--seeds", "5", "--json"])
    assert done.exit_code == 0
    answer = json.loads(done.output)
    assert (answer["seeds"], answer["broken"]) == (5, {})


def test_a_broken_seed_prints_its_replay_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation_run, "PATIENCE_S", -simulation_run.HEAL_S + 1.0)
    done = CliRunner().invoke(app, ["sim", "--seeds", "2", "--first", "40"])
    assert done.exit_code == 1
    assert "ftd sim --seed 40 --trace\n  no progress after the healing" in done.output
    assert "2 broke an invariant" in done.output


def test_faults_after_events_on_the_command_line() -> None:
    plain, triggered = (
        CliRunner().invoke(app, ["sim", "--seed", "5", *more, "--json"]) for more in ([], ["--triggered"])
    )
    assert plain.exit_code == triggered.exit_code == 0
    faults = [json.loads(done.output)["faults"] for done in (plain, triggered)]
    assert len(faults[0]) < len(faults[1])


def test_a_broken_seed_with_faults_after_events_prints_its_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation_run, "PATIENCE_S", -simulation_run.HEAL_S + 1.0)
    done = CliRunner().invoke(app, ["sim", "--seeds", "1", "--first", "40", "--triggered"])
    assert done.exit_code == 1 and "ftd sim --seed 40 --triggered --trace" in done.output


def test_the_command_needs_either_a_seed_or_a_number_of_seeds() -> None:
    assert CliRunner().invoke(app, ["sim"]).exit_code == 2
    assert CliRunner().invoke(app, ["sim", "--seed", "1", "--seeds", "2"]).exit_code == 2
    scenario = ["--scenario", "examples/chaos/node-killed.toml"]
    assert CliRunner().invoke(app, ["sim", "--seed", "1", "--triggered", *scenario]).exit_code == 2


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--seed", "1", "--first", "5"), "--first belongs to --seeds"),
        (("--scenario", "examples/chaos/node-killed.toml", "--first", "5"), "--first belongs to --seeds"),
        (("--seed", "1", "--skip-unsupported"), "--skip-unsupported belongs to --scenario"),
        (("--seeds", "1", "--trace"), "--trace belongs to --seed or --scenario"),
        (
            ("--scenario", "examples/chaos/node-killed.toml", "--trace", "--json"),
            "leave out --trace or --json",
        ),
    ],
)
def test_an_option_without_effect_is_rejected(options: tuple[str, ...], complaint: str) -> None:
    done = CliRunner().invoke(app, ["sim", *options], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and complaint in done.output


def raise_everywhere(sim: Simulation) -> None:
    """Make the job's code raise in the current step wherever that is computed. Trainers that are stopped
    before do not raise.
    """
    sim.invariants.wrong_code = True
    for node in sim.nodes.values():
        for device in list(node.trainers):
            if sim.world.chance(0.8):
                node.fail_trainer(device, "raised", WRONG_CODE)


def test_wrong_code_fails_the_job_and_nothing_else_counts_as_wrong_code() -> None:
    """Other faults happen as well, whoever leads; the other jobs of these seeds end as usual."""
    failed = 0
    for seed in range(30):
        simulation = SimulationRun(
            seed, overrides=SeedOverrides(triggered_faults=(("StepCommitted", raise_everywhere, 4),))
        )
        reasons: list[str] = []
        simulation.invariants.on_failure = reasons.append
        simulation.run_to_end()
        failed += any(WRONG_CODE in reason for reason in reasons)
    assert failed > 5
