"""Measures a model layer by layer on a microbatch: what the planner cuts stages by.

Times are medians after a warm-up. Memory is what autograd really saves, not an estimate. Activation
checkpointing is not applied here: the planner knows whether the job uses it.

``python -m runtime.profile`` reads a ``TrainingData`` (msgpack or JSON) on stdin and writes a
``ProfileData`` as JSON on stdout; what the user has to change is said on stderr, with exit code 2.
"""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable

import msgspec
import torch
from torch import Tensor, nn

from runtime.activations import Activation, flatten
from runtime.model import CPU, Model
from runtime.protocol import LayerProfileData, ProfileData, TrainingData
from runtime.sampling import Sampler
from runtime.training import Training, TrainingError, load_training

_WARM_UPS = 2
_REPEATS = 5
_LONG_S = 0.5
"""A layer that has taken this long is not measured again: noise is small against it."""


def measure(model: Model, data: TrainingData) -> ProfileData:
    """Profile all layers of a model that is held completely. Leaves parameters and buffers as they were."""
    training, rows = model.training, data.microbatch_rows
    sampler = Sampler(len(training.dataset), data.global_batch, data.seed)
    x, target = sampler.load(training.dataset, sampler.indices(1)[:rows])
    activation: Activation = x.to(model.device)
    target = target.to(model.device)
    optimizer_bytes = _optimizer_bytes(training, model)
    shapes = model.output_shapes()
    layers: list[LayerProfileData] = []
    with model.buffers_kept(), model.without_checkpointing():
        for layer in range(model.layer_count):
            last = layer == model.layer_count - 1
            loss = training.loss if last else None
            forward_s, backward_s = _time_layer(model, layer, activation, loss, target)
            saved_bytes, activation = _saved_bytes(model, layer, activation)
            tensors = model.tensors_of(layer)
            sizes = {t.name: t.value.numel() * t.value.element_size() for t in tensors}
            layers.append(
                LayerProfileData(
                    forward_ms=1e3 * forward_s,
                    backward_ms=1e3 * backward_s,
                    parameter_bytes=sum(sizes.values()),
                    gradient_bytes=sum(sizes[t.name] for t in tensors if t.trainable),
                    optimizer_bytes=sum(optimizer_bytes.get(t.name, 0) for t in tensors),
                    activation_bytes=saved_bytes,
                    output_bytes=shapes[layer].size_bytes(rows),
                )
            )
    for _, parameter in model.named_parameters(range(model.layer_count)):
        parameter.grad = None
    return ProfileData(
        layers=tuple(layers), microbatch_rows=rows, device_memory_bytes=_device_memory_bytes(model.device)
    )


def _time_layer(
    model: Model,
    layer: int,
    x: Activation,
    loss: Callable[[Activation, Tensor], Tensor] | None,
    target: Tensor,
) -> tuple[float, float]:
    """Median seconds of the forward and the backward pass."""
    forwards: list[float] = []
    backwards: list[float] = []
    began = time.perf_counter()
    for repeat in range(_WARM_UPS + _REPEATS):
        given = _as_received(x)
        start = _now(model.device)
        output = model.forward(layer, layer + 1, given, step=1, row=0)
        outputs = flatten(output) if loss is None else (loss(output, target),)
        middle = _now(model.device)
        roots = [t for t in outputs if t.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        end = _now(model.device)
        if repeat >= _WARM_UPS or end - began > _LONG_S:
            forwards.append(middle - start)
            backwards.append(end - middle)
        if end - began > _LONG_S:
            break
    return statistics.median(forwards), statistics.median(backwards)


def _saved_bytes(model: Model, layer: int, x: Activation) -> tuple[int, Activation]:
    """Bytes of the distinct memory that autograd keeps for the backward pass, and the layer's output."""
    parameters = {t.value.untyped_storage().data_ptr() for t in model.tensors_of(layer)}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model.forward(layer, layer + 1, _as_received(x), step=1, row=0)
    detached = tuple(t.detach() for t in flatten(output))
    return sum(sizes.values()), detached if isinstance(output, tuple) else detached[0]


def _as_received(x: Activation) -> Activation:
    """As a stage gets it from the stage before: a leaf that gradients flow to."""
    tensors = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in flatten(x))
    return tensors if isinstance(x, tuple) else tensors[0]


def _optimizer_bytes(training: Training, model: Model) -> dict[str, int]:
    """What the user's optimizer keeps for each parameter: found by a step on zeros of the same shapes."""
    named = [
        (name, nn.Parameter(torch.zeros_like(parameter)))
        for name, parameter in model.named_parameters(range(model.layer_count))
    ]
    if not named:
        return {}
    optimizer = training.optimizer(named)
    for _, parameter in named:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {
        name: sum(
            v.numel() * v.element_size() for v in optimizer.state[parameter].values() if isinstance(v, Tensor)
        )
        for name, parameter in named
    }


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _device_memory_bytes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def main() -> int:
    """``ftd plan`` runs this in a process of its own, as the daemons and the command line have no torch."""
    raw = sys.stdin.buffer.read()
    try:
        decode = msgspec.json.decode if raw.lstrip()[:1] == b"{" else msgspec.msgpack.decode
        data = decode(raw, type=TrainingData)
    except msgspec.DecodeError as error:
        sys.stderr.write(f"no TrainingData on stdin: {error}\n")
        return 2
    device = torch.device("cuda") if data.backend == "nccl" else CPU
    try:
        # What the user's code prints must not get between the bytes of the answer.
        with contextlib.redirect_stdout(sys.stderr):
            profile = measure(Model(load_training(data), data, device), data)
    except TrainingError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.buffer.write(msgspec.json.encode(profile) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
