"""Names for scripts: ``from ftd import Snapshotter``. The daemons import this package, too, and not torch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.data.sampling import sample_indices as sample_indices
    from runtime.script.plain_state import SnapshotError as SnapshotError
    from runtime.script.snapshotter import Snapshotter as Snapshotter


def __getattr__(name: str) -> Any:
    if name == "Snapshotter":
        from runtime.script.snapshotter import Snapshotter

        return Snapshotter
    if name == "SnapshotError":
        from runtime.script.plain_state import SnapshotError

        return SnapshotError
    if name == "sample_indices":
        from runtime.data.sampling import sample_indices

        return sample_indices
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
