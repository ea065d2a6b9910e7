"""Cost of block digests and of scrubbing the retained snapshot: CPU time for each byte, in one thread.

``python -m benchmarks.scrub [--mib 1024]`` measures thread time, so that other processes do not count.
"""

import time
from collections.abc import Callable

import numpy as np

from benchmarks.common import Result, command_line, main
from ftd.config.daemon_file import NodeTable
from storage.manifest import SnapshotPart, digest_of


def gb_per_s(size_bytes: int, work: Callable[[], object]) -> float:
    """Return the highest rate of three runs of ``work``."""
    took_s = []
    for _ in range(3):
        began_s = time.thread_time()
        work()
        took_s.append(time.thread_time() - began_s)
    return size_bytes / min(took_s) / 1e9


def measure(size_bytes: int) -> Result:
    data = np.random.default_rng(0).integers(0, 256, size_bytes, dtype=np.uint8)
    part = SnapshotPart.from_bytes("shard", 0, data)

    def verify() -> None:
        assert all(
            part.is_block_intact(n, data[slice(*part.block(n))]) for n in part.blocks_covering(0, size_bytes)
        )

    rates = {
        "one digest of the whole": gb_per_s(size_bytes, lambda: digest_of(data)),
        "the same and that of each MiB": gb_per_s(size_bytes, lambda: SnapshotPart.from_bytes("s", 0, data)),
        "verifying each MiB": gb_per_s(size_bytes, verify),
    }
    result = Result(name="scrub", what="Digests of a snapshot in memory", columns=("", "GB/s of CPU time"))
    result.rows = [(name, f"{rate:.1f}") for name, rate in rates.items()]
    result.data = {"gb_per_s": rates, "size_bytes": size_bytes}
    wanted = NodeTable().scrub_rate_mib_s * (1 << 20) / 1e9
    result.notes.append(
        f"by default a core is verifying for {wanted / rates['verifying each MiB']:.1%} of the time"
    )
    return result


if __name__ == "__main__":
    parser = command_line(__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    options = parser.parse_args()
    main(measure(options.mib << 20), options.out)
