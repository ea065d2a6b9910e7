"""The cost of comparing replicas: time of a step that makes digests of the state, against one that makes none.

Each process is a pipeline that holds the whole model, so every process makes digests of all layers: their
parameters and the optimizer's state. One group makes them in every step and one never; both run at the same
time and take turns of a few steps. The difference of their steps is the cost of one comparison, which a job
has once in 50 steps. What travels to the coordinator, 8 bytes for each layer, is not included.

    python -m benchmarks.replica_comparison [--mib 64] [--pipelines 2] [--rows 256] [--rounds 9]
"""

import statistics

import torch

from benchmarks.common import Limit, Result
from benchmarks.engines import MIB, PARAMETER_BYTES, Member, Turns, compare_ways, enter_group
from benchmarks.linear import training_data
from runtime.engine.engine import Engine
from runtime.monitoring.progress import ProgressMonitor
from statemachine.messages.trainer import TrainingOptions, WorldPipeline, WorldStage

WAYS = ("never", "every step")
MICROBATCHES = 2
"""Microbatches of each pipeline."""
EVERY = TrainingOptions().compare_replicas_every
STATES = 3
"""Numbers for each parameter: its value, and AdamW's two moments."""


def make(member: Member) -> Engine:
    data = training_data(
        member.directory,
        member.layers,
        global_batch=member.rows * MICROBATCHES * member.count,
        microbatch_rows=member.rows,
        compare_replicas_every=WAYS.index(member.way),
    )
    engine = Engine(data, torch.device("cpu"), ProgressMonitor())
    pipelines = tuple(
        WorldPipeline(
            stages=(WorldStage(first_layer=0, end_layer=member.layers, ranks=(rank,)),),
            first_microbatch=rank * MICROBATCHES,
            microbatches=MICROBATCHES,
        )
        for rank in range(member.count)
    )
    enter_group(engine, pipelines, member.rank, member.port)
    return engine


def show(result: Result, turns: dict[str, Turns], layers: int, pipelines: int) -> None:
    never, each = turns["never"], turns["every step"]
    for way, turn in turns.items():
        result.rows.append((way, *turn.times_against(never)))
    state_bytes = STATES * layers * PARAMETER_BYTES
    pairs = zip(each.computed_s, never.computed_s, strict=True)
    comparison_s = statistics.median(one - other for one, other in pairs) / pipelines
    share = statistics.median(
        (one - other) / other / EVERY for one, other in zip(each.steps_s, never.steps_s, strict=True)
    )
    computed = statistics.median(
        (one - other) / other / EVERY for one, other in zip(each.computed_s, never.computed_s, strict=True)
    )
    result.data |= {"comparison_s": comparison_s, "share": share, "computed_share": computed, "every": EVERY}
    took = (
        f"{1e3 * comparison_s:.0f} ms of CPU time ({state_bytes / comparison_s / 1e9:.1f} GB/s)"
        if comparison_s > 0
        else "less CPU time than the turns differ by"
    )
    of = f"{state_bytes / MIB:.0f} MiB of state in each process"
    result.notes.append(f"a comparison takes {took} for {of}, once in {EVERY} steps")
    result.limits += [
        Limit(name="cost, percent of the time of a step", measured=100 * share, limit=0.5),
        Limit(name="cost, percent of the CPU time of a step", measured=100 * computed, limit=0.5),
    ]


if __name__ == "__main__":
    compare_ways(
        Result(
            name="replica_comparison",
            what="Comparison of the copies of each layer",
            columns=("compared", "step, ms: min / median / max", "of never", "computing, of never"),
        ),
        __doc__,
        WAYS,
        members="pipelines",
        rows=256,
        make=make,
        more=lambda engine: {},
        show=show,
    )
