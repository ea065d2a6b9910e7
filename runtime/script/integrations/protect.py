"""``protect``: one line that protects a script, for the trainers that ftd knows and for loops of one's own."""

from importlib import import_module
from typing import Any

from torch.utils.data import DataLoader

from runtime.script.integrations.protected_loader import ProtectedLoader
from runtime.script.plain_state import SnapshotError

_TRAINERS = {
    ("transformers", "Trainer"): "transformers_trainer",
    ("pytorch_lightning", "Trainer"): "lightning_trainer",
    ("lightning", "Trainer"): "lightning_trainer",
    ("torchtitan", "CheckpointManager"): "torchtitan_checkpoints",
}
"""The module whose ``protect_trained`` protects a class, by the package that defines the class and the class's
name.
"""


def protect(trained: Any, name: str, /, *, every: int = 1, missing: str = "raise", **options: Any) -> Any:
    """Keep a script's state in host memory, and restore it when the script is started again.

    Everything that training needs to continue with the same losses is found by itself: parameters,
    optimizers, schedules, random states and the position in the data. docs/tutorials/scripts.md shows the
    line for each kind of script and says what is not restored.

    Examples:
        >>> protect(trainer, "my-run")  # transformers or Lightning, before train() or fit()
        >>> protect(trainer.checkpointer, "my-run")  # torchtitan, before train()
        >>> loader = protect(loader, "my-run", epochs=3, model=model, optimizer=optimizer)
        >>> loader = protect(loader, "my-run", epochs=3, accelerator=accelerator)

    Args:
        trained: A Hugging Face or Lightning ``Trainer``, torchtitan's ``CheckpointManager``, or the data
            loader over which the script's own loop runs.
        name: Name of the job, as that of a ``Snapshotter``.
        every: Number of steps from one snapshot to the next.
        missing: What to do if there are snapshots and none can be restored: ``raise`` or ``fresh``, as in
            ``Snapshotter.restore``.
        options: For a data loader ``epochs`` (how often the script runs over it) and, with accelerate,
            ``accelerator``. All others are those of ``Snapshotter``: ``protection``, ``directory``, and
            further objects to save.

    Returns:
        ``trained`` itself, or for a data loader the one to use instead.

    Raises:
        SnapshotError: ``trained`` is something else, or a value cannot be used.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise SnapshotError(f"protect: every must be a number of steps from 1 on, not {every!r}")
    if isinstance(trained, DataLoader):
        return ProtectedLoader(trained, name, every, missing, **options)
    module = _module_of(trained)
    if module is None:
        raise SnapshotError(
            f"protect cannot protect a {type(trained).__qualname__}: pass a Trainer of transformers or "
            "Lightning, torchtitan's trainer.checkpointer, or your data loader (of torch or accelerate). For "
            "any other loop use Snapshotter"
        )
    integration = import_module(f"runtime.script.integrations.{module}")
    integration.protect_trained(trained, name, every, missing, options)
    return trained


def _module_of(trained: Any) -> str | None:
    """Return the module that protects the object; no library is imported to find out."""
    for kind in type(trained).__mro__:
        if known := _TRAINERS.get((kind.__module__.partition(".")[0], kind.__name__)):
            return known
    return None
