"""Do all owners of a layer begin with the same parameters? If not, no step may be taken with them.

A training function that draws from an unseeded generator, or walks over a set, makes another model on each
trainer. Gradients are summed all the same and losses look well, but replicas are none: what a failure leaves
is a mixture.
"""

from collections.abc import Mapping

import torch

from runtime.groups.communicator import Communicator
from runtime.monitoring.progress import ProgressMonitor
from runtime.training import TrainingError

_BITS = 20
"""Of a word: its square, summed over up to 2^13 owners, is exact in float64."""
_WORDS = 3


def check_model_agreement(
    digests: Mapping[int, str],
    layer_count: int,
    communicator: Communicator,
    device: torch.device,
    monitor: ProgressMonitor,
) -> None:
    """All ranks of the world meet here, in one sum.

    Numbers are equal where their number times the sum of their squares is the square of their sum
    (Cauchy and Schwarz), so nobody needs to know who owns what.

    :param digests: of the parameters of each layer that this rank owns, hexadecimal.
    :raises TrainingError: the owners of a layer do not agree.
    :raises CommunicationError: aborted, or a peer is lost.
    """
    sums = torch.zeros(layer_count, _WORDS, 3, dtype=torch.float64)
    for layer, digest in digests.items():
        for word in range(_WORDS):
            value = int(digest, 16) >> (word * _BITS) & (1 << _BITS) - 1
            sums[layer, word] = torch.tensor([1, value, value * value])
    sums = sums.to(device)
    pending = communicator.all_reduce(sums, communicator.world)
    with monitor.idle():
        communicator.confirm(pending)
    unlike = [
        layer
        for layer, words in enumerate(monitor.read_values(sums))
        if any(int(count) * int(squares) != int(total) ** 2 for count, total, squares in words)
    ]
    if unlike:
        raise TrainingError(
            f"trainers began with different parameters of layer {unlike[0]}: the training function must make "
            "the same on each of them. Generators of torch, random and numpy are seeded; others, the order "
            "of a set, the clock and the host are not"
        )
