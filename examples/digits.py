"""Data set of drawn digits, for the examples that classify images: there is nothing to download."""

import random

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

SIZE = 28


class Digits(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Pairs of an image, float32 of shape (1, 28, 28) between 0 and 1, and its digit.

    A sample is drawn again, at another position, each time that it is read: ftd seeds the generators of
    torch, numpy and ``random`` by (seed, epoch, index), so augmentations are the same on all nodes.
    """

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        digit = index % 10
        image = Image.new("L", (SIZE, SIZE))
        font = ImageFont.load_default(random.uniform(20, 24))
        place = (random.uniform(13, 15), random.uniform(13, 15))
        ImageDraw.Draw(image).text(place, str(digit), fill=255, font=font, anchor="mm")
        image = image.rotate(random.uniform(-10, 10), resample=Image.Resampling.BILINEAR)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(1, SIZE, SIZE)
        return (pixels / 255 + 0.1 * torch.randn(1, SIZE, SIZE)), digit
