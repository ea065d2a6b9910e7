"""Profiles of layers: sizes are exact, times are positive, the model is unchanged; and the command line."""

import gc
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode

from planner.values import Recompute
from runtime.errors import TrainingError
from runtime.layers.activations import flatten
from runtime.layers.model import Model, first_batch
from runtime.layers.optimizer import Optimization
from runtime.layers.state import LayerStates
from runtime.profiling.layer_profile import profile_model
from runtime.wire.measurement import LayerMeasurements, MeasurementProgress, spread_of
from tests.helpers.reference import load
from tests.helpers.runtime_support import data_for, gpt_data, script, training_of

REPOSITORY = Path(__file__).resolve().parents[2]
HELPERS = REPOSITORY / "tests/helpers"


def test_sizes_are_those_of_the_model() -> None:
    data = gpt_data(precision="float32")
    profile = profile_model(Model(load(data), data), data).profile
    embedding, block, _, head = profile.layers
    width, length, rows = 8, 8, 4
    assert embedding.parameter_bytes == 4 * (256 + length) * width
    assert head.parameter_bytes == 4 * (256 + 2) * width
    assert block.parameter_bytes == block.gradient_bytes == 4 * (12 * width**2 + 13 * width)
    tensors_of_block = 12
    assert block.optimizer_bytes == 2 * block.parameter_bytes + 4 * tensors_of_block
    assert block.output_bytes == embedding.output_bytes == 4 * rows * length * width
    assert head.output_bytes == 4 * rows * length * 256
    assert profile.microbatch_rows == rows
    assert profile.device_memory_bytes is None
    assert all(layer.forward_ms > 0 and layer.backward_ms > 0 for layer in profile.layers)


def test_activation_bytes_are_those_that_autograd_saves() -> None:
    data = data_for("unused.py:build")
    layers: list[nn.Module] = [nn.Linear(6, 6), nn.Sequential(nn.Tanh(), nn.Sigmoid()), nn.Linear(6, 1)]
    profile = profile_model(Model(training_of(layers), data), data).profile
    one_tensor = 4 * 6 * 8
    loss = 2 * 4 * 8  # The output and the target.
    sizes = [layer.activation_bytes for layer in profile.layers]
    assert sizes == [one_tensor, 2 * one_tensor, one_tensor + loss]


def test_working_bytes_are_the_largest_gradient_and_the_values_between_operations() -> None:
    data = data_for("unused.py:build", microbatch_rows=2)
    layers: list[nn.Module] = [nn.Linear(6, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, 1)]
    first, middle, last = profile_model(Model(training_of(layers), data), data).profile.layers
    weight, values = 8 * 64 * 64, 2 * 8 * 64
    assert middle.gradient_bytes == weight
    assert weight <= middle.working_bytes <= weight + 4 * values
    assert max(first.working_bytes, last.working_bytes) < weight


@pytest.mark.parametrize("is_split", [False, True])
def test_measuring_keeps_no_activations(is_split: bool) -> None:
    data = data_for("unused.py:build")
    training = training_of([nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)])
    if is_split:
        data = data_for("split_gpt.py:build", HELPERS, within_node="auto")
        training = load(data)
    model = Model(training, data)
    assert (model.tensor_plan is not None) is is_split

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(one), Tensor) for one in gc.get_objects())

    profile_model(model, data)
    before = tensors()
    profile_model(model, data)
    assert tensors() == before


def test_activation_bytes_do_not_depend_on_how_the_job_recomputes() -> None:
    plain, *others = (
        profile_model(Model(load(data), data), data).profile.layers
        for data in (gpt_data(activation_checkpointing=way) for way in ("none", "full", "selective", "auto"))
    )
    for layers in others:
        assert [layer.activation_bytes for layer in layers] == [layer.activation_bytes for layer in plain]
    known = [
        {(layer.full is None, layer.selective is None) for layer in layers} for layers in (plain, *others)
    ]
    assert known == [{(True, True)}, {(False, True)}, {(False, False)}, {(False, False)}]


class Feed(nn.Module):
    """A block of two matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 24), nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.narrow(torch.tanh(self.wide(x)))
        return result


def test_recomputation_keeps_inputs_and_if_selective_the_outputs_of_matrix_products() -> None:
    data = data_for("unused.py:build", activation_checkpointing="auto", microbatch_rows=8)
    found = profile_model(
        Model(training_of([Feed(), Feed(), nn.Linear(6, 1)]), data), data, devices_per_node=2
    )
    one = 8 * 6 * 8
    for block in found.profile.layers[:2]:
        assert block.full is not None and block.selective is not None
        assert block.activation_bytes == (1 + 4) * one, "the input and the output of tanh"
        assert block.full.activation_bytes == one
        assert block.selective.activation_bytes == (1 + 4 + 1) * one
        assert block.full.recompute_ms >= 0 and block.selective.recompute_ms >= 0
        assert [split.activation_bytes for split in block.split] == [5 * one // 2]


def test_copies_of_weights_in_low_precision_do_not_shrink_with_the_rows() -> None:
    """Parameters, gradients and optimizer state stay in float32; the memory that autograd keeps is measured."""
    data = data_for("unused.py:build", microbatch_rows=8, precision="bfloat16")
    training = replace(
        training_of([nn.Linear(6, 1)]),
        layers=[nn.Linear(a, b, dtype=torch.float32) for a, b in ((6, 32), (32, 64), (64, 1))],
    )
    _, wide, _ = profile_model(Model(training, data), data, devices_per_node=2).profile.layers
    weights = 32 * 64
    assert wide.parameter_bytes == wide.gradient_bytes == 4 * (weights + 64)
    assert wide.optimizer_bytes == 2 * wide.parameter_bytes + 2 * 4
    assert wide.output_bytes == 2 * 8 * 64
    (split,) = wide.split
    assert wide.activation_bytes == 2 * (weights + 8 * 32)
    assert split.activation_bytes == 2 * (weights + 4 * 32)


class LiveBytes(TorchDispatchMode):
    """A mode that counts the bytes of tensors created by operations while these tensors are alive."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: Any = (), named: dict[str, Any] | None = None
    ) -> Any:
        output = operation(*arguments, **(named or {}))
        for tensor in tree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._known:
                storage = tensor.untyped_storage()
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return output

    def _freed(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.now -= size


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_stage_keeps_as_many_bytes_as_the_profile_predicts(precision: str) -> None:
    """The profile predicts the bytes that are alive after the forward pass of several blocks, without the
    stage's output.
    """
    data = data_for(
        "tests.helpers.architectures:build",
        REPOSITORY,
        activation_checkpointing="auto",
        microbatch_rows=8,
        precision=precision,
        arguments={"architecture": "llama"},
    )
    model = Model(load(data), data)
    layers = profile_model(model, data).profile.layers[1:-1]
    model.provide(range(model.layer_count))
    batch = first_batch(model.training, 8, torch.float32)
    with torch.no_grad():
        received = flatten(model.forward(0, 1, None, step=1, row=0, batch=batch))
    parts = [part.requires_grad_(part.is_floating_point()) for part in received]
    kept: dict[Recompute, int] = {
        "none": sum(layer.activation_bytes for layer in layers),
        "selective": sum(layer.selective.activation_bytes for layer in layers if layer.selective),
        "full": sum(layer.full.activation_bytes for layer in layers if layer.full),
    }
    assert kept["none"] > 1.5 * kept["selective"] > 4 * kept["full"] > 0
    given = sum(part.nbytes for part in parts)
    tensors = [t.value for layer in range(model.layer_count) for t in model.tensors_of(layer)]
    for way, expected in kept.items():
        with model.override_recompute(way), LiveBytes([*tensors, *parts]) as live:
            output = model.forward(1, 1 + len(layers), tuple(parts), step=1, row=0, batch=batch)
            passed = sum(part.nbytes for part in flatten(output))
            assert given + live.now == pytest.approx(expected + passed, abs=passed + 0.02 * expected)
        del output


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result.relu_()


def test_a_layer_that_cannot_be_recomputed_selectively_is_reported() -> None:
    """With ``auto`` the other modes remain; a job that requires this mode is rejected with the remedy."""
    layers = [InPlace(), nn.Linear(6, 1)]
    data = data_for("unused.py:build", activation_checkpointing="auto")
    found = profile_model(Model(training_of(layers), data), data)
    assert found.profile.layers[0].selective is None and found.profile.layers[0].full is not None
    (problem,) = found.unselectable
    assert problem.startswith("layer 0 cannot be recomputed selectively: ") and "mutated" in problem
    data = data_for("unused.py:build", activation_checkpointing="selective")
    with pytest.raises(
        TrainingError, match=r"layer 0 cannot .*; use activation_checkpointing = full, or auto"
    ):
        profile_model(Model(training_of(layers), data), data)


class Momentum(torch.optim.SGD):
    """An optimizer that combines elements: its own step divides by the norm of a whole parameter."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data -= group["lr"] * parameter.grad / parameter.grad.norm()


def test_the_profile_says_why_a_model_cannot_be_sharded() -> None:
    layers: list[nn.Module] = [nn.Linear(6, 6), nn.Linear(6, 1)]
    data = data_for("unused.py:build")
    assert profile_model(Model(training_of(layers), data), data).profile.shard_problem is None
    own = training_of(layers, optimizer=lambda named: Momentum([p for _, p in named], lr=1e-2))
    problem = profile_model(Model(own, data), data).profile.shard_problem
    assert problem == "its optimizer Momentum is not known to update each element by itself"
    coupled = training_of([nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)])
    profile = profile_model(Model(coupled, data), data).profile
    assert profile.shard_problem is None
    # The running mean and variance of six features, and the number of batches.
    assert [layer.buffer_bytes for layer in profile.layers] == [0, 2 * 6 * 8 + 8, 0]


def test_measuring_leaves_the_model_pristine() -> None:
    data = data_for("unused.py:build")
    torch.manual_seed(1)
    layers: list[nn.Module] = [Several(6, 6), nn.Linear(6, 1)]
    model = Model(training_of(layers), data)
    states = LayerStates(model, Optimization(model))
    before = [states.pack(layer) for layer in range(2)]
    profile_model(model, data)
    for layer, (header, payload) in enumerate(before):
        header_now, payload_now = states.pack(layer)
        assert header_now == header
        assert torch.equal(payload_now, payload)
    assert all(parameter.grad is None for _, parameter in model.named_parameters(range(2)))


def test_a_layer_without_gradients_costs_nothing_backwards() -> None:
    data = gpt_data()
    training = load(data)
    training.layers[0].requires_grad_(False)
    profile = profile_model(Model(training, data), data).profile
    assert profile.layers[0].gradient_bytes == profile.layers[0].optimizer_bytes == 0
    assert profile.layers[0].parameter_bytes > 0 == profile.layers[0].buffer_bytes
    assert profile.layers[0].backward_ms < profile.layers[1].backward_ms


def test_the_state_of_optimizers_with_fused_kernels_is_measured() -> None:
    """One group has momentum and another has none; Adam has two moments and a step. Adagrad computes with values
    before its kernel does, so it makes real steps of one parameter at a time.
    """

    def momentum(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        biases = [p for name, p in named if name.endswith("bias")]
        weights = [p for name, p in named if name.endswith("weight")]
        return torch.optim.SGD(
            [{"params": biases, "momentum": 0.0}, {"params": weights}], momentum=0.9, fused=True
        )

    def fused(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in named], fused=True)

    def with_values(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad([p for _, p in named], fused=True)

    data = data_for("unused.py:build", precision="float64")
    found = {}
    for optimizer in (momentum, fused, with_values):
        training = training_of([nn.Linear(6, 6).double(), nn.Linear(6, 1).double()], optimizer=optimizer)
        layers = profile_model(Model(training, data), data).profile.layers
        found[optimizer] = [layer.optimizer_bytes for layer in layers]
    assert found[momentum] == [8 * 36, 8 * 6]
    assert found[fused] == [16 * (36 + 6) + 2 * 4, 16 * (6 + 1) + 2 * 4]
    assert found[with_values] == [8 * (36 + 6) + 2 * 4, 8 * (6 + 1) + 2 * 4]


def test_the_times_are_the_medians_of_the_measurements() -> None:
    data = gpt_data()
    found = profile_model(Model(load(data), data), data)
    assert found.names == ("Embedding", "Block", "Block", "Head")
    assert found.device.endswith("thread") or found.device.endswith("threads")
    for layer, (whole,) in zip(found.profile.layers, found.rows, strict=True):
        assert (layer.forward_ms, layer.backward_ms) == (whole.forward.median_ms, whole.backward.median_ms)
        # The second block adds one forward pass to the times of the first, which it shares.
        assert whole.rows == 4 and 7 <= whole.backward.repeats <= 31
        assert whole.forward.repeats - whole.backward.repeats in (0, 1)
        for spread in (whole.forward, whole.backward):
            assert spread.minimum_ms <= spread.lower_quartile_ms <= spread.median_ms
            assert spread.median_ms <= spread.upper_quartile_ms <= spread.maximum_ms


def test_a_spread_is_that_of_the_numbers() -> None:
    spread = spread_of([0.004, 0.001, 0.003, 0.002, 0.010])
    assert spread.repeats == 5
    assert spread.minimum_ms == 1.0 and spread.median_ms == 3.0 and spread.maximum_ms == 10.0
    assert (spread.lower_quartile_ms, spread.upper_quartile_ms) == (2.0, 4.0)
    alone = spread_of([0.5])
    assert alone.minimum_ms == alone.lower_quartile_ms == alone.median_ms == alone.maximum_ms == 500.0


class RowsSeen(nn.Module):
    """A layer that takes a time that depends on its rows, and records the numbers of rows of its calls."""

    def __init__(self, per_row_s: float = 0.004) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.per_row_s = per_row_s
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        time.sleep(self.per_row_s * len(x))
        result: torch.Tensor = self.linear(x)
        return result


def test_a_stage_of_several_devices_takes_as_long_as_its_fullest_device() -> None:
    data = data_for("unused.py:build", microbatch_rows=8)
    layer = RowsSeen()
    found = profile_model(Model(training_of([layer, nn.Linear(6, 1)]), data), data, devices_per_node=5)
    assert [entry.rows for entry in found.rows[0]] == [8, 4, 3, 2]
    assert set(layer.seen) == {8, 4, 3, 2}, "rows of ⌈8/5⌉ and ⌈8/4⌉ devices are the same measurement"
    split = {entry.devices: entry for entry in found.profile.layers[0].split}
    assert list(split) == [2, 3, 4, 5]
    assert split[4].forward_ms == split[5].forward_ms
    quickest_ms = [entry.forward.minimum_ms for entry in found.rows[0]]
    assert quickest_ms == sorted(quickest_ms, reverse=True)
    for devices, rows in ((2, 4), (3, 3), (4, 2)):
        assert split[devices].forward_ms >= 4 * rows
        assert split[devices].backward_ms > 0


def test_short_layers_are_measured_more_often_than_long_ones() -> None:
    data = data_for("unused.py:build", microbatch_rows=8)
    found = profile_model(Model(training_of([nn.Linear(6, 6), RowsSeen(), nn.Linear(6, 1)]), data), data)
    repeats = [whole.forward.repeats for (whole,) in found.rows]
    assert repeats[0] > repeats[1] == 3


def test_layers_that_do_the_same_work_share_their_times() -> None:
    data = data_for("unused.py:build", microbatch_rows=8)
    layers: list[nn.Module] = [nn.Linear(6, 6), *(RowsSeen(0.01) for _ in range(3)), nn.Linear(6, 1)]
    found = profile_model(Model(training_of(layers), data), data)
    first, second, third = (found.profile.layers[index].forward_ms for index in (1, 2, 3))
    assert first == second == third
    assert [entry.forward.repeats for (entry,) in found.rows][1:4] == [5, 5, 5], "3, and one for each other"


def test_a_layer_that_only_looks_like_another_one_is_measured_separately() -> None:
    slow, slower = RowsSeen(0.01), RowsSeen(0.03)
    data = data_for("unused.py:build", microbatch_rows=8)
    found = profile_model(Model(training_of([nn.Linear(6, 6), slow, slower, nn.Linear(6, 1)]), data), data)
    assert found.profile.layers[2].forward_ms > 2 * found.profile.layers[1].forward_ms


def test_no_more_devices_are_measured_than_there_are_rows() -> None:
    data = data_for("unused.py:build", microbatch_rows=2)
    found = profile_model(Model(training_of([nn.Linear(6, 1)]), data), data, devices_per_node=8)
    assert [entry.devices for entry in found.profile.layers[0].split] == [2]


class Several(nn.Linear):
    """A layer that needs at least two rows."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 2:
            raise ValueError("one row is too few")
        return super().forward(x)


def test_a_layer_that_cannot_compute_on_few_rows_has_no_times_for_them() -> None:
    data = data_for("unused.py:build")
    layers: list[nn.Module] = [Several(6, 6), nn.Linear(6, 1)]
    found = profile_model(Model(training_of(layers), data), data, devices_per_node=4)
    assert [entry.devices for entry in found.profile.layers[0].split] == [2, 3]
    assert [entry.devices for entry in found.profile.layers[1].split] == [2, 3, 4]
    (problem,) = found.unmeasured
    assert problem.startswith("layer 0 raised ValueError on 1 rows")


def run(stdin: bytes, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "runtime.profiling.layer_profile", "--parent", str(os.getpid()), *arguments],
        input=stdin,
        capture_output=True,
        cwd=REPOSITORY,
        check=False,
    )


def test_the_command_takes_msgpack_and_json_and_answers_json(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        import os

        def build():
            print("what users print must not get into the answer")
            os.write(1, b"nor what their libraries do")
            return Training(layers=[nn.Linear(3, 1)], loss=functional.mse_loss, optimizer=sgd, dataset=Rows())
        """,
    )
    data = data_for("mine.py:build", tmp_path)
    for encode in (msgspec.json.encode, msgspec.msgpack.encode):
        done = run(encode(data), "--devices-per-node", "2")
        assert done.returncode == 0, done.stderr.decode()
        progress, found = [
            msgspec.json.decode(line, type=MeasurementProgress | LayerMeasurements)
            for line in done.stdout.splitlines()
        ]
        assert progress == MeasurementProgress(done=1, total=1)
        assert isinstance(found, LayerMeasurements)
        assert [layer.parameter_bytes for layer in found.profile.layers] == [4 * 8]
        assert [split.devices for split in found.profile.layers[0].split] == [2]
        assert b"what users print" in done.stderr and b"nor what their libraries do" in done.stderr


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        (b'{"function": 3}', "no TrainingData on stdin"),
        (msgspec.json.encode(data_for("missing.py:build")), "missing.py does not exist"),
    ],
)
def test_errors_of_the_user_are_reported_with_exit_code_2(stdin: bytes, message: str) -> None:
    done = run(stdin)
    assert done.returncode == 2
    assert message in done.stderr.decode()
    assert b"Traceback" not in done.stderr
    assert not done.stdout
