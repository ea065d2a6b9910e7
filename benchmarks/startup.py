"""Time from ``ftd submit`` to the first committed step on running nodes, and of a plain script to its first step.

    python -m benchmarks.startup                       # a llama of 30 million parameters on two nodes
    python -m benchmarks.startup --nodes 1 --rounds 3
    python -m benchmarks.startup --compile             # compiled: first and later starts
    python -m benchmarks.startup --stages              # a llama of 203 million parameters in four stages

Both sides train the same model on the same samples with one thread for each process:
``benchmarks/jobs/llama.toml`` and ``benchmarks/peers/llama_loop.py``. They take turns, so that a slow
minute of a shared machine affects both. The nodes, the coordinator and the broker (mosquitto) start before
the first round and keep running; each round is a new job.

With ``--stages`` the job is that of ``benchmarks/memory.py``, in one pipeline, and the plain side is four
processes of ``benchmarks/peers/llama_stage.py``, each of which makes only the layers of its stage and knows
where the model is cut. ftd has to measure the model first, and makes the parameters that one process would
make. Its nodes have imported torch and transformers before, so the time of the script counts from the end of
its imports; the time with them is shown, too.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from benchmarks import memory
from benchmarks.clusters import FTD, REPOSITORY
from benchmarks.common import Limit, Result, Summary, command_line, main
from ftd.local.child_processes import private_directory
from ftd.local.cluster import ClusterOptions
from ftd.local.driver import LocalDriver
from ftd.transport.address import ClusterAddress
from ftd.transport.mqtt.mosquitto import free_port

JOB = REPOSITORY / "benchmarks/jobs/llama.toml"
LOOP = REPOSITORY / "benchmarks/peers/llama_loop.py"
STAGE = REPOSITORY / "benchmarks/peers/llama_stage.py"
STEPS = 2
LIMIT_S = 300.0
WARM_S = 15.0
"""Seconds to wait after the nodes have joined, while they load in advance what jobs will need."""
MORE_TIMES = 1.3
"""Limit of the time to the first step in stages, in times of the plain script's after its imports."""
MORE_S = 3.0
"""Seconds that a job may take longer than the plain script to its first step."""
MILESTONES = {
    "submitted": "JobSubmitted",
    "model measured, plans made": "JobPrepared",
    "first plan": "PlanChosen",
    "first step": "StepCommitted",
}
"""Milestones of a start → the events that mark them."""


class Nodes:
    """Cluster that runs before the first job and after the last one."""

    def __init__(self, events: asyncio.Queue[dict[str, Any]], address: ClusterAddress) -> None:
        """:param events: events of the cluster."""
        self._events = events
        self._address = address

    async def start(self, job: Path) -> dict[str, float]:
        """Submit a job, wait until it has finished and return the seconds from the command to each milestone."""
        began = time.monotonic()
        command = [str(FTD), "submit", str(job), "--steps", str(STEPS), "--broker", self._address.broker.url]
        process = await asyncio.create_subprocess_exec(
            *command, "--cluster", self._address.cluster, stdout=subprocess.DEVNULL
        )
        found: dict[str, float] = {}
        async with asyncio.timeout(LIMIT_S):
            while True:
                event = await self._events.get()
                for milestone, name in MILESTONES.items():
                    if event["event"] == name:
                        found.setdefault(milestone, time.monotonic() - began)
                if event["event"] in ("JobFailed", "JobStopped"):
                    raise RuntimeError(f"{event['event']}: {event.get('reason')}")
                if event["event"] == "JobFinished":
                    break
        if await process.wait():
            raise RuntimeError(f"ftd submit ended with {process.returncode}")
        return found


def script_s(compiled: bool, cache: Path) -> float:
    """Return the seconds from the start of the plain script to its first step."""
    command = [sys.executable, str(LOOP), "--steps", "1", *(["--compile"] if compiled else [])]
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment(cache), capture_output=True, text=True, timeout=LIMIT_S,
        check=False,
    )  # fmt: skip
    for line in done.stdout.splitlines():
        if line.startswith("STEP 1 "):
            return float(line.split()[2]) - began
    raise RuntimeError(f"the plain script ended with {done.returncode}:\n{done.stderr[-3000:]}")


def stages_s(count: int) -> tuple[float, float]:
    """Return the seconds of the plain stages to the end of their first step: from the end of the last one's
    imports, and from their start.
    """
    began = time.monotonic()
    shared = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(STAGE)],
            env={**shared, "RANK": str(rank), "WORLD_SIZE": str(count)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    printed = [process.communicate(timeout=LIMIT_S)[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise RuntimeError("a plain stage failed; its error is above")
    found = [dict(line.rsplit(" ", 1) for line in text.splitlines()) for text in printed]
    ended = max(float(one["STEP 1"]) for one in found)
    return ended - max(float(one["READY"]) for one in found), ended - began


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache)}


async def measure(given: argparse.Namespace) -> tuple[list[dict[str, float]], list[float], list[float]]:
    """Return the milestones of ftd's starts, the seconds of the plain script's, and those with its imports."""
    ours: list[dict[str, float]] = []
    theirs: list[float] = []
    with_imports: list[float] = []
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(private_directory())
        os.environ["XDG_CACHE_HOME"] = str(
            directory / "cache"
        )  # The nodes' compile cache is empty at first, too.
        job = directory / JOB.name
        if given.stages:
            memory.job_file(directory)
        else:
            text = JOB.read_text().replace("failures = 1", f"failures = {min(1, given.nodes - 1)}")
            text = text.replace("llama.py:build", f"{JOB.parent}/llama.py:build")
            job.write_text(text.replace("seed = 1", f"seed = 1\ncompile = {str(given.compile).lower()}"))
        names = [f"node-{index}" for index in range(given.nodes)]
        options = ClusterOptions(broker="mosquitto", preload=("transformers",))
        driver = await stack.enter_async_context(LocalDriver(options, names))
        events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        await stack.enter_async_context(
            driver.connected(on_event=lambda event, _: events.put_nowait(event), on_state=lambda _: None)
        )
        await driver.ready(LIMIT_S)
        await asyncio.sleep(WARM_S)
        nodes = Nodes(events, driver.address)
        for number in range(given.rounds):
            for side in ("ours", "theirs") if number % 2 else ("theirs", "ours"):
                if side == "ours":
                    ours.append(await nodes.start(job))
                elif given.stages:
                    alone_s, all_s = await asyncio.to_thread(stages_s, given.nodes)
                    theirs.append(alone_s)
                    with_imports.append(all_s)
                else:
                    theirs.append(
                        await asyncio.to_thread(script_s, given.compile, directory / "compiled-by-the-script")
                    )
    return ours, theirs, with_imports


def tabulated(
    given: argparse.Namespace, ours: list[dict[str, float]], theirs: list[float], with_imports: list[float]
) -> Result:
    size = "203 million parameters in one pipeline" if given.stages else "30 million parameters"
    result = Result(
        name=f"startup{'-stages' if given.stages else '-compiled' if given.compile else ''}",
        what=f"A llama of {size}, {given.nodes} running nodes, {given.rounds} starts of each side"
        f"{', compiled' if given.compile else ''}; seconds (min / median / max)",
        columns=("until", "seconds"),
    )
    # When both sides compile, the first start fills the caches of the nodes and of the script.
    counted = slice(1, None) if given.compile and given.rounds > 1 else slice(None)
    if given.compile:
        result.rows.append(("ftd, first start: first step", f"{ours[0]['first step']:.1f}"))
        result.rows.append(("plain script, first start: first step", f"{theirs[0]:.1f}"))
    for milestone in MILESTONES:
        values = tuple(start[milestone] for start in ours[counted] if milestone in start)
        if values:
            result.rows.append((f"ftd: {milestone}", str(Summary(values=values))))
    result.rows.append(("plain script: first step", str(Summary(values=tuple(theirs[counted])))))
    result.data = {"ftd": ours, "script_s": theirs, "script_with_imports_s": with_imports}
    if given.stages:
        result.rows.append(("plain script with its imports", str(Summary(values=tuple(with_imports)))))
        times = [start["first step"] / plain for start, plain in zip(ours, theirs, strict=True)]
        result.rows.append(
            ("ftd / plain script, of starts that follow each other", str(Summary(values=tuple(times))))
        )
        result.limits.append(
            Limit(
                name="first step, times of the plain script's",
                measured=statistics.median(times),
                limit=MORE_TIMES,
            )
        )
        return result
    more = [start["first step"] - plain for start, plain in zip(ours, theirs, strict=True)][counted]
    result.rows.append(
        ("ftd − plain script, of starts that follow each other", str(Summary(values=tuple(more))))
    )
    result.limits.append(
        Limit(
            name="first step after the plain script's, median s",
            measured=statistics.median(more),
            limit=MORE_S,
        )
    )
    if given.compile and given.rounds > 1:
        saved = ours[0]["first step"] - statistics.median(start["first step"] for start in ours[1:])
        result.limits.append(
            Limit(name="saved by the nodes' compile caches, s", measured=saved, limit=0.0, at_least=True)
        )
    return result


def parse() -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("--nodes", type=int, help="default: 2; with --stages 4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--stages", action="store_true", help="a larger model that no node can hold alone")
    given = parser.parse_args()
    if given.stages and (given.compile or given.nodes not in (None, memory.NODES)):
        parser.error(f"--stages is measured on {memory.NODES} nodes, and not compiled")
    given.nodes = given.nodes or (memory.NODES if given.stages else 2)
    return given


def run() -> None:
    given = parse()
    main(tabulated(given, *asyncio.run(measure(given))), given.out)


if __name__ == "__main__":
    run()
