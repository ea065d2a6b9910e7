"""Gradient buffers: sums over owners in slices, parameters without a gradient, and the norm, counted once."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from runtime.engine import gradients
from runtime.engine.gradients import GradientBuffers
from runtime.groups.communicator import SoloCommunicator
from runtime.groups.gloo import GlooCommunicator
from runtime.layers.model import Model
from runtime.monitoring.progress import ProgressMonitor
from storage.buckets import derive_buckets
from tests.helpers.harness import formed_world
from tests.helpers.runtime_support import data_for, training_of


class Branches(nn.Module):
    """A module of which a forward pass uses only one half; the other half gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.used(x)
        return out


def model() -> Model:
    torch.manual_seed(1)
    layers = [nn.Linear(6, 6), Branches(), nn.Linear(6, 1)]
    return Model(training_of(layers), data_for("unused.py:build"))


OWNERS = {0: (0, 1), 1: (0, 1), 2: (0, 1)}


@pytest.fixture
def pair() -> Iterator[list[GlooCommunicator]]:
    with formed_world(2, [(0, 1)]) as pair:
        yield pair


@pytest.mark.parametrize("slice_bytes", [1, 400, 1 << 20])
def test_sums_over_owners(
    pair: list[GlooCommunicator], monkeypatch: pytest.MonkeyPatch, slice_bytes: int
) -> None:
    monkeypatch.setattr(gradients, "SLICE_BYTES", slice_bytes)
    models = [model(), model()]
    alone = model()
    inputs = [torch.rand(4, 6, dtype=torch.float64) for _ in range(4)]
    norms: dict[int, tuple[float, int]] = {}

    def run(rank: int) -> None:
        mine = models[rank]
        buckets = derive_buckets(mine.parameter_layers, OWNERS, mine.parameter_sizes)
        grads = GradientBuffers.from_buckets(mine, buckets, pair[rank])
        for _ in range(2):  # The second step must not contain anything of the first.
            grads.begin()
            for number, x in enumerate(inputs[2 * rank : 2 * rank + 2]):
                if number == 1:
                    grads.arm()
                out = mine.forward(0, 3, x, step=1, row=0)
                assert isinstance(out, torch.Tensor)
                out.sum().backward()  # type: ignore[no-untyped-call]
            grads.finish(ProgressMonitor())
        norms[rank] = grads.squared_norm()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for x in inputs:
        out = alone.forward(0, 3, x, step=1, row=0)
        assert isinstance(out, torch.Tensor)
        out.sum().backward()  # type: ignore[no-untyped-call]
    squared = 0.0
    for (name, expected), (_, one), (_, two) in zip(
        *(m.named_parameters(range(3)) for m in (alone, *models)), strict=True
    ):
        assert one.grad is not None and two.grad is not None
        wanted = torch.zeros_like(expected) if expected.grad is None else expected.grad
        assert torch.allclose(one.grad, wanted, rtol=1e-12, atol=0), name
        assert torch.equal(one.grad, two.grad), name
        squared += float(wanted.square().sum())
    assert norms[0] == (pytest.approx(squared, rel=1e-12), 0) and norms[1] == (0.0, 0)


def test_slices_cover_a_bucket_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "SLICE_BYTES", 300)
    mine = model()
    (bucket,) = derive_buckets(mine.parameter_layers, OWNERS, mine.parameter_sizes)
    flat = torch.arange(float(bucket.numel))
    slices = gradients._slices(bucket, flat)
    assert len(slices) > 1
    assert torch.equal(torch.cat([one.flat for one in reversed(slices)]), flat)
    assert sorted(name for one in slices for name in one.names) == sorted(bucket.parameters)


def test_a_bucket_that_is_not_finite_is_counted() -> None:
    mine = model()
    owners = {layer: (0,) for layer in range(3)}
    buckets = derive_buckets(mine.parameter_layers, owners, mine.parameter_sizes)
    grads = GradientBuffers.from_buckets(mine, buckets, SoloCommunicator())
    grads.begin()
    dict(mine.named_parameters([0]))["0.weight"].grad[0, 0] = torch.inf  # type: ignore[index]
    grads.finish(ProgressMonitor())
    assert grads.squared_norm() == (0.0, 1)


def test_a_second_gradient_in_one_backward_pass_is_rejected() -> None:
    """It would be added after the all-reduce, unnoticed."""
    mine = model()
    owners = {layer: (0,) for layer in range(3)}
    buckets = derive_buckets(mine.parameter_layers, owners, mine.parameter_sizes)
    grads = GradientBuffers.from_buckets(mine, buckets, SoloCommunicator())
    grads.begin()
    grads.arm()
    weight = dict(mine.named_parameters([0]))["0.weight"]
    weight.sum().backward()  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        weight.sum().backward()  # type: ignore[no-untyped-call]
    grads.close()
    assert weight.grad is None
    weight.sum().backward()  # type: ignore[no-untyped-call]
