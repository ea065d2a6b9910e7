"""The protection of a Lightning ``Trainer`` (``pytorch_lightning`` and ``lightning``).

A callback restores the newest snapshot after Lightning has set up the model and the optimizers, and gives the
loops their state, as Lightning's own checkpoints do. Lightning does not continue within an epoch of a data
loader that has no state; a ``ResumableLoader`` does that.
"""

from importlib import import_module
from typing import Any

from runtime.script.integrations.resumable_loader import ResumableLoader, ResumePoint
from runtime.script.plain_state import SnapshotError
from runtime.script.random_states import random_states
from runtime.script.snapshotter import Snapshotter


def protect_trained(trainer: Any, name: str, every: int, missing: Any, options: dict[str, Any]) -> None:
    """Add the callback to the trainer, after its other callbacks."""
    package = next(p for k in type(trainer).__mro__ if (p := _package_of(k)))
    callback = import_module(f"{package}.callbacks").Callback
    kind = type("SnapshotCallback", (SnapshotHooks, callback), {})
    trainer.callbacks.append(kind(name, every, missing, options))


def _package_of(kind: type) -> str:
    root = kind.__module__.partition(".")[0]
    return {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}.get(root, "")


class SnapshotHooks:
    """The hooks of the callback, without Lightning's base class, which has two names."""

    def __init__(self, name: str, every: int, missing: Any, options: dict[str, Any]) -> None:
        self._name = name
        self._every = every
        self._missing = missing
        self._options = options
        self._last_step = 0
        self._snapshots: Snapshotter | None = None
        self._loaders: list[ResumableLoader] = []
        # The position in the epoch: the number of batches, and each loader's states at the epoch's beginning.
        self._position: dict[str, Any] = {"batches": 0, "starts": []}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        strategy = trainer.strategy
        objects = {
            "model": strategy.model,
            "loops": trainer.fit_loop,
            "callbacks": CallbackStates(trainer, self),
            "precision": trainer.precision_plugin,
            "position": self._position,
        }
        objects |= {f"optimizer_{n}": optimizer for n, optimizer in enumerate(strategy.optimizers)}
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        objects |= {f"scheduler_{n}": scheduler for n, scheduler in enumerate(schedulers)}
        self._snapshots = Snapshotter(self._name, **objects, **self._options)
        restored = self._snapshots.restore(missing=self._missing)
        self._random = random_states()
        if restored is not None:
            self._last_step = restored
            # A checkpoint that the script named (``ckpt_path``) would be loaded next, over the newer state.
            trainer._checkpoint_connector._loaded_checkpoint = {}
        self._make_resumable(trainer.fit_loop, resumes=restored is not None)

    def _make_resumable(self, fit_loop: Any, *, resumes: bool) -> None:
        """Replace the data loaders when the loop has made them, which is before it begins to read them."""
        load_states = fit_loop._load_combined_loader_states

        def wrap_and_load_states() -> None:
            nonlocal resumes
            load_states()
            combined = fit_loop._combined_loader
            combined.flattened = self._loaders = [ResumableLoader(loader) for loader in combined.flattened]
            starts = self._position["starts"] if resumes else []
            for loader, start in zip(self._loaders, starts, strict=False):
                batches = self._position["batches"]
                loader.resume(ResumePoint(start=start, batches=batches, random=self._random))
            resumes = False

        fit_loop._load_combined_loader_states = wrap_and_load_states

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.num_training_batches == 1:
            raise SnapshotError(
                "protect: Lightning cannot continue training whose epochs have one batch each: let an epoch have "
                "several (the data repeated), and train fewer epochs"
            )

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step - self._last_step < self._every:
            return
        if trainer.is_last_batch:
            return  # Validation and the end of the epoch follow. The next step has its snapshot after them.
        progress = trainer.fit_loop.epoch_loop.batch_progress
        self._position["batches"] = progress.current.ready
        self._position["starts"] = [loader.start for loader in self._loaders]
        assert self._snapshots is not None
        self._snapshots.snapshot(step)
        self._last_step = step

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert self._snapshots is not None
        self._snapshots.remove()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Release the snapshots, which stay in memory: a notebook may train again in this process."""
        if self._snapshots is not None:
            self._snapshots.close()


class CallbackStates:
    """The states of a trainer's other callbacks, such as early stopping and the best checkpoint."""

    def __init__(self, trainer: Any, own: Any) -> None:
        self._trainer = trainer
        self._own = own

    def state_dict(self) -> dict[str, Any]:
        return {c.state_key: state for c in self._others() if (state := c.state_dict())}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        for callback in self._others():
            if callback.state_key in states:
                callback.load_state_dict(states[callback.state_key])

    def _others(self) -> list[Any]:
        return [c for c in self._trainer.callbacks if c is not self._own]
