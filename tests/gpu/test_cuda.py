"""Tests of late devices and NCCL on real GPUs, if there are any (``make gpu-test``)."""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from runtime.engine.engine import Engine
from tests.helpers.fleet import Fleet
from tests.helpers.gpu_support import CudaComputing
from tests.helpers.harness import ROOT, TOKEN, ServerThread
from tests.helpers.late_fleet import TURNED, TWO, LateFleet, job, snapshot_with_replicas
from tests.helpers.link_measurement import measure, order_for
from tests.helpers.snapshots import stage
from tests.helpers.staged import expected, results_are_right

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture(autouse=True, scope="module")
def ended_communication() -> Iterator[None]:
    """Let the threads of closed groups end: Python cannot exit cleanly while one of them frees its group."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("communication"):
            thread.join(10.0)


class SharedGpu(CudaComputing):
    """The first GPU, for engines, which choose themselves what is on the device."""

    def computing(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()


class CudaFleet(LateFleet):
    """A fleet whose engines share the first GPU."""

    def _delayed(self, runtime: Any, update: Callable[..., None]) -> Callable[..., None]:
        return update

    def each(self, run: Callable[[int, Engine], Any]) -> list[Any]:
        return Fleet.each(self, run)


def test_streams_wait_for_events_and_the_host_for_both() -> None:
    runtime = CudaComputing()
    side, began, ended = runtime.stream(), runtime.event(), runtime.event()
    began.record()
    large = torch.full((1 << 26,), 2.0, device=runtime.device)
    ended.record()
    here = runtime.pinned(large.numel(), large.dtype)
    with runtime.on(side):
        side.wait(ended)
        here.copy_(large, non_blocking=True)
    side.synchronize()
    assert here.min() == here.max() == 2.0
    assert ended.done() and ended.ms_since(began) > 0


def test_trainers_that_share_a_gpu_talk_through_host_memory() -> None:
    assert results_are_right(lambda _: CudaComputing(), times=3)


def test_engines_that_share_a_gpu_have_the_losses_of_a_cpu(tmp_path: Path) -> None:
    def steps(fleet: Fleet) -> list[float]:
        with fleet:
            fleet.enter(fleet.engines, TWO)
            fleet.steps(2)
            if isinstance(fleet, CudaFleet):
                fleet.each(lambda rank, engine: engine.begin_snapshot(1))
            fleet.steps(2)
            fleet.enter(fleet.engines, TURNED)
            fleet.steps(2)
            if isinstance(fleet, CudaFleet):
                fleet.close_snapshots()
            return [fleet.losses[step] for step in range(1, 7)]

    training = job(tmp_path)
    plain = steps(Fleet(training, 3))
    assert steps(CudaFleet(training, tmp_path, lambda _: SharedGpu())) == pytest.approx(plain, rel=1e-9)


def test_training_that_began_on_a_cpu_continues_on_a_gpu(tmp_path: Path) -> None:
    training = job(tmp_path)
    with Fleet(training, 3) as plain:
        plain.enter(plain.engines, TWO)
        plain.steps(2)
        stage(plain.packed(), tmp_path)
        plain.steps(2)
    with CudaFleet(training, tmp_path, lambda _: SharedGpu()) as fleet:
        fleet.restore, fleet.restore_step = str(tmp_path), 2
        fleet.enter(fleet.engines, TWO)
        fleet.steps(2)
        fleet.close_snapshots()
    assert [fleet.losses[step] for step in (3, 4)] == pytest.approx(
        [plain.losses[step] for step in (3, 4)], rel=1e-9
    )


def test_replicas_in_a_snapshot_make_up_for_any_device(tmp_path: Path) -> None:
    training = msgspec.structs.replace(job(tmp_path), zero1=True)
    fleet = CudaFleet(training, tmp_path, lambda _: SharedGpu())
    owned, *others = snapshot_with_replicas(fleet, tmp_path)
    assert others == [owned] * 3


@pytest.mark.parametrize("size", sorted({1, torch.cuda.device_count()} - {0}))
def test_nccl(size: int) -> None:
    """Run one rank, and one rank on each GPU if there are several."""
    with ServerThread() as server:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.helpers.nccl_rank", str(server.port), str(rank), str(size)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        found = [json.loads(process.communicate(timeout=120)[0].splitlines()[-1]) for process in ranks]
    assert found == ([[[1.0] * 4]] if size == 1 else [expected(rank, size) for rank in range(size)])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two GPUs")
def test_links_between_gpus_are_measured() -> None:
    with ServerThread() as server:
        out, err = measure(order_for(server.port, TOKEN, backend="nccl")).communicate(timeout=240)
    *progress, found = [json.loads(line) for line in out.splitlines()]
    assert found["where"].endswith("NCCL between the GPUs of one host"), err
    assert progress and found["sent"] and found["reduced"]
