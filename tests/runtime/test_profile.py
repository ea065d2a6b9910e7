"""Profiles: sizes are exact, times are positive, the model is left as it was; and the command line."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from runtime.model import Model
from runtime.optimizer import Optimization
from runtime.profile import measure
from runtime.protocol import ProfileData
from runtime.state import LayerStates
from tests.runtime.reference import load
from tests.runtime.support import data_for, gpt_data, script, training_of

REPOSITORY = Path(__file__).resolve().parents[2]


def test_sizes_are_those_of_the_model() -> None:
    data = gpt_data(dtype="float32")
    profile = measure(Model(load(data), data), data)
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


def test_activation_bytes_are_what_autograd_keeps() -> None:
    data = data_for("unused.py:build")
    layers: list[nn.Module] = [nn.Linear(6, 6), nn.Sequential(nn.Tanh(), nn.Sigmoid()), nn.Linear(6, 1)]
    profile = measure(Model(training_of(layers), data), data)
    one_tensor = 4 * 6 * 8
    assert [layer.activation_bytes for layer in profile.layers] == [one_tensor, 2 * one_tensor, one_tensor]


def test_checkpointing_does_not_change_what_is_measured() -> None:
    plain, checkpointed = (
        measure(Model(load(data), data), data).layers
        for data in (gpt_data(), gpt_data(checkpoint_activations=True))
    )
    assert [layer.activation_bytes for layer in plain] == [layer.activation_bytes for layer in checkpointed]


def test_measuring_leaves_the_model_pristine() -> None:
    data = data_for("unused.py:build")
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), nn.Linear(6, 1)]
    model = Model(training_of(layers), data)
    states = LayerStates(model, Optimization(model))
    before = [states.pack(layer) for layer in range(2)]
    measure(model, data)
    for layer, (header, payload) in enumerate(before):
        header_now, payload_now = states.pack(layer)
        assert header_now == header
        assert torch.equal(payload_now, payload)
    assert all(parameter.grad is None for _, parameter in model.named_parameters(range(2)))


def test_a_layer_without_gradients_costs_nothing_backwards() -> None:
    data = gpt_data()
    training = load(data)
    training.layers[0].requires_grad_(False)
    profile = measure(Model(training, data), data)
    assert profile.layers[0].gradient_bytes == profile.layers[0].optimizer_bytes == 0
    assert profile.layers[0].backward_ms < profile.layers[1].backward_ms


def run(stdin: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "runtime.profile"],
        input=stdin,
        capture_output=True,
        cwd=REPOSITORY,
        check=False,
    )


def test_the_command_takes_msgpack_and_json_and_answers_json(tmp_path: Path) -> None:
    script(
        tmp_path,
        """
        def build():
            print("what users print must not get into the answer")
            return Training(layers=[nn.Linear(3, 1)], loss=functional.mse_loss, optimizer=sgd, dataset=Rows())
        """,
    )
    data = data_for("mine.py:build", tmp_path)
    for encode in (msgspec.json.encode, msgspec.msgpack.encode):
        done = run(encode(data))
        assert done.returncode == 0, done.stderr.decode()
        profile = msgspec.json.decode(done.stdout, type=ProfileData)
        assert [layer.parameter_bytes for layer in profile.layers] == [4 * 8]
        assert b"what users print" in done.stderr


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        (b'{"function": 3}', "no TrainingData on stdin"),
        (msgspec.json.encode(data_for("missing.py:build")), "missing.py does not exist"),
    ],
)
def test_what_the_user_has_to_change_is_said_with_exit_code_2(stdin: bytes, message: str) -> None:
    done = run(stdin)
    assert done.returncode == 2
    assert message in done.stderr.decode()
    assert b"Traceback" not in done.stderr
    assert not done.stdout
