"""Tests of the place that a vote names when a value of its step was not finite: real engines, two pipelines of two
stages.
"""

from pathlib import Path

import pytest

from runtime.layers.finite_values import FiniteValues
from runtime.monitoring.progress import ProgressMonitor
from statemachine.messages.trainer import WorldPipeline, WorldStage
from statemachine.messages.values import NotFinite
from tests.helpers.fleet import Fleet
from tests.helpers.runtime_support import data_for, script

SAMPLES = 40
SCRIPT = """
class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, value):
        bad = (x == 0).all(1, keepdim=True)
        ctx.save_for_backward(x, weight, bad)
        ctx.value = value
        return torch.where(bad & (value == "output"), torch.nan, x * weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight, bad = ctx.saved_tensors
        input_gradient = torch.where(bad & (ctx.value == "gradient"), torch.nan, gradient * weight)
        broken = bad.any() & (ctx.value == "parameter_gradient")
        return input_gradient, torch.where(broken, torch.inf, (gradient * x).sum(0)), None

class Scale(nn.Module):
    def __init__(self, value=""):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.value = value
    def forward(self, x):
        return Broken.apply(x, self.weight, self.value)

def build(*, value, layer):
    def loss(output, target):
        wrong = (output == 0).all(1, keepdim=True) & (value == "loss")
        return (torch.where(wrong, torch.nan, 1.0) * (output - target) ** 2).mean()
    layers = [Scale(value if number == layer else "") for number in range(4)]
    return Training(layers=layers, loss=loss, optimizer=sgd, dataset=Rows())
"""
PIPELINES = tuple(
    WorldPipeline(
        stages=(
            WorldStage(first_layer=0, end_layer=2, ranks=(2 * number,)),
            WorldStage(first_layer=2, end_layer=4, ranks=(2 * number + 1,)),
        ),
        first_microbatch=2 * number,
        microbatches=2,
    )
    for number in range(2)
)


def places(fleet: Fleet, pipelines: tuple[WorldPipeline, ...], nodes: tuple[str, ...]) -> set[NotFinite]:
    """Train for an epoch and return what the votes of its skipped steps name."""
    fleet.nodes = nodes
    fleet.enter(fleet.engines, pipelines)
    found = set()
    for _ in range(SAMPLES // 8):
        votes = [result.vote for result in fleet.steps(1)]
        assert len({vote.not_finite for vote in votes}) == 1, "all ranks name the same"
        found |= {votes[0].not_finite} if votes[0].skipped else set()
    return found


@pytest.mark.parametrize(
    ("value", "layer", "stage"),
    [
        ("output", 0, 0),
        ("output", 2, 1),
        ("loss", 3, 1),
        ("gradient", 3, 1),
        ("gradient", 2, 1),
        ("gradient", 1, 0),
    ],
)
def test_the_vote_names_the_layer_and_the_node_that_computed_it(
    tmp_path: Path, value: str, layer: int, stage: int
) -> None:
    """Sample 0, on one of the two pipelines, makes one value infinite or NaN, from which others follow."""
    script(tmp_path, SCRIPT)
    arguments = {"value": value, "layer": layer}
    data = data_for("mine.py:build", tmp_path, global_batch=8, microbatch_rows=2, arguments=arguments)
    with Fleet(data, 4, protection="none") as fleet:
        (place,) = places(fleet, PIPELINES, ("a0", "a1", "b0", "b1"))
    assert (place.value, place.layer) == (value, layer)
    assert place.nodes in {(f"a{stage}",), (f"b{stage}",)}, "one pipeline has the sample"


def test_a_parameters_gradient_is_known_as_a_sum_over_its_owners(tmp_path: Path) -> None:
    script(tmp_path, SCRIPT)
    arguments = {"value": "parameter_gradient", "layer": 1}
    data = data_for("mine.py:build", tmp_path, global_batch=8, microbatch_rows=2, arguments=arguments)
    with Fleet(data, 4, protection="none") as fleet:
        (place,) = places(fleet, PIPELINES, ("a0", "a1", "b0", "b1"))
    assert place == NotFinite(layer=1, name="layer 1 (Scale)", value="parameter_gradient", nodes=("a0", "b0"))


def test_values_are_ordered_as_a_step_computes_them() -> None:
    values = FiniteValues(3)
    codes = [values.code("output", layer) for layer in range(3)]
    codes += [values.code("loss", 2)]
    codes += [values.code("gradient", layer) for layer in (2, 1, 0)]
    codes += [values.code("parameter_gradient", layer) for layer in (2, 1, 0)]
    assert codes == sorted(set(codes)) and codes[0] > 0
    assert [values.meaning(code) for code in codes[3:6]] == [("loss", 2), ("gradient", 2), ("gradient", 1)]
    assert values.find_first(ProgressMonitor(), []) == 0
    assert values.find_first(ProgressMonitor(), [0, 1]) == values.code("parameter_gradient", 1)
