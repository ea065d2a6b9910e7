"""A Resume as it goes to a thousand nodes: the whole plan, small.

Every rank needs the whole plan, since all derive the same groups from it. As plain msgpack it repeats names
of fields and nodes for every stage and transfer: a mebibyte where 100 of 1,000 nodes of eight devices are
lost. So each device is named once and is a number from then on, and what is left is deflated: 6 to 10 times
less, the same for all nodes, hence made once (``codec``). There is no shared part that could be late or lost.
"""

import zlib
from typing import Any, TypeVar

import msgspec

from planner.values import (
    Considered,
    Device,
    Method,
    PipelinePlacement,
    Plan,
    Recompute,
    StagePlacement,
    Transfer,
    Within,
)
from statemachine.messages.cluster import Resume
from statemachine.messages.values import Buddy, HeldPart, Restore, Vote

T = TypeVar("T")

MAX_UNPACKED_BYTES = 64 * 1024 * 1024
"""What a Resume may unfold to; one for 10,000 devices takes a few mebibytes."""
_LEVEL = 1


class _Stage(msgspec.Struct, array_like=True, frozen=True):
    first_layer: int
    end_layer: int
    devices: list[int]
    recompute: Recompute
    within: Within


class _Pipeline(msgspec.Struct, array_like=True, frozen=True):
    stages: list[_Stage]
    first_microbatch: int
    microbatches: int
    estimated_s: float


class _Plan(msgspec.Struct, array_like=True, frozen=True):
    """Devices are positions in ``devices``, whose nodes are positions in ``nodes``."""

    nodes: list[str]
    devices: list[tuple[int, int]]
    pipelines: list[_Pipeline]
    transfers: list[tuple[int, int, int, int]]
    """Layer, source, target, bytes."""
    method: Method
    reason: str
    estimated_iteration_s: float
    idle_nodes: tuple[str, ...]
    considered: tuple[Considered, ...]
    part_bytes: int


class _Resume(msgspec.Struct, frozen=True, kw_only=True):
    """``Resume`` with its plan in this form; the fields of the same names mean the same."""

    generation: int
    job_id: str
    step: int
    vote: Vote | None
    plan: _Plan
    hosts: dict[str, str]
    rendezvous: str
    lineage: int
    protection: str
    restore: Restore | None
    held_parts: tuple[HeldPart, ...]
    buddies: dict[str, Buddy]
    evaluated: int


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Resume)
_FIELDS = tuple(field for field in _Resume.__struct_fields__ if field != "plan")


def pack(resume: Resume) -> bytes:
    fields: dict[str, Any] = {name: getattr(resume, name) for name in _FIELDS}
    return zlib.compress(_ENCODER.encode(_Resume(plan=_small(resume.plan), **fields)), _LEVEL)


def unpack(packed: bytes) -> Resume:
    """:raises ValueError, msgspec.DecodeError: it is no packed Resume, or a huge one."""
    inflater = zlib.decompressobj()
    try:
        plain = inflater.decompress(packed, MAX_UNPACKED_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not inflater.eof:
        raise ValueError("it is cut short, or too large")
    found = _DECODER.decode(plain)
    return Resume(plan=_whole(found.plan), **{name: getattr(found, name) for name in _FIELDS})


def _small(plan: Plan) -> _Plan:
    numbers: dict[Device, int] = {}
    nodes: dict[str, int] = {}

    def number(device: Device) -> int:
        return numbers.setdefault(device, len(numbers))

    pipelines = [
        _Pipeline(
            [
                _Stage(s.first_layer, s.end_layer, [number(d) for d in s.devices], s.recompute, s.within)
                for s in pipeline.stages
            ],
            pipeline.first_microbatch,
            pipeline.microbatches,
            pipeline.estimated_s,
        )
        for pipeline in plan.pipelines
    ]
    transfers = [(t.layer, number(t.source), number(t.target), t.size_bytes) for t in plan.transfers]
    devices = [(nodes.setdefault(device.node, len(nodes)), device.index) for device in numbers]
    return _Plan(
        list(nodes),
        devices,
        pipelines,
        transfers,
        plan.method,
        plan.reason,
        plan.estimated_iteration_s,
        plan.idle_nodes,
        plan.considered,
        plan.part_bytes,
    )


def _whole(small: _Plan) -> Plan:
    """:raises ValueError: it names a device or a node that is not in its tables."""
    try:
        devices = [Device(node=_at(small.nodes, node), index=index) for node, index in small.devices]
        return Plan(
            pipelines=tuple(
                PipelinePlacement(
                    stages=tuple(
                        StagePlacement(
                            first_layer=stage.first_layer,
                            end_layer=stage.end_layer,
                            devices=tuple([_at(devices, number) for number in stage.devices]),
                            recompute=stage.recompute,
                            within=stage.within,
                        )
                        for stage in pipeline.stages
                    ),
                    first_microbatch=pipeline.first_microbatch,
                    microbatches=pipeline.microbatches,
                    estimated_s=pipeline.estimated_s,
                )
                for pipeline in small.pipelines
            ),
            transfers=tuple(
                Transfer(
                    layer=layer,
                    source=_at(devices, source),
                    target=_at(devices, target),
                    size_bytes=size_bytes,
                )
                for layer, source, target, size_bytes in small.transfers
            ),
            method=small.method,
            reason=small.reason,
            estimated_iteration_s=small.estimated_iteration_s,
            idle_nodes=small.idle_nodes,
            considered=small.considered,
            part_bytes=small.part_bytes,
        )
    except IndexError:
        raise ValueError("its plan names a device that it does not list") from None


def _at(table: list[T], number: int) -> T:
    """Numbers from outside: a negative one is no position from the end."""
    if number < 0:
        raise IndexError(number)
    return table[number]
