"""A GPU with the interface that the tests of late devices use."""

from contextlib import AbstractContextManager

import torch

from runtime.device import CudaRuntime


class CudaComputing(CudaRuntime):
    """The runtime of a GPU.
    :param number: index of the GPU.
    """

    def __init__(self, number: int = 0) -> None:
        super().__init__(torch.device("cuda", number))

    def computing(self) -> AbstractContextManager[object]:
        """Create new tensors on the device within this context."""
        return self.device

    def end(self) -> None:
        self.synchronize()
