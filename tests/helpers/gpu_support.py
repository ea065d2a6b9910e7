"""A GPU as the tests of late devices take one."""

from contextlib import AbstractContextManager

import torch

from runtime.device import CudaRuntime


class CudaComputing(CudaRuntime):
    """:param number: of the GPU."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(torch.device("cuda", number))

    def computing(self) -> AbstractContextManager[object]:
        """New tensors are made on the device."""
        return self.device

    def end(self) -> None:
        self.synchronize()
