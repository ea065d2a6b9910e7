"""The test of a device: a sound one is exact in every dtype, and any wrong element is found."""

import pytest
import torch

from runtime.monitoring import device_check
from runtime.monitoring.device_check import check_device, device_kind, find_wrong_product

CPU = torch.device("cpu")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [64, 256])
def test_a_product_is_exact_and_one_wrong_element_is_found(dtype: torch.dtype, rows: int) -> None:
    assert find_wrong_product(CPU, dtype, rows) == ""
    assert f"is wrong in 1 of {rows} rows, first in row {rows // 2}" in find_wrong_product(
        CPU, dtype, rows, wrong=True
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda product: product[3].neg_(), "is wrong in 1 of 256 rows, first in row 3"),
        (lambda product: product[:, 7].add_(1), "is wrong in 256 of 256 rows, first in row 0"),
        (lambda product: product[9, 9:10].fill_(float("nan")), "is not finite"),
    ],
)
def test_other_errors_of_a_device_are_found(
    change: object, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.Tensor.__matmul__

    def wrong(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = real(left, right)
        if product.is_floating_point():
            change(product)  # type: ignore[operator]
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong)
    assert expected in find_wrong_product(CPU, torch.float32, 256)


def test_the_result_of_a_sound_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    found = check_device(3)
    assert (found.device, found.kind, found.wrong, found.failed) == (3, device_kind(CPU), "", "")
    assert found.compute_gflops > 0.1 and found.memory_gb_s == 0.0, "host memory is not measured"

    def too_large(*_: object) -> float:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(device_check, "_measure_product", too_large)
    assert check_device(3).compute_gflops == 0.0, "not measured, and so compared with nothing"
