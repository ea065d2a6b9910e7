"""Small images with classes, from the arrays of a file."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from runtime.sources.errors import DataError, expand_home

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
        file = expand_home(path)
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


def _sample(image: Images, label: int) -> dict[str, Tensor]:
    pixels = torch.from_numpy(np.atleast_3d(image).astype(np.float32) / 127.5 - 1)
    return {"pixel_values": pixels.permute(2, 0, 1).contiguous(), "labels": torch.tensor(label)}
