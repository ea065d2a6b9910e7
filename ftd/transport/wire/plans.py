"""A compact encoding of Resume, which carries the whole plan to a thousand nodes.

Every rank needs the whole plan, since all ranks derive the same groups from it. Plain msgpack repeats the
names of fields and nodes for every stage and transfer: a mebibyte if 100 of 1,000 nodes of eight devices
are lost. So each device is named once and is a number afterwards, and the result is compressed. It is 6 to
10 times smaller, the same for all nodes, and hence made once (``codec``). No part of it is sent separately,
so none can be late or lost.
"""

import zlib
from types import GenericAlias
from typing import Any, TypeVar, get_type_hints

import msgspec

from ftd.transport.wire.compression import LEVEL, decompress
from planner.values import Device, PipelinePlacement, Plan, ReleasedLayers, StagePlacement, Transfer
from statemachine.messages.cluster import Resume

T = TypeVar("T")

MAX_UNPACKED_BYTES = 64 * 1024 * 1024
"""Largest decompressed Resume; one for 10,000 devices takes a few mebibytes."""


def _array_of(kind: type, **others: Any) -> Any:
    """Return a struct that is encoded as an array and has the fields of ``kind``, with other types for
    ``others``.
    """
    fields = [
        (name, others.get(name, hint)) for name, hint in get_type_hints(kind, include_extras=True).items()
    ]
    return msgspec.defstruct(kind.__name__, fields, array_like=True, frozen=True)


def _list_of(kind: Any) -> Any:
    return GenericAlias(list, (kind,))


_Stage = _array_of(StagePlacement, devices=list[int])
_Pipeline = _array_of(PipelinePlacement, stages=_list_of(_Stage))
_Transfer = _array_of(Transfer, source=int, target=int)
_Released = _array_of(ReleasedLayers, device=int)
_Plan = _array_of(
    Plan, pipelines=_list_of(_Pipeline), transfers=_list_of(_Transfer), released_layers=_list_of(_Released)
)
_Resume = _array_of(Resume, plan=_Plan)


_Packed: Any = msgspec.defstruct(
    "_Packed",
    [("nodes", list[str]), ("devices", list[tuple[int, int]]), ("resume", _Resume)],
    array_like=True,
    frozen=True,
)
"""A Resume whose plan names devices by their positions in ``devices``, whose nodes are positions in ``nodes``."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Packed)


def pack(resume: Resume) -> bytes:
    """Return the body of a message to nodes."""
    numbers: dict[Device, int] = {}
    nodes: dict[str, int] = {}

    def number(device: Device) -> int:
        return numbers.setdefault(device, len(numbers))

    plan = resume.plan
    pipelines = [
        _with(
            _Pipeline, p, stages=[_with(_Stage, s, devices=[number(d) for d in s.devices]) for s in p.stages]
        )
        for p in plan.pipelines
    ]
    transfers = [
        _with(_Transfer, t, source=number(t.source), target=number(t.target)) for t in plan.transfers
    ]
    released = [_with(_Released, r, device=number(r.device)) for r in plan.released_layers]
    small = _with(_Plan, plan, pipelines=pipelines, transfers=transfers, released_layers=released)
    devices = [(nodes.setdefault(device.node, len(nodes)), device.index) for device in numbers]
    packed = _Packed(list(nodes), devices, _with(_Resume, resume, plan=small))
    return zlib.compress(_ENCODER.encode(packed), LEVEL)


def unpack(packed: bytes) -> Resume:
    """Decode a packed Resume.

    :raises WireError, ValueError, msgspec.DecodeError: the bytes are not a packed Resume, or it is too large.
    """
    found = _DECODER.decode(decompress(packed, MAX_UNPACKED_BYTES, "its plan"))
    try:
        devices = [Device(node=_at(found.nodes, node), index=index) for node, index in found.devices]
        return _whole(Resume, found.resume, plan=_plan(found.resume.plan, devices))
    except IndexError:
        raise ValueError("its plan names a device that it does not list") from None


def _plan(small: Any, devices: list[Device]) -> Plan:
    """Return the plan.

    :raises IndexError: it names a device that is not among these.
    """

    def stage(one: Any) -> StagePlacement:
        return _whole(StagePlacement, one, devices=tuple([_at(devices, number) for number in one.devices]))

    return _whole(
        Plan,
        small,
        pipelines=tuple(
            _whole(PipelinePlacement, one, stages=tuple(map(stage, one.stages))) for one in small.pipelines
        ),
        transfers=tuple(
            _whole(Transfer, one, source=_at(devices, one.source), target=_at(devices, one.target))
            for one in small.transfers
        ),
        released_layers=tuple(
            _whole(ReleasedLayers, one, device=_at(devices, one.device)) for one in small.released_layers
        ),
    )


def _with(kind: Any, value: Any, **others: Any) -> Any:
    """Return the array of a value, with other values of some fields."""
    return kind(
        *[others[name] if name in others else getattr(value, name) for name in kind.__struct_fields__]
    )


def _whole(kind: type[T], small: Any, **others: Any) -> T:
    """Return the value of an array, with other values of some fields."""
    names = small.__struct_fields__
    return kind(**{name: others[name] if name in others else getattr(small, name) for name in names})


def _at(table: list[T], number: int) -> T:
    """Return a row of the table. Numbers come from outside: a negative one is invalid."""
    if number < 0:
        raise IndexError(number)
    return table[number]
