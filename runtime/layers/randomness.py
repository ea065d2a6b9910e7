"""Random numbers of a layer as a function of (seed, step, sample, layer), independent of the layout.

Before a layer runs on some rows, the global generators of torch are seeded from (seed, step, first row,
layer), and those of ``random`` and numpy if the layer draws from them. A microbatch always consists of the
same rows, so a step draws the same numbers in whichever pipeline computes it, and draws them again when it
is redone or recomputed for activation checkpointing. A stage that splits a microbatch's rows over several
devices needs more: dropout masks are drawn sample by sample (``SampleDropout``), each from its own
generator, so that they do not depend on where the rows were cut. Dropout inside a fused function (the
``dropout_p`` of attention) cannot be drawn that way. It depends on the rows of the run, and is the same in
every layout whose stages do not split rows.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from runtime.data.sampling import stream_seed

_CHANNEL_DROPOUTS: frozenset[Callable[..., Any]] = frozenset(
    {functional.dropout1d, functional.dropout2d, functional.dropout3d}
)
_DROPOUTS: frozenset[Callable[..., Any]] = _CHANNEL_DROPOUTS | {functional.dropout}


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed the global generators of torch, on the host and on ``device``."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def host_states() -> tuple[object, ...]:
    """Return the states of the generators of ``random`` and numpy, which differ after one of them was used."""
    numpys = np.random.get_state(legacy=False)
    words, position = numpys["state"]["key"], numpys["state"]["pos"]
    return random.getstate(), words.tobytes(), position, numpys["has_gauss"]


def generator_states(device: torch.device) -> tuple[object, ...]:
    """Return the states of all global generators."""
    states = [torch.default_generator.get_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return *(state.numpy().tobytes() for state in states), *host_states()


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRandomStream:
    """Seeds for one run of a layer on rows of the global batch of step ``step``, starting at row ``row``."""

    seed: int
    step: int
    row: int
    layer: int

    @property
    def layer_seed(self) -> int:
        return stream_seed(self.seed, self.step, self.row, self.layer)

    def mask_seed(self, offset: int, call: int) -> int:
        """Return the seed for the sample ``offset`` rows after the first one and the layer's ``call``-th
        dropout.
        """
        return stream_seed(self.seed, self.step, self.row + offset, self.layer, call)


class SampleDropout(TorchFunctionMode):
    """A mode that replaces active ``F.dropout`` (1d, 2d, 3d too) by masks drawn sample by sample.

    The mask of sample row r is a function of (seed, step, layer, r, number of dropouts that the layer has
    already run). The rows are dim 0 of the argument, or the outermost part of a dim 0 that folds other
    dimensions into it, as in ``x.view(rows * length, -1)``. An argument of any other shape gets one mask,
    seeded by the first row.

    :param rows: rows of the layer's input, starting at ``stream.row``.
    """

    def __init__(self, stream: LayerRandomStream, rows: int) -> None:
        super().__init__()
        self._stream = stream
        self._rows = rows
        self._calls = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            x, p, training, inplace = _dropout_arguments(*args, **kwargs)
            if training and p > 0.0:
                mask = self._mask(x, p, per_channel=func in _CHANNEL_DROPOUTS)
                return x.mul_(mask) if inplace else x * mask
        return func(*args, **kwargs)

    def _mask(self, x: Tensor, p: float, *, per_channel: bool) -> Tensor:
        """Return a mask of zeros and 1/(1−p) that broadcasts to the shape of ``x``."""
        call, self._calls = self._calls, self._calls + 1
        shape = x.shape[:2] + (1,) * (x.dim() - 2) if per_channel and x.dim() > 2 else x.shape
        by_row = self._rows > 0 and x.dim() > 0 and x.shape[0] % self._rows == 0
        masks = self._rows if by_row else 1
        uniform = torch.empty(shape, dtype=torch.float32, device=x.device)
        flat = uniform.view(masks, -1)
        generator = torch.Generator(device=x.device)
        for offset in range(masks):
            generator.manual_seed(self._stream.mask_seed(offset, call))
            flat[offset].uniform_(generator=generator)
        scale = 0.0 if p >= 1.0 else 1.0 / (1.0 - p)
        return (uniform >= p).to(x.dtype).mul_(scale)


class DropoutProbe(TorchFunctionMode):
    """A mode that records whether a dropout that draws random numbers was called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self.seen = self.seen or is_active_dropout(func, args, kwargs)
        return func(*args, **kwargs)


def is_active_dropout(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call is an ``F.dropout`` (1d, 2d, 3d too) that draws random numbers."""
    if func not in _DROPOUTS:
        return False
    _, p, training, _ = _dropout_arguments(*args, **kwargs)
    return training and p > 0.0


def _dropout_arguments(
    input: Tensor,  # noqa: A002 - the names of F.dropout's parameters
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> tuple[Tensor, float, bool, bool]:
    return input, p, training, inplace
