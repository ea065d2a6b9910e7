"""Gradients of one rank in flat buckets, which their owners all-reduce while the backward pass is still
running.

A bucket's gradients are views into one flat buffer, so nothing is copied before the all-reduce (flattened
16 × 256 KiB take 9.7 ms on gloo, one by one 82 ms). A large bucket is reduced in slices, so that
communication overlaps even if the model is one bucket (all pipelines cut alike). A slice is reduced once
the last microbatch has produced all of its gradients. Within a group, slices are reduced from the last to
the first on all members: operations of a group need one order, and gradients become complete roughly in
this one.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from runtime.groups.communicator import CommunicationError, Communicator, Members, PendingOperation
from runtime.layers.model import Model
from runtime.monitoring.progress import ProgressMonitor
from runtime.zero.cells import common_cells
from runtime.zero.parts import ParameterLayout
from runtime.zero.shards import StageShards
from statemachine.messages.trainer import WorldData
from storage.buckets import Bucket

SLICE_BYTES = 8 * 1024 * 1024
_NORM_ELEMENTS = 64 * 1024
"""Number of elements whose squares are added in their own type."""


@dataclass(slots=True, kw_only=True)
class _BucketSlice:
    """A slice of a flat buffer, which one all-reduce carries."""

    flat: Tensor
    owners: Members
    names: frozenset[str]
    """Parameters of which it contains elements."""
    missing: set[str]
    """Parameters whose gradient of the last microbatch has not been computed yet."""


class GradientBuffers:
    """The gradient buffers of one generation: after an abort, a stuck all-reduce may still write into the old
    ones.

    They consist of the buckets that ``communicator.rank`` owns (``from_buckets``), or of cells of vectors
    if stages shard (``from_cells``).
    """

    def __init__(self, model: Model, communicator: Communicator) -> None:
        self._communicator = communicator
        self._is_async = model.runtime.is_async
        self._flats: list[tuple[Tensor, Members]] = []
        """Slices of buffers with the ranks that sum them; each element is in exactly one."""
        self._views: list[tuple[str, torch.nn.Parameter, Tensor]] = []
        """Name, parameter and the part of a buffer that holds its gradient, unless stages shard."""
        self._queues: dict[Members, list[_BucketSlice]] = {}
        self._handles: list[RemovableHandle] = []
        self._shards: StageShards | None = None
        self._slices_of: dict[int, list[_BucketSlice]] = {}
        """Slices by vector, if stages shard."""
        self._armed = False
        self._launched: dict[Members, int] = {}
        self._pending: list[PendingOperation] = []
        self._failure: CommunicationError | None = None

    @classmethod
    def from_buckets(
        cls, model: Model, buckets: Collection[Bucket], communicator: Communicator
    ) -> "GradientBuffers":
        """Return buffers for whole parameters.

        :param buckets: buckets of the whole model; those that ``communicator.rank`` does not own are
            ignored.
        """
        gradients = cls(model, communicator)
        parameters = dict(model.named_parameters(range(model.layer_count)))
        for bucket in sorted(buckets, key=lambda b: b.index, reverse=True):
            if communicator.rank not in bucket.owners:
                continue
            flat = torch.zeros(bucket.numel, dtype=getattr(torch, bucket.dtype), device=model.device)
            gradients._flats.append((flat, bucket.owners))
            for name, offset, numel in zip(bucket.parameters, bucket.offsets, bucket.numels, strict=True):
                view = flat[offset : offset + numel].view_as(parameters[name])
                gradients._views.append((name, parameters[name], view))
            for bucket_slice in _slices(bucket, flat):
                gradients._add(bucket_slice, parameters)
        return gradients

    @classmethod
    def from_cells(
        cls,
        model: Model,
        shape: ParameterLayout,
        world: WorldData,
        communicator: Communicator,
        shards: StageShards | None,
    ) -> "GradientBuffers":
        """Return buffers for cells of trained vectors.
        :param shards: this rank's shards, if its own stage shards.
        """
        gradients = cls(model, communicator)
        gradients._shards = shards
        if shards is not None:
            shards.on_complete = gradients._complete
        parameters = dict(model.named_parameters(range(model.layer_count)))
        for number, vector in reversed(list(enumerate(shape.vectors))):
            cells = common_cells(world, vector.layers)
            if not vector.trained or not any(communicator.rank in cell.owners for cell in cells):
                continue
            if shards is None:
                begin = 0
                flat = torch.zeros(vector.numel, dtype=getattr(torch, vector.dtype), device=model.device)
                for name, (start, end) in zip(vector.names, pairwise(vector.offsets), strict=True):
                    view = flat[start:end].view_as(parameters[name])
                    gradients._views.append((name, parameters[name], view))
            else:
                begin, flat = shards.ranges[number][0], shards.gradients[number]
            for cell in reversed(cells):
                start, end = cell.elements(vector.numel)
                if communicator.rank in cell.owners and start < end:
                    run = flat[start - begin : end - begin]
                    names = frozenset(one.name for one in vector.slices(start, end))
                    bucket_slice = _BucketSlice(flat=run, owners=cell.owners, names=names, missing=set(names))
                    gradients._flats.append((run, cell.owners))
                    gradients._slices_of.setdefault(number, []).append(bucket_slice)
                    gradients._add(bucket_slice, {} if shards is not None else parameters)
        return gradients

    def _add(self, bucket_slice: _BucketSlice, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Queue a slice.
        :param parameters: parameters whose gradients are observed one by one.
        """
        self._queues.setdefault(bucket_slice.owners, []).append(bucket_slice)
        if parameters:
            self._handles += [
                self._watch(parameters[name], name, bucket_slice) for name in bucket_slice.names
            ]

    def begin(self) -> None:
        """Begin a step: set all gradients to zero."""
        for flat, _ in self._flats:
            flat.zero_()
        for _, parameter, view in self._views:
            parameter.grad = view
        self._armed = False
        if self._shards is not None:
            self._shards.begin_step()
        for queue in self._queues.values():
            for bucket_slice in queue:
                bucket_slice.missing = set(bucket_slice.names)
        self._launched = dict.fromkeys(self._queues, 0)
        self._pending = []
        self._failure = None

    def arm(self) -> None:
        """Announce the step's last backward pass, in which slices are reduced as they become complete."""
        self._armed = True
        if self._shards is not None:
            self._shards.armed = True

    def check(self) -> None:
        """Raise the communication error of a backward pass, which autograd may have wrapped.

        :raises CommunicationError: a backward pass was aborted, or lost a peer.
        """
        if self._failure is not None:
            raise self._failure
        if self._shards is not None:
            self._shards.check()

    def end_backward(self) -> None:
        """End the backward pass of a microbatch.

        :raises CommunicationError: the group was aborted, or a peer is lost, perhaps during the pass.
        """
        if self._shards is not None:
            self._shards.end_backward()

    def finish(self, monitor: ProgressMonitor) -> None:
        """Reduce the remaining slices (parameters without a gradient) and wait for all sums.

        :raises CommunicationError: the group was aborted, or a peer is lost.
        """
        self.check()
        for members, queue in self._queues.items():
            for bucket_slice in queue:
                bucket_slice.missing.clear()
            self._launch(members)
        # Being ready is a promise to peers that roll forward: the sums must really be here.
        for pending in self._pending:
            monitor.wait(self._communicator, pending, "sync")

    def squared_norm(self) -> tuple[Tensor | float, Tensor | int]:
        """Return the squared norm of the slices whose lowest owner is this rank, and the number of slices that
        are not finite.

        A sum of these over all ranks counts each slice once. Slices that are not finite do not contribute
        to the norm. If the host runs ahead of the device, both results are tensors on the device, and the
        host does not wait.
        """
        total: Tensor | float = 0.0
        broken: Tensor | int = 0
        for flat, owners in self._flats:
            if owners[0] != self._communicator.rank:
                continue
            if self._is_async:
                there = torch.linalg.vector_norm(flat, dtype=torch.float64).square()
                finite = there.isfinite()
                total = total + torch.where(finite, there, 0.0)
                broken = broken + (~finite).double()
                continue
            squared = _squared_norm(flat)
            if squared < float("inf"):
                total += squared
            else:
                broken += 1
        return total, broken

    def names_not_finite(self, monitor: ProgressMonitor) -> set[str]:
        """Return the parameters of which an element of the summed gradient is not finite; if stages shard, all
        parameters that share a slice with one.
        """
        slices = [one for queue in self._queues.values() for one in queue]
        named = [(frozenset({name}), view) for name, _, view in self._views]
        values = named or [(one.names, one.flat) for one in slices]
        if not values:
            return set()
        finite = monitor.read_values(torch.stack([value.isfinite().all() for _, value in values]))
        return {name for (names, _), here in zip(values, finite, strict=True) if not here for name in names}

    def scale(self, factor: float) -> None:
        for flat, _ in self._flats:
            flat.mul_(factor)

    def close(self) -> None:
        """Detach the parameters' gradients from these buffers."""
        for handle in self._handles:
            handle.remove()
        for _, parameter, _ in self._views:
            parameter.grad = None
        self._views, self._flats, self._queues, self._pending = [], [], {}, []

    def _watch(self, parameter: torch.nn.Parameter, name: str, bucket_slice: _BucketSlice) -> RemovableHandle:
        def arrived(_: Tensor) -> None:
            if not self._armed:
                return
            if name not in bucket_slice.missing:
                raise RuntimeError(
                    f"parameter {name} got a second gradient in one backward pass; where a layer uses "
                    "torch.utils.checkpoint, set use_reentrant=False"
                )
            bucket_slice.missing.discard(name)
            if not bucket_slice.missing:
                try:
                    self._launch(bucket_slice.owners)
                except CommunicationError as error:
                    self._failure = error  # Autograd would wrap it; ``finish`` raises it unchanged.

        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
        return handle

    def _complete(self, vector: int) -> None:
        """Reduce a vector's slices, whose gradient now contains all microbatches of the stage."""
        for bucket_slice in self._slices_of[vector]:
            bucket_slice.missing.clear()
            self._launch(bucket_slice.owners)

    def _launch(self, members: Members) -> None:
        """All-reduce the slices of a group that are complete and next in the group's order."""
        queue = self._queues[members]
        while (position := self._launched[members]) < len(queue):
            bucket_slice = queue[position]
            if bucket_slice.missing:
                return
            self._launched[members] = position + 1
            if bucket_slice.flat.numel():
                self._pending.append(self._communicator.all_reduce(bucket_slice.flat, members))


def _squared_norm(flat: Tensor) -> float:
    """Return the sum of squares.

    Reading float32 as float64 takes five times as long as a dot product. Slices are therefore multiplied in
    their own type and added in float64; if that overflows, the computation is repeated in float64.
    """
    if flat.dtype == torch.float32:
        total = math.fsum(float(torch.dot(run, run)) for run in torch.split(flat, _NORM_ELEMENTS))
        if math.isfinite(total):
            return total
    return float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2


def _slices(bucket: Bucket, flat: Tensor) -> list[_BucketSlice]:
    """Return the bucket cut at parameters into slices of ``SLICE_BYTES`` or somewhat more, the last slice
    first.
    """
    slices: list[_BucketSlice] = []
    names: list[str] = []
    end = bucket.numel
    for name, offset in zip(reversed(bucket.parameters), reversed(bucket.offsets), strict=True):
        names.append(name)
        if (end - offset) * flat.element_size() >= SLICE_BYTES or name == bucket.parameters[0]:
            bucket_slice = _BucketSlice(
                flat=flat[offset:end], owners=bucket.owners, names=frozenset(names), missing=set(names)
            )
            slices.append(bucket_slice)
            names, end = [], offset
    return slices
