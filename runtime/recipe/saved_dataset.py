"""Data sets that ``datasets.Dataset.save_to_disk`` wrote, as samples of a model."""

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runtime.recipe.models import HuggingFaceModel
from runtime.sources.errors import DataError, import_package

_USUAL_IMAGE_SIZE = 224
"""Height and width in pixels, unless the model's directory or its configuration says otherwise."""


class SavedDataset:
    """A saved Hugging Face data set: the columns that the model takes, as tensors.

    A column of images becomes ``pixel_values``, prepared as the model's ``preprocessor_config.json`` says.
    """

    def __init__(self, place: str, model: HuggingFaceModel) -> None:
        """Map the data set into memory.

        :raises DataError: it cannot be read, or lacks labels or inputs.
        """
        package = import_package("datasets", "[data] huggingface")
        try:
            dataset = package.load_from_disk(place)
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"the data set in {place} cannot be read: {error}") from error
        if "labels" not in dataset.column_names and "label" in dataset.column_names:
            dataset = dataset.rename_column("label", "labels")
        self._image = self._preparation = None
        if model.task == "image-classification" and "pixel_values" not in dataset.column_names:
            images = [name for name, kind in dataset.features.items() if isinstance(kind, package.Image)]
            if images:
                self._image, self._preparation = images[0], ImagePreparation(model)
        taken = [name for name in dataset.column_names if name in _inputs(model)]
        _check_columns(place, dataset.column_names, taken, self._image, model)
        self._dataset = dataset.select_columns([*taken, *filter(None, [self._image])]).with_format(
            "torch", taken
        )
        if self._image is not None:
            self._images = dataset.select_columns([self._image])

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample: dict[str, Tensor] = dict(self._dataset[index])
        if self._image is not None and self._preparation is not None:
            sample["pixel_values"] = self._preparation(self._images[index][self._image])
        return sample


class ImagePreparation:
    """The preparation of images of any size for a model: resizing, cropping, and normalisation channel by channel."""

    def __init__(self, model: HuggingFaceModel) -> None:
        """Read sizes, mean and deviation from the model's directory, or use the usual ones."""
        path = Path(model.table.huggingface or "") / "preprocessor_config.json"
        known: dict[str, Any] = {}
        if model.table.huggingface is not None and path.is_file():
            try:
                known = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise DataError(f"{path} cannot be read: {error}") from error
        self._size = _size(known.get("size"), getattr(model.config, "image_size", _USUAL_IMAGE_SIZE))
        is_cropped = bool(known.get("do_center_crop"))
        self._crop = _size(known.get("crop_size") if is_cropped else None, self._size)
        size = known.get("size")
        is_short_edge = isinstance(size, int) or (isinstance(size, dict) and "shortest_edge" in size)
        self._keeps_ratio = is_cropped and is_short_edge
        """True if the size is that of the shorter edge; without a crop, images would have unequal shapes."""
        self._resample: int | None = known.get("resample")
        channels = getattr(model.config, "num_channels", 3)
        self._mode = "L" if channels == 1 else "RGB"
        is_normalised = known.get("do_normalize") is not False
        self._mean = _channels(known.get("image_mean") if is_normalised else [0.0] * channels, channels)
        self._deviation = _channels(known.get("image_std") if is_normalised else [1.0] * channels, channels)

    def __call__(self, image: Any) -> Tensor:
        """Return a PIL image as float32 of shape (channels, height, width)."""
        height, width = self._size
        rows, columns = min(self._crop[0], height), min(self._crop[1], width)
        if self._keeps_ratio:
            width, height = (height * edge // min(image.size) for edge in image.size)
        resized = image.convert(self._mode).resize((width, height), self._resample)
        top, left = (height - rows) // 2, (width - columns) // 2
        cropped = resized.crop((left, top, left + columns, top + rows))
        pixels = np.asarray(cropped, dtype=np.float32) / 255.0
        values = torch.from_numpy(np.atleast_3d(pixels)).permute(2, 0, 1).contiguous()
        return (values - self._mean) / self._deviation


def _inputs(model: HuggingFaceModel) -> Sequence[str]:
    return list(inspect.signature(model.kind.forward).parameters)


def _check_columns(
    place: str, columns: Sequence[str], taken: Sequence[str], image: str | None, model: HuggingFaceModel
) -> None:
    """:raises DataError: there are no inputs, or no labels and they cannot be made from the inputs."""
    made_here = model.task in ("causal-lm", "masked-lm") and "input_ids" in taken
    if "labels" not in taken and not made_here:
        raise DataError(
            f"the data set in {place} has no labels: its columns are {', '.join(columns)}, and the task "
            f"{model.task} learns from a column named labels"
        )
    if list(taken) == ["labels"] and image is None:
        raise DataError(
            f"the data set in {place} has no column that the model takes: it has {', '.join(columns)}, and the "
            f"model takes {', '.join(_inputs(model))}"
        )


def _size(size: Any, otherwise: Any) -> tuple[int, int]:
    """Return height and width, which configurations give as a number, a pair, or a table."""
    match size if size is not None else otherwise:
        case {"height": int(height), "width": int(width)}:
            return height, width
        case {"shortest_edge": int(edge)} | int(edge):
            return edge, edge
        case [int(height), int(width)]:
            return height, width
        case other:
            raise DataError(f"the size of images {other!r} cannot be used; write it as height and width")


def _channels(values: Any, channels: int) -> Tensor:
    """Return one number for each channel; 0.5 if there are none."""
    return torch.tensor(values if values is not None else [0.5] * channels).reshape(-1, 1, 1)
