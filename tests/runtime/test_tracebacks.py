"""Tests of tracebacks for users: they show the user's own lines, or everything if none is the user's."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from runtime.data.batches import map_tensors
from runtime.data.sampling import Sampler
from runtime.tracebacks import describe_error, user_traceback


def message_of(act: Callable[[], object]) -> str:
    with pytest.raises(Exception) as caught:
        act()
    # The test's frames come first, like a trainer's own.
    error = caught.value
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    return user_traceback(error.with_traceback(frame))


SHARD = torch.tensor(3)


def broken(shard: torch.Tensor) -> torch.Tensor:
    raise OSError(f"cannot read shard {shard}")


def test_a_traceback_begins_with_the_users_first_line() -> None:
    text = message_of(lambda: map_tensors(broken, {"shard": SHARD}))
    assert text.startswith("Traceback (most recent call last):\n") and "batches.py" not in text
    assert f'File "{__file__}"' in text and text.endswith("OSError: cannot read shard 3\n")


def test_a_description_has_the_users_innermost_line() -> None:
    def transform(_: object) -> torch.Tensor:
        made: torch.Tensor = nn.Linear(2, 2)(torch.zeros(3))  # Torch's frames are below.
        return made

    for act, said in (
        (
            lambda: map_tensors(broken, [SHARD]),
            r"OSError: cannot read shard 3 \(test_tracebacks.py, line \d+, in broken\)",
        ),
        (
            lambda: map_tensors(transform, [SHARD]),
            r"RuntimeError: .* \(test_tracebacks.py, line \d+, in transform\)",
        ),
    ):
        with pytest.raises(Exception) as caught:
            act()
        assert re.fullmatch(said, describe_error(caught.value), re.DOTALL)
    assert describe_error(ValueError("of nobody")) == "ValueError: of nobody"


def test_an_exception_without_a_line_of_the_user_is_shown_whole() -> None:
    text = message_of(lambda: Sampler(0, 4, 0))
    assert "sampling.py" in text and text.endswith("ValueError: 0 samples for a global batch of 4\n")
    assert "torch" in message_of(lambda: nn.Linear(2, 2)(torch.zeros(3)))
