"""A training function for tests: a model of the table of architectures, by name, completely in float64."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))
from runtime.training import Training
from tests.helpers import architectures


def build(architecture: str, options: dict[str, Any], delay_s: float = 0.0) -> Training:
    """Return the training; ``delay_s`` slows each microbatch down without using the processor."""
    architectures.take_out_casts(setattr)

    def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        time.sleep(delay_s)
        return architectures.pad(samples)

    return replace(architectures.build(architecture, options, variable=True), collate=collate)
