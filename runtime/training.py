"""The interface for training functions, and how such a function is found, called and checked.

A training function is a user's own code, named in the job file as ``path/to/file.py:name`` or
``package.module:name``. Every error in it or in what it returns becomes a ``TrainingError`` that names what
to fix, so all other modules can rely on a ``Training``.
"""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from runtime.data.reading import check_dataset
from runtime.data.sampling import seed_host
from runtime.deferred import DeferredModule, ModelFactory, Recording, UntrackedWriteError, recorded
from runtime.device import create_cuda_context
from runtime.errors import TrainingError
from runtime.import_conflicts import OUR_PACKAGES, find_import_conflict
from runtime.precision import PRECISIONS
from runtime.sources.errors import DataError
from runtime.tracebacks import describe_error
from runtime.wire.recipe import RECIPE
from statemachine.messages.trainer import TrainingData

Batch = Any
"""Collated samples: a tensor, or a tuple, list or dict of batches, numbers and strings, with the rows in dim
0.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """A committed step, as ``Training.on_step`` receives it.

    Examples:
        >>> def on_step(info: StepInfo) -> None:
        ...     print(f"step {info.step}: loss {info.loss:.4f}")
    """

    step: int
    """Number of the step; the first is 1."""
    loss: float
    """Mean loss of the global batch: over its rows, or over the tokens that count where the loss counts
    tokens.
    """
    weight: float
    """Number of rows, or of tokens that count, over which ``loss`` is the mean."""
    gradient_norm: float
    """Norm of all gradients before clipping."""
    learning_rate: float
    """Learning rate of this step, of the optimizer's first parameter group."""
    skipped: bool
    """Whether no parameter was updated because a gradient was not finite."""
    metrics: dict[str, float]
    """Values of ``Training.metrics`` by name, averaged like the loss."""
    step_s: float | None
    """Duration of the step in seconds. This and the next two are ``None`` after a failure if the device that
    measured them was lost.
    """
    samples_per_s: float | None
    tokens_per_s: float | None
    """Tokens per second; ``None`` also where the loss counts rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The model, data and optimizer of a job: what your training function returns.

    Name the function in the job file (``training.function = "train.py:build"``). Every trainer calls it
    once, with the job's ``arguments``, before the first step; ftd then runs the training loop. All trainers
    must end up with the same values. Take random numbers from ``torch``, ``random`` or ``numpy.random``,
    which are seeded with the job's seed before the call, and do not look at the rank, the host or the
    clock.

    Give either ``model`` or ``layers``; ``dataset`` and ``optimizer`` are required, and so is ``loss`` with
    ``layers``. A mistake is reported as a ``TrainingError`` that names what to change.

    Examples:
        >>> def build(*, width: int = 64) -> Training:
        ...     points = torch.randn(4096, 2)
        ...     return Training(
        ...         layers=[nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2)],
        ...         loss=nn.functional.cross_entropy,
        ...         optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
        ...         dataset=TensorDataset(points, (points[:, 0] > 0).long()),
        ...     )
    """

    dataset: Any
    """Map-style data set: ``len(dataset)`` and ``dataset[index]``, which returns a dict, a tuple or a tensor
    without a batch dimension. The same index must give the same sample on every node. With ``layers`` and
    no ``collate``, a sample is a pair (input, target).
    """
    optimizer: Callable[[list[tuple[str, nn.Parameter]]], Optimizer]
    """Function that makes the optimizer from the trainable parameters, given as a list of (name, parameter)."""
    layers: Sequence[nn.Module] | None = None
    """Modules that run one after the other. Each takes the output of the previous one, a tensor or a tuple of
    tensors with the samples in dim 0; the first takes the samples' input. To tie weights, let two layers
    hold the same ``nn.Parameter``.
    """
    model: nn.Module | Callable[[], nn.Module] | DeferredModule | None = None
    """Module that ftd cuts into layers, usually a Hugging Face ``PreTrainedModel``; or better a function that
    makes it, since a trainer then has memory for its own layers alone. The module takes the entries of a
    dict by keyword and those of a tuple by position. If ``loss`` is given, the last entry of a tuple is the
    target, which the module does not receive.
    """
    split: Sequence[str] | None = None
    """Names of the submodules before which ``model`` may be cut, in the order in which they run. With
    ``None``, ftd finds the model's repeated blocks.
    """
    tensor_plan: Mapping[str, str] | None = None
    """Way in which the devices of a stage split linear modules (``planner.within_node = "tensor"``), by module
    name, in which ``*`` stands for one component. The values are ``colwise``, ``rowwise``,
    ``colwise_gather_output``, ``rowwise_split_input`` and ``replicated_with_grad_allreduce``
    (docs/reference/models.md). With ``None``, ftd uses the plan that Hugging Face gives the model, if any.
    """
    loss: Callable[[Any, Any], Any] | None = None
    """``loss(output, target)`` with ``layers``, ``loss(output, batch)`` with ``model``. It returns the *mean*
    over rows as a scalar, or a pair (sum, weight), for which the global loss is the sum of the sums divided
    by the sum of the weights. With ``None``, the model's own loss is used.
    """
    collate: Callable[[list[Any]], Batch] | None = None
    """Function that makes a batch from a microbatch's samples. With ``None``, tensors are stacked."""
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    """Function that makes the learning-rate schedule, which advances once per step."""
    evaluation: Any | None = None
    """Held-out data set, with samples like those of ``dataset``."""
    metrics: Callable[[Any, Batch], dict[str, Any]] | None = None
    """``metrics(output, batch)``, which returns further numbers by name; each is averaged like the loss. The names
    are the same for all samples: a pair (0, 0) counts nothing.
    """
    on_step: Callable[[StepInfo], object] | None = None
    """Function that one device calls after each committed step, while training waits.
    docs/tutorials/training.md says how failures affect it.
    """
    files_from: Sequence[str | Path] = ()
    """Directories with files of the tokenizer or processor, or a ``tokenizer.json``. Checkpoints include these
    files, so that exports have them. The directory that the model was loaded from need not be listed.
    """


def load_training(data: TrainingData) -> Training:
    """Find the training function, call it and check what it returns.

    The generators of torch, random and numpy are seeded, and ``data.path`` (and the directory of the
    script) are put at the front of ``sys.path``, so that the script can import its neighbours.

    :raises TrainingError: something that the user has to change.
    """
    _check_numbers(data)
    function = _find(data)
    try:
        inspect.signature(function).bind(**data.arguments)
    except TypeError as error:
        raise TrainingError(
            f"{data.function} does not take the job's arguments {sorted(data.arguments)}: {error}; "
            f"its signature is {inspect.signature(function)}"
        ) from error
    _seed(data.seed)
    try:
        training = function(**data.arguments)
    except TrainingError:
        raise
    except DataError as error:
        raise TrainingError(str(error)) from error
    except (Exception, SystemExit) as error:
        raise TrainingError(f"{data.function} raised {describe_error(error)}") from error
    if not isinstance(training, Training):
        raise TrainingError(f"{data.function} must return a Training, not {type(training).__name__}")
    _check(training, data)
    dtype = PRECISIONS[data.precision].parameters
    if training.layers is not None:
        for layer in training.layers:
            layer.to(dtype)
        return replace(training, layers=tuple(training.layers))
    return replace(training, model=_made(training.model, data.function, dtype))


# --- finding the function ------------------------------------------------------------------------


def _find(data: TrainingData) -> Callable[..., Any]:
    if data.function == RECIPE:
        recipe, _, name = RECIPE.partition(":")
        return getattr(importlib.import_module(recipe), name)  # type: ignore[no-any-return]
    place, colon, name = data.function.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise TrainingError(
            f"training function {data.function!r} must be written file.py:name or package.module:name"
        )
    root = Path(data.path).resolve()
    if not root.is_dir():
        raise TrainingError(f"directory {root} of the training function does not exist")
    module = _load_file(root, place) if place.endswith(".py") else _load_module(root, place)
    function = getattr(module, name, None)
    if function is None:
        raise TrainingError(f"{place} defines no {name!r}; it defines {_functions(module)}")
    if not callable(function):
        raise TrainingError(f"{data.function} is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def _load_file(root: Path, place: str) -> ModuleType:
    path = (root / place).resolve()
    if not path.is_file():
        raise TrainingError(f"training script {path} does not exist")
    for directory in dict.fromkeys((root, path.parent)):
        _import_from(directory)
    name = f"_ftd_training_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TrainingError(f"{path} cannot be imported as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise TrainingError(f"importing {path} raised {describe_error(error)}") from error
    return module


def _load_module(root: Path, place: str) -> ModuleType:
    if place.partition(".")[0] in OUR_PACKAGES:
        raise TrainingError(f"{place} belongs to ftd; rename your module")
    _import_from(root)
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise TrainingError(f"importing {place} (from {root}) raised {describe_error(error)}") from error


def _import_from(directory: Path) -> None:
    """Put the directory on the import path.

    :raises TrainingError: a file there has the name of one of ftd's packages, which it would shadow with obscure
        errors.
    """
    if (conflict := find_import_conflict(directory)) is not None:
        clash, name = conflict
        raise TrainingError(f"{clash} has the name of ftd's own package {name!r}; rename it")
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


def _functions(module: ModuleType) -> str:
    names = [
        name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")
    ]
    return ", ".join(names) or "no function"


# --- checking ------------------------------------------------------------------------------------


def _check_numbers(data: TrainingData) -> None:
    if data.precision not in PRECISIONS:
        raise TrainingError(f"precision {data.precision!r} is not one of {', '.join(PRECISIONS)}")
    if data.steps < 1:
        raise TrainingError(f"steps must be at least 1, not {data.steps}")
    if data.microbatch_rows < 1 or data.global_batch < 1 or data.global_batch % data.microbatch_rows:
        raise TrainingError(
            f"global_batch {data.global_batch} must be a positive multiple of microbatch "
            f"{data.microbatch_rows}"
        )
    for name in ("evaluation_every_steps", "evaluation_batches"):
        if getattr(data, name) < 0:
            raise TrainingError(f"{name} must be at least 0, not {getattr(data, name)}")
    if not 0 <= data.seed < 2**63:
        raise TrainingError(f"seed {data.seed} must lie between 0 and 2^63 - 1")
    if data.clip_gradient_norm is not None and not data.clip_gradient_norm > 0:
        raise TrainingError(f"clip_gradient_norm must be above 0, not {data.clip_gradient_norm}")


def torch_device(data: TrainingData) -> torch.device:
    """Return the device on which this process computes. Each trainer of a node sees its own device as the
    first.

    :raises TrainingError: the job asks for CUDA, and this process sees no device: the host has none, or
        not the one that this trainer was given.
    """
    if data.device != "cuda" and data.backend != "nccl":
        return torch.device("cpu")
    if torch.cuda.device_count() == 0:
        asked = 'backend "nccl"' if data.backend == "nccl" else 'device "cuda"'
        given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        raise TrainingError(
            f"{asked} needs a CUDA device, and this trainer finds none (CUDA_VISIBLE_DEVICES={given}): the host has no "
            "such GPU, or lost it; see nvidia-smi, set node.devices to the number of GPUs that work, or use backend "
            '"gloo" and device "cpu"'
        )
    device = torch.device("cuda", 0)
    create_cuda_context()
    torch.cuda.set_device(device)
    return device


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    seed_host(seed)


def _made(model: Any, function: str, dtype: torch.dtype) -> nn.Module | DeferredModule:
    """Return the model in ``dtype``; a model that a function makes gets no memory for its tensors.

    :raises TrainingError: the model cannot be made, or is of a kind that cannot be trained.
    """
    if isinstance(model, nn.Module):
        return _checked(model, function).to(dtype)
    recording = Recording()
    try:
        with recorded(recording, exact=not isinstance(model, ModelFactory) or model.exact):
            made = model.build() if isinstance(model, ModelFactory) else model()
            if isinstance(made, nn.Module):
                made.to(dtype)
    except TrainingError:
        raise
    except (Exception, SystemExit) as error:
        raise TrainingError(f"{function}: Training.model raised {describe_error(error)}") from error
    if not isinstance(made, nn.Module):
        raise TrainingError(f"{function}: Training.model must make an nn.Module, not {_a(made)}")
    _checked(made, function)
    weights = model.weights(made) if isinstance(model, ModelFactory) else None
    try:
        return DeferredModule(made, recording, weights)
    except UntrackedWriteError as error:
        raise TrainingError(
            f"{function}: Training.model writes to a parameter from several threads; make the model in one thread, "
            "or give Training.model the module itself"
        ) from error


def _checked(model: nn.Module, function: str) -> nn.Module:
    """Return the model.

    :raises TrainingError: the model is of a kind that cannot be trained.
    """
    config = getattr(model, "config", None)
    if getattr(model, "hf_device_map", None) is not None:
        raise TrainingError(
            f"{function}: {type(model).__name__} was loaded with device_map, but ftd places layers on devices; "
            "load it without device_map"
        )
    if getattr(model, "is_quantized", False) or getattr(config, "quantization_config", None) is not None:
        raise TrainingError(
            f"{function}: {type(model).__name__} is quantised, and quantised weights cannot be trained; load it "
            'in full precision (and use precision = "bfloat16" to compute in less)'
        )
    if any(getattr(part, "gradient_checkpointing", False) is True for part in model.modules()):
        raise TrainingError(
            f"{function}: {type(model).__name__} has gradient checkpointing enabled; leave that to ftd: "
            'activation_checkpointing = "auto" in the job file'
        )
    if any("_orig_mod" in part._modules or part._compiled_call_impl is not None for part in model.modules()):
        raise TrainingError(
            f"{function}: {type(model).__name__}, or a part of it, was compiled with torch.compile; leave that to ftd: "
            "compile = true in [training] of the job file"
        )
    dropped = [key for key, value in vars(config).items() if "layerdrop" in key and value] if config else []
    if dropped:
        raise TrainingError(
            f"{function}: {type(model).__name__} leaves out blocks by chance ({', '.join(dropped)}), and every "
            f"stage would choose by itself; set {' and '.join(f'{key} = 0' for key in dropped)} in its configuration"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TrainingError(f"{function}: {type(model).__name__} has no trainable parameter")
    for part in model.modules():
        part_config = getattr(part, "config", None)
        if part_config is not None and getattr(part_config, "use_cache", False):
            part_config.use_cache = False  # The cache of keys and values only serves generation.
    _check_hooks([model], function)
    _check_ties([model])
    return model


def _check(training: Training, data: TrainingData) -> None:
    function = data.function
    if (training.layers is None) == (training.model is None):
        raise TrainingError(f"{function}: give either Training.layers or Training.model")
    if training.layers is not None:
        _check_layers(training.layers, function)
        _check_hooks(training.layers, function)
        _check_ties(training.layers)
        if training.split is not None:
            raise TrainingError(f"{function}: Training.split is for Training.model; layers are cut already")
    elif not callable(training.model):
        raise TrainingError(
            f"{function}: Training.model must be an nn.Module or a function that makes one, "
            f"not {_a(training.model)}"
        )
    if not callable(training.optimizer):
        raise TrainingError(
            f"{function}: Training.optimizer must be a function, not {_a(training.optimizer)}"
        )
    if training.loss is None and training.layers is not None:
        raise TrainingError(f"{function}: Training.loss is missing; only a model has a loss of its own")
    for name in ("loss", "collate", "metrics", "on_step"):
        value = getattr(training, name)
        if value is not None and not callable(value):
            raise TrainingError(f"{function}: Training.{name} must be a function, not {_a(value)}")
    if training.scheduler is not None and not callable(training.scheduler):
        raise TrainingError(
            f"{function}: Training.scheduler must be a function (optimizer -> LRScheduler) or None, "
            f"not {_a(training.scheduler)}"
        )
    if isinstance(training.loss, nn.Module) and any(True for _ in training.loss.parameters()):
        raise TrainingError(f"{function}: Training.loss has parameters; make them part of the last layer")
    if isinstance(training.files_from, str | Path) or not isinstance(training.files_from, Sequence):
        raise TrainingError(f"{function}: Training.files_from must be a list of directories")
    for place in training.files_from:
        if not Path(place).exists():
            raise TrainingError(f"{function}: Training.files_from: {place} does not exist")
    pairs = training.layers is not None and training.collate is None
    _check_dataset(training.dataset, f"{function}: Training.dataset", pairs=pairs)
    if training.evaluation is not None:
        _check_dataset(training.evaluation, f"{function}: Training.evaluation", pairs=pairs)
    elif data.evaluation_every_steps > 0:
        raise TrainingError(
            f"{function}: the job evaluates every {data.evaluation_every_steps} steps, but Training.evaluation is "
            "missing; return a held-out data set, or leave [evaluation] out of the job file"
        )


def _check_layers(layers: Sequence[nn.Module], function: str) -> None:
    if not isinstance(layers, Sequence | nn.ModuleList | nn.Sequential) or not len(layers):
        raise TrainingError(f"{function}: Training.layers must be a list of at least one nn.Module")
    first_use: dict[int, int] = {}
    for index, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise TrainingError(f"{function}: layer {index} is a {type(layer).__name__}, not an nn.Module")
        if id(layer) in first_use:
            raise TrainingError(
                f"{function}: layer {index} is the same module as layer {first_use[id(layer)]}; "
                "make two modules and let them hold the same nn.Parameter"
            )
        first_use[id(layer)] = index
        for name, parameter in layer.named_parameters():
            if isinstance(parameter, UninitializedParameter):
                raise TrainingError(
                    f"{function}: parameter {name} of layer {index} is uninitialised; "
                    "give lazy modules their sizes"
                )


def _check_hooks(layers: Sequence[nn.Module], function: str) -> None:
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise TrainingError(
                    f"{function}: parameter {name} has a hook, which is lost when its layer moves; change its gradient "
                    "in forward, with a torch.autograd.Function or torch.clamp, or by a learning rate of its own"
                )


def _check_ties(layers: Sequence[nn.Module]) -> None:
    """Check that no two parameters share memory, since they would diverge on different devices.

    :raises TrainingError: two different parameters share memory.
    """
    owner: dict[int, tuple[int, str]] = {}
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            if not parameter.numel():
                continue
            address = parameter.untyped_storage().data_ptr()
            identity, other = owner.setdefault(address, (id(parameter), f"{index}.{name}"))
            if identity != id(parameter):
                raise TrainingError(
                    f"parameters {other} and {index}.{name} share memory but are two nn.Parameters; "
                    "tie them by assigning the same nn.Parameter to both"
                )


def _check_dataset(dataset: Any, name: str, *, pairs: bool) -> None:
    check_dataset(dataset, name)
    try:
        sample = dataset[0]
    except Exception as error:
        raise TrainingError(f"{name}[0] raised {describe_error(error)}") from error
    if not pairs:
        return
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise TrainingError(f"{name}[0] must be a pair (input, target), not {_kind_of(sample)}")
    for part, value in zip(("input", "target"), sample, strict=True):
        if not isinstance(value, Tensor | np.ndarray | np.generic | int | float):
            raise TrainingError(
                f"{name}[0]: the {part} must be a tensor, a numpy array or a number, not {_a(value)}"
            )


def _a(value: object) -> str:
    return f"a {type(value).__name__}"


def _kind_of(sample: object) -> str:
    match sample:
        case tuple() | list():
            return f"{len(sample)} values"
        case dict():
            return f"a dict with {', '.join(map(repr, sample))}"
        case _:
            return _a(sample)
