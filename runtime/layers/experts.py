"""Load-balancing losses of mixture-of-experts models whose layers are spread over a pipeline.

Hugging Face's auxiliary loss is a product of two means over *all* layers (Fedus et al. 2022, eq. 4 to 6):
the share of tokens that each expert gets and its mean router probability. This loss is not a sum over
stages. Each window therefore adds the terms of its layers to two accumulators, which travel with the hidden
states, row by row; the last window computes the loss from them.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_LOSS = "load_balancing_loss_func"
_active = threading.local()


class ExpertBalance:
    """Router logits of the blocks that run, and the auxiliary loss computed from two accumulators.

    Both accumulators have the shape (rows, length, experts): how often each token chose an expert, and the
    router probabilities of the token.
    """

    def __init__(self, routers: dict[nn.Module, int], modules: list[ModuleType], top_k: int):
        for module in modules:
            if not hasattr(getattr(module, _LOSS), "dispatches"):
                setattr(module, _LOSS, _dispatching(getattr(module, _LOSS)))
        self._logits: dict[nn.Module, Tensor] = {}
        self._routers = set(routers)
        self._top_k = top_k
        self._layers = len(routers)
        for router, index in routers.items():
            router.register_forward_hook(self._hook(router, index))

    @classmethod
    def find(cls, root: nn.Module) -> "ExpertBalance | None":
        """Return an ``ExpertBalance`` for a model that computes such a loss, ``None`` for other models."""
        for model in root.modules():
            config = getattr(model, "config", None)
            module = sys.modules.get(type(model).__module__)
            recorders = getattr(type(model), "_can_record_outputs", None)
            if not getattr(config, "output_router_logits", False) or not isinstance(recorders, dict):
                continue
            recorder = recorders.get("router_logits")
            kind = getattr(recorder, "target_class", recorder)
            if module is None or not hasattr(module, _LOSS) or not isinstance(kind, type):
                continue
            index = getattr(recorder, "index", 0)
            routers = {m: index for m in root.modules() if isinstance(m, kind)}
            modules = {sys.modules[type(m).__module__] for m in root.modules()}
            balanced = [m for m in modules if hasattr(m, _LOSS)]
            return cls(routers, balanced, int(getattr(config, "num_experts_per_tok", 2)))
        return None

    def _hook(self, router: nn.Module, index: int) -> Callable[..., None]:
        def keep(module: nn.Module, arguments: Any, output: Any) -> None:
            self._logits[router] = output[index] if isinstance(output, tuple | list) else output

        return keep

    def add(self, block: nn.Module, balance: tuple[Tensor, ...], rows: int) -> tuple[Tensor, ...]:
        """Add the terms of a block that has just run to the accumulators of its window."""
        for module in block.modules():
            if module not in self._routers or module not in self._logits:
                continue
            logits = self._logits.pop(module)
            logits = logits.reshape(rows, -1, logits.shape[-1])
            probabilities = torch.nn.functional.softmax(logits, dim=-1)
            chosen = torch.topk(probabilities, self._top_k, dim=-1).indices
            assigned = torch.zeros_like(probabilities).scatter_add_(
                -1, chosen, torch.ones_like(chosen, dtype=probabilities.dtype)
            )
            parts = (assigned.detach(), probabilities)
            balance = tuple(b + p for b, p in zip(balance, parts, strict=True)) if balance else parts
        return balance

    @contextmanager
    def loss_from(self, balance: Callable[[], tuple[Tensor, ...]]) -> Iterator[None]:
        """Make the model's own code compute its auxiliary loss from the accumulators within this context."""

        def loss(
            gate_logits: Any,
            num_experts: int | None = None,
            top_k: int = 2,
            attention_mask: Tensor | None = None,
        ) -> Tensor:
            assigned, probabilities = balance()
            experts = probabilities.shape[-1]
            if attention_mask is None:
                mask = torch.ones_like(probabilities[..., :1])
            else:
                mask = attention_mask.to(probabilities)[..., None]
            tokens = mask.sum() * self._layers
            share = (assigned * mask).sum((0, 1)) / tokens
            mean = (probabilities * mask).sum((0, 1)) / tokens
            return (share * mean).sum() * experts

        before = getattr(_active, "loss", None)
        _active.loss = loss
        try:
            yield
        finally:
            _active.loss = before


def _dispatching(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss function that uses the accumulators if the last window runs in this thread, and
    ``original`` if not.
    """

    @wraps(original)
    def loss(*arguments: Any, **named: Any) -> Any:
        return (getattr(_active, "loss", None) or original)(*arguments, **named)

    loss.dispatches = True  # type: ignore[attr-defined]
    return loss
