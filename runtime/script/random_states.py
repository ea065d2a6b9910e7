"""The states of random generators: the global ones of torch, numpy and Python, and those that a script made
itself.
"""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


@dataclass(frozen=True, slots=True)
class GeneratorState:
    """A generator that the script made, with ``state_dict`` and ``load_state_dict``."""

    generator: Generator

    def state_dict(self) -> dict[str, Any]:
        match self.generator:
            case torch.Generator() as made:
                return {"torch": made.get_state()}
            case np.random.Generator() as made:
                return {"numpy": made.bit_generator.state}
            case np.random.RandomState() as made:
                return {"numpy": made.get_state(legacy=False)}
            case made:
                return {"python": made.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        match self.generator:
            case torch.Generator() as made:
                made.set_state(state["torch"])
            case np.random.Generator() as made:
                made.bit_generator.state = state["numpy"]
            case np.random.RandomState() as made:
                made.set_state(state["numpy"])
            case made:
                made.setstate(state["python"])


def random_states() -> dict[str, Any]:
    """Return the states of the global generators of torch, numpy and Python, and of the CUDA device if
    it is in use.
    """
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Restore the result of ``random_states``; the CUDA state only where there is a device."""
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
