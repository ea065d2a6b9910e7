"""Copies for a replica peer, on loopback with real arenas: exact bytes, and no trusted peers."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftd.errors import PeerError
from ftd.snapshots.shards import copies as copies_module
from ftd.snapshots.shards.arenas import ArenaSnapshot, NodeArenas
from ftd.snapshots.shards.client import ShardClient
from ftd.snapshots.shards.copy_sender import CopySender
from ftd.snapshots.shards.protocol import STREAM_BYTES, AsyncRateLimiter, bearer_token
from ftd.snapshots.shards.sources import PartLocation, RangeRequest, SnapshotSource
from storage.arena import SLOTS, Arena
from storage.manifest import SnapshotManifest, SnapshotPart, digest_of, encode_record
from tests.helpers.kept_snapshots import JOB, TOKEN, Node, flip, held_keys, shared_directory, write

PART = "group-0/shard"
SIZE = 2 * STREAM_BYTES + 4321
DATA = np.random.default_rng(7).integers(0, 256, SIZE, dtype=np.uint8)
SMALL = np.arange(100, dtype=np.uint8)
PLACE = f"/v1/{JOB}/5/copies/n0/0"

Body = Callable[["Pair"], Coroutine[Any, Any, None]]


class Pair:
    """``n0``, which has a snapshot, and ``n1``, its replica peer."""

    def __init__(self, root: Path, buddy: Node) -> None:
        self.arenas = NodeArenas(root, devices=1)
        self.root, self.buddy = root, buddy

    def write(self, step: int, device: int = 0) -> None:
        """Write the owner's snapshot and release its older ones."""
        arena = Arena.open(self.root / JOB / f"device-{device}")
        arena.release([manifest.step for manifest in arena.snapshots])
        arena.close()
        write(self.root, step, {PART: DATA, "group-0/small": SMALL}, device=device)

    def held(self, step: int) -> tuple[ArenaSnapshot, ...]:
        return self.arenas.find(JOB, step)

    async def send(
        self, step: int = 5, *, token: str = TOKEN, to: SnapshotSource | None = None, **options: Any
    ) -> int:
        rate = AsyncRateLimiter(options.pop("rate_bytes_s", None))
        async with ShardClient(token, stall_s=30.0) as client:
            sender = CopySender(client, self.arenas, owner="n0", rate=rate, stall_s=30.0)
            return await sender.send(self.held(step), to or self.buddy.source)

    async def read(self, step: int = 5) -> bytes:
        """Return what a restore reads of the copy."""
        async with ShardClient(TOKEN) as client:
            found = await client.manifest(self.buddy.source, JOB, step)
            assert not found.corrupt
            part = found.manifests[0].part(PART)
            into = bytearray(part.size_bytes)
            place = PartLocation(source=self.buddy.source, job_id=JOB, step=step, part=part)
            await client.fetch([RangeRequest(location=place, first=0, into=memoryview(into))])
            return bytes(into)

    async def ask(
        self, line: str, body: bytes = b"", headers: str = "", token: str | None = TOKEN
    ) -> tuple[int, str]:
        """Return status and text of the answer to a raw request."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.buddy.server.port)
        authorization = "" if token is None else f"Authorization: Bearer {token}\r\n"
        length = (
            "" if "Content-Length" in headers or "chunked" in headers else f"Content-Length: {len(body)}\r\n"
        )
        head = f"{line} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{authorization}{length}{headers}\r\n"
        writer.write(head.encode() + body)
        try:
            answer = await asyncio.wait_for(reader.read(65536), 60)
        finally:
            writer.close()
        return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2].decode("utf-8", "replace")

    async def offer(self, **changes: Any) -> tuple[int, str]:
        return await self.ask(f"PUT {PLACE}", encode_record(offered(**changes)))


def offered(**changes: Any) -> SnapshotManifest:
    part = SnapshotPart(name=PART, offset=0, size_bytes=SIZE, digest=digest_of(DATA))
    fields: dict[str, Any] = {
        "job_id": JOB,
        "step": 5,
        "generation": 1,
        "slot": 0,
        "parts": (part,),
        "layout": {},
    }
    return SnapshotManifest(**{**fields, "layout": {}, **changes})


def with_pair(body: Body, *, limit_bytes: int | None = None, **options: Any) -> None:
    async def main(root: Path) -> None:
        async with asyncio.timeout(60), Node("n1", root / "n1", limit_bytes=limit_bytes, **options) as buddy:
            buddy.copies.begin(JOB)
            pair = Pair(root / "n0", buddy)
            pair.write(5)
            await body(pair)

    with shared_directory() as root:
        asyncio.run(main(root))


def test_a_copy_equals_its_owners_snapshot_and_is_served_like_an_own_one() -> None:
    async def body(pair: Pair) -> None:
        pair.write(5, device=1)
        assert await pair.send() == 2 * (SIZE + len(SMALL))
        assert held_keys(pair.buddy.copies.held()) == [(5, 1, "n0")]
        assert await pair.read() == DATA.tobytes()
        changes = pair.buddy.changes
        await pair.send()  # A repeated request: nothing is sent twice, and nothing changes.
        assert pair.buddy.changes == changes

    with_pair(body)


def test_the_retained_copy_stays_and_at_most_three_slots_are_used() -> None:
    async def body(pair: Pair) -> None:
        copies = pair.buddy.copies
        for step in range(5, 12):
            pair.write(step)
            await pair.send(step)
            if step == 6:
                assert copies.release_older(JOB, 6) == []
            assert step < 6 or (6, 1, "n0") in held_keys(copies.held())
            assert len(copies.held()) <= SLOTS
        assert [one.step for one in copies.held()] == [6, 10, 11]
        copies.release_older(JOB, 11)
        assert held_keys(copies.held()) == [(11, 1, "n0")]
        with pytest.raises(PeerError, match=r"n1 .*rejects the copy: step 11 is complete everywhere"):
            pair.write(10)
            await pair.send(10)
        [gone] = copies.release_older(JOB, 12)
        assert gone.exists() and copies.held() == () and not pair.buddy.arenas.find(JOB, 11)

    with_pair(body)


def test_a_starting_daemon_loads_its_copies_and_removes_corrupt_ones() -> None:
    async def body(pair: Pair) -> None:
        await pair.send()
        pair.write(6)
        await pair.send(6)
        again = NodeArenas(pair.buddy.root, devices=1)
        again.open()
        held, problems = again.scan()
        assert held_keys(held) == [(5, 1, "n0"), (6, 1, "n0")] and not problems
        (pair.buddy.root / JOB / "device-0").mkdir()
        (pair.buddy.root / JOB / "copy-0-n0").rename(pair.buddy.root / JOB / "device-0" / "x")
        (pair.buddy.root / JOB / "device-0").rename(pair.buddy.root / JOB / "y")
        (pair.buddy.root / JOB / "y" / "x").rename(pair.buddy.root / JOB / "device-0")
        flip(pair.buddy.root, 6, PART)
        (pair.buddy.root / JOB / "device-0").rename(pair.buddy.root / JOB / "copy-0-n0")
        held, [damage] = again.scan()
        assert held_keys(held) == [(5, 1, "n0")] and (damage.step, damage.part) == (6, PART)
        assert again.scan() == (held, [])
        pair.buddy.copies.end()
        pair.buddy.copies.begin(JOB)
        assert pair.buddy.copies.held() == held
        again.close()

    with_pair(body)


def test_a_broken_connection_resumes_where_it_stopped() -> None:
    """The connection is cut after 700,000 bytes, twice."""

    async def body(pair: Pair) -> None:
        passed: list[int] = []
        cuts = 2

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal cuts
            there, back = await asyncio.open_connection("127.0.0.1", pair.buddy.server.port)
            down = asyncio.ensure_future(_pump(there, writer))
            sent = 0
            with contextlib.suppress(OSError):
                while chunk := await reader.read(65536):
                    sent += len(chunk)
                    back.write(chunk)
                    await back.drain()
                    if cuts and sent > 700_000:
                        cuts -= 1
                        break
            passed.append(sent)
            for one in (writer, back):
                one.transport.abort()
            await asyncio.gather(down, return_exceptions=True)

        server = await asyncio.start_server(relay, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        await pair.send(to=SnapshotSource(node="n1", address=f"127.0.0.1:{port}"))
        server.close()
        assert cuts == 0 and await pair.read() == DATA.tobytes()
        assert sum(passed) < SIZE + 2 * 1024 * 1024  # Bytes that were received are not sent again.

    with_pair(body)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(65536):
            writer.write(chunk)
            await writer.drain()


def test_corrupt_bytes_are_sent_once_more_and_then_abandoned() -> None:
    async def body(pair: Pair) -> None:
        flip(pair.root, 5, PART)  # The owner's own memory differs from its manifest.
        with pytest.raises(
            PeerError, match=r"received bytes that differ from what was sent: .*group-0/shard"
        ):
            await pair.send()
        assert pair.buddy.copies.held() == () and not pair.buddy.arenas.find(JOB, 5)

    with_pair(body)


def test_missing_space_is_reported_and_existing_copies_stay() -> None:
    async def body(pair: Pair) -> None:
        await pair.send()
        pair.buddy.copies.release_older(JOB, 5)
        pair.write(6)
        with pytest.raises(PeerError, match=r"n1 .*rejects the copy: n1 cannot hold it: .*limit of 3000000"):
            await pair.send(6)
        assert await pair.read() == DATA.tobytes()

    with_pair(body, limit_bytes=3_000_000)


def test_other_jobs_owners_and_tokens_get_nothing() -> None:
    async def body(pair: Pair) -> None:
        with pytest.raises(PeerError, match="rejects our token"):
            await pair.send(token=bearer_token("other"))
        record = encode_record(offered())
        for token in (None, "x"):
            assert (await pair.ask(f"PUT {PLACE}", record, token=token))[0] == 401
            assert (await pair.ask(f"PUT {PLACE}/{PART}", b"x", token=token))[0] == 401
            assert (await pair.ask(f"POST {PLACE}", token=token))[0] == 401
        other = encode_record(offered(job_id="other"))
        status, says = await pair.ask("PUT /v1/other/5/copies/n0/0", other)
        assert (status, says) == (409, "n1 holds no copies of job 'other' now")
        assert (await pair.ask(f"PUT /v1/{JOB}/5/copies/n1/0", record)) == (409, "n1 is the node itself")
        pair.buddy.copies.end()
        with pytest.raises(PeerError, match="holds no copies of job"):
            await pair.send()
        assert not list(pair.buddy.root.glob("*/copy-*"))

    with_pair(body)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (f"PUT /v1/{JOB}/5/copies/../0", 404),
        (f"PUT /v1/{JOB}/5/copies/%2E%2E%2Fn0/0", 404),
        (f"PUT /v1/{JOB}/5/copies/.hidden/0", 404),
        (f"PUT /v1/{JOB}/5/copies/n0/99999", 404),
        (f"PUT /v1/{JOB}/5/copies/n0/-1", 404),
        (f"PUT /v1/{JOB}/5/copies/n0%00/0", 404),
        (f"PUT /v1/{JOB}/6/copies/n0/0", 400),
        ("PUT /v1/%2E%2E/5/copies/n0/0", 400),
        (f"PUT {PLACE}/group-0/../../slot-0", 409),
        (f"POST {PLACE}", 409),
        (f"DELETE {PLACE}", 405),
        (f"PUT /v1/{JOB}/5/{PART}", 405),
    ],
)
def test_malicious_paths_get_an_error(line: str, status: int) -> None:
    async def body(pair: Pair) -> None:
        assert (await pair.ask(line, encode_record(offered())))[0] == status
        assert {path.name for path in pair.buddy.root.rglob("*")} <= {"lock"}

    with_pair(body)


def part(**changes: Any) -> SnapshotPart:
    fields: dict[str, Any] = {"name": PART, "offset": 0, "size_bytes": SIZE, "digest": "0" * 32}
    return SnapshotPart(**{**fields, **changes})


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ((), "0 parts"),
        ((part(name="../x"),), "not a valid part"),
        ((part(name="x" * 300),), "not a valid part"),
        ((part(digest="zz"),), "not a valid part"),
        ((part(size_bytes=-1),), "inside of another part"),
        ((part(offset=-64),), "inside of another part"),
        ((part(), part(name="b")), "inside of another part"),
        ((part(), part(offset=SIZE)), "same name"),
        ((part(offset=1 << 40),), "impossible offsets"),
        (tuple(part(name=f"p{n}", offset=0, size_bytes=0) for n in range(5000)), "5000 parts"),
        ((part(size_bytes=1 << 50),), "cannot hold it"),
    ],
)
def test_impossible_offers_are_rejected(parts: tuple[SnapshotPart, ...], says: str) -> None:
    async def body(pair: Pair) -> None:
        status, text = await pair.offer(parts=parts)
        assert status in (409, 507) and says in text
        assert pair.buddy.copies.held() == ()

    with_pair(body, limit_bytes=1 << 30)


def test_malformed_and_oversized_offers_are_rejected() -> None:
    async def body(pair: Pair) -> None:
        assert (await pair.ask(f"PUT {PLACE}", b"rubbish"))[0] == 400
        assert (await pair.ask(f"PUT {PLACE}", encode_record(offered())[:-1]))[0] == 400
        assert (await pair.ask(f"PUT {PLACE}", b"x" * 5_000_000))[0] == 413

    with_pair(body)


def test_wrong_lengths_and_offsets_change_nothing() -> None:
    async def body(pair: Pair) -> None:
        assert (await pair.offer())[0] == 200
        place, data = f"PUT {PLACE}/{PART}", DATA.tobytes()
        for content_range, sent, status in (
            (f"bytes 0-{SIZE - 1}/{SIZE + 1}", data, 416),
            (f"bytes 0-{SIZE}/{SIZE}", data, 416),
            (f"bytes 5-4/{SIZE}", data, 416),
            ("", data, 416),
            (f"bytes 0-99/{SIZE}", data[:50], 400),
            (f"bytes 0-49/{SIZE}", data[:100], 400),
            (f"bytes 100-199/{SIZE}", data[:100], 409),
        ):
            header = f"Content-Range: {content_range}\r\n" if content_range else ""
            assert (await pair.ask(place, sent, header))[0] == status, content_range
        chunked = f"Transfer-Encoding: chunked\r\nContent-Range: bytes 0-9/{SIZE}\r\n"
        assert (await pair.ask(place, b"a\r\n0123456789\r\n0\r\n\r\n", chunked))[0] == 411
        assert (await pair.ask(f"PUT {PLACE}/other", b"x", "Content-Range: bytes 0-0/1\r\n"))[0] == 404
        assert (await pair.ask(f"POST {PLACE}")) == (409, f"{PART} is not complete")
        status, text = await pair.offer()
        assert status == 200 and f'"{PART}":0' in text
        status, text = await pair.ask(place, data, f"Content-Range: bytes 0-{SIZE - 1}/{SIZE}\r\n")
        assert status == 200
        assert (await pair.ask(f"POST {PLACE}"))[0] == 204
        assert await pair.read() == data

    with_pair(body)


def test_corrupt_parts_are_not_committed_and_may_be_sent_again() -> None:
    async def body(pair: Pair) -> None:
        await pair.offer()
        wrong = DATA.copy()
        wrong[SIZE // 2] ^= 1
        header = f"Content-Range: bytes 0-{SIZE - 1}/{SIZE}\r\n"
        assert (await pair.ask(f"PUT {PLACE}/{PART}", wrong.tobytes(), header))[0] == 200
        status, text = await pair.ask(f"POST {PLACE}")
        assert status == 422 and PART in text and pair.buddy.copies.held() == ()
        assert (await pair.ask(f"PUT {PLACE}/{PART}", DATA.tobytes(), header))[0] == 200
        assert (await pair.ask(f"POST {PLACE}"))[0] == 204

    with_pair(body)


def test_a_stalled_sender_is_disconnected_and_its_bytes_stay() -> None:
    async def body(pair: Pair) -> None:
        await pair.offer()
        header = f"Content-Length: {SIZE}\r\nContent-Range: bytes 0-{SIZE - 1}/{SIZE}\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", pair.buddy.server.port)
        head = f"PUT {PLACE}/{PART} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n{header}\r\n"
        writer.write(head.encode() + DATA[:1000].tobytes())
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), 60)
        writer.close()
        _, text = await pair.offer()
        assert f'"{PART}":1000' in text
        rest = f"Content-Range: bytes 1000-{SIZE - 1}/{SIZE}\r\n"
        assert (await pair.ask(f"PUT {PLACE}/{PART}", DATA[1000:].tobytes(), rest))[0] == 200
        assert (await pair.ask(f"POST {PLACE}"))[0] == 204

    with_pair(body, stall_s=0.3)


def test_a_copy_whose_verification_takes_longer_than_its_sender_waits_is_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sender asks again, and the verification that is under way answers it."""
    intact, verified = SnapshotPart.is_intact, []

    def slow(part: SnapshotPart, data: Any) -> bool:
        time.sleep(0.5)
        verified.append(part.name)
        return intact(part, data)

    async def body(pair: Pair) -> None:
        monkeypatch.setattr(SnapshotPart, "is_intact", slow)
        async with ShardClient(TOKEN, stall_s=0.4) as client:
            sender = CopySender(client, pair.arenas, owner="n0", rate=AsyncRateLimiter(None), stall_s=30.0)
            await sender.send(pair.held(5), pair.buddy.source)
        assert held_keys(pair.buddy.copies.held()) == [(5, 1, "n0")]
        assert sorted(verified) == [PART, "group-0/small"]

    with_pair(body)


def test_a_newer_offer_replaces_an_older_one_but_not_the_reverse() -> None:
    async def body(pair: Pair) -> None:
        assert (await pair.offer())[0] == 200
        newer = encode_record(offered(step=6))
        assert (await pair.ask(f"PUT /v1/{JOB}/6/copies/n0/0", newer))[0] == 200
        assert (await pair.offer()) == (409, "a copy of step 6 is being received")
        header = f"Content-Range: bytes 0-{SIZE - 1}/{SIZE}\r\n"
        assert (await pair.ask(f"PUT {PLACE}/{PART}", DATA.tobytes(), header))[0] == 409

    with_pair(body)


def test_copies_of_too_many_devices_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(pair: Pair) -> None:
        monkeypatch.setattr(copies_module, "MAX_COPIES", 2)
        statuses = [
            (await pair.ask(f"PUT /v1/{JOB}/5/copies/n0/{device}", encode_record(offered())))[0]
            for device in range(3)
        ]
        assert statuses == [200, 200, 507]

    with_pair(body)


def test_memory_that_is_gone_here_is_not_the_peers_fault() -> None:
    async def body(pair: Pair) -> None:
        held = pair.held(5)
        held[0].slot.unlink()
        async with ShardClient(TOKEN, stall_s=30.0) as client:
            sender = CopySender(client, pair.arenas, owner="n0", rate=AsyncRateLimiter(None), stall_s=30.0)
            with pytest.raises(FileNotFoundError, match=held[0].slot.name):
                await sender.send(held, pair.buddy.source)

    with_pair(body)


def test_a_peer_that_breaks_the_contract_stalls_or_is_gone_is_named() -> None:
    async def body(pair: Pair) -> None:
        async def answers(text: bytes) -> str:
            async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.read(65536)
                writer.write(text)
                await writer.drain()
                if text:
                    writer.close()
                else:
                    await asyncio.sleep(30)

            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            try:
                with pytest.raises(PeerError, match="n1") as caught:
                    await pair.send(to=SnapshotSource(node="n1", address=f"127.0.0.1:{port}"))
            finally:
                server.close()
            return str(caught.value)

        assert "malformed answer" in await answers(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nrubbish")
        assert "holds no copies" in await answers(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n")
        assert "answered with status 302" in await answers(
            b"HTTP/1.1 302 X\r\nLocation: /\r\nContent-Length: 0\r\n\r\n"
        )
        with pytest.raises(PeerError, match=r"n1 .*6 times"):
            await pair.send(to=SnapshotSource(node="n1", address="127.0.0.1:1"))

    with_pair(body)
