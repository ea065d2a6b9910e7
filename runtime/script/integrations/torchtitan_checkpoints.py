"""The protection of torchtitan's ``CheckpointManager``, and so of every trainer that uses one.

torchtitan calls ``load`` before training and ``save`` after each step, and the manager holds all states. With
snapshots, ``load`` restores the newest one, and reads a checkpoint only if there is none; ``save`` takes a
snapshot and then does what it did before; ``close``, which torchtitan calls also after an exception, releases the
snapshots, which stay in memory.
"""

from typing import Any

from runtime.script.plain_state import SnapshotError
from runtime.script.snapshotter import Snapshotter

_PARTS = {"model": "model", "optimizer": "optimizers"}
"""The states that hold several objects, and the attribute that lists them."""


def protect_trained(manager: Any, name: str, every: int, missing: Any, options: dict[str, Any]) -> None:
    """Replace ``load``, ``save`` and ``close`` of this manager.

    :raises SnapshotError: in ``load``, if it should read a checkpoint of some step while there are snapshots.
    """
    snapshots = Snapshotter(name, **_registered(manager.states), **options)
    load, save, close = manager.load, manager.save, manager.close

    def load_newest(step: int = -1) -> bool:
        try:
            return load_either(step)
        except BaseException:
            snapshots.close()  # A notebook may train again in this process.
            raise

    def load_either(step: int) -> bool:
        restored = snapshots.restore(missing=missing)
        if restored is None:
            return bool(load(step=step))
        if step != -1:
            raise SnapshotError(
                f"checkpoint.load_step is {step}, and memory holds a snapshot of step {restored}: remove the "
                "option to continue from there, or protect the run under another name"
            )
        return True

    def save_both(curr_step: int, last_step: bool = False) -> Any:
        if curr_step % every == 0 and not last_step:
            snapshots.snapshot(curr_step)
        result = save(curr_step, last_step=last_step)
        if last_step:
            snapshots.remove()
        return result

    def close_both() -> None:
        try:
            close()
        finally:
            snapshots.close()

    manager.load, manager.save, manager.close = load_newest, save_both, close_both


def _registered(states: dict[str, Any]) -> dict[str, Any]:
    """Return the objects to register: each part of the model and its optimizer by itself, of which a rank keeps
    its own shards, and all other states as they are.
    """
    found: dict[str, Any] = {}
    for key, state in states.items():
        if key in _PARTS:
            parts = getattr(state, _PARTS[key])
            found |= {f"{key}_{number}": part for number, part in enumerate(parts)}
        elif state is not None:
            found[key] = state
    return found
