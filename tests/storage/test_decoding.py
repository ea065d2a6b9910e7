"""Decoding in several threads at once, in a process of its own: msgspec would end it."""

import pytest

from tests.helpers.python_process import run_python

DECODES_IN_THREADS = """
import msgspec
from storage.manifest import decode_record, encode_record
from tests.helpers.python_process import call_in_threads

for _ in range(300):
    inner = msgspec.defstruct("Inner", [("numbers", dict[str, list[int]], {}), ("words", tuple[str, ...], ())])
    kind = msgspec.defstruct("Record", [("one", inner), ("some", list[inner]), ("named", dict[str, inner])])
    record = kind(inner({"a": [1]}), [inner(), inner({}, ("b",))], {"c": inner()})
    data = encode_record(record)
    assert call_in_threads(lambda: decode_record(data, kind, "a record")) == 3 * [record]
"""


@pytest.mark.processes
def test_threads_may_decode_a_type_for_the_first_time_at_the_same_moment() -> None:
    run_python(DECODES_IN_THREADS)
