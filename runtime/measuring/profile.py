"""Measures a model layer by layer on a microbatch: what the planner cuts stages by.

Times are medians after a warm-up; layers that do the same work share theirs. Memory is what autograd really
saves, not an estimate. Activation
checkpointing is not applied here: the planner knows whether the job uses it. The devices of a stage split a
microbatch by rows, so a stage of d devices takes what one takes for ⌈rows / d⌉ rows, which is measured, too.

``python -m runtime.measuring.profile --parent PID [--devices-per-node M]`` reads a ``TrainingData`` (msgpack
or JSON) on stdin and writes lines of ``runtime.wire.measurement`` on stdout; what the user has to change is
said on stderr, with exit code 2.
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from runtime.data.batches import slice_rows, to_device
from runtime.layers.activations import Activation, flatten
from runtime.layers.model import CPU, Model, first_batch
from runtime.parent import die_with_parent
from runtime.precision import PRECISIONS
from runtime.training import Batch, Training, TrainingError, load_training
from runtime.wire.measurement import (
    INVALID_EXIT,
    LayersMeasured,
    Progress,
    RowsMeasured,
    answers_on_stdout,
    spread_of,
)
from runtime.wire.protocol import LayerProfileData, ProfileData, SplitTimeData, TrainingData

_WARM_UPS = 2
_FEWEST_REPEATS, _MOST_REPEATS = 7, 31
_SHORT_S = 0.03
"""A layer is measured again, up to the most repeats, while it has taken less than this."""
_ENOUGH_S = 0.1
"""A layer that has taken this long is measured a few times only: noise is small against it."""
_FEW_REPEATS = 3
_LONG_S = 0.5
"""A layer that has taken this long is not measured again: noise is small against it."""
_EQUAL_WITHIN = 1.5
"""A layer that looks like an earlier one is measured by itself when its time differs by more than this factor."""


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of the repeats of one layer on so many rows, or of several layers that do the same work."""

    rows: int
    forwards: list[float]
    backwards: list[float]

    def agrees(self, other: "_Times") -> bool:
        """Return whether a repeat takes about as long as one of ``other``."""
        own_s, other_s = (
            statistics.median(map(sum, zip(times.forwards, times.backwards, strict=True)))
            for times in (self, other)
        )
        return max(own_s, other_s) <= _EQUAL_WITHIN * min(own_s, other_s)

    def add(self, other: "_Times") -> None:
        self.forwards.extend(other.forwards)
        self.backwards.extend(other.backwards)

    def measured(self) -> RowsMeasured:
        return RowsMeasured(
            rows=self.rows, forward=spread_of(self.forwards), backward=spread_of(self.backwards)
        )


def measure(
    model: Model,
    data: TrainingData,
    *,
    devices_per_node: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LayersMeasured:
    """Profile all layers of a model that is held completely. Leaves parameters and buffers as they were.

    :param progress: called with the number of layers that are done, and of all.
    """
    training, rows = model.training, data.microbatch_rows
    batch = first_batch(training, rows, PRECISIONS[data.precision].parameters)
    batch = to_device(batch, model.device)
    activation: Activation | None = None
    optimizer_bytes = _optimizer_bytes(training, model)
    sizes: list[LayerProfileData] = []
    times: list[dict[int, _Times]] = []
    looks: dict[Hashable, dict[int, _Times]] = {}
    unmeasured: list[str] = []
    fullest = _rows_of_fullest(rows, devices_per_node, coupled=model.couples_rows)
    with model.buffers_kept(), model.without_checkpointing():
        for layer in range(model.layer_count):
            equal = looks.setdefault(_look(model, layer, activation), {})
            whole = _time_layer(model, layer, activation, batch, rows, equal.get(rows))
            counts = sorted({*fullest.values()} - {rows})
            parts, problem = _time_parts(model, layer, activation, batch, rows, counts, equal)
            unmeasured += [problem] if problem else []
            times.append({**parts, rows: whole})
            for count, found in times[-1].items():
                equal.setdefault(count, found)
            saved_bytes, activation, output_bytes = _saved_bytes(model, layer, activation, batch, rows)
            sizes.append(_sizes(model, layer, optimizer_bytes, saved_bytes, output_bytes))
            progress(layer + 1, model.layer_count)
    layers: list[LayerProfileData] = []
    measured: list[tuple[RowsMeasured, ...]] = []
    for size, by_rows in zip(sizes, times, strict=True):
        found_by_rows = {count: by_rows[count].measured() for count in sorted(by_rows, reverse=True)}
        whole_time = found_by_rows[rows]
        layers.append(
            msgspec.structs.replace(
                size,
                forward_ms=whole_time.forward.median_ms,
                backward_ms=whole_time.backward.median_ms,
                split=_split_times(fullest, found_by_rows),
            )
        )
        measured.append(tuple(found_by_rows.values()))
    for _, parameter in model.named_parameters(range(model.layer_count)):
        parameter.grad = None
    return LayersMeasured(
        profile=ProfileData(
            layers=tuple(layers), microbatch_rows=rows, device_memory_bytes=_device_memory_bytes(model.device)
        ),
        names=tuple(model.layer_kind(layer) for layer in range(model.layer_count)),
        rows=tuple(measured),
        unmeasured=tuple(unmeasured),
        device=_device_name(model.device),
        torch_version=str(torch.__version__),
    )


def _rows_of_fullest(rows: int, devices_per_node: int, *, coupled: bool) -> dict[int, int]:
    """For each number of devices that a stage can have, from 2: rows of the device that has most
    (``runtime.layers.world.rows_of``)."""
    return {
        devices: rows if coupled else -(-rows // devices)
        for devices in range(2, min(devices_per_node, rows) + 1)
    }


def _split_times(fullest: dict[int, int], measured: dict[int, RowsMeasured]) -> tuple[SplitTimeData, ...]:
    return tuple(
        SplitTimeData(
            devices=devices,
            forward_ms=measured[rows].forward.median_ms,
            backward_ms=measured[rows].backward.median_ms,
        )
        for devices, rows in fullest.items()
        if rows in measured
    )


def _look(model: Model, layer: int, x: Activation | None) -> Hashable:
    """Return what layers have in common that probably do the same work: kind, tensors, and shapes of inputs."""
    tensors = tuple((t.value.shape, t.value.dtype, t.trainable) for t in model.tensors_of(layer))
    inputs = () if x is None else tuple((t.shape, t.dtype) for t in flatten(x))
    ends = (layer == 0, layer == model.layer_count - 1)
    return model.layer_kind(layer), tensors, inputs, ends


def _sizes(
    model: Model, layer: int, optimizer_bytes: dict[str, int], saved_bytes: int, output_bytes: int
) -> LayerProfileData:
    """Return the layer's bytes; its times are not known yet."""
    tensors = model.tensors_of(layer)
    sizes = {t.name: t.value.numel() * t.value.element_size() for t in tensors}
    return LayerProfileData(
        forward_ms=0.0,
        backward_ms=0.0,
        parameter_bytes=sum(sizes.values()),
        gradient_bytes=sum(sizes[t.name] for t in tensors if t.trainable),
        optimizer_bytes=sum(optimizer_bytes.get(t.name, 0) for t in tensors),
        activation_bytes=saved_bytes,
        output_bytes=output_bytes,
    )


def _time_parts(
    model: Model,
    layer: int,
    x: Activation | None,
    batch: Batch,
    rows: int,
    counts: list[int],
    equal: dict[int, _Times],
) -> tuple[dict[int, _Times], str | None]:
    """The layer on the first rows of the microbatch, for each count; and what went wrong, if it did.

    Some layers cannot compute on a few rows (batch normalisation on one): no reason not to have a profile.
    """
    parts: dict[int, _Times] = {}
    for count in reversed(counts):
        part = None if x is None else tuple(t[:count] for t in x) if isinstance(x, tuple) else x[:count]
        given = slice_rows(batch, 0, count, rows)
        try:
            parts[count] = _time_layer(model, layer, part, given, count, equal.get(count))
        except (RuntimeError, ValueError) as error:
            return parts, f"layer {layer} raised {type(error).__name__} on {count} rows: {error}"
    return parts, None


def _time_layer(
    model: Model, layer: int, x: Activation | None, batch: Batch, rows: int, equal: _Times | None
) -> _Times:
    """Time the forward and the backward pass.

    :param equal: times of an earlier layer that looks the same: a repeat that agrees with them is added to them.
    """
    if equal is not None:
        few = _repeat(model, layer, x, batch, rows, warm_ups=0, most=1)
        if few.agrees(equal):
            equal.add(few)
            return equal
    return _repeat(model, layer, x, batch, rows, warm_ups=_WARM_UPS, most=_MOST_REPEATS)


def _repeat(
    model: Model, layer: int, x: Activation | None, batch: Batch, rows: int, *, warm_ups: int, most: int
) -> _Times:
    forwards: list[float] = []
    backwards: list[float] = []
    began = time.perf_counter()
    for repeat in range(warm_ups + most):
        given = _as_received(x)
        start = device_now(model.device)
        outputs = _outputs(model, layer, given, batch, rows)
        middle = device_now(model.device)
        roots = [t for t in outputs if t.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        end = device_now(model.device)
        spent_s = end - began
        if repeat >= warm_ups or spent_s > _LONG_S:
            forwards.append(middle - start)
            backwards.append(end - middle)
        enough = _FEW_REPEATS if spent_s > _ENOUGH_S else _FEWEST_REPEATS
        if spent_s > _LONG_S or (len(forwards) >= enough and spent_s > _SHORT_S):
            break
    return _Times(rows, forwards, backwards)


def _outputs(model: Model, layer: int, x: Activation | None, batch: Batch, rows: int) -> tuple[Tensor, ...]:
    """What the layer passes on; the loss where it is the last one."""
    output = model.forward(layer, layer + 1, x, step=1, row=0, batch=batch)
    if layer < model.layer_count - 1:
        return flatten(output)
    return (model.loss(output, batch, rows)[0],)


def _saved_bytes(
    model: Model, layer: int, x: Activation | None, batch: Batch, rows: int
) -> tuple[int, Activation, int]:
    """Bytes of the distinct memory that autograd keeps for the backward pass; the layer's output, its bytes."""
    parameters = {t.value.untyped_storage().data_ptr() for t in model.tensors_of(layer)}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
        return (
            tensor.detach()
        )  # An output that is saved for its own gradient would keep itself alive for ever.

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model.forward(layer, layer + 1, _as_received(x), step=1, row=0, batch=batch)
        if layer == model.layer_count - 1 and model.needs_batch:
            output = model.loss(output, batch, rows)[0]
    detached = tuple(t.detach() for t in flatten(output))
    passed: Activation = detached if isinstance(output, tuple) else detached[0]
    return sum(sizes.values()), passed, sum(t.numel() * t.element_size() for t in detached)


def _as_received(x: Activation | None) -> Activation | None:
    """As a stage gets it from the stage before: a leaf that gradients flow to."""
    if x is None:
        return None
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


def device_now(device: torch.device) -> float:
    """Seconds on a monotonic clock at which the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _device_memory_bytes(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{_processor()}, {threads} {'thread' if threads == 1 else 'threads'}"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    except OSError:
        pass  # No such file everywhere.
    return platform.processor() or platform.machine()


def main() -> int:
    """``ftd profile`` and ``ftd plan`` run this in a process of its own: they have no torch."""
    parser = argparse.ArgumentParser(
        prog="python -m runtime.measuring.profile", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--parent", type=int, required=True, help="process id of who asks")
    parser.add_argument("--devices-per-node", type=int, default=1)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    say = answers_on_stdout()

    raw = sys.stdin.buffer.read()
    try:
        decode = msgspec.json.decode if raw.lstrip()[:1] == b"{" else msgspec.msgpack.decode
        data = decode(raw, type=TrainingData)
    except msgspec.DecodeError as error:
        sys.stderr.write(f"no TrainingData on stdin: {error}\n")
        return INVALID_EXIT
    device = torch.device("cuda") if data.backend == "nccl" else CPU
    try:
        found = measure(
            Model(load_training(data), data, device),
            data,
            devices_per_node=arguments.devices_per_node,
            progress=lambda done, total: say(Progress(done=done, total=total)),
        )
    except TrainingError as error:
        sys.stderr.write(f"{error}\n")
        return INVALID_EXIT
    say(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
