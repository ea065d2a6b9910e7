"""The contract as a file: the shipped one, and an earlier one that a user saved."""

from pathlib import Path
from typing import Any

import msgspec

from ftd.errors import ConfigurationError

FILE = Path(__file__).with_name("asyncapi.json")
MAX_BYTES = 16 * 1024 * 1024


def read_shipped_contract() -> bytes:
    """Return the contract of this version of ftd."""
    return FILE.read_bytes()


def read_contract(path: Path) -> dict[str, Any]:
    """Read an earlier version's contract.

    :raises ConfigurationError: the file cannot be read, or is no contract.
    """
    remedy = "save the output of ftd contract, and name that file"
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        found = msgspec.json.decode(path.read_bytes())
        if not found["asyncapi"].startswith("3."):
            raise ValueError("no AsyncAPI 3 document")
        for channel in found["channels"].values():
            for message in channel["messages"]:
                found["components"]["messages"][message]["payload"]
            channel["address"]
        for operation in found["operations"].values():
            operation["action"], operation["channel"]["$ref"]
        found["components"]["schemas"]
    except OSError as error:
        raise ConfigurationError(
            f"{path} cannot be read: {error.strerror}", field="--against", remedy=remedy
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        why = error if isinstance(error, ValueError) else "parts of one are missing"
        problem = f"{path} is no contract of ftd: {why}"
        raise ConfigurationError(problem, field="--against", remedy=remedy) from None
    return dict(found)
