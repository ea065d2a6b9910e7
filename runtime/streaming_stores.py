"""The environment in which the C library copies snapshots with streaming stores, which bypass the caches. The
module does not import torch.

A store into memory first reads the line that it overwrites, unless it is a streaming store. The C library
uses streaming stores from a size on that it derives from the machine's cache: 190 MiB on a large server,
more than any tensor. Copies of a snapshot, a few MiB each, then reach half of the memory's bandwidth. The
library reads another limit from the environment, but only when a process begins.
"""

import platform
from collections.abc import Mapping

STREAMING_THRESHOLD_BYTES = 256 * 1024
"""Size in bytes from which a copy uses streaming stores. From 16 times this size it also works on four pages
at once, which is faster again. Smaller copies are likely to be read again soon by the same core.
"""

_VARIABLE = "GLIBC_TUNABLES"
_TUNABLE = "glibc.cpu.x86_non_temporal_threshold"


def streaming_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to the environment ``given`` of a process; nothing if the user chose a limit, or the
    tunable does not exist on this machine.
    """
    chosen = given.get(_VARIABLE, "")
    if platform.machine() not in ("x86_64", "AMD64") or _TUNABLE in chosen:
        return {}
    return {_VARIABLE: ":".join(filter(None, (chosen, f"{_TUNABLE}={STREAMING_THRESHOLD_BYTES:#x}")))}
