"""Checks of a profile that a trainer measured, before it is used for planning, with the limits of a profile
file.

Types admit values that no clock and no model has: NaN, infinity, a negative size. For some of them the
planner would find no plan, for others a wrong one; so they are rejected here, by name.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from ftd.config.profile_document import ProfileDocument
from planner.values import ModelProfile

_DOCUMENT = msgspec.inspect.type_info(ProfileDocument)


def problem_of_profile(profile: ModelProfile) -> str | None:
    """Return the first impossible field, by name, with its value and its range, or ``None`` if all fields are
    possible.

    ``layers[3].forward_ms is nan; it must be 0 to 1e+09``
    """
    for problem in _problems("", profile, _DOCUMENT):
        return problem
    counts = profile.stage_devices
    if counts is not None and list(counts) != sorted(set(counts)):
        return f"stage_devices is {list(counts)[:20]}, which is not ascending"
    return None


def _problems(where: str, value: Any, kind: msgspec.inspect.Type) -> Iterator[str]:
    """Yield the problems of a value in whose place a profile file has ``kind``. The value may lack fields of it."""
    match kind:
        case msgspec.inspect.Metadata():
            yield from _problems(where, value, kind.type)
        case msgspec.inspect.UnionType() if value is not None:
            yield from _problems(where, value, kind.types[0])
        case msgspec.inspect.StructType():
            for field in kind.fields:
                if hasattr(value, field.name):
                    name = f"{where}.{field.name}".removeprefix(".")
                    yield from _problems(name, getattr(value, field.name), field.type)
        case msgspec.inspect.TupleType():
            for item, inner in zip(value, kind.item_types, strict=True):
                yield from _problems(where, item, inner)
        case msgspec.inspect.VarTupleType():
            least, most = kind.min_length or 0, kind.max_length
            if len(value) < least or (most is not None and len(value) > most):
                yield f"the number of {where} is {len(value)}; it must be {least} to {most}"
            for number, item in enumerate(value):
                yield from _problems(f"{where}[{number}]", item, kind.item_type)
        case (
            msgspec.inspect.IntType(ge=least, gt=above, le=most)
            | msgspec.inspect.FloatType(ge=least, gt=above, le=most)
        ):
            fits = (least is None or value >= least) and (above is None or value > above)
            if not (fits and (most is None or value <= most)):
                yield f"{where} is {value!r}; it must be {least if above is None else above:g} to {most:g}"
