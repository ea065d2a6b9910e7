"""The public interface: ``from ftd import Training, Snapshotter``.

The names are loaded when they are used first, because the daemons import this package too, and they never import torch.
``ftd.__version__`` is the version of the installed package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str

    from runtime.data.sampling import sample_indices as sample_indices
    from runtime.errors import TrainingError as TrainingError
    from runtime.loading import load_checkpoint as load_checkpoint
    from runtime.script.integrations.protect import protect as protect
    from runtime.script.plain_state import SnapshotError as SnapshotError
    from runtime.script.snapshotter import Snapshotter as Snapshotter
    from runtime.training import StepInfo as StepInfo
    from runtime.training import Training as Training

__all__ = [
    "SnapshotError",
    "Snapshotter",
    "StepInfo",
    "Training",
    "TrainingError",
    "__version__",
    "load_checkpoint",
    "protect",
    "sample_indices",
]

_MODULES = {
    "Snapshotter": "runtime.script.snapshotter",
    "SnapshotError": "runtime.script.plain_state",
    "StepInfo": "runtime.training",
    "Training": "runtime.training",
    "TrainingError": "runtime.errors",
    "load_checkpoint": "runtime.loading",
    "protect": "runtime.script.integrations.protect",
    "sample_indices": "runtime.data.sampling",
}


def __getattr__(name: str) -> Any:
    """Load a public name on its first use.

    Raises:
        AttributeError: ftd has no such public name.
    """
    if name == "__version__":
        value: Any = import_module("importlib.metadata").version("ftd")
    elif name in _MODULES:
        value = getattr(import_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value
