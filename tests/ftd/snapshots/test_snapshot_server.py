"""The snapshot server and its client, on loopback with real arenas: exact bytes, and no trusted peers."""

import asyncio
import contextlib
import dataclasses
import fcntl
import re
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import uvloop

from ftd.errors import ConfigurationError, PeerError
from ftd.snapshots.shards import server as shard_server
from ftd.snapshots.shards.arenas import NodeArenas
from ftd.snapshots.shards.client import ShardClient
from ftd.snapshots.shards.link_check import check_links
from ftd.snapshots.shards.protocol import LINK_TEST_BYTES, STREAM_BYTES, bearer_token
from ftd.snapshots.shards.sources import PartLocation, RangeRequest, SnapshotSource
from statemachine.messages.values import ReplicaPeer
from storage.arena import Arena
from storage.manifest import BLOCK_BYTES, SnapshotPart, digest_of
from tests.helpers.kept_snapshots import (
    JOB,
    TOKEN,
    Node,
    flip,
    held_keys,
    raw_request,
    shared_directory,
    write,
)

PART = "group-0/shard"
SIZE = 3 * STREAM_BYTES + 12345
DATA = np.random.default_rng(7).integers(0, 256, SIZE, dtype=np.uint8)
SMALL = np.arange(100, dtype=np.uint8)

Body = Callable[[Node], Coroutine[Any, Any, None]]


def with_node(
    body: Body, *, run: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run, **options: Any
) -> None:
    async def main(root: Path) -> None:
        write(root, 5, {PART: DATA, "group-0/small": SMALL})
        async with asyncio.timeout(60), Node("node-1", root, **options) as node:
            await body(node)

    with shared_directory() as root:
        run(main(root))


async def located(client: ShardClient, source: SnapshotSource, name: str = PART) -> PartLocation:
    found = await client.manifest(source, JOB, 5)
    return PartLocation(source=source, job_id=JOB, step=5, part=found.manifests[0].part(name))


async def fetched(client: ShardClient, place: PartLocation, first: int, size: int) -> np.ndarray:
    target = np.zeros(size, dtype=np.uint8)
    await client.fetch([RangeRequest(location=place, first=first, into=target.data)])
    return target


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_parts_and_ranges_arrive_as_they_were_written(run: Callable[[Any], None]) -> None:
    async def body(node: Node) -> None:
        async with ShardClient(TOKEN, block_bytes=1_000_000) as client:
            place = await located(client, node.source)
            assert (await fetched(client, place, 0, SIZE) == DATA).all()
            for first, size in ((0, 1), (SIZE - 1, 1), (77, 2_500_000), (1, SIZE - 1)):
                assert (await fetched(client, place, first, size) == DATA[first : first + size]).all()
            small = await located(client, node.source, "group-0/small")
            assert (await fetched(client, small, 0, 100) == SMALL).all()
            assert not (await client.manifest(node.source, JOB, 6)).manifests
            assert not (await client.manifest(node.source, "other", 5)).manifests

    with_node(body, run=run)


def test_the_link_to_a_node_is_tested_and_a_node_that_does_not_answer_is_left_out() -> None:
    async def body(node: Node) -> None:
        peers = [
            ReplicaPeer(node="gone", address="127.0.0.1:1"),
            ReplicaPeer(node="node-1", address=node.source.address),
            ReplicaPeer(node="odd", address="127.0.0.1"),
        ]
        (link,) = await check_links(peers, TOKEN, None)
        assert link.node == "node-1" and 0 < link.latency_ms < 1e4 and link.mb_s > 1
        assert await check_links(peers, bearer_token("other"), None) == ()

    with_node(body)


def test_requests_without_a_valid_token_are_rejected_and_counted() -> None:
    async def body(node: Node) -> None:
        for number, token in enumerate((None, "", "x", TOKEN[:-1], bearer_token("other")), start=1):
            for path in (f"/v1/{JOB}/5", "/link/1", "/etc/passwd"):
                answer = await raw_request(node.server.port, f"GET {path} HTTP/1.1", token=token)
                assert answer.startswith(b"HTTP/1.1 401 ")
            assert node.server.unauthorized == 3 * number
        async with ShardClient(bearer_token("other")) as client:
            with pytest.raises(PeerError, match=r"node-1 .*rejects our token.*secret"):
                await client.manifest(node.source, JOB, 5)

    with_node(body)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (f"GET /v1/{JOB}/5/group-0/../group-0/shard HTTP/1.1", 404),
        (f"GET /v1/{JOB}/5/group-0%2F..%2F..%2Fslot-0 HTTP/1.1", 404),
        (f"GET /v1/{JOB}/5/%2E%2E/slot-0 HTTP/1.1", 404),
        (f"GET /v1/{JOB}/5//etc/passwd HTTP/1.1", 404),
        ("GET /v1/../../etc/passwd HTTP/1.1", 404),
        ("GET /v1/..%2F..%2Fetc/5/passwd HTTP/1.1", 404),
        ("GET /v1/%2E%2E/5 HTTP/1.1", 404),
        (f"GET /v1/{JOB}%00/5 HTTP/1.1", 404),
        (f"GET /v1/{JOB}/-5 HTTP/1.1", 404),
        (f"GET /v1/{JOB}/٥ HTTP/1.1", 400),
        (f"GET /v1/{JOB}/%D9%A5 HTTP/1.1", 404),
        (f"GET /v1/{JOB}/5e0 HTTP/1.1", 404),
        (f"GET /v1/{JOB}/{'5' * 40} HTTP/1.1", 404),
        (f"POST /v1/{JOB}/5 HTTP/1.1", 405),
        ("GET /link/0 HTTP/1.1", 404),
        ("GET /link/-1 HTTP/1.1", 404),
        (f"GET /link/{LINK_TEST_BYTES + 1} HTTP/1.1", 404),
        (f"GET /v1/{JOB}/5/{'x' * 9000} HTTP/1.1", 400),
        (f"GET /v1/{JOB}/5 HTTP/1.1\r\nX-Long: {'x' * 9000}", 400),
        (f"GET /v1/{JOB}/5/{PART} HTTP/1.1\r\nRange: bytes=0-{SIZE}", 416),
        (f"GET /v1/{JOB}/5/{PART} HTTP/1.1\r\nRange: bytes=5-4", 416),
        (f"GET /v1/{JOB}/5/{PART} HTTP/1.1\r\nRange: bytes=-5", 416),
        (f"GET /v1/{JOB}/5/{PART} HTTP/1.1\r\nRange: bytes=0-1,3-4", 416),
        (f"GET /v1/{JOB}/5/{PART} HTTP/1.1\r\nRange: bytes={'9' * 30}-{'9' * 31}", 416),
        (f'GET /v1/{JOB}/5/{PART} HTTP/1.1\r\nIf-Match: "other"', 412),
        ("rubbish", 400),
    ],
)
def test_malicious_paths_ranges_and_headers_get_an_error(line: str, status: int) -> None:
    async def body(node: Node) -> None:
        answer = await raw_request(node.server.port, line)
        assert re.match(rb"HTTP/1\.\d (\d+)", answer), answer[:200]
        assert int(answer.split()[1]) == status
        assert b"root:" not in answer and len(answer) < 2000
        answer = await raw_request(node.server.port, f"GET /v1/{JOB}/5/group-0/small HTTP/1.1")
        assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(SMALL.tobytes())

    with_node(body)


def test_a_symbolic_link_in_place_of_a_job_is_not_followed() -> None:
    async def body(node: Node) -> None:
        write(node.root / "outside", 5, {PART: DATA})
        (node.root / "dots").symlink_to("/etc")
        assert (await raw_request(node.server.port, "GET /v1/dots/5 HTTP/1.1")).startswith(b"HTTP/1.1 404")

    with_node(body)


def test_a_flipped_bit_is_reported_by_the_server_or_found_by_readers_that_verify_blocks() -> None:
    async def body(node: Node) -> None:
        flip(node.root, 5, PART)
        flip(node.root, 5, "group-0/small")
        async with ShardClient(TOKEN) as client:
            found = await client.manifest(node.source, JOB, 5)
            assert found.corrupt == ("group-0/small",)
            for part in found.manifests[0].parts:
                place = PartLocation(source=node.source, job_id=JOB, step=5, part=part)
                with pytest.raises(PeerError, match=r"node-1 .*bytes that differ from what was written"):
                    await fetched(client, place, 0, part.size_bytes)

    with_node(body)


async def flowing(node: Node, before: int) -> None:
    """Return when a large share of a part has been sent, in addition to the bytes sent ``before``."""
    while node.server.rate.acquired_bytes < before + SIZE // 4:  # noqa: ASYNC110  # a stream notifies nobody
        await asyncio.sleep(0.01)


def test_a_snapshot_released_in_mid_stream_is_noticed() -> None:
    """The stream is slow enough for the snapshot to be overwritten meanwhile, as a whole part and as a range
    with a digest.
    """

    async def body(node: Node) -> None:
        async with ShardClient(TOKEN) as client:
            place = await located(client, node.source)
            for size in (SIZE, SIZE - 1):
                before = node.server.rate.acquired_bytes
                fetching = asyncio.ensure_future(fetched(client, place, 0, size))
                await flowing(node, before)
                assert not fetching.done()
                arena = Arena.open(node.root / JOB / "device-0")
                arena.release([5])
                arena.begin(SIZE).view[:] = 0
                arena.close()
                with pytest.raises(PeerError, match="bytes that differ"):
                    await fetching
                with pytest.raises(PeerError, match="does not have this snapshot any more"):
                    await fetched(client, place, 0, size)
                write(node.root, 5, {PART: DATA, "group-0/small": SMALL})

    with_node(body, rate_bytes_s=5e6)


def test_a_range_is_verified_against_what_its_owner_wrote() -> None:
    """A bit that flipped after the manifest was written is located to the block, though the server does not
    know of it.
    """
    data = np.random.default_rng(1).integers(0, 256, 3 * BLOCK_BYTES + 77, dtype=np.uint8)

    async def body(node: Node) -> None:
        write(node.root, 6, {PART: data})
        async with ShardClient(TOKEN, block_bytes=BLOCK_BYTES + 5) as client:
            found = await client.manifest(node.source, JOB, 6)
            place = PartLocation(source=node.source, job_id=JOB, step=6, part=found.manifests[0].part(PART))
            flip(node.root, 6, PART)  # Byte 3, in the first block.
            ends = (BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES + 1, len(data) - 9, len(data))
            for first, end in [(a, b) for a in (BLOCK_BYTES, BLOCK_BYTES + 7) for b in ends if a < b]:
                assert (await fetched(client, place, first, end - first) == data[first:end]).all()
            for first, size in ((0, 100), (900, 50), (BLOCK_BYTES - 1, BLOCK_BYTES), (0, len(data))):
                with pytest.raises(PeerError, match="bytes that differ from what was written"):
                    await fetched(client, place, first, size)

    with_node(body)


def test_a_repeated_step_is_another_snapshot() -> None:
    async def body(node: Node) -> None:
        async with ShardClient(TOKEN) as client:
            place = await located(client, node.source)
            write(node.root, 5, {PART: DATA[::-1].copy()}, generation=2)
            with pytest.raises(PeerError, match="does not have this snapshot any more"):
                await fetched(client, place, 0, 1000)

    with_node(body)


def test_streams_are_bounded_and_clients_wait_for_a_busy_server() -> None:
    async def body(node: Node) -> None:
        async with ShardClient(TOKEN) as one, ShardClient(TOKEN) as two:
            places = [await located(client, node.source) for client in (one, two)]
            slow = asyncio.ensure_future(fetched(one, places[0], 0, SIZE))
            await flowing(node, 0)
            answer = await raw_request(node.server.port, f"GET /v1/{JOB}/5/{PART} HTTP/1.1")
            assert answer.startswith(b"HTTP/1.1 503") and b"Retry-After" in answer
            both = await asyncio.gather(slow, fetched(two, places[1], 0, SIZE))
            assert all((found == DATA).all() for found in both)

    with_node(body, max_streams=1, rate_bytes_s=4e6)


def test_all_streams_share_one_rate_limit() -> None:
    async def body(node: Node) -> None:
        loop = asyncio.get_running_loop()
        async with ShardClient(TOKEN) as one, ShardClient(TOKEN) as two:
            places = [await located(client, node.source) for client in (one, two)]
            began = loop.time()
            await asyncio.gather(*(fetched(c, p, 0, SIZE) for c, p in zip((one, two), places, strict=True)))
            assert loop.time() - began > 0.9 * 2 * SIZE / 2e7

    with_node(body, rate_bytes_s=2e7)


def test_a_reader_that_does_not_read_is_disconnected() -> None:
    async def body(node: Node) -> None:
        write(node.root, 9, {PART: np.zeros(64 << 20, dtype=np.uint8)})
        reader, writer = await asyncio.open_connection("127.0.0.1", node.server.port, limit=1024)
        writer.write(
            f"GET /v1/{JOB}/9/{PART} HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
        )
        await reader.readexactly(100)
        await asyncio.sleep(1.0)
        with contextlib.suppress(ConnectionError):
            rest = 0
            while data := await reader.read(1 << 20):
                rest += len(data)
            assert rest < 64 << 20
        writer.close()
        answer = await raw_request(node.server.port, f"GET /v1/{JOB}/5/group-0/small HTTP/1.1")
        assert answer.startswith(b"HTTP/1.1 200")

    with_node(body, stall_s=0.3, max_streams=1)


def test_silent_connections_are_closed_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_server, "MAX_CONNECTIONS", 3)

    async def body(node: Node) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", node.server.port) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert await raw_request(node.server.port, f"GET /v1/{JOB}/5 HTTP/1.1") == b""
        for reader, writer in silent:
            assert await asyncio.wait_for(reader.read(), 60) == b""
            writer.close()
        while not (  # noqa: ASYNC110  # they are closed one by one
            answer := await raw_request(node.server.port, f"GET /v1/{JOB}/5 HTTP/1.1")
        ):
            await asyncio.sleep(0.02)
        assert answer.startswith(b"HTTP/1.1 200")

    with_node(body, greeting_s=1.5)


# --- untrusted peers ---------------------------------------------------------------------------------

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Behaviour = Callable[[asyncio.StreamWriter, int, int], Awaitable[None]]
"""Function that answers a request for bytes [first, end)."""

FAKE = SnapshotPart(name=PART, offset=0, size_bytes=SIZE, digest=digest_of(DATA))


def head(first: int, end: int, **changed: str) -> bytes:
    lines = {
        "Content-Length": str(end - first),
        "Content-Range": f"bytes {first}-{end - 1}/{SIZE}",
        "X-Ftd-Digest": digest_of(DATA[first:end]),
    } | {name.replace("_", "-"): value for name, value in changed.items()}
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 206 Partial Content\r\n{text}\r\n".encode()


def against(
    behaviour: Behaviour, check: Callable[[ShardClient, PartLocation], Awaitable[None]], stall_s: float = 30.0
) -> list[int]:
    """Run a client against a peer that behaves like this, and return where each of its requests began."""
    asked: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            request = await reader.readuntil(b"\r\n\r\n")
            match = re.search(rb"Range: bytes=(\d+)-(\d+)", request)
            first, end = (int(match[1]), int(match[2]) + 1) if match else (-1, -1)
            asked.append(first)
            await behaviour(writer, first, end)
            await writer.drain()
        writer.close()

    async def main() -> None:
        async with asyncio.timeout(60):
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            source = SnapshotSource(node="node-9", address=address)
            async with ShardClient(TOKEN, stall_s=stall_s) as client:
                await check(client, PartLocation(source=source, job_id=JOB, step=5, part=FAKE))
            server.close()

    asyncio.run(main())
    return asked


def fails(match: str, size: int = SIZE) -> Callable[[ShardClient, PartLocation], Awaitable[None]]:
    async def check(client: ShardClient, place: PartLocation) -> None:
        with pytest.raises(PeerError, match=match) as caught:
            await fetched(client, place, 0, size)
        assert "node-9" in str(caught.value)

    return check


@pytest.mark.parametrize("size", [SIZE, SIZE - 7], ids=["whole", "range"])
def test_a_broken_connection_is_resumed_where_it_stopped(size: int) -> None:
    async def breaks(writer: asyncio.StreamWriter, first: int, end: int) -> None:
        writer.write(head(first, end) + DATA[first : min(end, first + 1_000_000)].tobytes())

    async def check(client: ShardClient, place: PartLocation) -> None:
        assert (await fetched(client, place, 0, size) == DATA[:size]).all()

    asked = against(breaks, check)
    assert asked == sorted(set(asked)) and asked[0] == 0 and len(asked) == 4


def test_a_fragmented_head_and_excess_bytes_change_nothing() -> None:
    async def drops(writer: asyncio.StreamWriter, first: int, end: int) -> None:
        for byte in head(first, end):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(DATA[first:end].tobytes() + b"and more")

    async def check(client: ShardClient, place: PartLocation) -> None:
        memory = np.zeros(SIZE + 8, dtype=np.uint8)
        await client.fetch([RangeRequest(location=place, first=0, into=memory[:SIZE].data)])
        assert (memory[:SIZE] == DATA).all() and not memory[SIZE:].any()

    against(drops, check)


async def garbage(writer: asyncio.StreamWriter, first: int, end: int) -> None:
    writer.write(b"\x00\xff" * 5000)


async def wrong_bytes(writer: asyncio.StreamWriter, first: int, end: int) -> None:
    writer.write(head(first, end) + bytes(end - first))


async def longer(writer: asyncio.StreamWriter, first: int, end: int) -> None:
    writer.write(head(first, end, Content_Length=str(1 << 40)))


async def endless_head(writer: asyncio.StreamWriter, first: int, end: int) -> None:
    writer.write(b"HTTP/1.1 206 Partial Content\r\n" + b"X: y" * 4000)


async def said_twice(writer: asyncio.StreamWriter, first: int, end: int) -> None:
    length = b"Content-Length: 5\r\n"
    writer.write(head(first, end).replace(b"X-Ftd", length + b"X-Ftd") + DATA[first:end].tobytes())


async def other_range(writer: asyncio.StreamWriter, first: int, end: int) -> None:
    writer.write(head(first, end, Content_Range=f"bytes 1-{end}/{SIZE}"))


async def no_length(writer: asyncio.StreamWriter, first: int, end: int) -> None:
    writer.write(b"HTTP/1.1 206 x\r\nTransfer-Encoding: chunked\r\n\r\n")


async def no_digest(writer: asyncio.StreamWriter, first: int, end: int) -> None:
    writer.write(head(first, end, X_Ftd_Digest="maybe") + DATA[first:end].tobytes())


async def elsewhere(writer: asyncio.StreamWriter, first: int, end: int) -> None:
    writer.write(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n")


async def packed(writer: asyncio.StreamWriter, first: int, end: int) -> None:
    writer.write(head(first, end, Content_Encoding="gzip") + bytes(end - first))


async def silence(writer: asyncio.StreamWriter, first: int, end: int) -> None:
    await asyncio.sleep(2)


async def stalls(writer: asyncio.StreamWriter, first: int, end: int) -> None:
    writer.write(head(first, end) + DATA[first : first + 1].tobytes())
    await asyncio.sleep(2)


async def drips(writer: asyncio.StreamWriter, first: int, end: int) -> None:
    writer.write(head(first, end))
    for _ in range(100):
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


async def hangs_up(writer: asyncio.StreamWriter, first: int, end: int) -> None:
    writer.write(head(first, end))


@pytest.mark.parametrize(
    ("behaviour", "size", "says"),
    [
        (garbage, SIZE, "malformed answer"),
        (endless_head, SIZE, "malformed answer"),
        (said_twice, SIZE, "malformed answer.*repeated"),
        (wrong_bytes, SIZE, "bytes that differ from what was written"),
        (wrong_bytes, SIZE - 7, "sent bytes of .* that do not match its digest"),
        (longer, SIZE, "of length 1099511627776"),
        (other_range, SIZE, "answered bytes 0-"),
        (no_length, SIZE, "of length None"),
        (no_digest, SIZE - 7, "no digest"),
        (elsewhere, SIZE, "answered with status 302"),
        (packed, SIZE, "bytes that differ"),
        (silence, SIZE, "6 times"),
        (stalls, SIZE, "6 times"),
        (drips, SIZE, "6 times"),
        (hangs_up, SIZE, "6 times"),
    ],
)
@pytest.mark.long
def test_a_peer_that_breaks_the_contract_is_named(behaviour: Behaviour, size: int, says: str) -> None:
    slow = behaviour in (silence, stalls, drips)
    against(behaviour, fails(says, size), stall_s=0.3 if slow else 30.0)


def test_a_digest_of_several_lines_injects_no_request() -> None:
    async def check(client: ShardClient, place: PartLocation) -> None:
        part = msgspec.structs.replace(FAKE, digest='x"\r\nRange: bytes=0-0\r\nX: "')
        with pytest.raises(PeerError, match=r"node-9 .*in one line"):
            await fetched(client, dataclasses.replace(place, part=part), 0, SIZE)

    assert against(garbage, check) == []


def test_a_malformed_manifest_is_rejected() -> None:
    async def rubbish(writer: asyncio.StreamWriter, first: int, end: int) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabcd")

    async def check(client: ShardClient, place: PartLocation) -> None:
        with pytest.raises(PeerError, match=r"node-9 .*manifest that cannot be used"):
            await client.manifest(place.source, JOB, 5)

    against(rubbish, check)


def test_an_unreachable_node_is_named_in_the_error() -> None:
    async def main() -> None:
        async with ShardClient(TOKEN) as client:
            with pytest.raises(PeerError, match="node-9"):
                await client.manifest(SnapshotSource(node="node-9", address="127.0.0.1:1"), JOB, 5)
            with pytest.raises(PeerError, match="node-9"):
                await client.manifest(SnapshotSource(node="node-9", address="nowhere"), JOB, 5)

    asyncio.run(main())


# --- arenas ------------------------------------------------------------------------------------------


def test_arenas_are_loaded_verified_and_locked() -> None:
    with shared_directory() as root:
        write(root, 5, {PART: DATA})
        write(root, 6, {PART: DATA}, generation=2)
        write(root, 6, {PART: DATA}, generation=2, device=1)
        write(root, 7, {PART: DATA}, generation=2)
        flip(root, 6, PART, device=1)
        (root / JOB / "device-0" / "step-000000000007.json").write_text("half a mani")
        (root / JOB / "staging-3").mkdir()
        arenas, second = NodeArenas(root, devices=2), NodeArenas(root, devices=2)
        arenas.open()
        second.open()
        assert second.scan() == ((), [])
        held, problems = arenas.scan()
        assert held_keys(held) == [(5, 1, ""), (6, 2, "")]
        assert sorted((p.step or 0, p.part) for p in problems) == [(0, "manifest"), (6, PART)]
        assert not (root / JOB / "staging-3").exists()
        second.remove(JOB)
        assert [one.manifest.step for one in arenas.find(JOB, 5)] == [5]
        arenas.remove_others("job-2")
        assert arenas.find(JOB, 5) == () and not (root / JOB).exists()
        arenas.close()
        assert not root.exists()
        root.mkdir()


@pytest.mark.parametrize("leaves", ["before", "in the moment in which the other one locks"])
def test_a_daemon_that_leaves_takes_no_directory_from_its_successor(
    monkeypatch: pytest.MonkeyPatch, leaves: str
) -> None:
    with shared_directory() as root:
        first, second, third = (NodeArenas(root, devices=1) for _ in range(3))
        first.open()
        second.open()
        assert not second.acquire()
        if leaves == "before":
            first.close()
            assert second.size_bytes > 0
        else:
            real = fcntl.flock

            def leaving(*given: Any) -> None:
                monkeypatch.undo()
                first.close()
                real(*given)

            monkeypatch.setattr(fcntl, "flock", leaving)
        assert second.acquire() and second.scan() == ((), [])
        assert (root / "lock").exists() and not third.acquire()
        second.close()
        root.mkdir()


def test_a_limit_beyond_the_memory_is_reported_at_start() -> None:
    with shared_directory() as root:
        arenas = NodeArenas(root, devices=1, limit_bytes=1 << 50)
        with pytest.raises(
            ConfigurationError, match=r"snapshot_limit_mib: .*1073741824 MiB, and .* has \d+ MiB"
        ):
            arenas.open()
        with pytest.raises(ConfigurationError, match="snapshot_dir"):
            NodeArenas(Path("/proc/nothing"), devices=1).open()


@pytest.mark.parametrize("job", ["../x", "a/b", "", ".hidden", "x" * 300, "a\0b"])
def test_a_job_that_cannot_name_a_directory_gets_none(job: str) -> None:
    with shared_directory() as root:
        arenas = NodeArenas(root, devices=1)
        with pytest.raises(ValueError, match="cannot name a directory"):
            arenas.directory(job, 0)
        assert arenas.find(job, 1) == ()
