"""Devices of a stage as replicas, with shards, and tensor-parallel: memory of a device, and a step's time.

One process for each device of one stage, which holds the whole model. It is trained in three ways: each device has
all parameters (replicate), its share of them, gathered layer by layer while it computes (shard), or its share of
them, with which it computes a part of the output features of each layer, put together after it (tensor). Rows of a
microbatch are split in the first two. All processes live at the same time and take turns of a few steps, so that they
meet the same machine. Memory is what a process has grown by (resident, free memory given back) from before its model
was made until after its steps. State is the bytes of parameters, gradients and the optimizer's state that a device
keeps between steps. Time is that of the slowest device, and what all threads of all devices computed together, which
other work on the machine changes less.

What shards cost is the bytes that travel for each microbatch: each device gets the others' shares of every layer
twice and sends as much of its gradient once. So it depends on the rows of a microbatch, as computing does and these
bytes do not. What tensor parallelism costs are activations, which grow with the rows: the outputs of each layer in the
forward pass, and the gradients of its inputs in the backward pass.

    python -m benchmarks.within_node [--mib 64] [--devices 2] [--rows 2048] [--rounds 5]
"""

import statistics
import sys

import torch

from benchmarks.common import Limit, Result, Summary, command_line, main
from benchmarks.engines import PARAMETER_BYTES, STEPS, enter_group, ratios, take_turns, work
from planner.values import Within
from runtime.engine.engine import Engine
from runtime.watch.pace import Pace
from statemachine.messages.trainer import PipelineData, StageData, TrainingData

MIB = 1024 * 1024
WAYS: tuple[Within, ...] = ("replicate", "shard", "tensor")
MICROBATCHES = 2


def make(way: Within, rank: int, devices: int, layers: int, rows: int, port: int, directory: str) -> Engine:
    engine = Engine(
        TrainingData(
            function="linear.py:build",
            path=directory,
            seed=1,
            steps=1_000_000,
            global_batch=rows * MICROBATCHES,
            microbatch_rows=rows,
            within_node=way,
            arguments={"layers": layers},
        ),
        torch.device("cpu"),
        Pace(),
    )
    stage = StageData(first_layer=0, end_layer=layers, ranks=tuple(range(devices)), within=way)
    enter_group(
        engine, (PipelineData(stages=(stage,), first_microbatch=0, microbatches=MICROBATCHES),), rank, port
    )
    return engine


def state_bytes(engine: Engine) -> int:
    """Return the bytes of parameters, gradients and the optimizer's state that are kept between steps."""
    if engine.sharding is None:
        layers = range(engine.model.layer_count)
        parameters = sum(p.nbytes for _, p in engine.model.named_parameters(layers))
        return parameters + sum(engine.states.state_bytes(layer) for layer in layers)
    total = 0
    for part in engine.sharding.states.kept:
        for one in part.slices:
            assert one.value is not None
            kept = [one.value, *(v for v in one.state.values() if isinstance(v, torch.Tensor))]
            total += sum(tensor.nbytes for tensor in kept) + one.value.nbytes
    return total


def compare(result: Result, mib: int, devices: int, rounds: int, rows: int) -> None:
    layers = max(2, mib * MIB // PARAMETER_BYTES)
    turns = take_turns("benchmarks.within_node", WAYS, count=devices, layers=layers, rows=rows, rounds=rounds)
    kept_bytes = {way: max(one["state_bytes"] for one in turn.last) for way, turn in turns.items()}
    steps_s = {way: turn.steps_s for way, turn in turns.items()}
    computed_s = {way: turn.computed_s for way, turn in turns.items()}
    memory_bytes = {way: turn.memory_bytes for way, turn in turns.items()}
    for way in WAYS:
        result.rows.append(
            (
                way,
                f"{kept_bytes[way] / MIB:.1f} MiB",
                f"{kept_bytes[way] / kept_bytes['replicate']:.3f}",
                f"{max(memory_bytes[way]) / MIB:.0f} MiB",
                str(Summary(values=tuple(1e3 * s for s in steps_s[way]))),
                ratios(steps_s[way], steps_s["replicate"]),
                ratios(computed_s[way], computed_s["replicate"]),
            )
        )
    result.data |= {
        "steps_s": steps_s,
        "computed_s": computed_s,
        "memory_bytes": memory_bytes,
        "state_bytes": kept_bytes,
        "layers": layers,
        "devices": devices,
        "rows": rows,
    }
    result.notes.append(
        f"{layers} layers, {layers * PARAMETER_BYTES / MIB:.0f} MiB of parameters, AdamW, a stage of {devices} "
        f"devices, {MICROBATCHES} microbatches of {rows} rows, {rounds} turns of {STEPS} steps; the ratio is of "
        "neighbouring turns"
    )
    share = kept_bytes["shard"] / kept_bytes["replicate"] * devices
    result.limits.append(Limit(name="state of a device, of its share", measured=share, limit=1.05))
    ratio = statistics.median(
        shard / whole for shard, whole in zip(steps_s["shard"], steps_s["replicate"], strict=True)
    )
    result.limits.append(Limit(name="step, of that with replicas", measured=ratio, limit=1.15))


def run() -> None:
    if sys.argv[1:2] == ["--rank"]:
        rank, name, devices, layers, rows, port, directory = sys.argv[2:]
        numbers = [int(one) for one in (rank, devices, layers, rows, port)]
        way = next(way for way in WAYS if way == name)
        work(lambda: make(way, *numbers, directory), lambda engine: {"state_bytes": state_bytes(engine)})
        return
    parser = command_line(__doc__)
    parser.add_argument("--mib", type=int, default=64, help="of parameters")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=2048, help="of a microbatch")
    arguments = parser.parse_args()
    result = Result(
        name="within_node",
        what="Replicas, shards and tensor parallelism on the devices of a stage",
        columns=(
            "",
            "state of a device",
            "of replicas",
            "memory",
            "step, ms: min / median / max",
            "of replicas",
            "computing, of replicas",
        ),
    )
    compare(result, arguments.mib, arguments.devices, arguments.rounds, arguments.rows)
    main(result, arguments.out)


if __name__ == "__main__":
    run()
