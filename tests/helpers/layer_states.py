"""A trainer's layers and optimizer, without processes."""

import torch

from runtime.data.batches import default_collate
from runtime.data.sampling import Sampler
from runtime.device import DeviceRuntime
from runtime.layers.model import Model
from runtime.layers.optimizer import Optimization
from runtime.layers.state import LayerStates
from tests.helpers.reference import load
from tests.helpers.runtime_support import gpt_data


class Trainer:
    """A model and optimizer that train all layers in this process."""

    def __init__(
        self, precision: str = "float64", dropout: float = 0.1, runtime: DeviceRuntime | None = None
    ) -> None:
        self.data = gpt_data(precision=precision, arguments={"dropout": dropout})
        self.training = load(self.data)
        self.model = Model(self.training, self.data, runtime=runtime)
        self.optimization = Optimization(self.model)
        self.states = LayerStates(self.model, self.optimization)
        self.layers = range(self.model.layer_count)
        self.sampler = Sampler(len(self.training.dataset), self.data.global_batch, self.data.seed)

    def step(self, step: int) -> float:
        x, target = default_collate([self.training.dataset[index] for index in self.sampler.indices(step)])
        output = self.model.forward(0, len(self.layers), x, step=step, row=0)
        loss = self.training.loss(output, target)
        torch.autograd.backward(loss)
        self.optimization.step(self.layers)
        for _, parameter in self.model.named_parameters(self.layers):
            parameter.grad = None
        return loss.item()

    def digests(self) -> list[str]:
        return [self.states.digest(layer) for layer in self.layers]
