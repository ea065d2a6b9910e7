"""A module of your own: a residual network that learns to read digits, cut at the names in ``split``."""

import torch
from digits import Digits
from torch import Tensor, nn
from torch.nn import functional

from ftd import Training


class Block(nn.Module):
    """Two convolutions with a residual connection; a first stride of 2 halves height and width."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(outputs)
        self.conv_2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm_1(self.conv_1(x)))
        return functional.relu(self.norm_2(self.conv_2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """(rows, 1, height, width) images → (rows, 10) logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.block_1 = Block(width, width, 1)
        self.block_2 = Block(width, 2 * width, 2)
        self.block_3 = Block(2 * width, 2 * width, 1)
        self.block_4 = Block(2 * width, 4 * width, 2)
        self.head = nn.Linear(4 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.block_2(self.block_1(self.stem(images)))
        x = self.block_4(self.block_3(x))
        return self.head(x.mean(dim=(2, 3)))


def build(*, width: int = 16, learning_rate: float = 0.05, steps: int = 200) -> Training:
    return Training(
        model=lambda: ResNet(width),
        split=["block_1", "block_2", "block_3", "block_4"],  # ftd may cut the model before each of these.
        loss=lambda logits, batch: functional.cross_entropy(logits, batch[1]),
        optimizer=lambda named: torch.optim.SGD(
            [p for _, p in named], lr=learning_rate, momentum=0.9, weight_decay=1e-4
        ),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps),
        dataset=Digits(10_000),  # Pairs (image, digit): the model gets the image, the loss gets both.
        evaluation=Digits(500),
    )
