"""A comparison of two contracts: what a later one breaks for subscribers and clients of an earlier one.

Additions break nobody: readers ignore fields, events and values that they do not know. A subscriber breaks
if something is removed, changes its type or may now be missing. A client breaks if something is now
required or no longer understood.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


def breaking_changes(before: Json, now: Json) -> list[str]:
    """Return a sentence for everything that works by the contract ``before`` and fails by the contract
    ``now``.
    """
    return list(_broken(before, now))


def _broken(before: Json, now: Json) -> Iterator[str]:
    incoming = _incoming(before)
    for name, channel in before["channels"].items():
        address, found = channel["address"], now["channels"].get(name)
        if found is None or found["address"] != address:
            yield f"the topic {address} was removed: subscribers receive nothing"
            continue
        for message in channel["messages"]:
            if message not in found["messages"]:
                what = "requests with it are rejected" if name in incoming else "subscribers never receive it"
                yield f"{message} on {address} was removed: {what}"
                continue
            yield from _Comparison(before=before, now=now, incoming=name in incoming, message=message).all()


def _incoming(contract: Json) -> set[str]:
    operations = contract["operations"].values()
    return {o["channel"]["$ref"].rsplit("/", 1)[1] for o in operations if o["action"] == "receive"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """The comparison of one message in two contracts."""

    before: Json
    now: Json
    incoming: bool
    message: str

    def all(self) -> Iterator[str]:
        payloads = [c["components"]["messages"][self.message]["payload"] for c in (self.before, self.now)]
        if all(isinstance(payload, dict) for payload in payloads):
            yield from self._schemas(payloads[0], payloads[1], self.message)

    def _schemas(self, before: Json, now: Json, path: str) -> Iterator[str]:
        old, new = _merged(before, self.before), _merged(now, self.now)
        yield from self._types(old, new, path)
        yield from self._values(old, new, path)
        yield from self._fields(old, new, path)
        for key in ("items", "additionalProperties"):
            if isinstance(old.get(key), dict) and isinstance(new.get(key), dict):
                yield from self._schemas(old[key], new[key], f"{path}[]")
        for one in old.get("anyOf", ()):
            yield from self._variant(_merged(one, self.before), new, path)

    def _variant(self, old: Json, new: Json, path: str) -> Iterator[str]:
        """Compare a variant, such as an object that may be null, with the variant of the same type in the new
        contract.
        """
        kinds = old.get("type")
        for one in new.get("anyOf", (new,)):
            other = _merged(one, self.now)
            if kinds in ("object", "array") and other.get("type") == kinds:
                yield from self._schemas(old, other, path)

    def _types(self, old: Json, new: Json, path: str) -> Iterator[str]:
        before, now = _types(old, self.before), _types(new, self.now)
        wider, narrower = now - before, before - now
        if self.incoming and narrower:
            yield f"{path} may no longer be {_either(narrower)}: clients that send that are rejected"
        elif not self.incoming and wider:
            yield f"{path} was {_either(before)} and may now be {_either(wider)}: subscribers read it wrongly"

    def _values(self, old: Json, new: Json, path: str) -> Iterator[str]:
        removed = [value for value in _values(old) if _values(new) and value not in _values(new)]
        for value in removed:
            if self.incoming:
                yield f"{path} may no longer be {value!r}: clients that send it are rejected"
            else:
                yield f"{path} is never {value!r} any more: subscribers that look for it find nothing"

    def _fields(self, old: Json, new: Json, path: str) -> Iterator[str]:
        for field, schema in old.get("properties", {}).items():
            where = f"{path}.{field}"
            if field not in new.get("properties", {}):
                if self.incoming:
                    yield f"{where} was removed: requests with it are rejected"
                else:
                    yield f"{where} was removed: subscribers that read it find nothing"
                continue
            if (
                not self.incoming
                and field in old.get("required", ())
                and field not in new.get("required", ())
            ):
                yield f"{where} may now be missing: subscribers that rely on it fail"
            yield from self._schemas(schema, new["properties"][field], where)
        if self.incoming and "properties" in old:
            for field in set(new.get("required", ())) - set(old.get("required", ())):
                yield f"{path}.{field} must now be given: requests without it are rejected"


def _merged(schema: Json, contract: Json) -> Json:
    """Return a schema with its references resolved and the parts of its ``allOf`` merged."""
    if "$ref" in schema:
        return _merged(contract["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]], contract)
    if "allOf" not in schema:
        return schema
    merged: Json = {key: value for key, value in schema.items() if key != "allOf"}
    for part in schema["allOf"]:
        one = _merged(part, contract)
        merged = {
            **merged,
            **one,
            "properties": {**merged.get("properties", {}), **one.get("properties", {})},
            "required": [*merged.get("required", []), *one.get("required", [])],
        }
    return merged


def _types(schema: Json, contract: Json) -> set[str]:
    if "anyOf" in schema:
        return {kind for one in schema["anyOf"] for kind in _types(_merged(one, contract), contract)}
    if "type" in schema:
        kinds = schema["type"]
        return {kinds} if isinstance(kinds, str) else set(kinds)
    words = {str: "string", bool: "boolean", int: "integer", float: "number"}
    return {words.get(type(value), "null") for value in _values(schema)} or {"anything"}


def _values(schema: Json) -> list[Any]:
    return [schema["const"]] if "const" in schema else list(schema.get("enum", ()))


def _either(kinds: set[str]) -> str:
    return " or ".join(sorted(kinds))
