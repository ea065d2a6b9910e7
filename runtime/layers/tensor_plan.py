"""Tensor-parallel plans: the linear modules that the devices of a stage compute in parts (Shoeybi et al. 2019,
"Megatron-LM", section 3).

A plan maps names of modules to styles:

- ``colwise``: each device computes an equal part of the output features, and the code that follows works on
  that part.
- ``rowwise``: each device takes the part of the input features that it has already computed, and the
  outputs are summed.
- ``colwise_gather_output``: like ``colwise``, but the parts of the output are gathered.
- ``rowwise_split_input``: like ``rowwise``, but the input is whole and each device takes its part.
- ``replicated_with_grad_allreduce``: the module is whole on each device but runs in a split region, so its
  gradients are summed.

The code between a ``colwise`` and a ``rowwise`` module is a *split region*, in which each device has
different features.

A plan is the user's (``Training.tensor_plan``) or that of a Hugging Face model (``base_model_tp_plan``). It
is accepted if each of its modules is a plain ``nn.Linear`` inside one layer's block, and everything else in
its split regions has neither tensors nor random numbers of its own. Entries for modules outside of the
blocks (embeddings, heads) are ignored: these modules are whole on each device.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from runtime.errors import TrainingError
from runtime.layers.randomness import is_active_dropout

LinearStyle = Literal["colwise", "colwise_gather_output", "rowwise", "rowwise_split_input"]
Style = LinearStyle | Literal["replicated_with_grad_allreduce"]
_STYLES: dict[str, Style] = {
    "colwise": "colwise",
    "colwise_rep": "colwise_gather_output",
    "colwise_gather_output": "colwise_gather_output",
    "rowwise": "rowwise",
    "rowwise_rep": "rowwise_split_input",
    "rowwise_split_input": "rowwise_split_input",
    "replicated_with_grad_allreduce": "replicated_with_grad_allreduce",
}
"""Styles by the names that plans use."""
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
"""Attributes of attention modules, or of their configurations, that count the heads of keys and values."""
_ATTENTION = frozenset(
    {
        torch.nn.functional.scaled_dot_product_attention,
        torch.nn.functional.softmax,
        torch.softmax,
        torch.Tensor.softmax,
    }
)
"""Functions whose first argument has the shape (rows, heads, length, …) in attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLinear:
    """A linear module of which each device of a stage computes a part."""

    name: str
    style: LinearStyle
    module: nn.Linear
    layer: int
    weight: str
    """Canonical name."""
    bias: str | None

    @property
    def is_rowwise(self) -> bool:
        """Whether its input features are divided, rather than its output features."""
        return self.style in ("rowwise", "rowwise_split_input")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """The modules of one model that are computed in parts."""

    linears: tuple[SplitLinear, ...]
    summed_parameters: frozenset[str]
    """Names of parameters that are whole, and whose gradients are summed over the devices of a stage."""
    divisible_counts: tuple[tuple[str, int], ...]
    """Numbers that the number of a stage's devices must divide, each with a description."""

    @property
    def split_parameters(self) -> frozenset[str]:
        """Names of the parameters of which each device computes with its own part."""
        return frozenset(
            name
            for one in self.linears
            for name in (one.weight, None if one.is_rowwise else one.bias)
            if name is not None
        )

    @property
    def vector_keys(self) -> dict[str, str]:
        """Keys for ``runtime.zero.parts.ParameterLayout.from_parameters`` that keep these parameters in
        vectors of their own.
        """
        return dict.fromkeys(self.summed_parameters, "*") | {name: name for name in self.split_parameters}

    def find_problem(self, devices: int) -> str | None:
        """Return why a stage of ``devices`` devices cannot use the plan, or ``None`` if it can."""
        for words, count in self.divisible_counts:
            if count % devices:
                return f"{words} is {count}, which {devices} devices do not divide"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModule:
    """A module of the model that a plan is checked against."""

    name: str
    module: nn.Module
    layers: tuple[int, ...]
    in_block: bool


class TensorPlanError(TrainingError):
    """A tensor-parallel plan that this model cannot use."""


def make_tensor_plan(
    user_plan: Mapping[str, str] | None, modules: Sequence[NamedModule], names: Mapping[int, tuple[str, bool]]
) -> TensorPlan:
    """Return the model's tensor-parallel plan.

    :param user_plan: the user's plan; ``None`` means the one that Hugging Face gives the model.
    :param modules: all modules of the model.
    :param names: canonical name of each parameter, by its identity, and whether it is trained and used in
        only one place.
    :raises TensorPlanError: the model has no plan, or the plan cannot be used.
    """
    styles = _styles_of(user_plan, modules)
    linears: list[SplitLinear] = []
    summed: set[str] = set()
    for entry, style in styles:
        if not entry.in_block or len(entry.layers) != 1:
            if user_plan is not None:
                raise TensorPlanError(
                    f"{entry.name} is not inside one of the blocks that the model is cut into"
                )
            continue
        known = _STYLES.get(style)
        if known is None:
            raise TensorPlanError(
                f"{entry.name} is {style}, which ftd does not know; it knows {', '.join(sorted(set(_STYLES.values())))}"
            )
        own = {key: names[id(value)] for key, value in entry.module._parameters.items() if value is not None}
        for key, (_, alone) in own.items():
            if not alone:
                raise TensorPlanError(f"{entry.name}.{key} is frozen, or shared with another module")
        if known == "replicated_with_grad_allreduce":
            summed |= {name for name, _ in own.values()}
            continue
        if type(entry.module).forward is not nn.Linear.forward:
            raise TensorPlanError(f"{entry.name} is a {type(entry.module).__name__}, not an nn.Linear")
        assert isinstance(entry.module, nn.Linear)
        linears.append(
            SplitLinear(
                name=entry.name,
                style=known,
                module=entry.module,
                layer=entry.layers[0],
                weight=own["weight"][0],
                bias=own["bias"][0] if "bias" in own else None,
            )
        )
    if not linears:
        raise TensorPlanError("its plan names no module inside the blocks that the model is cut into")
    _check_neighbours(linears, summed, modules, names)
    counts = tuple(dict.fromkeys(map(_features, linears)))
    return TensorPlan(linears=tuple(linears), summed_parameters=frozenset(summed), divisible_counts=counts)


def _styles_of(
    given: Mapping[str, str] | None, modules: Sequence[NamedModule]
) -> list[tuple[NamedModule, str]]:
    found: dict[str, tuple[NamedModule, str]] = {}
    for pattern, style in (_hugging_face(modules) if given is None else given).items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        matching = [entry for entry in modules if expression.fullmatch(entry.name)]
        if given is not None and not matching:
            raise TensorPlanError(f"Training.tensor_plan names {pattern}, and the model has no such module")
        found |= {entry.name: (entry, style) for entry in matching}
    return list(found.values())


def _hugging_face(modules: Sequence[NamedModule]) -> dict[str, str]:
    """Return the plan that ``transformers`` gives to the outermost model that has one."""
    for entry in modules:
        plan = getattr(entry.module, "_tp_plan", None)
        if isinstance(plan, dict) and plan:
            prefix = f"{entry.name}." if entry.name else ""
            return {prefix + str(name): str(style) for name, style in plan.items()}
    raise TensorPlanError("the model has no tensor-parallel plan; give one as Training.tensor_plan")


def _check_neighbours(
    linears: Iterable[SplitLinear],
    summed: set[str],
    modules: Iterable[NamedModule],
    names: Mapping[int, tuple[str, bool]],
) -> None:
    """Reject parameters of a module that contains split ones: the module's own code may use them unnoticed."""
    split = {one.name for one in linears}
    for entry in modules:
        if not entry.in_block or entry.name in split:
            continue
        if not any(name.startswith(entry.name + ".") for name in split):
            continue
        for key, value in entry.module._parameters.items():
            if value is not None and names[id(value)][0] not in summed:
                raise TensorPlanError(
                    f"{entry.name} has a parameter {key} of its own next to modules that are split; if it is used "
                    "where features are split, its gradients would be wrong"
                )


def _features(one: SplitLinear) -> tuple[str, int]:
    """Return the number of features that are split, with a description."""
    if one.is_rowwise:
        return f"{_with_wildcards(one.name)}.in_features", one.module.in_features
    return f"{_with_wildcards(one.name)}.out_features", one.module.out_features


def _with_wildcards(name: str) -> str:
    """Return the name with ``*`` for numbers, so that equal blocks are named once."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


class SplitRegionChecker(TorchFunctionMode):
    """A mode that observes layers on one device and finds operations that must not be in a split region.

    ``with checker.observe(layer):`` surrounds one run of a layer. ``problem`` is the first problem that was
    found.
    """

    def __init__(self, plan: TensorPlan, modules: Iterable[NamedModule]) -> None:
        super().__init__()
        self._plan = plan
        self._modules = [entry for entry in modules if entry.in_block]
        self._open: str | None = None
        """The module that began the current region, if any."""
        self.problem: str | None = None
        self._heads: dict[str, int] = {}
        self.forward_bytes: list[int] = []
        """Sizes in bytes of what devices of a stage exchange in the forward pass of the layer observed last."""
        self._inputs: dict[int, torch.Tensor] = {}
        self._calls: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        """Input and output of each call of each module of the layer observed last."""

    @property
    def is_open(self) -> bool:
        """Whether a split region is currently running."""
        return self._open is not None

    @property
    def backward_bytes(self) -> list[int]:
        """Sizes in bytes of what devices exchange in the backward pass: gradients of the inputs of split
        modules.
        """
        return [_exchanged_bytes(x) for x in self._inputs.values() if x.requires_grad]

    def validated_plan(self) -> TensorPlan:
        """Return the plan, completed by the numbers of attention heads that were observed, since heads are not
        divided.

        :raises TensorPlanError: the plan cannot be used.
        """
        if self.problem is not None:
            raise TensorPlanError(self.problem)
        return replace(self._plan, divisible_counts=(*self._heads.items(), *self._plan.divisible_counts))

    @contextmanager
    def observe(self, layer: int) -> Iterator[None]:
        """Observe one run of a layer."""
        self.forward_bytes, self._inputs, self._calls = [], {}, {}
        mine = {one.name: one for one in self._plan.linears if one.layer == layer}
        if not mine or self.problem is not None:
            yield
            return
        handles = []
        for entry in self._modules:
            if layer not in entry.layers:
                continue
            if (one := mine.get(entry.name)) is not None:
                handles.append(entry.module.register_forward_pre_hook(partial(self._on_begin, one)))
                handles.append(entry.module.register_forward_hook(partial(self._on_end, one)))
            elif self._has_tensors(entry.module):
                handles.append(entry.module.register_forward_pre_hook(partial(self._on_other, entry.name)))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()
        if self._open is not None:
            self._report(
                f"what {self._open} (colwise) computes is not put together again by a rowwise module of its layer"
            )
        self._open = None

    def release(self) -> None:
        """Release the tensors of the layer observed last."""
        self._inputs, self._calls = {}, {}

    def compare_split(self, layer: int, run: Callable[[], object], *, tolerance: float) -> None:
        """Run the layer that was observed last again with a part of its features, and compare the result with
        the whole.

        This finds code that computes something different in a split region, such as attention that reads
        the size of a head from the number of features instead of the number of heads. The run stands for
        the last device of the smallest split that the plan allows. Data that devices would exchange comes
        from the whole run.

        :param run: runs the layer on the same input with the same values.
        :param tolerance: relative to the largest value.
        """
        mine = [one for one in self._plan.linears if one.layer == layer and one.name in self._calls]
        most = gcd(*(count for _, count in (*self._heads.items(), *self._plan.divisible_counts)))
        devices = next((count for count in range(2, most + 1) if most % count == 0), 1)
        if not mine or devices == 1 or self.problem is not None:
            return
        whole = {one.name: iter(self._calls[one.name]) for one in mine}
        before = {one.name: dict(one.module._parameters) for one in mine}

        def substitute(one: SplitLinear) -> Callable[[torch.Tensor], torch.Tensor]:
            def forward(x: torch.Tensor) -> torch.Tensor:
                given, output = next(whole[one.name])
                if one.style == "rowwise":
                    expected = _last_part(given, devices, -1)
                    if x.shape != expected.shape or not _close(x, expected, tolerance):
                        raise _OtherPartError
                return output

            return forward

        try:
            for one in mine:
                if one.style != "colwise":
                    one.module.forward = substitute(one)  # type: ignore[method-assign, assignment]
                    continue
                for name, value in before[one.name].items():
                    if value is not None:
                        part = _last_part(value.detach(), devices, 0)
                        one.module._parameters[name] = nn.Parameter(part, requires_grad=False)
            run()
        except _OtherPartError:
            self._report(self._other_part(mine, devices))
        except Exception as error:
            self._report(f"{self._other_part(mine, devices)}: {error}")
        finally:
            for one in mine:
                one.module._parameters.update(before[one.name])
                one.module.__dict__.pop("forward", None)

    @staticmethod
    def _other_part(linears: Sequence[SplitLinear], devices: int) -> str:
        opener = next(one.name for one in linears if one.style == "colwise")
        return (
            f"after {opener} (colwise), a device with 1/{devices} of the features computes something else than that "
            "part of the whole; split whole heads, and read their number from the size of the tensor"
        )

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._open is not None and _is_dropout(func, args, kwargs):
            self._report(
                f"there is dropout after {self._open}, where each device has other features and would draw other "
                "masks; set that dropout to 0"
            )
        if self._open is not None and func in _ATTENTION and args and args[0].dim() == 4:
            self._note_heads(self._open, args[0].shape[1])
        return func(*args, **kwargs)

    def _note_heads(self, opener: str, heads: int) -> None:
        """Record the numbers of heads of the attention that follows a colwise module, and of its keys and
        values.
        """
        parent = opener.rpartition(".")[0]
        owner = next((entry.module for entry in self._modules if entry.name == parent), None)
        where = _with_wildcards(parent)
        self._heads[f"the number of attention heads of {where}"] = heads
        for source in (owner, getattr(owner, "config", None)):
            for attribute in _KEY_HEADS:
                count = getattr(source, attribute, None)
                if isinstance(count, int) and count > 0:
                    self._heads[f"{attribute} of {where}"] = count

    def _has_tensors(self, module: nn.Module) -> bool:
        names = module._buffers.keys() - module._non_persistent_buffers_set
        summed = {one for one in module._parameters.values() if one is not None}
        return bool(summed) or any(module._buffers[name] is not None for name in names)

    def _on_begin(self, one: SplitLinear, module: nn.Module, arguments: Any) -> None:
        if one.style == "rowwise":
            if self._open is None:
                self._report(f"{one.name} is rowwise, and no colwise module comes before it in its layer")
        elif one.style == "rowwise_split_input" and self._open is not None:
            self._report(
                f"{one.name} is rowwise_split_input, and takes what {self._open} has split; make it rowwise"
            )
        elif arguments and isinstance(arguments[0], torch.Tensor):
            self._inputs[id(arguments[0])] = arguments[0]

    def _on_end(self, one: SplitLinear, module: nn.Module, arguments: Any, output: Any) -> None:
        self._open = one.name if one.style == "colwise" else None
        if arguments and isinstance(arguments[0], torch.Tensor) and isinstance(output, torch.Tensor):
            self._calls.setdefault(one.name, []).append((arguments[0], output))
        if one.style != "colwise" and isinstance(output, torch.Tensor):
            self.forward_bytes.append(_exchanged_bytes(output))

    def _on_other(self, name: str, module: nn.Module, arguments: Any) -> None:
        if self._open is not None and not self._is_summed(name):
            self._report(
                f"{name} runs after {self._open}, where each device has other features, and has parameters or "
                "buffers of its own; name it in the plan as replicated_with_grad_allreduce if it works on each "
                "head alone"
            )

    def _is_summed(self, name: str) -> bool:
        return any(one.rpartition(".")[0] == name for one in self._plan.summed_parameters)

    def _report(self, problem: str) -> None:
        if self.problem is None:
            self.problem = problem


class _OtherPartError(Exception):
    """A part of the features gives a result that differs from that part of the whole result."""


def _last_part(x: torch.Tensor, devices: int, dim: int) -> torch.Tensor:
    """Return the part of a dimension that the last of ``devices`` devices has."""
    size = x.shape[dim] // devices
    return x.narrow(dim, x.shape[dim] - size, size)


def _close(x: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    difference = (x.double() - expected.double()).abs().max()
    return bool(difference <= tolerance * expected.double().abs().max().clamp_min(1e-12))


def _exchanged_bytes(x: torch.Tensor) -> int:
    """Return the bytes of a tensor that devices sum, which they do in float32 or higher precision."""
    return x.numel() * max(x.element_size(), 4)


def _is_dropout(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func is torch.nn.functional.scaled_dot_product_attention:
        rate = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        return bool(rate)
    return is_active_dropout(func, args, kwargs)
