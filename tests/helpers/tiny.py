"""A training function for tests: small enough to be fast, with everything that makes numerics hard.

It has dropout (random numbers per step, sample and layer), Adam with a schedule, clipping (by the job), and
float64. ``delay_s`` slows a step down without using the processor. The other options name files that cause
faults:

- ``raise_once``: the trainer that finds this file raises.
- ``starve_once``: the trainer that finds this file runs out of memory in the middle of a step.
- ``wrong_from``: all trainers raise while this file exists.
- ``bad_disk``: this file contains the name of a node that cannot read some samples while the file exists.
- ``hold``: no trainer continues an evaluation while this file exists; one that reaches an evaluation writes
  ``<hold>-met``.
- ``lost_device``: this file contains the name of a node and the number of a device, which fails while the
  file exists.
"""

import contextlib
import errno
import os
import socket
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR

from ftd import Training

LEARNING_RATE, DECAY, DECAY_STEPS = 3e-3, 0.7, 50


class Points(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(
        self, samples: int, width: int, raise_once: str = "", wrong_from: str = "", bad_disk: str = ""
    ) -> None:
        self.inputs = torch.randn(samples, width, dtype=torch.float64)
        self.targets = self.inputs.sin().roll(1, dims=1)
        self.raise_once = Path(raise_once) if raise_once else None
        self.wrong_from = Path(wrong_from) if wrong_from else None
        self.bad_disk = Path(bad_disk) if bad_disk else None

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.wrong_from is not None and self.wrong_from.exists():
            raise ValueError("wrong from here on")
        bad = self.bad_disk if index % 16 == 15 else None
        if bad is not None and bad.exists() and is_trainer(bad.read_text(), "0"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), f"/data/{index}.bin")
        if self.raise_once is not None and self.raise_once.exists():
            try:
                self.raise_once.unlink()
            except FileNotFoundError:
                pass  # Another trainer found the file first and raises.
            else:
                raise RuntimeError("planted by the test")
        return self.inputs[index], self.targets[index]


class HeldOut(Points):
    """Points that training does not use."""

    def __init__(self, samples: int, width: int, hold: str) -> None:
        super().__init__(samples, width)
        self.hold = Path(hold) if hold else None

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.hold is not None and self.hold.exists():
            Path(f"{self.hold}-met").touch()
            while self.hold.exists():
                time.sleep(0.005)
        return super().__getitem__(index)


class Slow(nn.Module):
    """A layer that takes time without using the processor."""

    def __init__(self, delay_s: float, starve_once: str) -> None:
        super().__init__()
        self.delay_s = delay_s
        self.starve_once = Path(starve_once) if starve_once else None

    def forward(self, value: Tensor) -> Tensor:
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.starve_once is not None and self.starve_once.exists():
            with contextlib.suppress(
                FileNotFoundError
            ):  # Another trainer found the file first and runs out of memory.
                self.starve_once.unlink()
                torch.empty(1 << 55, dtype=torch.uint8)
        return value


def learning_rate(step: int) -> float:
    """Return the learning rate of a step; the first one is step 1."""
    return LEARNING_RATE * DECAY ** ((step - 1) // DECAY_STEPS)


def build(
    *,
    layers: int = 6,
    width: int = 48,
    delay_s: float = 0.0,
    raise_once: str = "",
    starve_once: str = "",
    wrong_from: str = "",
    bad_disk: str = "",
    samples: int = 600,
    tied: bool = False,
    frozen: bool = False,
    held_out: int = 0,
    hold: str = "",
    lost_device: str = "",
    split: bool = False,
) -> Training:
    """Return the training.

    :param tied: the last layer shares the first one's weight.
    :param frozen: train only the biases, and nothing of the second layer.
    :param split: devices of a stage can compute parts of all layers but the first and the last.
    :param held_out: number of samples of an evaluation; if it is positive, the largest error is a metric.
    """
    if lost_device and Path(lost_device).exists() and is_trainer(*Path(lost_device).read_text().split()):
        raise RuntimeError("no CUDA-capable device is detected")
    made = [
        nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1), Slow(delay_s, starve_once))
        for _ in range(layers)
    ]
    if tied:
        made[-1][0].weight = made[0][0].weight
    if frozen:
        for layer in made:
            layer[0].weight.requires_grad_(False)
        made[1].requires_grad_(False)
    return Training(
        layers=made,
        loss=functional.mse_loss,
        optimizer=lambda named: torch.optim.Adam([p for _, p in named], lr=LEARNING_RATE),
        scheduler=lambda optimizer: StepLR(optimizer, step_size=DECAY_STEPS, gamma=DECAY),
        dataset=Points(samples, width, raise_once, wrong_from, bad_disk),
        evaluation=HeldOut(held_out, width, hold) if held_out else None,
        metrics=largest_error if held_out else None,
        tensor_plan={f"{n}.0": "colwise_gather_output" for n in range(1, layers - 1)} if split else None,
    )


def is_trainer(node: str, device: str) -> bool:
    """Return whether this process is the trainer of this device of the node."""
    with socket.socket(fileno=os.dup(1)) as output:
        return f"/{node}/" in output.getpeername() and os.environ["CUDA_VISIBLE_DEVICES"] == device


def largest_error(output: Tensor, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {"largest_error": (output - batch[1]).abs().amax(dim=1).mean()}
