"""ZeRO-1 and AOR: what they save in memory, and what they cost in time.

One process for each owner of the same model, which is trained in three ways: everybody with the whole
optimizer state, with parts of it (zero1), and with parts and replicas of them on the host (aor). All of them
live at the same time and take turns of a few steps, so that they meet the same machine. Memory is what a
process has grown by (resident, free memory given back) from before its model was made until behind its steps.
Time is that of the slowest owner, and what all threads of all owners computed together, which other work on
the machine changes less.

On gloo a reduction is no cheaper than an all-reduce, and under ZeRO-1 gradients are all-reduced here anyway
(every owner must be able to roll forward), so gathering parameters comes on top: memory is saved, not time.

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
    """Wait for what replicas still compute of the turn."""
    if engine.sharding is not None:
        engine.sharding.held_parts()
    return {}


def show(result: Result, turns: dict[str, Turns], layers: int, owners: int) -> None:
    whole = turns["whole"]
    for way, turn in turns.items():
        memory_bytes = max(turn.memory_bytes)
        of_whole = f"{memory_bytes / max(whole.memory_bytes):.2f}"
        result.rows.append((way, f"{memory_bytes / MIB:.0f} MiB", of_whole, *turn.times_beside(whole)))
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
