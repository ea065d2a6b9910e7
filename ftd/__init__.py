"""Names for scripts: ``from ftd import Snapshotter``. The daemons import this package, too, and not torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.data.sampling import sample_indices as sample_indices
    from runtime.loading import load_checkpoint as load_checkpoint
    from runtime.script.plain_state import SnapshotError as SnapshotError
    from runtime.script.snapshotter import Snapshotter as Snapshotter
    from runtime.training import StepInfo as StepInfo
    from runtime.training import Training as Training
    from runtime.training import TrainingError as TrainingError

_MODULES = {
    "Snapshotter": "runtime.script.snapshotter",
    "SnapshotError": "runtime.script.plain_state",
    "StepInfo": "runtime.training",
    "Training": "runtime.training",
    "TrainingError": "runtime.training",
    "load_checkpoint": "runtime.loading",
    "sample_indices": "runtime.data.sampling",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
