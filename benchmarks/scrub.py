"""What block digests and the reading of the kept snapshot cost: CPU time for each byte, in one thread.

``python -m benchmarks.scrub [--mib 1024]``. Thread time, so that a busy machine does not count.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np

from ftd.config.daemon import NodeTable
from storage.manifest import Part, digest_of


def gb_per_s(size_bytes: int, work: Callable[[], object]) -> float:
    """The best of three."""
    took_s = []
    for _ in range(3):
        began_s = time.thread_time()
        work()
        took_s.append(time.thread_time() - began_s)
    return size_bytes / min(took_s) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    size_bytes = parser.parse_args().mib << 20
    data = np.random.default_rng(0).integers(0, 256, size_bytes, dtype=np.uint8)
    part = Part.of("shard", 0, data)

    def verify() -> None:
        assert all(part.sound(n, data[slice(*part.block(n))]) for n in part.covering(0, size_bytes))

    verified = gb_per_s(size_bytes, verify)
    rate = NodeTable().scrub_rate_mib_s * (1 << 20) / 1e9
    print(f"one digest of the whole        {gb_per_s(size_bytes, lambda: digest_of(data)):6.1f} GB/s")
    print(f"the same and that of each MiB  {gb_per_s(size_bytes, lambda: Part.of('s', 0, data)):6.1f} GB/s")
    print(f"verifying each MiB             {verified:6.1f} GB/s; by default {rate / verified:.1%} of a core")


if __name__ == "__main__":
    main()
