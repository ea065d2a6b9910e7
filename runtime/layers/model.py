"""The model as a list of layers, some of which this process holds.

The layers are the user's own list (``runtime.layers.chain``), or parts of a module that is run in windows
(``runtime.layers.windows``). When a job starts, a process can *provide* every layer with its initial
values. It holds all layers if the training function created them itself, and none if the function returned
a function that creates the model (``runtime.deferred``). The parameters and persistent buffers of a layer
that is not held are meta tensors, which have shapes but no memory; ``materialise`` gives them memory, which
a transfer then fills. A tensor that several layers share (a tied weight) is one tensor while at least one
of these layers is held. Its *canonical* name is the first one in model order.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from planner.values import Recompute
from runtime.data.batches import (
    cast_floating,
    count_rows,
    leaves_of,
    signature,
    to_device,
)
from runtime.data.reading import collate_samples, read_sample
from runtime.data.sampling import seed_host
from runtime.deferred import DeferredModule
from runtime.device import CPU, DeviceRuntime, device_runtime
from runtime.errors import TrainingError, errors_of
from runtime.layers import recompute
from runtime.layers.activations import Activation, ActivationShape, as_received, flatten, shape_of
from runtime.layers.chain import LayerChain
from runtime.layers.compiled import CompiledLayer
from runtime.layers.finite_values import FiniteValues
from runtime.layers.host_memory import copy_to_host_memory
from runtime.layers.loss import Loss
from runtime.layers.modes import ModuleModes, begin_training
from runtime.layers.randomness import (
    DropoutProbe,
    LayerRandomStream,
    SampleDropout,
    generator_states,
    host_states,
    seed_torch,
)
from runtime.layers.tensor_plan import (
    NamedModule,
    SplitRegionChecker,
    TensorPlan,
    TensorPlanError,
    make_tensor_plan,
)
from runtime.layers.vocabulary import Vocabulary
from runtime.layers.windows import IN_PLACE_REMEDY, LayerScopes, ParameterReads, WindowedModule
from runtime.precision import PRECISIONS, dtype_name, unsupported_reason
from runtime.training import Batch, Training
from statemachine.messages.trainer import TrainingData
from storage.buckets import ParameterSize

Kind = Literal["parameter", "buffer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTensor:
    """A parameter or persistent buffer, with every attribute in the model that refers to it."""

    name: str
    kind: Kind
    trainable: bool
    layers: list[int] = field(default_factory=list)
    in_blocks: list[bool] = field(default_factory=list)
    """Whether each reference is inside a layer's block rather than in the code around it."""
    references: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def value(self) -> Tensor:
        module, attribute = self.references[0]
        tensor = getattr(module, attribute)
        assert isinstance(tensor, Tensor)
        return tensor

    def replace(self, tensor: Tensor) -> None:
        """Replace the tensor everywhere. This uses ``setattr`` because some modules (``nn.LSTM``) keep further
        references.
        """
        value = nn.Parameter(tensor, requires_grad=self.trainable) if self.kind == "parameter" else tensor
        for module, attribute in self.references:
            setattr(module, attribute, value)


class ShardedParameters(Protocol):
    """Parameters of which this rank keeps a shard; they are gathered while a layer runs."""

    def forward_pass(self) -> AbstractContextManager[None]:
        """Return a context for a forward pass of some layers."""

    def gathered(self, layer: int, *, block: bool) -> AbstractContextManager[None]:
        """Return a context in which a layer can run: its block, or its code outside of the block."""

    def whole_layer(self, layer: int) -> AbstractContextManager[None]:
        """Return a context in which all parameters of a layer are whole."""


class Model:
    """The model that the training function returned, as layers; it runs one microbatch to learn their shapes.

    :param data: provides the seed, the rows of a microbatch, the precision and the activation
        checkpointing.
    :param verified: skip the comparison of parts with the whole because another trainer makes it.
    :param runtime: the runtime of ``device``; by default one is created.
    :raises TrainingError: the layers do not fit each other, the data set or the loss.
    """

    def __init__(
        self,
        training: Training,
        data: TrainingData,
        device: torch.device = CPU,
        *,
        verified: bool = False,
        runtime: DeviceRuntime | None = None,
    ) -> None:
        self.training = training
        self.device = device
        self.runtime = device_runtime(device) if runtime is None else runtime
        self._seed = data.seed
        choice = data.activation_checkpointing
        self._recompute: Recompute = "none" if choice == "auto" else choice
        self._on_kept: Callable[[Tensor], None] | None = None
        self._compile = data.compile
        self._compiled: dict[int, CompiledLayer] = {}
        self._precision = PRECISIONS[data.precision]
        if (problem := unsupported_reason(data.precision, device)) is not None:
            raise TrainingError(problem)
        torch.set_float32_matmul_precision("high" if self._precision.tensor_cores else "highest")
        rows = data.microbatch_rows
        batch = first_batch(training, rows, self._precision.parameters)
        self.find_problem: Callable[[Batch], tuple[int, str] | None] | None = None
        """Function that returns the first row of a batch that the model cannot take, with the reason."""
        self._initial = training.model if isinstance(training.model, DeferredModule) else None
        self._exact = False
        """Whether runs whose results are discarded need the exact initial values."""
        self._structure: LayerChain | WindowedModule
        if training.layers is not None:
            self._structure = LayerChain(training.layers)
            for layer in self._structure.roots:
                layer.to(device)
            begin_training(self._structure.roots)
        else:
            root = self._root_on(device)
            self._check_ids(Vocabulary(root), batch)
            with self._autocast():
                self._structure = WindowedModule(
                    root,
                    training.split,
                    to_device(batch, device),
                    rows,
                    self._present,
                    has_loss=training.loss is not None,
                )
        for module in (module for root in self._structure.roots for module in root.modules()):
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                module.sparse = False  # Gradients are summed densely, in memory that ranks exchange.
        self._modes = [ModuleModes(root) for root in self._structure.roots]
        low = self._precision.compute is not None
        self.loss = Loss(training, self._structure, tolerance=0.02 if low else 1e-3)
        self._tensors = self._shared_tensors()
        self._parameters = [t for t in self._tensors if t.kind == "parameter"]
        self._trainable = [t for t in self._parameters if t.trainable]
        count = self._structure.layer_count
        self._of_layer = [[t for t in self._tensors if i in t.layers] for i in range(count)]
        self.held_layers = frozenset(range(count) if self._initial is None else ())
        """Layers whose parameters have memory here."""
        self._shards: ShardedParameters | None = None
        self.sharded_layers: frozenset[int] = frozenset()
        """Layers that run with parameters from shards; their buffers are whole here."""
        self.parameter_version = 0
        """Number that changes whenever parameter objects are replaced."""
        self._check: Callable[[], None] = _no_check
        self._values: FiniteValues | None = None
        self._dropout = [False] * count
        # The first samples show what draws random numbers. The keys are numbers of random streams.
        self._draws_around: dict[int, bool] = {}
        """True where code around the blocks draws from any generator."""
        self._draws_on_host: dict[int, bool] = {}
        """True where code draws from the generators of ``random`` or numpy."""
        self._shapes: dict[Any, dict[int, ActivationShape]] = {}
        self.couples_rows = self._structure.couples_rows
        """Whether a microbatch's rows influence each other, so that devices must not split them."""
        self.first_signature = self._structure.signature(batch, rows)
        """Signature of the first samples, for which every trainer knows the shapes."""
        self._input_signature = None if self.needs_batch else signature(batch[0])
        self.tensor_plan: TensorPlan | None = None
        """Modules that the devices of a stage may compute in parts."""
        self.tensor_problem: str | None = None
        """Reason why there is no tensor plan."""
        plan = self._make_plan(data)
        self._region_checker = SplitRegionChecker(plan, self._named_modules()) if plan is not None else None
        self._probe(batch, rows, verified=verified)
        self._settle_plan()
        if data.within_node == "tensor" and self.tensor_problem is not None:
            raise TrainingError(
                f"planner.within_node = tensor, and this model cannot be tensor-parallel: {self.tensor_problem}; "
                "use replicate, shard or auto"
            )

    def _root_on(self, device: torch.device) -> nn.Module:
        """Return the model in training mode, with everything that has memory on the device."""
        if self._initial is not None:
            self._initial.to_device(device)
            root = self._initial.root
        else:
            assert isinstance(self.training.model, nn.Module)
            root = self.training.model.to(device)
        begin_training([root])
        return root

    def _check_ids(self, vocabulary: Vocabulary, batch: Batch) -> None:
        self.find_problem = vocabulary.find_problem
        if (problem := vocabulary.find_problem(batch)) is not None:
            row, what = problem
            raise TrainingError(f"sample {row % len(self.training.dataset)} of Training.dataset {what}")

    # --- tensor parallelism ----------------------------------------------------------------------

    def _make_plan(self, data: TrainingData) -> TensorPlan | None:
        """Return the model's tensor-parallel plan before its split regions are checked.

        :raises TrainingError: the user's own plan is invalid, and the job may use it.
        """
        if data.compile:
            self.tensor_problem = "training.compile is on, and compiled layers cannot be split"
            return None
        alone = {
            id(t.value): (t.name, t.trainable and len(t.references) == 1 and len(t.layers) == 1)
            for t in self._tensors
        }
        try:
            return make_tensor_plan(self.training.tensor_plan, self._named_modules(), alone)
        except TensorPlanError as error:
            if self.training.tensor_plan is not None and data.within_node in ("auto", "tensor"):
                raise TrainingError(f"Training.tensor_plan: {error}") from error
            self.tensor_problem = str(error)
            return None

    def split_regions(self) -> SplitRegionChecker | None:
        """Return a checker that observes layers under the tensor-parallel plan, or ``None`` if there is no
        plan.
        """
        return (
            None if self.tensor_plan is None else SplitRegionChecker(self.tensor_plan, self._named_modules())
        )

    def _settle_plan(self) -> None:
        if self._region_checker is not None:
            try:
                self.tensor_plan = self._region_checker.validated_plan()
            except TensorPlanError as error:
                self.tensor_problem = str(error)
            self._region_checker = None

    def _named_modules(self) -> list[NamedModule]:
        return [
            NamedModule(name=name, module=module, layers=layers, in_block=self._structure.in_block(name))
            for name, module, layers in self._structure.modules()
        ]

    # --- structure ------------------------------------------------------------------------------

    @property
    def root_module(self) -> nn.Module:
        """All layers as one module, whose tensors have their canonical names first."""
        roots = self._structure.roots
        return nn.Sequential(*roots) if isinstance(self._structure, LayerChain) else roots[0]

    @property
    def layer_count(self) -> int:
        return self._structure.layer_count

    @property
    def scales_loss(self) -> bool:
        """Whether the precision needs a loss scale."""
        return self._precision.scales_loss

    @property
    def needs_batch(self) -> bool:
        """Whether every stage needs the microbatch itself, not only the first and the last."""
        return isinstance(self._structure, WindowedModule)

    def layer_name(self, layer: int) -> str:
        """Return the layer's name for messages."""
        return self._structure.name(layer)

    def layer_kind(self, layer: int) -> str:
        """Return the name of the layer's class, which does not contain its position."""
        return self._structure.kind(layer)

    @property
    def parameter_layers(self) -> dict[str, tuple[int, ...]]:
        """All trainable parameters in model order, each with the layers that use it, ascending; a tied parameter
        has more than one.
        """
        return {t.name: tuple(t.layers) for t in self._trainable}

    @property
    def frozen_layers(self) -> dict[str, tuple[int, ...]]:
        """All parameters that are not trained in model order, each with the layers that use it."""
        return {t.name: tuple(t.layers) for t in self._parameters if not t.trainable}

    @property
    def parameter_sizes(self) -> dict[str, ParameterSize]:
        """Sizes of all parameters, trainable or not."""
        return {
            t.name: ParameterSize(numel=t.value.numel(), dtype=dtype_name(t.value.dtype))
            for t in self._parameters
        }

    def named_parameters(
        self, layers: Collection[int], *, frozen: bool = False
    ) -> list[tuple[str, nn.Parameter]]:
        """Return the trainable parameters of ``layers`` by canonical name, in model order, tied ones once.

        ``materialise`` replaces the parameter objects, so do not keep them after the set of held layers has
        changed.

        :param frozen: return those that are not trained, too.
        """
        wanted = frozenset(layers)
        those = self._parameters if frozen else self._trainable
        return [(t.name, _parameter(t)) for t in those if not wanted.isdisjoint(t.layers)]

    def tensors_of(self, layer: int) -> list[ModelTensor]:
        """Return the parameters (trainable or not) and persistent buffers of one layer, in model order."""
        return self._of_layer[layer]

    def output_shape(self, layer: int, signature: Any = None) -> ActivationShape | None:
        """Return the shape of a layer's output for batches with this signature
        (``runtime.data.batches.signature``).

        :returns: ``None`` if no such batch has been run yet.
        """
        return self._shapes.get(signature, {}).get(layer)

    def set_output_shape(self, layer: int, signature: Any, shape: ActivationShape) -> None:
        """Record the shape of a layer's output for batches with this signature."""
        self._shapes.setdefault(signature, {})[layer] = shape

    # --- held layers ----------------------------------------------------------------------------

    def make_contiguous(self) -> None:
        """Make every parameter row-major in memory, so that ranges of its memory are ranges of its elements."""
        for tensor in self._parameters:
            if not tensor.value.is_contiguous():
                tensor.replace(tensor.value.detach().contiguous())
                self.parameter_version += 1

    def drop(self, layers: Collection[int]) -> None:
        """Free the memory of ``layers``, except for tensors that they share with a layer that stays."""
        self.held_layers -= frozenset(layers)
        self.parameter_version += 1
        for tensor in self._tensors:
            kept = self.held_layers if tensor.kind == "parameter" else self.held_layers | self.sharded_layers
            if kept.isdisjoint(tensor.layers) and not tensor.value.is_meta:
                tensor.replace(torch.empty_like(tensor.value.detach(), device="meta"))

    def materialise(self, layer: int) -> None:
        """Allocate the layer's parameters and persistent buffers, uninitialised if they were dropped."""
        self.held_layers |= {layer}
        self.parameter_version += 1
        self._allocate(self.tensors_of(layer))

    def park(self, layers: Collection[int], own: Collection[int], whole: Collection[int]) -> None:
        """Move the memory of ``layers`` from the device to the host, until ``unpark`` or ``drop``.

        :param own: layers of this rank's next stage, whose buffers stay; ``whole``: those of them whose
            parameters stay, too.
        """
        for tensor in self._tensors:
            stays = whole if tensor.kind == "parameter" else own
            moves = not set(layers).isdisjoint(tensor.layers) and set(stays).isdisjoint(tensor.layers)
            if moves and not tensor.value.is_meta:
                tensor.replace(copy_to_host_memory(tensor.value.detach()))
        self.parameter_version += 1

    def unpark(self, layers: Collection[int]) -> None:
        """Move the memory of parked layers back to the device."""
        for tensor in self._tensors:
            if not set(layers).isdisjoint(tensor.layers) and not tensor.value.is_meta:
                tensor.replace(
                    torch.empty_like(tensor.value.detach(), device=self.device).copy_(tensor.value)
                )
        self.parameter_version += 1

    def shard(self, layers: Collection[int], shards: ShardedParameters | None) -> None:
        """Run ``layers``, and no others, with parameters from ``shards`` from now on.

        Whole parameters that are held, too, stay as they are until they are dropped. The buffers of these
        layers are not dropped.
        """
        self._shards, self.sharded_layers = shards, frozenset(layers)
        self.parameter_version += 1

    def materialise_buffers(self, layers: Collection[int]) -> None:
        """Allocate the layers' persistent buffers, uninitialised if they were dropped."""
        for layer in sorted(layers):
            self._allocate(tensor for tensor in self.tensors_of(layer) if tensor.kind == "buffer")

    @contextmanager
    def whole_layer(self, layer: int) -> Iterator[None]:
        """Gather the layer's parameters within this context, which all devices of the stage must enter."""
        if self._shards is None or layer not in self.sharded_layers:
            yield
            return
        with torch.no_grad(), self._shards.whole_layer(layer):
            yield

    def _allocate(self, tensors: Iterable[ModelTensor]) -> None:
        for tensor in tensors:
            if tensor.value.is_meta:
                tensor.replace(torch.empty_like(tensor.value.detach(), device=self.device))

    def provide(self, layers: Collection[int]) -> None:
        """Hold ``layers``. Those that were not held get their initial values."""
        for layer in sorted(set(layers) - self.held_layers):
            if self._initial is None:
                raise RuntimeError(f"layer {layer} was dropped, and nothing can make it again")
            fresh = self._without_memory(layer)
            self.materialise(layer)
            self._initial.fill({tensor.name: tensor.value for tensor in fresh})

    @contextmanager
    def temporarily_provided(self, layer: int, *, own_memory: bool = False) -> Iterator[None]:
        """Hold ``layer`` within this context, for runs whose results are discarded; memory allocated for it is
        freed afterwards.

        A layer that was not held gets values that resemble its initial ones
        (``DeferredModule.make_placeholders``).

        :param own_memory: no two tensors share memory, as is usual; a layer whose time is measured needs that.
        """
        if layer in self.held_layers:
            yield
            return
        assert self._initial is not None
        if self._exact:
            self.provide([layer])
        else:
            fresh = self._without_memory(layer)
            made = self._initial.make_placeholders({t.name: t.value for t in fresh}, self.device)
            for tensor in fresh:
                value = made.pop(tensor.name)
                tensor.replace(value.clone() if own_memory else value)
            self.materialise(layer)
        try:
            yield
        finally:
            self.drop([layer])

    def _without_memory(self, layer: int) -> list[ModelTensor]:
        return [tensor for tensor in self.tensors_of(layer) if tensor.value.is_meta]

    def release_initial_values(self) -> None:
        """Release the source of the initial values, because training has begun."""
        if self._initial is not None:
            self._initial.release()
            self._initial = None

    @property
    def can_provide(self) -> bool:
        """Whether layers that are not held can be provided."""
        return self._initial is not None

    def _present(self, modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
        if self._initial is None:
            return nullcontext()
        return self._initial.materialised(modules, self.device, exact=self._exact)

    # --- running --------------------------------------------------------------------------------

    def forward(
        self,
        first: int,
        end: int,
        x: Activation | None,
        *,
        step: int,
        row: int,
        rows: int | None = None,
        batch: Batch = None,
        train: bool = True,
    ) -> Any:
        """Run layers ``[first, end)`` on rows of the global batch of step ``step``, starting at row ``row``.

        :param x: input of layer ``first``; ``None`` if it is the first layer of all and takes the batch.
        :param rows: number of these rows: see ``count_rows``.
        :param batch: these rows of the microbatch; a list of layers needs it only if ``first`` is 0.
        :param train: if false, the layers are in evaluation mode and nothing is kept for a backward pass.
        :returns: the output of the last of these layers, or the model's output if it is the last layer of
            all.
        """
        missing = set(range(first, end)) - self.held_layers - self.sharded_layers
        if missing:
            raise RuntimeError(f"layers {sorted(missing)} are not held here")
        sharded = nullcontext() if self._shards is None else self._shards.forward_pass()
        with torch.set_grad_enabled(train and torch.is_grad_enabled()), self._autocast(), sharded:
            if isinstance(self._structure, WindowedModule):
                rows = count_rows(batch, rows)
                self._modes[0].set_training(train)
                scopes = _RunScopes(self, step, row, rows)
                received = () if x is None else flatten(x)
                return self._structure.run(first, end, batch, received, rows, scopes)
            if x is None:
                x = self._structure.input_of(batch)
            for index in range(first, end):
                self._modes[index].set_training(train)
                x = self._run(index, x, step, row)
        return x

    def code_scopes(self, layers: Sequence[int]) -> list[tuple[int, bool]]:
        """Return the code that a forward pass of consecutive layers runs, in order: the layer, and whether it
        is its block.
        """
        return list(self._structure.code_scopes(layers[0], layers[-1] + 1))

    def join_gathers(self, first: int, end: int) -> None:
        """Take part in gathering the parameters of layers ``[first, end)`` while other devices of the stage
        run them and this device has no rows.
        """
        if self._shards is None:
            return
        with torch.no_grad(), self._shards.forward_pass():
            for layer, block in self.code_scopes(range(first, end)):
                with self._shards.gathered(layer, block=block):
                    pass

    @contextmanager
    def observed(self, check: Callable[[], None], values: FiniteValues) -> Iterator[None]:
        """Call ``check`` between layers within this context, forward and backward; it may raise to end the
        pass. Record the layers' values in ``values``.
        """
        self._check, self._values = check, values
        try:
            yield
        finally:
            self._check, self._values = _no_check, None

    def check_held_out(self, batch: Batch) -> None:
        """Check that the model can run a microbatch of the held-out data set.

        :raises TrainingError: the shapes or types of a layer list's input differ from those in training.
        """
        if self._input_signature is not None and signature(batch[0]) != self._input_signature:
            raise TrainingError(
                "inputs in Training.evaluation have other shapes or types than those in Training.dataset "
                f"({_shapes(batch[0])}); make them equal, as activations of Training.layers have one shape"
            )

    def warm_up(self, batch: Batch, rows: int, tick: Callable[[], None]) -> None:
        """Run every layer forward and backward once, so that the first step compiles nothing."""
        x: Any = None
        with self.preserve_buffers():
            for layer in range(self.layer_count):
                tick()
                last = layer == self.layer_count - 1
                with self.temporarily_provided(layer):
                    x = self.forward(layer, layer + 1, x, step=0, row=0, rows=rows, batch=batch)
                    outputs = (self.loss(x, batch, rows)[0],) if last else flatten(x)
                    roots = [t for t in outputs if t.requires_grad]
                    torch.autograd.backward(roots, [torch.zeros_like(t) for t in roots])
                if not last:
                    x = as_received(x)
        for _, parameter in self.named_parameters(range(self.layer_count)):
            parameter.grad = None

    def _compiled_function(self, layer: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the layer's compiled function if the job compiles layers."""
        if not (self._compile and torch.is_grad_enabled()):
            return function
        if layer not in self._compiled:
            self._compiled[layer] = CompiledLayer(function, self.layer_name(layer))
        return self._compiled[layer]

    def _autocast(self) -> AbstractContextManager[Any]:
        compute = self._precision.compute
        if compute is None:
            return nullcontext()
        # If weights were cast once for all layers of a stage, the rounding of the gradients of a weight
        # that two layers share would depend on the layout, and a layer that runs again alone would differ.
        return torch.autocast(self.device.type, compute, cache_enabled=False)

    def _run(self, index: int, x: Activation, step: int, row: int) -> Any:
        assert isinstance(self._structure, LayerChain)
        layer = self._structure.layers[index]
        scopes = _RunScopes(self, step, row, len(flatten(x)[0]))
        if isinstance(x, tuple):
            output: Activation = scopes.run_block(index, lambda *tensors: layer(tensors), *x)
            return output
        return scopes.run_block(index, layer, x)

    def _probe(self, batch: Batch, rows: int, *, verified: bool) -> None:
        """Run a microbatch layer by layer to learn shapes and uses of dropout, and to report errors by layer."""
        batch = to_device(batch, self.device)
        x: Any = None
        shapes: dict[int, ActivationShape] = {}
        with self.preserve_buffers(), torch.no_grad():
            for index in range(self.layer_count):
                probe = DropoutProbe()
                given = x
                run = partial(self.forward, index, index + 1, given, step=0, row=0, rows=rows, batch=batch)
                received = () if given is None else flatten(given)
                versions = [tensor._version for tensor in received]
                shown = _shapes(batch if given is None else given)
                with errors_of(self.layer_name(index), f" on {shown}"):
                    watching = (
                        nullcontext() if self._region_checker is None else self._region_checker.observe(index)
                    )
                    with self.temporarily_provided(index):
                        with probe, watching, self._checked_state(index, run):
                            x = run()
                        if self._region_checker is not None:
                            self._region_checker.compare_split(
                                index,
                                run,
                                tolerance=0.05 if self._precision.compute is not None else 1e-3,
                            )
                for tensor, version in zip(received, versions, strict=True):
                    if tensor.is_floating_point() and tensor._version != version:
                        raise TrainingError(
                            f"{self.layer_name(index)} changes its input in place, which autograd does not allow "
                            f"where a stage begins; {IN_PLACE_REMEDY}"
                        )
                self._dropout[index] = probe.seen
                if index < self.layer_count - 1 or isinstance(self._structure, LayerChain):
                    self._check_output(index, x, rows)
                    shapes[index] = shape_of(x)
            if self._initial is not None and not self._exact and not _finite(x):
                self._exact = True
                self._probe(batch, rows, verified=verified)
                return
            end, last_input = self.layer_count, given

            def last(changed: Batch) -> Any:
                with self.temporarily_provided(end - 1):
                    return self.forward(
                        end - 1, end, last_input, step=0, row=0, rows=rows, batch=changed, train=False
                    )

            self.loss.check(x, batch, rows, whole=self._whole, last=last, verified=verified)
            if self.training.loss is not None:
                self._check_gradient(x, batch, rows)
        self._shapes[self.first_signature] = shapes
        if isinstance(self._structure, WindowedModule) and not verified:
            exact = self._precision.parameters == torch.float64
            tolerance = 0.02 if self._precision.compute is not None else 1e-7 if exact else 1e-5
            self._modes[0].set_training(True)
            with self._autocast():
                self._structure.verify(
                    batch,
                    rows,
                    lambda output: self.loss.mean(output, batch, rows),
                    tolerance,
                    self.temporarily_provided,
                )

    def _check_read_by_loss(self, parameter: nn.Parameter) -> None:
        last = self.layer_count - 1
        for tensor in self._parameters:
            if tensor.value is parameter and last not in tensor.layers:
                raise TrainingError(
                    f"the loss reads the parameter {tensor.name}, which the stage that computes the loss does not "
                    "have; use the optimizer's weight_decay, or let layers compute such a term and pass it on"
                )

    def _check_gradient(self, output: Any, batch: Batch, rows: int) -> None:
        """Check that the loss function has a gradient, and reads only parameters that the last stage has."""
        leaves = list(leaves_of(dict(output) if isinstance(output, Mapping) else output))
        # A parameter that the model returns has its own gradient.
        tensors = [
            t for t in leaves if isinstance(t, Tensor) and t.is_floating_point() and not t.requires_grad
        ]
        with torch.enable_grad(), errors_of("the loss"), ParameterReads(self._check_read_by_loss):
            for tensor in tensors:
                tensor.requires_grad_()
            value, weight = self.loss(output, batch, rows)
            for tensor in tensors:
                tensor.requires_grad_(False)
        known = tensors and all(isinstance(leaf, Tensor | int | float | str | None) for leaf in leaves)
        if known and weight and not value.requires_grad:
            raise TrainingError(
                "the loss has no gradient: it was detached from what the model computed (by detach(), item(), "
                "no_grad() or numpy); return the tensor itself"
            )

    @contextmanager
    def _checked_state(self, layer: int, run_again: Callable[[], object]) -> Iterator[None]:
        """Run a layer in training mode within this context, and reject it if it changes parameters, or keeps state in
        buffers that are not persistent.
        """
        parameters = [
            (t.name, t.value, t.value._version) for t in self._of_layer[layer] if t.kind == "parameter"
        ]
        before = self._temporary_buffers(layer)
        yield
        for name, value, version in parameters:
            if value._version != version:
                raise TrainingError(
                    f"{self.layer_name(layer)} changes its parameter {name} while it runs (as nn.Embedding does with "
                    "max_norm), and copies of it on several nodes would differ; leave that out, or change a copy"
                )
        after = self._temporary_buffers(layer)
        if _differing(before, after) is None:
            return
        run_again()
        # What the first run computes and keeps, such as a table, the second one leaves.
        if (lost := _differing(after, self._temporary_buffers(layer))) is not None:
            raise TrainingError(
                f"{self.layer_name(layer)} changes the buffer {lost} in training, and as it is not persistent, it is "
                "lost when the layer moves; register it with persistent=True"
            )

    def _temporary_buffers(self, layer: int) -> dict[str, Tensor]:
        """Return copies of the layer's buffers that are not persistent."""
        return {
            f"{path}.{name}" if path else name: value.clone()
            for path, module, layers in self._structure.modules()
            if layer in layers
            for name, value in module._buffers.items()
            if name in module._non_persistent_buffers_set and value is not None
        }

    def _whole(self, batch: Batch, rows: int, row: int) -> Any:
        """Return the output of all layers in evaluation mode, with the random numbers of rows from ``row`` on."""
        x: Any = None
        for layer in range(self.layer_count):
            with self.temporarily_provided(layer):
                x = self.forward(layer, layer + 1, x, step=0, row=row, rows=rows, batch=batch, train=False)
        return x

    def _check_output(self, index: int, output: object, rows: int) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        # Before a first block that takes the batch itself, nothing is computed that a window could pass on.
        if (not tensors and not self.needs_batch) or not all(
            isinstance(tensor, Tensor) for tensor in tensors
        ):
            raise TrainingError(
                f"{self.layer_name(index)} must return a tensor or a tuple of tensors, not {type(output).__name__}"
            )
        for tensor in tensors:
            if tensor.is_complex():
                raise TrainingError(
                    f"{self.layer_name(index)} passes a complex tensor on, and stages exchange real numbers only; pass "
                    "torch.view_as_real of it"
                )
            if tensor.dim() == 0 or tensor.shape[0] not in (rows, *((1,) if self.needs_batch else ())):
                raise TrainingError(
                    f"{self.layer_name(index)} returned a tensor of shape {tuple(tensor.shape)} for {rows} "
                    "samples; samples must stay in dim 0"
                )

    def _shared_tensors(self) -> list[ModelTensor]:
        """Return all parameters and persistent buffers in model order; shared ones once, with all their
        references.
        """
        found: dict[int, ModelTensor] = {}
        for path, module, layers in self._structure.modules():
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
                    ModelTensor(
                        name=f"{path}.{attribute}" if path else attribute,
                        kind=kind,
                        trainable=kind == "parameter" and value.requires_grad,
                    ),
                )
                shared.layers[:] = sorted({*shared.layers, *layers})
                if not any(m is module and a == attribute for m, a in shared.references):
                    shared.references.append((module, attribute))
                    shared.in_blocks.append(self._structure.in_block(path))
        return list(found.values())

    @contextmanager
    def preserve_buffers(self) -> Iterator[None]:
        """Restore persistent buffers (running statistics) at the end of this context."""
        saved = [(t, t.value.clone()) for t in self._tensors if t.kind == "buffer" and not t.value.is_meta]
        try:
            yield
        finally:
            for tensor, value in saved:
                tensor.value.copy_(value)

    @contextmanager
    def _with_buffer_copies(self, layer: int) -> Iterator[None]:
        """Let copies of the layer's persistent buffers change within this context.

        A layer that runs again for its backward pass must not count a microbatch twice in its running
        statistics.
        """
        buffers = [(t, t.value) for t in self._of_layer[layer] if t.kind == "buffer"]
        for tensor, value in buffers:
            tensor.replace(value.clone())
        try:
            yield
        finally:
            for tensor, value in buffers:
                tensor.replace(value)

    def set_recompute(self, mode: Recompute) -> None:
        """Set how layers recompute activations from now on, as the plan says for this rank's stage."""
        self._recompute = mode

    @contextmanager
    def override_recompute(
        self, mode: Recompute, on_saved: Callable[[Tensor], None] | None = None
    ) -> Iterator[None]:
        """Recompute with ``mode`` within this context, whatever the plan says; a profile measures all modes.

        :param on_saved: called with every output that ``selective`` keeps.
        """
        before, self._recompute, self._on_kept = self._recompute, mode, on_saved
        try:
            yield
        finally:
            self._recompute, self._on_kept = before, None


class _RunScopes(LayerScopes):
    """Seeds, per-sample dropout and activation checkpointing for one run of layers on some rows."""

    def __init__(self, model: Model, step: int, row: int, rows: int) -> None:
        self._model = model
        self._step = step
        self._row = row
        self._rows = rows

    @contextmanager
    def _seeded(self, layer: int, number: int) -> Iterator[None]:
        """Draw from the random stream ``number`` within this context; ``layer`` decides whether dropout is
        drawn by sample.
        """
        model = self._model
        stream = LayerRandomStream(seed=model._seed, step=self._step, row=self._row, layer=number)
        seed_torch(stream.layer_seed, model.device)
        draws = model._draws_on_host.get(number)
        if draws is not False:
            seed_host(stream.layer_seed)
        before = host_states() if draws is None else ()
        by_sample = model._dropout[layer] and not model._compile
        with SampleDropout(stream, self._rows) if by_sample else nullcontext():
            yield
        if draws is None:
            model._draws_on_host[number] = host_states() != before

    def _gathered(self, layer: int, *, block: bool) -> AbstractContextManager[None]:
        """Return a context in which the parameters of the layer's block, or of its other code, are whole."""
        shards = self._model._shards
        if shards is None or layer not in self._model.sharded_layers:
            return nullcontext()
        return shards.gathered(layer, block=block)

    @contextmanager
    def _again(self, layer: int) -> Iterator[None]:
        """Surround a layer that runs for the second time."""
        with self._model._with_buffer_copies(layer), self._gathered(layer, block=True):
            yield

    @contextmanager
    def around(self, layer: int, part: int) -> Iterator[None]:
        with self._gathered(layer, block=False), self._seeded(layer, self._number(layer, part)):
            yield

    def _number(self, layer: int, part: int) -> int:
        # Code after a block draws from its own stream because the block may run again for checkpointing.
        return layer + part * self._model.layer_count

    @contextmanager
    def outside(self, layer: int, part: int) -> Iterator[None]:
        draws, number = self._model._draws_around, self._number(layer, part)
        if number not in draws:
            before = generator_states(self._model.device)
            yield
            draws[number] = generator_states(self._model.device) != before
        elif draws[number]:
            with self._seeded(layer, number):
                yield
        else:
            yield

    def run_block(self, layer: int, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        check = self._model._check
        check()
        function = self._model._compiled_function(layer, function)

        def run(*given: Any, **given_by_name: Any) -> Any:
            with self._seeded(layer, layer):
                return function(*given, **given_by_name)

        values = self._model._values
        if values is not None and arguments and isinstance(arguments[0], Tensor):
            values.add_input(layer, arguments[0])
        mode = self._model._recompute
        if mode == "selective" and isinstance(function, CompiledLayer):
            mode = "full"  # Compiled code reuses the memory of its results, so single results cannot be kept.
        # ``run`` seeds the generators itself, also when it runs again in the backward pass. Parameters are
        # gathered outside of it because selective recomputation counts the operations inside.
        with self._gathered(layer, block=True):
            output = recompute.run_with_recompute(
                mode,
                run,
                arguments,
                named,
                second_run_context=lambda: self._again(layer),
                on_saved=self._model._on_kept,
            )
        outputs = output if isinstance(output, tuple) else (output,)
        numbers = [one for one in outputs if isinstance(one, Tensor) and one.is_floating_point()]
        # The first one that depends on parameters; others may be masks, which contain infinities.
        result = next((one for one in numbers if one.requires_grad), numbers[0] if numbers else None)
        if result is None:
            return output
        if values is not None:
            values.add("output", layer, result)
        if result.requires_grad:

            def before_backward_pass(gradient: Tensor) -> None:
                check()
                if values is not None:
                    values.add_output_gradient(layer, gradient)

            result.register_hook(before_backward_pass)  # type: ignore[no-untyped-call]
        return output


def first_batch(training: Training, rows: int, dtype: torch.dtype) -> Batch:
    """Return the data set's first samples as a microbatch, repeating a data set that is too short.

    :raises TrainingError: the data set or the collate function failed.
    """
    length = len(training.dataset)
    samples = [
        read_sample(training.dataset, row % length, "Training.dataset", "to build the model")
        for row in range(rows)
    ]
    return cast_floating(collate_samples(training.collate, samples, f"the first {rows} samples"), dtype)


def _differing(before: dict[str, Tensor], after: dict[str, Tensor]) -> str | None:
    """Return the name of a tensor that is different after a run."""
    return next(
        (n for n, value in after.items() if n not in before or not torch.equal(before[n], value)), None
    )


def _no_check() -> None:
    """Do nothing."""


def _parameter(tensor: ModelTensor) -> nn.Parameter:
    value = tensor.value
    assert isinstance(value, nn.Parameter)
    return value


def _finite(output: Any) -> bool:
    return all(bool(leaf.isfinite().all()) for leaf in leaves_of(output) if isinstance(leaf, Tensor))


def _shapes(value: Any) -> str:
    tensors = [leaf for leaf in leaves_of(value) if isinstance(leaf, Tensor)]
    return ", ".join(f"{tuple(t.shape)} {t.dtype}" for t in tensors)
