"""Tests of deferred modules: a model is built without memory, and each of its tensors gets its original value."""

import copyreg
import dataclasses
import io
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from runtime.deferred import LARGE_BYTES, DeferredModule, Noise, Recording, UntrackedWriteError, recorded
from runtime.errors import TrainingError
from runtime.layers.model import Model
from tests.helpers.architecture_runs import job_of
from tests.helpers.architectures import ARCHITECTURES, build, lora
from tests.helpers.deferred import whole
from tests.helpers.harness import ROOT


class Unusual(nn.Module):
    """A module whose initialisation depends on values, on other parameters and on memory."""

    def __init__(self) -> None:
        super().__init__()
        self.orthogonal = nn.Linear(64, 64)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.copied = nn.Linear(64, 64)
        self.copied.weight.data.copy_(self.orthogonal.weight.data.t() * 2)
        with torch.no_grad():
            self.copied.weight[3:9] = 0.5
        self.product = nn.Parameter(torch.randn(64, 64) @ torch.randn(64, 64))
        with torch.no_grad():
            self.product /= self.product.norm()
        self.twice = nn.Parameter(self.product.detach().clone().double())
        self.table = nn.Embedding(50, 64, padding_idx=3)
        nn.init.trunc_normal_(self.table.weight)
        self.table.weight.data += torch.from_numpy(self.table.weight.detach().numpy().copy())
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))
        self.sparse = nn.Linear(64, 64)
        nn.init.sparse_(self.sparse.weight, 0.3)
        self.recurrent = nn.LSTM(16, 32, 2)
        self.tied = nn.Linear(64, 64, bias=False)
        self.tied.weight = self.orthogonal.weight
        self.register_buffer("mask", torch.tril(torch.ones(64, 64, dtype=torch.bool)), persistent=False)
        self.register_buffer("statistics", torch.rand(64, 64))
        self.apply(self._scale)

    @staticmethod
    def _scale(module: nn.Module) -> None:
        if isinstance(module, nn.LSTM):
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=0.02 / len(list(module.parameters())) ** 0.5)


class Draws(nn.Module):
    """A module whose initial values depend on where in the generator's stream each of them is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(8)
        self.first = self._drawn(64, 64)
        self.odd = self._drawn(61, 67)
        self.small = nn.Parameter(torch.randn(5))
        self.own = nn.Parameter(torch.randn(64, 64, generator=self.generator))
        self.wide = self._drawn(64, 65, dtype=torch.float64)
        self.low = self._drawn(64, 65, dtype=torch.bfloat16)
        self.own_small = nn.Parameter(torch.rand(3, generator=self.generator))
        self.turned = self._drawn(64, 64)
        with torch.no_grad():
            self.turned.t()[3:50].normal_()
            self.turned[7, 2:9].uniform_()
            self.turned[8:11].normal_(std=0.0)
        self.shuffled = nn.Parameter(torch.randperm(4096).float())
        self.dropped = nn.Parameter(nn.functional.dropout(torch.ones(64, 64)))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(4)
            self.aside = self._drawn(64, 64)
        self.back = self._drawn(64, 64)
        torch.manual_seed(6)
        self.seeded = self._drawn(64, 64)
        torch.manual_seed(6)
        self.seeded_alike = self._drawn(64, 64)
        state = torch.get_rng_state()
        self.before = self._drawn(64, 64)
        torch.set_rng_state(state)
        self.repeated = self._drawn(64, 64)
        self.generator.set_state(torch.default_generator.get_state())
        self.copied_state = nn.Parameter(torch.randn(64, 64, generator=self.generator))
        self.copied_small = nn.Parameter(torch.randn(2, generator=self.generator))
        self.read = self._drawn(64, 64)
        self.read.detach().numpy()
        self.last = self._drawn(64, 64)

    @staticmethod
    def _drawn(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
        return nn.Parameter(torch.empty(rows, columns, dtype=dtype).normal_())


def at_once(make: Callable[[], nn.Module], seed: int = 3) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(seed)
    return make(), torch.get_rng_state()


def deferred(
    make: Callable[[], nn.Module], seed: int = 3, large_bytes: int = LARGE_BYTES, **options: Any
) -> tuple[nn.Module, Recording]:
    torch.manual_seed(seed)
    recording = Recording()
    with patch("runtime.deferred.LARGE_BYTES", large_bytes), recorded(recording, **options):
        made = make()
    return made, recording


def check_equal(make: Callable[[], nn.Module], large_bytes: int) -> int:
    """Compare a deferred module with one that is built at once; return how many tensors had no memory."""
    with torch.random.fork_rng(devices=[]):
        wanted, state = at_once(make)
        made, recording = deferred(make, large_bytes=large_bytes)
        assert torch.equal(torch.get_rng_state(), state)
    lasting = made.state_dict(keep_vars=True)
    without = sum(recording.view_of(value) is not None for value in lasting.values())
    other = whole(DeferredModule(made, recording))
    for (name, value), (same, expected) in zip(
        other.state_dict().items(), wanted.state_dict().items(), strict=True
    ):
        assert name == same
        assert value.dtype == expected.dtype and value.stride() == expected.stride(), name
        assert torch.equal(value, expected), name
    for (name, value), (_, expected) in zip(other.named_buffers(), wanted.named_buffers(), strict=True):
        assert torch.equal(value, expected), name
    return without


@pytest.fixture(autouse=True)
def generators_kept() -> Any:
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.mark.parametrize("large_bytes", [0, 4096])
def test_values_are_those_of_a_module_that_is_built_at_once(large_bytes: int) -> None:
    assert check_equal(Unusual, large_bytes) > 8


@pytest.mark.parametrize("large_bytes", (1, 1 << 12, 1 << 14))
def test_every_value_comes_from_its_place_in_the_stream(large_bytes: int) -> None:
    assert check_equal(Draws, large_bytes) >= 8


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mixtral", "modernbert", "mamba2", "resnet", "t5"])
def test_values_of_architectures(architecture: str) -> None:
    assert check_equal(ARCHITECTURES[architecture].make, 0) > 8


def test_values_of_adapters() -> None:
    assert check_equal(lambda: lora(ARCHITECTURES["llama"].make()), 0) > 8


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_the_parts_of_a_model_without_memory_are_compared_with_the_whole(architecture: str) -> None:
    """Both runs have the same values, whatever the names by which they refer to a tied tensor."""
    job = job_of(architecture, precision="float32")
    training = build(architecture)
    assert callable(training.model)
    made, recording = deferred(training.model, large_bytes=1)
    model = Model(dataclasses.replace(training, model=DeferredModule(made.float(), recording)), job)
    assert not model.held_layers


def test_tied_tensors_stay_tied() -> None:
    made, recording = deferred(Unusual, large_bytes=0)
    model = whole(DeferredModule(made, recording))
    assert isinstance(model, Unusual)
    assert model.tied.weight is model.orthogonal.weight


def test_memory_that_is_written_without_torch_counts() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))
            self.weight.detach().numpy()[0] = np.arange(64)

    assert check_equal(Written, 0) == 0


@pytest.mark.parametrize("how", ["torch.save", "safetensors"])
def test_a_tensor_is_written_to_a_file_with_its_values(how: str) -> None:
    def copy(state: dict[str, Tensor]) -> Any:
        if how == "safetensors":
            return safetensors.torch.load(safetensors.torch.save(state))
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file)

    def make() -> nn.Module:
        made = nn.Linear(64, 64)
        made.load_state_dict(copy(nn.Linear(64, 64).state_dict()))
        return made

    before = dict(copyreg.dispatch_table)
    check_equal(make, 0)
    assert copyreg.dispatch_table == before


def test_an_operation_on_a_list_of_small_and_large_tensors_writes_to_all_of_them() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Linear(64, 64), nn.Linear(2, 2)
            torch._foreach_mul_([p.data for p in self.parameters()], 0.5)
            torch._foreach_copy_(
                [self.large.weight.data, self.small.weight.data], [torch.ones(64, 64), torch.ones(2, 2)]
            )
            self.large.weight.data.mul_(3)

    check_equal(Scaled, 4096)


def test_tensors_may_be_reshaped_but_not_enlarged() -> None:
    class Reshaped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.less = nn.Parameter(torch.randn(64, 64).resize_(10, 20))
            self.made = nn.Parameter(torch.empty(3).resize_(64, 64).normal_())

    check_equal(Reshaped, 4096)
    with pytest.raises(TrainingError, match=r"enlarges a tensor with resize_, .* in its final size"):
        deferred(lambda: nn.ParameterList([torch.randn(64, 64).resize_(65, 64)]), large_bytes=4096)


def test_a_users_own_generator_is_unchanged() -> None:
    def make(generator: torch.Generator) -> nn.Module:
        module = nn.Linear(64, 64)
        nn.init.normal_(module.weight, generator=generator)
        return module

    wanted = make(torch.Generator().manual_seed(5))
    generator = torch.Generator().manual_seed(5)
    made, recording = deferred(lambda: make(generator), large_bytes=0)
    state = generator.get_state()
    other = whole(DeferredModule(made, recording))
    assert torch.equal(other.get_parameter("weight"), wanted.get_parameter("weight"))
    assert torch.equal(generator.get_state(), state)


class FromAnotherThread(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        with ThreadPoolExecutor(1) as threads:
            threads.submit(self.weight.detach().fill_, 2.0).result()


def test_writes_of_another_thread_count() -> None:
    assert check_equal(lambda: FromAnotherThread(torch.empty(64, 64)), 0) == 1


def test_a_tensor_that_two_threads_wrote_to_is_rejected() -> None:
    made, recording = deferred(lambda: FromAnotherThread(torch.zeros(64, 64)), large_bytes=0)
    with pytest.raises(UntrackedWriteError):
        DeferredModule(made, recording)


def test_a_tensor_is_filled_alone_and_as_often_as_it_is_needed() -> None:
    wanted, _ = at_once(Unusual)
    made, recording = deferred(Unusual, large_bytes=0)
    module = DeferredModule(made, recording)
    expected = wanted.state_dict()["copied.weight"]
    for dtype in (torch.float32, torch.float32, torch.float64):
        value = torch.empty(64, 64, dtype=dtype)
        module.fill({"copied.weight": value})
        assert torch.equal(value, expected.to(dtype))
    assert all(parameter.is_meta for parameter in module.root.parameters())


def test_present_modules_have_memory_for_a_while() -> None:
    made, recording = deferred(Unusual, large_bytes=0)
    module = DeferredModule(made, recording)
    before = dict(module.root.named_parameters())
    assert isinstance(module.root, Unusual)
    with module.materialised(module.root.table.modules(), torch.device("cpu")):
        assert module.root.table(torch.tensor([1])).isfinite().all()
        assert module.root.sparse.weight.is_meta
    assert dict(module.root.named_parameters()) == before


def test_streams_differ_from_tensor_to_tensor_and_are_the_same_every_time() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))

    values = []
    for _ in range(2):
        made, recording = deferred(make, exact=False, large_bytes=4096)
        values.append([p.detach() for p in whole(DeferredModule(made, recording)).parameters()])
    first, second = values
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[2]) and not torch.equal(first[1], first[3])
    assert float(first[0].abs().max()) == pytest.approx(1 / 8, rel=0.01)


MEMORY = """
import torch
from torch import nn
from runtime.deferred import DeferredModule, Recording, UntrackedWriteError, recorded

def peak_mib():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

torch.set_num_threads(1)
nn.Linear(10, 10)(torch.zeros(1, 10))
before = peak_mib()
recording = Recording()
with recorded(recording):
    made = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(24)))
module = DeferredModule(made, recording)
for number in range(24):
    with module.materialised([made[number]], torch.device("cpu"), exact=True):
        made[number](torch.zeros(1, 2048))
print(peak_mib() - before)
"""


def test_memory_is_that_of_the_largest_tensors() -> None:
    """There are 24 matrices of 16 MiB, of which one is scratch memory for random numbers, or materialised. The
    rest is code.
    """
    found = subprocess.run(
        [sys.executable, "-c", MEMORY], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert float(found.stdout) < 8 * 16


def test_a_tied_tensor_has_the_same_noise_by_each_of_its_names() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.between, self.last = (
                nn.Linear(256, 256),
                nn.Linear(256, 256),
                nn.Linear(256, 256),
            )
            self.last.weight = self.first.weight

    module = DeferredModule(*deferred(Tied))
    found = []
    for name in ("first", "between", "last"):
        with module.materialised([module.root.get_submodule(name)], torch.device("cpu")):
            found.append(module.root.get_parameter(f"{name}.weight").detach().clone())
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])


def test_noise_fills_tensors_of_any_size_and_is_the_same_each_time() -> None:
    like = torch.empty(1500, 1001, device="meta").t()  # Larger than the noise, and not row-major.
    noise = Noise(torch.float32)
    one, other = (noise.make(1, like, torch.device("cpu")) for _ in range(2))
    assert one.shape == like.shape and one.stride() == like.stride()
    assert torch.equal(one, other) and 0.019 < float(one.std()) < 0.021
    assert not torch.equal(one, noise.make(2, like, torch.device("cpu")))
    before = other.clone()
    one.zero_()
    assert torch.equal(other, before), "a tensor that is written to has memory of its own"
    assert torch.equal(noise.make(1, like, torch.device("cpu")), before)
