"""Training and evaluation mode of a model's modules.

A module that the user put into evaluation mode (frozen batch normalisation, say) stays there while the model
trains. This cannot hold for models that ``from_pretrained`` returned: all their modules are in evaluation
mode, in which nobody means to train them.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn


class ModuleModes:
    """The modes that the modules of ``root`` have in training: those that they have now."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._modes = [(module, module.training) for module in root.modules()]
        self._in_training = True

    def set_training(self, train: bool) -> None:
        """Give the modules their modes in training, or put all of them into evaluation mode."""
        if train == self._in_training:
            return
        self._in_training = train
        # The user's classes may override ``train``, so setting the attribute does not suffice.
        self._root.train(train)
        if train:
            for module, mode in self._modes:
                module.training = mode


@contextmanager
def evaluating(root: nn.Module) -> Iterator[None]:
    """Put all modules of ``root`` into evaluation mode within this context."""
    modes = ModuleModes(root)
    modes.set_training(False)
    try:
        yield
    finally:
        modes.set_training(True)


def begin_training(roots: Sequence[nn.Module]) -> None:
    """Put the modules of a model into training mode, except for those that the user put into evaluation mode.

    If all of ``roots`` are in evaluation mode, everything is put into training mode, and so is everything in a
    pretrained model that is part of them, is in evaluation mode, and has trainable parameters.
    """
    if not any(root.training for root in roots):
        for root in roots:
            root.train()
        return
    for root in roots:
        for part in _pretrained_models(root):
            if not part.training and any(parameter.requires_grad for parameter in part.parameters()):
                part.train()
        chosen = [module for module in root.modules() if not module.training]
        root.train()
        for module in chosen:
            module.training = False


def _pretrained_models(root: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost models of Hugging Face in ``root``."""
    transformers = sys.modules.get("transformers.modeling_utils")
    if transformers is not None and isinstance(root, transformers.PreTrainedModel):
        yield root
        return
    for child in root.children():
        yield from _pretrained_models(child)
