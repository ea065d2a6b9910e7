"""Tests of small images from the arrays of a file."""

from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.sources.errors import DataError
from runtime.sources.images import ImageArrays


@pytest.mark.parametrize("channels", [(), (1,), (3,)])
def test_images_of_a_file(tmp_path: Path, channels: tuple[int, ...]) -> None:
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 6, *channels), dtype=np.uint8)
    np.savez(tmp_path / "images.npz", images=images, labels=np.arange(5))
    dataset = ImageArrays(str(tmp_path / "images.npz"))
    assert len(dataset) == 5
    sample = dataset[3]
    assert sample["pixel_values"].shape == (channels[0] if channels else 1, 8, 6)
    assert sample["pixel_values"].dtype == torch.float32
    assert sample["labels"].item() == 3
    restored = ((sample["pixel_values"] + 1) * 127.5).round().permute(1, 2, 0).numpy()
    assert np.array_equal(restored.squeeze(), images[3].squeeze())


def test_files_without_images(tmp_path: Path) -> None:
    path = tmp_path / "images.npz"
    with pytest.raises(DataError, match=r"image file .*images\.npz does not exist"):
        ImageArrays(str(path))
    path.write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"images\.npz must be a \.npz with the arrays images and labels"):
        ImageArrays(str(path))
    np.savez(path, pictures=np.zeros(3))
    with pytest.raises(DataError, match=r"must be a \.npz with the arrays images and labels: .*images"):
        ImageArrays(str(path))
    np.savez(path, images=np.zeros((3, 8, 8)), labels=np.zeros(3, dtype=int))
    with pytest.raises(DataError, match=r"must be bytes .* not float64 of shape \(3, 8, 8\)"):
        ImageArrays(str(path))
    np.savez(path, images=np.zeros((3, 8, 8), dtype=np.uint8), labels=np.zeros(2, dtype=int))
    with pytest.raises(DataError, match="must be 3 whole numbers, one for each image"):
        ImageArrays(str(path))
