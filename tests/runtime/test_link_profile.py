"""Measuring the network: in one process, in separate processes, and what remains when it fails."""

import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import msgspec

from runtime.device import CPU
from runtime.profiling.link_profile import MESSAGE_SIZES_BYTES, measure_links, measured_groups
from runtime.wire.measurement import MeasurementProgress
from tests.helpers.harness import ServerThread, formed_world
from tests.helpers.link_measurement import measure, order_for

SIZE = 3


def test_every_size_and_group_is_measured_by_rank_0() -> None:
    with formed_world(SIZE, measured_groups(SIZE)) as ranks, ThreadPoolExecutor(SIZE) as pool:
        progress: list[MeasurementProgress] = []
        found = list(pool.map(lambda rank: measure_links(rank, CPU, 10.0, progress.append), ranks))
    sent, reduced = found[0]
    assert [entry.size_bytes for entry in sent] == list(MESSAGE_SIZES_BYTES)
    assert [(entry.members, entry.size_bytes) for entry in reduced] == [
        (members, size) for members in (2, 3) for size in MESSAGE_SIZES_BYTES
    ]
    assert all(3 <= entry.time.repeats <= 31 and entry.time.minimum_ms > 0 for entry in (*sent, *reduced))
    assert found[1:] == [((), ())] * (SIZE - 1)
    assert MeasurementProgress(done=3, total=3) in progress


def test_without_time_the_large_sizes_are_skipped() -> None:
    with formed_world(SIZE, measured_groups(SIZE)) as ranks, ThreadPoolExecutor(SIZE) as pool:
        found = list(pool.map(lambda rank: measure_links(rank, CPU, 0.0, lambda progress: None), ranks))
    sent, reduced = found[0]
    assert [entry.size_bytes for entry in sent] == list(MESSAGE_SIZES_BYTES[:2])
    assert len(reduced) == 2 * 2
    assert all(entry.time.repeats == 3 for entry in (*sent, *reduced))


def test_ranks_that_cannot_form_a_group_report_an_error_and_end() -> None:
    with ServerThread("right") as server:
        out, err = measure(order_for(server.port, "wrong")).communicate(timeout=240)
    assert out == b"" and b"rendezvous" in err


def test_an_invalid_request_is_rejected() -> None:
    process = measure(b"{}")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 2 and out == b"" and b"no LinkMeasurementRequest on stdin" in err


def test_without_two_gpus_there_is_nothing_to_measure_for_nccl() -> None:
    process = measure(order_for(1, "t", backend="nccl"))
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    answer = msgspec.json.decode(out)
    assert (answer["type"], answer["sent"], answer["reduced"]) == ("LinkMeasurements", [], [])


def test_ranks_do_not_outlive_the_process_that_forked_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        process = measure(order_for(listener.getsockname()[1], "t"))
        connections = [listener.accept()[0] for _ in range(2)]
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=240)
        for connection in connections:
            connection.settimeout(60)
            while connection.recv(4096):
                pass
            connection.close()
