"""Decoding in several threads at once, in a process of its own: msgspec would end it."""

import subprocess
import sys

import pytest

DECODES_IN_THREADS = """
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
import msgspec
from storage.manifest import decode_record, encode_record

sys.setswitchinterval(1e-6)
barrier = Barrier(3)

def decode_when_all_are_here(data, kind):
    barrier.wait()
    return decode_record(data, kind, "a record")

with ThreadPoolExecutor(3) as threads:
    for _ in range(300):
        inner = msgspec.defstruct("Inner", [("numbers", dict[str, list[int]], {}), ("words", tuple[str, ...], ())])
        kind = msgspec.defstruct("Record", [("one", inner), ("some", list[inner]), ("named", dict[str, inner])])
        record = kind(inner({"a": [1]}), [inner(), inner({}, ("b",))], {"c": inner()})
        found = threads.map(decode_when_all_are_here, 3 * [encode_record(record)], 3 * [kind])
        assert list(found) == 3 * [record]
"""


@pytest.mark.processes
def test_threads_may_decode_a_type_for_the_first_time_at_the_same_moment() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DECODES_IN_THREADS], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
