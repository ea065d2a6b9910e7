"""The plain loop that all distributed runs are compared with: one process, one model, no pipelines."""

import math

import torch

from runtime.data.batches import cast_floating, default_collate, to_device
from runtime.data.loader import BatchLoader
from runtime.data.reading import BatchReader
from runtime.data.sampling import Sampler
from runtime.layers.model import Model
from runtime.layers.optimizer import Optimization
from runtime.precision import PRECISIONS
from runtime.training import Training, load_training, torch_device
from statemachine.messages.trainer import TrainingData
from statemachine.messages.values import batch_of


def reference_losses(
    training: Training, data: TrainingData, steps: int, skipped_batches: tuple[int, ...] = ()
) -> list[float]:
    """Return the mean loss over the global batch for each of the first ``steps`` steps."""
    return reference_run(training, data, steps, skipped_batches)[0]


def reference_run(
    training: Training, data: TrainingData, steps: int, skipped_batches: tuple[int, ...] = ()
) -> tuple[list[float], Model]:
    """Return the losses and the trained model. This changes ``training``'s layers: load it again for another
    run.

    :param skipped_batches: batches that are left out, in rising order.
    """
    device = torch_device(data)
    model = Model(training, data, device)
    optimization = Optimization(model)
    sampler = Sampler(len(training.dataset), data.global_batch, data.seed)
    reader = BatchReader(
        training.dataset,
        training.collate,
        sampler,
        microbatch_rows=data.microbatch_rows,
        seed=data.seed,
        dtype=PRECISIONS[data.precision].parameters,
    )
    loader = BatchLoader(reader)
    everything = range(model.layer_count)
    model.provide(everything)
    rows, microbatches = data.microbatch_rows, data.global_batch // data.microbatch_rows
    losses: list[float] = []
    for step in range(1, steps + 1):
        total = total_weight = 0.0
        for microbatch in range(microbatches):
            batch = to_device(loader.load(batch_of(step, skipped_batches), microbatch), device)
            output = model.forward(0, model.layer_count, None, step=step, row=microbatch * rows, batch=batch)
            loss, weight = model.loss(output, batch, rows)
            torch.autograd.backward(loss)
            total += loss.item()
            total_weight += float(weight)
        parameters = [parameter for _, parameter in model.named_parameters(everything)]
        gradients = [p.grad.div_(total_weight) for p in parameters if p.grad is not None]
        norm = math.sqrt(sum(g.double().square().sum().item() for g in gradients))
        if data.clip_gradient_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, data.clip_gradient_norm)
        optimization.step(everything, skipped=not math.isfinite(norm))
        for parameter in parameters:
            parameter.grad = None
        losses.append(total / total_weight)
    return losses, model


def reference_evaluation(model: Model, training: Training, data: TrainingData) -> tuple[float, float]:
    """Return the mean loss over the held-out data set, in its order, and its weight."""
    length, rows = len(training.evaluation or ()), data.microbatch_rows
    if data.evaluation_batches:
        length = min(length, data.evaluation_batches * data.global_batch)
    total = total_weight = 0.0
    for start in range(0, length, rows):
        samples = [training.evaluation[index] for index in range(start, min(start + rows, length))]
        batch = cast_floating(
            (training.collate or default_collate)(samples), PRECISIONS[data.precision].parameters
        )
        batch = to_device(batch, model.device)
        output = model.forward(0, model.layer_count, None, step=0, row=0, batch=batch, train=False)
        loss, weight = model.loss(output, batch, len(samples))
        total += loss.item()
        total_weight += float(weight)
    return total / total_weight, total_weight


def load(data: TrainingData) -> Training:
    """Call ``load_training`` without leaving torch's generator seeded for the next test."""
    with torch.random.fork_rng(devices=[]):
        return load_training(data)
