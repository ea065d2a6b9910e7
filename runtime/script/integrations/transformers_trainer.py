"""The protection of a Hugging Face ``Trainer``.

A callback saves a snapshot at the beginning of the next step: then the ``Trainer`` has logged, evaluated and
saved what belongs to the step before. To continue, the ``Trainer``'s own way to resume within an epoch is used
(``_run_epoch`` skips the batches that were used), with the state from memory instead of a checkpoint's files.
"""

import os
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from runtime.script.plain_state import SnapshotError
from runtime.script.random_states import random_states, set_random_states
from runtime.script.snapshotter import Snapshotter

_OF_STATE = (
    "global_step", "epoch", "total_flos", "num_input_tokens_seen", "best_metric", "best_global_step",
    "best_model_checkpoint",
)  # fmt: skip
_OF_TRAINER = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos")
"""The mean loss that ``train()`` returns is the total loss by the steps since the initial one; a checkpoint that the
script names as well sets another initial one.
"""
_NO_CHECKPOINT = os.devnull
"""A path in which the ``Trainer`` finds no file with random states, since ftd sets them."""


def protect_trained(trainer: Any, name: str, every: int, missing: Any, options: dict[str, Any]) -> None:
    """Add the callback, and let the ``Trainer`` begin with the step after the restored one.

    :raises SnapshotError: this version of transformers runs its epochs in another way.
    """
    run_epoch = getattr(trainer, "_run_epoch", None)
    if run_epoch is None:
        raise SnapshotError(
            "protect knows the Trainer of transformers 5.23, and this version has no Trainer._run_epoch: "
            "pip install 'ftd[hf]' installs one that has"
        )
    callback = SnapshotCallback(trainer, name, every, missing, options)
    trainer.add_callback(callback)

    def run_what_is_left(**arguments: Any) -> None:
        step = callback.restored_step
        if step is not None:
            if step >= trainer.state.max_steps:
                return
            epoch, steps = divmod(step, arguments["num_update_steps_per_epoch"])
            if arguments["epoch"] < epoch:
                return
            if arguments["epoch"] > epoch:
                _start_staying_workers(arguments["train_dataloader"])
            if arguments["epoch"] == epoch:
                batches = (
                    0 if trainer.args.ignore_data_skip else steps * trainer.args.gradient_accumulation_steps
                )
                arguments |= {
                    "resume_from_checkpoint": _NO_CHECKPOINT,
                    "epochs_trained": epoch,
                    "steps_trained_in_current_epoch": batches,
                }
        try:
            run_epoch(**arguments)
        except BaseException:
            callback.close()  # A notebook may train again in this process.
            raise

    trainer._run_epoch = run_what_is_left


def _start_staying_workers(loader: Any) -> None:
    """Start the workers of a loader whose workers stay (``dataloader_persistent_workers``), and keep the random states.

    Without the restart they would be there since the first epoch, and a loader draws a number for new ones. In the
    epoch that was interrupted, another loader reads what was left.
    """
    base = getattr(loader, "base_dataloader", loader)
    if base.persistent_workers and base._iterator is None:
        states = random_states()
        iter(base)
        set_random_states(states)


class SnapshotCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed.
    """The callback that restores the newest snapshot when training begins, and saves one every few steps."""

    def __init__(self, trainer: Any, name: str, every: int, missing: Any, options: dict[str, Any]) -> None:
        self._trainer = trainer
        self._name = name
        self._every = every
        self._missing = missing
        self._options = options
        self._snapshots: Snapshotter | None = None
        self.restored_step: int | None = None
        self._random: dict[str, Any] | None = None
        """The random states of the first step after the restored one, until it begins."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        trainer = self._trainer
        self._snapshots = Snapshotter(
            self._name, **_trained_objects(trainer), progress=TrainerProgress(trainer), **self._options
        )
        try:
            self.restored_step = self._snapshots.restore(missing=self._missing)
        except BaseException:
            self.close()
            raise
        if self.restored_step is not None:
            self._random = random_states()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._random is not None:
            set_random_states(self._random)
            self._random = None
        elif state.global_step > 0 and state.global_step % self._every == 0:
            assert self._snapshots is not None
            self._snapshots.snapshot(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self._snapshots is not None
        self._snapshots.remove()

    def close(self) -> None:
        """Release the snapshots, which stay in memory, after an exception."""
        if self._snapshots is not None:
            self._snapshots.close()


def _trained_objects(trainer: Any) -> dict[str, Any]:
    """Return model, optimizer, schedule and gradient scaler as the ``Trainer`` has them during training."""
    found = {
        "model": trainer.model_wrapped,
        "optimizer": trainer.optimizer,
        "scheduler": trainer.lr_scheduler,
    }
    if trainer.accelerator.scaler is not None:
        found["scaler"] = trainer.accelerator.scaler
    return found


class TrainerProgress:
    """The numbers of a ``Trainer`` that continue after a restart: steps, the loss that is not logged yet, the best
    metric, and what callbacks such as early stopping remember. The history of logs is not kept.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "state": {name: getattr(trainer.state, name) for name in _OF_STATE},
            "trainer": {name: getattr(trainer, name) for name in _OF_TRAINER},
            "loss": trainer._tr_loss,
            "callbacks": {name: callback.state()["attributes"] for name, callback in self._with_state()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self._trainer
        for name, value in state["state"].items():
            setattr(trainer.state, name, value)
        for name, value in state["trainer"].items():
            setattr(trainer, name, value)
        trainer._tr_loss.copy_(state["loss"])
        for name, callback in self._with_state():
            for attribute, value in state["callbacks"].get(name, {}).items():
                setattr(callback, attribute, value)

    def _with_state(self) -> list[tuple[str, Any]]:
        callbacks = self._trainer.callback_handler.callbacks
        return [(type(c).__name__, c) for c in callbacks if isinstance(c, ExportableState)]
