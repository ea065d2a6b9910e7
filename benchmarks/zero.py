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

import sys

import torch

from benchmarks.common import Limit, Result, Summary, command_line, main
from benchmarks.engines import PARAMETER_BYTES, STEPS, enter_group, ratios, take_turns, work
from runtime.engine.engine import Engine
from runtime.watch.pace import Pace
from statemachine.messages.trainer import PipelineData, StageData, TrainingData

MIB = 1024 * 1024
WAYS = ("whole", "zero1", "aor")


def make(way: str, rank: int, owners: int, layers: int, rows: int, port: int, directory: str) -> Engine:
    engine = Engine(
        TrainingData(
            function="linear.py:build",
            path=directory,
            seed=1,
            steps=1_000_000,
            global_batch=rows * owners,
            microbatch_rows=rows,
            zero1=way != "whole",
            arguments={"layers": layers},
        ),
        torch.device("cpu"),
        Pace(),
    )
    pipelines = tuple(
        PipelineData(
            stages=(StageData(first_layer=0, end_layer=layers, ranks=(number,)),),
            first_microbatch=number,
            microbatches=1,
        )
        for number in range(owners)
    )
    enter_group(engine, pipelines, rank, port, "aor" if way == "aor" else "none")
    return engine


def finish_replicas(engine: Engine) -> dict[str, object]:
    """Wait for what replicas still compute of the turn."""
    if engine.sharding is not None:
        engine.sharding.parts()
    return {}


def compare(result: Result, mib: int, owners: int, rounds: int, rows: int) -> None:
    layers = max(2, mib * MIB // PARAMETER_BYTES)
    turns = take_turns("benchmarks.zero", WAYS, count=owners, layers=layers, rows=rows, rounds=rounds)
    whole = turns["whole"]
    for way, turn in turns.items():
        memory = max(turn.memory_bytes) / MIB
        result.rows.append(
            (
                way,
                f"{memory:.0f} MiB",
                f"{memory * MIB / max(whole.memory_bytes):.2f}",
                str(Summary(values=tuple(1e3 * s for s in turn.steps_s))),
                ratios(turn.steps_s, whole.steps_s),
                ratios(turn.computed_s, whole.computed_s),
            )
        )
    result.data |= {
        "steps_s": {way: turn.steps_s for way, turn in turns.items()},
        "computed_s": {way: turn.computed_s for way, turn in turns.items()},
        "memory_bytes": {way: turn.memory_bytes for way, turn in turns.items()},
        "layers": layers,
        "owners": owners,
    }
    result.notes.append(
        f"{layers} layers, {layers * PARAMETER_BYTES / MIB:.0f} MiB of parameters, AdamW, {owners} owners, "
        f"{rounds} turns of {STEPS} steps; the ratio is of neighbouring turns"
    )
    saved_bytes = max(whole.memory_bytes) - max(turns["zero1"].memory_bytes)
    saved = saved_bytes / (layers * PARAMETER_BYTES)
    expected = 2 * (owners - 1) / owners
    result.notes.append(
        f"zero1 saves {saved:.2f} times the parameters; its optimizer state alone would be {expected:.2f}"
    )
    result.limits.append(
        Limit(
            name="saved, of the optimizer state of others",
            measured=saved / expected,
            limit=0.8,
            at_least=True,
        )
    )


def run() -> None:
    if sys.argv[1:2] == ["--rank"]:
        rank, way, owners, layers, rows, port, directory = sys.argv[2:]
        numbers = [int(one) for one in (rank, owners, layers, rows, port)]
        work(lambda: make(way, *numbers, directory), finish_replicas)
        return
    parser = command_line(__doc__)
    parser.add_argument("--mib", type=int, default=64, help="of parameters")
    parser.add_argument("--owners", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=64, help="of each owner's microbatch")
    arguments = parser.parse_args()
    result = Result(
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
    )
    compare(result, arguments.mib, arguments.owners, arguments.rounds, arguments.rows)
    main(result, arguments.out)


if __name__ == "__main__":
    run()
