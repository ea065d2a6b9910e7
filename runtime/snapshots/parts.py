"""The snapshots of a rank that has parts of layers: its own parts, and with ``arc:1`` the replicas that it
holds.

As with whole layers (``runtime.snapshots.capture``), the bytes of tensors are spans of a bucket, copied in
parallel with training. Their description and buffers are copied at once (``storage.partimage``).
"""

from torch import Tensor

from runtime.layers.model import Model
from runtime.precision import dtype_name
from runtime.snapshots.capture import TrainerCapture, padded_bytes
from runtime.snapshots.groups import LayerGroup
from runtime.snapshots.movers import Mover
from runtime.snapshots.shard_units import SnapshotBucket, source_of
from runtime.zero.cells import Fractions
from runtime.zero.part_states import PartState
from runtime.zero.sharding import ShardedState
from storage.codes import make_code
from storage.layerstate import Scalars, padded_size
from storage.partimage import LayerPart, PartImage, ShardedImage, TensorInfo, TensorRange, WholeLayer


def add_parts(
    capture: TrainerCapture, group: LayerGroup, model: Model, sharding: ShardedState, mover: Mover
) -> None:
    """Add what this rank saves of the group, from the current state."""
    wanted = [("shard", False)] if group.own else []
    if group.replica:
        wanted.append(("replica", True))
    held: list[PartImage] = []
    own_bytes = 0
    for kind, replica in wanted:
        bucket = SnapshotBucket(Mover() if replica else mover)
        parts: dict[Fractions, list[PartState]] = {}
        for one in sharding.snapshot_parts(group.layers, replica=replica):
            parts.setdefault(one.fractions, []).append(one)
        for (start, end, of), states in sorted(parts.items()):
            begin = bucket.size_bytes
            layers = tuple(_part_of(one, model, sharding, bucket, begin) for one in states)
            held.append(
                PartImage(
                    start=start,
                    end=end,
                    of=of,
                    replica=replica,
                    offset=begin,
                    size_bytes=bucket.size_bytes - begin,
                    layers=layers,
                )
            )
        if not replica:
            own_bytes = bucket.size_bytes
        capture.add_shard(f"{group.name}/{kind}", make_code("none", 1), 0, bucket)
    image = ShardedImage(
        layers=tuple(_whole(layer, model, sharding) for layer in group.layers), held=tuple(held)
    )
    capture.describe(group, own_bytes, image.to_bytes())


def _whole(layer: int, model: Model, sharding: ShardedState) -> WholeLayer:
    tensors = model.tensors_of(layer)
    return WholeLayer(
        layer=layer,
        tensors=tuple(
            TensorInfo(
                name=tensor.name,
                role=tensor.kind,
                dtype=dtype_name(tensor.value.dtype),
                shape=tuple(tensor.value.shape),
                # There is no memory here for sharded parameters.
                on_host=(model.device if tensor.value.is_meta else tensor.value.device).type == "cpu",
            )
            for tensor in tensors
        ),
        schedule=sharding.optimization.schedule(),
        buffers=padded_bytes((t.value for t in tensors if t.kind == "buffer"), model.runtime),
        homes={
            tensor.name: home
            for tensor in tensors
            if tensor.kind == "parameter" and (home := min(tensor.layers)) != layer
        },
    )


def _part_of(
    one: PartState, model: Model, sharding: ShardedState, bucket: SnapshotBucket, first: int
) -> LayerPart:
    """Add the part's bytes to the bucket: its slices of parameters, and the optimizer's state for them.

    :param first: offset in the bucket at which the part of the group's first layer begins.
    """
    begin = bucket.size_bytes
    runs: list[TensorRange] = []
    scalars: Scalars = {}

    def add(
        name: str, role: str, key: str, tensor: Tensor, start: int, count: int | None, *, frozen: bool = False
    ) -> None:
        size = tensor.numel() * tensor.element_size()
        # A replica is in host memory; what counts is where its owner keeps it.
        device = model.device
        if role == "optimizer":
            device = sharding.optimization.device_of_state(name, scalar=count is None)
        runs.append(
            TensorRange(
                name=name,
                role=role,  # type: ignore[arg-type]
                key=key,
                dtype=dtype_name(tensor.dtype),
                on_host=device.type == "cpu",
                start=start,
                count=count,
                offset=bucket.size_bytes - begin,
                size_bytes=size,
            )
        )
        # A replica is in host memory on any device, since another thread updates it.
        runtime = None if one.replica else model.runtime
        bucket.add(source_of(tensor.detach(), runtime), padded_size(size), frozen=frozen)

    for mine in one.slices:
        cut = mine.slice
        own = sharding.optimization.value_of(cut) if mine.value is None else mine.value
        # Nothing updates frozen values, so a replica has none of its own.
        own = model.runtime.to_host(own) if one.replica and not mine.trained else own
        add(cut.name, "parameter", "", own, cut.start, cut.end - cut.start, frozen=not mine.trained)
        for key, value in mine.state.items():
            if not isinstance(value, Tensor):
                scalars.setdefault(cut.name, {})[key] = value
            elif value.dim() == 0:
                add(cut.name, "optimizer", key, value, 0, None)
            else:
                add(cut.name, "optimizer", key, value, cut.start, cut.end - cut.start)
    return LayerPart(
        layer=one.layer,
        offset=begin - first,
        size_bytes=bucket.size_bytes - begin,
        ranges=tuple(runs),
        scalars=scalars,
    )
