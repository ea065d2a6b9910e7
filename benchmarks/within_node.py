"""Devices of a stage as replicas, with shards, and tensor-parallel: memory of a device, and time of a step.

One process runs for each device of one stage, which holds the whole model. It is trained in three ways:
each device has all parameters (replicate), its share of them, gathered layer by layer while it computes
(shard), or its share of them, with which it computes a part of the output features of each layer, put
together after it (tensor). Rows of a microbatch are split in the first two. All processes run at the same
time and take turns of a few steps, so that they share the same conditions. Memory is the growth of a
process (resident, free memory given back) from before its model was made until after its steps. State is
the bytes of parameters, gradients and the optimizer's state that a device keeps between steps. Time is that
of the slowest device, and the CPU time of all threads of all devices together, which other processes on the
machine affect less.

The cost of shards is the bytes that travel for each microbatch: each device receives the others' shares of
every layer twice and sends as much of its gradient once. These bytes do not depend on the rows of a
microbatch, but computing does, so the relative cost falls with more rows. The cost of tensor parallelism is
activations, which grow with the rows: the outputs of each layer in the forward pass, and the gradients of
its inputs in the backward pass.

    python -m benchmarks.within_node [--mib 64] [--devices 2] [--rows 2048] [--rounds 5]
"""

import statistics

import torch

from benchmarks.common import Limit, Result
from benchmarks.engines import MIB, Member, Turns, compare_ways, enter_group
from benchmarks.linear import training_data
from planner.values import Within
from runtime.engine.engine import Engine
from runtime.monitoring.progress import ProgressMonitor
from statemachine.messages.trainer import WorldPipeline, WorldStage

WAYS: tuple[Within, ...] = ("replicate", "shard", "tensor")
MICROBATCHES = 2


def make(member: Member) -> Engine:
    way = next(way for way in WAYS if way == member.way)
    data = training_data(
        member.directory,
        member.layers,
        global_batch=member.rows * MICROBATCHES,
        microbatch_rows=member.rows,
        within_node=way,
    )
    engine = Engine(data, torch.device("cpu"), ProgressMonitor())
    ranks = tuple(range(member.count))
    stage = WorldStage(first_layer=0, end_layer=member.layers, ranks=ranks, within=way)
    pipeline = WorldPipeline(stages=(stage,), first_microbatch=0, microbatches=MICROBATCHES)
    enter_group(engine, (pipeline,), member.rank, member.port)
    return engine


def state_bytes(engine: Engine) -> int:
    """Return the bytes of parameters, gradients and the optimizer's state that are kept between steps."""
    if engine.sharding is None:
        layers = range(engine.model.layer_count)
        parameters = sum(p.nbytes for _, p in engine.model.named_parameters(layers))
        return parameters + sum(engine.states.describe(layer)[0].size_bytes for layer in layers)
    total = 0
    for part in engine.sharding.states.held:
        for one in part.slices:
            assert one.value is not None
            kept = [one.value, *(v for v in one.state.values() if isinstance(v, torch.Tensor))]
            total += sum(tensor.nbytes for tensor in kept) + (one.value.nbytes if one.trained else 0)
    return total


def show(result: Result, turns: dict[str, Turns], layers: int, devices: int) -> None:
    kept_bytes = {way: max(one["state_bytes"] for one in turn.last) for way, turn in turns.items()}
    replicas = turns["replicate"]
    for way, turn in turns.items():
        result.rows.append(
            (
                way,
                f"{kept_bytes[way] / MIB:.1f} MiB",
                f"{kept_bytes[way] / kept_bytes['replicate']:.3f}",
                f"{max(turn.memory_bytes) / MIB:.0f} MiB",
                *turn.times_against(replicas),
            )
        )
    result.data["state_bytes"] = kept_bytes
    result.notes.append(f"{MICROBATCHES} microbatches a step")
    share = kept_bytes["shard"] / kept_bytes["replicate"] * devices
    result.limits.append(Limit(name="state of a device, of its share", measured=share, limit=1.05))
    ratio = statistics.median(
        shard / whole for shard, whole in zip(turns["shard"].steps_s, replicas.steps_s, strict=True)
    )
    result.limits.append(Limit(name="step, of that with replicas", measured=ratio, limit=1.15))


if __name__ == "__main__":
    compare_ways(
        Result(
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
        ),
        __doc__,
        WAYS,
        members="devices",
        rows=2048,
        make=make,
        more=lambda engine: {"state_bytes": state_bytes(engine)},
        show=show,
    )
