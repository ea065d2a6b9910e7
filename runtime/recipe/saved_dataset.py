"""Data sets that ``datasets.Dataset.save_to_disk`` wrote, as samples of a model."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
                self._image, self._preparation = images[0], image_preparation(model)
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


def image_preparation(model: HuggingFaceModel) -> Callable[[Any], Tensor]:
    """Return the function that turns a PIL image of any size into float32 of shape (channels, height, width).

    It prepares images as the ``preprocessor_config.json`` in the model's directory says. Without one it resizes them
    to the size in the model's configuration, and maps 0 … 255 to -1 … 1.

    :raises DataError: the file cannot be used or makes images of unequal shapes, or Pillow is missing.
    """
    images = import_package("PIL.Image", "a column of images")
    from transformers import AutoImageProcessor
    from transformers.image_processing_backends import PilBackend

    path = Path(model.table.huggingface or "") / "preprocessor_config.json"
    channels = getattr(model.config, "num_channels", 3)
    mode = "L" if channels == 1 else "RGB"
    try:
        if is_described := model.table.huggingface is not None and path.is_file():
            processor = AutoImageProcessor.from_pretrained(path.parent, backend="pil")
        else:
            processor = PilBackend(
                do_resize=True,
                size=getattr(model.config, "image_size", _USUAL_IMAGE_SIZE),
                resample=images.Resampling.BICUBIC,
                do_rescale=True,
                rescale_factor=1 / 255,
                do_normalize=True,
                image_mean=[0.5] * channels,
                image_std=[0.5] * channels,
            )

        def prepare(image: Any) -> Tensor:
            values: Tensor = processor(image.convert(mode), return_tensors="pt")["pixel_values"][0]
            return values

        shapes = {prepare(images.new(mode, size)).shape for size in ((96, 64), (64, 96))}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        what = f"as {path} says" if is_described else "to the size in the model's configuration"
        raise DataError(f"images cannot be prepared {what}: {error}") from error
    if len(shapes) > 1:
        raise DataError(
            f"{path} makes images of unequal shapes: give size a height and a width, or set do_center_crop"
        )
    return prepare


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
