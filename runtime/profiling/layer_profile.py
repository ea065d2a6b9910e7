"""Measures a model layer by layer on a microbatch, which the planner needs to form stages.

Times are medians after a warm-up; layers that do the same work share theirs. Memory is measured: it is what
autograd actually saves. Each layer is measured without recomputation and, if the job may use them, with
each mode of recomputation (``runtime.layers.recompute``). The devices of a stage split a microbatch by
rows, so a stage of d devices takes as long as one device for ⌈rows / d⌉ rows, which is measured, too.

``python -m runtime.profiling.layer_profile --parent PID [--devices-per-node M]`` reads a ``TrainingData``
(msgpack or JSON) on stdin and writes lines of ``runtime.wire.measurement`` to stdout. Errors that the user
has to fix are written to stderr, with exit code 2.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils import _pytree as tree

from planner.values import (
    ActivationCheckpointing,
    LayerProfile,
    ModelProfile,
    Recomputation,
    Recompute,
    SplitTime,
    TensorSplit,
)
from runtime.data.batches import slice_rows, to_device
from runtime.device import device_time_s
from runtime.engine.memory import usable_memory_bytes
from runtime.errors import TrainingError
from runtime.layers.activations import Activation, as_received, flatten
from runtime.layers.model import Model, first_batch
from runtime.monitoring.device_check import device_kind
from runtime.parent import die_with_parent
from runtime.precision import PRECISIONS
from runtime.profiling.peak_memory import measure_peak_bytes
from runtime.profiling.utilisation import count_flops, peak_flops
from runtime.training import Batch, Training, load_training, torch_device
from runtime.wire.measurement import (
    INVALID_EXIT,
    LayerMeasurements,
    MeasurementProgress,
    RowTimings,
    claim_stdout,
    spread_of,
)
from runtime.zero.sharded_optimizer import is_elementwise
from statemachine.messages.trainer import TrainingData

_WARM_UPS = 2
"""Number of repeats that do not count; one fewer for a layer that takes so long that noise is small in comparison.
Where the layer's memory is measured, that is the first of them.
"""
_FEWEST_REPEATS, _MOST_REPEATS = 7, 31
_SHORT_S = 0.03
"""A layer is measured again, up to the largest number of repeats, until it has taken this long."""
_ENOUGH_S = 0.1
"""A layer that has taken this long is measured only a few times, because noise is small in comparison."""
_FEW_REPEATS = 3
_LONG_S = 0.3
"""A layer that has taken this long is not measured again, because noise is small in comparison."""
_EQUAL_WITHIN = 1.5
"""A layer that looks like an earlier one is measured separately if its forward pass takes longer or shorter by more
than this factor.
"""
_RECOMPUTE_MODES: dict[ActivationCheckpointing, tuple[Recompute, ...]] = {
    "none": (),
    "full": ("full",),
    "selective": ("full", "selective"),
    "auto": ("full", "selective"),
}
"""Modes of recomputation that are measured. The memory kept by ``full`` tells how much either mode recomputes."""
_Case = tuple[int, Recompute]
"""Number of rows that a layer is measured on, and its mode of recomputation."""


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of the repeats of one layer on ``rows`` rows, or of several layers that do the same work."""

    rows: int
    forwards: list[float]
    backwards: list[float]

    def measured(self) -> RowTimings:
        return RowTimings(
            rows=self.rows, forward=spread_of(self.forwards), backward=spread_of(self.backwards)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerInput:
    """One layer and its input."""

    model: Model
    layer: int
    x: Activation | None
    batch: Batch
    rows: int

    def first_rows(self, count: int) -> "_LayerInput":
        """Return the same with copies of the first rows; views would keep the memory of all rows alive."""
        part: Any = self.x
        if part is not None:
            part = tuple(t[:count] for t in part) if isinstance(part, tuple) else part[:count]
        part, batch = tree.tree_map(
            lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf,
            (part, slice_rows(self.batch, 0, count, self.rows)),
        )
        return replace(self, x=part, batch=batch, rows=count)

    def outputs(self, x: Activation | None) -> tuple[Tensor, ...]:
        """Return the layer's output tensors, or the loss if it is the last layer."""
        output = self.model.forward(
            self.layer, self.layer + 1, x, step=1, row=0, rows=self.rows, batch=self.batch
        )
        if self.layer < self.model.layer_count - 1:
            return flatten(output)
        return (self.model.loss(output, self.batch, self.rows)[0],)


@dataclass(frozen=True, slots=True)
class _Measurement:
    """Measurements of one layer in one case."""

    times: _Times
    kept_bytes: int


def profile_model(
    model: Model,
    data: TrainingData,
    *,
    devices_per_node: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> LayerMeasurements:
    """Measure the layers of a model one after the other, leaving parameters and buffers unchanged.

    :param progress: called with the number of layers that are done and the number of all layers.
    :raises TrainingError: the job recomputes selectively, and a layer cannot.
    """
    training, rows = model.training, data.microbatch_rows
    batch = first_batch(training, rows, PRECISIONS[data.precision].parameters)
    batch = to_device(batch, model.device)
    activation: Activation | None = None
    optimizer_bytes = _optimizer_bytes(training, model)
    sizes: list[LayerProfile] = []
    cases: list[dict[_Case, _Measurement]] = []
    times_by_signature: dict[Hashable, dict[_Case, _Times]] = {}
    unmeasured: list[str] = []
    unselectable: list[str] = []
    splits: dict[Hashable, TensorSplit | None] = {}
    peak_bytes: dict[Hashable, int] = {}
    flops: dict[Hashable, int] = {}
    total_flops = 0
    peak = peak_flops(data, model.device)
    fullest = _rows_of_fullest(rows, devices_per_node, coupled=model.couples_rows)
    counts = sorted({*fullest.values()} - {rows})
    with model.preserve_buffers(), model.override_recompute("none"):
        for layer in range(model.layer_count):
            with model.temporarily_provided(layer, own_memory=True):
                given = _LayerInput(model=model, layer=layer, x=activation, batch=batch, rows=rows)
                signature = _layer_signature(given)
                equal = times_by_signature.setdefault(signature, {})
                warm = signature not in peak_bytes
                if warm:
                    peak_bytes[signature] = _peak_bytes(given)
                times = _time_layer(given, "none", equal, warm=warm)
                if peak is not None:
                    if signature not in flops:
                        flops[signature] = count_flops(partial(given.outputs, as_received(activation)))
                    total_flops += flops[signature]
                parts, problem = _measure_cases(given, [(count, "none") for count in reversed(counts)], equal)
                unmeasured += [problem] if problem else []
                kept_bytes, activation, output_bytes = _kept_bytes(given, "none")
                modes = _RECOMPUTE_MODES[data.activation_checkpointing]
                recomputed, problem = _measure_cases(given, [(rows, mode) for mode in modes], equal)
                if problem and data.activation_checkpointing == "selective":
                    raise TrainingError(f"{problem}; use activation_checkpointing = full, or auto")
                unselectable += [problem] if problem else []
                cases.append({(rows, "none"): _Measurement(times, kept_bytes), **parts, **recomputed})
                for case, found in cases[-1].items():
                    equal.setdefault(case, found.times)
                if signature not in splits:
                    splits[signature] = _tensor_split(given)
                size = _sizes(model, layer, optimizer_bytes, output_bytes)
                working_bytes = max(peak_bytes[signature] - kept_bytes, 0)
                sizes.append(
                    msgspec.structs.replace(size, tensor=splits[signature], working_bytes=working_bytes)
                )
            progress(layer + 1, model.layer_count)
    for _, parameter in model.named_parameters(range(model.layer_count)):
        parameter.grad = None
    return LayerMeasurements(
        profile=ModelProfile(
            layers=tuple(
                _with_measurements(size, found, rows, fullest)
                for size, found in zip(sizes, cases, strict=True)
            ),
            microbatch_rows=rows,
            device_memory_bytes=usable_memory_bytes(model.device),
            flops=float(total_flops) if peak is not None and total_flops else None,
            device_peak_flops=peak,
            shard_problem=_shard_problem(training, model),
            tensor_problem=model.tensor_problem,
            tensor_counts=() if model.tensor_plan is None else model.tensor_plan.divisible_counts,
        ),
        names=tuple(model.layer_kind(layer) for layer in range(model.layer_count)),
        rows=tuple(
            tuple(found[case].times.measured() for case in sorted(found, reverse=True) if case[1] == "none")
            for found in cases
        ),
        unmeasured=tuple(unmeasured),
        unselectable=tuple(unselectable),
        device=_device_name(model.device),
        torch_version=str(torch.__version__),
    )


def _rows_of_fullest(rows: int, devices_per_node: int, *, coupled: bool) -> dict[int, int]:
    """Return, for each number of devices that a stage can have (from 2), the rows of the device that has most.

    ``runtime.groups.communicator.member_range`` divides the rows.
    """
    return {
        devices: rows if coupled else -(-rows // devices)
        for devices in range(2, min(devices_per_node, rows) + 1)
    }


def _layer_signature(given: _LayerInput) -> Hashable:
    """Return what layers that probably do the same work have in common: kind, tensors, and shapes of inputs."""
    model, layer = given.model, given.layer
    tensors = tuple((t.value.shape, t.value.dtype, t.trainable) for t in model.tensors_of(layer))
    inputs = () if given.x is None else tuple((t.shape, t.dtype) for t in flatten(given.x))
    ends = (layer == 0, layer == model.layer_count - 1)
    return model.layer_kind(layer), tensors, inputs, ends


def _sizes(model: Model, layer: int, optimizer_bytes: dict[str, int], output_bytes: int) -> LayerProfile:
    """Return the layer's sizes in bytes that do not depend on the case; its times are not known yet."""
    tensors = model.tensors_of(layer)
    sizes = {t.name: t.value.nbytes for t in tensors}
    return LayerProfile(
        forward_ms=0.0,
        backward_ms=0.0,
        parameter_bytes=sum(sizes.values()),
        gradient_bytes=sum(sizes[t.name] for t in tensors if t.trainable),
        optimizer_bytes=sum(optimizer_bytes.get(t.name, 0) for t in tensors),
        activation_bytes=0,
        output_bytes=output_bytes,
        buffer_bytes=sum(sizes[t.name] for t in tensors if t.kind == "buffer"),
    )


def _with_measurements(
    sizes: LayerProfile, found: dict[_Case, _Measurement], rows: int, fullest: dict[int, int]
) -> LayerProfile:
    """Return the profile of a layer after all layers that share its times have been measured."""
    times = {case: measured.times.measured() for case, measured in found.items()}
    whole = times[rows, "none"]
    whole_ms = whole.forward.median_ms + whole.backward.median_ms

    def recomputation(mode: Recompute) -> Recomputation | None:
        if (rows, mode) not in found:
            return None
        recomputed = times[rows, mode]
        longer_ms = recomputed.forward.median_ms + recomputed.backward.median_ms - whole_ms
        return Recomputation(activation_bytes=found[rows, mode].kept_bytes, recompute_ms=max(longer_ms, 0.0))

    return msgspec.structs.replace(
        sizes,
        forward_ms=whole.forward.median_ms,
        backward_ms=whole.backward.median_ms,
        activation_bytes=found[rows, "none"].kept_bytes,
        full=recomputation("full"),
        selective=recomputation("selective"),
        split=tuple(
            SplitTime(
                devices=devices,
                forward_ms=times[count, "none"].forward.median_ms,
                backward_ms=times[count, "none"].backward.median_ms,
                activation_bytes=found[count, "none"].kept_bytes,
            )
            for devices, count in fullest.items()
            if (count, "none") in found
        ),
    )


def _measure_cases(
    given: _LayerInput, cases: list[_Case], equal: dict[_Case, _Times]
) -> tuple[dict[_Case, _Measurement], str | None]:
    """Measure the layer in each case; also return what went wrong.

    Some layers cannot compute on a few rows (batch normalisation on one row), which must not prevent a profile. A
    layer that changes the output of a matrix product in place cannot be recomputed selectively.
    """
    measured: dict[_Case, _Measurement] = {}
    for rows, mode in cases:
        part = given if rows == given.rows else given.first_rows(rows)
        try:
            measured[rows, mode] = _Measurement(_time_layer(part, mode, equal), _kept_bytes(part, mode)[0])
        except (RuntimeError, ValueError) as error:
            if rows < given.rows:
                return measured, f"layer {given.layer} raised {type(error).__name__} on {rows} rows: {error}"
            if mode == "selective" and isinstance(error, RuntimeError):
                return measured, f"layer {given.layer} cannot be recomputed selectively: {error}"
            raise
    return measured, None


def _time_layer(
    given: _LayerInput, mode: Recompute, equal: dict[_Case, _Times], *, warm: bool = False
) -> _Times:
    """Time the forward and the backward pass.

    :param equal: times of earlier layers that look the same. A layer shares them if a forward pass of it takes
        about as long.
    :param warm: whether both passes have just run, as a warm-up does.
    """
    known = equal.get((given.rows, mode))
    with given.model.override_recompute(mode):
        if known is not None:
            start = device_time_s(given.model.device)
            given.outputs(as_received(given.x))
            own_s, known_s = device_time_s(given.model.device) - start, statistics.median(known.forwards)
            if max(own_s, known_s) <= _EQUAL_WITHIN * min(own_s, known_s):
                known.forwards.append(own_s)
                return known
        return _repeat(given, warm_ups=_WARM_UPS - warm, most=_MOST_REPEATS)


def _repeat(given: _LayerInput, *, warm_ups: int, most: int) -> _Times:
    forwards: list[float] = []
    backwards: list[float] = []
    device = given.model.device
    began = time.perf_counter()
    for repeat in range(warm_ups + most):
        x = as_received(given.x)
        start = device_time_s(device)
        outputs = given.outputs(x)
        middle = device_time_s(device)
        roots = [t for t in outputs if t.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
        end = device_time_s(device)
        spent_s = end - began
        if repeat >= (warm_ups if spent_s <= _ENOUGH_S else max(warm_ups - 1, 0)) or spent_s > _LONG_S:
            forwards.append(middle - start)
            backwards.append(end - middle)
        enough = _FEW_REPEATS if spent_s > _ENOUGH_S else _FEWEST_REPEATS
        if spent_s > _LONG_S or (len(forwards) >= enough and spent_s > _SHORT_S):
            break
    return _Times(given.rows, forwards, backwards)


def _peak_bytes(given: _LayerInput) -> int:
    """Return the most bytes that the layer's two passes take, without its parameters and their summed
    gradients, which exist before. Its input counts.
    """
    for tensor in given.model.tensors_of(given.layer):
        if tensor.trainable and tensor.value.grad is None:
            tensor.value.grad = torch.zeros_like(tensor.value)

    def compute() -> tuple[Tensor, ...]:
        copied = tree.tree_map_only(Tensor, torch.clone, given.x)
        return given.outputs(as_received(copied))

    return measure_peak_bytes(compute)


def _kept_bytes(given: _LayerInput, mode: Recompute) -> tuple[int, Activation, int]:
    """Return the bytes of distinct memory kept for the backward pass, the layer's output, and the output's
    bytes.

    The memory includes that of the loss.
    """
    model, layer = given.model, given.layer
    parameters = {t.value.untyped_storage().data_ptr() for t in model.tensors_of(layer)}
    saved: dict[int, int] = {}
    selected: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return (
            tensor.detach()
        )  # An output that is saved for its own gradient would otherwise keep itself alive.

    def select(output: Tensor) -> None:
        selected[output.untyped_storage().data_ptr()] = output.untyped_storage().nbytes()

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        model.override_recompute(mode, select),
    ):
        output = model.forward(
            layer, layer + 1, as_received(given.x), step=1, row=0, rows=given.rows, batch=given.batch
        )
        if layer == model.layer_count - 1:
            loss = model.loss(output, given.batch, given.rows)[0]
            # The output of a whole module need not be tensors.
            output = loss if model.needs_batch else output
    detached = tuple(t.detach() for t in flatten(output))
    passed: Activation = detached if isinstance(output, tuple) else detached[0]
    output_bytes = sum(t.nbytes for t in detached)
    return sum(saved.values()) + sum(selected.values()), passed, output_bytes


def _tensor_split(given: _LayerInput) -> TensorSplit | None:
    """Return the parts of the layer that tensor parallelism divides, or ``None`` if it divides nothing."""
    model, layer = given.model, given.layer
    plan, regions = model.tensor_plan, model.split_regions()
    linears = [one for one in plan.linears if one.layer == layer] if plan is not None else []
    if plan is None or regions is None or not linears:
        return None
    sizes = {t.name: t.value.nbytes for t in model.tensors_of(layer)}
    parameters = {t.value.untyped_storage().data_ptr() for t in model.tensors_of(layer)}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved.setdefault(storage.data_ptr(), storage.nbytes() if regions.is_open else 0)
        return tensor.detach()

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        regions.observe(layer),
    ):
        output = model.forward(
            layer, layer + 1, as_received(given.x), step=1, row=0, rows=given.rows, batch=given.batch
        )
    del output
    split = TensorSplit(
        parameter_bytes=sum(sizes[name] for name in plan.split_parameters if name in sizes),
        column_bytes=sum(sizes[one.weight] for one in linears if one.is_rowwise),
        activation_bytes=sum(saved.values()),
        forward_bytes=sum(regions.forward_bytes),
        forward_exchanges=len(regions.forward_bytes),
        backward_bytes=sum(regions.backward_bytes),
        backward_exchanges=len(regions.backward_bytes),
    )
    # Their graph refers to ``pack``, and it to the regions. No collector finds this cycle.
    regions.release()
    return split


def _optimizer_bytes(training: Training, model: Model) -> dict[str, int]:
    """Return the bytes that the user's optimizer keeps for each parameter, from a step on the meta device.

    Parameters of one shape, dtype and group have equal state. An optimizer that cannot do such a step makes a
    real one for one parameter of zeros at a time.
    """
    named = model.named_parameters(range(model.layer_count))
    if not named:
        return {}
    nothing = _zeros_like(named, set(), model.device)
    groups = {
        id(parameter): number
        for number, group in enumerate(training.optimizer(nothing).param_groups)
        for parameter in group["params"]
    }
    keys = {name: (groups.get(id(value)), value.shape, value.dtype) for name, value in nothing}
    alike = {key: name for name, key in keys.items()}
    try:
        found = _state_bytes(training, named, set(alike.values()), torch.device("meta"))
    except Exception:
        found = {name: _state_bytes(training, named, {name}, model.device)[name] for name in alike.values()}
    return {name: found[alike[key]] for name, key in keys.items()}


def _shard_problem(training: Training, model: Model) -> str | None:
    """Return why the devices of a stage cannot hold shards of this model, or ``None`` if they can."""
    named = model.named_parameters(range(model.layer_count))
    if not named:
        return None
    optimizer = training.optimizer(_zeros_like(named, set(), model.device))
    if is_elementwise(optimizer):
        return None
    return f"its optimizer {type(optimizer).__name__} is not known to update each element by itself"


def _zeros_like(
    like: list[tuple[str, nn.Parameter]], stepped: set[str], device: torch.device
) -> list[tuple[str, nn.Parameter]]:
    """Return parameters of zeros: those in ``stepped`` on the device, the others on the meta device."""
    return [
        (name, nn.Parameter(torch.zeros_like(value, device=device if name in stepped else "meta")))
        for name, value in like
    ]


def _state_bytes(
    training: Training, like: list[tuple[str, nn.Parameter]], stepped: set[str], device: torch.device
) -> dict[str, int]:
    """Return the bytes of state that a step creates for the parameters in ``stepped``."""
    named = _zeros_like(like, stepped, device)
    optimizer = training.optimizer(named)
    if device.type == "meta":
        for group in optimizer.param_groups:
            if group.get("fused"):
                group["fused"] = False  # Only the fused kernel needs memory, and its state is the same.
    for name, parameter in named:
        if name in stepped:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {
        name: sum(v.nbytes for v in optimizer.state[parameter].values() if isinstance(v, Tensor))
        for name, parameter in named
        if name in stepped
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return device_kind(device)
    threads = torch.get_num_threads()
    return f"{device_kind(device)}, {threads} {'thread' if threads == 1 else 'threads'}"


def main() -> int:
    """Measure layers for ``ftd profile`` and ``ftd plan``, which do not import torch."""
    parser = argparse.ArgumentParser(
        prog="python -m runtime.profiling.layer_profile", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--parent", type=int, required=True, help="process id of the caller")
    parser.add_argument("--devices-per-node", type=int, default=1)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    report = claim_stdout()

    raw = sys.stdin.buffer.read()
    try:
        decode = msgspec.json.decode if raw.lstrip()[:1] == b"{" else msgspec.msgpack.decode
        data = decode(raw, type=TrainingData)
    except msgspec.DecodeError as error:
        sys.stderr.write(f"no TrainingData on stdin: {error}\n")
        return INVALID_EXIT
    try:
        found = profile_model(
            Model(load_training(data), data, torch_device(data)),
            data,
            devices_per_node=arguments.devices_per_node,
            progress=lambda done, total: report(MeasurementProgress(done=done, total=total)),
        )
    except TrainingError as error:
        sys.stderr.write(f"{error}\n")
        return INVALID_EXIT
    report(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
