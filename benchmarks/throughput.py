"""Steps of a Hugging Face llama of 30 million parameters: ftd compared with a plain PyTorch loop and with DDP.

    python -m benchmarks.throughput                                # all parts, about 20 minutes
    python -m benchmarks.throughput --parts steps --pairs 10       # one part
    python -m benchmarks.throughput --parts service,ddp --rounds 3

* ``steps``: one stage on one node and the plain loop alternate step by step in one process, on the same
  samples, in float32 and bfloat16, compiled and not (block by block on both sides). Their losses are
  compared, too.
* ``service``: the real service with one node, from commit to commit, compared with the plain script as a
  separate process (``benchmarks/peers/llama_loop.py``), in alternating rounds.
* ``ddp``: two one-stage pipelines on two nodes of the real service compared with DDP under torchrun with
  two processes.
* ``precision``: 300 steps of a small model in bfloat16 and in float32, and the measured growth of a
  trainer's memory, per parameter, compared with the size computed from the types.

Both sides use one thread for each process. A figure is the median of ratios of measurements that follow
each other, so that a slow minute of a shared machine affects both sides.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils.data import default_collate

from benchmarks.clusters import REPOSITORY, run_local
from benchmarks.common import Limit, Result, command_line, main, milliseconds
from benchmarks.engines import enter_alone, resident_bytes
from benchmarks.peers.llama_loop import Text, compile_blocks, make_model, make_optimizer, train_step
from ftd import sample_indices
from ftd.config.job import load_job
from runtime.engine.engine import Engine
from runtime.monitoring.progress import ProgressMonitor
from runtime.profiling.layer_profile import profile_model
from statemachine.messages.trainer import TrainingData

JOB = REPOSITORY / "benchmarks/jobs/llama.toml"
PARTS = ("steps", "service", "ddp", "precision")
LOOP = REPOSITORY / "benchmarks/peers/llama_loop.py"
SKIP_STEPS = 3
"""Number of steps at the beginning of a run that do not count, as they touch memory for the first time."""
BAR = 0.97
SMALL = {"hidden": 128, "layers": 4, "vocabulary": 256, "length": 64, "learning_rate": 1e-3}
"""Arguments of the model that learns in 300 steps: its loss falls from 5.5 to about 2.5."""
SMALL_STEPS = 300


def training_of(**changes: Any) -> TrainingData:
    """Return a trainer's data for the job, with ``changes``."""
    training = msgspec.convert(msgspec.to_builtins(load_job(JOB).training), TrainingData)
    return msgspec.structs.replace(training, **changes)


def alone(data: TrainingData) -> Engine:
    """Return an engine that is ready to train all layers alone."""
    engine = Engine(data, torch.device("cpu"), ProgressMonitor())
    engine.warm_up()
    enter_alone(engine)
    return engine


# --- step by step in one process -----------------------------------------------------------------


def alternate(precision: str, compiled: bool, pairs: int) -> dict[str, Any]:
    """Train both sides step by step in turns; return the seconds of their steps and the difference of their losses."""
    data = training_of(precision=precision, compile=compiled, steps=pairs + SKIP_STEPS)
    engine = alone(data)
    torch.manual_seed(data.seed)
    model = make_model(512, 8, 8192).train()
    model.config.use_cache = False  # type: ignore[union-attr]
    if compiled:
        compile_blocks(model)
    optimizer = make_optimizer(list(model.parameters()), 3e-4)
    text = Text(128)
    ours_s: list[float] = []
    plain_s: list[float] = []
    ours_cpu_s: list[float] = []
    plain_cpu_s: list[float] = []
    apart = 0.0
    for step in range(1, pairs + SKIP_STEPS + 1):
        turns = ("ours", "plain") if step % 2 else ("plain", "ours")
        for turn in turns:
            began, began_cpu = time.perf_counter(), time.process_time()
            if turn == "ours":
                loss = engine.step(lambda: False).vote.loss
            else:
                batch = same_microbatches(text, data, step)
                plain_loss = train_step(model, optimizer, batch, precision, data.clip_gradient_norm)
            took_s, took_cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
            if step > SKIP_STEPS:
                (ours_s if turn == "ours" else plain_s).append(took_s)
                (ours_cpu_s if turn == "ours" else plain_cpu_s).append(took_cpu_s)
        apart = max(apart, abs(loss - plain_loss) / abs(plain_loss))
    return {
        "ours_s": ours_s,
        "plain_s": plain_s,
        "ours_cpu_s": ours_cpu_s,
        "plain_cpu_s": plain_cpu_s,
        "losses_apart": apart,
    }


def same_microbatches(text: Text, data: TrainingData, step: int) -> list[dict[str, torch.Tensor]]:
    """Return the microbatches that the engine reads in ``step``, read within the step as by a loader without
    workers.
    """
    indices = sample_indices(len(text), data.global_batch, data.seed, step)
    return [
        default_collate([text[index] for index in indices[start : start + data.microbatch_rows]])
        for start in range(0, data.global_batch, data.microbatch_rows)
    ]


def compare_steps(result: Result, pairs: int) -> None:
    for precision in ("float32", "bfloat16"):
        for compiled in (False, True):
            name = f"{precision}, {'compiled' if compiled else 'not compiled'}"
            found = alternate(precision, compiled, pairs)
            add_ratio(result, f"one stage / plain loop, {name}", found["ours_s"], found["plain_s"])
            of_cpu = ratio(found["ours_cpu_s"], found["plain_cpu_s"])
            result.notes.append(
                f"{name}: {of_cpu:.3f} by computing time; losses at most {found['losses_apart']:.1e} apart"
            )
            result.data[f"steps {name}"] = found


# --- the real service ----------------------------------------------------------------------------


def script_s(steps: int, ranks: int) -> list[float]:
    """Return the seconds of each step of the plain script after the first ones; several ranks run under torchrun."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    job = training_of()
    done = subprocess.run(
        [*launcher, str(LOOP), "--steps", str(steps), "--global-batch", str(job.global_batch),
         "--microbatch", str(job.microbatch_rows)],
        cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=1200,
        check=False,
    )  # fmt: skip
    moments = [float(line.split()[2]) for line in done.stdout.splitlines() if line.startswith("STEP ")]
    if done.returncode or len(moments) < steps:
        raise RuntimeError(f"the plain script ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return [after - before for before, after in pairwise(moments[SKIP_STEPS - 1 :])]


def service_s(steps: int, nodes: int) -> list[float]:
    """Return the seconds from commit to commit of ``ftd local`` after the first steps; each node is a pipeline."""
    with tempfile.TemporaryDirectory(prefix="ftd-bench-") as directory:
        job = Path(directory) / JOB.name
        text = JOB.read_text().replace("failures = 1", f"failures = {nodes - 1}")
        job.write_text(text.replace("llama.py:build", f"{JOB.parent}/llama.py:build"))
        report = run_local(job, nodes=nodes, steps=steps, faults=[])
    moments = [float(step["at_s"]) for step in report["steps"]]
    return [after - before for before, after in pairwise(moments[SKIP_STEPS - 1 :])]


def compare_service(result: Result, nodes: int, rounds: int, steps: int) -> None:
    peer = "plain script" if nodes == 1 else f"DDP on {nodes} processes"
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(rounds):
        sides = [(ours, service_s), (theirs, script_s)]
        for times, run in sides if number % 2 else reversed(sides):
            times.append(statistics.median(run(steps, nodes)))
    what = "one node" if nodes == 1 else f"{nodes} one-stage pipelines"
    add_ratio(result, f"real service, {what} / {peer}", ours, theirs)
    result.data[f"service on {nodes}"] = {"ours_s": ours, "theirs_s": theirs}


def ratio(ours_s: list[float], theirs_s: list[float]) -> float:
    """Return the median of the ratios of our throughput to theirs, of measurements that follow each other."""
    return statistics.median(theirs / ours for ours, theirs in zip(ours_s, theirs_s, strict=True))


def add_ratio(result: Result, name: str, ours_s: list[float], theirs_s: list[float]) -> None:
    ratios = sorted(theirs / ours for ours, theirs in zip(ours_s, theirs_s, strict=True))
    result.rows.append(
        (
            name,
            milliseconds(ours_s),
            milliseconds(theirs_s),
            f"{ratios[0]:.2f} / {statistics.median(ratios):.3f} / {ratios[-1]:.2f}",
        )
    )
    result.limits.append(Limit(name=name, measured=ratio(ours_s, theirs_s), limit=BAR, at_least=True))


# --- precision -----------------------------------------------------------------------------------


def small_losses(precision: str) -> list[float]:
    data = training_of(
        arguments=SMALL, precision=precision, steps=SMALL_STEPS, global_batch=8, microbatch_rows=8
    )
    engine = alone(data)
    return [engine.step(lambda: False).vote.loss for _ in range(SMALL_STEPS)]


def memory(precision: str) -> dict[str, float]:
    """Return the bytes per parameter by which a training process grows, and the computed bytes.

    ``at_rest`` is parameters, gradients and the optimizer's state. ``at_most`` adds the activations of a
    microbatch and the temporary memory of operations, which is not in the computed figure.
    """

    def most() -> int:
        line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    small = alone(training_of(arguments=SMALL, precision=precision))
    small.step(lambda: False)  # Memory that torch allocates once and keeps is allocated now.
    before = resident_bytes()
    engine = alone(training_of(precision=precision))
    layers = profile_model(engine.model, engine.data).profile.layers
    count = sum(p.numel() for _, p in engine.model.named_parameters(range(engine.model.layer_count)))
    for _ in range(2):
        engine.step(lambda: False)
    at_rest = resident_bytes() - before
    Path("/proc/self/clear_refs").write_text("5")  # Reset the peak.
    engine.step(lambda: False)
    held = sum(layer.parameter_bytes + layer.gradient_bytes + layer.optimizer_bytes for layer in layers)
    peak = held + sum(layer.activation_bytes for layer in layers)
    return {
        "parameters": count,
        "at_rest": at_rest / count,
        "at_rest_computed": held / count,
        "at_most": (most() - before) / count,
        "at_most_computed": peak / count,
    }


def compare_precision(result: Result) -> None:
    whole, low = small_losses("float32"), small_losses("bfloat16")
    apart = abs(low[-1] - whole[-1]) / whole[-1]
    result.notes.append(
        f"{SMALL_STEPS} steps of a small model: loss {whole[0]:.3f} -> {whole[-1]:.4f} in float32, "
        f"{low[-1]:.4f} in bfloat16"
    )
    result.limits.append(Limit(name="bfloat16 / float32, final loss apart", measured=apart, limit=0.01))
    result.data["losses"] = {"float32": whole, "bfloat16": low}
    for precision in ("float32", "bfloat16"):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.throughput", "--memory", precision],
            cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        found = json.loads(done.stdout.splitlines()[-1])
        result.data[f"memory {precision}"] = found
        for when in ("at_rest", "at_most"):
            measured, computed = found[when], found[f"{when}_computed"]
            result.notes.append(
                f"{precision}, {when.replace('_', ' ')}: {measured:.2f} bytes per parameter measured, "
                f"{computed:.2f} computed"
            )
        result.limits.append(
            Limit(
                name=f"{precision}, memory per parameter, measured and computed apart",
                measured=abs(found["at_rest"] / found["at_rest_computed"] - 1),
                limit=0.05,
            )
        )


def run() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--pairs", type=int, default=15, help="steps of each side, for each setting")
    parser.add_argument("--rounds", type=int, default=5, help="runs of the real service and of its peer")
    parser.add_argument("--steps", type=int, default=15, help="steps of each of these runs")
    parser.add_argument("--memory", choices=("float32", "bfloat16"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.memory:
        print(json.dumps(memory(given.memory)))
        return
    parts = given.parts.split(",")
    result = Result(
        name="throughput",
        what="A Hugging Face llama of 30 million parameters; milliseconds of a step (min / median / max)",
        columns=("what", "ftd", "peer", "throughput: min / median / max"),
    )
    if "steps" in parts:
        compare_steps(result, given.pairs)
    if "service" in parts:
        compare_service(result, 1, given.rounds, given.steps)
    if "ddp" in parts:
        compare_service(result, 2, given.rounds, given.steps)
    if "precision" in parts:
        compare_precision(result)
    main(result, given.out)


if __name__ == "__main__":
    run()
