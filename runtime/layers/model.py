"""The model as a list of layers, some of which this process holds.

At the start a process holds all layers, *pristine*. A layer that is dropped has its parameters and
persistent buffers replaced by meta tensors, which have shapes but no memory; ``materialise`` gives it
memory again, to be filled by a transfer. A tensor that several layers share (a tied weight) is one tensor
while at least one of them is held, under one *canonical* name: that of the first layer that has it.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runtime.layers.activations import Activation, ActivationShape, flatten, shape_of
from runtime.layers.randomness import DropoutProbe, SampleDropout, Stream, seed_generators
from runtime.training import Training, TrainingError
from runtime.wire.protocol import TrainingData
from storage.buckets import ParameterSize

CPU = torch.device("cpu")
Kind = Literal["parameter", "buffer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTensor:
    """A parameter or persistent buffer and every place in the layers that refers to it."""

    name: str
    kind: Kind
    trainable: bool
    layers: list[int] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def value(self) -> Tensor:
        module, attribute = self.places[0]
        tensor = getattr(module, attribute)
        assert isinstance(tensor, Tensor)
        return tensor

    def replace(self, tensor: Tensor) -> None:
        """Put ``tensor`` in all places. By setattr: some modules (nn.LSTM) keep further references there."""
        value = nn.Parameter(tensor, requires_grad=self.trainable) if self.kind == "parameter" else tensor
        for module, attribute in self.places:
            setattr(module, attribute, value)


class Model:
    """Built from what the training function returned; runs it once on a microbatch to learn its shapes.

    :param data: seed, microbatch rows and activation checkpointing are taken from it.
    :raises TrainingError: the layers do not fit each other, the data set or the loss.
    """

    def __init__(self, training: Training, data: TrainingData, device: torch.device = CPU) -> None:
        self.training = training
        self.device = device
        self._seed = data.seed
        self._checkpoint = data.checkpoint_activations
        self._layers = list(training.layers)
        for layer in self._layers:
            layer.to(device).train()
        self._tensors = _shared_tensors(self._layers)
        self._trainable = [t for t in self._tensors if t.trainable]
        self._of_layer = [[t for t in self._tensors if i in t.layers] for i in range(len(self._layers))]
        self._held = frozenset(range(len(self._layers)))
        self._version = 0
        self._dropout = [False] * len(self._layers)
        self._shapes = self._probe(data.microbatch_rows)

    # --- what it is made of ---------------------------------------------------------------------

    @property
    def layer_count(self) -> int:
        return len(self._layers)

    @property
    def held(self) -> frozenset[int]:
        """Layers whose parameters have memory here."""
        return self._held

    @property
    def version(self) -> int:
        """Changes whenever parameter objects were replaced."""
        return self._version

    @property
    def parameter_layers(self) -> dict[str, tuple[int, ...]]:
        """All trainable parameters of the model in model order, each with the layers that use it."""
        return {t.name: tuple(t.layers) for t in self._trainable}

    @property
    def parameter_sizes(self) -> dict[str, ParameterSize]:
        return {
            t.name: ParameterSize(numel=t.value.numel(), dtype=str(t.value.dtype).removeprefix("torch."))
            for t in self._trainable
        }

    def named_parameters(self, layers: Collection[int]) -> list[tuple[str, nn.Parameter]]:
        """Trainable parameters of ``layers`` by canonical name, in model order, a tied one once.

        The objects are new ones after ``materialise``: do not keep them over a change of what is held.
        """
        wanted = frozenset(layers)
        return [(t.name, _parameter(t)) for t in self._trainable if not wanted.isdisjoint(t.layers)]

    def layers_of(self, name: str) -> tuple[int, ...]:
        """The layers that use the parameter, ascending; more than one where it is tied."""
        return self.parameter_layers[name]

    def tensors_of(self, layer: int) -> list[SharedTensor]:
        """Parameters (trainable or not) and persistent buffers of one layer, in model order."""
        return self._of_layer[layer]

    def output_shapes(self) -> tuple[ActivationShape, ...]:
        """``output_shapes()[i]`` is what layer i returns."""
        return self._shapes

    # --- what is held ---------------------------------------------------------------------------

    def make_contiguous(self) -> None:
        """Have every trainable parameter row-major in memory, so that ranges of it are ranges of elements."""
        for tensor in self._trainable:
            if not tensor.value.is_contiguous():
                tensor.replace(tensor.value.detach().contiguous())
                self._version += 1

    def drop(self, layers: Collection[int]) -> None:
        """Free the memory of ``layers``; what they share with a layer that stays is kept."""
        self._held -= frozenset(layers)
        self._version += 1
        for tensor in self._tensors:
            if self._held.isdisjoint(tensor.layers) and not tensor.value.is_meta:
                tensor.replace(torch.empty_like(tensor.value.detach(), device="meta"))

    def materialise(self, layer: int) -> None:
        """Allocate the layer's parameters and persistent buffers, uninitialised where they were dropped."""
        self._held |= {layer}
        self._version += 1
        for tensor in self.tensors_of(layer):
            if tensor.value.is_meta:
                tensor.replace(torch.empty_like(tensor.value.detach(), device=self.device))

    # --- running it -----------------------------------------------------------------------------

    def forward(
        self, first: int, end: int, x: Activation, *, step: int, row: int, train: bool = True
    ) -> Activation:
        """Run layers ``[first, end)`` on rows of step ``step``'s global batch that begin at ``row``.

        With ``train=False`` the layers are in evaluation mode and nothing is kept for a backward pass.
        """
        missing = [layer for layer in range(first, end) if layer not in self._held]
        if missing:
            raise RuntimeError(f"layers {missing} are not held here")
        with torch.set_grad_enabled(train and torch.is_grad_enabled()):
            for index in range(first, end):
                _set_mode(self._layers[index], train)
                x = self._run(index, x, step, row)
        return x

    def _run(self, index: int, x: Activation, step: int, row: int) -> Activation:
        layer = self._layers[index]
        is_tuple = isinstance(x, tuple)

        def run(*tensors: Tensor) -> Activation:
            stream = Stream(seed=self._seed, step=step, row=row, layer=index)
            seed_generators(stream.seed_of_run, self.device)
            with SampleDropout(stream, len(tensors[0])) if self._dropout[index] else nullcontext():
                output: Activation = layer(tensors if is_tuple else tensors[0])
            return output

        if self._checkpoint and torch.is_grad_enabled():
            # ``run`` reseeds for itself, also when it runs again in the backward pass.
            output: Activation = checkpoint(run, *flatten(x), use_reentrant=False, preserve_rng_state=False)
            return output
        return run(*flatten(x))

    def _probe(self, rows: int) -> tuple[ActivationShape, ...]:
        """One forward pass of a microbatch: shapes, whether layers use dropout, and clear errors."""
        samples = [self.training.dataset[i % len(self.training.dataset)] for i in range(rows)]
        x: Activation = _stack([s[0] for s in samples], "inputs").to(self.device)
        target = _stack([s[1] for s in samples], "targets").to(self.device)
        shapes: list[ActivationShape] = []
        with self.buffers_kept(), torch.no_grad():
            for index in range(self.layer_count):
                probe = DropoutProbe()
                given = x
                try:
                    with probe:
                        x = self._run(index, x, 0, 0)
                except Exception as error:
                    raise TrainingError(
                        f"{self._name(index)} raised {type(error).__name__} on {_shapes(given)}: {error}"
                    ) from error
                self._dropout[index] = probe.seen
                self._check_output(index, x, rows)
                shapes.append(shape_of(x))
            self._check_loss(x, target)
        return tuple(shapes)

    def _name(self, index: int) -> str:
        return f"layer {index} ({type(self._layers[index]).__name__})"

    def _check_output(self, index: int, output: object, rows: int) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        if not tensors or not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise TrainingError(
                f"{self._name(index)} must return a tensor or a tuple of tensors, not {type(output).__name__}"
            )
        for tensor in tensors:
            if tensor.dim() == 0 or tensor.shape[0] != rows:
                raise TrainingError(
                    f"{self._name(index)} returned a tensor of shape {tuple(tensor.shape)} for {rows} "
                    "samples; samples must stay in dim 0"
                )

    def _check_loss(self, output: Activation, target: Tensor) -> None:
        def loss(rows: slice) -> Tensor:
            part = tuple(t[rows] for t in output) if isinstance(output, tuple) else output[rows]
            return self.training.loss(part, target[rows])

        try:
            whole = loss(slice(None))
        except Exception as error:
            raise TrainingError(
                f"the loss raised {type(error).__name__} on {_shapes(output)} and target "
                f"{tuple(target.shape)}: {error}"
            ) from error
        if not isinstance(whole, Tensor) or whole.numel() != 1:
            raise TrainingError("the loss must return one number (a scalar tensor)")
        if len(target) > 1:
            total = sum(float(loss(slice(i, i + 1))) for i in range(len(target)))
            if abs(total) > 1e-3 and abs(float(whole) - total) < 1e-3 * abs(total):
                raise TrainingError('the loss sums over samples; take the mean (reduction="mean")')

    @contextmanager
    def buffers_kept(self) -> Iterator[None]:
        """Undo what runs inside change in persistent buffers (running statistics)."""
        saved = [(t, t.value.clone()) for t in self._tensors if t.kind == "buffer" and not t.value.is_meta]
        try:
            yield
        finally:
            for tensor, value in saved:
                tensor.value.copy_(value)

    @contextmanager
    def without_checkpointing(self) -> Iterator[None]:
        """Keep activations inside, whatever the job says: a profile measures the plain passes."""
        checkpointing, self._checkpoint = self._checkpoint, False
        try:
            yield
        finally:
            self._checkpoint = checkpointing


def _shared_tensors(layers: list[nn.Module]) -> list[SharedTensor]:
    """All parameters and persistent buffers in model order; shared ones once, with all their places."""
    found: dict[int, SharedTensor] = {}
    for index, layer in enumerate(layers):
        for prefix, module in layer.named_modules(remove_duplicate=False):
            path = f"{index}.{prefix}." if prefix else f"{index}."
            lasting: list[tuple[Kind, str, Tensor | None]] = [
                ("parameter", name, value) for name, value in module._parameters.items()
            ]
            lasting += [
                ("buffer", name, value)
                for name, value in module._buffers.items()
                if name not in module._non_persistent_buffers_set
            ]
            for kind, attribute, value in lasting:
                if value is None:
                    continue
                shared = found.setdefault(
                    id(value),
                    SharedTensor(
                        name=path + attribute,
                        kind=kind,
                        trainable=kind == "parameter" and value.requires_grad,
                    ),
                )
                if index not in shared.layers:
                    shared.layers.append(index)
                if not any(m is module and a == attribute for m, a in shared.places):
                    shared.places.append((module, attribute))
    return list(found.values())


def _parameter(tensor: SharedTensor) -> nn.Parameter:
    value = tensor.value
    assert isinstance(value, nn.Parameter)
    return value


def _set_mode(layer: nn.Module, train: bool) -> None:
    if layer.training != train:
        layer.train(train)


def _stack(tensors: list[Tensor], what: str) -> Tensor:
    try:
        return torch.stack(tensors)
    except RuntimeError as error:
        raise TrainingError(f"the data set's {what} do not all have the same shape: {error}") from error


def _shapes(activation: Activation) -> str:
    return ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in flatten(activation))
