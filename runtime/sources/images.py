"""Small images with classes, from arrays or drawn: enough to try an image model without a download."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.sources.errors import DataError, import_package
from runtime.sources.packed import check_index

Images = npt.NDArray[np.uint8]


class ImageArrays:
    """Samples ``{"pixel_values", "labels"}`` of a ``.npz`` file with the arrays ``images`` and ``labels``.

    ``images`` are bytes of shape (samples, height, width) or (samples, height, width, channels) and become
    float32 of shape (channels, height, width) between -1 and 1; ``labels`` are whole numbers, the classes.
    All images are held in memory.
    """

    def __init__(self, path: str) -> None:
        """Read the file.

        :raises DataError: it is missing or corrupt, or its arrays do not fit together.
        """
        file = Path(path).expanduser()
        if not file.is_file():
            raise DataError(f"image file {file} does not exist (looked from {Path.cwd()})")
        try:
            with np.load(file, allow_pickle=False) as arrays:
                images, labels = arrays["images"], arrays["labels"]
        except (OSError, ValueError, EOFError, KeyError, AttributeError, TypeError) as error:
            raise DataError(f"{file} must be a .npz with the arrays images and labels: {error}") from error
        if images.dtype != np.uint8 or images.ndim not in (3, 4):
            raise DataError(
                f"the images in {file} must be bytes (uint8) of shape (samples, height, width[, channels]), "
                f"not {images.dtype} of shape {images.shape}"
            )
        if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
            raise DataError(
                f"the labels in {file} must be {len(images)} whole numbers, one for each image, not "
                f"{labels.dtype} of shape {labels.shape}"
            )
        self._images: Images = images
        self._labels = labels.astype(np.int64)

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return _sample(self._images[index], int(self._labels[index]))


class RenderedDigits:
    """Drawn digits, shifted, rotated and with noise: samples ``{"pixel_values", "labels"}`` of 10 classes.

    A sample depends only on ``seed`` and its index. ``pixel_values`` are float32 of shape (1, size, size)
    between -1 and 1.
    """

    def __init__(self, count: int, *, size: int = 32, seed: int = 0) -> None:
        """Set the number of images and their height and width in pixels."""
        if count < 1 or size < 8:
            raise DataError(
                f"{count} images of {size} pixels: at least 1 image of at least 8 pixels is needed"
            )
        self._count = count
        self._size = size
        self._seed = seed
        import_package("PIL.ImageFont", "drawing digits")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        index = check_index(index, self._count)
        label = index % 10
        return _sample(_draw(str(label), self._size, np.random.default_rng((self._seed, index))), label)


def _draw(digit: str, size: int, random: np.random.Generator) -> Images:
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("L", (size, size))
    font = ImageFont.load_default(size * random.uniform(0.6, 0.9))
    x, y = size / 2 + random.uniform(-size / 8, size / 8, 2)
    ImageDraw.Draw(image).text((x, y), digit, fill=255, font=font, anchor="mm")
    turned = image.rotate(random.uniform(-20, 20), resample=Image.Resampling.BILINEAR)
    noisy = np.asarray(turned, dtype=np.float64) + random.normal(0, 16, (size, size))
    return noisy.clip(0, 255).astype(np.uint8)


def _sample(image: Images, label: int) -> dict[str, Tensor]:
    pixels = torch.from_numpy(np.atleast_3d(image).astype(np.float32) / 127.5 - 1)
    return {"pixel_values": pixels.permute(2, 0, 1).contiguous(), "labels": torch.tensor(label)}
