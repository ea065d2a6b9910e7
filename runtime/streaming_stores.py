"""Large copies that pass the caches by: how the processes that copy snapshots are started. No torch in here.

A store into memory first reads the line that it overwrites, unless it is a streaming store. The C library
copies so from a size on that it makes of the cache that a machine says it has: 190 MiB on a large server,
more than any tensor. Copies of a snapshot, a few MiB each, then reach half of what the memory can. The
library reads another limit from the environment when a process begins, and only then.
"""

import platform
from collections.abc import Mapping

STREAMING_THRESHOLD_BYTES = 256 * 1024
"""A copy of so many bytes or more streams, and one of 16 times as many on four pages at once, which is
quicker again. Less is likely to be read again soon, by this very core."""

_VARIABLE = "GLIBC_TUNABLES"
_TUNABLE = "glibc.cpu.x86_non_temporal_threshold"


def streaming_environment(given: Mapping[str, str]) -> dict[str, str]:
    """What a process needs in its environment besides ``given``; nothing where the user chose a limit, or the
    tunable means nothing."""
    chosen = given.get(_VARIABLE, "")
    if platform.machine() not in ("x86_64", "AMD64") or _TUNABLE in chosen:
        return {}
    return {_VARIABLE: ":".join(filter(None, (chosen, f"{_TUNABLE}={STREAMING_THRESHOLD_BYTES:#x}")))}
