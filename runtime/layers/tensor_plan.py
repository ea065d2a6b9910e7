"""Tensor-parallel plans: which linear modules the devices of a stage compute in parts (Shoeybi et al. 2019,
"Megatron-LM", section 3).

A plan maps names of modules to styles. ``colwise``: each device has an equal part of the output features; what
follows works on that part. ``rowwise``: each device has the part of the input features that it has of what came
before, and the outputs are summed. Between the two lies a *split region*, in which each device has other features.
``colwise_gather_output``: the parts of the output are put together. ``rowwise_split_input``: the input is whole, and
each device takes its part. ``replicated_with_grad_allreduce``: the module
is whole on each device, but runs in a split region, so that its gradients are summed.

Plans are the user's (``Training.tensor_plan``) or those of Hugging Face models (``base_model_tp_plan``). A plan is
accepted where every module of it is a plain ``nn.Linear`` inside one layer's block and whatever else runs in a split
region has neither tensors nor random numbers of its own. What a plan says about modules outside of the blocks
(embeddings, heads) is not used: they are whole on each device.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from runtime.layers.randomness import is_active_dropout
from runtime.training import TrainingError

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
"""By the names that plans use."""
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
        """Whether its input features are divided, and not its output features."""
        return self.style in ("rowwise", "rowwise_split_input")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlan:
    """What of one model is computed in parts."""

    linears: tuple[SplitLinear, ...]
    summed_parameters: frozenset[str]
    """Names of parameters that are whole, and whose gradients are summed over the devices of a stage."""
    divisible_counts: tuple[tuple[str, int], ...]
    """Numbers that a stage's devices must divide, each with the words that name it."""

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
        """For parameters that share a vector with no others (``runtime.zero.parts.Shape.of``) what tells them apart."""
        return dict.fromkeys(self.summed_parameters, "*") | {name: name for name in self.split_parameters}

    @property
    def max_devices(self) -> int:
        """The plan can be used on the numbers of devices that divide this."""
        return gcd(*(count for _, count in self.divisible_counts))

    def find_problem(self, devices: int) -> str | None:
        """Return why so many devices cannot use the plan; ``None``: they can."""
        for words, count in self.divisible_counts:
            if count % devices:
                return f"{words} is {count}, which {devices} devices do not divide"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModule:
    """A module of a model, as a plan is checked against it."""

    name: str
    module: nn.Module
    layers: tuple[int, ...]
    in_block: bool


class TensorPlanError(TrainingError):
    """A tensor-parallel plan that this model cannot have."""


def make_tensor_plan(
    user_plan: Mapping[str, str] | None, modules: Sequence[NamedModule], names: Mapping[int, tuple[str, bool]]
) -> TensorPlan:
    """Return the plan of a model.

    :param given: the user's; ``None``: the one that Hugging Face gives the model.
    :param places: all modules of the model.
    :param names: for each parameter, by identity, its canonical name and whether it is trained and in one place alone.
    :raises TensorPlanError: there is none, or it cannot be used.
    """
    styles = _styles_of(user_plan, modules)
    linears: list[SplitLinear] = []
    summed: set[str] = set()
    for place, style in styles:
        if not place.in_block or len(place.layers) != 1:
            if user_plan is not None:
                raise TensorPlanError(
                    f"{place.name} is not inside one of the blocks that the model is cut into"
                )
            continue
        known = _STYLES.get(style)
        if known is None:
            raise TensorPlanError(
                f"{place.name} is {style}, which ftd does not know; it knows {', '.join(sorted(set(_STYLES.values())))}"
            )
        own = {key: names[id(value)] for key, value in place.module._parameters.items() if value is not None}
        for key, (_, alone) in own.items():
            if not alone:
                raise TensorPlanError(f"{place.name}.{key} is frozen, or shared with another module")
        if known == "replicated_with_grad_allreduce":
            summed |= {name for name, _ in own.values()}
            continue
        if type(place.module).forward is not nn.Linear.forward:
            raise TensorPlanError(f"{place.name} is a {type(place.module).__name__} and no nn.Linear")
        assert isinstance(place.module, nn.Linear)
        linears.append(
            SplitLinear(
                name=place.name,
                style=known,
                module=place.module,
                layer=place.layers[0],
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
    given: Mapping[str, str] | None, places: Sequence[NamedModule]
) -> list[tuple[NamedModule, str]]:
    found: dict[str, tuple[NamedModule, str]] = {}
    for pattern, style in (_hugging_face(places) if given is None else given).items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        matching = [place for place in places if expression.fullmatch(place.name)]
        if given is not None and not matching:
            raise TensorPlanError(f"Training.tensor_plan names {pattern}, and the model has no such module")
        found |= {place.name: (place, style) for place in matching}
    return list(found.values())


def _hugging_face(places: Sequence[NamedModule]) -> dict[str, str]:
    """Return the plan that ``transformers`` gives the outermost model that has one."""
    for place in places:
        plan = getattr(place.module, "_tp_plan", None)
        if isinstance(plan, dict) and plan:
            prefix = f"{place.name}." if place.name else ""
            return {prefix + str(name): str(style) for name, style in plan.items()}
    raise TensorPlanError("the model has no tensor-parallel plan; give one as Training.tensor_plan")


def _check_neighbours(
    linears: Iterable[SplitLinear],
    summed: set[str],
    places: Iterable[NamedModule],
    names: Mapping[int, tuple[str, bool]],
) -> None:
    """Refuse parameters that a module around split ones may use in its own code, where nobody sees it."""
    split = {one.name for one in linears}
    for place in places:
        if not place.in_block or place.name in split:
            continue
        if not any(name.startswith(place.name + ".") for name in split):
            continue
        for key, value in place.module._parameters.items():
            if value is not None and names[id(value)][0] not in summed:
                raise TensorPlanError(
                    f"{place.name} has a parameter {key} of its own beside modules that are split; if it is used where "
                    "features are split, its gradients would be wrong"
                )


def _features(one: SplitLinear) -> tuple[str, int]:
    """Return how many features are split, with the words that name them."""
    if one.is_rowwise:
        return f"{_of_any(one.name)}.in_features", one.module.in_features
    return f"{_of_any(one.name)}.out_features", one.module.out_features


def _of_any(name: str) -> str:
    """Return the name with ``*`` for numbers: blocks that are alike are named once."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


class SplitRegionChecker(TorchFunctionMode):
    """Watches layers run on one device, and finds what must not be in a split region.

    ``with regions.watching(layer):`` surrounds one run of a layer; ``find_problem`` is the first that was found.
    """

    def __init__(self, plan: TensorPlan, places: Iterable[NamedModule]) -> None:
        super().__init__()
        self._plan = plan
        self._places = [place for place in places if place.in_block]
        self._open: str | None = None
        """The module that began the region, while there is one."""
        self.problem: str | None = None
        self._heads: dict[str, int] = {}
        self.forward_bytes: list[int] = []
        """Sizes of what devices of a stage exchange in the forward pass of the layer that was watched last."""
        self._inputs: dict[int, torch.Tensor] = {}
        self._calls: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        """For each module of the layer that was watched last, the input and the output of each of its calls."""

    @property
    def is_open(self) -> bool:
        """Whether a split region is being run."""
        return self._open is not None

    @property
    def backward_bytes(self) -> list[int]:
        """Sizes of what devices exchange in the backward pass: gradients of the inputs of modules that are split."""
        return [_exchanged_bytes(x) for x in self._inputs.values() if x.requires_grad]

    def validated_plan(self) -> TensorPlan:
        """Return the plan with what was seen of attention heads, which are split whole.

        :raises TensorPlanError: the plan cannot be used.
        """
        if self.problem is not None:
            raise TensorPlanError(self.problem)
        return replace(self._plan, divisible_counts=(*self._heads.items(), *self._plan.divisible_counts))

    @contextmanager
    def observe(self, layer: int) -> Iterator[None]:
        """Watch one run of a layer."""
        self.forward_bytes, self._inputs, self._calls = [], {}, {}
        mine = {one.name: one for one in self._plan.linears if one.layer == layer}
        if not mine or self.problem is not None:
            yield
            return
        handles = []
        for place in self._places:
            if layer not in place.layers:
                continue
            if (one := mine.get(place.name)) is not None:
                handles.append(place.module.register_forward_pre_hook(self._begins(one)))
                handles.append(place.module.register_forward_hook(self._ends(one)))
            elif self._has_own(place.module):
                handles.append(place.module.register_forward_pre_hook(self._meets(place.name)))
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()
        if self._open is not None:
            self._say(
                f"what {self._open} (colwise) computes is not put together again by a rowwise module of its layer"
            )
        self._open = None

    def compare_split(self, layer: int, run: Callable[[], object], *, tolerance: float) -> None:
        """Run the layer that was just watched again, with a part of its features, and compare that with the whole.

        This finds code that computes something else in a split region, such as attention that reads the size of a
        head from the number of features and not the number of heads. Devices are stood for by the last of as few as
        the plan allows. What they would exchange comes from the whole run.

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
            self._say(self._other_part(mine, devices))
        except Exception as error:
            self._say(f"{self._other_part(mine, devices)}: {error}")
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
        if self._open is not None and _drops_out(func, args, kwargs):
            self._say(
                f"there is dropout after {self._open}, where each device has other features and would draw other "
                "masks; set that dropout to 0"
            )
        if self._open is not None and func in _ATTENTION and args and args[0].dim() == 4:
            self._note_heads(self._open, args[0].shape[1])
        return func(*args, **kwargs)

    def _note_heads(self, opener: str, heads: int) -> None:
        """Note the heads of the attention that follows a colwise module, and those of keys and values."""
        parent = opener.rpartition(".")[0]
        owner = next((place.module for place in self._places if place.name == parent), None)
        where = _of_any(parent)
        self._heads[f"the number of attention heads of {where}"] = heads
        for source in (owner, getattr(owner, "config", None)):
            for attribute in _KEY_HEADS:
                count = getattr(source, attribute, None)
                if isinstance(count, int) and count > 0:
                    self._heads[f"{attribute} of {where}"] = count

    def _has_own(self, module: nn.Module) -> bool:
        names = module._buffers.keys() - module._non_persistent_buffers_set
        summed = {one for one in module._parameters.values() if one is not None}
        return bool(summed) or any(module._buffers[name] is not None for name in names)

    def _begins(self, one: SplitLinear) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any) -> None:
            if one.style == "rowwise":
                if self._open is None:
                    self._say(f"{one.name} is rowwise, and no colwise module comes before it in its layer")
            elif one.style == "rowwise_split_input" and self._open is not None:
                self._say(
                    f"{one.name} is rowwise_split_input, and takes what {self._open} has split; make it rowwise"
                )
            elif arguments and isinstance(arguments[0], torch.Tensor):
                self._inputs[id(arguments[0])] = arguments[0]

        return hook

    def _ends(self, one: SplitLinear) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            self._open = one.name if one.style == "colwise" else None
            if arguments and isinstance(arguments[0], torch.Tensor) and isinstance(output, torch.Tensor):
                self._calls.setdefault(one.name, []).append((arguments[0], output))
            if one.style != "colwise" and isinstance(output, torch.Tensor):
                self.forward_bytes.append(_exchanged_bytes(output))

        return hook

    def _meets(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any) -> None:
            if self._open is not None and not self._is_summed(name):
                self._say(
                    f"{name} runs after {self._open}, where each device has other features, and has parameters or "
                    "buffers of its own; name it in the plan as replicated_with_grad_allreduce if it works on each "
                    "head alone"
                )

        return hook

    def _is_summed(self, name: str) -> bool:
        return any(one.rpartition(".")[0] == name for one in self._plan.summed_parameters)

    def _say(self, problem: str) -> None:
        if self.problem is None:
            self.problem = problem


class _OtherPartError(Exception):
    """A part of the features gives something else than that part of the whole."""


def _last_part(x: torch.Tensor, devices: int, dim: int) -> torch.Tensor:
    """Return what the last of so many devices has of a dimension."""
    size = x.shape[dim] // devices
    return x.narrow(dim, x.shape[dim] - size, size)


def _close(x: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    difference = (x.double() - expected.double()).abs().max()
    return bool(difference <= tolerance * expected.double().abs().max().clamp_min(1e-12))


def _exchanged_bytes(x: torch.Tensor) -> int:
    """Return the bytes of a tensor that devices add up, which they do in float32 at least."""
    return x.numel() * max(x.element_size(), 4)


def _drops_out(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func is torch.nn.functional.scaled_dot_product_attention:
        rate = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
        return bool(rate)
    return is_active_dropout(func, args, kwargs)
