"""Validation of a checkpoint of examples/mlp.toml on held-out points, while training continues.

    python examples/scripts/validate.py CHECKPOINTS

CHECKPOINTS is the url of the job's [checkpoint] table; --step 1000 selects a step, by default the newest.
"""

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from runtime.checkpoint_reader import FtdCheckpointReader

sys.path.insert(0, str(Path(__file__).parent.parent))
from mlp import Spirals, build


def validate(url: str, step: int | None = None, samples: int = 3000) -> tuple[float, float]:
    """Return the mean loss and the accuracy."""
    training = build()
    model = nn.Sequential(*training.layers).to(torch.float64)
    state = {"model": model.state_dict()}
    dcp.load(state, storage_reader=FtdCheckpointReader(url, step=step), no_dist=True)
    model.load_state_dict(state["model"])
    model.eval()  # disables dropout, and batch normalisation uses its running statistics
    torch.manual_seed(10_000)  # the job's data set is drawn from another seed
    held_out = Spirals(samples, arms=3, noise=0.15)
    with torch.no_grad():
        output = model(held_out.points)
    right = (output.argmax(dim=1) == held_out.arm).to(torch.float64).mean()
    return float(training.loss(output, held_out.arm)), float(right)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("checkpoints", help="directory or URL")
    options.add_argument("--step", type=int, help="default: the newest")
    given = options.parse_args()
    loss, right = validate(given.checkpoints, given.step)
    print(f"loss {loss:.4f}, {right:.1%} right")


if __name__ == "__main__":
    main()
