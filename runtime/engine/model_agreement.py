"""Check before the first step that all owners of a layer have the same parameters.

A training function that draws from an unseeded generator, or iterates over a set, creates a different model
on each trainer. Gradients would still be summed and losses would look plausible, but the replicas would
differ, and after a failure the survivors' state would be a mixture.
"""

from collections.abc import Mapping

import torch

from runtime.errors import TrainingError
from runtime.groups.communicator import Communicator
from runtime.monitoring.progress import ProgressMonitor

_BITS = 20
"""Bits of a word: the square of a word, summed over up to 2^13 owners, is exact in float64."""
_WORDS = 3


def check_model_agreement(
    digests: Mapping[int, str],
    layer_count: int,
    communicator: Communicator,
    device: torch.device,
    monitor: ProgressMonitor,
) -> None:
    """Compare the digests of all owners of each layer with one sum over all ranks of the world.

    Numbers are equal exactly if their count times the sum of their squares is the square of their sum
    (Cauchy and Schwarz), so no rank needs to know who owns what.

    :param digests: digests of the parameters of each layer that this rank owns, hexadecimal.
    :raises TrainingError: the owners of a layer do not agree.
    :raises CommunicationError: the group was aborted, or a peer is lost.
    """
    sums = torch.zeros(layer_count, _WORDS, 3, dtype=torch.float64)
    for layer, digest in digests.items():
        for word in range(_WORDS):
            value = int(digest, 16) >> (word * _BITS) & (1 << _BITS) - 1
            sums[layer, word] = torch.tensor([1, value, value * value])
    sums = sums.to(device)
    pending = communicator.all_reduce(sums, communicator.world)
    with monitor.idle():
        communicator.wait(pending)
    unlike = [
        layer
        for layer, words in enumerate(monitor.read_values(sums))
        if any(int(count) * int(squares) != int(total) ** 2 for count, total, squares in words)
    ]
    if unlike:
        raise TrainingError(
            f"trainers began with different parameters of layer {unlike[0]}: the training function must create "
            "the same model on each trainer. ftd seeds the generators of torch, random and numpy; do not use other "
            "generators, the order of a set, the clock or the host"
        )
