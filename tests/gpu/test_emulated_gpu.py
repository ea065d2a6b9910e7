"""Tests that run on the emulated GPU: that it behaves as one, and what the project does on GPUs, whole clusters
included.
"""

import shutil
import subprocess
import sys

import pytest

from tests.helpers.emulated_gpu import environment
from tests.helpers.harness import ROOT

ZERO, FAILURES = "tests/e2e/test_e2e_zero.py::", "tests/e2e/test_e2e_failures.py::"
pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")

DEVICE = """
import os

import torch

assert torch.cuda.is_available() and torch.accelerator.current_accelerator().type == "cuda"
here, there = torch.ones(3), torch.ones(3, device="cuda", requires_grad=True)


def refuses(make, part):
    try:
        make()
    except (RuntimeError, TypeError) as error:
        assert part in str(error), error
    else:
        raise AssertionError(part)


refuses(lambda: here + there, "same device")
refuses(lambda: there + torch.ones(3, device="cuda:1"), "same device")
refuses(lambda: there.detach().numpy(), "to host memory first")
refuses(lambda: torch.rand(3, device="cuda", generator=torch.Generator()), "Expected a 'cuda' device type")
view = there.detach()[1:]
view.mul_(2)
loss = torch.nn.functional.mse_loss(there, torch.zeros_like(there), reduction="sum")
loss.backward()
assert loss.item() == 9 and there.grad.device.type == "cuda" and there.grad.tolist() == [2, 4, 4]
assert torch.arange(3, device="cuda")[torch.tensor([2, 0])].tolist() == [2, 0]
state, first = torch.cuda.get_rng_state(), torch.rand(2, device="cuda")
torch.rand(2)
torch.cuda.set_rng_state(state)
assert torch.equal(torch.rand(2, device="cuda"), first)
before = torch.cuda.memory_allocated()
large = torch.empty(1 << 20, device="cuda")
assert torch.cuda.memory_allocated() == before + (1 << 22)
del large
assert torch.cuda.memory_allocated() == before and torch.cuda.max_memory_allocated() >= before + (1 << 22)
assert torch.empty(3, pin_memory=True).is_pinned() and not here.is_pinned()
os._exit(0)  # Python would not wait for autograd's thread, which may still be freeing memory.
"""


def test_it_behaves_as_a_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DEVICE], check=False, env=environment(2), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


PYTEST = """
import os
import sys

import pytest

code = pytest.main(sys.argv[1:])
sys.stdout.flush()
os._exit(code)  # Python would not wait for threads of closed groups, which may still be freeing memory.
"""


def run(*tests: str, backend: str = "gloo", gpus: int = 1) -> None:
    """Run tests in a process for which there is the emulated GPU; all must pass."""
    command = [sys.executable, "-c", PYTEST, "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    given = environment(gpus) | {"FTD_TEST_BACKEND": backend}
    done = subprocess.run(
        command, check=False, cwd=ROOT, env=given, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]


def test_engines_and_nccl() -> None:
    run("tests/gpu/test_cuda.py", gpus=3)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_engines_that_die_in_each_phase_of_a_step(backend: str) -> None:
    run("tests/runtime/test_zero_phases.py", backend=backend, gpus=16)


def test_a_cluster_whose_trainers_share_a_gpu() -> None:
    run(
        f"{ZERO}test_replicas_in_snapshots_make_up_for_a_lost_host[replicas]",
        f"{FAILURES}test_a_killed_node_and_its_return[shard]",
    )


def test_a_cluster_with_a_gpu_for_each_trainer() -> None:
    run(
        f"{ZERO}test_with_replicas_a_lost_node_undoes_nothing",
        f"{ZERO}test_replicas_in_snapshots_make_up_for_a_lost_host[frozen-shards]",
        f"{FAILURES}test_a_killed_node_and_its_return[tensor]",
        backend="nccl",
    )
