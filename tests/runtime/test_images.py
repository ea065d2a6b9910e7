"""Tests of small images: arrays of a file, and drawn digits that depend only on seed and index."""

from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.sources.errors import DataError
from runtime.sources.images import ImageArrays, RenderedDigits


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


def test_digits_are_equal_wherever_they_are_drawn() -> None:
    first, second = RenderedDigits(100, size=16, seed=3), RenderedDigits(100, size=16, seed=3)
    for index in (0, 57, -1):
        assert torch.equal(first[index]["pixel_values"], second[index]["pixel_values"])
    assert [int(sample["labels"]) for sample in first] == [number % 10 for number in range(100)]
    assert first[0]["pixel_values"].shape == (1, 16, 16)
    assert not torch.equal(first[3]["pixel_values"], first[13]["pixel_values"])
    assert not torch.equal(first[3]["pixel_values"], RenderedDigits(100, size=16)[3]["pixel_values"])


def test_digits_can_be_distinguished() -> None:
    """Each image is nearest to the mean of its own class far more often than by chance."""
    digits = RenderedDigits(600, size=16)
    images = torch.stack([sample["pixel_values"].flatten() for sample in digits])
    labels = torch.tensor([int(sample["labels"]) for sample in digits])
    means = torch.stack([images[:400][labels[:400] == digit].mean(0) for digit in range(10)])
    nearest = torch.cdist(images[400:], means).argmin(1)
    assert (nearest == labels[400:]).double().mean() > 0.2


def test_no_images_are_no_data_set() -> None:
    with pytest.raises(DataError, match="0 images of 32 pixels"):
        RenderedDigits(0)
