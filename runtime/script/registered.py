"""The objects that a script registers: modules, optimizers, other objects with a state, dicts and lists.

Each kind decides what its state is, which part of it is *guarded* (changed only by a registered optimizer's
step, which waits for the copy), whether a saved state fits, and how it is loaded.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from operator import is_
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from runtime.precision import dtype_name
from runtime.script.plain_state import SnapshotError, TensorRef, rebuild
from runtime.script.random_states import Generator, GeneratorState
from runtime.script.tensor_image import ImageEntry, is_expanded, local_tensor

Kind = Literal["module", "optimizer", "object", "dict", "list"]


class PlaceTensor(Protocol):
    """A function that takes a tensor's number, the current tensor and the parameter that it belongs to, and
    returns the tensor that will be filled.
    """

    def __call__(self, number: int, old: Tensor | None, like: Tensor | None = None) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredObject:
    """An object that a script registered, with its name and kind."""

    name: str
    value: Any
    kind: Kind
    guarded: bool
    """Whether all its parameters are guarded, as a module's owner promised; for an optimizer, whether its step alone
    changes its parameters.
    """
    replicated: bool
    """Whether DistributedDataParallel keeps its parameters the same on all ranks."""

    @classmethod
    def parts_of(cls, name: str, obj: Any, *, guarded: bool) -> "list[RegisteredObject]":
        """Return the object with its kind, without wrappers that only pass on (DDP, ``torch.compile``, Accelerate); an
        optimizer with optimizers in it (Lookahead, SAM) is followed by these.

        :raises SnapshotError: it has no state that can be saved and restored.
        """
        if not isinstance(obj, Optimizer):
            return [cls.of(name, obj, guarded=guarded)]
        inner = _optimizers_within(obj)
        has_own_keys = _has_own_keys(obj)
        if len(inner) == 1 and not has_own_keys:
            (only,) = inner.values()
            groups = getattr(obj, "param_groups", only.param_groups)
            if _has_state_of(obj, only) and groups is only.param_groups:
                return cls.parts_of(name, only, guarded=guarded)
        if has_own_keys and all(_has_state_of(obj, one) for one in inner.values()):
            # Its state is more than what it keeps for parameters.
            return [cls(name=name, value=obj, kind="object", guarded=False, replicated=False)]
        parts = [cls.of(name, obj, guarded=guarded)]
        for attribute, one in inner.items():
            parts += cls.parts_of(f"{name}.{attribute}", one, guarded=guarded)
        # One with others in it may change parameters in other methods than step().
        return [replace(part, guarded=False) for part in parts] if inner else parts

    @classmethod
    def of(cls, name: str, obj: Any, *, guarded: bool) -> "RegisteredObject":
        """Return the object with its kind, and no optimizers within it.

        :raises SnapshotError: it has no state that can be saved and restored.
        """
        kind: Kind
        replicated = False
        if isinstance(obj, nn.Module):
            kind, (obj, replicated) = "module", _unwrapped(obj)
            _check_loadable(name, obj)
        elif isinstance(obj, Optimizer):
            kind, guarded = "optimizer", True
        elif isinstance(obj, dict):
            kind = "dict"
        elif isinstance(obj, list):
            kind = "list"
        elif isinstance(obj, Generator):
            kind, obj = "object", GeneratorState(obj)
        elif not isinstance(obj, type) and all(
            callable(getattr(obj, method, None)) for method in ("state_dict", "load_state_dict")
        ):
            kind = "object"
        else:
            raise SnapshotError(
                f"{name} is a {type(obj).__qualname__}: register a module, an optimizer, a random "
                "generator, something with state_dict() and load_state_dict(), or a dict or list of plain "
                "data (a number that changes: {'epoch': 3})"
            )
        return cls(name=name, value=obj, kind=kind, guarded=guarded, replicated=replicated)

    @property
    def has_stable_tensors(self) -> bool:
        """Whether the object's tensors are most likely the same from one snapshot to the next."""
        return self.kind in ("module", "optimizer")

    def state(self) -> Any:
        """Return its state: nested, with the tensors themselves in it."""
        match self.kind:
            case "module":
                return dict(self.value.state_dict(keep_vars=True))
            case "optimizer":
                return _optimizer_state(self.value)
            case "object":
                return self.value.state_dict()
            case _:
                return self.value

    def parameters(self, *, shared: bool) -> list[list[Tensor]]:
        """Return an optimizer's parameters by group; a module's if they are guarded, or if ``shared`` and
        replicated.
        """
        if self.kind == "optimizer":
            return [group["params"] for group in self.value.param_groups]
        if self.kind == "module" and (self.guarded or (shared and self.replicated)):
            return [list(self.value.parameters())]
        return []

    def constant_state(self) -> dict[str, Any]:
        """Return the part that is saved next to ``state`` and changes only with the parameters."""
        return {"shapes": _shapes(self.value)} if self.kind == "optimizer" else {}

    def guarded_ids(self, state: Any) -> set[int]:
        """Return the ids of the guarded tensors: those in an optimizer's ``state``, and the parameters."""
        if self.kind == "optimizer":
            if not self.guarded:
                return set()
            return {id(t) for t in (*_tensors(state["state"]), *_tensors(self.parameters(shared=False)))}
        return {id(t) for t in _tensors(self.parameters(shared=False))}

    def shared_ids(self, state: Any, replicated: set[int]) -> set[int]:
        """Return the ids of the tensors that are the same on all ranks.

        :param replicated: ids of the parameters that DDP keeps the same. An optimizer computes its state
            for them from the same gradients, unless it is sharded (``ZeroRedundancyOptimizer``).
        """
        if self.kind == "module" and self.replicated:
            return {id(p) for p in self.value.parameters()}
        if self.kind == "optimizer" and not hasattr(self.value, "consolidate_state_dict"):
            parameters = [p for group in self.parameters(shared=False) for p in group]
            alike = [s for number, s in state["state"].items() if id(parameters[number]) in replicated]
            return {id(t) for t in _tensors(alike)}
        return set()

    @property
    def is_resizable(self) -> bool:
        """Whether another number of ranks can take its state over: modules that DDP replicates, or whose
        parameters are DTensors; optimizers that are not sharded by themselves; and all else.
        """
        match self.kind:
            case "module":
                return self.replicated or any(hasattr(p, "to_local") for p in self.value.parameters())
            case "optimizer":
                return not hasattr(self.value, "consolidate_state_dict")
            case _:
                return True

    def tensor_like(self, path: tuple[Any, ...]) -> Tensor | None:
        """Return the registered tensor at this place of the state, or the parameter that an optimizer keeps the
        state for; ``None`` if there is neither, or for objects of other kinds.
        """
        if self.kind == "module":
            found = self.value.state_dict(keep_vars=True).get(path[0])
            return found if isinstance(found, Tensor) else None
        if self.kind != "optimizer" or path[0] != "state":
            return None
        parameters = [p for group in self.value.param_groups for p in group["params"]]
        found = _own_optimizer(self.value).state.get(parameters[path[1]], {})
        for key in path[2:]:
            found = found.get(key) if isinstance(found, dict) else None
        return found if isinstance(found, Tensor) else parameters[path[1]]

    def mismatch(self, saved: Any, entries: list[ImageEntry]) -> str:
        """Return why a saved state cannot be loaded; empty if it can."""
        if self.kind == "module":
            return _module_mismatch(self.value, saved, entries)
        if self.kind == "optimizer":
            return _optimizer_mismatch(self.value, saved)
        return ""

    def prepare_load(self, saved: Any, place: PlaceTensor) -> Callable[[], None]:
        """Choose the tensors to fill, and return the function that loads the state once they are filled."""
        match self.kind:
            case "module":
                return _prepare_module(self.value, saved, place)
            case "optimizer":
                return _prepare_optimizer(self.value, saved, place)
            case "object":
                return partial(self.value.load_state_dict, rebuild(saved, None, place))
            case _:
                return partial(_replace, self.value, rebuild(saved, self.value, place))


def _replace(obj: dict[Any, Any] | list[Any], filled: Any) -> None:
    _replaced(obj, filled, set())


def _replaced(old: Any, filled: Any, used: set[int]) -> Any:
    """Return the restored value: the dict, list or array that was there with the restored content, which a script may
    have under a name of its own too, or else ``filled``.

    :param used: ids of what was changed, since what was one object at the start may have become several.
    """
    if id(old) in used:
        return filled
    match old, filled:
        case dict(), dict():
            used.add(id(old))
            items = {key: _replaced(old.get(key), item, used) for key, item in filled.items()}
            old.clear()
            old.update(items)
            return old
        case list(), list():
            used.add(id(old))
            old[:] = [_replaced(there, item, used) for there, item in zip_longest(old[: len(filled)], filled)]
            return old
        case np.ndarray(), np.ndarray() if (old.shape, old.dtype) == (
            filled.shape,
            filled.dtype,
        ) and old.flags.writeable:
            used.add(id(old))
            old[...] = filled
            return old
    return filled


def _unwrapped(module: nn.Module) -> tuple[nn.Module, bool]:
    """Return the module without the wrappers of DDP and torch.compile, whose names differ, and whether DDP was
    one.
    """
    replicated = False
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, nn.parallel.DistributedDataParallel):
            inner, replicated = module.module, True
        if not isinstance(inner, nn.Module):
            return module, replicated
        module = inner


def _check_loadable(name: str, module: nn.Module) -> None:
    """:raises SnapshotError: the module has a tensor into which torch can load nothing."""
    for key, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and not is_lazy(value) and is_expanded(value):
            raise SnapshotError(
                f"{name}.{key} is expanded, and nothing can be loaded into a tensor whose elements share memory: let "
                "the module keep a copy of it (.contiguous()), or register it with persistent=False"
            )


def _module_mismatch(module: nn.Module, saved: dict[str, Any], entries: list[ImageEntry]) -> str:
    here = module.state_dict(keep_vars=True)
    if saved.keys() != here.keys():
        sides = {"there": saved.keys() - here.keys(), "here": here.keys() - saved.keys()}
        return "; ".join(f"{_first_names(names)}: only {side}" for side, names in sides.items() if names)
    for name, value in here.items():
        if name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX:
            continue  # Only the module knows what fits: it may be a tensor whose size changes.
        ref = saved[name]
        if isinstance(value, Tensor) != isinstance(ref, TensorRef):
            return f"{name} is of another kind"
        if isinstance(value, Tensor):
            entry, inner = entries[ref.index], local_tensor(value)
            # Whole shapes where they are known: ranks may hold other shards than before.
            whole = not entry.sharded or entry.global_shape is not None
            dtype, shape = dtype_name(inner.dtype), tuple(value.shape if whole else inner.shape)
            before = entry.global_shape or entry.shape
            if (entry.dtype, before) != (dtype, shape):
                there = f"{entry.dtype} {list(before)}"
                return f"{name} is {there} in the snapshot and {dtype} {list(shape)} here"
    return ""


def _first_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")


def _prepare_module(module: nn.Module, saved: dict[str, Any], place: PlaceTensor) -> Callable[[], None]:
    here = module.state_dict(keep_vars=True)
    filled = rebuild(saved, here, place)

    def load() -> None:
        live = {id(t) for t in (*module.parameters(), *module.buffers())}
        if any(id(value) not in live for value in filled.values()):
            # A part of it is made by hooks or is not a tensor, so the module must load it itself.
            module.load_state_dict(filled)

    return load


def _own_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer of this rank's parameters, which keeps their state: within one that is sharded
    (``ZeroRedundancyOptimizer``), otherwise the optimizer itself.
    """
    inner = getattr(optimizer, "optim", None) if hasattr(optimizer, "consolidate_state_dict") else None
    return inner if isinstance(inner, Optimizer) else optimizer


def _optimizers_within(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizers that an optimizer has in its attributes, by attribute; none of one that is sharded, whose
    state is that of its own optimizer.
    """
    if hasattr(optimizer, "consolidate_state_dict"):
        return {}
    found: dict[str, Optimizer] = {}
    for attribute, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            found[attribute] = value
        elif isinstance(value, list | tuple):
            found |= {f"{attribute}.{n}": one for n, one in enumerate(value) if isinstance(one, Optimizer)}
    return found


def _has_state_of(wrapper: Optimizer, optimizer: Optimizer) -> bool:
    """Return whether a wrapper has no state of its own: some do not call the constructor of their base class."""
    return getattr(wrapper, "state", optimizer.state) is optimizer.state


def _has_own_keys(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's ``state_dict()`` has more than the states of parameters and the groups."""
    if type(optimizer).state_dict is Optimizer.state_dict or hasattr(optimizer, "consolidate_state_dict"):
        return False
    return not optimizer.state_dict().keys() <= {"state", "param_groups"}


def _optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the states of the parameters by their numbers, the options of the groups, and what an optimizer keeps
    under keys of its own (``rest``), if it does.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept: dict[Any, Any] = _own_optimizer(optimizer).state  # Keys may be more than parameters.
    rest: dict[Any, Any] = {}
    if len(kept) == len(parameters) and all(map(is_, kept, parameters)):
        # This is nearly always so, and avoids hashing tensors, which would be the largest cost here.
        states = dict(enumerate(kept.values()))
    else:
        states = {i: kept[p] for i, p in enumerate(parameters) if p in kept}
        rest = {key: value for key, value in kept.items() if not isinstance(key, Tensor)}
    state: dict[str, Any] = {
        "state": {i: s if type(s) is dict else dict(s) for i, s in states.items()},
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
    }
    return state | {"rest": rest} if rest else state


def _shapes(optimizer: Optimizer) -> list[list[list[int]]]:
    """Return the whole shapes of the parameters, by group."""
    return [[list(p.shape) for p in group["params"]] for group in optimizer.param_groups]


def _optimizer_mismatch(optimizer: Optimizer, saved: dict[str, Any]) -> str:
    there, here = saved["shapes"], _shapes(optimizer)
    if len(there) != len(here):
        return f"it has {len(there)} parameter groups in the snapshot and {len(here)} here"
    for number, (before, now) in enumerate(zip(there, here, strict=True)):
        if len(before) != len(now):
            return f"group {number} has {len(before)} parameters in the snapshot and {len(now)} here"
        for index, (shape, wanted) in enumerate(zip(before, now, strict=True)):
            if shape != wanted:
                return f"parameter {index} of group {number} is {shape} in the snapshot and {wanted} here"
    # A torch version may add an option, and schedulers do; another optimizer both has other options and
    # lacks some.
    options, known = saved["groups"], optimizer.param_groups
    missing = {key for group in options for key in optimizer.defaults.keys() - group.keys()}
    surplus = {key for group, own in zip(options, known, strict=True) for key in group.keys() - own.keys()}
    if missing and surplus:
        names = f"{_first_names(surplus)}, and not {_first_names(missing)}"
        return f"it belongs to another optimizer: its groups have {names}"
    return ""


def _prepare_optimizer(optimizer: Optimizer, saved: dict[str, Any], place: PlaceTensor) -> Callable[[], None]:
    states: dict[Tensor, Any] = {}
    kept: dict[Any, Any] = _own_optimizer(optimizer).state
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        state = saved["state"].get(number)
        if state is not None:
            states[parameter] = rebuild(state, kept.get(parameter), partial(place, like=parameter))
    groups = [
        rebuild(options, group, place)
        for group, options in zip(optimizer.param_groups, saved["groups"], strict=True)
    ]
    rest = {key: rebuild(value, kept.get(key), place) for key, value in saved.get("rest", {}).items()}

    def load() -> None:
        for parameter in parameters:
            if parameter in states:
                kept[parameter] = states[parameter]
            else:
                kept.pop(parameter, None)
        for key in [key for key in kept if not isinstance(key, Tensor)]:
            del kept[key]
        kept.update(rest)
        for group, options in zip(optimizer.param_groups, groups, strict=True):
            group.update(options)

    return load


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in _tensors(item)]
    if isinstance(value, list | tuple):
        return [t for item in value for t in _tensors(item)]
    return []


def expected_state_size(optimizer: Optimizer) -> tuple[int, int]:
    """Return the bytes and the number of tensors of the state that the optimizer will make at its first step.

    Another optimizer of the same kind makes a small step to find out.
    """
    optimizer = _own_optimizer(optimizer)
    size_bytes = tensors = 0
    per_dtype: dict[torch.dtype, list[tuple[bool, int]]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in optimizer.state or not parameter.requires_grad:
                continue
            if parameter.dtype not in per_dtype:
                per_dtype[parameter.dtype] = _state_after_trial_step(optimizer, parameter.dtype)
            for of_each, each_bytes in per_dtype[parameter.dtype]:
                size_bytes += each_bytes * (local_tensor(parameter).numel() if of_each else 1)
                tensors += 1
    return size_bytes, tensors


def _state_after_trial_step(optimizer: Optimizer, dtype: torch.dtype) -> list[tuple[bool, int]]:
    """Return what an optimizer of this kind holds for a parameter: (whether it is per element, bytes) of each
    tensor.
    """
    parameter = nn.Parameter(torch.zeros(3, 5, dtype=dtype))
    parameter.grad = torch.zeros_like(parameter)
    known = inspect.signature(type(optimizer).__init__).parameters
    group = optimizer.param_groups[0]
    options = {key: group[key] for key in optimizer.defaults if key in known and key in group}
    try:
        trial = type(optimizer)([parameter], **options)
        trial.step()
        found = _tensors(trial.state[parameter])
    except Exception:
        # A user's own optimizer may not be made or stepped like this. Assume the size of Adam's state; if
        # that is wrong, the first snapshot only has to allocate more.
        return [(True, max(4, dtype.itemsize)), (True, max(4, dtype.itemsize))]
    return [(True, t.element_size()) if t.numel() == parameter.numel() else (False, t.nbytes) for t in found]
