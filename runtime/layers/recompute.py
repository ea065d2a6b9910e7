"""Activation checkpointing: whether a layer keeps the activations that its backward pass needs, or recomputes
them.

``none`` keeps all of them. ``full`` keeps the layer's input and recomputes everything else (Chen et al.
2016, "Training Deep Nets with Sublinear Memory Cost"). ``selective`` also keeps the outputs of matrix
products, convolutions and attention, and recomputes the rest, which is cheap (Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models"). All three produce the same bits.

A function that changes the output of a matrix product in place can only be recomputed with ``full``; with
``selective`` the backward pass raises a ``RuntimeError``.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as tree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from planner.values import Recompute

_SAVED = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_scaled_mm",
        "_grouped_mm",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    if hasattr(torch.ops.aten, name)
)
"""Operations whose outputs ``selective`` keeps."""

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def run_with_recompute(
    recompute: Recompute,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    named: dict[str, Any],
    *,
    second_run_context: Callable[[], AbstractContextManager[None]] = nullcontext,
    on_saved: Callable[[Tensor], None] | None = None,
) -> Any:
    """Call ``function(*arguments, **named)``, which must draw the same random numbers each time it is called.

    :param second_run_context: returns a context that is entered while the function runs for the second
        time.
    :param on_saved: called with every output that ``selective`` keeps.
    """
    if recompute == "none" or not torch.is_grad_enabled():
        return function(*arguments, **named)
    # Tensors among the keyword arguments are kept, too, and hooks must see them like all others.
    leaves, structure = tree.tree_flatten((arguments, named))

    def flat(*leaves: Any) -> Any:
        arguments, named = tree.tree_unflatten(leaves, structure)
        return function(*arguments, **named)

    def contexts() -> Contexts:
        if recompute == "full":
            return nullcontext(), second_run_context()
        made: Contexts = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
        first = made[0] if on_saved is None else _both(made[0], _SavedOutputs(on_saved))
        return first, _both(second_run_context(), made[1])

    return checkpoint(flat, *leaves, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


@contextmanager
def _both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    with one, other:
        yield


def _policy(_context: Any, operation: Any, *_arguments: Any, **_named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE


class _SavedOutputs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that calls ``on_saved`` with every output that ``selective`` keeps.

    A policy sees the outputs too, but only in recent versions of torch.
    """

    def __init__(self, on_saved: Callable[[Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_saved = on_saved

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _SAVED:
            for output in tree.tree_leaves(out):
                if isinstance(output, Tensor):
                    self._on_saved(output)
        return out
