"""What a user's training function returns, and how it is found, called and checked.

The function is ordinary code of the user's, named in the job file as ``path/to/file.py:name`` or
``package.module:name``. Whatever is wrong with it or with what it returns is a ``TrainingError`` that
names the thing to fix; nothing below this module has to doubt a ``Training``.
"""

import importlib
import importlib.util
import inspect
import os
import random
import sys
import traceback
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

from runtime.deferred import DeferredModule, ModelFactory, ModelRecorder, Recording, UntrackedWriteError
from runtime.precision import PRECISIONS
from runtime.sources.errors import DataError
from runtime.wire.recipe import RECIPE
from statemachine.messages.trainer import TrainingData

OUR_PACKAGES = ("planner", "statemachine", "storage", "runtime", "ftd")


class TrainingError(ValueError):
    """The training function, or what it returned, cannot be used; the message says what to change."""


Batch = Any
"""Samples collated: a tensor, or a tuple, list or dict of batches, numbers and strings; rows are in dim 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInfo:
    """A committed step, as ``Training.on_step`` is given it."""

    step: int
    """From 1 on."""
    loss: float
    """Mean over the global batch: over its tokens that count, where the loss counts tokens."""
    weight: float
    """Number of rows, or of tokens that count, that ``loss`` is the mean over."""
    gradient_norm: float
    """Before clipping."""
    learning_rate: float
    """Used for this step, of the optimizer's first parameter group."""
    skipped: bool
    """No parameter was updated, because a gradient was not finite."""
    metrics: dict[str, float]
    """Own metrics of ``Training.metrics``."""
    step_s: float | None
    """Duration; ``None`` after a failure in which the device that knew it was lost, as for the two below."""
    samples_per_s: float | None
    tokens_per_s: float | None
    """``None`` also where the loss counts rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The model, data and optimizer that a training function returns.

    The function runs in every trainer, and each must end up with the same values: take random numbers
    from ``torch``, ``random`` or ``numpy.random``, which are seeded with the job's seed before the call.
    """

    dataset: Any
    """Map-style: ``len(dataset)`` and ``dataset[index]``, without a batch dimension: a dict, a tuple
    or a tensor. The same index gives the same sample on every node."""
    optimizer: Callable[[list[tuple[str, nn.Parameter]]], Optimizer]
    """Takes the trainable parameters with their names."""
    layers: Sequence[nn.Module] | None = None
    """Run one after the other: each takes what the one before returned, a tensor or a tuple of tensors
    with the samples in dim 0. The first takes the samples' input. To tie weights let two layers hold
    the same ``nn.Parameter``. Give either this or ``model``."""
    model: nn.Module | Callable[[], nn.Module] | DeferredModule | None = None
    """A module that is cut into layers, usually a Hugging Face ``PreTrainedModel``, or better a function that
    makes it: a trainer then has memory for its own layers alone. The module takes a dictionary's entries by
    keyword and a tuple's by position; where ``loss`` is given, the last entry of a tuple is the target and not
    handed to it."""
    split: Sequence[str] | None = None
    """Names of the submodules before which ``model`` may be cut, in the order in which they run;
    ``None``: its repeated blocks are found."""
    tensor_plan: Mapping[str, str] | None = None
    """Linear modules that the devices of a stage may compute in parts (``planner.within_node = "tensor"``), by name,
    where ``*`` stands for one part of a name: ``colwise``, ``rowwise``, ``colwise_gather_output``,
    ``rowwise_split_input`` or ``replicated_with_grad_allreduce`` (docs/reference/models.md).
    ``None``: the plan that Hugging Face gives the model, if any."""
    loss: Callable[[Any, Any], Any] | None = None
    """``loss(output, target)`` of layers, ``loss(output, batch)`` of a model: the *mean* over rows, a
    scalar, or a pair (sum, weight), whose global loss is the sum of sums over the sum of weights.
    ``None``: the model's own."""
    collate: Callable[[list[Any]], Batch] | None = None
    """Makes a batch from a microbatch's samples; ``None`` stacks their tensors."""
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    """A learning-rate schedule, advanced once a step."""
    evaluation: Any | None = None
    """A held-out data set, with samples like those of ``dataset``."""
    metrics: Callable[[Any, Batch], dict[str, Any]] | None = None
    """``metrics(output, batch)``: further numbers by name, each averaged like the loss."""
    on_step: Callable[[StepInfo], object] | None = None
    """Called after each committed step on one device; training waits for it. What happens over failures is
    said in docs/tutorials/training.md."""
    files_from: Sequence[str | Path] = ()
    """Directories with the files of the tokenizer or processor, or a ``tokenizer.json``: checkpoints keep
    them, so that exports have them. The directory that the model was loaded from need not be named."""


def load_training(data: TrainingData) -> Training:
    """Find the training function, call it and check what it returns.

    Seeds the generators of torch, random and numpy, and puts ``data.path`` (and the directory of the
    script) in front of ``sys.path`` so that the script can import its neighbours.

    :raises TrainingError: anything that the user has to change.
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
        raise TrainingError(f"{data.function} raised {_describe(error)}") from error
    if not isinstance(training, Training):
        raise TrainingError(f"{data.function} must return a Training, not {type(training).__name__}")
    _check(training, data.function)
    _check_evaluation(training, data)
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
        _check_clash(directory)
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
        raise TrainingError(f"importing {path} raised {_describe(error)}") from error
    return module


def _load_module(root: Path, place: str) -> ModuleType:
    if place.partition(".")[0] in OUR_PACKAGES:
        raise TrainingError(f"{place} belongs to ftd; rename your module")
    _check_clash(root)
    _import_from(root)
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise TrainingError(f"importing {place} (from {root}) raised {_describe(error)}") from error


def _import_from(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))


def _check_clash(directory: Path) -> None:
    """A user's ``storage.py`` would be shadowed by ours, with errors far from the cause."""
    ours = Path(__file__).resolve().parent.parent
    if directory == ours:
        return
    for name in OUR_PACKAGES:
        script, package = directory / f"{name}.py", directory / name
        clash = script if script.is_file() else package
        if script.is_file() or (package.is_dir() and any(package.glob("*.py"))):
            raise TrainingError(f"{clash} has the name of ftd's own package {name!r}; rename it")


def _functions(module: ModuleType) -> str:
    names = [
        name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")
    ]
    return ", ".join(names) or "no function"


def _describe(error: BaseException) -> str:
    """``TypeError: … (gpt.py, line 12, in build)``: the innermost frame tells users where to look."""
    frames = traceback.extract_tb(error.__traceback__)
    message = f"{type(error).__name__}: {error}"
    if not frames:
        return message
    frame = frames[-1]
    return f"{message} ({Path(frame.filename).name}, line {frame.lineno}, in {frame.name})"


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
    """Return the device that this process computes on: each trainer of a node is given one as the first.

    :raises TrainingError: CUDA was asked for, and this process sees no such device: the host has none, or not the one
        that this trainer was given.
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
    torch.cuda.set_device(device)
    return device


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _made(model: Any, function: str, dtype: torch.dtype) -> nn.Module | DeferredModule:
    """Return the model; one that a function makes gets no memory for its tensors.

    :raises TrainingError: it cannot be made, or is of a kind that cannot be trained.
    """
    if isinstance(model, nn.Module):
        return _checked(model, function).to(dtype)
    recording = Recording()
    try:
        with ModelRecorder(recording, exact=not isinstance(model, ModelFactory) or model.exact):
            made = model.build() if isinstance(model, ModelFactory) else model()
            if isinstance(made, nn.Module):
                made.to(dtype)
    except TrainingError:
        raise
    except (Exception, SystemExit) as error:
        raise TrainingError(f"{function}: Training.model raised {_describe(error)}") from error
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
    """:raises TrainingError: the model is of a kind that cannot be trained."""
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
            part_config.use_cache = False  # Keys and values of earlier calls are for generating text.
    _check_ties([model])
    return model


def _check(training: Training, function: str) -> None:
    if (training.layers is None) == (training.model is None):
        raise TrainingError(f"{function}: give either Training.layers or Training.model")
    if training.layers is not None:
        _check_layers(training.layers, function)
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


def _check_ties(layers: Sequence[nn.Module]) -> None:
    """Parameters that share memory but are different objects would drift apart on different devices."""
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


def _check_evaluation(training: Training, data: TrainingData) -> None:
    if data.evaluation_every_steps > 0 and training.evaluation is None:
        raise TrainingError(
            f"{data.function}: the job evaluates every {data.evaluation_every_steps} steps, but Training.evaluation "
            "is missing; return a held-out data set, or leave [evaluation] out of the job file"
        )


def _check_dataset(dataset: Any, name: str, *, pairs: bool) -> None:
    from runtime.data.reading import check_dataset  # It imports TrainingError from here.

    check_dataset(dataset, name)
    try:
        sample = dataset[0]
    except Exception as error:
        raise TrainingError(f"{name}[0] raised {_describe(error)}") from error
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
