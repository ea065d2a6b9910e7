"""The figures from which MFU is computed: a model's operations and a device's peak rate."""

import pytest
import torch
from torch import nn

from runtime.layers.model import Model
from runtime.profiling.layer_profile import profile_model
from runtime.profiling.utilisation import count_flops, known_peak_flops, peak_flops
from runtime.training import load_training
from tests.helpers.runtime_support import data_for, gpt_data

CPU = torch.device("cpu")


def test_matrix_products_of_both_passes_are_counted() -> None:
    layer, rows = nn.Linear(3, 4), torch.randn(5, 3)
    product = 2 * 5 * 3 * 4
    assert count_flops(lambda: [layer(rows)]) == 2 * product, "the gradient of the rows is not wanted"
    assert count_flops(lambda: [layer(rows.requires_grad_())]) == 3 * product
    assert count_flops(lambda: [torch.compile(layer)(rows)]) == 3 * product
    assert count_flops(lambda: [layer(rows).detach()]) == product


@pytest.mark.parametrize(
    ("device", "precision", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("NVIDIA L40S", "float16", 362),
        ("NVIDIA L4", "float16", 121),
        ("Tesla T4", "bfloat16", None),
        ("A device of tomorrow", "bfloat16", None),
    ],
)
def test_the_peak_is_that_of_the_device_and_the_precision(
    device: str, precision: str, tflops: float | None
) -> None:
    assert known_peak_flops(device, precision) == (None if tflops is None else tflops * 1e12)


def test_a_cpu_has_no_peak_unless_the_job_states_one() -> None:
    assert peak_flops(gpt_data(), CPU) is None
    assert peak_flops(gpt_data(device_peak_tflops=0.5), CPU) == 0.5e12


def test_a_profile_has_the_operations_where_the_peak_is_known() -> None:
    def profile_of(**changes: float) -> tuple[float | None, float | None]:
        data = data_for("mlp.py:build", precision="float32", **changes)
        profile = profile_model(Model(load_training(data), data, CPU), data).profile
        return profile.flops, profile.device_peak_flops

    data = data_for("mlp.py:build", precision="float32")
    layers = load_training(data).layers or ()
    linear = [module for layer in layers for module in layer.modules() if isinstance(module, nn.Linear)]
    products = [2 * data.microbatch_rows * one.in_features * one.out_features for one in linear]
    assert profile_of() == (None, None)
    assert profile_of(device_peak_tflops=0.5) == (3 * sum(products) - products[0], 0.5e12)
