"""Out of memory in a step: the message names the stage, the bytes by use, and what would make it fit."""

from pathlib import Path

import pytest
import torch

from runtime.engine.engine import Engine
from runtime.engine.memory import check_planned_memory, explain_out_of_memory, usable_memory_bytes
from runtime.errors import TrainingError
from statemachine.messages import trainer as p
from tests.helpers.fleet import Fleet
from tests.helpers.harness import Cluster, pipeline
from tests.helpers.runtime_support import data_for, script

GREEDY = """
class Greedy(nn.Linear):
    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            torch.empty(1 << 50)
        return super().forward(x)

def build():
    return Training(
        layers=[nn.Linear(3, 512), Greedy(512, 1)], loss=functional.mse_loss, optimizer=sgd, dataset=Rows()
    )
"""


def test_out_of_memory_in_the_first_step_reports_memory_by_use(tmp_path: Path) -> None:
    script(tmp_path, GREEDY)
    with Cluster() as cluster:
        trainers = cluster.fork(1)
        cluster.prepare(trainers, data_for("mine.py:build", tmp_path))
        cluster.quiesce(trainers)
        cluster.resume(trainers, (pipeline((0, 2, [0]), first_microbatch=0, microbatches=4),), step=0)
        raised = trainers[0].take(p.Raised)
    assert raised.where == "training"
    for words in (
        "out of memory in the stage of layers 0 to 1",
        "optimizer state 0 MiB so far",
        "a smaller training.microbatch",
        "The allocation that failed",
    ):
        assert words in raised.detail


WHOLE = 4  # MiB of the parameters of the model below
HALVES = (
    pipeline((0, 3, [0]), first_microbatch=0, microbatches=2),
    pipeline((0, 3, [1]), first_microbatch=2, microbatches=2),
)
SHARDS = (pipeline((0, 3, [0, 1]), first_microbatch=0, microbatches=4, sharded=True),)


@pytest.mark.parametrize(
    ("zero1", "plan", "parameters", "gradients"),
    [(False, SHARDS, WHOLE // 2, WHOLE // 2), (True, HALVES, WHOLE, WHOLE)],
    ids=["shards", "zero1"],
)
def test_memory_by_use_is_that_of_the_parts_that_a_rank_has(
    tmp_path: Path, zero1: bool, plan: tuple[p.WorldPipeline, ...], parameters: int, gradients: int
) -> None:
    script(
        tmp_path,
        """
        def adam(named):
            return torch.optim.Adam([parameter for _, parameter in named])

        def build():
            layers = [nn.Linear(3, 1 << 16), nn.Linear(1 << 16, 4), nn.Linear(4, 1)]
            return Training(layers=layers, loss=functional.mse_loss, optimizer=adam, dataset=Rows())
        """,
    )
    data = data_for("mine.py:build", tmp_path, zero1=zero1, within_node="replicate" if zero1 else "shard")
    with Fleet(data, 2) as fleet:
        fleet.enter(fleet.engines, plan)
        engine = fleet.engines[0]
        said = [_explain(engine)]
        fleet.steps(1)
        said.append(_explain(engine))
    assert f"optimizer state 0 MiB so far (Adam keeps {WHOLE} MiB)" in said[0]
    words = f"parameters {parameters} MiB, gradients {gradients} MiB, optimizer state {WHOLE} MiB,"
    assert words in said[1]


def _explain(engine: Engine) -> str:
    return explain_out_of_memory(MemoryError(), engine.model, engine.optimization, engine.owned_layers, 4)


def test_a_device_with_less_memory_than_planned_refuses_with_both_numbers() -> None:
    cpu = torch.device("cpu")
    assert usable_memory_bytes(cpu) is None and usable_memory_bytes(cpu, 10) == 10
    for usable, planned in ((None, 7), (7, None), (7, 7), (8, 7)):
        check_planned_memory(0, usable, planned)
    with pytest.raises(
        TrainingError, match=r"device 1 of this node has 1048576 bytes .* assume 2097152 bytes"
    ):
        check_planned_memory(1, 1 << 20, 2 << 20)


def test_the_memory_to_submit_the_job_with_is_there() -> None:
    usable = 81_089 * (1 << 20) + 600_000
    with pytest.raises(TrainingError, match=r"planner\.device_memory_mib = [\d.]+$") as rejected:
        check_planned_memory(0, usable, 2 * usable)
    mib = float(str(rejected.value).rpartition(" ")[2])
    assert mib > 81_088
    check_planned_memory(0, usable, int(mib * (1 << 20)))
