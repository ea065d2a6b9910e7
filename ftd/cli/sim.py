"""``ftd sim``: the deterministic simulator of the whole service."""

import time
from typing import Annotated

import typer

from ftd.cli.options import JsonOption, print_json


def register(app: typer.Typer) -> None:
    app.command("sim")(sim)


def sim(
    seed: Annotated[int | None, typer.Option(min=0, help="Run this one seed.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Run this many seeds, from --first on.")] = None,
    first: Annotated[int, typer.Option(min=0, help="First seed of --seeds.")] = 0,
    trace: Annotated[bool, typer.Option("--trace", help="Print every event and effect of --seed.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run the real state machines and planner under a virtual clock, with faults that the seed draws.

    Invariants are checked after every event; then everything heals and the job must finish. A seed always
    gives the same run. Exit code 1 when an invariant broke.

    Example: ftd sim --seeds 1000
    """
    if (seed is None) == (seeds is None):
        raise typer.BadParameter("give either --seed N or --seeds N")
    if seed is not None:
        failed = _one(seed, trace=trace, as_json=as_json)
    else:
        failed = _many(range(first, first + (seeds or 0)), as_json=as_json)
    raise typer.Exit(1 if failed else 0)


def _one(seed: int, *, trace: bool, as_json: bool) -> bool:
    from ftd.sim.run import run_seed

    result = run_seed(seed, tracing=trace)
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


def _many(seeds: range, *, as_json: bool) -> bool:
    from ftd.sim.run import run_seed

    began = time.perf_counter()
    broken: dict[int, str] = {}
    events = 0
    for seed in seeds:
        result = run_seed(seed)
        events += result.events
        if result.violation is not None:
            broken[seed] = result.violation
            if not as_json:
                print(f"{result.replay}\n  {result.violation}")
    elapsed_s = time.perf_counter() - began
    if as_json:
        print_json({"seeds": len(seeds), "broken": broken, "events": events, "elapsed_s": elapsed_s})
    else:
        print(
            f"{len(seeds)} seeds, {events} events, {elapsed_s:.1f} s: "
            f"{f'{len(broken)} broke an invariant' if broken else 'every invariant held'}"
        )
    return bool(broken)


if __name__ == "__main__":
    typer.run(sim)
