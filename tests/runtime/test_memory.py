"""Out of memory in a step: the message names the stage, the bytes by use, and what would make it fit."""

from pathlib import Path

from statemachine.messages import trainer as p
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
