"""What a user is shown of an exception: their own lines, and all of it where none is theirs."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from runtime.data.sampling import Sampler
from runtime.tracebacks import users_traceback


def told(act: Callable[[], object]) -> str:
    with pytest.raises(Exception) as caught:
        act()
    # Behind the frames of the test, as in a trainer, whose own come first.
    error = caught.value
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    return users_traceback(error.with_traceback(frame))


class Broken:
    def __getitem__(self, index: int) -> None:
        raise OSError(f"cannot read shard {index}")


def test_a_traceback_begins_with_the_users_first_line() -> None:
    text = told(lambda: Sampler(8, 4, 0).load(Broken(), [3]))
    assert text.startswith("Traceback (most recent call last):\n") and "sampling.py" not in text
    assert f'File "{__file__}"' in text and text.endswith("OSError: cannot read shard 3\n")


def test_an_exception_without_a_line_of_the_user_is_told_whole() -> None:
    text = told(lambda: Sampler(0, 4, 0))
    assert "sampling.py" in text and text.endswith("ValueError: 0 samples for a global batch of 4\n")
    assert "torch" in told(lambda: nn.Linear(2, 2)(torch.zeros(3)))
