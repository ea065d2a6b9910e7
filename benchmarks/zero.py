"""ZeRO-1 and AOR: the memory that they save, and the time that they cost.

One process runs for each owner of the same model, which is trained in three ways: all owners hold the whole
optimizer state, parts of it (zero1), or parts and replicas of them on the host (aor). All processes run at
the same time and take turns of a few steps, so that they share the same conditions. Memory is the growth of
a process (resident, free memory given back) from before its model was made until after its steps. Time is
that of the slowest owner, and the CPU time of all threads of all owners together, which other processes on
the machine affect less.

On gloo a reduction is no cheaper than an all-reduce, and under ZeRO-1 gradients are all-reduced here anyway
(every owner must be able to roll forward), so gathering parameters is an additional cost: memory is saved,
not time.

    python -m benchmarks.zero [--mib 64] [--owners 2] [--rounds 5]
"""

import torch

from benchmarks.common import Limit, Result
from benchmarks.engines import MIB, PARAMETER_BYTES, Member, Turns, compare_ways, enter_group
from benchmarks.linear import training_data
from runtime.engine.engine import Engine
from runtime.monitoring.progress import ProgressMonitor
from statemachine.messages.trainer import WorldPipeline, WorldStage

WAYS = ("whole", "zero1", "aor")


def make(member: Member) -> Engine:
    data = training_data(
        member.directory,
        member.layers,
        global_batch=member.rows * member.count,
        microbatch_rows=member.rows,
        zero1=member.way != "whole",
    )
    engine = Engine(data, torch.device("cpu"), ProgressMonitor())
    pipelines = tuple(
        WorldPipeline(
            stages=(WorldStage(first_layer=0, end_layer=member.layers, ranks=(number,)),),
            first_microbatch=number,
            microbatches=1,
        )
        for number in range(member.count)
    )
    protection = "aor" if member.way == "aor" else "none"
    enter_group(engine, pipelines, member.rank, member.port, protection)
    return engine


def finish_replicas(engine: Engine) -> dict[str, object]:
    """Wait for computations of this turn that replicas have not finished."""
    if engine.sharding is not None:
        engine.sharding.held_parts()
    return {}


def show(result: Result, turns: dict[str, Turns], layers: int, owners: int) -> None:
    whole = turns["whole"]
    for way, turn in turns.items():
        memory_bytes = max(turn.memory_bytes)
        of_whole = f"{memory_bytes / max(whole.memory_bytes):.2f}"
        result.rows.append((way, f"{memory_bytes / MIB:.0f} MiB", of_whole, *turn.times_against(whole)))
    saved_bytes = max(whole.memory_bytes) - max(turns["zero1"].memory_bytes)
    saved = saved_bytes / (layers * PARAMETER_BYTES)
    expected = 2 * (owners - 1) / owners
    result.notes.append(
        f"zero1 saves {saved:.2f} times the parameters; its optimizer state alone would be {expected:.2f}"
    )
    name = "saved, of the optimizer state of others"
    result.limits.append(Limit(name=name, measured=saved / expected, limit=0.8, at_least=True))


if __name__ == "__main__":
    compare_ways(
        Result(
            name="zero",
            what="Optimizer state in parts, and their replicas",
            columns=(
                "",
                "memory of an owner",
                "of whole",
                "step, ms: min / median / max",
                "of whole",
                "computing, of whole",
            ),
        ),
        __doc__,
        WAYS,
        members="owners",
        rows=64,
        make=make,
        more=finish_replicas,
        show=show,
    )
