"""AOR (REFT §4.2): a replica of another owner's part, kept current in host memory by repeating the owner's
updates.

With ZeRO-1, an owner's optimizer state exists on no other rank, but all ranks have the gradients. The
previous owner in the group therefore repeats the updates, on a separate thread: the same optimizer, options
and slices of the same reduced and clipped gradients. The gradients are copied while the main thread gathers
parameters, and the update runs in parallel with the next step's computation. On the same kind of device the
results are the same, bit for bit.
"""

import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.device import DeviceRuntime
from runtime.monitoring.progress import ProgressMonitor
from runtime.side_stream import SideStreams
from runtime.zero.part_states import PartState
from runtime.zero.sharded_optimizer import ShardedOptimization, SliceState

CHECK_STEPS = 50
"""Interval, in steps, at which a replica is compared with its owner's part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    gradients: list[Tensor]
    options: list[dict[str, Any]]


class ReplicaUpdater:
    """The replicas that one rank updates in one generation.

    :param parts: parts with values and states, which this thread changes from now on. Call ``finish``
        before reading them.
    """

    def __init__(
        self,
        parts: Sequence[PartState],
        optimization: ShardedOptimization,
        runtime: DeviceRuntime,
        monitor: ProgressMonitor,
    ) -> None:
        self.parts = list(parts)
        self.slices: list[SliceState] = [one for part in parts for one in part.slices if one.trained]
        """Slices that an update changes."""
        self.error: Exception | None = None
        """Error that ended the thread; the parts are invalid then."""
        self._optimizer, self._parameters = optimization.make_replica_optimizer(self.slices)
        self._gradients = [torch.empty_like(parameter) for parameter in self._parameters]
        self._device = runtime.device
        self._side = SideStreams(lambda _: runtime)
        self._monitor = monitor
        self._changed = threading.Condition()
        self._update: _Update | None = None
        """An update whose gradients have not been copied yet."""
        self._applying = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="replica", daemon=True)
        self._thread.start()

    # --- main thread -----------------------------------------------------------------------------

    def submit_update(self, gradients: list[Tensor], options: list[dict[str, Any]]) -> None:
        """Start an update and return at once. ``gradients`` must not change until ``await_gradients_copied``
        has returned.

        :param gradients: gradients of each of ``slices``.
        :param options: options of the parameter groups in this update.
        """
        self._side.begin({self._device})
        with self._changed:
            self._update = _Update(gradients=gradients, options=options)
            self._changed.notify_all()

    def await_gradients_copied(self) -> None:
        """Wait until the gradients have been copied."""
        self._await(lambda: self._update is None)

    def finish(self) -> None:
        """Wait until all updates are done."""
        self._await(lambda: self._update is None and not self._applying)

    def close(self) -> None:
        """Finish all updates and end the thread."""
        self.finish()
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def _await(self, ready: Any) -> None:
        """Wait until ``ready()``, and report progress meanwhile, so that this does not count as a hang."""
        with self._changed:
            while not (ready() or self.error is not None):
                self._changed.wait(0.05)
                self._monitor.progress += 1

    # --- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        self._side.prepare_thread({self._device})
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._update is not None or self._stopped)
                update = self._update
            if update is None:
                return
            try:
                self._take(update.gradients)
                with self._changed:
                    self._update, self._applying = None, True
                    self._changed.notify_all()
                self._apply(update.options)
            except Exception as error:
                # Without this the main thread would wait forever for a thread that has ended.
                print(f"replica: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                self._end(error)
                return
            with self._changed:
                self._applying = False
                self._changed.notify_all()

    def _take(self, gradients: Iterable[Tensor]) -> None:
        with self._side.on(self._device):
            for mine, gradient in zip(self._gradients, gradients, strict=True):
                mine.copy_(gradient, non_blocking=True)
        self._side.finish({self._device})

    def _apply(self, options: list[dict[str, Any]]) -> None:
        if self._optimizer is None:
            return
        for group, now in zip(self._optimizer.param_groups, options, strict=True):
            group.update(now)
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._optimizer.step()

    def _end(self, error: Exception) -> None:
        with self._changed:
            self.error = error
            self._update, self._applying = None, False
            self._changed.notify_all()
