"""The states of the random numbers that a script draws from: torch's, numpy's and Python's, and its own."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Generator = torch.Generator | np.random.Generator | np.random.RandomState | random.Random


@dataclass(frozen=True, slots=True)
class GeneratorState:
    """One that the script made for itself, as what has ``state_dict``."""

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
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=False),
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """What ``random_states`` returned; the device's only where there is one."""
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
