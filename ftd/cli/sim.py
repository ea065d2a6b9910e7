"""``ftd sim``: runs the deterministic simulator of the whole service."""

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftd.cli.options import JsonOption, print_json
from ftd.errors import ConfigurationError

if TYPE_CHECKING:
    from ftd.faults.chaos.player import ScenarioResult
    from ftd.faults.chaos.values import Scenario
    from ftd.faults.sim.scenario_setup import ScenarioSetup
    from ftd.faults.sim.simulation_run import SeedResult


def sim(
    seed: Annotated[int | None, typer.Option(min=0, help="Run only this seed.")] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Run this many seeds, beginning with --first.")
    ] = None,
    first: Annotated[int | None, typer.Option(min=0, help="First seed of --seeds.", show_default="0")] = None,
    triggered: Annotated[
        bool,
        typer.Option(
            "--triggered", help="Inject two to eight more faults, each just after an event of the cluster."
        ),
    ] = False,
    scenario: Annotated[
        Path | None,
        typer.Option(
            help="Play this scenario instead of random faults; the default seed is 0.",
            metavar="SCENARIO.toml",
        ),
    ] = None,
    job: Annotated[
        Path | None,
        typer.Option(help="With --scenario: use this job instead of the scenario's.", metavar="JOB.toml"),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="With --scenario: number of nodes, instead of the scenario's."),
    ] = None,
    skip_unsupported: Annotated[
        bool,
        typer.Option(
            "--skip-unsupported", help="With --scenario: skip faults that the simulator does not support."
        ),
    ] = False,
    junit: Annotated[
        Path | None,
        typer.Option(help="With --scenario: write the results as JUnit XML, for CI.", metavar="FILE.xml"),
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="With --seed or --scenario: print every event and effect.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Simulate clusters under random faults from a seed.

    The real state machines and planner run under a virtual clock.

    Invariants are checked after every event; at the end all faults are repaired, and the job must finish. A
    seed always gives the same run. The exit code is 1 if an invariant is violated. With --triggered, a seed has more
    faults, each just after an event of the cluster, so that they hit the reactions to one another.

    With --scenario, the faults of the file are injected at their moments of virtual time, and its
    expectations are checked as ftd chaos run does it. The exit code is 1 if something is not as expected.

    Example: ftd sim --seeds 1000, or ftd sim --scenario examples/chaos/node-killed.toml --seeds 20
    """
    if first is not None and seeds is None:
        raise typer.BadParameter("--first belongs to --seeds")
    first = first or 0
    if scenario is not None:
        if trace and as_json:
            raise typer.BadParameter("the JSON of a scenario has no trace: leave out --trace or --json")
        if triggered:
            raise typer.BadParameter("--triggered belongs to random faults: leave out --scenario")
        if seed is not None and seeds is not None:
            raise typer.BadParameter("give either --seed N or --seeds N")
        worlds = range(first, first + seeds) if seeds is not None else range(seed or 0, (seed or 0) + 1)
        raise typer.Exit(_scenario(scenario, job, nodes, worlds, skip_unsupported, junit, trace, as_json))
    of_scenario = {
        "--job": job,
        "--nodes": nodes,
        "--junit": junit,
        "--skip-unsupported": skip_unsupported or None,
    }
    for option, given in of_scenario.items():
        if given is not None:
            raise typer.BadParameter(f"{option} belongs to --scenario")
    if (seed is None) == (seeds is None):
        raise typer.BadParameter("give either --seed N or --seeds N")
    if trace and seed is None:
        raise typer.BadParameter("--trace belongs to --seed or --scenario")
    if seed is not None:
        failed = _one(seed, triggered=triggered, trace=trace, as_json=as_json)
    else:
        failed = _many(range(first, first + (seeds or 0)), triggered=triggered, as_json=as_json)
    raise typer.Exit(1 if failed else 0)


def _scenario(
    path: Path,
    job: Path | None,
    nodes: int | None,
    seeds: range,
    skip: bool,
    junit: Path | None,
    trace: bool,
    as_json: bool,
) -> int:
    """Play a scenario with each seed and return the exit code.

    :raises ConfigurationError: the simulator cannot play this scenario.
    """
    from ftd.faults.chaos.report import build_document, render_junit, render_text
    from ftd.faults.chaos.scenario import load_scenario
    from ftd.faults.sim.scenario import play_simulated
    from ftd.faults.sim.scenario_setup import make_scenario_setup
    from ftd.observe.view.files import require_distinct, require_writable, write_file

    require_writable(junit, "--junit")
    require_distinct(("--junit", junit), read=[("--scenario", path), ("--job", job)])
    whole = load_scenario(path)
    setting = make_scenario_setup(whole, job, nodes, path.name)
    scenario, skipped = _playable(whole, setting, path.name, skip)
    found: list[ScenarioResult] = []
    if skipped and not scenario.faults:  # Its expectations are about the skipped faults.
        scenario, seeds = replace(scenario, expect=(), steps_after=0), seeds[:1]
    for seed in seeds:
        played, lines = play_simulated(scenario, setting, seed, skipped=skipped, tracing=trace)
        found.append(played)
        if not as_json:
            typer.echo("\n".join((*lines, render_text(played))))
    if as_json:
        print_json([build_document(played) for played in found])
    if junit is not None:
        write_file(junit, render_junit(found), "--junit")
    return 0 if all(played.met for played in found) else 1


def _playable(
    whole: "Scenario", setting: "ScenarioSetup", origin: str, skip: bool
) -> tuple["Scenario", tuple[tuple[str, str], ...]]:
    """Return the part of a scenario that the simulator can play, and the skipped faults with the reasons.

    :raises ConfigurationError: faults are not supported, and ``skip`` is false.
    """
    from ftd.faults.sim.scenario_setup import unsupported_faults, without_faults

    lacking = unsupported_faults(whole, setting)
    why = "; ".join(f"{fault.id} ({fault.do}): {reason}" for fault, reason in lacking.items())
    if lacking and not skip:
        raise ConfigurationError(
            f"the simulator does not support all of it: {why}",
            field=origin,
            remedy="add --skip-unsupported to skip these faults",
        )
    scenario = without_faults(whole, lacking)
    waiting = {f.id: "it waits for a fault that is skipped" for f in whole.faults if f not in scenario.faults}
    return scenario, tuple((waiting | {fault.id: reason for fault, reason in lacking.items()}).items())


def _run(seed: int, *, triggered: bool, tracing: bool = False) -> "SeedResult":
    from ftd.faults.sim.drawing import triggered_overrides
    from ftd.faults.sim.simulation_run import run_seed

    return run_seed(seed, tracing=tracing, overrides=triggered_overrides(seed) if triggered else None)


def _one(seed: int, *, triggered: bool, trace: bool, as_json: bool) -> bool:
    result = _run(seed, triggered=triggered, tracing=trace)
    if as_json:
        print_json(
            {
                "seed": seed,
                "violation": result.violation,
                "events": result.events,
                "virtual_s": result.virtual_s,
                "faults": list(result.faults),
                "trace": list(result.trace),
            }
        )
        return result.violation is not None
    for line in result.trace:
        print(line)
    print(f"seed {seed}: {result.events} events in {result.virtual_s:.1f} virtual seconds")
    for fault in result.faults:
        print(f"  {fault}")
    print(result.violation or "every invariant held")
    return result.violation is not None


def _many(seeds: range, *, triggered: bool, as_json: bool) -> bool:
    began = time.perf_counter()
    broken: dict[int, str] = {}
    events = 0
    for seed in seeds:
        result = _run(seed, triggered=triggered)
        events += result.events
        if result.violation is not None:
            broken[seed] = result.violation
            if not as_json:
                print(
                    f"ftd sim --seed {seed}{' --triggered' if triggered else ''} --trace\n  {result.violation}"
                )
    elapsed_s = time.perf_counter() - began
    if as_json:
        print_json({"seeds": len(seeds), "broken": broken, "events": events, "elapsed_s": elapsed_s})
    else:
        print(
            f"{len(seeds)} seeds, {events} events, {elapsed_s:.1f} s: "
            f"{f'{len(broken)} broke an invariant' if broken else 'every invariant held'}"
        )
    return bool(broken)
