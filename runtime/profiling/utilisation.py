"""Figures for MFU (model FLOPs utilisation; Chowdhery et al., PaLM, appendix B): the operations of a model,
and the peak performance of the device that computes it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from statemachine.messages.trainer import TrainingData

_TERA = 1e12
_PEAK_TFLOPS: tuple[tuple[str, Mapping[str, float]], ...] = (
    ("B200", {"bfloat16": 2250, "float16": 2250, "tf32": 1125, "float32": 75, "float64": 37}),
    ("H200", {"bfloat16": 989, "float16": 989, "tf32": 495, "float32": 67, "float64": 67}),
    ("GH200", {"bfloat16": 989, "float16": 989, "tf32": 495, "float32": 67, "float64": 67}),
    ("H100 PCIe", {"bfloat16": 756, "float16": 756, "tf32": 378, "float32": 51, "float64": 51}),
    ("H100", {"bfloat16": 989, "float16": 989, "tf32": 495, "float32": 67, "float64": 67}),
    ("A100", {"bfloat16": 312, "float16": 312, "tf32": 156, "float32": 19.5, "float64": 19.5}),
    ("L40S", {"bfloat16": 362, "float16": 362, "tf32": 183, "float32": 91.6}),
    ("L4", {"bfloat16": 121, "float16": 121, "tf32": 60, "float32": 30.3}),
    ("A40", {"bfloat16": 150, "float16": 150, "tf32": 75, "float32": 37.4}),
    ("A10", {"bfloat16": 125, "float16": 125, "tf32": 62.5, "float32": 31.2}),
    ("V100", {"float16": 125, "float32": 15.7, "float64": 7.8}),
    ("T4", {"float16": 65, "float32": 8.1}),
)
"""Dense peaks in TFLOPS by precision, from the vendor's data sheets, with tensor cores if the precision uses
them. The first entry whose words all occur in the device's name counts.
"""


def peak_flops(data: TrainingData, device: torch.device) -> float | None:
    """Return the device's peak in operations per second, or ``None`` if it is unknown."""
    if data.device_peak_tflops > 0:
        return data.device_peak_tflops * _TERA
    if device.type != "cuda":
        return None
    return known_peak_flops(torch.cuda.get_device_name(device), data.precision)


def known_peak_flops(device_name: str, precision: str) -> float | None:
    """Return the peak of a device with this name, as CUDA reports it: ``NVIDIA H100 80GB HBM3``."""
    words = set(device_name.replace("-", " ").split())
    for name, peaks in _PEAK_TFLOPS:
        if words.issuperset(name.split()):
            tflops = peaks.get(precision)
            return None if tflops is None else tflops * _TERA
    return None


def count_flops(compute: Callable[[], Sequence[torch.Tensor]]) -> int:
    """Return the floating-point operations of ``compute`` and of the backward pass from its outputs.

    Matrix products, convolutions and attention count, as in ``torch.utils.flop_counter``; a multiplication
    and an addition are two operations. Compiled modules run without their compiled code, whose operations
    cannot be observed.
    """
    with torch.compiler.set_stance("force_eager"), _FlopCounter() as count:
        roots = [t for t in compute() if t.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(t) for t in roots])
    flops: int = count.flops
    return flops


class _FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that sums the operations of everything that runs under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops: int = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        formula = flop_registry.get(function._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result
